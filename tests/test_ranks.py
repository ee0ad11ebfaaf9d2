"""Several ranks answer as one does; a lost rank is told; nothing is left behind.

Most tests run the real code of the other ranks in threads, because a process takes seconds to
start. One engine has a real process; torchrun runs one script.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import assert_same_greedy

from nanoserve import LLM, SamplingParams
from nanoserve.distributed import multiproc
from nanoserve.sequence import EngineDeadError

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
ENVIRONMENT["PYTHONFAULTHANDLER"] = "1"  # a process that crashes says where its threads stood
SIZES: dict[str, Any] = {"num_gpu_blocks_override": 64, "block_size": 4, "max_model_len": 128}
PROMPTS = [[7, 8, 9, 10, 11] * 3, [30, 40, 50], [5]]
MIXED = [
    SamplingParams(temperature=0, max_tokens=9, prompt_logprobs=1),
    SamplingParams(temperature=1, seed=1, n=2, max_tokens=9, logprobs=2),
    SamplingParams(temperature=0.7, top_k=9, seed=2, repetition_penalty=1.2, max_tokens=9),
]


class RankThread(threading.Thread):
    """Has what is used of a process."""

    pid = 0

    def __init__(self, port: int, rank: int, size: int) -> None:
        super().__init__(daemon=True)
        self.arguments = port, rank, size
        self.start()

    def run(self) -> None:
        port, rank, size = self.arguments
        with contextlib.suppress(ValueError):  # which rank 0 raises, too
            multiproc.work(dist.TCPStore("127.0.0.1", port, is_master=False), rank, size)

    def poll(self) -> int | None:
        return None if self.is_alive() else 0

    def wait(self, timeout: float = 5.0) -> None:
        self.join(timeout)

    def kill(self) -> None:
        self.join(5)
        assert not self.is_alive()


@pytest.fixture
def thread_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(multiproc, "start_rank", RankThread)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The demo model on two processes."""
    with LLM(tensor_parallel_size=2, **SIZES) as llm:
        yield llm


def is_there(pid: int) -> bool:
    """Is there a process that is not only waiting to be collected?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def answer(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, MIXED, use_tqdm=False)
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize(
    ("family", "size", "settings"),
    [
        ("llama", 4, {"vocab_size": 321}),  # 2 key heads on 4 ranks, and a padded vocabulary
        ("qwen2", 2, {"tie_word_embeddings": True}),
        ("qwen3", 2, {"head_dim": 32}),
        ("mixtral", 2, {"num_local_experts": 4}),
    ],
)
def test_families_on_ranks(
    family: str, size: int, settings: dict[str, Any], make_checkpoint: Callable[..., Path]
) -> None:
    folder = make_checkpoint(family, **settings)
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(folder, tensor_parallel_size=size, max_num_batched_tokens=8, **SIZES) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_same_greedy(folder, prompt, list(output.outputs[0].token_ids), 8)


@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"preemption_mode": "swap", "num_gpu_blocks_override": 12, "max_model_len": 40},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int8"},
    ],
    ids=str,
)
def test_two_ranks_answer_as_one(options: dict[str, Any]) -> None:
    options = {**SIZES, **options}
    with LLM(**options) as one, LLM(tensor_parallel_size=2, **options) as two:
        assert answer(two) == answer(one)


@pytest.mark.usefixtures("thread_ranks")
def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="divided among 3 ranks"):
        LLM(tensor_parallel_size=3, **SIZES)


# -- processes --


def test_a_process_is_a_rank(llm: LLM) -> None:
    with LLM(**SIZES) as one:
        assert answer(llm) == answer(one)


def test_ctrl_c_leaves_the_ranks_in_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the wait for a step, which goes on in its thread."""
    expected, interrupts = answer(llm), iter([False, False, True])

    class Interrupted(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            if next(interrupts, False):
                raise KeyboardInterrupt
            return super().result(timeout)

    monkeypatch.setattr(multiproc, "Future", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer(llm)
    assert answer(llm) == expected


def test_a_killed_rank_is_told(llm: LLM) -> None:
    """The last test with this engine."""
    process, start = llm.engine.executor.processes[1], time.monotonic()
    process.kill()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="rank 1"):
            answer(llm)
    assert time.monotonic() - start < 30
    llm.close()
    assert not is_there(process.pid)


@pytest.mark.slow
def test_the_end_of_a_script_ends_its_ranks() -> None:
    """Although nobody has closed the engine."""
    script = (
        "from nanoserve import LLM\n"
        f"llm = LLM(tensor_parallel_size=2, **{SIZES})\n"
        "print(llm.engine.executor.processes[1].pid, flush=True)\n"
        "raise KeyError('of the script')"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert "of the script" in done.stderr
    assert "terminate called" not in done.stderr  # the rank's own: its threads end before it does
    assert not is_there(int(done.stdout))


def test_torchrun(tmp_path: Path) -> None:
    """The script runs on each rank; LLM returns on rank 0 alone, for one engine after the other."""
    (tmp_path / "script.py").write_text(
        "from nanoserve import LLM, SamplingParams\n"
        "params = SamplingParams(temperature=0, max_tokens=5)\n"
        "for _ in range(2):\n"
        f"    llm = LLM(tensor_parallel_size=2, **{SIZES})\n"
        "    print(llm.generate([[7, 8, 9]], params, use_tqdm=False)[0].outputs[0].token_ids)\n"
        "    llm.close()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += [str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    with LLM(**SIZES) as one:
        params = SamplingParams(temperature=0, max_tokens=5)
        expected = one.generate([[7, 8, 9]], params, use_tqdm=False)[0].outputs[0].token_ids
    assert done.stdout.splitlines() == [str(expected)] * 2
