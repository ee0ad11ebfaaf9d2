"""How does a CPU do the work between two products in one pass? By a few hundred lines of C++.

native_cpu.cpp has one loop for each of four parts of a layer: the residual addition with its norm;
rotary embedding and storing; attention; the activation. It is compiled when it is first needed, in
a few seconds, with the machine's own C++ compiler, for exactly this processor, and kept in the
user's cache folder. Without a compiler, PyTorch's operators do the same work in more passes:

                    with a compiler        without
    attention       NativeBackend          TorchBackend
    the rest        Native                 layers.py

Left out: float16; systems whose compiler has no OpenMP (macOS as Apple ships it) or no POSIX
command line (Windows): they take the right column.

vLLM: csrc/cpu/, compiled when vLLM is installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoserve.attention import KVCache, StepMetadata
from nanoserve.kernels.fused import FusedAttention
from nanoserve.kernels.quantized_cache import QuantizedReference
from nanoserve.layers import Rope

logger = logging.getLogger("nanoserve")

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = "-std=c++17 -O3 -march=native -fno-math-errno -fno-trapping-math -fopenmp -shared -fPIC"
COMPILE_TIMEOUT = 120.0  # seconds
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}
CACHE_NAMES = {**NAMES, torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
INT, FLOAT, POINTER = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
ARGUMENTS = {
    "bind_threads": [INT],
    "add_rms_norm": [INT, INT, FLOAT, *[POINTER] * 4],
    "silu_and_mul": [INT, INT, *[POINTER] * 2],
    "rope_and_store": [*[INT] * 8, FLOAT, *[POINTER] * 10],
    "paged_attention": [*[INT] * 9, FLOAT, FLOAT, *[POINTER] * 9],
    "multiply": [*[INT] * 3, *[POINTER] * 4],
    "quantized_multiply": [*[INT] * 5, *[POINTER] * 5],
}


# -- the library --


@cache
def load_library(source: Path = SOURCE) -> ctypes.CDLL | None:
    """The compiled source; None, with a line in the log, if it cannot be compiled here.

    The compiler is $CXX, or c++. It is needed only where no library is kept: an image may be built
    where there is one, and run where there is none.
    """
    command = [*shlex.split(os.environ.get("CXX") or "c++"), *shlex.split(FLAGS)]
    try:
        # "-march=native" makes code for this processor, and several machines may share a home.
        lines = set(Path("/proc/cpuinfo").read_text().splitlines())
        cpu = sorted(each for each in lines if each.startswith(("model name", "flags", "Features")))
        needs = repr([source.read_text(), command, cpu])
        name = f"{source.stem}-{hashlib.sha256(needs.encode()).hexdigest()[:16]}.so"
        folder = cache_folder()
        if folder and (folder / name).exists():
            return ctypes.CDLL(str(folder / name))
        can_keep = folder is not None and os.access(folder, os.W_OK)
        with tempfile.TemporaryDirectory(dir=folder if can_keep else None) as unfinished:
            file = Path(unfinished, name)
            command += [str(source), "-o", str(file)]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT)
            library = ctypes.CDLL(str(file))  # it stays loaded without its file
            if folder and can_keep:
                file.replace(folder / name)
        return library
    except (OSError, subprocess.SubprocessError) as error:
        printed = (getattr(error, "stderr", None) or b"").decode(errors="replace")
        logger.info("kernels in C++ cannot be compiled here: %s %s", error, printed[:500])
        return None


def cache_folder() -> Path | None:
    """nanoserve in the user's cache folder; None if it cannot be, or is another user's (a library
    that is loaded runs with the user's rights)."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "nanoserve")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if folder.stat().st_uid in (0, os.getuid()) else None
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None


def call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    """Call a function of the library; tensors are passed as pointers, None as a null pointer.
    Raises ValueError with what the function returns, if anything."""
    function = find_function(library, name)
    pointers = (each.data_ptr() if isinstance(each, Tensor) else each for each in arguments)
    if error := function(*pointers):
        raise ValueError(error.decode())


@cache
def find_function(library: ctypes.CDLL, name: str) -> Any:
    """`name` is one of ARGUMENTS, with the names of its types behind a dot."""
    function = getattr(library, name.replace(".", "_"))
    function.argtypes = ARGUMENTS[name.partition(".")[0]]
    function.restype = ctypes.c_char_p
    return function


def bind_threads(number: int) -> None:
    """Each thread of the calling thread's team of `number`, but itself, keeps to a core of its own:
    where it is waited for, it is woken there, and not beside the one that waits. The calling thread
    goes where it likes, which is the core that is left."""
    if library := load_library():
        call(library, "bind_threads", number)


# -- what lies between two products --


class Native:
    """What fused.py calls, for one dtype."""

    backend_cls = QuantizedReference

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.library, self.dtype = library, NAMES[dtype]

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum."""
        x, residual, output = x.contiguous(), residual.contiguous(), torch.empty_like(x)
        name = f"add_rms_norm.{self.dtype}"
        call(self.library, name, *x.shape, eps, x, residual, weight, output)
        return output, x

    def rope_and_store(
        self, x: Tensor, attn: FusedAttention, rope: Rope, kv_cache: KVCache, metadata: StepMetadata
    ) -> Tensor:
        """For caches that lie as KVCacheSpec.allocate makes them."""
        (cos, sin), (keys, values, *scales), norm = rope, kv_cache, attn.qk_norm
        num_blocks, block_size, num_kv_heads, head_dim = keys.shape
        query = x.new_empty(len(x), x.shape[1] // head_dim - 2 * num_kv_heads, head_dim)
        call(
            self.library, f"rope_and_store.{self.dtype}_{CACHE_NAMES[keys.dtype]}",
            *query.shape[:2], num_kv_heads, head_dim, cos.shape[-1], cos.stride(0), block_size,
            num_blocks, norm.eps if norm else 0.0, x.contiguous(), norm.weight if norm else None,
            cos, sin, metadata.slot_mapping, keys, values, *(scales or (None, None)), query,
        )  # fmt: skip
        return query

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """layers.silu_and_mul."""
        gate_up = gate_up.contiguous()
        output = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        call(self.library, f"silu_and_mul.{self.dtype}", *output.shape, gate_up, output)
        return output


# -- attention --


class NativeBackend(QuantizedReference):
    """Compiled loops over the blocks where they lie, for prompts and decodes."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def plan(self, metadata: StepMetadata, block_size: int, dtype: torch.dtype) -> StepMetadata:
        return metadata  # nothing is prepared

    def attend(
        self, query: Tensor, kv_cache: KVCache, metadata: StepMetadata, **options: Any
    ) -> Tensor:
        """For caches that lie as KVCacheSpec.allocate makes them."""
        keys, values, *scales = kv_cache
        query, table = query.contiguous(), metadata.block_table
        window, soft_cap = options.get("sliding_window") or 0, options.get("logits_soft_cap") or 0.0
        output = query.new_empty(*query.shape[:2], values.shape[-1])
        call(
            self.library, f"paged_attention.{NAMES[query.dtype]}_{CACHE_NAMES[keys.dtype]}",
            len(table), *query.shape[1:], *keys.shape[:3], values.shape[-1], table.stride(0),
            window, options["scale"], soft_cap, query, keys, values, *(scales or (None, None)),
            metadata.query_start_loc, metadata.seq_lens, table, output,
        )  # fmt: skip
        return output
