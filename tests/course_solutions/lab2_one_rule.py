from nanoserve.scheduler import Scheduler


class MyScheduler(Scheduler):
    def first_chunk(self, num_uncomputed, step):
        number = min(num_uncomputed, self.max_chunk, step.budget)
        if number < num_uncomputed and not self.config.enable_chunked_prefill:
            return 0
        return number

    def preempt_until_fits(self, seq, num_tokens):
        while not self.block_manager.can_append_slots(seq, num_tokens):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def schedule_running(self, step):
        before = len(self.running)
        for number, seq in enumerate(self.running):
            behind = len(self.running) - number - 1
            num_tokens = min(seq.num_uncomputed_tokens, self.max_chunk, step.budget - behind)
            if not self.preempt_until_fits(seq, num_tokens):
                break
            self.schedule_tokens(seq, num_tokens, step)
        return len(self.running) == before

    def admit(self, seq, step):
        cached = self.block_manager.get_computed_blocks(seq)
        num_cached = len(cached) * self.block_manager.block_size
        num_tokens = self.first_chunk(seq.num_tokens - num_cached, step)
        if not num_tokens or not self.has_seq_slot(seq):
            return False
        if not self.block_manager.can_allocate(seq, cached):
            return False
        self.waiting.remove(seq)
        self.block_manager.allocate(seq, cached)
        if seq.num_output_tokens == 0:
            seq.num_cached_tokens = num_cached
        self.start_running(seq)
        self.schedule_tokens(seq, num_tokens, step)
        return True

    def schedule_waiting(self, step):
        for seq in list(self.waiting):
            if step.budget == 0:
                break
            if self.is_ready(seq) and not self.admit(seq, step):
                break


class MyPolicy(Scheduler):
    def urgency(self, seq):
        return (seq.metrics.queued_ts + 0.003 * seq.num_prompt_tokens, seq.seq_id)
