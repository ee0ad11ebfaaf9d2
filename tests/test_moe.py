"""Mixtures of experts: two grouped forms give the same as the definition, a loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.layers import LayerConfig
from nanoserve.models.decoder import CausalLM
from nanoserve.models.loader import load_model
from nanoserve.models.moe import (
    ExpertsConfig,
    GroupedMatmul,
    MixtureOfExperts,
    choose_grouped_matmul,
    grouped_matmul_blocks,
    grouped_matmul_torch,
    route,
    run_experts_grouped,
    run_experts_loop,
)
from nanoserve.parallel import ParallelState

MakeCheckpoint = Callable[..., Path]
MATMULS = [grouped_matmul_torch, grouped_matmul_blocks]
HIDDEN, SIZE = 16, 8

both = pytest.mark.parametrize("matmul", MATMULS)


def make_experts(num_experts: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """gate_up and down of random experts."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(num_experts, 2 * SIZE, HIDDEN, generator=generator)
    down = torch.randn(num_experts, HIDDEN, SIZE, generator=generator)
    return gate_up.to(dtype), down.to(dtype)


def make_tokens(num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------------------ the router


@settings(deadline=None)
@given(st.integers(1, 6), st.data())
def test_the_router_takes_the_likeliest_experts(num_experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    logits = torch.randn(5, num_experts, generator=torch.Generator().manual_seed(top_k))
    probabilities = logits.softmax(-1)
    weights, expert_ids = route(logits, top_k, normalize=False)
    torch.testing.assert_close(weights, probabilities.gather(1, expert_ids))
    others = probabilities.scatter(1, expert_ids, 0)
    assert (others.amax(1) <= weights.amin(1)).all()
    normalized, same_ids = route(logits, top_k, normalize=True)
    torch.testing.assert_close(normalized, weights / weights.sum(1, keepdim=True))
    assert torch.equal(expert_ids, same_ids)


def test_the_router_computes_in_float32() -> None:
    """As in training, for any dtype of the logits."""
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights, expert_ids = route(logits, 3, normalize=False)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, logits.float().softmax(-1).gather(1, expert_ids))
    assert not torch.equal(weights, logits.softmax(-1).gather(1, expert_ids).float())


# ------------------------------------------------------------------------------ three ways


def check_all_ways(num_experts: int, expert_ids: Tensor) -> None:
    gate_up, down = make_experts(num_experts)
    x = make_tokens(len(expert_ids))
    weights = torch.rand(expert_ids.shape, generator=torch.Generator().manual_seed(2))
    expected = run_experts_loop(x, gate_up, down, weights, expert_ids)
    for matmul in MATMULS:
        output = run_experts_grouped(x, gate_up, down, weights, expert_ids, matmul)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.data())
def test_all_ways_agree_on_any_choice_of_experts(
    num_experts: int, num_tokens: int, data: st.DataObject
) -> None:
    """Even, uneven, all to one: any choice of a router."""
    top_k = data.draw(st.integers(1, num_experts))
    favourites = data.draw(st.integers(top_k, num_experts))  # the others get no tokens
    seed = data.draw(st.integers(0, 1000))
    rows = torch.rand(num_tokens, favourites, generator=torch.Generator().manual_seed(seed))
    check_all_ways(num_experts, num_experts - 1 - rows.topk(top_k, dim=1).indices)


def test_the_loop_is_the_textbook_formula() -> None:
    """For a token t: the sum over its experts e of w_e * down_e(silu(gate_e x) * up_e x)."""
    gate_up, down = make_experts(4)
    x = make_tokens(3)
    weights, expert_ids = torch.rand(3, 2), torch.tensor([[0, 3], [3, 1], [1, 0]])
    output = run_experts_loop(x, gate_up, down, weights, expert_ids)
    for token in range(3):
        total = torch.zeros(HIDDEN)
        for weight, expert in zip(weights[token], expert_ids[token].tolist(), strict=True):
            gate, up = gate_up[expert, :SIZE] @ x[token], gate_up[expert, SIZE:] @ x[token]
            total += weight * (down[expert] @ (gate / (1 + (-gate).exp()) * up))
        torch.testing.assert_close(output[token], total, rtol=1e-4, atol=1e-4)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(matmul: GroupedMatmul, dtype: torch.dtype) -> None:
    gate_up, down = make_experts(5, dtype)
    x = make_tokens(33).to(dtype)
    weights, expert_ids = route(torch.randn(33, 5), 2, normalize=True)
    output = run_experts_grouped(x, gate_up, down, weights, expert_ids, matmul)
    exact = run_experts_loop(x.float(), gate_up.float(), down.float(), weights, expert_ids)
    assert output.dtype == dtype
    assert (output.float() - exact).norm() / exact.norm() < 2e-2


@both
def test_experts_without_tokens_cost_nothing(matmul: GroupedMatmul) -> None:
    """Their weights are not read: a NaN in them would show."""
    gate_up, down = make_experts(6)
    x, weights = make_tokens(7), torch.rand(7, 2)
    expert_ids = torch.tensor([[1, 4]]).repeat(7, 1)
    expected = run_experts_loop(x, gate_up, down, weights, expert_ids)
    for unused in (0, 2, 3, 5):
        gate_up[unused] = down[unused] = torch.nan
    output = run_experts_grouped(x, gate_up, down, weights, expert_ids, matmul)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


