"""The members of an executor, the engine's only way to the data plane; a runner of one's own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from nanoserve import LLM, SamplingParams
from nanoserve.config import DEMO_MODEL, EngineConfig, ModelConfig
from nanoserve.executor import UniprocExecutor
from nanoserve.model_runner import ModelRunner
from nanoserve.sequence import ModelOutput, NewSequence, ScheduledSequence, SchedulerOutput


class OwnRunner(ModelRunner):
    """A runner that counts its steps."""

    num_steps = 0

    def launch(self, scheduler_output: SchedulerOutput) -> Any:
        self.num_steps += 1
        return super().launch(scheduler_output)


def test_one_step_and_the_end() -> None:
    """A runner of one's own runs the step; `close` releases the model and the KV cache."""
    model_config = ModelConfig.from_folder(DEMO_MODEL)
    config = EngineConfig(device="cpu", num_gpu_blocks_override=8, max_num_seqs=2).resolve(
        model_config
    )
    executor = UniprocExecutor(config, model_config, "torch", runner_cls=OwnRunner)
    assert (executor.num_kv_blocks, executor.num_cpu_blocks) == (8, 0)
    assert executor.describe() == "device=cpu, dtype=torch.float32, attention=torch"
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
    assert executor.runner.num_steps == 1

    model, key_cache = executor.runner.model, executor.runner.kv_caches[0][0]
    released = [weakref.ref(model), weakref.ref(key_cache)]
    del model, key_cache
    executor.close()
    gc.collect()
    assert [reference() for reference in released] == [None, None]


class CountingExecutor:
    """An executor without a model: each token is the token before it plus one."""

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
    """Three methods and two numbers are enough. Four blocks hold one or two of the requests."""
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
