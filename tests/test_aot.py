"""The kernels, compiled for GPUs that this machine lacks (by aot_kernels.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton exists on Linux only")
SCRIPT = Path(__file__).with_name("aot_kernels.py")
RUNS = {  # compute capability -> cases
    80: [
        *("decode", "split decode", "prefill", "store", "norm 2560", "rope 128", "activation 2400"),
        *("8 bits, decode fp8", "8 bits, prefill int8", "quantized int4, a token"),
        *("quantized int4, many", "quantized int8, many"),
    ],
    89: ["wide heads", "wide float32"],  # the least shared memory, as on sm_86 and sm_120
    90: [
        *("decode", "split decode", "prefill", "split prefill", "store", "window and soft cap"),
        *("norm 3584", "norm 8192", "rope 80", "rope 80, a part", "rope 256, no norm"),
        *("rope 128, a part", "rope 256, a part"),
        *("activation 4864", "norm 2560, float32", "rope 80, float32"),
        *("8 bits, decode int8", "8 bits, prefill fp8", "quantized int4, a token"),
        *("quantized int8, a token", "quantized int8, float16", "quantized int4, a batch"),
    ],
    100: ["decode", "split decode", "prefill", "store", "norm 576", "rope 64", "activation 3072"],
    120: ["narrow heads"],
}
SHARED_MEMORY = {  # bytes a program, of each compute capability
    80: 163 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}
PLAIN = ("decode", "split decode", "prefill", "store")  # bfloat16, heads of 128
FUSED = ("norm", "rope", "activation")  # how the names of cases of fused_triton.py begin
TENSOR_CORES = {80: "mma", 90: "wgmma", 100: "tcgen05"}  # their instruction for large tiles


def run_script(capability: int, cases: list[str]) -> list[dict[str, Any]]:
    """In another process: this one has Triton's interpreter instead of the compiler."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(SCRIPT), str(capability), *cases]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "a warning that every user would see"
    return [{"capability": capability, **json.loads(line)} for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def kernels() -> list[dict[str, Any]]:
    """What was compiled, two processes at a time."""
    with ThreadPoolExecutor(2) as pool:
        return [kernel for run in pool.map(run_script, RUNS, RUNS.values()) for kernel in run]


def is_fused(kernel: dict[str, Any]) -> bool:
    return kernel["case"].startswith(FUSED)


def attention_of(kernels: list[dict[str, Any]], is_tiled: bool) -> list[dict[str, Any]]:
    return [
        kernel
        for kernel in kernels
        if kernel["case"] in PLAIN and kernel.get("PER_SEQUENCE") == (not is_tiled)
    ]


def test_every_launch_was_compiled(kernels: list[dict[str, Any]]) -> None:
    """A prefill launches a program per sequence and one per tile, a split decode also its merge."""
    for capability in (80, 90, 100):
        found = [
            (kernel["case"], kernel["kernel"].removesuffix("_kernel"), kernel.get("PER_SEQUENCE"))
            for kernel in kernels
            if kernel["capability"] == capability and kernel["case"] in PLAIN
        ]
        assert found == [
            ("decode", "paged_attention", True),
            ("split decode", "paged_attention", True),
            ("split decode", "merge_splits", None),
            ("prefill", "paged_attention", False),
            ("prefill", "paged_attention", True),
            ("store", "store_kv", None),
        ]
        fused = [k for k in kernels if k["capability"] == capability and is_fused(k)]
        names = {"add_rms_norm_kernel", "rope_and_store_kernel", "silu_and_mul_kernel"}
        assert {kernel["kernel"] for kernel in fused} == names
    splits = {k["case"]: k["IS_SPLIT"] for k in kernels if k.get("PER_SEQUENCE") is not None}
    assert splits["split decode"] and not splits["decode"]
    split_prefill = [k for k in kernels if k["case"] == "split prefill"]
    assert [k.get("IS_SPLIT") for k in split_prefill] == [True, None, False]


def test_shared_memory_fits_the_gpu(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_MEMORY[kernel["capability"]], kernel


def test_nothing_spills_to_local_memory(kernels: list[dict[str, Any]]) -> None:
    """bfloat16, heads of 128: every number stays in registers, attention, merge and store. (Triton
    3.6 has no register left for two numbers of an A100's prefill.)"""
    is_old = triton.__version__.startswith("3.6.")
    plain = [kernel for kernel in kernels if kernel["case"] in PLAIN]
    assert len(plain) == 18
    for kernel in plain:
        is_prefill_of_a100 = kernel["capability"] == 80 and kernel.get("PER_SEQUENCE") is False
        assert kernel["local"] == 0, kernel
        assert kernel["stack"] <= (8 if is_old and is_prefill_of_a100 else 0), kernel


def test_fused_kernels_are_light(kernels: list[dict[str, Any]]) -> None:
    """Heads and hidden sizes of any width, bfloat16 and float32: nothing spills, and a
    multiprocessor with 65,536 registers and 100 KiB of shared memory runs as many warps as keep
    its memory busy, a quarter of the 64 that it can hold and more."""
    fused = [kernel for kernel in kernels if is_fused(kernel)]
    assert len(fused) == 3 + 10 + 3
    for kernel in fused:
        assert kernel["stack"] == kernel["local"] == 0, kernel
        assert kernel["registers"] * 32 * 16 <= 65536, kernel
        assert kernel["shared"] * 16 <= 100 * 1024 * kernel["num_warps"], kernel


def test_numbers_of_8_and_4_bits_are_decoded_in_registers(kernels: list[dict[str, Any]]) -> None:
    """A cache or a weight of few bits, on a GPU that knows FP8 and on one that does not (which has
    no register left for a few numbers)."""
    few_bits = [k for k in kernels if k["case"].startswith(("8 bits", "quantized"))]
    assert len(few_bits) == 3 + 3 + 3 + 4
    for kernel in few_bits:
        assert kernel["local"] == 0, kernel
        assert kernel["stack"] <= (64 if kernel["capability"] == 80 else 0), kernel
        assert kernel["mma"] + kernel["wgmma"] > 0, kernel


def test_decodes_leave_room_for_each_other(kernels: list[dict[str, Any]]) -> None:
    """PROGRAMS_PER_SM programs of a decode fit a multiprocessor at once, split or not: that many
    are launched for each."""
    decodes = [k for k in attention_of(kernels, is_tiled=False) if k["case"] != "prefill"]
    assert len(decodes) == 6
    for kernel in decodes:
        assert kernel["registers"] * 32 * kernel["num_warps"] * 4 <= 65536, kernel
        assert kernel["shared"] * 4 <= SHARED_MEMORY[kernel["capability"]], kernel


def test_loads_run_ahead(kernels: list[dict[str, Any]]) -> None:
    """The loop over keys is in stages, whether or not the last tile's mask is computed."""
    attention = [kernel for kernel in kernels if kernel["kernel"] == "paged_attention_kernel"]
    assert len(attention) == 3 * 4 + 2 + 2 + 2 * 3 + 2 * 3
    for kernel in attention:
        assert kernel["copies"] > 0, kernel


def test_products_run_on_tensor_cores(kernels: list[dict[str, Any]]) -> None:
    """A decode's 16 rows on a warp's, a prefill's 128 on those that each generation has for it."""
    for kernel in attention_of(kernels, is_tiled=False):
        assert kernel["mma"] > 0, kernel
    prefills = attention_of(kernels, is_tiled=True)
    assert {kernel["capability"] for kernel in prefills} == set(TENSOR_CORES)
    for kernel in prefills:
        assert kernel[TENSOR_CORES[kernel["capability"]]] > 0, kernel
        assert kernel["BLOCK_M"] == 128


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_heads_of_all_shapes(capability: int) -> None:
    """Groups of 1 to 8, heads of 64 to 256, float16 and bfloat16: each fits the GPU's shared
    memory, and at most some tens of bytes a thread spill."""
    table = run_script(capability, ["table"])
    attention = [kernel for kernel in table if kernel["kernel"] == "paged_attention_kernel"]
    assert len(attention) == (4 * 4 * 2) * 3
    kinds = {(kernel["PER_SEQUENCE"], kernel["IS_SPLIT"]) for kernel in attention}
    assert len(kinds) == 4, "both launches with splits and without"
    for kernel in table:
        assert kernel["shared"] <= SHARED_MEMORY[capability], kernel
        assert kernel["local"] == 0, kernel
        assert kernel["stack"] <= 64, kernel
