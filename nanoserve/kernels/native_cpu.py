"""How does a CPU do the work between two products in one pass? By a hundred lines of C++.

native_cpu.cpp has one loop for each of four parts of a layer: the residual addition with its norm;
rotary embedding and storing; attention of a decode; the activation. One more is for what grammars
forbid (extras/structured_output/bitmask.py). It is compiled once with the machine's own C++
compiler, for exactly this processor, and kept in the user's cache folder. Where there is no
compiler, the PyTorch versions do the same work in more passes:

                    with a compiler        without
    attention       NativeBackend          TorchBackend
    the rest        Native                 layers.py

Prompts of many tokens are attended to as TorchBackend does it: there, products are all the work.

Left out: float16; systems whose compiler has no OpenMP (macOS as Apple ships it) or no POSIX
command line (Windows): they take the right column.

vLLM: csrc/cpu/, compiled when vLLM is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoserve.attention import AttentionBackend, KVCache, StepMetadata
from nanoserve.kernels.attention_cpu import SparseDecode, TorchBackend, as_rows
from nanoserve.kernels.fused import QKNorm, rope_and_store
from nanoserve.layers import Rope, silu_and_mul

logger = logging.getLogger("nanoserve")

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = "-std=c++17 -O3 -march=native -fno-math-errno -fno-trapping-math -fopenmp -shared -fPIC"
COMPILE_TIMEOUT = 60.0  # seconds
RETRY_AFTER = 3600.0  # seconds, for a compiler that hung
KEEP_FOR = 30 * 86400.0  # seconds, for the libraries of other sources
MAX_DIM = 1024  # numbers of a head, as in the source
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}
CACHES = {torch.int8: "_int8", torch.float8_e4m3fn: "_fp8"}  # of 8 bits, for both of them


# -- the library --


def load_library(source: Path | None = None) -> ctypes.CDLL | None:
    """The compiled source (None: native_cpu.cpp); None, with a line in the log, if it cannot be
    compiled here.

    The compiler is $CXX, or c++. It is needed only where no library is kept: an image may be built
    where there is one, and run where there is none.
    """
    source = source or SOURCE
    if platform.system() != "Linux":
        return None
    try:
        command = [*(shlex.split(os.environ.get("CXX", "")) or ["c++"]), *shlex.split(FLAGS)]
        folder, name = cache_folder(), f"{source.stem}-{_digest_of_need(command, source)}"
        library = _load_kept(folder, name) if folder else None
        if library is None and shutil.which(command[0]) is None:
            logger.info(
                "no C++ compiler (%s) was found: PyTorch's operators do their work", command[0]
            )
            return None
        return library or _compile([*command, str(source)], name, folder)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        logger.info(
            "kernels in C++ cannot be compiled here, so PyTorch's operators do their work: %s",
            _reason(error),
        )
        return None


def cache_folder() -> Path | None:
    """A folder that nobody else can write to: nanoserve in the user's cache folder; None if that
    cannot be. A library that is loaded runs with the user's rights."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not folder.is_absolute():  # its specification: a relative one counts as none
            folder = Path.home() / ".cache"
        folder /= "nanoserve"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    is_ours = status.st_uid in (0, os.getuid())
    return folder if is_ours and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else None


def _load_kept(folder: Path, name: str) -> ctypes.CDLL | None:
    """A file NAME-DIGEST.so that is whole: its bytes have the digest that its name tells. (To load
    half a library ends the process.)"""
    for file in folder.glob(f"{name}-*.so"):
        try:
            if file.stem == f"{name}-{_digest(file.read_bytes())}":
                return ctypes.CDLL(str(file))
        except OSError:  # it went away, or is another system's (same home)
            continue
    return None


def _compile(command: list[str], name: str, folder: Path | None) -> ctypes.CDLL:
    """Compile in a new folder, load the result, and only then give it its name: what cannot be
    loaded is not kept. The new folder is then deleted; a library stays loaded without its file.

    A compiler that hung is not run again for RETRY_AFTER seconds. Raises OSError or
    subprocess.SubprocessError.
    """
    folder = folder if folder and os.access(folder, os.W_OK) else None
    hung = folder / f"{name}.hung" if folder else None
    if hung and hung.exists() and time.time() - hung.stat().st_mtime < RETRY_AFTER:
        raise OSError(f"the compiler hung a short time ago (delete {hung} to try it again)")
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=folder) as unfinished:
        file = Path(unfinished, "library.so")
        try:
            _run([*command, "-o", str(file)])
        except subprocess.TimeoutExpired:
            if hung:
                hung.touch()
            raise
        library = ctypes.CDLL(str(file))
        if folder:
            with file.open("rb") as written:
                digest = _digest(written.read())
                os.fsync(written.fileno())
            _remove_old(folder, name.partition("-")[0])
            os.replace(file, folder / f"{name}-{digest}.so")
    return library


