"""The Triton kernels, compiled for GPUs that this machine lacks (by aot_kernels.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("aot_kernels.py")
SHARED_MEMORY = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227}  # KiB that a program may have


def run_script(capability: int) -> list[dict[str, Any]]:
    """In another process: this one has Triton's interpreter instead of the compiler."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent.parent)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(SCRIPT), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "a warning that every user would see"
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_kernels_fit_the_gpu(capability: int) -> None:
    """Shared memory; no number spills to local memory, and few to the stack; products run on tensor
    cores (from sm_80 on), with the next keys on their way."""
    kernels = run_script(capability)
    launched = {kernel["kernel"] for kernel in kernels}
    assert len(launched) == 8
    for kernel in kernels:
        name, case, is_new = kernel["kernel"], kernel["case"], capability >= 80
        assert kernel["shared"] <= SHARED_MEMORY[capability] * 1024, kernel
        assert kernel["local"] == 0, kernel
        assert kernel["stack"] <= 64 or case == "wide float32", kernel  # the rarest case
        if case in ("decode", "prefill", "fused 128", "fused 80"):
            assert kernel["stack"] <= 8, kernel  # bytes
        if name == "paged_attention_kernel" and is_new:
            assert kernel["copies"] > 0, kernel
        if name in ("paged_attention_kernel", "quantized_matmul_kernel") and is_new:
            assert kernel["products"] > 0 or "float32" in case, kernel
        # Four programs of a decode fit a multiprocessor at once.
        if case == "decode" and capability in (80, 90, 100):
            assert kernel["registers"] * 32 * kernel["num_warps"] * 4 <= 65536, kernel
            assert kernel["shared"] * 4 <= SHARED_MEMORY[capability] * 1024, kernel
        if case.startswith("fused") and name != "store_kv_kernel":  # 16 warps and more
            assert kernel["registers"] * 32 * 16 <= 65536, kernel
