"""The engine on a GPU: `pytest -m gpu tests/test_gpu_engine.py`.

Greedy answers are transformers' own; graphs and overlapped steps change no token; memory does not
grow. Each check is a function of the device, and most run on the CPU, too, at a tiny size: so the
checks themselves are known to work where there is no GPU.

NANOSERVE_SOAK=5000 makes the soak run as many requests long.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import assert_same_greedy

from nanoserve import LLM, SamplingParams
from nanoserve.cuda_graph import MEMORY_RESERVE

GPU_SOAK = int(os.environ.get("NANOSERVE_SOAK", "400"))
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
BOTH = pytest.mark.parametrize("device", [ON_GPU, "cpu"])

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def _needs_its_device(request: pytest.FixtureRequest) -> None:
    """A GPU test without a GPU says so."""
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: run with `pytest -m gpu` on a machine that has one")


def make_requests(number: int, seed: int = 0, longest: int = 60) -> list[Any]:
    """(prompt, params): random lengths, some with a common beginning; greedy, sampled, forked,
    penalised; some end at a token that comes often."""
    chance = random.Random(seed)
    shared = [chance.randrange(5, 300) for _ in range(40)]
    requests = []
    for i in range(number):
        own = [chance.randrange(5, 300) for _ in range(chance.randint(1, longest // 2))]
        prompt = shared[: chance.choice([0, 0, 16, 33])] + own
        fields: dict[str, Any] = {"max_tokens": chance.randint(1, longest // 2), "seed": i}
        fields["temperature"] = chance.choice([0, 0, 0.8])
        if chance.random() < 0.15:
            fields |= {"n": 3, "temperature": 1.0}
        if chance.random() < 0.15:
            fields |= {"repetition_penalty": 1.2}
        if chance.random() < 0.3:
            fields |= {"stop_token_ids": list(range(20)), "top_k": 50}
        requests.append((prompt, SamplingParams(**fields)))
    return requests


def run_requests(
    llm: LLM, requests: list[Any], seed: int = 0, num_aborts: int = 0
) -> dict[str, Any]:
    """Requests that arrive over time, some of them aborted on the way. Returns the tokens of those
    that were not; every block is free again."""
    chance = random.Random(seed)
    to_abort = set(chance.sample(range(len(requests)), num_aborts))
    waiting = list(enumerate(requests))[::-1]
    results: dict[str, Any] = {}
    while waiting or llm.has_unfinished_requests():
        for _ in range(min(len(waiting), chance.choice([0, 0, 1, 2, 5]))):
            i, (prompt, params) = waiting.pop()
            llm.add_request(str(i), prompt, params)
        for output in llm.step():
            if output.finished and int(output.request_id) not in to_abort:
                results[output.request_id] = [c.token_ids for c in output.outputs]
        if to_abort and chance.random() < 0.2:
            llm.abort_request(str(chance.choice(sorted(to_abort))))
    manager = llm.engine.block_manager
    manager.check()
    assert manager.num_free_blocks == manager.num_blocks
    assert manager.cpu_pool.num_free_blocks == manager.num_cpu_blocks
    assert not llm.engine._in_flight
    return results


def assert_same_results(
    found: dict[str, Any], expected: dict[str, Any], requests: list[Any]
) -> None:
    """Token for token. Where float32 answers part ways (another batch rounds otherwise), no more
    than one request in fifty may: the near ties of weights as large as these are rarer."""
    assert found.keys() == expected.keys()
    different = [name for name in found if found[name] != expected[name]]
    assert len(different) <= len(requests) // 50, (
        f"{len(different)} differ, such as {different[:5]}"
    )


def options_for(device: str, **options: Any) -> dict[str, Any]:
    return {"device": device, "dtype": "float32", "num_kv_blocks": 600, "block_size": 16, **options}


# -- the same as transformers --


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.gpu
def test_greedy_tokens_are_those_of_transformers(
    make_checkpoint: MakeCheckpoint, family: str, dtype: str
) -> None:
    """Token for token in float32; in bfloat16, where two programs round differently, each token is
    the likeliest of the teacher-forced reference or nearly ties with it (see oracle.py)."""
    check_greedy(make_checkpoint(family), "cuda", dtype, num_prompts=24, max_tokens=40)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_tokens_on_a_cpu(make_checkpoint: MakeCheckpoint, dtype: str) -> None:
    """The same check where there is no GPU, with overlapped steps."""
    folder = make_checkpoint("qwen3")
    check_greedy(folder, "cpu", dtype, num_prompts=5, max_tokens=8, async_scheduling=True)


def check_greedy(
    folder: Path, device: str, dtype: str, num_prompts: int, max_tokens: int, **options: Any
) -> None:
    chance = random.Random(1)
    prompts = [
        [chance.randrange(5, 300) for _ in range(chance.choice([1, 7, 16, 33, 90]))]
        for _ in range(num_prompts)
    ]
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with LLM(folder, **options_for(device, dtype=dtype, **options)) as llm:
        assert llm.engine.executor.runner.dtype == getattr(torch, dtype)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        [completion] = output.outputs
        assert_same_greedy(
            folder, prompt, list(completion.token_ids), max_tokens, getattr(torch, dtype)
        )


# -- on is off --


@pytest.mark.gpu
def test_graphs_change_no_token(make_checkpoint: MakeCheckpoint) -> None:
    """enforce_eager on and off. (test_cuda_graph.py does the same on a CPU, with a fake graph.)"""
    requests = make_requests(120)
    results = []
    for enforce_eager in (True, False):
        options = options_for("cuda", enforce_eager=enforce_eager, max_num_seqs=37)
        with LLM(make_checkpoint("llama"), **options) as llm:
            assert (llm.engine.executor.runner.graphs is None) == enforce_eager
            results.append(run_requests(llm, requests))
    assert_same_results(results[1], results[0], requests)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_fused_kernels_change_no_token(
    make_checkpoint: MakeCheckpoint, family: str, enforce_eager: bool
) -> None:
    """custom_ops on and off, without graphs and with them. (test_fused_triton.py runs an engine on
    them through the interpreter.)"""
    requests = make_requests(100, seed=11)
    results = []
    for custom_ops in ("none", "all"):
        options = options_for("cuda", custom_ops=custom_ops, enforce_eager=enforce_eager)
        with LLM(make_checkpoint(family), **options, max_num_seqs=37) as llm:
            results.append(run_requests(llm, requests))
    assert_same_results(results[1], results[0], requests)


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_nothing_is_compiled_while_serving(
    quantization: str | None, make_checkpoint: MakeCheckpoint
) -> None:
    """Decodes and prompts, short and long, alone and together: every kernel was ready at start."""
    from aot_kernels import KERNELS

    def num_compiled() -> int:
        kernels = [getattr(module, name) for name, module in KERNELS.items()]
        return sum(len(caches[0]) for k in kernels for caches in k.device_caches.values())

    folder = make_checkpoint("qwen3", max_position_embeddings=16384)
    options = options_for("cuda", num_kv_blocks=4000, max_num_seqs=40)
    with LLM(folder, **options, quantization=quantization) as llm:
        before = num_compiled()
        for lengths in ([3], [9000], [5, 700, 12000], [1] * 40, [300] * 30, [2000, 15000, 1, 1]):
            requests = [([7] * n, SamplingParams(max_tokens=20)) for n in lengths]
            run_requests(llm, requests)
        assert num_compiled() == before > 0


@pytest.mark.gpu
def test_engines_on_two_gpus(make_checkpoint: MakeCheckpoint) -> None:
    """One after the other and side by side in one process, each with graphs of its own."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    requests = make_requests(40, seed=12)
    folder = make_checkpoint("llama")
    options = options_for("cuda", max_num_seqs=20)
    with LLM(folder, **options | {"device": "cuda:0"}) as first:
        expected = run_requests(first, requests)
        with LLM(folder, **options | {"device": "cuda:1"}) as second:
            assert second.engine.executor.runner.graphs is not None
            assert_same_results(run_requests(second, requests), expected, requests)
            assert_same_results(run_requests(first, requests), expected, requests)
    with LLM(folder, **options | {"device": "cuda:1"}) as third:
        assert_same_results(run_requests(third, requests), expected, requests)


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@BOTH
def test_overlap_changes_no_token(
    make_checkpoint: MakeCheckpoint, device: str, preemption_mode: str
) -> None:
    """Chunks of prompts, preemption, hits in the prefix cache; with graphs on a GPU."""
    requests = make_requests(150 if device == "cuda" else 16, seed=2)
    results = []
    for async_scheduling in (False, True):
        options = options_for(
            device,
            async_scheduling=async_scheduling,
            preemption_mode=preemption_mode,
            num_kv_blocks=40,
            block_size=4 if device == "cpu" else 16,
            max_num_batched_tokens=48,
            max_num_seqs=16,
            max_model_len=128,
        )
        with LLM(make_checkpoint("llama"), **options) as llm:
            results.append(run_requests(llm, requests, seed=3))
    assert_same_results(results[1], results[0], requests)


