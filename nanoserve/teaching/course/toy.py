"""How does one try a scheduler and a block manager without a model?

ToyEngine has the engine's control plane, and in the place of the model a fixed function of tokens.
The function reads the tokens where a model reads keys and values: in the slots of the KV cache,
through the block table. So a wrong block is a wrong token:

    toy = ToyEngine(num_blocks=8)
    toy.add("A", "abcde", max_tokens=3)      (or token ids; a letter is a token)
    toy.step()                     {"A": 5}: who ran, with how many tokens
    toy.run()                      {"A": "VSG"}: all steps; the answers by name
    right_answer("abcde", 3)       the same, from no cache at all

What is stored for a token depends on every token before it, as with keys and values.

Left out: swapping, branches (n > 1), overlapped steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import ModelOutput, RequestMetrics, SampledToken, Sequence

MOST_STEPS = 2000


def ids_of(prompt: str | Iterable[int]) -> list[int]:
    return [ord(each) for each in prompt] if isinstance(prompt, str) else list(prompt)


def text_of(token_ids: Iterable[int]) -> str:
    return "".join(map(chr, token_ids))


def make_sequence(prompt: str | Iterable[int], seq_id: int = 0, max_tokens: int = 4) -> Sequence:
    """A request that waits; its name is A, B, ... by its seq_id."""
    metrics, params, name = RequestMetrics(0.0), SamplingParams(), chr(ord("A") + seq_id % 26)
    return Sequence(seq_id, name, ids_of(prompt), params, max_tokens, frozenset(), 0, metrics)


def mix(left: int, right: int) -> int:
    return (left * 1_000_003 + right + 12_345) % (2**61 - 1)


def next_token(values: Iterable[int]) -> int:
    """The token that follows, given what the slots of the sequence hold."""
    value = 0
    for each in values:
        value = mix(value, each)
    return ord("A") + value % 26


def right_answer(prompt: str | Iterable[int], max_tokens: int) -> str:
    """The output of a request that runs alone, without blocks and without a cache."""
    tokens = ids_of(prompt)
    start = len(tokens)
    for _ in range(max_tokens):
        tokens.append(next_token([*accumulate(tokens, mix, initial=7)][1:]))
    return text_of(tokens[start:])


class ToyEngine:
    """A scheduler, a block manager, and a function in the place of the model."""

    def __init__(
        self,
        scheduler_cls: type[Scheduler] = Scheduler,
        block_manager_cls: type[BlockManager] = BlockManager,
        num_blocks: int = 32,
        **options: Any,
    ) -> None:
        """`options` are those of LLM. Without any: blocks of 4 tokens, 8 sequences, 16 tokens a
        step."""
        small = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16}
        self.config = EngineConfig(**{**small, "max_model_len": 256, **options})
        size, caching = self.config.block_size, self.config.enable_prefix_caching
        self.block_manager = block_manager_cls(num_blocks, size, caching)
        self.scheduler = scheduler_cls(self.config, self.block_manager)
        # What each slot of the KV cache holds: a token, and a number made of it and all before it.
        self.contents: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}  # the runner's copy of the block tables
        self.sequences: dict[str, Sequence] = {}  # all that were ever added

    def add(
        self, name: str, prompt: str | Iterable[int], max_tokens: int = 4, now: float | None = None
    ) -> Sequence:
        """Queue a request; `now`, in seconds, is when it comes."""
        seq = make_sequence(prompt, len(self.sequences), max_tokens)
        seq.request_id = name
        seq.metrics.queued_ts = time.monotonic() if now is None else now
        self.sequences[name] = seq
        self.scheduler.add(seq)
        return seq

    def step(self) -> dict[str, int]:
        """Run one step. Raises AssertionError if nothing was scheduled, though requests wait."""
        step, known = self.scheduler.schedule(), self.scheduler.sequences
        names = {seq_id: seq.request_id for seq_id, seq in known.items()}
        assert step.scheduled or not known, f"no step comes, and {[*names.values()]} have not ended"
        for seq_id in step.dropped_seq_ids:
            self.tables.pop(seq_id, None)
        for new in step.new_sequences:
            self.tables[new.seq_id] = list(new.block_ids)
        output, parts = ModelOutput(), []
        for item in step.scheduled:
            end = item.num_computed_tokens + item.num_scheduled_tokens
            name, number = names[item.seq_id], known[item.seq_id].num_tokens
            assert end <= number, f"{name} has {number} tokens, and the step computes {end} of them"
            table = self.tables[item.seq_id]
            table[item.first_new_block :] = item.new_block_ids or table[item.first_new_block :]
            slots = [self.slot(table, position) for position in range(end)]
            parts.append((item, slots))
            for position in range(item.num_computed_tokens, end):
                self.contents[slots[position]] = known[item.seq_id].token_ids[position]
        for item, slots in parts:  # two requests of one step may share a block
            tokens = [self.contents.get(slot, 0) for slot in slots]
            values = [*accumulate(tokens, mix, initial=7)][1:]
            for position in range(item.num_computed_tokens, len(slots)):
                self.slots[slots[position]] = values[position]
        for item, slots in parts:
            if len(slots) == known[item.seq_id].num_tokens:
                token = next_token(self.slots.get(slot, 0) for slot in slots)
                output.sampled[item.seq_id] = [SampledToken(token)]
        self.scheduler.update_from_output(step, output)
        return {names[item.seq_id]: item.num_scheduled_tokens for item in step.scheduled}

    def slot(self, table: list[int], position: int) -> int:
        block, offset = divmod(position, self.config.block_size)
        assert block < len(table), f"token {position} has no block: the block table is {table}"
        return table[block] * self.config.block_size + offset

    def run(self) -> dict[str, str]:
        """All steps; the outputs by name."""
        for _ in range(MOST_STEPS):
            if not self.scheduler.sequences:
                return self.answers
            self.step()
        left = [seq.request_id for seq in self.scheduler.sequences.values()]
        raise AssertionError(f"after {MOST_STEPS} steps {left} have not ended")

    @property
    def answers(self) -> dict[str, str]:
        found = self.sequences.items()
        return {name: text_of(seq.token_ids[seq.num_prompt_tokens :]) for name, seq in found}
