"""Whole engines on a CUDA device that is not there: the tokens of a CPU, and one wait a step.

The device is simulated_cuda.py's: what is read too early is poison, and what a graph reads at an
old address, too. tests/mutants.txt has mistakes that these tests find.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from simulated_cuda import Simulator, simulated_cuda
from test_same_tokens import CHAPTERS, PARAMS, PROMPTS, differing, plain, play, show

from nanoserve import LLM, SamplingParams
from nanoserve.kernels.cuda_graph import DecodeGraphs, GraphShape
from nanoserve.kernels.staging import StagingBuffer, copy_to_host
from nanoserve.models.config import DEMO_MODEL

GPU = {"device": "cuda:0", "dtype": "float32", "max_model_len": 128}
GPU |= {"max_num_seqs": 6, "max_num_batched_tokens": 64}
FEW = {"num_gpu_blocks_override": 18, "block_size": 4, "max_model_len": 48}
READ = "event", "model_runner.py read"  # the one wait of a step
DRAFT = "pageable copy", "chapters/speculative/draft_model.py propose"
ADAPTER = "pageable copy", "chapters/lora/layers.py load"


@pytest.fixture(autouse=True)
def no_trouble(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A failed step is computed again, a failed draft is none: the tokens would be right."""
    yield
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


@pytest.fixture
def device() -> Iterator[Simulator]:
    with simulated_cuda() as device:
        yield device


# -- the device --


def test_what_is_read_early_is_poison(device: Simulator) -> None:
    event, x = torch.cuda.Event(), torch.arange(3, device="cuda:0")
    host, late = (torch.zeros(3, dtype=torch.long, pin_memory=pin) for pin in (True, False))
    host.copy_(x + 1, non_blocking=True)
    event.record()
    assert host.tolist() == [0, 0, 0]
    event.synchronize()
    assert host.tolist() == [1, 2, 3]
    assert x.data.inner[0] == 0
    assert (x * 2).inner[0] > 10**9
    y = host.to("cuda:0", non_blocking=True)
    host.zero_()
    assert y.tolist() == [0, 0, 0]
    late.copy_(y, non_blocking=True)
    assert [what for what, _ in device.waits] == ["event", "pageable copy"]


def test_a_graph_knows_addresses(device: Simulator) -> None:
    """Of its inputs; and what it has allocated lasts until the next replay of any."""

    def record() -> Any:
        return lambda: inputs * 2

    inputs, graphs = torch.ones(2, device="cuda:0"), DecodeGraphs(1, (1,), 2)
    graphs.capture(lambda shape: record(), use_tqdm=False)
    inputs.fill_(5)
    inputs = torch.zeros(2, device="cuda:0")
    assert graphs.replay(GraphShape(1)).tolist() == [10]
    with pytest.raises(RuntimeError, match="capturing"):
        DecodeGraphs(1, (1,), 1).capture(lambda shape: lambda: inputs[inputs > 0], False)


def test_staging_and_the_way_back(device: Simulator) -> None:
    """Many steps are launched before the first is read. Only their number makes the host wait."""
    sizes: Any = SimpleNamespace(
        max_num_batched_tokens=4, max_model_len=64, max_num_seqs=2, block_size=4
    )
    staging, pending, addresses = StagingBuffer(sizes, 2, torch.device("cuda", 0)), [], set()
    for step in range(6):
        staging.begin_step()
        sent = staging.send(x=np.full(5, step), large=np.full(10**4, step), y=np.full(3, -step))
        addresses.add((sent["x"].inner.data_ptr(), sent["y"].inner.data_ptr()))
        pending.append(copy_to_host(({"all": [each * 2 for each in sent.values()]}, step)))
    for step, ((copied, number), event) in enumerate(pending):
        event.synchronize()
        x, large, y = copied["all"]
        assert (x.tolist(), y.tolist(), number) == ([2 * step] * 5, [-2 * step] * 3, step)
        assert large.unique().tolist() == [2 * step]
    assert len(addresses) == 1
    assert {what for what, _ in device.waits} == {"event"}