@BOTH
def test_soak(make_checkpoint: MakeCheckpoint, device: str) -> None:
    """Requests that arrive and are aborted at random: overlapped steps with graphs against neither,
    with many blocks and with few."""
    number = GPU_SOAK if device == "cuda" else 16
    requests = make_requests(number, seed=4)
    for num_kv_blocks in (2000, 60):
        results = []
        for is_fast in (False, True):
            options = options_for(
                device,
                async_scheduling=is_fast,
                enforce_eager=not is_fast,
                num_kv_blocks=num_kv_blocks,
                block_size=16 if device == "cuda" else 4,
                max_num_seqs=48,
                max_model_len=256 if device == "cuda" else 128,
            )
            with LLM(make_checkpoint("qwen3"), **options) as llm:
                results.append(run_requests(llm, requests, seed=5, num_aborts=number // 8))
        assert_same_results(results[1], results[0], requests)


@BOTH
def test_two_engines_in_turns(make_checkpoint: MakeCheckpoint, device: str) -> None:
    """Steps of two models take turns, both overlapped: each gives its own tokens."""
    requests = make_requests(40 if device == "cuda" else 5, seed=6, longest=30)
    folders = [make_checkpoint("llama"), make_checkpoint("qwen3")]
    options = options_for(device, async_scheduling=True, max_num_seqs=12)
    expected = []
    for folder in folders:
        with LLM(folder, **options) as llm:
            outputs = llm.generate(*map(list, zip(*requests, strict=True)), use_tqdm=False)
            expected.append([[c.token_ids for c in output.outputs] for output in outputs])
    llms = [LLM(folder, **options) for folder in folders]
    found: list[dict[int, Any]] = [{}, {}]
    for llm in llms:
        for i, (prompt, params) in enumerate(requests):
            llm.add_request(str(i), prompt, params)
    while any(llm.has_unfinished_requests() for llm in llms):
        for llm, results in zip(llms, found, strict=True):
            for output in llm.step():
                if output.finished:
                    results[int(output.request_id)] = [c.token_ids for c in output.outputs]
    for llm, results, tokens in zip(llms, found, expected, strict=True):
        assert [results[i] for i in range(len(requests))] == tokens
        llm.close()


# -- memory --


@BOTH
def test_swapped_blocks_come_back(make_checkpoint: MakeCheckpoint, device: str) -> None:
    """With few KV blocks, sequences move to the CPU and back; the tokens stay the same."""
    requests = make_requests(40 if device == "cuda" else 8, seed=7)
    results = []
    num_swapped = 0
    for num_kv_blocks in (600, 30):
        options = options_for(
            device,
            num_kv_blocks=num_kv_blocks,
            block_size=4,
            max_model_len=100,
            max_num_seqs=8,
            preemption_mode="swap",
            enable_prefix_caching=False,
        )
        with LLM(make_checkpoint("llama"), **options) as llm:
            steps: list[Any] = []
            llm.engine.step_listeners.append(
                lambda report, s=steps: s.append(report.scheduler_output)
            )
            results.append(run_requests(llm, requests, seed=8))
            num_swapped = sum(len(step.blocks_to_swap_in) for step in steps)
    assert num_swapped > 0
    assert_same_results(results[1], results[0], requests)


@pytest.mark.gpu
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_memory_does_not_grow(make_checkpoint: MakeCheckpoint, async_scheduling: bool) -> None:
    """Over 1,000 steps of the same workload again and again, after two rounds to warm up."""
    options = options_for("cuda", async_scheduling=async_scheduling, max_num_seqs=24)
    with LLM(make_checkpoint("llama"), **options) as llm:
        num_steps = 0

        def count(*_: object) -> None:
            nonlocal num_steps
            num_steps += 1

        llm.engine.step_listeners.append(count)
        requests = make_requests(60, seed=9)
        in_use = []
        while num_steps < 1000 or len(in_use) < 4:
            run_requests(llm, requests, seed=10)
            torch.cuda.synchronize()
            in_use.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert {allocated for allocated, _ in in_use[2:]} == {in_use[2][0]}
    assert in_use[-1][1] <= in_use[2][1] + 2**25  # a segment or two of the allocator's, no trend


@pytest.mark.gpu
def test_the_memory_of_a_closed_engine_comes_back(make_checkpoint: MakeCheckpoint) -> None:
    """Except for what libraries keep: a second engine needs no more than the first."""
    import gc

    left = []
    for _ in range(3):
        with LLM(make_checkpoint("llama"), **options_for("cuda")) as llm:
            run_requests(llm, make_requests(10))
        del llm
        gc.collect()
        torch.cuda.synchronize()
        left.append(torch.cuda.memory_allocated())
    assert left[1] == left[2]


@pytest.mark.gpu
@pytest.mark.parametrize("utilization", [0.3, 0.6])
def test_gpu_memory_utilization(make_checkpoint: MakeCheckpoint, utilization: float) -> None:
    """The engine fills its share of the GPU, and stays within it while it serves, graphs included:
    what is kept for them is enough."""
    torch.cuda.empty_cache()
    free_before, total = torch.cuda.mem_get_info()
    others = total - free_before
    folder = make_checkpoint("llama", max_position_embeddings=131072)
    options: dict[str, Any] = {"device": "cuda", "max_num_seqs": 1024, "block_size": 64}
    with LLM(folder, gpu_memory_utilization=utilization, **options) as llm:
        runner = llm.engine.executor.runner
        assert runner.graphs is None or runner.graphs.num_bytes <= MEMORY_RESERVE
        long = ([7] * 8000, SamplingParams(max_tokens=4, top_p=0.9))
        run_requests(llm, [long, *make_requests(200)])
        free, _ = torch.cuda.mem_get_info()
        in_use = total - free
        cache_bytes = sum(c.nbytes for pair in runner.kv_caches for c in pair)
        assert in_use <= total * utilization + 2**28
        assert cache_bytes >= (total * utilization - others) * 0.7
