"""One engine on several ranks.

The model's part is tested on ranks that are threads (tests/ranks.py), the processes' part on real
processes. tests/test_torchrun.py has the processes that torchrun starts.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from oracle import assert_same_greedy
from ranks import ThreadExecutor

from nanoserve import LLM, BeamSearchParams, SamplingParams, kv_cache
from nanoserve import engine as engine_module
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.distributed import multiproc, rank_thread
from nanoserve.distributed import ranks as ranks_module
from nanoserve.distributed.multiproc import (
    MultiprocExecutor,
    check_divisible,
    check_is_importable,
    for_other_ranks,
)
from nanoserve.distributed.process import process_state
from nanoserve.distributed.ranks import SpawnedRanks, limit_threads
from nanoserve.distributed.rendezvous import connect
from nanoserve.exceptions import EngineDeadError
from nanoserve.executor import UniprocExecutor
from nanoserve.kernels.attention_cpu import TorchBackend
from nanoserve.model_runner import ModelRunner, PendingOutput
from nanoserve.parallel import ParallelState, RankError
from nanoserve.sequence import NewSequence, ScheduledSequence, SchedulerOutput

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 7},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
}
SMALL = {"num_kv_blocks": 64, "block_size": 4, "max_model_len": 128, "device": "cpu"}
PROMPTS = [[7, 8, 9], [320, 5, 11, 19, 4, 6, 319], list(range(20, 61)), list(range(20, 50))]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="looks for processes in /proc"
)


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    """Four ranks repeat the two key heads; neither 2 nor 4 divides the vocabulary."""

    def make(model_type: str) -> Path:
        return make_checkpoint(model_type, vocab_size=321, **CHECKPOINTS[model_type])

    return make


def assert_generates(llm: LLM, folder: Path) -> None:
    """The tokens are those of transformers, for all prompts in one batch."""
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_same_greedy(folder, prompt, list(output.outputs[0].token_ids), 12)


# -- the model, on ranks that are threads --


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("model_type", CHECKPOINTS)
def test_tokens_are_those_of_transformers(
    model_type: str, tp_size: int, checkpoint: Callable[[str], Path]
) -> None:
    """With prompts in chunks and a shared prefix."""
    folder = checkpoint(model_type)
    with LLM(
        folder,
        tensor_parallel_size=tp_size,
        executor_cls=ThreadExecutor,
        max_num_batched_tokens=24,
        max_num_seqs=8,
        **SMALL,
    ) as llm:
        assert_generates(llm, folder)


PARAMS = [
    SamplingParams(n=3, temperature=0.8, seed=5, max_tokens=14, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=0.7, seed=1, max_tokens=14, top_k=20, repetition_penalty=1.3),
    SamplingParams(temperature=0, max_tokens=14, logits_processors=[lambda _, x: x.flip(0)]),
]


def generate_all(
    folder: Path, options: dict[str, Any], params: list[SamplingParams] = PARAMS
) -> tuple[list[list[list[int]]], list[list[int]], torch.Tensor, int]:
    """Tokens of each request, beams, logprobs, and the number of preemptions."""
    with LLM(folder, **{**SMALL, **options}) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        again = llm.generate(PROMPTS, params, use_tqdm=False)  # the prefixes are cached now
        [search] = llm.beam_search([PROMPTS[1]], BeamSearchParams(beam_width=3, max_tokens=6))
        llm.engine.block_manager.check()
    tokens = [[list(c.token_ids) for c in output.outputs] for output in outputs]
    assert [[list(c.token_ids) for c in output.outputs] for output in again] == tokens
    entries = [*outputs[0].outputs[2].logprobs]
    if params[1].prompt_logprobs:
        entries += outputs[1].prompt_logprobs[1:]
    logprobs = [max(item.logprob for item in entry.values()) for entry in entries]
    beams = [list(beam.tokens) for beam in search.sequences]
    preemptions = sum(output.metrics.num_preemptions for output in outputs)
    return tokens, beams, torch.tensor(logprobs), preemptions


@pytest.fixture(scope="module")
def on_one_rank(checkpoint: Callable[[str], Path]) -> tuple[Any, ...]:
    return generate_all(checkpoint("qwen3"), {})


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False, "long_prefill_token_threshold": 5},
        {"num_kv_blocks": 34, "preemption_mode": "recompute"},
        {"num_kv_blocks": 34, "preemption_mode": "swap", "async_scheduling": True},
    ],
    ids=["chunks", "recompute", "overlapped, swap"],
)
def test_two_ranks_generate_what_one_rank_does(
    options: dict[str, Any], checkpoint: Callable[[str], Path], on_one_rank: tuple[Any, ...]
) -> None:
    """Several completions, seeds, penalties, callables that other processes cannot import, logprobs
    of the prompt, swaps, branches, beams."""
    two_ranks = {"tensor_parallel_size": 2, "executor_cls": ThreadExecutor}
    tokens, beams, logprobs, preemptions = generate_all(
        checkpoint("qwen3"), {**options, **two_ranks}
    )
    assert (tokens, beams) == on_one_rank[:2]
    torch.testing.assert_close(logprobs, on_one_rank[2], rtol=0, atol=1e-3)
    assert (preemptions > 0) == ("preemption_mode" in options)


def test_a_request_that_fails_leaves_the_ranks_in_step(checkpoint: Callable[[str], Path]) -> None:
    """The request's logits processor raises on rank 0, in the middle of a step of all ranks."""

    def refuse(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_token_ids) == 2:
            raise LookupError("not the third")
        return logits

    folder = checkpoint("qwen3")
    bad = replace(GREEDY, logits_processors=[refuse])
    forbidden = replace(GREEDY, logits_processors=[lambda _, x: x.fill_(-torch.inf)])
    with LLM(folder, tensor_parallel_size=2, executor_cls=ThreadExecutor, **SMALL) as llm:
        llm.add_request("good", PROMPTS[1], GREEDY)
        for params, message in ((bad, "not the third"), (forbidden, "no token is possible")):
            [output] = llm.generate([[3, 4]], params, use_tqdm=False)
            assert output.outputs[0].finish_reason == "error"
            assert message in str(output.outputs[0].stop_reason)
        while llm.has_unfinished_requests():
            outputs = llm.step()
        assert outputs[0].request_id == "good"
        assert_same_greedy(folder, PROMPTS[1], list(outputs[0].outputs[0].token_ids), 12)


