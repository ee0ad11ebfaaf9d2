"""The control plane around the fake model of nanoserve/tools/fake_executor.py, so that scheduling
is tested without weights and without torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.engine import LLMEngine
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import (
    RequestMetrics,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
)
from nanoserve.tools.fake_executor import (
    VOCAB_SIZE,
    FakeExecutor,
    FakeOutput,
    StepFailed,
    next_logprobs,
    next_token,
    prefix_digests,
    reference_output,
)

__all__ = [
    "VOCAB_SIZE",
    "FakeEngine",
    "FakeExecutor",
    "FakeOutput",
    "LateSequence",
    "StepFailed",
    "add_beam_search",
    "make_model_config",
    "make_sequence",
    "next_logprobs",
    "next_token",
    "num_tokens_of",
    "prefix_digests",
    "reference_output",
]


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
        hf_config={},
    )
    return replace(config, **fields)


def make_sequence(
    seq_id: int,
    prompt: Iterable[int],
    max_tokens: int = 8,
    *,
    n: int = 1,
    cls: type[Sequence] = Sequence,
    **fields: Any,
) -> Sequence:
    """A sequence as the InputProcessor would make it; `fields` are Sequence's own."""
    settings: dict[str, Any] = {
        "sampling_params": SamplingParams(n=n, temperature=float(n > 1)),
        "num_pending_forks": n - 1,
        "stop_token_ids": frozenset(),
        "seed": 0,
        "metrics": RequestMetrics(arrival_time=0.0, queued_ts=0.0),
        **fields,
    }
    return cls(seq_id, f"request-{seq_id}", list(prompt), max_tokens=max_tokens, **settings)


@dataclass(slots=True, eq=False)
class LateSequence(Sequence):
    """A sequence that is not ready, as if a grammar were compiled for it, until `ready` is set."""

    ready: bool = field(default=False)

    def is_ready(self) -> bool:
        return self.ready


class FakeEngine:
    """Scheduler, block manager and FakeExecutor, connected by the three lines of a step.

    `BlockManager.check()` passes after every schedule() and after every step.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 256,
        num_cpu_blocks: int | None = None,
        vocab_size: int = VOCAB_SIZE,
        **options: Any,
    ) -> None:
        """`options` are EngineConfig's. With num_cpu_blocks=0 the CPU pool is always full."""
        config = EngineConfig(
            num_gpu_blocks_override=num_blocks,
            block_size=block_size,
            num_cpu_blocks=num_cpu_blocks or None,
            **options,
        )
        model_config = make_model_config(max_model_len, vocab_size=vocab_size)
        self.config = config.resolve(model_config)
        self.executor = FakeExecutor(self.config, model_config)
        if num_cpu_blocks == 0:
            self.executor.num_cpu_blocks = 0
        self.block_manager = BlockManager(
            num_blocks, block_size, config.enable_prefix_caching, self.executor.num_cpu_blocks
        )
        self.scheduler = Scheduler(self.config, self.block_manager)
        self.capacity = min(max_model_len, num_blocks * block_size)
        self.num_steps = 0
        self.num_added = 0

    def add(
        self, prompt: Iterable[int], max_tokens: int = 8, n: int = 1, **fields: Any
    ) -> Sequence:
        """Queue a sequence. As in the InputProcessor, max_tokens is capped by what fits."""
        prompt = list(prompt)
        assert 0 < len(prompt) < self.capacity, "the InputProcessor refuses such a prompt"
        max_tokens = min(max_tokens, self.capacity - len(prompt))
        seq = make_sequence(self.next_seq_id(n), prompt, max_tokens, n=n, **fields)
        seq.num_pending_forks = min(n, self.config.max_num_seqs or 1) - 1
        self.scheduler.add(seq)
        for branch in range(1 + seq.num_pending_forks, n):  # as RequestState does
            self.scheduler.add(seq.make_branch(branch))
        return seq

    def next_seq_id(self, number: int = 1) -> int:
        """Take `number` consecutive seq_ids; returns the first."""
        first, self.num_added = self.num_added, self.num_added + number
        return first

    def abort(self, seq: Sequence) -> None:
        self.scheduler.finish(seq.seq_id, SequenceStatus.FINISHED_ABORTED)
        self.block_manager.check()

    def execute(self, scheduler_output: SchedulerOutput) -> list[SequenceUpdate]:
        """The second half of a step: run the scheduled work; preempt all if it fails."""
        try:
            model_output = self.executor.execute_model(scheduler_output)
        except StepFailed:
            self.scheduler.preempt_all()
            return []
        finally:
            self.block_manager.check()
        updates = self.scheduler.update_from_output(scheduler_output, model_output)
        self.block_manager.check()
        return updates

    def step(self) -> SchedulerOutput:
        """One step. Returns the scheduler's decision."""
        self.num_steps += 1
        scheduler_output = self.scheduler.schedule()
        self.block_manager.check()
        if not scheduler_output.is_empty:
            self.execute(scheduler_output)
        return scheduler_output

    def run(self) -> list[SchedulerOutput]:
        """Step until every sequence is finished. Returns all decisions."""
        steps = []
        while self.scheduler.has_unfinished():
            steps.append(self.step())
            assert not steps[-1].is_empty, "a sequence is unfinished, and nothing was scheduled"
        return steps


def num_tokens_of(scheduler_output: SchedulerOutput) -> dict[int, int]:
    """seq_id -> tokens in this step, in batch order: {0: 1, 2: 6}."""
    return {item.seq_id: item.num_scheduled_tokens for item in scheduler_output.scheduled}


def add_beam_search(
    engine: LLMEngine, request_id: str, prompt: list[int], *params: Any, **fields: Any
) -> Any:
    """Queue a beam search with these BeamSearchParams (or BeamSearchParams(*params, **fields)), to
    be advanced by step(). Its results are in the object returned. Skips the test where the chapter
    was deleted."""
    chapter = pytest.importorskip("nanoserve.extras.beam_search")
    is_made = bool(params) and isinstance(params[0], chapter.BeamSearchParams)
    beam_params = params[0] if is_made else chapter.BeamSearchParams(*params, **fields)
    search = chapter.BeamSearch(request_id, prompt, beam_params, engine)
    engine.add(search)
    return search
