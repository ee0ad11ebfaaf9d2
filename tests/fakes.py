"""A data plane of pure Python, so that scheduling is tested with no weights and no torch.

The trick is that the fake model *reads its answer out of its KV cache*. Its next token is a fixed
function of the sequence's tokens (`next_token`), but FakeExecutor never computes it from the tokens
it was given: it stores them slot by slot, as a real model stores keys and values, reads the whole
context back through the block table, and decides from what it found. A wrong block, a stale cache
hit, a foreign write or a miscounted token therefore gives a wrong token, and a test only has to
compare with `reference_output`, which has no cache at all.

Two layers make it honest. What a real model stores at a position depends, beyond its first layer,
on *every* token before it; so layer 0 holds a token, layer 1 a digest of all of layer 0 up to here.
With block_size 4 and block table [2, 0]:

    slot            8    9   10   11    0    1
    layer 0         a    b    c    d    e    f
    layer 1         #a  #ab #abc  ...            ->  next token = hash of #a #ab ... #abcdef

And as in a real layer, a step stores all it has to store before it reads anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import (
    ModelOutput,
    RequestMetrics,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
)

VOCAB_SIZE = 997


# -- the model --


def prefix_digests(token_ids: Iterable[int]) -> list[int]:
    """One number per position, of all tokens up to it: what layer 1 holds."""
    digests = accumulate(
        token_ids, lambda digest, token: (digest * 31 + token + 1) % (2**31 - 1), initial=7
    )
    return list(digests)[1:]


def token_from_digests(digests: Iterable[int], seed: int, vocab_size: int) -> int:
    return hash((*digests, seed)) % vocab_size


def next_token(token_ids: Iterable[int], seed: int = 0, vocab_size: int = VOCAB_SIZE) -> int:
    """The token that the fake model gives after these: a pure function, the oracle."""
    return token_from_digests(prefix_digests(token_ids), seed, vocab_size)


def reference_output(
    prompt: list[int], max_tokens: int, stop_token_ids: Collection[int] = (), seed: int = 0
) -> list[int]:
    """What a request generates if it is alone in the world, without cache, blocks or batch."""
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + max_tokens:
        token_ids.append(next_token(token_ids, seed))
        if token_ids[-1] in stop_token_ids:
            break
    return token_ids[len(prompt) :]


class StepFailed(RuntimeError):
    """What a FakeExecutor raises when it was told to fail."""


@dataclass
class Row:
    """What the executor knows of one sequence, from the SchedulerOutputs alone."""

    token_ids: list[int]
    block_ids: list[int]
    seed: int


class FakeExecutor:
    """The executor's interface over the fake model; takes the place of UniprocExecutor.

    Invariant: it is told nothing but SchedulerOutputs, and keeps one row per sequence that it was
    told of and not told to forget.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig | None = None,
        attention_backend: Any = "auto",
    ) -> None:
        self.num_kv_blocks = config.num_kv_blocks or 64
        self.block_size = config.block_size
        self.vocab_size = model_config.vocab_size if model_config else VOCAB_SIZE
        num_slots = self.num_kv_blocks * self.block_size
        self.layers: list[list[int | None]] = [[None] * num_slots, [None] * num_slots]
        self.rows: dict[int, Row] = {}
        self.fail_next_step = False

    def describe(self) -> str:
        return "device=none, dtype=none, attention=fake"

    def close(self) -> None:
        self.rows.clear()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Store, read back, and give a token to each sequence whose last token is in the step.

        Raises StepFailed, with the step's slots spoilt, if `fail_next_step` is set.
        """
        self._update_rows(scheduler_output)
        scheduled = scheduler_output.scheduled
        for item in scheduled:
            row = self.rows[item.seq_id]
            for position in self._positions(item):
                token = None if self.fail_next_step else row.token_ids[position]
                self.layers[0][self._slot(row, position)] = token
        if self.fail_next_step:
            self.fail_next_step = False
            raise StepFailed
        for item in scheduled:
            row, positions = self.rows[item.seq_id], self._positions(item)
            digests = prefix_digests(self._read(0, row, positions.stop))
            for position in positions:
                self.layers[1][self._slot(row, position)] = digests[position]
        sampled: dict[int, tuple[int, ...]] = {}
        for item in scheduled:
            row, end = self.rows[item.seq_id], self._positions(item).stop
            assert end <= len(row.token_ids), f"{item} computes tokens that nobody knows yet"
            if end == len(row.token_ids):
                token = token_from_digests(self._read(1, row, end), row.seed, self.vocab_size)
                sampled[item.seq_id] = (token,)
        for seq_id, tokens in sampled.items():
            self.rows[seq_id].token_ids += tokens
        return ModelOutput(sampled, {})

    def _update_rows(self, scheduler_output: SchedulerOutput) -> None:
        for seq_id in scheduler_output.finished_seq_ids:
            self.rows.pop(seq_id, None)
        for new in scheduler_output.new_sequences:
            assert new.seq_id not in self.rows, f"sequence {new.seq_id} announced twice"
            self.rows[new.seq_id] = Row(list(new.token_ids), list(new.block_ids), new.seed)
        for item in scheduler_output.scheduled:
            self.rows[item.seq_id].block_ids += item.new_block_ids

    @staticmethod
    def _positions(item: ScheduledSequence) -> range:
        start = item.num_computed_tokens
        return range(start, start + item.num_scheduled_tokens)

    def _slot(self, row: Row, position: int) -> int:
        block_id = row.block_ids[position // self.block_size]
        return block_id * self.block_size + position % self.block_size

    def _read(self, layer: int, row: Row, end: int) -> list[int]:
        """What the row's block table leads to, for positions 0 to `end`."""
        content = [self.layers[layer][self._slot(row, position)] for position in range(end)]
        assert None not in content, f"layer {layer}: read slots that hold nothing"
        return [value for value in content if value is not None]