@pytest.mark.parametrize("room", [(80, 50), (50, 80)])
def test_all_ranks_have_as_many_blocks_as_the_smallest(
    room: tuple[int, int], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block holds the keys of a rank's own head. The ranks of a machine share its memory."""

    def available() -> int:
        is_rank_0 = threading.current_thread().name.startswith("nanoserve")
        block_bytes = 2 * 2 * 4 * 32 * 4  # layers, keys and values, tokens, head_dim, float32
        share = kv_cache.CPU_CACHE_SHARE / 2  # of two ranks on one machine
        return int(room[0 if is_rank_0 else 1] * block_bytes / share)

    monkeypatch.setattr(kv_cache, "available_memory", available)
    settings = {**SMALL, "num_kv_blocks": None, "max_num_seqs": 4}
    with LLM(
        checkpoint("qwen3"), tensor_parallel_size=2, executor_cls=ThreadExecutor, **settings
    ) as llm:
        assert llm.engine.executor.num_kv_blocks == 50
        assert llm.engine.executor.runner.kv_caches[0][0].shape[0] == 50


ranks_with_own_runner: list[int] = []


class OwnRunner(ModelRunner):
    """A runner of one's own, which writes down on which rank it is."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        ranks_with_own_runner.append(self.parallel.rank)


def test_a_runner_of_ones_own_runs_on_all_ranks(checkpoint: Callable[[str], Path]) -> None:
    executor_cls = partial(ThreadExecutor, runner_cls=OwnRunner)
    with LLM(
        checkpoint("qwen3"), tensor_parallel_size=2, executor_cls=executor_cls, **SMALL
    ) as llm:
        assert_generates(llm, checkpoint("qwen3"))
    assert sorted(ranks_with_own_runner) == [0, 1]


# -- what is sent, and what is refused --


def test_other_ranks_get_no_sampling_parameters() -> None:
    """Hence no callables. The number of prompt logprobs and all other fields stay."""
    params = SamplingParams(logits_processors=[lambda _, x: x], prompt_logprobs=3, stop="x")
    new = NewSequence(1, (5, 6), 2, (4,), params, frozenset({2}), ((7, 8),), 9, 0, 1)
    scheduled = ScheduledSequence(1, 0, 2, 1, [])
    step = SchedulerOutput((scheduled,), (new,), (3,), 2, is_restart=True)
    sent = pickle.loads(pickle.dumps(for_other_ranks(step)))
    assert replace(sent, new_sequences=()) == replace(step, new_sequences=())
    assert sent.new_sequences[0].token_ids == (5, 6)
    assert sent.new_sequences[0].sampling_params == SamplingParams(prompt_logprobs=3)


@pytest.mark.parametrize(
    ("model_type", "overrides", "tp_size", "message"),
    [
        ("llama", {}, 8, r"attention heads: 4 cannot be divided among 8 ranks\. Choose a tensor"),
        (
            "llama",
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
            2,
            "key and value heads: 3 cannot be divided among 2 ranks",
        ),
        ("llama", {"intermediate_size": 113}, 2, "gate_proj: 113 cannot be divided among 2 ranks"),
        ("gpt2", {}, 2, "runs through transformers here"),
    ],
)
def test_models_that_cannot_be_divided_are_refused_before_a_process_starts(
    model_type: str,
    overrides: dict[str, Any],
    tp_size: int,
    message: str,
    make_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_checkpoint(model_type, **overrides)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ValueError, match=message):
        LLM(folder, tensor_parallel_size=tp_size, device="cpu")


@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"]
)
def test_every_native_family_can_be_checked(
    model_type: str, make_checkpoint: Callable[..., Path]
) -> None:
    """The check builds the model on the meta device, which is neither a CPU nor a GPU; whatever
    set_default_device says."""
    model_config = ModelConfig.from_folder(make_checkpoint(model_type))
    config = EngineConfig(tensor_parallel_size=2).resolve(model_config)
    for default in ("cpu", "meta"):
        with torch.device(default):
            check_divisible(config, model_config)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = EngineConfig(device="cuda", tensor_parallel_size=2)
    with pytest.raises(ValueError, match="2 ranks on this machine need as many GPUs, and torch"):
        SpawnedRanks(config)


def test_one_gpu_by_name_is_not_for_many() -> None:
    with pytest.raises(ValueError, match=r"device 'cuda:1' is one GPU"):
        EngineConfig(device="cuda:1", tensor_parallel_size=2)


def test_what_other_ranks_cannot_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend and a runner that are defined in a function."""

    class LocalBackend(TorchBackend):
        """Another process cannot import this class."""

    class LocalRunner(ModelRunner):
        """Another process cannot import this class."""

    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ValueError, match=r"attention_backend .* must be able to import it"):
        LLM(tensor_parallel_size=2, attention_backend=LocalBackend(), device="cpu")
    executor_cls = partial(MultiprocExecutor, runner_cls=LocalRunner)
    with pytest.raises(ValueError, match=r"runner_cls .*LocalRunner.* must be able to import it"):
        LLM(tensor_parallel_size=2, executor_cls=executor_cls, device="cpu")
    check_is_importable("runner_cls", ModelRunner)