# -- engines --


@pytest.mark.parametrize(
    "options",
    [{}, {**FEW, "preemption_mode": "swap", "swap_space": 0.01, "max_num_batched_tokens": 16}],
    ids=["default", "swap"],
)
def test_tokens(options: dict[str, Any]) -> None:
    """With all defaults: the largest step is profiled, graphs are captured, steps overlap."""
    some = [1, 3, 4, 7, 8]
    prompts, params = ([each[i] for i in some] for each in (PROMPTS, PARAMS))
    engine = partial(LLM, **{**GPU, **options})
    with simulated_cuda() as device, engine(attention_backend=device.backend) as llm:
        found = [show(each) for each in llm.generate(prompts, params, use_tqdm=False)]
        assert llm.engine.config.async_scheduling
    assert len(device.graphs) == 4  # of 1, 2, 4, 6 sequences: there is padding
    assert {*device.waits} == {READ}
    assert differing(found, [plain()[i] for i in some]) == []


def speculative(method: str, **more: Any) -> dict[str, Any]:
    model = DEMO_MODEL / {"draft_model": "draft"}.get(method, method)
    config = {"method": method, "num_speculative_tokens": 3, "model": model, **more}
    return {"speculative_config": config}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "waits"),
    [
        ({"num_gpu_blocks_override": 60}, {READ}),
        ({"async_scheduling": False}, {READ}),
        ({"enforce_eager": True}, {READ}),
        ({**FEW, "preemption_mode": "swap", "swap_space": 0.01}, {READ}),
        ({"kv_cache_dtype": "int8"}, {READ}),
        (CHAPTERS["kv_offload"] | FEW, {READ}),
        (CHAPTERS["lora"], {READ, ADAPTER}),
        (CHAPTERS["speculative"], {READ}),
        (speculative("draft_model"), {READ, DRAFT}),
        (speculative("medusa"), {READ, DRAFT}),
        (speculative("eagle") | CHAPTERS["kv_offload"], {READ, DRAFT}),
        ({**CHAPTERS["lora"], **CHAPTERS["speculative"], **FEW}, {READ, ADAPTER}),
    ],
    ids=lambda each: str(each) if isinstance(each, dict) else str(len(each)),  # a set has no order
)
def test_more_tokens(options: dict[str, Any], waits: set[Any]) -> None:
    """Cold, then with a warm prefix cache."""
    same = ("enable_lora", "kv_cache_dtype")
    wanted = plain(**{name: options[name] for name in same if name in options})
    with simulated_cuda() as device:
        found = play(attention_backend=device.backend, **{**GPU, **options})
    assert differing(found, wanted) == []
    assert {*device.waits} == waits


@pytest.mark.parametrize(
    ("family", "more", "options"),
    [
        ("qwen3", {}, {}),
        pytest.param("qwen3", {}, {"quantization": "int8"}, marks=pytest.mark.slow),
        pytest.param("mixtral", {"num_local_experts": 4}, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_kernels_themselves(
    family: str, more: Any, options: Any, make_checkpoint: Callable[..., Path]
) -> None:
    """Run by Triton's interpreter, in graphs, on memory full of poison."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    folder = make_checkpoint(family, **sizes, **more)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    answers, prompts = [], [[5, 6, 7], [8] * 17, [9]]
    options = {**GPU, "max_num_seqs": 2, "max_model_len": 32, **options}
    with simulated_cuda() as device:
        for changes in ({}, {"device": "cpu", "kernels": "plain"}):
            with LLM(folder, **{**options, **changes}) as llm:
                outputs = llm.generate(prompts, params, use_tqdm=False)
                answers.append([each.outputs[0].token_ids for each in outputs])
    assert answers[0] == answers[1]
    assert {*device.waits} == {READ}
