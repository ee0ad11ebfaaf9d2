"""The CPU's kernels in C++, against the plain versions; and machines that cannot compile them."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import platform
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_oracle import Shape, attention_by_definition, make_step, unwritten_memory_is_nan
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import assert_step_through_a_backend, shapes
from torch import Tensor

from nanoserve import LLM, SamplingParams
from nanoserve.attention import StepMetadata
from nanoserve.kernels import native_cpu
from nanoserve.kernels.attention_cpu import TorchBackend
from nanoserve.kernels.native_cpu import CACHES, Native, NativeBackend, load_library
from nanoserve.kernels.selector import get_attn_backend, make_layer_config
from nanoserve.kv_cache import KVCacheSpec
from nanoserve.layers import (
    LayerConfig,
    QKNorm,
    add_rms_norm,
    rms_norm,
    rope_and_store,
    silu_and_mul,
)
from nanoserve.parallel import ParallelState

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
LIBRARY: Any = load_library()
needs_compiler = pytest.mark.skipif(LIBRARY is None, reason="no C++ compiler with OpenMP")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """An output element that is never written is NaN."""
    with unwritten_memory_is_nan():
        yield


def assert_near(ours: Tensor, plain: Tensor) -> None:
    """Equal but for the rounding of a few operations."""
    assert (ours.dtype, ours.shape) == (plain.dtype, plain.shape)
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours, plain, rtol=2e-6, atol=2e-6, equal_nan=True)
    else:  # rounded in the same places, and so nearly always to the same number
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-2, equal_nan=True)
        same = (ours == plain) | (ours.isnan() & plain.isnan()) | (plain.abs() < 1e-30)
        assert same.float().mean() > 0.9 or same.numel() < 100


# -- attention --


@needs_compiler
@settings(max_examples=100, deadline=None)
@given(st.lists(shapes(), min_size=1, max_size=2), st.integers(0, 2**31), st.sampled_from([0, 3]))
def test_steps_of_any_shape(drawn: list[Shape], seed: int, num_padding: int) -> None:
    layers = [replace(each, seqs=drawn[0].seqs, block_size=drawn[0].block_size) for each in drawn]
    assert_step_through_a_backend(NativeBackend(), layers, seed, num_padding)


def attend(step: Any, dtype: torch.dtype, shape: Shape) -> Tensor:
    backend = NativeBackend()
    metadata = backend.plan(step.metadata, shape.block_size, dtype)
    return backend.attend(step.query, step.caches, metadata, **shape.options)


@needs_compiler
@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256, 20])
@pytest.mark.parametrize("group", [1, 4, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_published_sizes(dim: int, group: int, dtype: torch.dtype) -> None:
    """Also with more query heads than are attended to together."""
    seqs = ((1, 100), (1, 0), (3, 47))
    shape = Shape(seqs, 16, num_kv_heads=2, group=group, key_dim=dim, value_dim=dim)
    step = make_step(shape, dtype=dtype)
    expected = attention_by_definition(*step.tensors, **shape.options)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    output = attend(step, dtype, shape)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


@needs_compiler
@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0, 1000.0])
def test_scores_of_any_size(scale: float) -> None:
    """Weights are e^(score - largest score): all equal, or one alone."""
    shape = Shape(((1, 60), (1, 3)), 4)
    step = make_step(shape)
    output = attend(step, torch.float32, shape)
    options = {**shape.options, "scale": scale}
    backend = NativeBackend()
    metadata = backend.plan(step.metadata, 4, torch.float32)
    output = backend.attend(step.query, step.caches, metadata, **options)
    expected = attention_by_definition(*step.tensors, **options)
    torch.testing.assert_close(output.double(), expected, rtol=2e-5, atol=2e-5)


@needs_compiler
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_none_stays_in_its_head(bad: float) -> None:
    """A NaN is told by the sampler: it must not be lost here, and must not reach other rows."""
    shape = Shape(((1, 20), (1, 20)), 4)
    step = make_step(shape)
    healthy = attend(step, torch.float32, shape)
    step.query[0, 1, 0] = bad
    output = attend(step, torch.float32, shape)
    assert output[0, 1].isnan().all()
    output[0, 1] = healthy[0, 1]
    assert torch.equal(output, healthy)


@needs_compiler
@pytest.mark.parametrize("block", [-1, 3, 2**30, -(2**30)])
def test_a_block_that_does_not_exist_is_an_error(block: int) -> None:
    caches = KVCacheSpec(1, 4, 4).allocate(3, 4, torch.float32, CPU)
    metadata = StepMetadata(
        slot_mapping=torch.tensor([-1]),
        block_table=torch.tensor([[0, block, 1]]).int(),
        query_start_loc=torch.tensor([0, 1]).int(),
        seq_lens=torch.tensor([12]).int(),
    )
    backend = NativeBackend()
    metadata = backend.plan(metadata, 4, torch.float32)
    with pytest.raises(IndexError, match=r"a block that is not in 0 \.\. 2"):
        backend.attend(torch.randn(1, 1, 4), caches, metadata, scale=1.0)


@needs_compiler
@pytest.mark.parametrize("num_lost", [16, 32])
def test_keys_whose_scores_are_minus_infinity(num_lost: int) -> None:
    """They have no weight, also where the first keys that are read together are all such; NaN only
    where there is no other key."""
    caches = KVCacheSpec(1, 4, 4).allocate(2, 16, torch.float32, CPU)
    keys, values = (cache.normal_() for cache in caches)
    keys.view(32, 4)[:num_lost] = torch.tensor([-3e38, 0, 0, 0])
    query = torch.tensor([[[30.0, 1, 1, 1]]])
    metadata = StepMetadata(
        slot_mapping=torch.tensor([-1]),
        block_table=torch.tensor([[0, 1]]).int(),
        query_start_loc=torch.tensor([0, 1]).int(),
        seq_lens=torch.tensor([32]).int(),
    )
    weights = (keys.view(32, 4) @ query[0, 0]).softmax(0)
    backend = NativeBackend()
    output = backend.attend(query, caches, backend.plan(metadata, 16, torch.float32), scale=1.0)
    assert bool(weights.isnan().any()) == (num_lost == 32)
    assert_near(output[0, 0], weights @ values.view(32, 4))


# -- norms, rotary embedding, activation --

rows = st.integers(1, 70)
dtypes = st.sampled_from(DTYPES)


@needs_compiler
@settings(max_examples=40, deadline=None)
@given(rows, st.sampled_from([1, 8, 30, 64, 500]), dtypes, st.sampled_from([1e-6, 0.5]))
def test_residual_addition_and_norm(number: int, size: int, dtype: torch.dtype, eps: float) -> None:
    torch.manual_seed(number)
    x, residual = torch.randn(2, number, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    plain, plain_sum = add_rms_norm(x.clone(), residual, weight, eps)
    kept, before = residual.clone(), x.clone()
    native = Native(LIBRARY, dtype)
    normed, total = native.add_rms_norm(x, residual, weight, eps)
    assert torch.equal(total, plain_sum)
    assert total.data_ptr() == x.data_ptr(), "the sum takes the place of x"
    assert torch.equal(residual, kept)
    assert_near(normed, plain)
    assert_near(native.rms_norm(before, weight, eps), rms_norm(before, weight, eps))


@needs_compiler
@settings(max_examples=40, deadline=None)
@given(rows, st.sampled_from([1, 8, 30, 500]), dtypes, st.sampled_from([0.1, 3.0, 100.0]))
def test_the_activation(number: int, size: int, dtype: torch.dtype, spread: float) -> None:
    torch.manual_seed(number)
    gate_up = (torch.randn(number, 2 * size) * spread).to(dtype)
    assert_near(Native(LIBRARY, dtype).silu_and_mul(gate_up), silu_and_mul(gate_up.clone()))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_activation_of_numbers_without_end(dtype: torch.dtype) -> None:
    gates = torch.tensor([-math.inf, math.inf, math.nan, -1e30, 1e30, -87.5, -100, -0.0] * 4)
    gate_up = torch.cat([gates, torch.ones(32)]).to(dtype)[None]
    assert_near(Native(LIBRARY, dtype).silu_and_mul(gate_up), silu_and_mul(gate_up.clone()))


@needs_compiler
@pytest.mark.parametrize("slot", [8, 2**31, 2**62])
def test_a_slot_that_does_not_exist_is_an_error(slot: int) -> None:
    caches = KVCacheSpec(1, 4, 4).allocate(2, 4, torch.float32, CPU)
    rope = (torch.ones(2, 1, 4), torch.zeros(2, 1, 4))
    metadata = StepMetadata(torch.tensor([0, slot]), *[torch.zeros(0)] * 3)
    arguments = (torch.ones(2, 12), None, rope, NativeBackend(), caches, metadata)
    with pytest.raises(IndexError, match=r"a slot that is not in 0 \.\. 7"):
        Native(LIBRARY, torch.float32).rope_and_store(*arguments)


@needs_compiler
@pytest.mark.parametrize("case", ["slots", "table"])
def test_other_dtypes_are_given_to_the_plain_function(case: str) -> None:
    """Slots of 32 bits; sine and cosine in another dtype than the rest."""
    torch.manual_seed(0)
    caches = KVCacheSpec(1, 4, 4).allocate(2, 4, torch.float32, CPU)
    plain_caches = tuple(cache.clone() for cache in caches)
    table = torch.randn(2, 1, 8).to(torch.bfloat16 if case == "table" else torch.float32)
    slots = torch.tensor([5, 2], dtype=torch.int32 if case == "slots" else torch.int64)
    metadata = StepMetadata(slots, *[torch.zeros(0)] * 3)
    before = (torch.randn(2, 12), None, table.chunk(2, dim=-1), NativeBackend())
    query = Native(LIBRARY, torch.float32).rope_and_store(*before, caches, metadata)
    plain = rope_and_store(*before, plain_caches, metadata)
    assert torch.equal(query, plain)
    for cache, expected in zip(caches, plain_caches, strict=True):
        torch.testing.assert_close(cache, expected, equal_nan=True)


@needs_compiler
@settings(max_examples=40, deadline=None)
@given(
    number=rows,
    num_heads=st.sampled_from([1, 2, 6]),
    num_kv_heads=st.sampled_from([1, 2]),
    dims=st.sampled_from([(8, 8), (8, 4), (64, 64), (20, 10)]),
    block_size=st.sampled_from([1, 4, 16]),
    has_norm=st.booleans(),
    dtype=dtypes,
    lies_otherwise=st.booleans(),
    cache_dtype=st.sampled_from([None, None, *CACHES]),
)
def test_norm_rope_and_store(
    number: int,
    num_heads: int,
    num_kv_heads: int,
    dims: tuple[int, int],
    block_size: int,
    has_norm: bool,
    dtype: torch.dtype,
    lies_otherwise: bool,
    cache_dtype: torch.dtype | None,
) -> None:
    """The queries, and both caches: what is stored, and that nothing else is written. Also with a
    cache that lies in memory in another way, and with caches of 8 bits: of a number that was
    rounded otherwise, the code may be the next one."""
    torch.manual_seed(number)
    head_dim, rotary_dim = dims
    config = LayerConfig(dtype=dtype)
    norm = QKNorm(num_heads, num_heads + num_kv_heads, head_dim, 1e-6, config)
    norm.weight.copy_(torch.randn_like(norm.weight))
    qkv = torch.randn(number, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    table = torch.randn(number, 1, 2 * rotary_dim).to(dtype)
    rope = tuple(table.chunk(2, dim=-1))
    num_blocks = number // block_size + 2
    slots = torch.randperm(num_blocks * block_size)[:number]
    slots[torch.rand(number) < 0.2] = -1  # not to be stored
    metadata = StepMetadata(slots, torch.zeros(0), torch.zeros(0), torch.zeros(0))
    plain_caches = KVCacheSpec(num_kv_heads, head_dim, head_dim).allocate(
        num_blocks, block_size, cache_dtype or dtype, CPU
    )
    caches = tuple(cache.clone() for cache in plain_caches)
    if lies_otherwise:
        caches = tuple(cache.contiguous() for cache in caches)
    backend = NativeBackend()
    arguments = (qkv, norm if has_norm else None, rope, backend)
    plain = rope_and_store(*arguments, plain_caches, metadata)
    before = qkv.clone()
    query = Native(LIBRARY, dtype).rope_and_store(*arguments, caches, metadata)
    assert torch.equal(qkv, before)
    assert_near(query, plain)
    for cache, expected in zip(caches, plain_caches, strict=True):
        if cache.dtype in CACHES:
            codes, theirs = (each.view(torch.int8).int() for each in (cache, expected))
            assert ((codes - theirs).abs() <= 1).all()
            assert codes.numel() < 100 or (codes == theirs).float().mean() > 0.9
        else:
            assert_near(cache, expected)


# -- the choice, and machines without a compiler --


def layer_config(dtype: torch.dtype, **options: Any) -> LayerConfig:
    return make_layer_config(CPU, dtype, ParallelState(), **options)


@needs_compiler
def test_a_cpu_with_a_compiler_takes_them() -> None:
    for dtype in DTYPES:
        assert isinstance(layer_config(dtype).attention, NativeBackend)
        assert isinstance(layer_config(dtype).add_rms_norm.__self__, Native)  # type: ignore[attr-defined]
        assert layer_config(dtype, custom_ops="none").silu_and_mul is silu_and_mul
        plain = layer_config(dtype, attention_backend="torch")
        assert type(plain.attention) is TorchBackend
        assert plain.silu_and_mul is silu_and_mul
    assert type(layer_config(torch.float16).attention) is TorchBackend
    with pytest.raises(ValueError, match="'native' is for a CPU"):
        get_attn_backend("native", torch.device("cuda"))


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_gives_the_same_tokens(dtype: str) -> None:
    """Prompts in chunks and decodes in one batch. (In bfloat16 the first tokens: later ones may
    differ by near ties.)"""
    params = SamplingParams(temperature=0, max_tokens=12 if dtype == "float32" else 2)
    prompts = ["Once upon a time", "The capital of France is", "one two three " * 12]
    answers = []
    for attention_backend in ("torch", "native"):
        options = {"attention_backend": attention_backend, "dtype": dtype}
        with LLM(**options, max_num_batched_tokens=16, block_size=4) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nanoserve"


@pytest.fixture
def log() -> Iterator[list[str]]:
    """The lines that are logged in a test."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, level = Handler(), native_cpu.logger.level
    native_cpu.logger.addHandler(handler)
    native_cpu.logger.setLevel("INFO")
    yield lines
    native_cpu.logger.removeHandler(handler)
    native_cpu.logger.setLevel(level)


