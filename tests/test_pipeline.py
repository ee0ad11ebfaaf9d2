"""Pipeline parallelism: layers divided among stages, and as many steps in flight.

Stages are threads here (tests/ranks.py), and real processes in a few tests at the end. What the
scheduler does with several steps in flight is a property in tests/test_async_scheduling.py.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import expect, finish, make_engine, params
from fakes import FakeEngine, reference_output
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same_greedy
from ranks import ThreadExecutor
from safetensors.torch import load_file, save_file
from test_cuda_graph import FakeGraph
from test_multiproc import GREEDY, PROMPTS, SMALL, generate_all
from test_multiproc import PARAMS as OF_RANKS

from nanoserve import LLM, SamplingParams, StructuredOutputsParams
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.distributed import rank_thread
from nanoserve.distributed.pipeline import PendingLogits
from nanoserve.distributed.rendezvous import connect
from nanoserve.kernels.attention_cpu import TorchBackend
from nanoserve.kv_cache import profile_run, warm_up
from nanoserve.layers import LayerConfig
from nanoserve.model_runner import ModelRunner, StepInputs
from nanoserve.models.base import Model
from nanoserve.models.decoder import LlamaForCausalLM
from nanoserve.models.loader import load_model, shards_by_name
from nanoserve.models.registry import ModelRegistry
from nanoserve.parallel import ParallelState, RankError

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
TIMEOUT = 60.0


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    """Five layers; neither 2 nor 4 divides the vocabulary."""

    def make(model_type: str) -> Path:
        return make_checkpoint(
            model_type, vocab_size=321, num_hidden_layers=5, **CHECKPOINTS[model_type]
        )

    return make


def make_llm(folder: Path | None = None, stages: int = 2, ranks: int = 1, **options: Any) -> LLM:
    """Stages and ranks that are threads."""
    return LLM(
        folder,
        pipeline_parallel_size=stages,
        tensor_parallel_size=ranks,
        executor_cls=ThreadExecutor,
        **{**SMALL, **options},
    )


# -- which layers, which tensors --


@given(pp_size=st.integers(1, 9), more=st.integers(0, 40))
def test_stages_cover_all_layers_once(pp_size: int, more: int) -> None:
    """What does not divide goes to the stages in the middle, then to the first."""
    num_layers = pp_size + more
    ranges = [
        ParallelState(pp_rank=stage, pp_size=pp_size).layer_range(num_layers)
        for stage in range(pp_size)
    ]
    assert [layer for start, end in ranges for layer in range(start, end)] == [*range(num_layers)]
    sizes = [end - start for start, end in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)
    assert sizes[0] == min(sizes) or num_layers % pp_size == pp_size - 1


def test_each_stage_loads_its_own_tensors_only(checkpoint: Callable[..., Path]) -> None:
    """Together they fill every tensor of the files, with the files' numbers. A tied embedding is on
    the first stage and on the last."""
    for model_type in ("llama", "qwen2"):
        folder = checkpoint(model_type)
        names: list[str] = []
        for stage in range(3):
            model = load(folder, stage, 3)
            own = shards_by_name(model)
            names += own
            assert len(model.kv_cache_specs()) == (2, 2, 1)[stage]
            others = [4, 4, 0][stage]
            assert not any(f"layers.{others}." in name for name in own)
        files = load_file(folder / "model.safetensors")
        tied = ["model.embed_tokens.weight"] * (model_type == "qwen2")
        assert sorted(names) == sorted([*files, *tied])


def load(folder: Path, stage: int = 0, pp_size: int = 1, **options: Any) -> Model:
    model_config = ModelConfig.from_folder(folder)
    config = EngineConfig(max_model_len=64, **options).resolve(model_config)
    parallel = ParallelState(pp_rank=stage, pp_size=pp_size)
    return load_model(config, model_config, LayerConfig(parallel=parallel), use_tqdm=False)


def test_a_file_is_checked_as_a_whole_on_each_stage(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Each stage names what is missing or too much on another one."""
    folder = checkpoint("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.5.extra"] = tensors.pop("model.layers.4.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for stage in range(2):
        with pytest.raises(ValueError, match=r"missing: model\.layers\.4.*unexpected: .*5\.extra"):
            load(tmp_path, stage, 2)


def test_random_weights_are_those_of_one_stage(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("qwen2")
    whole = dict(load(folder, load_format="dummy").named_parameters())
    for stage in range(2):
        for name, own in load(folder, stage, 2, load_format="dummy").named_parameters():
            assert torch.equal(own, whole[name]), name


def test_each_rank_has_its_place_and_its_links() -> None:
    """Six ranks in three stages. Rank 0 alone knows that: what the others say is not read."""
    store, cpu = dist.HashStore(), torch.device("cpu")
    places: dict[int, tuple[int | bool, ...]] = {}

    def run_rank(rank: int) -> None:
        parallel = connect(store, rank, 6, cpu, pp_size=1 if rank else 3)
        links = [parallel.previous, parallel.next, parallel.back]
        place = parallel.rank, parallel.pp_rank, parallel.tp_rank
        ends = parallel.is_first_stage, parallel.is_last_stage
        sizes = parallel.tp_size, parallel.pp_size, parallel.num_local_ranks
        places[rank] = *place, *ends, *(link is not None for link in links)
        assert sizes == (2, 3, 6)
        assert len(parallel.device_groups) == 1 + sum(link is not None for link in links)
        parallel.close()

    threads = [threading.Thread(target=run_rank, args=(i,), daemon=True) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert [places[rank] for rank in range(6)] == [
        # rank, pp_rank, tp_rank; first stage, last stage; links: previous, next, back
        (0, 0, 0, True, False, False, True, True),
        (1, 0, 1, True, False, False, True, False),
        (2, 1, 0, False, False, True, True, False),
        (3, 1, 1, False, False, True, True, False),
        (4, 2, 0, False, True, True, False, True),
        (5, 2, 1, False, True, True, False, False),
    ]


# -- what the scheduler puts into a step --


def test_running_sequences_are_divided_among_the_steps() -> None:
    """Eight prompts in one step; then the pipeline is filled with their halves."""
    engine = make_engine(pipeline_parallel_size=2)
    sizes: list[int] = []
    engine.step_listeners.append(
        lambda report: sizes.append(len(report.scheduler_output.scheduled))
    )
    for i in range(8):
        engine.add_request(str(i), [i, 1], params(max_tokens=4))
    outputs = finish(engine)
    assert sizes == [8, 4, 4, 4, 4, 4, 4]
    assert outputs["7"].outputs[0].token_ids == expect([7, 1], 4)
    order = [call for call, _ in engine.executor.calls]
    assert order[:6] == ["launch", "result", "launch", "launch", "result", "launch"]


def test_later_requests_are_divided_too() -> None:
    """One request is alone in a step when the others come. The steps are of equal size soon, not
    one against seven for ever."""
    engine = make_engine(pipeline_parallel_size=2)
    sizes: list[int] = []
    engine.step_listeners.append(
        lambda report: sizes.append(len(report.scheduler_output.scheduled))
    )
    engine.add_request("0", [0, 1], params(max_tokens=20))
    for _ in range(3):
        engine.step()
    for i in range(1, 8):
        engine.add_request(str(i), [i, 1], params(max_tokens=20))
    outputs = finish(engine)
    assert sizes[:3] == [1, 1, 7]
    assert set(sizes[6:20]) == {4}, sizes
    assert outputs["7"].outputs[0].token_ids == expect([7, 1], 20)


@pytest.mark.parametrize("pp_size", [2, 3])
def test_every_sequence_advances_beside_a_long_prompt(pp_size: int) -> None:
    """A prompt in chunks is in each step, and takes nobody's turn for ever."""
    engine = FakeEngine(pipeline_parallel_size=pp_size, max_num_batched_tokens=12, max_num_seqs=12)
    decodes = [engine.add([i, 1, 2], max_tokens=60) for i in range(6)]
    engine.add(range(200), max_tokens=1)
    in_flight: list[Any] = []
    for _ in range(60):
        scheduler_output = engine.scheduler.schedule()
        if not scheduler_output.is_empty:
            in_flight.append((scheduler_output, engine.executor.launch(scheduler_output)))
        if len(in_flight) == pp_size or scheduler_output.is_empty:
            step, pending = in_flight.pop(0)
            engine.scheduler.update_from_output(step, pending.result())
        engine.block_manager.check()
    numbers = [seq.num_output_tokens for seq in decodes]
    assert min(numbers) > 10
    assert max(numbers) - min(numbers) <= 2
    assert decodes[5].output_token_ids == reference_output([5, 1, 2], numbers[5])


@pytest.mark.parametrize(
    ("stages", "is_async", "most"), [(2, False, 2), (3, False, 3), (2, True, 3)]
)
def test_as_many_steps_are_in_flight_as_stages(stages: int, is_async: bool, most: int) -> None:
    engine = make_engine(pipeline_parallel_size=stages, async_scheduling=is_async)
    assert (
        engine.batch_queue_size
        == EngineConfig(
            pipeline_parallel_size=stages, async_scheduling=is_async
        ).max_concurrent_batches
    )
    for i in range(12):
        engine.add_request(str(i), [i, 1], params())
    finish(engine)
    depth = deepest = 0
    for call, _ in engine.executor.calls:
        depth += 1 if call == "launch" else -1
        deepest = max(deepest, depth)
    assert deepest == most


# -- the same tokens --


@pytest.mark.parametrize(
    "model_type",
    ["qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3_moe"))],
)
@pytest.mark.parametrize(("stages", "ranks"), [(2, 1), (3, 1), (2, 2)])
def test_tokens_are_those_of_transformers(
    stages: int, ranks: int, model_type: str, checkpoint: Callable[..., Path]
) -> None:
    """With prompts in chunks and a shared prefix."""
    folder = checkpoint(model_type)
    with make_llm(folder, stages, ranks, max_num_batched_tokens=24, max_num_seqs=8) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert_describes(llm, stages, ranks)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_same_greedy(folder, prompt, list(output.outputs[0].token_ids), 12)


def assert_describes(llm: LLM, stages: int, ranks: int) -> None:
    each = f", each tensor parallel on {ranks} ranks" if ranks > 1 else ""
    text = f"{stages} pipeline stages{each} over gloo"
    assert text in llm.engine.executor.describe()


# Stages refuse logprobs of the prompt.
PARAMS = [OF_RANKS[0], replace(OF_RANKS[1], prompt_logprobs=None), *OF_RANKS[2:]]


class KnownTokensRunner(ModelRunner):
    """What a step reads on the first stage is known there when the step is launched."""

    def run_model(self, inputs: StepInputs, has_placeholders: bool) -> torch.Tensor:
        assert not (self.parallel.is_first_stage and has_placeholders)
        return super().run_model(inputs, has_placeholders)


@pytest.fixture(scope="module")
def on_one_rank(checkpoint: Callable[..., Path]) -> tuple[Any, ...]:
    return generate_all(checkpoint("qwen2"), {}, PARAMS)


@pytest.mark.parametrize(
    ("stages", "ranks", "options"),
    [
        (2, 1, {"enable_prefix_caching": False, "long_prefill_token_threshold": 5}),
        (2, 2, {"num_kv_blocks": 26, "preemption_mode": "recompute"}),
        (3, 1, {"num_kv_blocks": 26, "preemption_mode": "swap", "async_scheduling": True}),
        pytest.param(
            *(2, 2, {"num_kv_blocks": 26, "preemption_mode": "swap"}), marks=pytest.mark.slow
        ),
    ],
    ids=["chunks", "2 x 2, recompute", "overlapped, swap", "2 x 2, swap"],
)
def test_stages_generate_what_one_rank_does(
    stages: int,
    ranks: int,
    options: dict[str, Any],
    checkpoint: Callable[..., Path],
    on_one_rank: tuple[Any, ...],
) -> None:
    """Several completions, seeds, penalties, callables, logprobs, swaps, branches, beams."""
    options |= {"pipeline_parallel_size": stages, "tensor_parallel_size": ranks}
    executor = {"executor_cls": ThreadExecutor, "runner_cls": KnownTokensRunner}
    executor |= {"pipeline_parallel_size": stages, "tensor_parallel_size": ranks}
    tokens, beams, logprobs, preemptions = generate_all(
        checkpoint("qwen2"), {**executor, **options}, PARAMS
    )
    assert (tokens, beams) == on_one_rank[:2]
    torch.testing.assert_close(logprobs, on_one_rank[2], rtol=0, atol=1e-3)
    assert (preemptions > 0) == ("preemption_mode" in options)


# -- who waits for whom --


class HeldRunner(ModelRunner):
    """Later stages wait for `go` before they begin a step."""

    go = threading.Event()

    def forward(self, inputs: Any) -> torch.Tensor:
        assert self.parallel.is_first_stage or self.go.wait(TIMEOUT)
        return super().forward(inputs)


def test_rank_0_launches_while_later_stages_stand_still(checkpoint: Callable[..., Path]) -> None:
    """Three prompts one after the other on three stages: two launches return at once."""
    folder = checkpoint("qwen2")
    HeldRunner.go.clear()
    with make_llm(folder, 3, max_num_batched_tokens=12, runner_cls=HeldRunner) as llm:
        for i in range(3):
            llm.add_request(str(i), list(range(i, i + 12)), GREEDY)
        assert llm.step() == llm.step() == []
        assert len(llm.engine._in_flight) == 2
        HeldRunner.go.set()
        outputs = [output for _ in range(60) for output in llm.step() if output.finished]
    for output in outputs:
        assert_same_greedy(folder, output.prompt_token_ids, output.outputs[0].token_ids, 12)
    assert len(outputs) == 3


class SlowRunner(ModelRunner):
    """Later stages are slow, and note how many steps the first one is ahead."""

    num_steps = 0  # of the first stage
    leads: list[int]

    def forward(self, inputs: Any) -> torch.Tensor:
        if self.parallel.is_first_stage:
            SlowRunner.num_steps += 1
        else:
            time.sleep(0.02)
            self.leads.append(SlowRunner.num_steps - len(self.leads))
        return super().forward(inputs)


def test_the_first_stage_does_not_run_ahead_with_chunks(checkpoint: Callable[..., Path]) -> None:
    """Chunks of a prompt bring no tokens, but are waited for: a new request is not behind all of
    them, and their hidden states do not pile up."""
    SlowRunner.num_steps, SlowRunner.leads = 0, []
    folder, options = checkpoint("qwen2"), {"max_num_batched_tokens": 8, "max_num_seqs": 4}
    with make_llm(folder, 2, runner_cls=SlowRunner, **options) as llm:
        [output] = llm.generate([list(range(100))], GREEDY, use_tqdm=False)
        assert max(SlowRunner.leads) == 2
        assert len(llm.engine.executor.parallel.sending) <= 6
    assert_same_greedy(folder, output.prompt_token_ids, output.outputs[0].token_ids, 12)


@pytest.mark.parametrize("what", ["fail", "abort", pytest.param("restart", marks=pytest.mark.slow)])
def test_a_step_that_nobody_reads(
    what: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits still come, and are not taken for those of a later step. Rows of sequences that
    have left belong to others when the step is read."""
    folder = checkpoint("qwen2")
    penalized = SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.2)
    with make_llm(folder, 2, 2, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        [alone] = llm.generate([PROMPTS[3]], penalized, use_tqdm=False)
        for i in range(4):
            llm.add_request(str(i), PROMPTS[i], GREEDY)
        for _ in range(8):
            llm.step()
        assert llm.engine._in_flight
        if what == "fail":
            with monkeypatch.context() as patch:
                patch.setattr(PendingLogits, "result", fail)
                with pytest.raises(ZeroDivisionError):
                    llm.step()
        elif what == "restart":
            llm.engine.recover()
        else:
            llm.abort_request(["0", "3"])
        llm.add_request("new", PROMPTS[3], penalized)
        outputs = {o.request_id: o for _ in range(80) for o in llm.step() if o.finished}
        llm.engine.block_manager.check()
    names = {"1", "2", "new"} if what == "abort" else {"0", "1", "2", "3", "new"}
    assert outputs.keys() == names
    assert outputs.pop("new").outputs[0].token_ids == alone.outputs[0].token_ids
    for output in outputs.values():
        assert_same_greedy(folder, output.prompt_token_ids, output.outputs[0].token_ids, 12)


def fail(*arguments: Any) -> Any:
    raise ZeroDivisionError("a mistake of rank 0")


class StageGraph(FakeGraph):
    """Ranks are threads here, and share one garbage collector."""

    def capture(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        gc.disable()
        return super().capture(forward)


class StageGraphRunner(ModelRunner):
    """Runs decode steps as fake graphs."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, graph_cls=StageGraph)


def test_graphs_of_decode_steps_on_each_stage(checkpoint: Callable[..., Path]) -> None:
    """Their input is where the stage before sends to; what they return is sent before the next
    replay."""
    folder = checkpoint("llama")
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "runner_cls": StageGraphRunner}
    with make_llm(folder, 3, **options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        graphs = llm.engine.executor.runner.graphs.graphs
        assert sum(graph.num_replays for graph in graphs.values()) > 11
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_same_greedy(folder, prompt, list(output.outputs[0].token_ids), 12)


def test_structured_output_on_stages() -> None:
    """Rank 0 alone knows the grammars. What they allow is kept with each step in flight."""
    regexes = ["[a-f]{3,8}[0-9]", "[g-m]{2,9}!", "[0-9]{4}", "[x-z]{1,3}[A-C]{1,3}"]
    params = [
        SamplingParams(
            temperature=0.8,
            seed=seed,
            max_tokens=12,
            structured_outputs=StructuredOutputsParams(regex=regex),
        )
        for seed, regex in enumerate(regexes)
    ]
    texts = []
    for executor in ({}, {"pipeline_parallel_size": 2, "executor_cls": ThreadExecutor}):
        with LLM(**{**SMALL, **executor}) as llm:
            for _ in range(2):  # at first, each waits until its grammar is compiled
                outputs = llm.generate(["Once"] * 4, params, use_tqdm=False)
                texts.append([output.outputs[0].text for output in outputs])
    assert texts == [texts[0]] * 4
    assert all(map(re.fullmatch, regexes, texts[0]))


# -- memory --


def test_the_smallest_stage_says_how_many_blocks(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage with three layers has less room than one with two, on the device and in the pool."""
    block_bytes = 2 * 2 * 4 * 16 * 4  # keys and values, heads, tokens, head_dim, float32; a layer
    options = {"kv_cache_memory_bytes": 3 * 40 * block_bytes, "num_kv_blocks": None}
    options |= {"preemption_mode": "swap", "swap_space": 3 * 50 * block_bytes / 2**30}
    with make_llm(checkpoint("qwen2"), 2, **options) as llm:
        executor = llm.engine.executor
        assert (executor.num_kv_blocks, executor.num_cpu_blocks) == (40, 50)
        runner = executor.runner
        assert [len(caches) for caches in (runner.kv_caches, runner.cpu_kv_caches)] == [3, 3]


def test_a_profile_run_on_each_stage(checkpoint: Callable[..., Path]) -> None:
    """As on GPUs: a later stage gets hidden states, the last one has the head, rank 0 samples."""
    folder = checkpoint("qwen2")
    model_config = ModelConfig.from_folder(folder)
    config = EngineConfig(max_model_len=32, max_num_seqs=2, block_size=4).resolve(model_config)
    for stage in range(3):
        parallel = ParallelState(pp_rank=stage, pp_size=3)
        layer_config = LayerConfig(parallel=parallel, attention=TorchBackend())
        model = load_model(config, model_config, layer_config, use_tqdm=False)
        warm_up(config, model, layer_config)
        profile_run(config, model, layer_config)


class SlowLoadingRunner(ModelRunner):
    """The second stage loads for longer than a rank may be behind another within a step."""

    def __init__(self, *arguments: Any) -> None:
        if not arguments[3].is_first_stage:
            time.sleep(4)
        super().__init__(*arguments)


@pytest.mark.slow
def test_a_stage_may_load_for_long(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the ranks of one stage may: a machine can have a slow disk."""
    monkeypatch.setattr("nanoserve.distributed.rendezvous.STEP_TIMEOUT", timedelta(seconds=3))
    with make_llm(checkpoint("qwen2"), 2, runner_cls=SlowLoadingRunner) as llm:
        assert len(llm.generate([[5, 6]], GREEDY, use_tqdm=False)) == 1


# -- what is refused --


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_config": NGRAM}, "does not go together with speculative_config"),
        ({"enable_lora": True}, "does not go together with enable_lora"),
        ({"kv_offloading_size": 1.0}, "does not go together with kv_offloading_size"),
        ({"runner": "pooling"}, "does not go together with runner='pooling'"),
        ({"device": "cuda:1"}, "device 'cuda:1' is one GPU, and pipeline_parallel_size is 2"),
        ({"pipeline_parallel_size": 6}, "5 layers cannot be divided among 6 stages"),
    ],
)
def test_what_does_not_go_together(
    options: dict[str, Any],
    message: str,
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a process is started."""
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ValueError, match=message):
        LLM(checkpoint("llama"), **{"pipeline_parallel_size": 2, "device": "cpu", **options})


def test_models_that_have_no_stages(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of transformers, and those of the user's own that do not say they have."""
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ValueError, match=r"gpt2|GPT2.* runs through transformers here"):
        LLM(make_checkpoint("gpt2"), pipeline_parallel_size=2, device="cpu")

    class Own(LlamaForCausalLM):
        supports_pp = False

    with monkeypatch.context() as patch:
        patch.setitem(ModelRegistry.CLASSES, "LlamaForCausalLM", Own)
        with pytest.raises(ValueError, match="Own cannot be divided into stages: its supports_pp"):
            LLM(make_checkpoint("llama"), pipeline_parallel_size=2, device="cpu")


# -- stages that are processes --


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[..., Path]) -> Iterator[LLM]:
    """Two processes, shared by the tests that do not break them."""
    with LLM(checkpoint("qwen2"), pipeline_parallel_size=2, **SMALL) as llm:
        yield llm


