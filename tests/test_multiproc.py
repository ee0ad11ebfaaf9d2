"""One engine on several ranks.

What is true of the model is tested on ranks that are threads (tests/ranks.py), what is true of
processes on processes, and tests/test_torchrun.py has those of torchrun.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import assert_same_greedy
from ranks import ThreadExecutor

from nanoserve import LLM, BeamSearchParams, SamplingParams, kv_cache
from nanoserve.distributed import multiproc as executor
from nanoserve.attention import TORCH_BACKEND, paged_attention_torch
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.distributed.multiproc import MultiprocExecutor, for_other_ranks
from nanoserve.distributed.ranks import StartedRanks, share_cores
from nanoserve.executor import UniprocExecutor
from nanoserve.model_runner import ModelRunner
from nanoserve.parallel import ParallelState, RankError, connect
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


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    """Two key heads, so that four ranks repeat them, and a vocabulary that is divided by none."""

    def make(model_type: str) -> Path:
        return make_checkpoint(model_type, vocab_size=321, **CHECKPOINTS[model_type])

    return make


def assert_serves(llm: LLM, folder: Path) -> None:
    """What transformers says, for all prompts at once."""
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_same_greedy(folder, prompt, list(output.outputs[0].token_ids), 12)


# -- the model, on ranks that are threads --


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("model_type", CHECKPOINTS)
def test_tokens_are_those_of_transformers(
    model_type: str, world_size: int, checkpoint: Callable[[str], Path]
) -> None:
    """Whatever the number of ranks; in a batch, with prompts in chunks and a shared prefix."""
    folder = checkpoint(model_type)
    with LLM(
        folder,
        tensor_parallel_size=world_size,
        executor_cls=ThreadExecutor if world_size > 1 else None,
        max_num_batched_tokens=24,
        max_num_seqs=8,
        **SMALL,
    ) as llm:
        assert_serves(llm, folder)


WISHES = [
    SamplingParams(n=3, temperature=0.8, seed=5, max_tokens=14, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=0.7, seed=1, max_tokens=14, top_k=20, repetition_penalty=1.3),
    SamplingParams(temperature=0, max_tokens=14, logits_processors=[lambda _, x: x.flip(0)]),
]


def serve_wishes(
    folder: Path, options: dict[str, Any]
) -> tuple[list[list[list[int]]], list[list[int]], torch.Tensor, int]:
    """Tokens of each request, beams, logprobs, and the number of preemptions."""
    with LLM(folder, **{**SMALL, **options}) as llm:
        outputs = llm.generate(PROMPTS, WISHES, use_tqdm=False)
        again = llm.generate(PROMPTS, WISHES, use_tqdm=False)  # with what is cached by now
        [search] = llm.beam_search([PROMPTS[1]], BeamSearchParams(beam_width=3, max_tokens=6))
        llm.engine.block_manager.check()
    tokens = [[list(c.token_ids) for c in output.outputs] for output in outputs]
    assert [[list(c.token_ids) for c in output.outputs] for output in again] == tokens
    entries = [*outputs[0].outputs[2].logprobs, *outputs[1].prompt_logprobs[1:]]
    logprobs = [max(item.logprob for item in entry.values()) for entry in entries]
    beams = [list(beam.tokens) for beam in search.sequences]
    preemptions = sum(output.metrics.num_preemptions for output in outputs)
    return tokens, beams, torch.tensor(logprobs), preemptions


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False, "long_prefill_token_threshold": 5},
        {"num_kv_blocks": 34, "preemption_mode": "recompute"},
        {"num_kv_blocks": 34, "preemption_mode": "swap"},
        {"async_scheduling": True},
        {"async_scheduling": True, "num_kv_blocks": 34, "preemption_mode": "swap"},
    ],
    ids=["plain", "chunks", "recompute", "swap", "overlapped", "overlapped, swap"],
)
def test_everything_works_on_two_ranks(
    options: dict[str, Any], checkpoint: Callable[[str], Path]
) -> None:
    """Several completions, seeds, penalties, callables that cannot be sent, logprobs of the
    prompt, swaps, forks: the same as on one rank."""
    folder = checkpoint("qwen3")
    two = {"tensor_parallel_size": 2, "executor_cls": ThreadExecutor}
    tokens, beams, logprobs, preemptions = serve_wishes(folder, options)
    assert (preemptions > 0) == ("preemption_mode" in options)
    tokens_2, beams_2, logprobs_2, preemptions_2 = serve_wishes(folder, {**options, **two})
    assert (tokens_2, beams_2, preemptions_2) == (tokens, beams, preemptions)
    torch.testing.assert_close(logprobs_2, logprobs, rtol=0, atol=1e-3)


def test_a_request_that_fails_leaves_the_ranks_in_step(checkpoint: Callable[[str], Path]) -> None:
    """Its logits processor raises on rank 0, in the middle of a step that others take part in."""

    def refuse(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_token_ids) == 2:
            raise LookupError("not the third")
        return logits

    folder = checkpoint("qwen3")
    bad = replace(GREEDY, logits_processors=[refuse])
    forbidden = replace(GREEDY, logits_processors=[lambda _, x: x.fill_(-torch.inf)])
    with LLM(folder, tensor_parallel_size=2, executor_cls=ThreadExecutor, **SMALL) as llm:
        llm.add_request("good", PROMPTS[1], GREEDY)
        with pytest.raises(LookupError, match="not the third"):
            llm.generate([[3, 4]], bad, use_tqdm=False)
        with pytest.raises(ValueError, match="no token is possible"):
            llm.generate([[3, 4]], forbidden, use_tqdm=False)
        while llm.has_unfinished_requests():
            outputs = llm.step()
        assert outputs[0].request_id == "good"
        assert_same_greedy(folder, PROMPTS[1], list(outputs[0].outputs[0].token_ids), 12)


@pytest.mark.parametrize("room", [(80, 50), (50, 80)])
def test_all_ranks_have_as_many_blocks_as_the_poorest(
    room: tuple[int, int], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in blocks that hold the keys of a rank's own head; and main memory is shared."""

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


