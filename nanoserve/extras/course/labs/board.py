"""A scheduler, a block manager and the fake model, for the behaviours of labs 3 and 4.

    board = Board(num_blocks=8, block_size=4)
    board.add(10, 5)          request "A": 10 prompt tokens, 5 to make
    board.step(3)             three steps
    board.show()              the lists and the block map, behind a sentence

The fake model reads its next token back out of the KV cache, so a wrong block is a wrong token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig
from nanoserve.extras.course.labs.helpers import audit, make_sequence, show
from nanoserve.extras.course.spec import Wrong, must
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import SchedulerOutput, Sequence
from nanoserve.tools.fake_executor import FakeExecutor, reference_output

MOST_STEPS = 5000


class Board:
    """The control plane, step by step."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        budget: int = 64,
        **options: Any,
    ) -> None:
        config = EngineConfig(
            num_gpu_blocks_override=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            **{"max_model_len": num_blocks * block_size, **options},
        )
        self.config = config
        self.executor = FakeExecutor(config)
        cpu_blocks = self.executor.num_cpu_blocks
        self.manager = BlockManager(num_blocks, block_size, True, cpu_blocks)
        self.scheduler = Scheduler(config, self.manager)
        self.all: list[Sequence] = []
        self.outputs: dict[int, list[int]] = {}

    def add(self, num_prompt_tokens: int, max_tokens: int, first: int | None = None) -> Sequence:
        """Queue a request with a prompt of its own; its name is the next letter. first: what its
        prompt counts up from (equal numbers: equal beginnings)."""
        number = len(self.all)
        start = 100 * number if first is None else first
        tokens = range(start, start + num_prompt_tokens)
        seq = make_sequence(tokens, seq_id=number, max_tokens=max_tokens)
        seq.request_id = chr(ord("A") + number % 26)
        seq.metrics.queued_ts = float(number)
        self.all.append(seq)
        self.scheduler.add(seq)
        return seq

    def step(self, number: int = 1) -> SchedulerOutput:
        """Run some steps. Returns what the last one scheduled."""
        for _ in range(number):
            step = self.scheduler.schedule()
            self.check_step(step)
            if step.is_empty:
                return step
            output = self.executor.execute_model(step)
            for update in self.scheduler.update_from_output(step, output):
                seq = update.sequence
                self.outputs[seq.seq_id] = seq.output_token_ids
        return step

    def check_step(self, step: SchedulerOutput) -> None:
        """What every step has to keep."""
        total = sum(item.num_scheduled_tokens for item in step.scheduled)
        budget = self.scheduler.token_budget
        must(total <= budget, f"the step has {total} tokens, the budget is {budget}" + self.show())
        number, most = len(self.scheduler.running), self.scheduler.max_num_seqs
        must(number <= most, f"{number} sequences run, max_num_seqs is {most}" + self.show())

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Step until something has happened."""
        for _ in range(MOST_STEPS):
            if is_done():
                return
            must(not self.step().is_empty, "nobody was scheduled, and requests wait" + self.show())
        raise Wrong(f"after {MOST_STEPS} steps it still has not happened" + self.show())

    def finish(self) -> None:
        """Run until all have ended; then compare every token with the right one."""
        self.run_until(lambda: not self.scheduler.has_unfinished())
        for seq in self.all:
            right = reference_output(seq.prompt_token_ids, seq.max_tokens)
            got = self.outputs.get(seq.seq_id)
            must(
                got == right,
                f"request {seq.request_id} ({seq.num_prompt_tokens} prompt tokens) gave {got}, "
                f"and should have given {right}: it read a wrong block, or missed a token",
            )
        free, number = self.manager.num_free_blocks, self.manager.num_blocks
        must(free == number, f"all have ended, and {free} of {number} blocks are free")

    def num_scheduled(self, step: SchedulerOutput) -> dict[str, int]:
        """request -> its tokens in a step."""
        names = {seq.seq_id: seq.request_id for seq in self.all}
        return {names[item.seq_id]: item.num_scheduled_tokens for item in step.scheduled}

    def show(self) -> str:
        """The lists and the block map."""
        lists = {
            name: " ".join(seq.request_id for seq in getattr(self.scheduler, name)) or "-"
            for name in ("running", "waiting", "swapped")
        }
        lines = [f"\n  {name}: {text}" for name, text in lists.items()]
        return "".join(lines) + show(self.manager)

    @classmethod
    def try_random(cls, seed: int, num_rounds: int = 12, **options: Any) -> None:
        """Random requests in random settings: the right tokens, and no block lost."""
        rng = random.Random(seed)
        for _ in range(num_rounds):
            settings = {
                "block_size": rng.choice([1, 2, 4]),
                "num_blocks": 60,
                "max_num_seqs": rng.randint(1, 6),
                "budget": rng.choice([4, 8, 64]),
                "long_prefill_token_threshold": rng.choice([0, 3]),
                **options,
            }
            settings["budget"] = max(settings["budget"], settings["max_num_seqs"])
            board = cls(**settings)
            longest = board.config.num_gpu_blocks_override * settings["block_size"]
            for _ in range(rng.randint(1, 8)):
                length = rng.randint(1, min(16, longest - 1))
                most = rng.randint(1, min(8, longest - length))
                board.add(length, most, first=rng.choice([0, 0, None]))
                if rng.random() < 0.4:
                    board.step(rng.randint(1, 3))
                    audit(board.manager)
            try:
                board.finish()
                audit(board.manager)
            except Wrong as error:
                raise Wrong(f"{error}\nSettings: {settings}") from None
