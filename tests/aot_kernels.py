"""Compile the kernels for GPUs that this machine lacks, and describe the result.

    python tests/aot_kernels.py 90                      # an H100: one line of JSON for each kernel
    python tests/aot_kernels.py 90 decode "rope 80"     # some cases only

The launches of the real functions are recorded on tensors of the meta device (shapes without
contents) instead of carried out. So the arguments, tiles and options compiled here are the real
ones, and no launch depends on a tensor's contents. Triton's interpreter must be off: a process that
has imported Triton with TRITON_INTERPRET=1 has no compiler.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanoserve.attention import StepMetadata
from nanoserve.kernels import attention_triton, fused_triton, quantized_triton
from nanoserve.kernels.attention_triton import GpuInfo, TritonBackend
from nanoserve.kernels.kv_cache import KVCacheSpec
from nanoserve.kernels.quantized import QuantizedWeight

META = torch.device("meta")
GPUS = {  # shared memory: CUDA C++ Programming Guide, compute capabilities, less 1 KiB of its own
    75: GpuInfo(75, 40, 64 * 1024),  # T4
    80: GpuInfo(80, 108, 163 * 1024),  # A100
    86: GpuInfo(86, 82, 99 * 1024),  # RTX 3090; the smallest shared memory of all with bfloat16
    89: GpuInfo(89, 128, 99 * 1024),  # RTX 4090, L4
    90: GpuInfo(90, 132, 227 * 1024),  # H100, H200
    100: GpuInfo(100, 148, 227 * 1024),  # B200
}
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.uint8: "u8",
}
INSTRUCTIONS = {  # counted in the assembly: tensor cores of each generation; loads ahead of use
    "products": r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)",
    "copies": r"\bcp\.async\.cg",
}


class Launch(NamedTuple):
    """One launch: kernel[grid](*args, **kwargs)."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recorder:
    """Replaces a kernel, and keeps its launches."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launches.append(Launch(self.kernel, grid, args, kwargs))


def record(function: Callable[[], Any], gpu: GpuInfo) -> list[Launch]:
    """The launches of `function()` on `gpu`."""
    launches: list[Launch] = []
    with ExitStack() as stack:
        for module in (attention_triton, fused_triton, quantized_triton):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                recorder = Recorder(getattr(module, name), launches)
                stack.enter_context(mock.patch.object(module, name, recorder))
        known = mock.patch.object(attention_triton, "get_gpu_info", return_value=gpu)
        stack.enter_context(known)
        function()
    return launches


def compile_launch(launch: Launch, capability: int) -> Any:
    """Triton's compiled kernel for this launch, specialised as Triton does: integers that are 1 are
    constants, pointers and multiples of 16 are known to be such."""
    kernel = launch.kernel
    given = dict(zip(kernel.arg_names, launch.args, strict=False)) | launch.kwargs
    options = {name: given.pop(name) for name in list(given) if name not in kernel.arg_names}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, given[parameter.name]
        is_special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or (is_special and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = "*" + TYPES[value.dtype]
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        else:
            signature[name] = "fp32"
        is_multiple = signature[name][0] == "*" or (is_special and value % 16 == 0)
        if is_multiple and signature[name] != "constexpr":
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def describe(compiled: Any) -> dict[str, int]:
    """Bytes of shared memory, registers, bytes of stack and local memory, and INSTRUCTIONS."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, int] = {"shared": compiled.metadata.shared}
    for name, word in (("registers", "REG"), ("stack", "STACK"), ("local", "LOCAL")):
        found[name] = int(re.findall(rf"\b{word}:(\d+)", usage)[0])
    for name, pattern in INSTRUCTIONS.items():
        found[name] = len(re.findall(pattern, compiled.asm["ptx"]))
    return found


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def attention(
    query_lens: list[int],
    context: int,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    head_dim: int = 128,
    group: int = 4,
    **options: Any,
) -> Callable[[], Any]:
    """One layer's attention: 8 key heads, blocks of 16, room for `context` tokens."""

    def call() -> None:
        num_seqs, backend = len(query_lens), TritonBackend()
        kv_cache = KVCacheSpec(8, head_dim, head_dim).allocate(9999, 16, cache_dtype or dtype, META)
        sizes = ((num_seqs, context // 16), (num_seqs + 1,), (num_seqs,))
        step = [empty(*size, dtype=torch.int32) for size in sizes]
        slots = empty(sum(query_lens), dtype=torch.int64)
        metadata = backend.plan(StepMetadata(slots, *step, np.array(query_lens)), 16, dtype)
        query = empty(sum(query_lens), 8 * group, head_dim, dtype=dtype)
        backend.attend(query, kv_cache, metadata, scale=head_dim**-0.5, **options)

    return call


def fused(
    size: int,
    rotary_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
) -> Callable[[], Any]:
    """All kernels of fused_triton: heads of `size`, a hidden size of 40 heads."""

    def call() -> None:
        hidden, slots, ops = 40 * size, empty(256, dtype=torch.int64), fused_triton.TritonOps()
        caches = KVCacheSpec(8, size, size).allocate(9999, 16, cache_dtype or dtype, META)
        x, norm, metadata = empty(256, hidden, dtype=dtype), mock.Mock(), StepMetadata(*[slots] * 4)
        norm.weight, norm.eps = empty(24, size, dtype=dtype), 1e-6
        table = empty(256, 1, 2 * rotary_dim, dtype=dtype).chunk(2, dim=-1)
        qkv, backend = empty(256, 32 * size, dtype=dtype), TritonBackend()
        for qk_norm in (norm, None):
            attn = mock.Mock(qk_norm=qk_norm)
            ops.rope_and_store(qkv, attn, table, caches, metadata)
        heads = qkv.unflatten(1, (32, size))
        backend.store(heads[:, 16:24], heads[:, 24:], caches, metadata)
        if cache_dtype is None:
            ops.add_rms_norm(x, x, empty(hidden, dtype=dtype), 1e-6)
            ops.silu_and_mul(x)
            fused_triton.quantize_rows(x)
            fused_triton.quantize_rows(x, empty(1, dtype=torch.float32))

    return call


def quantized(
    kind: str, num_tokens: int, num_groups: int = 1, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], Any]:
    """A product: 4096 inputs, 4096 outputs."""

    def call() -> Any:
        width, code = (2048, torch.uint8) if kind == "int4" else (4096, torch.int8)
        scales = empty(4096, num_groups, dtype=torch.float32)
        weight = QuantizedWeight(kind, empty(4096, width, dtype=code), scales)
        multiply = quantized_triton.pack(weight)
        return multiply(weight, empty(num_tokens, 4096, dtype=dtype), 0)

    return call


HALF, INT8, FP8 = torch.float16, torch.int8, torch.float8_e4m3fn
DECODE, PREFILL = [1] * 512, [1024] * 8
CASES: dict[str, Callable[[], Any]] = {
    "decode": attention(DECODE, 4096),
    "split decode": attention([1], 32768),
    "prefill": attention(PREFILL, 4096),
    "mixed": attention([1, 1, 300], 32768),
    "decode float16": attention(DECODE, 4096, HALF),
    "prefill float16": attention(PREFILL, 4096, HALF),
    "decode int8": attention(DECODE, 4096, cache_dtype=INT8),
    "decode fp8": attention(DECODE, 4096, cache_dtype=FP8),
    "prefill fp8": attention(PREFILL, 4096, cache_dtype=FP8),
    "window and soft cap": attention([1, 999], 4096, sliding_window=1024, logits_soft_cap=30.0),
    "wide heads": attention([1, 999], 4096, head_dim=256, group=8),
    "wide float16": attention([1, 999], 4096, HALF, head_dim=256, group=8),
    "wide float32": attention([1, 999], 4096, torch.float32, head_dim=256),
    "heads of 80": attention([1, 999], 4096, head_dim=80, group=1),
    "quantized int4": quantized("int4", 1, 32),
    "quantized int4, many": quantized("int4", 999, 32),
    "quantized int8": quantized("int8", 1),
    "quantized int8, many": quantized("int8", 999),
    "quantized float16": quantized("int8", 999, dtype=HALF),
    "fused 128": fused(128, 128),
    "fused 80": fused(80, 32),
    "fused 64": fused(64, 64, torch.float32),
    "fused float16": fused(128, 128, HALF),
    "fused int8": fused(128, 128, HALF, INT8),
    "fused fp8": fused(128, 128, HALF, FP8),
}


def main(capability: int, names: list[str]) -> Iterator[dict[str, Any]]:
    """Compile each case for one GPU. A prefill is two launches, a split decode two kernels."""
    for name in names:
        for launch in record(CASES[name], GPUS[capability]):
            keys = ("PER_SEQUENCE", "IS_SPLIT", "BLOCK_M", "num_warps")
            yield {
                "case": name,
                "kernel": launch.kernel.__name__,
                **{key: launch.kwargs[key] for key in keys if key in launch.kwargs},
                **describe(compile_launch(launch, capability)),
            }


if __name__ == "__main__":
    if triton.knobs.runtime.interpret:
        sys.exit("TRITON_INTERPRET is set, so that there is no compiler. Unset it.")
    for line in main(int(sys.argv[1]), sys.argv[2:] or list(CASES)):
        print(json.dumps(line), flush=True)
