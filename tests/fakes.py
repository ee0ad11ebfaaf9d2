"""A model without weights that reads its next token out of its KV blocks.

FakeRunner stands in the place of ModelRunner. The next token is a fixed function of a sequence's
tokens, but the runner never applies it to the tokens that it was given: it stores them slot by
slot, reads them back through the block table, and decides from what it read. Layer 0 of a slot
holds a token; layer 1 a digest of layer 0 up to there. So a wrong block is a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from nanoserve import EngineConfig
from nanoserve.model_runner import ModelRunner
from nanoserve.sequence import (
    BlockPair,
    ModelOutput,
    NewSequence,
    RequestError,
    SampledToken,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
    TokenLogprobs,
)

TOKENS = (2, *range(400, 419))  # the fake model says nothing else; 2 ends a text
Layer = dict[int, int | None]  # slot -> value


class Planted(RuntimeError):
    """A fault that a test planted."""


def digests_of(tokens: Iterable[int | None]) -> list[int]:
    return [*accumulate(tokens, lambda digest, token: hash((digest, token)), initial=7)][1:]


def choose(root: Sequence | NewSequence, branch: int, digests: list[int], output: list[int]) -> int:
    """The next token: the first one in a random order that is allowed."""
    first = hash((*digests, root.seed, branch))
    for number in range(len(TOKENS)):
        token = TOKENS[(first + number) % len(TOKENS)]
        ended = [*output, token]
        is_bad = any(tuple(ended[-len(word) :]) == word for word in root.bad_word_ids)
        is_early = len(output) < root.sampling_params.min_tokens and token in root.stop_token_ids
        if not is_bad and not is_early:
            return token
    return TOKENS[first % len(TOKENS)]


def reference(root: Sequence, branch: int, tokenizer: Any) -> tuple[list[int], str, str]:
    """(token ids, text, finish reason) of one completion that runs alone, without any cache."""
    params, output, text = root.sampling_params, [], ""
    is_kept = params.include_stop_str_in_output
    while len(output) < root.max_tokens:
        digests = digests_of(root.prompt_token_ids + output)
        output.append(choose(root, branch, digests, output))
        before, now = text, tokenizer.decode(output, skip_special_tokens=True)
        if output[-1] in root.stop_token_ids:
            return output, now if is_kept else before, "stop"
        text = now
        for stop in params.stop or ():  # is complete with this token
            place = text.find(stop, max(0, len(before) - len(stop) + 1))
            if len(output) > params.min_tokens and place >= 0:
                return output, text[: place + len(stop) * is_kept], "stop"
    return output, text, "length"


class Row:
    """What the runner knows of a sequence."""

    def __init__(self, new: NewSequence) -> None:
        self.new, self.tokens = new, list(new.token_ids)
        self.blocks, self.num_samples = list(new.block_ids), new.num_samples
        self.num_unread = 0  # its tokens that the control plane does not know


class FakeRunner(ModelRunner):
    """Everything it knows comes from SchedulerOutputs. It checks what a real runner relies on."""

    def __init__(self, config: EngineConfig, model_config: Any) -> None:
        self.config, self.size = config, config.block_size
        self.num_kv_blocks = config.num_gpu_blocks_override or 64
        self.num_cpu_blocks = (config.num_cpu_blocks or self.num_kv_blocks) * config.has_cpu_blocks
        self.device, self.model = SimpleNamespace(type="none"), SimpleNamespace(num_bytes=int)
        self.kv: list[Layer] = [{}, {}]
        self.cpu: list[Layer] = [{}, {}]
        self.rows: dict[int, Row] = {}
        self.unread: list[SchedulerOutput] = []
        self.faults: list[str] = []  # where to fail next
        self.hooks: list[Callable[[], object]] = []  # what happens elsewhere during the next step

    def launch(self, step: SchedulerOutput) -> Callable[[], ModelOutput]:
        assert step.scheduled, "an empty step was launched"
        if step.is_restart:
            self.rows.clear()
            self.unread.clear()
        assert len(self.unread) <= self.config.async_scheduling, "too many steps in flight"
        assert not any(each.needs_sync for each in self.unread), "launched too early"
        while self.hooks:
            self.hooks.pop()()
        self.copy(self.kv, self.cpu, step.blocks_to_swap_out)
        self.copy(self.cpu, self.kv, step.blocks_to_swap_in)
        self.copy(self.kv, self.kv, step.blocks_to_copy)
        self.update_batch(step)
        for seq_id in step.dropped_seq_ids:
            del self.rows[seq_id]
        for new in step.new_sequences:
            assert new.seq_id not in self.rows, "announced twice"
            self.rows[new.seq_id] = Row(new)
        assert len(self.rows) <= self.config.max_num_seqs
        assert len({item.seq_id for item in step.scheduled}) == len(step.scheduled)
        ends = [item.num_computed_tokens + item.num_scheduled_tokens for item in step.scheduled]
        for item, end in zip(step.scheduled, ends, strict=True):
            row = self.rows[item.seq_id]
            if item.new_block_ids:
                assert item.first_new_block <= len(row.blocks), "a hole in the block table"
                row.blocks[item.first_new_block :] = item.new_block_ids
            assert len(row.blocks) == -(-end // self.size), "too few blocks, or too many"
            for position in range(item.num_computed_tokens, end):
                self.kv[0][self.slot(row, position)] = row.tokens[position]
            if end > (row.new.sampling_params.extra_args or {}).get("poison", end):
                raise Planted("this position always fails")
        self.fail("launch")
        for item, end in zip(step.scheduled, ends, strict=True):
            row = self.rows[item.seq_id]
            digests = digests_of(self.kv[0][self.slot(row, i)] for i in range(end))
            for position in range(item.num_computed_tokens, end):
                self.kv[1][self.slot(row, position)] = digests[position]
        output = ModelOutput()
        for item, end in zip(step.scheduled, ends, strict=True):
            self.sample(item, end, output)
        self.unread.append(step)
        return partial(self.read, step, output)

    def update_batch(self, step: SchedulerOutput) -> None:
        """A chapter may fill KV blocks here."""

    def fail(self, place: str) -> None:
        if place in self.faults:
            self.faults.remove(place)
            raise Planted(place)

    def slot(self, row: Row, position: int) -> int:
        return row.blocks[position // self.size] * self.size + position % self.size

    def copy(self, source: list[Layer], target: list[Layer], pairs: tuple[BlockPair, ...]) -> None:
        assert len({to for _, to in pairs}) == len(pairs), "a block is written twice"
        for one, other in zip(source, target, strict=True):
            found = [[one.get(a * self.size + i) for i in range(self.size)] for a, _ in pairs]
            for (_, block), values in zip(pairs, found, strict=True):
                other.update({block * self.size + i: value for i, value in enumerate(values)})

    def sample(self, item: ScheduledSequence, end: int, output: ModelOutput) -> None:
        row, start = self.rows[item.seq_id], item.num_computed_tokens
        new, params = row.new, row.new.sampling_params
        assert end <= len(row.tokens), "computes tokens that do not exist"
        digests = [self.kv[1][self.slot(row, i)] for i in range(end)]
        positions = range(start + 1, min(end + 1, new.num_prompt_tokens))
        if params.prompt_logprobs is not None and positions:
            found = [((row.tokens[i],), (-float(digests[i - 1] % 999),), 1) for i in positions]
            output.prompt_logprobs[item.seq_id] = (start + 1, [TokenLogprobs(*f) for f in found])
        if end < len(row.tokens):
            return
        known = row.tokens[new.num_prompt_tokens :]
        reads = new.bad_word_ids or params.logits_processors
        assert not (reads and row.num_unread), "the sampler cannot know the tokens"
        try:
            for process in params.logits_processors or ():
                process(known, None)
        except Planted as error:
            output.errors[item.seq_id] = RequestError(str(error))
            return
        branches = range(new.branch, new.branch + row.num_samples)
        tokens = [SampledToken(choose(new, branch, digests, known)) for branch in branches]
        output.sampled[item.seq_id] = tokens[:1]
        if tokens[1:]:
            output.forks[item.seq_id] = tokens[1:]
        row.tokens.append(tokens[0].token_id)
        row.num_samples, row.num_unread = 1, row.num_unread + 1

    def read(self, step: SchedulerOutput, output: ModelOutput) -> ModelOutput:
        assert self.unread.pop(0) is step, "steps are read in order, once each"
        if "result" in self.faults:
            self.kv = [{}, {}]
        self.fail("result")
        for seq_id in output.sampled.keys() & self.rows.keys():
            self.rows[seq_id].num_unread = max(0, self.rows[seq_id].num_unread - 1)
        return output
