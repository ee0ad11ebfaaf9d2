"""Compile the kernels for GPUs that this machine lacks, and describe the result.

    python tests/aot_kernels.py 90         # an H100 or H200: one line of JSON for each kernel
    python tests/aot_kernels.py 90 decode "rope 80"     # some cases only
    python tests/aot_kernels.py 90 table   # attention for all shapes of heads (minutes)

The functions of attention_triton.py and fused_triton.py run on tensors of the meta device (shapes
without contents), and their launches are recorded instead of carried out. So the arguments, tiles
and options compiled here are the real ones. The meta device also shows that no launch depends on a
tensor's contents.

Triton's interpreter must be off: a process that has imported Triton with TRITON_INTERPRET=1 has no
compiler.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from nanoserve.attention import StepMetadata
from nanoserve.kernels import attention_triton, fused_triton, quantized_triton
from nanoserve.kernels.attention_triton import GpuInfo
from nanoserve.kernels.quantized import QuantizedWeight
from nanoserve.kv_cache import KVCacheSpec
from nanoserve.layers import LayerConfig, QKNorm

META = torch.device("meta")
GPUS = {  # shared memory: CUDA C++ Programming Guide, compute capabilities, less 1 KiB of its own
    80: GpuInfo(80, 108, 163 * 1024),  # A100
    86: GpuInfo(86, 82, 99 * 1024),  # RTX 3090; the smallest shared memory of all
    89: GpuInfo(89, 128, 99 * 1024),  # RTX 4090, L4
    90: GpuInfo(90, 132, 227 * 1024),  # H100, H200
    100: GpuInfo(100, 148, 227 * 1024),  # B200
    120: GpuInfo(120, 170, 99 * 1024),  # RTX 5090
}
KERNELS = {  # where each kernel is launched
    "paged_attention_kernel": attention_triton,
    "merge_splits_kernel": attention_triton,
    "store_kv_kernel": attention_triton,
    "add_rms_norm_kernel": fused_triton,
    "rope_and_store_kernel": fused_triton,
    "silu_and_mul_kernel": fused_triton,
    "quantized_matmul_kernel": quantized_triton,
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
INSTRUCTIONS = {  # counted in the assembly
    "mma": r"\bmma\.sync",  # tensor cores, a warp each (Ampere; small tiles everywhere)
    "wgmma": r"\bwgmma\.mma_async",  # Hopper's
    "tcgen05": r"\btcgen05\.mma",  # datacenter Blackwell's
    "copies": r"\bcp\.async\.cg",  # to shared memory ahead of their use: a loop in stages has them
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
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.launches.append(Launch(self.kernel, grid, args, kwargs))

        return launch


@contextmanager
def recorded(launches: list[Launch], gpu: GpuInfo | None = None) -> Iterator[None]:
    """Launches are kept instead of made, and planned for `gpu`, if one is given."""
    with ExitStack() as stack:
        for name, module in KERNELS.items():
            recorder = Recorder(getattr(module, name), launches)
            stack.enter_context(mock.patch.object(module, name, recorder))
        if gpu is not None:
            stack.enter_context(
                mock.patch.object(attention_triton, "get_gpu_info", return_value=gpu)
            )
        yield


def record(function: Callable[..., Any], gpu: GpuInfo) -> list[Launch]:
    """The launches of `function()` on `gpu`."""
    launches: list[Launch] = []
    with recorded(launches, gpu):
        function()
    return launches


class Variant(NamedTuple):
    """What decides whether two launches of a kernel run the same compiled code."""

    signature: dict[str, str]  # argument -> type
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, Any]  # of the compiler


@lru_cache
def compilable(kernel: Any) -> Any:
    """The kernel itself, or what the interpreter's stand-in for it stands for."""
    return kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)