# -- what is sent, and what is refused --


def test_what_other_ranks_are_told_is_small_and_can_be_sent() -> None:
    """No parameters, hence no callables; the rest is as it was."""
    params = SamplingParams(logits_processors=[lambda _, x: x], prompt_logprobs=3, stop="x")
    new = NewSequence(1, (5, 6), 2, (4,), params, frozenset({2}), ((7, 8),), 9, 0, 1)
    scheduled = ScheduledSequence(1, 0, 2, 1, [])
    step = SchedulerOutput((scheduled,), (new,), (3,), 2, is_restart=True)
    sent = pickle.loads(pickle.dumps(for_other_ranks(step)))
    assert replace(sent, new_sequences=()) == replace(step, new_sequences=())
    assert sent.new_sequences[0].token_ids == (5, 6)
    assert sent.new_sequences[0].sampling_params == SamplingParams(prompt_logprobs=3)


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        ({}, 3, "attention heads: 4 cannot be divided among 3 ranks. Choose a tensor parallel"),
        ({}, 8, "attention heads: 4 cannot be divided among 8 ranks"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
            2,
            "key and value heads: 3 cannot be divided among 2 ranks",
        ),
        ({"intermediate_size": 113}, 2, "gate_proj: 113 cannot be divided among 2 ranks"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_before_anything_starts(
    overrides: dict[str, Any],
    world_size: int,
    message: str,
    make_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_checkpoint("llama", **overrides)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ValueError, match=message):
        LLM(folder, tensor_parallel_size=world_size, device="cpu")


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = EngineConfig(device="cuda", tensor_parallel_size=2)
    with pytest.raises(ValueError, match="2 ranks on this machine need as many GPUs, and torch"):
        StartedRanks(config)


def test_one_gpu_by_name_is_not_for_many() -> None:
    with pytest.raises(ValueError, match=r"device 'cuda:1' is one GPU"):
        EngineConfig(device="cuda:1", tensor_parallel_size=2)


def test_a_backend_that_cannot_be_sent_is_refused() -> None:
    backend = TORCH_BACKEND._replace(paged_attention=lambda *_, **__: torch.zeros(1))
    with pytest.raises(ValueError, match="must be able to import it"):
        LLM(tensor_parallel_size=2, attention_backend=backend, device="cpu")


def test_cores_are_shared_in_one_thread_only() -> None:
    """Rank 0 leaves cores to the other ranks; the user's own torch keeps all it has."""
    before, seen = torch.get_num_threads(), []

    def work() -> None:
        share_cores(before + 1)
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
    """Two processes, shared by the tests that leave them in order."""
    with LLM(checkpoint("qwen3"), tensor_parallel_size=2, **SMALL) as llm:
        yield llm


def test_two_processes_say_what_one_says(llm: LLM, checkpoint: Callable[[str], Path]) -> None:
    assert_serves(llm, checkpoint("qwen3"))
    assert isinstance(llm.engine.executor, MultiprocExecutor)
    assert llm.engine.executor.describe().endswith("tensor parallel on 2 ranks over gloo")


def test_a_step_costs_one_small_broadcast_and_two_sums_a_layer(llm: LLM) -> None:
    """Three tokens; 2 layers of 64 numbers; 321 logits padded to 322, halved; one id each."""
    traffic = llm.engine.executor.parallel.traffic
    for number in range(3):
        llm.add_request(str(number), [5 + number] * 9, GREEDY)
    llm.step()
    calls, sent = traffic.num_calls.copy(), traffic.num_bytes.copy()
    llm.step()
    calls, sent = traffic.num_calls - calls, traffic.num_bytes - sent
    for number in range(3):
        llm.abort_request(str(number))
    assert calls == {"control": 1, "all_reduce": 1 + 2 * 2, "gather": 1, "broadcast": 1}
    sums, logits = 5 * 3 * 64 * 4, 3 * 161 * 4
    assert sent == {"control": 4096, "all_reduce": sums, "gather": logits, "broadcast": 3 * 8}


class Interrupting:
    """A logits processor that presses Ctrl-C, once, and waits until somebody has noticed."""

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
    """The step goes on to its end on all ranks, though nobody waits for it; then they serve on."""
    processor = Interrupting()
    params = replace(GREEDY, logits_processors=[processor])
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7]], params, use_tqdm=False)
    processor.was_noticed.set()
    assert_serves(llm, checkpoint("qwen3"))
    assert [process.poll() for process in children(llm)] == [None]


