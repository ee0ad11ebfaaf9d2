"""The engine's only door to the data plane: three methods and two numbers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoserve import LLM, SamplingParams
from nanoserve.config import DEMO_MODEL, EngineConfig, ModelConfig
from nanoserve.distributed.multiproc import check_can_be_sent, check_sizes
from nanoserve.executor import UniprocExecutor
from nanoserve.models.base import Model
from nanoserve.sequence import ModelOutput, NewSequence, ScheduledSequence, SchedulerOutput


def make_executor() -> UniprocExecutor:
    model_config = ModelConfig.from_folder(DEMO_MODEL)
    config = EngineConfig(device="cpu", num_kv_blocks=8, max_num_seqs=2).resolve(model_config)
    return UniprocExecutor(config, model_config)


def test_execute_model_brings_a_token() -> None:
    executor = make_executor()
    new = NewSequence(
        seq_id=0,
        token_ids=(5, 6, 7),
        num_prompt_tokens=3,
        block_ids=(),
        sampling_params=SamplingParams(temperature=0),
        stop_token_ids=frozenset({2}),
        bad_word_ids=(),
        seed=0,
        branch=0,
        num_samples=1,
    )
    scheduled = ScheduledSequence(0, 0, 3, 0, [4])
    output = executor.execute_model(SchedulerOutput((scheduled,), (new,), (), 3))
    assert isinstance(output, ModelOutput)
    assert len(output.sampled_token_ids[0]) == 1
    assert output.logprobs == {}
    assert (executor.num_kv_blocks, executor.num_cpu_blocks) == (8, 0)


def test_describe_says_what_runs() -> None:
    assert make_executor().describe() == "device=cpu, dtype=torch.float32, attention=torch"


def test_close_gives_the_memory_back() -> None:
    executor = make_executor()
    dead = [weakref.ref(executor.runner.model), weakref.ref(executor.runner.kv_caches[0][0])]
    executor.close()
    gc.collect()
    assert [reference() for reference in dead] == [None, None]


class CountingExecutor:
    """No model at all: every token is the last one plus one. What an experiment may plug in."""

    num_kv_blocks = 4
    num_cpu_blocks = 0

    def __init__(self, config: EngineConfig, model_config: ModelConfig, backend: Any) -> None:
        self.token_ids: dict[int, list[int]] = {}
        self.is_closed = False

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        for new in scheduler_output.new_sequences:
            self.token_ids[new.seq_id] = list(new.token_ids)
        sampled = {}
        for item in scheduler_output.scheduled:
            known = self.token_ids[item.seq_id]
            if item.num_computed_tokens + item.num_scheduled_tokens == len(known):
                known.append(known[-1] + 1)
                sampled[item.seq_id] = (known[-1],)
        return ModelOutput(sampled, {})

    def describe(self) -> str:
        return "no device"

    def close(self) -> None:
        self.is_closed = True


def test_an_executor_of_ones_own() -> None:
    """Three methods and two numbers make one; four blocks make three requests take turns."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with LLM(executor_cls=CountingExecutor) as llm:
        outputs = llm.generate([[10, 11], [30], [50] * 17], params, use_tqdm=False)
        executor = llm.engine.executor
    assert [output.outputs[0].token_ids for output in outputs] == [
        list(range(12, 32)),
        list(range(31, 51)),
        list(range(51, 71)),
    ]
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert executor.is_closed


@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"]
)
def test_every_native_family_can_be_checked_before_ranks_start(
    model_type: str, make_checkpoint: Callable[..., Path]
) -> None:
    """On the meta device, which is neither a CPU nor a GPU; what does not divide is refused."""
    model_config = ModelConfig.from_folder(make_checkpoint(model_type))
    for size in (2, 3):
        config = EngineConfig(tensor_parallel_size=size).resolve(model_config)
        if size == 2:
            check_sizes(config, model_config, "auto")
            continue
        with pytest.raises(ValueError, match="cannot be divided among 3 ranks"):
            check_sizes(config, model_config, "auto")


def test_what_ranks_could_not_run_is_refused(make_checkpoint: Callable[..., Path]) -> None:
    """A class of a function's own, and a model that runs through transformers."""

    class Local(Model):
        """Nobody else can import this."""

    with pytest.raises(ValueError, match=r"model class .*Local.* must be able to import it"):
        check_can_be_sent("model class", Local)
    model_config = ModelConfig.from_folder(make_checkpoint("llama"))
    config = EngineConfig(tensor_parallel_size=2).resolve(model_config)
    with pytest.raises(ValueError, match="runs through transformers here"):
        check_sizes(config, replace(model_config, architecture="GPT2LMHeadModel"), "auto")