def test_ranks_share_the_cores_of_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank gets its share of the cores that the process may keep busy, and at least one."""
    monkeypatch.setattr(SpawnedRanks, "_spawn", lambda *_: subprocess.Popen([sys.executable, "-V"]))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    for cores, expected in ((1, 1), (8, 4), (64, 8)):
        monkeypatch.setattr(ranks_module, "num_cores", lambda cores=cores: cores)
        ranks = SpawnedRanks(EngineConfig(tensor_parallel_size=2, device="cpu"))
        ranks.close()
        assert ranks.num_threads == expected


def test_threads_are_limited_in_one_thread_only() -> None:
    """Rank 0's thread uses fewer cores; the user's other threads keep their number."""
    before, seen = torch.get_num_threads(), []

    def work() -> None:
        limit_threads(before + 1)
        torch.ones(1000, 1000).sum()
        seen.append(torch.get_num_threads())

    for task in (work, lambda: seen.append(torch.get_num_threads())):
        thread = threading.Thread(target=task)
        thread.start()
        thread.join()
    assert seen == [before + 1, before]
    assert torch.get_num_threads() == before


# -- ranks that are processes --


def children(llm: LLM) -> list[subprocess.Popen[bytes]]:
    return llm.engine.executor.ranks.processes


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    """Two processes, shared by the tests that do not break them."""
    with LLM(checkpoint("qwen3"), tensor_parallel_size=2, **SMALL) as llm:
        yield llm


def test_two_processes_generate(llm: LLM, checkpoint: Callable[[str], Path]) -> None:
    assert_generates(llm, checkpoint("qwen3"))
    assert isinstance(llm.engine.executor, MultiprocExecutor)
    assert llm.engine.executor.describe().endswith("tensor parallel on 2 ranks over gloo")


def test_a_step_costs_one_small_broadcast_and_two_sums_a_layer(llm: LLM) -> None:
    """Three sequences; 2 layers of 64 numbers; 321 logits, padded to 322, on two ranks; one token
    id for each sequence."""
    stats = llm.engine.executor.parallel.comm_stats
    for number in range(3):
        llm.add_request(str(number), [5 + number] * 9, GREEDY)
    llm.step()
    calls, sent = stats.num_calls.copy(), stats.num_bytes.copy()
    llm.step()
    calls, sent = stats.num_calls - calls, stats.num_bytes - sent
    for number in range(3):
        llm.abort_request(str(number))
    assert calls == {"control": 1, "all_reduce": 1 + 2 * 2, "gather": 1, "broadcast": 1}
    sums, logits = 5 * 3 * 64 * 4, 3 * 161 * 4
    assert sent == {"control": 4096, "all_reduce": sums, "gather": logits, "broadcast": 3 * 8}


class Interrupting:
    """A logits processor that sends one Ctrl-C, and waits until the main thread has noticed it."""

    def __init__(self) -> None:
        self.was_pressed = False
        self.was_noticed = threading.Event()

    def __call__(self, output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_token_ids) == 3 and not self.was_pressed:
            self.was_pressed = True
            os.kill(os.getpid(), signal.SIGINT)
            assert self.was_noticed.wait(30)
        return logits


def test_ctrl_c_in_the_middle_of_a_step(llm: LLM, checkpoint: Callable[[str], Path]) -> None:
    """All ranks run the step to its end, though the user does not wait for it. The engine can still
    generate."""
    processor = Interrupting()
    params = replace(GREEDY, logits_processors=[processor])
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7]], params, use_tqdm=False)
    processor.was_noticed.set()
    assert_generates(llm, checkpoint("qwen3"))
    assert [process.poll() for process in children(llm)] == [None]


# -- faults --


class FaultyOnRank1(TorchBackend):
    """A mistake that shows on rank 1 only, and only after the prompt. (The other ranks import this
    module, so that they have the class.)"""

    def attend(self, query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        spec = sys.modules["__main__"].__spec__
        is_rank = spec is not None and spec.name == "nanoserve.distributed.multiproc"
        if is_rank and len(query) == 1:
            raise ZeroDivisionError("a mistake in the kernel")
        return super().attend(query, *args, **options)


def test_an_exception_on_a_rank_arrives_with_its_traceback(
    checkpoint: Callable[[str], Path],
) -> None:
    backend = FaultyOnRank1()
    with LLM(
        checkpoint("qwen3"), tensor_parallel_size=2, attention_backend=backend, **SMALL
    ) as llm:
        with pytest.raises(RankError, match="rank 1 failed:") as error:
            llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
        assert "in attend" in str(error.value)
        assert "ZeroDivisionError: a mistake in the kernel" in str(error.value)
        with pytest.raises(RankError, match="build a new LLM"):
            llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
        assert [process.returncode for process in children(llm)] == [1]


@pytest.mark.parametrize(("tp_size", "noticed"), [(4, "in a step"), (2, "between steps")])
def test_a_killed_rank_is_noticed(
    tp_size: int, noticed: str, llm: LLM, checkpoint: Callable[[str], Path]
) -> None:
    """In the middle of a generation. The other ranks do not wait for the killed rank, and end too.
    Another engine in the same process is not disturbed."""
    broken = LLM(checkpoint("qwen3"), tensor_parallel_size=tp_size, **SMALL)
    rank = tp_size // 2
    victim = children(broken)[rank - 1]
    stream = broken.stream([[5, 6, 7]], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    victim.send_signal(signal.SIGKILL)
    if noticed == "between steps":
        victim.wait()
    start = time.monotonic()
    message = rf"rank {rank} \(process {victim.pid}\) was killed by SIGKILL"
    with pytest.raises(RankError, match=message):
        list(stream)
    assert time.monotonic() - start < 20  # seconds, not STEP_TIMEOUT
    assert all(process.returncode is not None for process in children(broken))
    with pytest.raises(RankError, match=message):
        broken.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    broken.close()
    assert_generates(llm, checkpoint("qwen3"))


def test_a_killed_rank_explains_the_end_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has lost another one may end before the killed one is reported as dead."""

    class Ended:
        pid = 7

        def __init__(self, *codes: int | None) -> None:
            self.codes = list(codes)

        def poll(self) -> int | None:
            return self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]

    monkeypatch.setattr(ranks_module, "read_failure", lambda *_: None)
    ranks = SpawnedRanks.__new__(SpawnedRanks)
    ranks.store, ranks.world_size = cast(Any, None), 4
    ranks.processes = cast(Any, [Ended(1), Ended(None, None, None, -9), Ended(None)])
    assert ranks.find_failure(timeout=5) == "rank 2 (process 7) was killed by SIGKILL."
    ranks.processes = cast(Any, [Ended(1), Ended(None), Ended(None)])
    monkeypatch.setattr(ranks_module, "SETTLE_TIME", 0.1)
    assert ranks.find_failure(timeout=0) == "rank 1 (process 7) ended with exit code 1."