def test_two_processes_generate(llm: LLM, checkpoint: Callable[..., Path]) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        folder = checkpoint("qwen2")
        assert_same_greedy(folder, prompt, list(output.outputs[0].token_ids), 12)
    assert_describes(llm, 2, 1)


def test_prompt_logprobs_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompt_logprobs needs an engine with pipeline_parallel"):
        llm.generate([[5]], SamplingParams(prompt_logprobs=1), use_tqdm=False)


def test_a_step_costs_three_messages(llm: LLM) -> None:
    """The step and the hidden states go to the next stage, the logits come back. Two of the three
    sequences, with 64 hidden states and 321 logits each."""
    stats = llm.engine.executor.parallel.comm_stats
    for number in range(3):
        llm.add_request(str(number), [5 + number] * 9, GREEDY)
    llm.step()
    calls, sent = stats.num_calls.copy(), stats.num_bytes.copy()
    llm.step()  # reads the prompts
    llm.step()
    calls, sent = stats.num_calls - calls, stats.num_bytes - sent
    for number in range(3):
        llm.abort_request(str(number))
    assert calls == {"control": 1, "send": 1, "receive": 1}
    assert sent == {"control": 4096, "send": 2 * 64 * 4, "receive": 2 * 321 * 4}


def test_ctrl_c_between_the_messages_of_a_step(llm: LLM, checkpoint: Callable[..., Path]) -> None:
    """The user presses it while rank 0 waits for the logits. The pipe stays whole."""
    receive = ParallelState.start_receive

    def start_receive(parallel: ParallelState, *arguments: Any) -> Callable[[], torch.Tensor]:
        wait = receive(parallel, *arguments)

        def wait_and_press() -> torch.Tensor:
            os.kill(os.getpid(), signal.SIGINT)
            assert noticed.wait(TIMEOUT)
            return wait()

        return wait_and_press

    noticed = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelState, "start_receive", start_receive)
        patch.setattr(rank_thread, "FIRST_REPORT", 0.1)  # looks for Ctrl-C, too
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        noticed.set()
    test_two_processes_generate(llm, checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_stage_is_noticed(victim: int, checkpoint: Callable[..., Path]) -> None:
    """The one in the middle, or the last one. Nothing hangs, and nothing is left behind."""
    broken = LLM(checkpoint("qwen2"), pipeline_parallel_size=3, **SMALL)
    processes = broken.engine.executor.ranks.processes
    stream = broken.stream([[5, 6, 7]], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    processes[victim - 1].send_signal(signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RankError, match=rf"rank {victim} \(process \d+\) was killed by SIGKILL"):
        list(stream)
    assert time.monotonic() - start < 20  # seconds, not STEP_TIMEOUT
    assert all(process.returncode is not None for process in processes)
    broken.close()
