"""Compile the kernels for GPUs that this machine lacks, and describe the result.

    python tests/aot_kernels.py 90         # an H100 or H200: one line of JSON for each kernel

The functions of attention_triton.py run on tensors of the meta device (shapes without contents),
and their launches are recorded instead of carried out. So the arguments, tiles and options compiled
here are the real ones. The meta device also shows that no launch depends on a tensor's contents.

Triton's interpreter must be off: a process that has imported Triton with TRITON_INTERPRET=1 has no
compiler.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanoserve.kernels import attention_triton, fused_triton
from nanoserve.kernels.attention_triton import GpuInfo

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
}
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
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


def compile_launch(launch: Launch, capability: int) -> Any:
    """Triton's compiled kernel, specialised as a launch would: integers that are 1 are constants,
    pointers and multiples of 16 are known to be such."""
    kernel = launch.kernel
    names = kernel.arg_names
    given = dict(zip(names, launch.args, strict=False)) | launch.kwargs
    options = {name: given.pop(name) for name in list(given) if name not in names}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, given[parameter.name]
        is_special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or (is_special and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        else:
            signature[name] = "fp32"
        is_multiple = is_special and value % 16 == 0
        if signature[name] != "constexpr" and (signature[name][0] == "*" or is_multiple):
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
        (number,) = re.findall(rf"\b{word}:(\d+)", usage)
        found[name] = int(number)
    for name, pattern in INSTRUCTIONS.items():
        found[name] = len(re.findall(pattern, compiled.asm["ptx"]))
    return found


def attention(
    num_tokens: int,
    num_seqs: int,
    context: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    value_dim: int | None = None,
    group: int = 4,
    **options: Any,
) -> Callable[[], Any]:
    """A call of paged_attention_triton: 8 key heads, blocks of 16, room for `context` tokens."""

    def call() -> Any:
        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        return attention_triton.paged_attention_triton(
            empty(num_tokens, 8 * group + 16, head_dim)[:, : 8 * group],  # a view of q, k and v
            empty(9999, 16, 8, head_dim),
            empty(9999, 16, 8, value_dim or head_dim),
            empty(num_seqs, context // 16, dtype=torch.int32),
            empty(num_seqs + 1, dtype=torch.int32),
            empty(num_seqs, dtype=torch.int32),
            scale=head_dim**-0.5,
            **options,
        )

    return call


def store(dtype: torch.dtype = torch.bfloat16, head_dim: int = 128) -> Callable[[], Any]:
    """A call of store_kv_triton."""

    def call() -> Any:
        product = torch.empty(256, 48, head_dim, dtype=dtype, device="meta")
        cache = torch.empty(9999, 16, 8, head_dim, dtype=dtype, device="meta")
        slots = torch.empty(256, dtype=torch.int64, device="meta")
        return attention_triton.store_kv_triton(
            product[:, 32:40], product[:, 40:], cache, cache, slots
        )

    return call


CASES: dict[str, Callable[[], Any]] = {
    "decode": attention(512, 512, 4096),
    "split decode": attention(1, 1, 32768),
    "prefill": attention(8192, 1, 8192),
    "store": store(),
    "window and soft cap": attention(4096, 8, 4096, sliding_window=1024, logits_soft_cap=30.0),
    "wide heads": attention(4096, 8, 4096, head_dim=256, group=8),
    "wide float32": attention(4096, 8, 4096, head_dim=256, dtype=torch.float32),
}


def main(capability: int, names: list[str]) -> Iterator[dict[str, Any]]:
    """Compile each case for one GPU. A prefill is two launches, a split decode two kernels."""
    for name in names:
        for launch in record(CASES[name], GPUS[capability]):
            keys = ("PER_SEQUENCE", "NUM_SPLITS", "BLOCK_M", "BLOCK_N", "num_warps")
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
