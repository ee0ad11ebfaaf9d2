"""How many kernels does one layer of a decode step launch, with each option?

The step runs on the meta device, whose tensors have shapes and no contents: Triton's kernels are
noted instead of run, and so is every operator of PyTorch that computes something. A layer's share
is what a model with one more layer launches more.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanoserve.attention import StepMetadata
from nanoserve.chapters.lora.layers import LoRASlots
from nanoserve.chapters.quantization.linear import QuantizedLinearMethod
from nanoserve.kernels.fused import fuse
from nanoserve.kernels.kv_cache import CACHE_DTYPES
from nanoserve.kernels.quantized import pack_scaled
from nanoserve.layers import LayerConfig
from nanoserve.models.config import DEMO_MODEL, ModelConfig
from nanoserve.models.registry import build_model

pytest.importorskip("triton")
from nanoserve.kernels import attention_triton, fused_triton, quantized_triton
from nanoserve.kernels.attention_triton import GpuInfo, TritonBackend

META, H100 = torch.device("meta"), GpuInfo(90, 132, 227 * 1024)
NO_KERNEL = ("empty", "_to_copy", "detach")  # and views


class Launches(TorchDispatchMode):
    """Inside a `with`, `names` gets the kernels that are launched; `grids`, where they are ours."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.grids: list[tuple[int, ...]] = []
        self.stack = ExitStack()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, returns = func.__name__.split(".")[0], func._schema.returns
        is_view = any(r.alias_info and not r.alias_info.is_write for r in returns)
        if not is_view and not any(word in name for word in NO_KERNEL):
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def note(self, name: str) -> Any:
        def launch(grid: tuple[int, ...]) -> Any:
            self.names.append(name)
            self.grids.append(grid)
            return lambda *args, **kwargs: None

        return mock.MagicMock(__getitem__=lambda _, grid: launch(grid))

    def __enter__(self) -> Launches:
        for module in (attention_triton, fused_triton, quantized_triton):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                self.stack.enter_context(mock.patch.object(module, name, self.note(name)))
        gpu = mock.patch.object(attention_triton, "get_gpu_info", return_value=H100)
        self.stack.enter_context(gpu)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.stack.close()


def run_step(
    num_layers: int,
    query_lens: list[int],
    num_blocks: int = 256,
    cache: str = "auto",
    weights: str = "",
    lora: str = "",
) -> Launches:
    """A step of the demo model, made wider, with fewer layers. (A CUDA graph holds the same.)"""
    config = replace(
        ModelConfig.from_folder(DEMO_MODEL), num_layers=num_layers, num_heads=16, num_kv_heads=8
    )
    backend = TritonBackend()
    layer_config = LayerConfig(torch.bfloat16, META, attention=backend)
    if weights:
        method = QuantizedLinearMethod(weights, quantizes_inputs=True)
        choose = lambda layer, name: layer.method_cls() if "embed" in name else method  # noqa: E731
        layer_config = replace(layer_config, linear_method=choose)
    model: Any = build_model(config, 1024, layer_config)
    for layer in model.modules():
        if (weight := getattr(layer, "quantized_weight", None)) is not None:
            pack = pack_scaled if weights == "fp8" else quantized_triton.pack
            weight.product = pack(weight)
    fuse(model, fused_triton.TritonOps())
    num_seqs, num_tokens = len(query_lens), sum(query_lens)
    if lora:
        sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 64, "max_loras": 4}
        limits = SimpleNamespace(**sizes, max_lora_rank=8)
        slots = LoRASlots(
            SimpleNamespace(config=limits, dtype=torch.bfloat16, device=META, model=model)  # type: ignore[arg-type]
        )
        if lora == "graph":
            slots.is_other = torch.zeros(num_tokens, 4, dtype=torch.bool, device=META)
    dtype = CACHE_DTYPES.get(cache, torch.bfloat16)
    caches = [spec.allocate(1, 16, dtype, META) for spec in model.kv_cache_specs()]
    shapes = ((num_seqs, num_blocks), (num_seqs + 1,), (num_seqs,))
    step = [torch.zeros(shape, dtype=torch.int32, device=META) for shape in shapes]
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=META)
    metadata = backend.plan(StepMetadata(ids, *step, np.array(query_lens)), 16, dtype)
    with torch.inference_mode(), Launches() as launches:
        model(ids, ids, caches, metadata)
    return launches


MANY, ONE = [1] * 256, [1]
TABLE = [  # products are 4 of each
    (9, {"query_lens": MANY}),
    (10, {"query_lens": ONE}),  # splits are merged
    (10, {"query_lens": [4]}),  # a verify step
    (11, {"query_lens": [1, 999]}),  # long and short
    (9, {"query_lens": MANY, "cache": "int8"}),
    (9, {"query_lens": MANY, "cache": "fp8"}),
    (9, {"query_lens": MANY, "weights": "int4"}),
    (9, {"query_lens": MANY, "weights": "int8"}),
    (13, {"query_lens": MANY, "weights": "fp8"}),  # which quantizes inputs
    (9, {"query_lens": MANY, "lora": "without adapters"}),
    (21, {"query_lens": MANY, "lora": "graph"}),
]


@pytest.mark.parametrize(("number", "options"), TABLE)
def test_launches_per_layer(number: int, options: dict[str, Any]) -> None:
    one, two = (run_step(layers, **options) for layers in (1, 2))
    assert len(two.names) - len(one.names) == number, two.names[-2 * number :]


@pytest.mark.parametrize("num_seqs", [1, 8, 256])
def test_a_verify_step_keeps_the_gpu_as_busy_as_a_decode(num_seqs: int) -> None:
    decode, verify = (run_step(1, [n] * num_seqs).grids for n in (1, 4))
    assert len(decode) == len(verify)
    assert max(map(np.prod, decode)) == max(np.prod(grid) for grid in verify if len(grid) == 3)