def is_alive(pid: int) -> bool:
    """False also for a process that has ended and whose parent has not asked for its exit code."""
    return process_state(pid) not in (None, "Z")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class LogHandler(logging.Handler):
    """Calls a function with each message of nanoserve's log."""

    def __init__(self, function: Callable[[str], object]) -> None:
        super().__init__()
        self.function = function

    def emit(self, record: logging.LogRecord) -> None:
        self.function(record.getMessage())


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is logged; a long wait is reported after 50 ms, and each report sends a Ctrl-C."""
    found: list[str] = []

    def note(message: str) -> None:
        found.append(message)
        if "rank 0 has waited" in message and len(found) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(rank_thread, "FIRST_REPORT", 0.05)
    handler = LogHandler(note)
    logger = logging.getLogger("nanoserve")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A close() in the middle of a step waits 0.3 seconds instead of 5."""
    for module in (multiproc, ranks_module, engine_module):
        monkeypatch.setattr(module, "EXIT_TIMEOUT", 0.3)


def freeze(llm: LLM) -> None:
    for process in children(llm):
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


@needs_proc
def test_a_frozen_rank_is_logged_and_close_ends_it(
    checkpoint: Callable[[str], Path], messages: list[str], impatient: None, llm: LLM
) -> None:
    """Two reports name the rank; then the user presses Ctrl-C in the middle of the step, and
    closes. Nothing is left behind, though the LLM is still in a variable. (torch keeps one pipe of
    the first engine: `llm` is an engine before this one.)"""
    files, threads = open_files(), threading.active_count()
    frozen = LLM(checkpoint("qwen3"), tensor_parallel_size=2, **SMALL)
    messages.clear()
    freeze(frozen)
    with pytest.raises(KeyboardInterrupt):
        frozen.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    [victim] = children(frozen)
    for message in messages:
        assert f"rank 1 (process {victim.pid}) is stopped" in message
        assert "600 s" in message
    assert len(messages) == 2
    frozen.close()
    assert victim.returncode == -signal.SIGKILL
    assert (open_files(), threading.active_count()) == (files, threads)
    frozen.close()
    with pytest.raises(RuntimeError, match="closed"):
        frozen.generate([[5, 6, 7]], GREEDY, use_tqdm=False)