# -- faults --


def raise_on_rank_1(*arguments: Any, **options: Any) -> torch.Tensor:
    """A kernel with a mistake that shows only there, and only after the prompt."""
    spec = sys.modules["__main__"].__spec__
    is_rank = spec is not None and spec.name == "nanoserve.distributed.multiproc"
    if is_rank and len(arguments[0]) == 1:
        raise ZeroDivisionError("a mistake in the kernel")
    return paged_attention_torch(*arguments, **options)


# Importable, as what is handed to other ranks must be: they import this module.
FAULTY = TORCH_BACKEND._replace(name="faulty", paged_attention=raise_on_rank_1)


def test_an_exception_on_a_rank_arrives_with_its_traceback(
    checkpoint: Callable[[str], Path],
) -> None:
    with LLM(checkpoint("qwen3"), tensor_parallel_size=2, attention_backend=FAULTY, **SMALL) as llm:
        with pytest.raises(RankError, match="rank 1 failed:") as error:
            llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
        assert "in raise_on_rank_1" in str(error.value)
        assert "ZeroDivisionError: a mistake in the kernel" in str(error.value)
        with pytest.raises(RankError, match="build a new LLM"):
            llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
        assert [process.returncode for process in children(llm)] == [1]


@pytest.mark.parametrize("noticed", ["in a step", "between steps"])
def test_a_killed_rank_is_noticed_and_a_second_llm_can_be_built(
    noticed: str, checkpoint: Callable[[str], Path]
) -> None:
    """One of four, in the middle of a generation: the others don't wait for it. Then a new engine
    is built beside the broken one."""
    folder = checkpoint("qwen3")
    broken = LLM(folder, tensor_parallel_size=4, **SMALL)
    victim = children(broken)[1]
    stream = broken.stream([[5, 6, 7]], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    victim.send_signal(signal.SIGKILL)
    if noticed == "between steps":
        victim.wait()
    start = time.monotonic()
    message = rf"rank 2 \(process {victim.pid}\) was killed by SIGKILL"
    with pytest.raises(RankError, match=message):
        list(stream)
    assert time.monotonic() - start < 20  # seconds, not STEP_TIMEOUT
    assert all(process.returncode is not None for process in children(broken))
    with LLM(folder, tensor_parallel_size=2, **SMALL) as llm:
        assert_serves(llm, folder)
        with pytest.raises(RankError, match=message):
            broken.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
        broken.close()
        assert_serves(llm, folder)
        processes = children(llm)
    assert [process.returncode for process in processes] == [0]


def test_a_rank_that_does_not_start_is_noticed(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RankError, match=r"rank 1 \(process \d+\) ended with exit code 1"):
        LLM(checkpoint("qwen3"), tensor_parallel_size=2, **SMALL)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """All ranks that the test starts."""
    processes: list[subprocess.Popen[bytes]] = []
    original = StartedRanks._start

    def start(*arguments: Any) -> subprocess.Popen[bytes]:
        processes.append(original(*arguments))
        return processes[-1]

    monkeypatch.setattr(StartedRanks, "_start", start)
    return processes


def test_an_llm_that_cannot_be_built_leaves_no_ranks(
    make_checkpoint: Callable[..., Path], started: list[subprocess.Popen[bytes]]
) -> None:
    """The error is rank 0's own, as on one rank."""
    with pytest.raises(ValueError, match="of KV cache, and there are"):
        LLM(make_checkpoint("qwen3"), tensor_parallel_size=2, kv_cache_memory=10, device="cpu")
    assert [process.poll() is None for process in started] == [False]


def test_ctrl_c_while_it_is_built_leaves_no_ranks(
    make_checkpoint: Callable[..., Path],
    started: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0's thread is loading; the user does not have to wait for it."""
    was_noticed = threading.Event()

    def load_for_ever(*arguments: Any) -> ModelRunner:
        os.kill(os.getpid(), signal.SIGINT)
        assert was_noticed.wait(60)
        raise RuntimeError("too late")

    monkeypatch.setattr(executor, "ModelRunner", load_for_ever)
    with pytest.raises(KeyboardInterrupt):
        LLM(make_checkpoint("qwen3"), tensor_parallel_size=2, **SMALL)
    was_noticed.set()
    assert [process.poll() is None for process in started] == [False]


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
print(*[process.pid for process in llm.engine.executor.ranks.processes], flush=True)
params = SamplingParams(max_tokens=100, ignore_eos=True)
while True:
    llm.generate([[5, 6, 7]], params, use_tqdm=False)
    if sys.argv[2] == "end":
        break
"""


def is_alive(pid: int) -> bool:
    """False, too, for a process that has ended and waits for its parent to ask."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", ["end", "interrupt", "kill"])
def test_nothing_is_left_behind(
    how: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """However a script ends: by itself and with its LLM open, by a Ctrl-C (which a terminal sends
    to the ranks, too, if they are in its group), or killed, when it can do nothing about it."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(checkpoint("qwen3")), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,  # a process group, to which a Ctrl-C goes
    )
    assert process.stdout is not None
    ranks = [int(pid) for pid in process.stdout.readline().split()]
    assert len(ranks) == 1
    assert is_alive(ranks[0]) or how == "end"
    if how != "end":
        os.killpg(process.pid, signal.SIGINT if how == "interrupt" else signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode == 0) == (how == "end"), errors.decode()
    assert (b"KeyboardInterrupt" in errors) == (how == "interrupt"), errors.decode()
    deadline = time.monotonic() + 20
    while any(is_alive(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in ranks)
    assert list(tmp_path.iterdir()) == []


# -- on a GPU --


class NcclExecutor(UniprocExecutor):
    """One rank that says everything to itself, over nccl: all that one GPU can show of it."""

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
    """Sums and broadcasts among kernels, with CUDA graphs and without."""
    folder = checkpoint("qwen3")
    with LLM(
        folder,
        executor_cls=NcclExecutor,
        enforce_eager=enforce_eager,
        dtype="float32",
        **{**SMALL, "device": "cuda"},
    ) as llm:
        assert_serves(llm, folder)
        traffic = llm.engine.executor.parallel.traffic
        assert traffic.num_calls["all_reduce"] > 0
        assert traffic.num_calls["broadcast"] > 0