def _run(command: list[str]) -> None:
    """Run a compiler; after COMPILE_TIMEOUT, or if we are interrupted, end it with all processes
    that it started (they are a group). Raises OSError or subprocess.SubprocessError."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(
        command, stdin=null, stdout=null, stderr=pipe, start_new_session=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=COMPILE_TIMEOUT)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command[0], stderr=errors)


def _remove_old(folder: Path, stem: str) -> None:
    """Delete what earlier sources, and processes that were killed, left behind."""
    for path in folder.glob(f"{stem}-*"):
        with contextlib.suppress(OSError):  # another process may do the same
            if time.time() - path.stat().st_mtime > KEEP_FOR:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _reason(error: Exception) -> str:
    """The line that tells most: of what a compiler printed, the first with an error."""
    printed = error.stderr if isinstance(error, subprocess.CalledProcessError) else b""
    lines = [line.strip() for line in printed.decode("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line]
    return next((line for line in lines if "error" in line), (lines or [str(error)])[-1])


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _digest_of_need(command: list[str], source: Path) -> str:
    """Of all that the library depends on: source, command, processor. "-march=native" makes code
    for this processor, and several machines may share a home folder. The compiler itself is no part
    of it, because it may be gone."""
    parts = [source.read_bytes(), " ".join(command).encode(), platform.machine().encode()]
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        kept = ("model name", "flags", "Features", "CPU part")
        for line in cpu.read_text("utf-8", "replace").split("\n\n")[0].splitlines():
            parts += [line.encode()] if line.startswith(kept) else []
    return _digest(*parts)


# -- what lies between two products --


class RopeSizes(ctypes.Structure):
    """Of one call: the fields of the source's struct."""

    _fields_ = (
        *((name, ctypes.c_int) for name in (
            "num_tokens", "num_heads", "num_kv_heads", "head_dim", "rotary_dim", "rope_stride",
            "block_size", "num_blocks",
        )),
        ("eps", ctypes.c_float),
    )  # fmt: skip


class Native:
    """The functions of layers.py for one dtype, compiled. Tensors that do not lie as the compiled
    code needs them are given to the plain functions."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        name, pointer = NAMES[dtype], ctypes.c_void_p
        self._norm = getattr(library, f"add_rms_norm_{name}")
        self._norm.argtypes = (
            ctypes.c_int, ctypes.c_int, pointer, pointer, pointer, ctypes.c_float, pointer,
        )  # fmt: skip
        self._rope: dict[torch.dtype, Any] = {}  # by the type of the cache
        for cache, suffix in {dtype: "", **CACHES}.items():
            self._rope[cache] = getattr(library, f"rope_and_store_{name}{suffix}")
            self._rope[cache].argtypes = (ctypes.POINTER(RopeSizes), *[pointer] * 10)
            self._rope[cache].restype = ctypes.c_int
        self._silu = getattr(library, f"silu_and_mul_{name}")
        self._silu.argtypes = (ctypes.c_int, ctypes.c_int, pointer, pointer)
        self._norm.restype = self._silu.restype = None
        self._dtype = dtype

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum."""
        x, residual, output = x.contiguous(), residual.contiguous(), torch.empty_like(x)
        self._norm(
            len(x), x.shape[1], x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps,
            output.data_ptr(),
        )  # fmt: skip
        return output, x

    def rope_and_store(
        self,
        qkv: Tensor,
        qk_norm: QKNorm | None,
        rope: Rope,
        backend: AttentionBackend,
        kv_cache: KVCache,
        metadata: StepMetadata,
    ) -> Tensor:
        """fused.rope_and_store. Raises IndexError for a slot that the cache does not have."""
        (cos, sin), (keys, values) = rope, kv_cache[:2]
        num_blocks, block_size, num_kv_heads, head_dim = keys.shape
        slots = metadata.slot_mapping
        lies_right = (
            isinstance(backend, TorchBackend)
            and all(each.transpose(1, 2).is_contiguous() for each in kv_cache)
            and keys.shape == values.shape
            and keys.dtype in self._rope
            and self._dtype == cos.dtype == sin.dtype == qkv.dtype
            and len(slots) == len(cos) == len(sin) == len(qkv)
            and slots.dtype == torch.int64
            and cos.stride(-1) == sin.stride(-1) == 1
            and cos.stride(0) == sin.stride(0)
            and slots.is_contiguous()
            and head_dim <= MAX_DIM
        )
        if not lies_right:
            return rope_and_store(qkv, qk_norm, rope, backend, kv_cache, metadata)
        qkv = qkv.contiguous()
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        query = qkv.new_empty(len(qkv), num_heads, head_dim)
        sizes = RopeSizes(
            len(qkv), num_heads, num_kv_heads, head_dim, cos.shape[-1], cos.stride(0), block_size,
            num_blocks, 0.0 if qk_norm is None else qk_norm.eps,
        )  # fmt: skip
        is_right = self._rope[keys.dtype](
            sizes,
            qkv.data_ptr(),
            None if qk_norm is None else qk_norm.weight.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            slots.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            *([each.data_ptr() for each in kv_cache[2:]] or (None, None)),
            query.data_ptr(),
        )
        if not is_right:
            last = num_blocks * block_size - 1
            raise IndexError(f"slot_mapping names a slot that is not in 0 .. {last}.")
        return query

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """layers.silu_and_mul."""
        if gate_up.dim() != 2 or not gate_up.is_contiguous():
            return silu_and_mul(gate_up)
        size = gate_up.shape[1] // 2
        output = gate_up.new_empty(len(gate_up), size)
        self._silu(len(gate_up), size, gate_up.data_ptr(), output.data_ptr())
        return output