# -- the control plane around it --


def make_model_config(max_model_len: int = 256, **fields: Any) -> ModelConfig:
    """A ModelConfig with no folder behind it."""
    config = ModelConfig(
        path=Path("fake"),
        architecture="FakeForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        intermediate_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_position_embeddings=max_model_len,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        dtype="float32",
        eos_token_ids=frozenset(),
        generation_defaults={},
        hf={},
    )
    return replace(config, **fields)


def make_sequence(
    seq_id: int,
    prompt: Iterable[int],
    max_tokens: int = 8,
    *,
    cls: type[Sequence] = Sequence,
    **fields: Any,
) -> Sequence:
    """A sequence as the InputProcessor would make it; `fields` are Sequence's own."""
    settings: dict[str, Any] = {
        "sampling_params": SamplingParams(temperature=0),
        "stop_token_ids": frozenset(),
        "seed": 0,
        "metrics": RequestMetrics(arrival_time=0.0),
        **fields,
    }
    return cls(seq_id, f"request-{seq_id}", list(prompt), max_tokens=max_tokens, **settings)


@dataclass(slots=True, eq=False)
class LateSequence(Sequence):
    """A sequence that waits for something of its own, such as a grammar, until `ready` is set."""

    ready: bool = field(default=False)

    def is_ready(self) -> bool:
        return self.ready


class FakeEngine:
    """Scheduler, block manager and FakeExecutor, and the three lines of a step that tie them.

    Every step ends with `BlockManager.check()`.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 256,
        **options: Any,
    ) -> None:
        """`options` are EngineConfig's."""
        config = EngineConfig(num_kv_blocks=num_blocks, block_size=block_size, **options)
        self.config = config.resolve(make_model_config(max_model_len))
        self.block_manager = BlockManager(num_blocks, block_size, config.enable_prefix_caching)
        self.scheduler = Scheduler(self.config, self.block_manager)
        self.executor = FakeExecutor(self.config)
        self.capacity = min(max_model_len, num_blocks * block_size)
        self.num_steps = 0
        self.num_added = 0

    def add(self, prompt: Iterable[int], max_tokens: int = 8, **fields: Any) -> Sequence:
        """Queue a sequence, with max_tokens capped by what fits, as the InputProcessor does."""
        prompt = list(prompt)
        assert 0 < len(prompt) < self.capacity, "the InputProcessor refuses such a prompt"
        max_tokens = min(max_tokens, self.capacity - len(prompt))
        seq = make_sequence(self.num_added, prompt, max_tokens, **fields)
        self.num_added += 1
        self.scheduler.add(seq)
        return seq

    def abort(self, seq: Sequence) -> None:
        self.scheduler.finish(seq.seq_id, SequenceStatus.FINISHED_ABORTED)
        self.block_manager.check()

    def execute(self, scheduler_output: SchedulerOutput) -> list[SequenceUpdate]:
        """The second half of a step: run what was scheduled; abandon it if that fails."""
        try:
            model_output = self.executor.execute_model(scheduler_output)
        except StepFailed:
            self.scheduler.abandon(scheduler_output)
            return []
        finally:
            self.block_manager.check()
        updates = self.scheduler.update_from_output(scheduler_output, model_output)
        self.block_manager.check()
        return updates

    def step(self) -> SchedulerOutput:
        """One step; returns what was decided."""
        self.num_steps += 1
        scheduler_output = self.scheduler.schedule()
        self.block_manager.check()
        if not scheduler_output.is_empty:
            self.execute(scheduler_output)
        return scheduler_output

    def run(self) -> list[SchedulerOutput]:
        """Step until nothing is unfinished; returns every decision."""
        steps = []
        while self.scheduler.has_unfinished():
            steps.append(self.step())
            assert not steps[-1].is_empty, "unfinished work, and nothing scheduled"
        return steps


def num_tokens_of(scheduler_output: SchedulerOutput) -> dict[int, int]:
    """seq_id -> tokens in this step, in batch order: {0: 1, 2: 6}."""
    return {item.seq_id: item.num_scheduled_tokens for item in scheduler_output.scheduled}