def make_compiler(folder: Path, script: str) -> str:
    """The path of a program that runs instead of a compiler."""
    file = folder / "compiler"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize(
    ("compiler", "told"),
    [
        ("no-such-compiler", r"no C\+\+ compiler \(no-such-compiler\) was found"),
        ("false", "exit status 1"),
        ("true", "library.so"),
        ('g++ "', "No closing quotation"),
    ],
)
def test_without_a_compiler_pytorch_does_the_work(
    compiler: str,
    told: str,
    no_library: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: list[str],
) -> None:
    """There is none; it fails; it writes nothing that can be loaded; the setting cannot be read.
    One line says so."""
    monkeypatch.setenv("CXX", compiler)
    assert load_library() is None
    [line] = log
    assert re.search(told, line)
    assert type(get_attn_backend("auto", CPU)) is TorchBackend
    with pytest.raises(ValueError, match="cannot be compiled here"):
        get_attn_backend("native", CPU)
    assert not list(no_library.glob("*")), "what cannot be loaded is not kept"


@pytest.fixture
def short_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Something that is compiled at once."""
    monkeypatch.setattr(native_cpu, "SOURCE", tmp_path / "native_cpu.cpp")
    native_cpu.SOURCE.write_text("int number;\n")


@needs_compiler
def test_the_library_is_compiled_once_and_kept(
    no_library: Path, short_source: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_library() is not None
    [file] = no_library.iterdir()
    stamp = file.stat().st_mtime_ns
    assert load_library() is not None
    assert file.stat().st_mtime_ns == stamp
    monkeypatch.setattr(native_cpu, "FLAGS", native_cpu.FLAGS.replace("-O3", "-O1"))
    assert load_library() is not None
    assert len(list(no_library.iterdir())) == 2, "another command makes another file"


needs_linux = pytest.mark.skipif(platform.system() != "Linux", reason="Linux only")


@needs_linux
@pytest.mark.parametrize(
    ("printed", "told"),
    [
        ("", "exit status 3"),
        ("\n", "exit status 3"),
        ("note: x\na.cpp:1: error: no OpenMP\n1 error generated\n", "a.cpp:1: error: no OpenMP"),
        ("first\nlast\n\n", "last"),
    ],
)
def test_the_log_says_why_it_could_not_be_compiled(
    printed: str,
    told: str,
    no_library: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: list[str],
) -> None:
    script = f"cat >&2 << 'END'\n{printed}END\nexit 3"
    monkeypatch.setenv("CXX", make_compiler(no_library.parent, script))
    assert load_library() is None
    [line] = log
    assert line.removesuffix(".").endswith(told)


@needs_linux
def test_a_compiler_that_hangs_is_ended_and_not_run_again(
    no_library: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    """With the processes that it started."""
    pids = no_library.parent / "pids"
    script = f"sleep 600 &\necho $! >> {pids}\nwait"
    monkeypatch.setenv("CXX", make_compiler(no_library.parent, script))
    monkeypatch.setattr(native_cpu, "COMPILE_TIMEOUT", 1.0)
    assert load_library() is None
    assert "timed out" in log[-1]
    [pid] = pids.read_text().split()
    state = Path("/proc", pid, "stat")
    while state.exists() and state.read_text().split()[2] != "Z":  # the signal is on its way
        time.sleep(0.01)
    assert load_library() is None
    assert "hung a short time ago" in log[-1]
    assert len(pids.read_text().split()) == 1
    [marker] = no_library.iterdir()
    os.utime(marker, (0, 0))
    make_compiler(no_library.parent, "exit 3")
    assert load_library() is None
    assert "exit status 3" in log[-1], "after a while it is run again"


@needs_compiler
def test_a_file_that_is_no_whole_library_is_made_anew(
    no_library: Path, short_source: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off; or no library at all, though its name tells its digest. One that is whole needs no
    compiler."""
    assert load_library() is not None
    [file] = no_library.iterdir()
    whole, name = file.read_bytes(), file.stem.rpartition("-")[0]
    file.unlink()  # what is loaded keeps its file
    file.write_bytes(whole[: len(whole) // 2])
    digest = hashlib.sha256(b"text").hexdigest()[:16]
    (no_library / f"{name}-{digest}.so").write_bytes(b"text")
    assert load_library() is not None
    assert file.read_bytes() == whole
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert load_library() is not None


@needs_compiler
@pytest.mark.parametrize("has_folder", [True, False])
def test_nothing_is_left_behind(
    has_folder: bool, no_library: Path, short_source: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is old goes when a library is stored; the folder of a compilation, when it has ended.
    Without a home, nothing is kept."""
    scratch = no_library.parent / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    no_library.mkdir()
    names = ["native_cpu-old.so", "native_cpu-folder", "native_cpu-new.so", "another"]
    for name in names:
        path = no_library / name
        path.mkdir() if name.endswith("folder") else path.touch()
        if "new" not in name:
            os.utime(path, (0, 0))
    if not has_folder:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", no_home)
    assert load_library() is not None
    left = {path.name for path in no_library.iterdir()}
    assert not list(scratch.iterdir())
    if has_folder:
        assert len(left) == 3
        assert left > {"native_cpu-new.so", "another"}
    else:
        assert left == set(names)


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs POSIX permissions")
def test_nothing_is_loaded_from_a_folder_that_others_can_write_to(
    no_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a folder made in the current one: its specification ignores a relative path."""
    assert native_cpu.cache_folder() == no_library
    assert stat.S_IMODE(no_library.stat().st_mode) & 0o077 == 0
    no_library.chmod(0o777)
    assert native_cpu.cache_folder() is None
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert native_cpu.cache_folder() == tmp_path / ".cache" / "nanoserve"