# -- attention --


class Sizes(ctypes.Structure):
    """Of one call: the fields of the source's struct."""

    _fields_ = (
        *((name, ctypes.c_int) for name in (
            "num_tokens", "num_heads", "num_kv_heads", "key_dim", "value_dim", "block_size",
            "num_blocks", "max_blocks", "sliding_window",
        )),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )  # fmt: skip


class NativeBackend(TorchBackend):
    """TorchBackend, with a compiled loop for decodes."""

    name = "native"

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        """Raises ValueError if there is no library, and none can be compiled."""
        library = library or load_library()
        if library is None:
            raise ValueError(
                "attention_backend is 'native', and its C++ cannot be compiled here: that takes "
                "Linux and a compiler with OpenMP (c++, or the one that $CXX names). Use 'auto'."
            )
        self.library = library
        self._functions: dict[tuple[torch.dtype, torch.dtype], Any] = {}
        for dtype, name in NAMES.items():
            for cache, suffix in {dtype: "", **CACHES}.items():
                function = getattr(library, f"paged_decode_{name}{suffix}")
                function.argtypes = (ctypes.POINTER(Sizes), *[ctypes.c_void_p] * 8)
                function.restype = ctypes.c_int
                self._functions[dtype, cache] = function

    def get_decode(self, dtype: torch.dtype) -> Callable[..., SparseDecode] | None:
        if dtype not in NAMES and dtype not in CACHES:
            return super().get_decode(dtype)
        return partial(NativeDecode, self._functions)


class NativeDecode(SparseDecode):
    """Tokens that walk through the blocks of their sequences."""

    def __init__(
        self, functions: dict[tuple[torch.dtype, torch.dtype], Any], *arguments: Any
    ) -> None:
        """`functions`: the compiled ones, by the types of queries and of the cache; the rest as for
        SparseDecode."""
        super().__init__(*arguments)
        self.functions = functions
        self.blocks = np.ascontiguousarray(self.blocks, np.int32)

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sliding_window: int | None,
        logits_soft_cap: float | None,
        kv_scales: tuple[Tensor, ...] = (),
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """As SparseDecode.attend. Raises IndexError for a block that the cache does not have."""
        if len(self.tokens) < len(query):
            query = query.index_select(0, self.tokens)
        dtype, keys, values = query.dtype, as_rows(key_cache), as_rows(value_cache)
        query = query.to(dtype if dtype in NAMES else torch.float32).contiguous()
        num_tokens, num_heads, key_dim = query.shape
        num_blocks, value_dim = len(key_cache), value_cache.shape[-1]
        if max(key_dim, value_dim) > MAX_DIM:
            raise ValueError(
                f"heads of {max(key_dim, value_dim)} numbers are more than {MAX_DIM}. Use "
                "attention_backend='torch'."
            )
        output = query.new_empty(num_tokens, num_heads, value_dim)
        sizes = Sizes(
            num_tokens, num_heads, key_cache.shape[2], key_dim, value_dim, self.block_size,
            num_blocks, self.blocks.shape[1], sliding_window or 0, scale, logits_soft_cap or 0.0,
        )  # fmt: skip
        scales = [as_rows(each) for each in kv_scales]
        is_right = self.functions[query.dtype, keys.dtype](
            sizes,
            query.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            *([each.data_ptr() for each in scales] or (None, None)),
            self.blocks.ctypes.data,
            self.num_keys.ctypes.data,
            output.data_ptr(),
        )
        if not is_right:
            raise IndexError(f"the block table names a block that is not in 0 .. {num_blocks - 1}.")
        yield self.tokens, output.to(dtype)
