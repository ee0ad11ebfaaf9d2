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
    80: ["decode", "split decode", "prefill", "store"],
    86: ["wide heads", "wide float32"],  # the least shared memory of all
    90: ["decode", "split decode", "prefill", "store", "window and soft cap"],
    100: ["decode", "split decode", "prefill", "store"],
}
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes a program
PLAIN = ("decode", "split decode", "prefill", "store")  # bfloat16, heads of 128
TENSOR_CORES = {80: "mma", 90: "wgmma", 100: "tcgen05"}  # their instruction for large tiles


def run_script(capability: int) -> list[dict[str, Any]]:
    """In another process: this one has Triton's interpreter instead of the compiler."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(SCRIPT), str(capability), *RUNS[capability]]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "a warning that every user would see"
    return [{"capability": capability, **json.loads(line)} for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def kernels() -> list[dict[str, Any]]:
    """What was compiled, two processes at a time."""
    with ThreadPoolExecutor(2) as pool:
        return [kernel for run in pool.map(run_script, RUNS) for kernel in run]


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
            ("prefill", "paged_attention", True),
            ("prefill", "paged_attention", False),
            ("store", "store_kv", None),
        ]
    splits = {k["case"]: k["NUM_SPLITS"] for k in kernels if "NUM_SPLITS" in k}
    assert splits["split decode"] > 8 * splits["decode"]


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


def test_loads_run_ahead(kernels: list[dict[str, Any]]) -> None:
    """The loop over keys is in stages, whether or not the last tile's mask is computed."""
    attention = [kernel for kernel in kernels if kernel["kernel"] == "paged_attention_kernel"]
    assert len(attention) == 3 * 4 + 2 + 2 * 2
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