@both
def test_the_host_reads_no_number(matmul: GroupedMatmul) -> None:
    """Fake tensors have shapes and no contents: a function that runs on them can be captured in a
    CUDA graph. The loop cannot: it reads how many tokens an expert has."""
    with FakeTensorMode():
        bf16 = torch.bfloat16  # the only dtype for which grouped_mm has a fake
        gate_up = torch.empty(6, 2 * SIZE, HIDDEN, dtype=bf16)
        down = torch.empty(6, HIDDEN, SIZE, dtype=bf16)
        x, weights = torch.empty(7, HIDDEN, dtype=bf16), torch.empty(7, 2)
        expert_ids = torch.empty(7, 2, dtype=torch.int64)
        output = run_experts_grouped(x, gate_up, down, weights, expert_ids, matmul)
        assert output.shape == (7, HIDDEN)
        with pytest.raises(DynamicOutputShapeException):
            run_experts_loop(x, gate_up, down, weights, expert_ids)


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((9, 0), torch.bfloat16, grouped_matmul_torch),
        ((10, 0), torch.bfloat16, grouped_matmul_torch),
        ((8, 0), torch.bfloat16, grouped_matmul_blocks),
        ((9, 0), torch.float16, grouped_matmul_blocks),
        ((9, 0), torch.float32, grouped_matmul_blocks),
    ],
)
def test_on_a_gpu_torch_groups_only_where_the_host_need_not_wait(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    expected: GroupedMatmul,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_grouped_matmul(torch.device("cuda"), dtype) is expected
    assert choose_grouped_matmul(torch.device("cpu"), dtype) is grouped_matmul_torch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@both
def test_a_cuda_graph_holds_the_experts(matmul: GroupedMatmul) -> None:
    """Captured with one routing, replayed with another."""
    if choose_grouped_matmul(torch.device("cuda"), torch.bfloat16) is not grouped_matmul_torch:
        matmul = grouped_matmul_blocks
    gate_up, down = (part.cuda() for part in make_experts(8, torch.bfloat16))
    x = make_tokens(12).bfloat16().cuda()
    weights = torch.rand(12, 2, device="cuda")
    first, second = (torch.rand(12, 8, device="cuda").topk(2).indices for _ in range(2))
    expert_ids = first.clone()
    run_experts_grouped(x, gate_up, down, weights, expert_ids, matmul)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run_experts_grouped(x, gate_up, down, weights, expert_ids, matmul)
    for ids in (first, second):
        expert_ids.copy_(ids)
        graph.replay()
        expected = run_experts_loop(x, gate_up, down, weights, ids)
        torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2 * float(expected.std()))


# ------------------------------------------------------------------------------ the layer


class Alone(ParallelState):
    """A rank without others: the test sums the outputs of all ranks."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor


def filled(config: ExpertsConfig, tp_size: int, rank: int = 0) -> MixtureOfExperts:
    """A layer with the same whole weights on any number of ranks."""
    layer = MixtureOfExperts(HIDDEN, config, LayerConfig(parallel=Alone(rank, tp_size)))
    generator = torch.Generator().manual_seed(3)
    for name, module in layer.named_modules(prefix="model.layers.0.mlp"):
        for _, shard in module.shards(name):
            shard.target.copy_(torch.randn(shard.full_shape, generator=generator)[shard.slices])
    return layer


@pytest.mark.parametrize("size", [4, 6, 12, 30])
@pytest.mark.parametrize("tp_size", [2, 3])
def test_ranks_have_parts_of_every_expert(size: int, tp_size: int) -> None:
    """Their outputs add up to what one rank computes, whatever the parts' size."""
    config = ExpertsConfig(5, 2, size, normalize=True)
    x = make_tokens(9)
    expected = filled(config, 1)(x)
    if size % tp_size:
        with pytest.raises(ValueError, match=f"expert: {size} cannot be divided among"):
            filled(config, tp_size)
        return
    total = sum(filled(config, tp_size, rank)(x) for rank in range(tp_size))
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_experts_per_tok is 3; allowed with 2 experts"):
        ExpertsConfig(2, 3, 4, True)
    config = ExpertsConfig(2, 1, 8, True)
    with pytest.raises(ValueError, match=r"hidden_size is 10; .* multiple of 4"):
        MixtureOfExperts(10, config, LayerConfig())
    with pytest.raises(ValueError, match=r"hidden_size is 12; .* multiple of 8"):
        MixtureOfExperts(12, config, LayerConfig(dtype=torch.bfloat16))


# ------------------------------------------------------------------------------ whole models


def load(folder: Path, **options: Any) -> CausalLM:
    model_config = ModelConfig.from_folder(folder)
    config = EngineConfig(max_model_len=64, **options).resolve(model_config)
    model = load_model(config, model_config, LayerConfig(), use_tqdm=False)
    assert isinstance(model, CausalLM)
    return model


@pytest.mark.parametrize(
    ("model_type", "overrides", "key"),
    [
        ("mixtral", {"num_local_experts": 4}, "num_local_experts"),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}, "num_experts"),
    ],
)
def test_the_number_of_experts_has_two_names(
    make_checkpoint: MakeCheckpoint,
    tmp_path: Path,
    model_type: str,
    overrides: dict[str, Any],
    key: str,
) -> None:
    """transformers 5 writes num_local_experts; published Qwen3-MoE files have num_experts."""
    text = (make_checkpoint(model_type, **overrides) / "config.json").read_text()
    for written in ("num_experts", "num_local_experts"):
        (tmp_path / "config.json").write_text(text.replace('"num_local_experts"', f'"{written}"'))
        model = load(tmp_path, load_format="dummy")
        assert len(model.model.layers[0].mlp.gate_up) == 4


def test_a_mixture_runs_in_bfloat16(make_checkpoint: MakeCheckpoint) -> None:
    """Experts of 50 / 2 rows: padded, so that grouped_mm takes them."""
    folder = make_checkpoint("mixtral", num_local_experts=4, intermediate_size=50)
    with LLM(folder, dtype="bfloat16", num_kv_blocks=20) as llm:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        [output] = llm.generate([[3, 4, 5]], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 5
