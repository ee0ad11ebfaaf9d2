"""Stages: together they are the model; steps in flight share the sequences; the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoserve import LLM, SamplingParams
from nanoserve.attention import StepMetadata
from nanoserve.block_manager import BlockManager
from nanoserve.chapters.pipeline.model import build_stage
from nanoserve.chapters.pipeline.parts import PipelineConfig, PipelineNote, PipelineScheduler
from nanoserve.chapters.pipeline.state import StageState
from nanoserve.kernels.kv_cache import allocate_kv_caches
from nanoserve.layers import LayerConfig
from nanoserve.models.config import DEMO_MODEL, ModelConfig
from nanoserve.models.loader import load_model
from nanoserve.models.registry import build_model
from nanoserve.sequence import ModelOutput, RequestMetrics, SampledToken, Sequence
from nanoserve.tools.check_blocks import check_blocks

PROMPTS = ["Once upon a time", "The little dog ran to Tom and Lily, and they", "Yes"] * 2
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
    SamplingParams(n=3, seed=5, top_p=0.9, max_tokens=9, presence_penalty=0.5),
    SamplingParams(seed=6, top_k=9, max_tokens=20, stop=["."], logprobs=2, bad_words=["dog"]),
] * 2
SMALL = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 64, "block_size": 8}


def generate(llm: LLM) -> list[Any]:
    """Twice: the second time, prompts are found in the cache."""
    outputs = [llm.generate(PROMPTS, PARAMS, use_tqdm=False) for _ in range(2)]
    check_blocks(llm.llm_engine.block_manager)
    completions = [each for batch in outputs for output in batch for each in output.outputs]
    return [(each.token_ids, each.text, each.finish_reason) for each in completions]


@pytest.mark.parametrize(
    "options",
    [
        {"kernels": "plain", "num_gpu_blocks_override": 12},
        {
            "kernels": "fast",
            "num_gpu_blocks_override": 12,
            "preemption_mode": "swap",
            "async_scheduling": True,
        },
    ],
)
def test_same_tokens(options: dict[str, Any]) -> None:
    with LLM(**SMALL) as llm:
        expected = generate(llm)
    more = {"pipeline_parallel_size": 2, "collect_metrics": True}
    with LLM(**SMALL, **more, **options) as llm:
        assert generate(llm) == expected
        [preemptions] = (m for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
        assert preemptions.value > 0
        with pytest.raises(ValueError, match="prompt_logprobs"):
            llm.generate("Hi", SamplingParams(prompt_logprobs=1), use_tqdm=False)


@given(st.integers(1, 40), st.integers(1, 8))
def test_each_layer_is_on_one_stage(num_layers: int, pp_size: int) -> None:
    stages = [StageState(pp_rank=rank, pp_size=pp_size) for rank in range(pp_size)]
    ranges = [stage.layer_range(num_layers) for stage in stages]
    assert [layer for each in ranges for layer in each] == list(range(num_layers))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@torch.inference_mode()
def test_the_stages_are_the_model() -> None:
    """What stage 0 makes of some tokens, stage 1 makes hidden states and logits of."""
    config = PipelineConfig(model=DEMO_MODEL, max_model_len=64, pipeline_parallel_size=2)
    model_config = ModelConfig.from_folder(DEMO_MODEL)
    whole = load_model(config, model_config, LayerConfig())
    stages = []
    for rank in (0, 1):
        stage = StageState(pp_rank=rank, pp_size=2)

        def build(max_model_len: int, layer_config: LayerConfig, stage: StageState = stage) -> Any:
            make = lambda each: build_model(model_config, max_model_len, each)  # noqa: E731
            return build_stage(make, model_config, layer_config, stage, max_tokens=8)

        stages.append(load_model(config, model_config, LayerConfig(), build))
    assert sum(stage.num_bytes() for stage in stages) < 1.5 * whole.num_bytes()
    ids, positions = torch.tensor([5, 9, 2, 7]), torch.arange(4)
    one = torch.tensor([4], dtype=torch.int32)
    table, loc = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)

    def forward(model: Any) -> torch.Tensor:
        caches = allocate_kv_caches(model.kv_cache_specs(), 16, torch.float32, 1, ids.device)
        backend = LayerConfig().attention
        metadata = backend.plan(StepMetadata(positions, table, loc, one), 16, torch.float32)
        return model(ids, positions, caches, metadata)

    stages[1].model.received[:4] = forward(stages[0])
    found = stages[1].compute_logits(forward(stages[1]))
    assert torch.equal(found, whole.compute_logits(forward(whole)))


def test_steps_in_flight_share_the_sequences() -> None:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64}
    config = PipelineConfig(pipeline_parallel_size=3, **options)
    scheduler = PipelineScheduler(config, BlockManager(64, 4))
    for i in range(7):
        seq = Sequence(i, str(i), [i] * 5, SamplingParams(), 9, frozenset(), 0, RequestMetrics(0.0))
        scheduler.add(seq)
    step = scheduler.schedule()  # the prompts
    assert not scheduler.schedule().scheduled  # their tokens are not known yet
    for _ in range(3):
        output = ModelOutput({item.seq_id: [SampledToken(40)] for item in step.scheduled})
        scheduler.update_from_output(step, output)
        steps = [scheduler.schedule() for _ in range(4)]
        assert [len(each.scheduled) for each in steps] == [3, 3, 1, 0]
        ids = [item.seq_id for each in steps for item in each.scheduled]
        assert sorted(ids) == list(range(7))
        assert all(each.notes[PipelineNote].tokens for each in steps[:3])
        for each in steps[:2]:
            output = ModelOutput({item.seq_id: [SampledToken(40)] for item in each.scheduled})
            scheduler.update_from_output(each, output)
        step = steps[2]


@pytest.mark.parametrize("more", [{"pipeline_parallel_size": 99}, {"model_impl": "transformers"}])
def test_what_cannot_be_divided_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="divided"):
        LLM(**{"pipeline_parallel_size": 2, **more})