def variant_of(launch: Launch) -> Variant:
    """Specialised as Triton does: integers that are 1 are constants, pointers and multiples of 16
    are known to be such."""
    kernel = compilable(launch.kernel)
    names = kernel.arg_names
    given = dict(zip(names, launch.args, strict=False)) | launch.kwargs
    options = {name: given.pop(name) for name in list(given) if name not in names}
    variant = Variant({}, {}, {}, options)
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, given[parameter.name]
        is_special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or (is_special and value == 1):
            variant.signature[name], variant.constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            variant.signature[name] = "*" + TYPES[value.dtype]
        elif isinstance(value, int):
            variant.signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        else:
            variant.signature[name] = "fp32"
        is_multiple = is_special and value % 16 == 0
        is_pointer = variant.signature[name][0] == "*"
        if variant.signature[name] != "constexpr" and (is_pointer or is_multiple):
            variant.attributes[(place,)] = [["tt.divisibility", 16]]
    return variant


def compile_launch(launch: Launch, capability: int) -> Any:
    """Triton's compiled kernel for this launch."""
    variant = variant_of(launch)
    source = ASTSource(launch.kernel, variant.signature, variant.constants, variant.attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=variant.options)


def describe(compiled: Any) -> dict[str, int]:
    """Bytes of shared memory, registers, bytes of stack and local memory, and INSTRUCTIONS."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, int] = {"shared": compiled.metadata.shared}
    for name, word in (("registers", "REG"), ("stack", "STACK"), ("local", "LOCAL")):
        (number,) = re.findall(rf"\b{word}:(\d+)", usage)
        found[name] = int(number)
    for name, pattern in INSTRUCTIONS.items():
        found[name] = len(re.findall(pattern, compiled.asm["ptx"]))
    return found


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def attention(
    num_tokens: int,
    num_seqs: int,
    context: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    head_dim: int = 128,
    value_dim: int | None = None,
    group: int = 4,
    **options: Any,
) -> Callable[[], Any]:
    """A call of paged_attention_triton: 8 key heads, blocks of 16, room for `context` tokens."""

    def call() -> Any:
        spec = KVCacheSpec(8, head_dim, value_dim or head_dim)
        kv_cache = spec.allocate(9999, 16, cache_dtype or dtype, META)
        return attention_triton.paged_attention_triton(
            empty(num_tokens, 8 * group, head_dim, dtype=dtype),
            *kv_cache[:2],
            empty(num_seqs, context // 16, dtype=torch.int32),
            empty(num_seqs + 1, dtype=torch.int32),
            empty(num_seqs, dtype=torch.int32),
            scale=head_dim**-0.5,
            kv_scales=kv_cache[2:],
            **options,
        )

    return call


def store(dtype: torch.dtype = torch.bfloat16, head_dim: int = 128) -> Callable[[], Any]:
    """A call of store_kv_triton."""

    def call() -> Any:
        product, slots = empty(256, 48, head_dim, dtype=dtype), empty(256, dtype=torch.int64)
        caches = KVCacheSpec(8, head_dim, head_dim).allocate(9999, 16, dtype, META)
        return attention_triton.store_kv_triton(product[:, 32:40], product[:, 40:], *caches, slots)

    return call


def norm(size: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], Any]:
    """A call of add_rms_norm_triton."""
    rows, weight = (256, size), (size,)
    return lambda: fused_triton.add_rms_norm_triton(
        empty(*rows, dtype=dtype), empty(*rows, dtype=dtype), empty(*weight, dtype=dtype), 1e-6
    )


def rope(
    head_dim: int,
    *,
    rotary_dim: int | None = None,
    has_norm: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[], Any]:
    """A call of rope_and_store_triton: 16 query heads, 8 key heads."""

    def call() -> Any:
        config = LayerConfig(dtype, META)
        caches = KVCacheSpec(8, head_dim, head_dim).allocate(9999, 16, dtype, META)
        table = empty(256, 1, 2 * (rotary_dim or head_dim), dtype=dtype).chunk(2, dim=-1)
        slots = empty(256, dtype=torch.int64)
        metadata = StepMetadata(slots, slots, slots, slots)
        qk_norm = QKNorm(16, 24, head_dim, 1e-6, config) if has_norm else None
        qkv = empty(256, 32 * head_dim, dtype=dtype)
        backend = attention_triton.TritonBackend()
        return fused_triton.rope_and_store_triton(qkv, qk_norm, table, backend, caches, metadata)

    return call


def activation(size: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], Any]:
    """A call of silu_and_mul_triton."""
    return lambda: fused_triton.silu_and_mul_triton(empty(256, 2 * size, dtype=dtype))


def quantized(
    kind: str, num_tokens: int, num_groups: int = 1, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], Any]:
    """A call of TritonProduct: 4096 inputs, 4096 outputs."""

    def call() -> Any:
        width, code = (2048, torch.uint8) if kind == "int4" else (4096, torch.int8)
        scales = empty(4096, num_groups, dtype=torch.float32)
        weight = QuantizedWeight(kind, empty(4096, width, dtype=code), scales)
        return quantized_triton.TritonProduct(weight)(empty(num_tokens, 4096, dtype=dtype))

    return call


INT8, FP8 = {"cache_dtype": torch.int8}, {"cache_dtype": torch.float8_e4m3fn}
CASES: dict[str, Callable[[], Any]] = {
    "decode": attention(512, 512, 4096),
    "split decode": attention(1, 1, 32768),
    "prefill": attention(8192, 8, 4096),
    "split prefill": attention(300, 1, 4096, group=2),
    "store": store(),
    "8 bits, decode int8": attention(512, 512, 4096, **INT8),
    "8 bits, decode fp8": attention(512, 512, 4096, **FP8),
    "8 bits, prefill int8": attention(8192, 8, 4096, **INT8),
    "8 bits, prefill fp8": attention(8192, 8, 4096, **FP8),
    "quantized int4, a token": quantized("int4", 1, 32),
    "quantized int4, a batch": quantized("int4", 32, 32),
    "quantized int4, many": quantized("int4", 999, 32),
    "quantized int8, a token": quantized("int8", 1),
    "quantized int8, many": quantized("int8", 999),
    "quantized int8, float16": quantized("int8", 999, dtype=torch.float16),
    "window and soft cap": attention(4096, 8, 4096, sliding_window=1024, logits_soft_cap=30.0),
    "wide heads": attention(4096, 8, 4096, head_dim=256, group=8),
    "wide float32": attention(4096, 8, 4096, head_dim=256, dtype=torch.float32),
    "narrow heads": attention(4096, 8, 4096, head_dim=64, group=1, dtype=torch.float16),
    **{f"norm {size}": norm(size) for size in (576, 1024, 2560, 3584, 5120, 8192)},
    **{f"rope {dim}": rope(dim) for dim in (64, 80, 128, 256)},
    **{f"rope {dim}, no norm": rope(dim, has_norm=False) for dim in (64, 80, 128, 256)},
    "rope 80, a part": rope(80, rotary_dim=32),
    "rope 128, a part": rope(128, rotary_dim=32),
    "rope 256, a part": rope(256, rotary_dim=64),
    **{f"activation {size}": activation(size) for size in (2400, 3072, 4864)},
    "norm 2560, float32": norm(2560, torch.float32),
    "rope 80, float32": rope(80, dtype=torch.float32),
    "activation 2400, float32": activation(2400, torch.float32),
}


def table_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Attention of all groups, head sizes and half-precision types, with splits and without: a
    batch of decodes or one, and a long prompt or a short one beside a decode, in turns."""
    shapes = itertools.product((1, 2, 4, 8), (64, 80, 128, 256), (torch.float16, torch.bfloat16))
    for number, (group, head_dim, dtype) in enumerate(shapes):
        options: dict[str, Any] = {"group": group, "head_dim": head_dim, "dtype": dtype}
        name = f"group {group}, heads of {head_dim}, {TYPES[dtype]}"
        is_split = bool((number + number // 2 + number // 8) % 2)
        num_seqs, num_tokens = (1, 64) if is_split else (999, 9999)
        yield f"decode, {name}", attention(num_seqs, num_seqs, 8192, **options)
        yield f"prefill, {name}", attention(num_tokens, 2, 2048, **options)


def main(capability: int, names: list[str]) -> Iterator[dict[str, Any]]:
    """Compile each case for one GPU. A prefill is two launches, a split decode two kernels."""
    cases = dict(table_cases()) if names == ["table"] else {name: CASES[name] for name in names}
    for name, case in cases.items():
        for launch in record(case, GPUS[capability]):
            keys = ("PER_SEQUENCE", "IS_SPLIT", "NUM_SPLITS", "BLOCK_M", "BLOCK_N", "num_warps")
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
