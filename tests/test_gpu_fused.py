"""The fused kernels on a GPU: every dtype, rows and heads of real models, CUDA graphs.

    pytest -m gpu tests/test_gpu_fused.py

The same tests run on a CPU in small, through Triton's interpreter and a stand-in for the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from attention_oracle import bfloat16_as_on_a_gpu, needs_interpreter, one_thread
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux only")
from test_fused_triton import assert_within_ulps, largest_of_pair
from test_gpu_attention import DEVICES, DEVICES_AND_DTYPES, capture

from nanoserve import layers
from nanoserve.attention import AttentionBackend, StepMetadata
from nanoserve.kernels import fused_triton
from nanoserve.kernels.attention_triton import TritonBackend
from nanoserve.kv_cache import KVCacheSpec
from nanoserve.layers import LayerConfig, QKNorm, RotaryEmbedding

pytestmark = [
    needs_interpreter,
    pytest.mark.filterwarnings("ignore:overflow encountered in"),
]
SHAPES = {  # hidden size, size of the MLP, heads, kv heads, head size, dimensions that are turned
    "Qwen3 0.6B": (1024, 3072, 16, 8, 128, 128),
    "Llama 3.2 3B": (3072, 8192, 24, 8, 128, 128),
    "Qwen2.5 0.5B": (896, 4864, 14, 2, 64, 64),
    "heads of 80, partly turned": (2560, 6912, 32, 32, 80, 32),
    "heads of 256": (5120, 2400, 20, 10, 256, 256),
}


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    with one_thread(), bfloat16_as_on_a_gpu():
        yield


class Layer(NamedTuple):
    """What lies between the products of one layer, and a step's numbers for it."""

    x: Tensor
    residual: Tensor
    qkv: Tensor
    gate_up: Tensor
    slots: Tensor
    positions: Tensor
    weight: Tensor
    qk_norm: QKNorm
    table: RotaryEmbedding
    caches: tuple[Tensor, Tensor]

    @classmethod
    def make(cls, shape: str, num_tokens: int, dtype: torch.dtype, device: str) -> Layer:
        hidden, size, heads, kv_heads, head_dim, rotary_dim = SHAPES[shape]
        place = torch.device(device)
        config = LayerConfig(dtype, place)
        frequencies = 1e4 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
        layer = cls(
            *(torch.empty(num_tokens, n, dtype=dtype, device=place) for n in (hidden, hidden)),
            torch.empty(num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=place),
            torch.empty(num_tokens, 2 * size, dtype=dtype, device=place),
            torch.randperm(num_tokens + 9)[:num_tokens].to(place),
            torch.randint(4096, (num_tokens,)).to(place),
            torch.randn(hidden).to(place, dtype),
            QKNorm(heads, heads + kv_heads, head_dim, 1e-6, config),
            RotaryEmbedding(frequencies, 1.0, 4096, config),
            KVCacheSpec(kv_heads, head_dim, head_dim).allocate(
                num_tokens // 16 + 2, 16, dtype, place
            ),
        )
        layer.qk_norm.weight.copy_(torch.randn(layer.qk_norm.weight.shape))
        layer.refill()
        return layer

    def refill(self) -> None:
        """Other numbers at the same addresses; the last token is padding."""
        for tensor in (self.x, self.residual, self.qkv, self.gate_up):
            tensor.copy_(2 * torch.randn(tensor.shape))
        self.slots[-1] = -1
        for cache in self.caches:
            cache.fill_(7.0)

    def run(self, functions: Any, backend: AttentionBackend) -> tuple[Tensor, ...]:
        add_rms_norm, rope_and_store, silu_and_mul = functions
        metadata = StepMetadata(self.slots, self.slots, self.slots, self.slots)
        normed, total = add_rms_norm(self.x, self.residual, self.weight, 1e-6)
        rope = self.table(self.positions)
        query = rope_and_store(self.qkv, self.qk_norm, rope, backend, self.caches, metadata)
        return normed, total, query, silu_and_mul(self.gate_up)

    def run_plain(self) -> tuple[Tensor, ...]:
        """On copies of what it changes: the results, keys and values."""
        copy = self._replace(x=self.x.clone(), caches=[cache.clone() for cache in self.caches])
        return (*copy.run(PLAIN, AttentionBackend()), *copy.caches)

    def run_fused(self) -> tuple[Tensor, ...]:
        return (*self.run(FUSED, TritonBackend()), *self.caches)


PLAIN = (layers.add_rms_norm, layers.rope_and_store, layers.silu_and_mul)
FUSED = (
    fused_triton.add_rms_norm_triton,
    fused_triton.rope_and_store_triton,
    fused_triton.silu_and_mul_triton,
)


def assert_same(shape: str, found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    rotary_dim = SHAPES[shape][-1]
    for name, ours, plain in zip(
        ("normed", "total", "query", "activated", "keys", "values"), found, expected, strict=True
    ):
        if name in ("total", "values"):
            assert torch.equal(ours, plain), name
        else:
            is_turned = name in ("query", "keys")
            size = largest_of_pair(plain, rotary_dim) if is_turned else None
            assert_within_ulps(ours, plain, size)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_of_real_models(shape: str, device: str, dtype: torch.dtype) -> None:
    """A decode and a large prompt: what the plain functions give, within a few ulps."""
    torch.manual_seed(0)
    for num_tokens in (1, 200, 8192) if device == "cuda" else (2,):
        layer = Layer.make(shape, num_tokens, dtype, device)
        expected = layer.run_plain()
        assert_same(shape, layer.run_fused(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_replays_them_on_changed_contents(device: str) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = "Qwen3 0.6B"
    layer = Layer.make(shape, 3, dtype, device)
    results: tuple[Tensor, ...] = ()

    def forward() -> Tensor:
        nonlocal results
        results = layer.run_fused()
        return results[0]

    _, replay = capture(forward, device)
    for _ in range(2):
        layer.refill()
        expected = layer.run_plain()
        replay()
        assert_same(shape, results, expected)
