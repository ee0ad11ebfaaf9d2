"""A good answer to lab 9: it finds each mutant of the bank (tests/test_course_exercises.py)."""

from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import RequestMetrics, Sequence, SequenceStatus
from nanoserve.tools.fake_executor import FakeExecutor, reference_output

SIZE = 4


def make_sequence(token_ids, seq_id=0, max_tokens=5, salt=None, **params):
    return Sequence(
        seq_id=seq_id,
        request_id=str(seq_id),
        prompt_token_ids=list(token_ids),
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        seed=0,
        metrics=RequestMetrics(0.0, float(seq_id)),
        cache_salt=salt,
    )


def hold(manager, seq, num_tokens=None):
    """Admit a sequence, and compute its tokens."""
    cached = manager.get_cached_blocks(seq)
    manager.allocate(seq, cached)
    compute(manager, seq, seq.num_tokens - seq.num_computed_tokens)
    return cached


def compute(manager, seq, number):
    result = manager.append(seq, number)
    seq.num_computed_tokens += number
    manager.check()
    return result


class Engine:
    def __init__(self, num_blocks=64, budget=64, **options):
        options = {"max_num_seqs": 8, "max_model_len": num_blocks * SIZE, **options}
        config = EngineConfig(
            num_gpu_blocks_override=num_blocks,
            block_size=SIZE,
            max_num_batched_tokens=budget,
            **options,
        )
        self.executor = FakeExecutor(config)
        self.manager = BlockManager(num_blocks, SIZE, True, self.executor.num_cpu_blocks)
        self.scheduler = Scheduler(config, self.manager)
        self.seqs = []
        self.outputs = {}

    def add(self, num_prompt, max_tokens, first=None, forks=0):
        number = len(self.seqs)
        first = 100 * number if first is None else first
        seq = make_sequence(range(first, first + num_prompt), number * 10, max_tokens)
        seq.num_pending_forks = forks
        self.seqs.append(seq)
        self.scheduler.add(seq)
        return seq

    def step(self):
        """sequence -> its tokens in a step."""
        step = self.scheduler.schedule()
        assert sum(i.num_scheduled_tokens for i in step.scheduled) <= self.scheduler.token_budget
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs
        assert step.scheduled, "nobody runs"
        output = self.executor.execute_model(step)
        for update in self.scheduler.update_from_output(step, output):
            seq = update.sequence
            self.outputs[seq.seq_id] = seq.output_token_ids
        self.manager.check()
        self.last = step
        return {item.seq_id // 10: item.num_scheduled_tokens for item in step.scheduled}

    def finish(self):
        for _ in range(2000):
            if not self.scheduler.has_unfinished():
                break
            self.step()
        for seq in self.seqs:
            right = reference_output(seq.prompt_token_ids, seq.max_tokens)
            assert self.outputs[seq.seq_id] == right
        assert self.manager.num_free_blocks == self.manager.num_blocks
        assert self.manager.cpu_pool.num_free_blocks == self.manager.num_cpu_blocks
        return sum(seq.metrics.num_preemptions for seq in self.seqs)


# -- blocks --


def test_blocks_are_rounded_up():
    manager = BlockManager(8, SIZE)
    assert [manager.num_blocks_for(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_pool():
    manager = BlockManager(4, SIZE)
    pool = manager.pool
    assert pool.allocate() == 0
    assert pool.ref_counts[0] == 1
    pool.share(0)
    assert pool.ref_counts[0] == 2
    pool.free(0)
    assert 0 not in pool.free_queue
    pool.free(0)
    assert list(pool.free_queue) == [0, 1, 2, 3]
    pool.share(2)
    assert 2 not in pool.free_queue


def test_the_least_recently_used_block_is_evicted_and_forgotten():
    manager = BlockManager(3, SIZE)
    seqs = [make_sequence(range(10 * i, 10 * i + 4), i) for i in range(3)]
    for seq in seqs:
        hold(manager, seq)
    for seq in seqs:
        manager.free(seq)
    manager.check()
    assert list(manager.pool.free_queue) == [0, 1, 2]
    other = make_sequence(range(90, 94), 9)
    hold(manager, other)
    assert manager.block_tables[9] == [0]
    assert manager.get_cached_blocks(make_sequence(range(5), 10)) == []
    assert manager.get_cached_blocks(make_sequence(range(10, 15), 11)) == [1]


def test_a_block_that_nobody_finds_goes_first():
    manager = BlockManager(4, SIZE)
    seq = make_sequence(range(6))
    hold(manager, seq)
    manager.free(seq)
    assert list(manager.pool.free_queue) == [1, 2, 3, 0]


def test_the_tail_is_reused_before_the_head():
    manager = BlockManager(4, SIZE)
    seq = make_sequence(range(16))
    hold(manager, seq)
    manager.free(seq)
    assert list(manager.pool.free_queue) == [3, 2, 1, 0]


def test_can_append():
    manager = BlockManager(3, SIZE)
    seq = make_sequence(range(4))
    hold(manager, seq)
    assert manager.can_append(seq, 8)
    assert not manager.can_append(seq, 9)
    parent = make_sequence(range(20, 26), 1)
    hold(manager, parent)
    child = make_sequence(range(20, 26), 2)
    manager.fork(parent, child)
    assert not manager.can_append(child, 1), "the copy needs a block"


# -- prefix cache --


def test_what_is_found():
    manager = BlockManager(16, SIZE)
    seq = make_sequence(range(14))
    hold(manager, seq)
    tables = manager.block_tables[0]
    assert manager.get_cached_blocks(make_sequence(range(14), 1)) == tables[:3]
    assert manager.get_cached_blocks(make_sequence(range(12), 1)) == tables[:2]
    assert manager.get_cached_blocks(make_sequence(range(8), 1)) == tables[:1]
    assert manager.get_cached_blocks(make_sequence([9, *range(1, 14)], 1)) == []
    middle = [*range(4), 77, *range(5, 14)]
    assert manager.get_cached_blocks(make_sequence(middle, 1)) == tables[:1]
    assert manager.get_cached_blocks(make_sequence(range(14), 1, salt="s")) == []
    assert manager.get_cached_blocks(make_sequence(range(14), 1, prompt_logprobs=1)) == []


def test_a_miss_ends_the_search():
    manager = BlockManager(3, SIZE)
    seq = make_sequence(range(12))
    hold(manager, seq)
    manager.free(seq)
    manager.pool.uncache(0)
    assert manager.get_cached_blocks(make_sequence(range(13), 1)) == []


def test_each_block_counts_its_whole_beginning():
    manager = BlockManager(16, SIZE)
    same = [1, 2, 3, 4]
    hold(manager, make_sequence([*same, *same, *same, *same]))
    hold(manager, make_sequence([5, 6, 7, 8, *same, 5, 6, 7, 8, *same, 0], 1))
    other = make_sequence([5, 6, 7, 8, *same, *same, *same, 0], 2)
    assert len(manager.get_cached_blocks(other)) == 2
    other = make_sequence([5, 6, 7, 8, *same, 9, 9, 9, 9, *same, 0], 3)
    hold(manager, other)
    assert other.num_computed_tokens == 17
    last = make_sequence([5, 6, 7, 8, 0, 0, 0, 0, 5, 6, 7, 8, *same, 0], 4)
    assert len(manager.get_cached_blocks(last)) == 1


def test_the_first_of_two_equal_blocks_is_the_cached_one():
    manager = BlockManager(8, SIZE)
    first, second = make_sequence(range(4)), make_sequence(range(4), 1)
    for seq in (first, second):
        manager.allocate(seq, [])
        compute(manager, seq, 4)
    assert manager.get_cached_blocks(make_sequence(range(5), 2)) == [0]
    manager.free(second)
    manager.check()
    assert manager.get_cached_blocks(make_sequence(range(5), 2)) == [0]


def test_can_allocate():
    manager = BlockManager(4, SIZE)
    first = make_sequence(range(8))
    hold(manager, first)
    other = make_sequence(range(13), 1)
    cached = manager.get_cached_blocks(other)
    assert len(cached) == 2
    assert manager.can_allocate(other, cached), "two are shared, two are free"
    manager.free(first)
    longer = make_sequence(range(17), 2)
    assert not manager.can_allocate(longer, cached), "five blocks, four free ones"
    assert manager.can_allocate(other, cached)


def test_which_blocks_are_cached():
    manager = BlockManager(8, SIZE)
    seq = make_sequence(range(10))
    manager.allocate(seq, [])
    compute(manager, seq, 6)
    assert len(manager.pool.cached_blocks) == 1, "the second block is not full"
    compute(manager, seq, 4)
    assert len(manager.pool.cached_blocks) == 2
    whole = make_sequence(range(50, 62), 1)
    hold(manager, whole)
    assert len(manager.pool.cached_blocks) == 5


# -- forks and swaps --


def test_a_fork_shares_and_copies_before_it_writes():
    manager = BlockManager(8, SIZE, num_cpu_blocks=8)
    parent, child = make_sequence(range(6)), make_sequence(range(6), 1)
    hold(manager, parent)
    manager.fork(parent, child)
    manager.check()
    assert manager.pool.ref_counts[:2] == [2, 2]
    child.token_ids.append(9)
    compute(manager, child, 1)
    assert manager.block_tables == {0: [0, 1], 1: [0, 2]}
    assert manager.take_copies().copy_on_write == ((1, 2),)


def test_a_full_block_is_not_copied():
    manager = BlockManager(8, SIZE)
    parent, child = make_sequence(range(8)), make_sequence(range(8), 1)
    hold(manager, parent)
    manager.fork(parent, child)
    child.token_ids.append(9)
    compute(manager, child, 1)
    assert manager.take_copies().copy_on_write == ()


def test_swap_out_and_in():
    manager = BlockManager(4, SIZE, num_cpu_blocks=4)
    seq, other = make_sequence(range(8)), make_sequence(range(50, 54), 1)
    hold(manager, other)
    hold(manager, seq)
    manager.swap_out(seq)
    manager.check()
    assert manager.num_free_blocks == 3
    assert manager.take_copies().swap_out == ((1, 0), (2, 1))
    manager.swap_in(seq)
    manager.check()
    copies = manager.take_copies().swap_in
    assert [pair[0] for pair in copies] == [0, 1]
    assert [pair[1] for pair in copies] == manager.block_tables[0]
    manager.swap_out(seq)
    manager.free(seq)
    assert manager.cpu_pool.num_free_blocks == 4


# -- the scheduler --


def test_decodes_come_first_and_chunks_leave_them_a_token():
    engine = Engine(budget=8, long_prefill_token_threshold=6)
    engine.add(30, 4)
    engine.add(1, 9)
    engine.add(1, 9)
    assert engine.step() == {0: 6, 1: 1, 2: 1}
    assert engine.step() == {0: 6, 1: 1, 2: 1}
    engine.scheduler.max_chunk = 64
    assert engine.step() == {0: 6, 1: 1, 2: 1}
    assert engine.finish() == 0


def test_the_chunk_limit():
    engine = Engine(budget=64, long_prefill_token_threshold=5)
    engine.add(23, 3)
    assert [engine.step()[0] for _ in range(6)] == [5, 5, 5, 5, 3, 1]


def test_the_budget_is_shared():
    engine = Engine(budget=10)
    engine.add(4, 3)
    engine.add(20, 3)
    engine.add(20, 3)
    assert engine.step() == {0: 4, 1: 6}
    assert engine.step() == {0: 1, 1: 9}
    engine.finish()


def test_prompts_run_whole_without_chunks():
    engine = Engine(budget=32, max_model_len=32, enable_chunked_prefill=False)
    engine.add(20, 3)
    engine.add(20, 3)
    assert engine.step() == {0: 20}
    engine.finish()


def test_max_num_seqs():
    engine = Engine(max_num_seqs=2)
    for _ in range(3):
        engine.add(4, 3)
    assert sorted(engine.step()) == [0, 1]
    engine.finish()


def test_branches_need_places():
    engine = Engine(max_num_seqs=4)
    engine.add(4, 3, forks=2)
    engine.add(4, 3)
    engine.add(4, 3)
    assert sorted(engine.step()) == [0, 1]


def test_what_is_cached_is_not_computed():
    engine = Engine()
    engine.add(10, 3, first=1)
    engine.step()
    seq = engine.add(14, 3, first=1)
    assert engine.step()[1] == 6
    assert seq.num_cached_tokens == 8
    engine.finish()


def test_who_does_not_fit_blocks_those_behind():
    engine = Engine(num_blocks=8)
    engine.add(16, 3)
    engine.step()
    engine.add(24, 3)
    engine.add(2, 2)
    assert sorted(engine.step()) == [0]
    assert sorted(seq.seq_id for seq in engine.scheduler.waiting) == [10, 20]
    engine.finish()


def test_who_is_not_ready_blocks_nobody():
    engine = Engine()
    held = engine.add(4, 3)
    held.is_held = True
    engine.add(4, 3)
    assert sorted(engine.step()) == [1]
    held.is_held = False
    engine.finish()


def test_a_token_comes_only_behind_the_last_chunk():
    engine = Engine(budget=8)
    seq = engine.add(20, 3)
    engine.scheduler.schedule()
    assert seq.num_output_placeholders == 0


def test_a_sequence_is_sent_once():
    engine = Engine()
    engine.add(4, 4)
    engine.step()
    assert len(engine.last.new_sequences) == 1
    engine.step()
    assert len(engine.last.new_sequences) == 0
    engine.finish()


def test_the_latest_gives_way_and_comes_back_in_order():
    engine = Engine(num_blocks=6)
    for _ in range(3):
        engine.add(6, 12)
    while not any(seq.metrics.num_preemptions for seq in engine.seqs):
        engine.step()
    assert [seq.metrics.num_preemptions for seq in engine.seqs] == [0, 0, 1]
    assert engine.seqs[2].num_computed_tokens == 0
    assert engine.finish() > 0


def test_a_preempted_sequence():
    engine = Engine(num_blocks=8, max_num_seqs=1)
    seq = engine.add(10, 5)
    engine.step()
    engine.add(4, 3)
    engine.add(4, 3)
    engine.scheduler.preempt(seq)
    assert engine.manager.num_free_blocks == 8
    assert seq.num_computed_tokens == 0
    assert seq.status is SequenceStatus.WAITING
    assert [each.seq_id for each in engine.scheduler.waiting] == [0, 10, 20]
    step = engine.scheduler.schedule()
    assert step.finished_seq_ids == (0,)
    assert [new.seq_id for new in step.new_sequences] == [0]


def test_few_blocks_give_the_same_tokens():
    for mode in ("recompute", "swap"):
        for budget in (8, 64):
            engine = Engine(num_blocks=10, budget=budget, preemption_mode=mode)
            for number in range(8):
                engine.add(5 + 3 * number % 7, 9, first=number % 3)
            assert engine.finish() > 0