@needs_proc
@pytest.mark.slow
def test_a_frozen_rank_that_goes_on(llm: LLM, checkpoint: Callable[[str], Path]) -> None:
    """Its step goes on, and the engine with it."""

    def thaw(message: str) -> None:
        if "is stopped" in message:
            children(llm)[0].send_signal(signal.SIGCONT)

    handler = LogHandler(thaw)
    logging.getLogger("nanoserve").addHandler(handler)
    try:
        freeze(llm)
        assert_generates(llm, checkpoint("qwen3"))
    finally:
        logging.getLogger("nanoserve").removeHandler(handler)


@needs_proc
@pytest.mark.slow
def test_close_from_another_thread_ends_a_step_that_hangs(
    checkpoint: Callable[[str], Path], impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller of the step gets a RankError."""
    monkeypatch.setattr(rank_thread, "FIRST_REPORT", 0.05)
    llm = LLM(checkpoint("qwen3"), tensor_parallel_size=2, **SMALL)
    freeze(llm)
    closing = threading.Thread(target=llm.close)
    handler = LogHandler(lambda _: closing.ident or closing.start())
    logging.getLogger("nanoserve").addHandler(handler)
    try:
        with pytest.raises(RankError, match="the executor is closed"):
            llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    finally:
        logging.getLogger("nanoserve").removeHandler(handler)
        closing.join(60)
    assert not closing.is_alive()
    assert [process.returncode for process in children(llm)] == [-signal.SIGKILL]


@needs_proc
@pytest.mark.slow
def test_garbage_in_the_middle_of_a_step_ends_its_ranks(
    checkpoint: Callable[[str], Path], messages: list[str], impatient: None
) -> None:
    llm = LLM(checkpoint("qwen3"), tensor_parallel_size=2, **SMALL)
    messages.clear()
    freeze(llm)
    processes = children(llm)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    del llm
    gc.collect()
    assert [process.returncode for process in processes] == [-signal.SIGKILL]


def fail(*arguments: Any) -> Any:
    raise ZeroDivisionError("a mistake of rank 0")


def test_rank_0_fails_in_the_middle_of_a_step(checkpoint: Callable[[str], Path]) -> None:
    """Rank 1 waits for the rest of the step, so this engine cannot go on."""
    with LLM(checkpoint("qwen3"), tensor_parallel_size=2, **SMALL) as llm:
        llm.engine.executor.runner.forward = fail
        for message in ("rank 0 failed in the middle of a step: ZeroDiv", "build a new LLM"):
            with pytest.raises(EngineDeadError, match=message):
                llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
        assert [process.poll() is None for process in children(llm)] == [False]


@pytest.mark.parametrize("where", ["launch", "result"])
def test_rank_0_fails_after_a_step(
    where: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks have exchanged the tokens, and nobody waits: the engine can go on."""
    folder = checkpoint("qwen3")
    with LLM(folder, tensor_parallel_size=2, executor_cls=ThreadExecutor, **SMALL) as llm:
        with monkeypatch.context() as patch:
            if where == "result":
                patch.setattr(PendingOutput, "result", fail)
            else:
                runner = llm.engine.executor.runner
                patch.setattr(runner.batch, "append_placeholders", fail)
            with pytest.raises(ZeroDivisionError):
                llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
        assert_generates(llm, folder)


@needs_proc
def test_too_few_open_files_are_told(checkpoint: Callable[[str], Path]) -> None:
    """Before a process is started, or torch is asked."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = open_files()
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = sorted(set(range(len(used) + 12)) - used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[11] + 1, hard))  # the numbers are bounded
    try:
        with pytest.raises(RankError, match=r"needs 48 more open files .*`ulimit -n`"):
            LLM(checkpoint("qwen3"), tensor_parallel_size=2, **SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_files() == files


def test_python_that_is_not_there_is_told(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(RankError, match=r"could not be started: .*No such file.*/nowhere/python"):
        LLM(checkpoint("qwen3"), tensor_parallel_size=2, **SMALL)


def test_a_rank_that_does_not_start_is_noticed(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RankError, match=r"rank 1 \(process \d+\) ended with exit code 1"):
        LLM(checkpoint("qwen3"), tensor_parallel_size=2, **SMALL)


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """All ranks that the test starts."""
    processes: list[subprocess.Popen[bytes]] = []
    original = SpawnedRanks._spawn

    def spawn(*arguments: Any) -> subprocess.Popen[bytes]:
        processes.append(original(*arguments))
        return processes[-1]

    monkeypatch.setattr(SpawnedRanks, "_spawn", spawn)
    return processes


def test_an_llm_that_cannot_be_built_leaves_no_ranks(
    make_checkpoint: Callable[..., Path], spawned: list[subprocess.Popen[bytes]]
) -> None:
    """The error is rank 0's own error, the same as on one rank."""
    with pytest.raises(ValueError, match="of KV cache, and there are"):
        LLM(make_checkpoint("qwen3"), tensor_parallel_size=2, kv_cache_memory=10, device="cpu")
    assert [process.poll() is None for process in spawned] == [False]


def test_ctrl_c_while_it_is_built_leaves_no_ranks(
    make_checkpoint: Callable[..., Path],
    spawned: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0's thread is loading the model. The user does not have to wait for the thread."""
    was_noticed = threading.Event()

    def load_for_ever(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert was_noticed.wait(60)
        raise RuntimeError("too late")

    monkeypatch.setattr(ModelRunner, "__init__", load_for_ever)
    with pytest.raises(KeyboardInterrupt):
        LLM(make_checkpoint("qwen3"), tensor_parallel_size=2, **SMALL)
    was_noticed.set()
    assert [process.poll() is None for process in spawned] == [False]


def test_garbage_ends_its_ranks(checkpoint: Callable[[str], Path]) -> None:
    llm = LLM(checkpoint("qwen3"), tensor_parallel_size=2, **SMALL)
    processes = children(llm)
    llm.generate([[5, 6]], GREEDY, use_tqdm=False)
    del llm
    gc.collect()
    assert [process.poll() for process in processes] == [0]


SCRIPT = """
import sys, torch
from nanoserve import LLM, SamplingParams
torch.set_num_threads(1)
llm = LLM(sys.argv[1], tensor_parallel_size=2, num_kv_blocks=64, block_size=4, device="cpu")
params = SamplingParams(max_tokens=100, ignore_eos=True)
try:
    print(*[process.pid for process in llm.engine.executor.ranks.processes], flush=True)
    while True:
        llm.generate([[5, 6, 7]], params, use_tqdm=False)
except KeyboardInterrupt:
    [output] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    print(len(output.outputs[0].token_ids), flush=True)
"""


@needs_proc
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_behind(
    how: signal.Signals, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """A Ctrl-C of a terminal goes to the whole process group. It does not reach the ranks: the
    script can still generate, and then ends by itself with its LLM open. A killed script can do
    nothing for its ranks; they end all the same."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(checkpoint("qwen3"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,  # makes a process group
    )
    assert process.stdout is not None
    ranks = [int(pid) for pid in process.stdout.readline().split()]
    assert [is_alive(pid) for pid in ranks] == [True]
    os.killpg(process.pid, how)
    output, errors = process.communicate(timeout=60)
    was_killed = how == signal.SIGKILL
    assert process.returncode == (-how if was_killed else 0), errors.decode()
    assert output == (b"" if was_killed else b"100\n")
    deadline = time.monotonic() + 20
    while any(is_alive(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in ranks)
    assert list(tmp_path.iterdir()) == []


FROZEN_SCRIPT = """
import os, signal, sys, threading, time
from nanoserve import LLM, SamplingParams
folder, how = sys.argv[1:]
llm = LLM(folder, tensor_parallel_size=2, num_kv_blocks=64, block_size=4, device="cpu")
[rank] = llm.engine.executor.ranks.processes
print(rank.pid, flush=True)
os.kill(rank.pid, signal.SIGSTOP)

def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)

def wait_within_a_step():
    while not llm.engine.executor._thread.num_callers:
        time.sleep(0.01)
    press_ctrl_c()

threading.Thread(target=wait_within_a_step).start()
try:
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4), use_tqdm=False)
except KeyboardInterrupt:
    print("interrupted", flush=True)
if how == "with":
    with llm:
        raise KeyError("mine")
if how == "second":
    threading.Timer(0.5, press_ctrl_c).start()
    try:
        llm.close()
    except KeyboardInterrupt:
        print("interrupted again", rank.returncode, flush=True)
"""


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("how", ["exit", "with", "second"])
def test_the_end_of_a_script_with_a_frozen_rank(
    how: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """After a Ctrl-C in the middle of a step the script ends: without close(), by an exception
    within `with llm`, or by a second Ctrl-C during close(). It ends long before STEP_TIMEOUT."""
    process = subprocess.Popen(
        [sys.executable, "-c", FROZEN_SCRIPT, str(checkpoint("qwen3")), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    output, errors = process.communicate(timeout=120)
    pid, *lines = output.split("\n")
    assert lines[0] == "interrupted"
    assert (process.returncode == 1) == ("KeyError: 'mine'" in errors) == (how == "with"), errors
    assert (lines[1] == "interrupted again -9") == (how == "second")
    assert not is_alive(int(pid))
    assert list(tmp_path.iterdir()) == []


FORK_SCRIPT = """
import gc, os, signal, sys, time
from nanoserve import LLM, SamplingParams
folder, how = sys.argv[1:]
llm = LLM(folder, tensor_parallel_size=2, num_kv_blocks=64, block_size=4, device="cpu")
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
[before] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
[rank] = llm.engine.executor.ranks.processes
read, write = os.pipe()
child = os.fork()
if child == 0 and how in ("exit", "garbage"):
    try:
        llm.step()
    except RuntimeError as error:
        print(error, flush=True)
    llm.close()
    if how == "garbage":
        del llm
        gc.collect()
    sys.exit(3)
if child == 0:
    os.close(write)
    os.read(read, 1)  # until the parent has ended
    os._exit(0)
if how == "killed":
    print(rank.pid, flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
if how != "lives":
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
[after] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
assert after.outputs[0].token_ids == before.outputs[0].token_ids
llm.close()
print(rank.returncode)
"""


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("how", ["exit", "garbage", "lives", "killed"])
def test_a_forked_child_does_not_touch_the_ranks(
    how: str, checkpoint: Callable[[str], Path]
) -> None:
    """Neither its exit nor its garbage ends them. They do not wait for a child that lives longer
    than its parent, though it has a copy of their pipes."""
    process = subprocess.Popen(
        [sys.executable, "-c", FORK_SCRIPT, str(checkpoint("qwen3")), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    if how == "killed":
        pid = int(process.stdout.readline())
        assert is_alive(pid)
    output, _ = process.communicate("go\n", timeout=120)
    if how == "killed":
        deadline = time.monotonic() + 20
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_alive(pid)
        return
    assert process.returncode == 0
    lines = output.splitlines()
    assert lines[-1] == "0"
    if how != "lives":
        assert "start method 'spawn'" in lines[0]
        assert lines[1] == "3"


# -- on a GPU --


class NcclExecutor(UniprocExecutor):
    """One rank with an nccl group of its own: as much of nccl as one GPU can run."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, backend: Any) -> None:
        store = torch.distributed.HashStore()
        self.parallel: ParallelState = connect(store, 0, 1, torch.device("cuda", 0))
        self.runner = ModelRunner(config, model_config, backend, self.parallel)
        self.num_kv_blocks = self.runner.num_kv_blocks
        self.num_cpu_blocks = self.runner.num_cpu_blocks


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_nccl_on_one_gpu(enforce_eager: bool, checkpoint: Callable[[str], Path]) -> None:
    """Collective operations between kernels, with CUDA graphs and without."""
    folder = checkpoint("qwen3")
    with LLM(
        folder,
        executor_cls=NcclExecutor,
        enforce_eager=enforce_eager,
        dtype="float32",
        **{**SMALL, "device": "cuda"},
    ) as llm:
        assert_generates(llm, folder)
        stats = llm.engine.executor.parallel.comm_stats
        assert stats.num_calls["all_reduce"] > 0
        assert stats.num_calls["broadcast"] > 0


def test_a_failure_tells_what_both_ranks_say() -> None:
    """A rank that could not connect has written nothing: rank 0's own error names the cause."""

    def run(*args: Any) -> None:
        raise RankError("no such interface")

    executor = MultiprocExecutor.__new__(MultiprocExecutor)
    executor.failure, executor._thread = None, cast(Any, SimpleNamespace(run=run))
    found = SimpleNamespace(
        find_failure=lambda timeout: "rank 1 ended with exit code 1." if timeout else None
    )
    executor.ranks = cast(Any, found)
    with pytest.raises(RankError, match=r"rank 1 ended with exit code 1\.\nno such interface"):
        executor._run_and_check(lambda: None)
