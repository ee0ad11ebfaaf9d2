"""Adapters change the tokens of their requests as merged weights would, and nobody else's.

The oracle is transformers on the checkpoint with W + scale * B A in the place of W.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import ALL, ATTENTION, merge, shapes_of, write_adapter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import assert_same_greedy
from safetensors.torch import load_file, save_file
from test_cuda_graph import GraphExecutor

from nanoserve import LLM, AsyncLLM, BeamSearchParams, EngineArgs, SamplingParams
from nanoserve.exceptions import VLLMValidationError
from nanoserve.model_runner import StepArrays

lora = pytest.importorskip("nanoserve.extras.lora")
layers = pytest.importorskip("nanoserve.extras.lora.layers")

LoRARequest = lora.LoRARequest
GREEDY = SamplingParams(temperature=0, max_tokens=12)
NOISE = random.Random(0)
STORY = [NOISE.randrange(2, 320) for _ in range(21)]
PROMPTS = [STORY, STORY[:9], [NOISE.randrange(2, 320) for _ in range(30)]]


class Family:
    """A checkpoint, three adapters of it, and the three merged checkpoints."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        shapes = shapes_of(checkpoint)
        self.checkpoint = checkpoint
        # (rank, what is adapted, scale): 8 / 4 = 2, 8 / sqrt(16) = 2, 3 / 1 = 3
        options: list[tuple[dict[str, Any], float]] = [
            ({"targets": ALL}, 2),
            ({"targets": ("q_proj", "v_proj"), "rank": 16, "use_rslora": True}, 2),
            ({"targets": ("o_proj", "down_proj", "k_proj"), "rank": 1, "alpha": 3}, 3),
        ]
        self.requests, self.folders = [None], [checkpoint]
        for number, (fields, scale) in enumerate(options, start=1):
            path = write_adapter(folder / f"{number}", shapes, seed=number, **fields)
            self.requests.append(LoRARequest(f"adapter {number}", number, path))
            self.folders.append(merge(checkpoint, path, folder / f"merged {number}", scale))

    def check(self, number: int, prompt: list[int], output: Any) -> None:
        """Is this what transformers answers with the adapter merged?"""
        tokens = output.outputs[0].token_ids
        assert_same_greedy(self.folders[number], prompt, tokens, GREEDY.max_tokens or 0)
        assert output.lora_request is self.requests[number]


@pytest.fixture(scope="module")
def family(make_checkpoint: Callable[..., Path], tmp_path_factory: Any) -> Family:
    """Grouped-query attention, a bias of q, k and v."""
    return Family(make_checkpoint("qwen2"), tmp_path_factory.mktemp("adapters"))


def make_llm(family: Family, **options: Any) -> LLM:
    fields = {"block_size": 4, "num_kv_blocks": 128, "max_loras": 2, **options}
    return LLM(family.checkpoint, enable_lora=True, **fields)


@pytest.fixture(scope="module")
def llm(family: Family) -> Iterator[LLM]:
    with make_llm(family) as one:
        yield one
        one.engine.block_manager.check()


MIX = [(number, prompt) for number in (1, 0, 2, 3) for prompt in PROMPTS]


def generate(llm: LLM, family: Family, params: Any = GREEDY) -> list[Any]:
    """All prompts with each adapter and with none, in one call."""
    requests = [family.requests[number] for number, _ in MIX]
    return llm.generate(
        [prompt for _, prompt in MIX], params, lora_request=requests, use_tqdm=False
    )


# -- the tokens --

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one slot": {"max_loras": 1},
    "all adapters in a step": {"max_loras": 3, "max_cpu_loras": 5},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "recompute": {"num_kv_blocks": 26},
    "swap": {"num_kv_blocks": 26, "preemption_mode": "swap"},
    "overlap": {"async_scheduling": True},
    "overlap, one slot, few blocks": {
        "async_scheduling": True,
        "max_loras": 1,
        "num_kv_blocks": 20,
    },
    "n-gram drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "suffix drafts": {"speculative_config": {"method": "suffix"}},
    "drafts, chunks, swap, graphs": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "max_num_batched_tokens": 12,
        "max_num_seqs": 6,
        "num_kv_blocks": 26,
        "preemption_mode": "swap",
        "executor_cls": GraphExecutor,
    },
    "graphs": {"executor_cls": GraphExecutor, "max_num_seqs": 6},
    "torch": {"attention_backend": "torch", "custom_ops": "none"},
}


SLOW = ("all adapters in a step", "recompute", "graphs", "n-gram drafts", "torch")


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] * (way in SLOW)) for way in WAYS]
)
def test_tokens_are_those_of_the_merged_weights(family: Family, way: str) -> None:
    """Whatever the engine does, for requests of three adapters and of none in one batch."""
    with make_llm(family, **WAYS[way]) as llm:
        for (number, prompt), output in zip(MIX, generate(llm, family), strict=True):
            family.check(number, prompt, output)
        llm.engine.block_manager.check()
        if "graphs" in way:
            assert llm.engine.executor.runner.replayed_sizes


def test_others_are_right_beside_an_adapter_that_is_not(family: Family, tmp_path: Path) -> None:
    """Its products are infinite. In graphs, all tokens are multiplied by what is in all slots."""
    path = write_adapter(tmp_path, shapes_of(family.checkpoint), alpha=1e6)
    requests = [None, family.requests[1], LoRARequest("loud", 9, path)]
    options = {"dtype": "float16", "executor_cls": GraphExecutor, "max_num_seqs": 3}
    with make_llm(family, max_loras=3, **options) as llm:
        right = llm.generate([STORY] * 2, GREEDY, lora_request=requests[:2], use_tqdm=False)
        llm.reset_prefix_cache()
        mixed = llm.generate([STORY] * 3, GREEDY, lora_request=requests, use_tqdm=False)
    for output, expected in zip(mixed[:2], right, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert mixed[2].outputs[0].finish_reason == "error"


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_on_a_gpu(family: Family, enforce_eager: bool) -> None:
    """Real graphs, and the copies to the device's slots."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: run with `pytest -m gpu` on a machine that has one")
    options = {"device": "cuda", "dtype": "float32", "max_num_seqs": 6}
    with make_llm(family, enforce_eager=enforce_eager, **options) as llm:
        assert (llm.engine.executor.runner.graphs is None) == enforce_eager
        for (number, prompt), output in zip(MIX, generate(llm, family), strict=True):
            family.check(number, prompt, output)


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_ranks_cut_adapters_as_they_cut_weights(family: Family, num_ranks: int) -> None:
    """With 4 ranks, two hold the same key and value head."""
    ranks = pytest.importorskip("ranks")
    options = {"tensor_parallel_size": num_ranks, "executor_cls": ranks.ThreadExecutor}
    with make_llm(family, **options) as llm:
        for (number, prompt), output in zip(MIX, generate(llm, family), strict=True):
            family.check(number, prompt, output)


def test_bfloat16(family: Family, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The model in bfloat16, and an adapter that was saved in float16."""
    path = write_adapter(tmp_path, shapes_of(family.checkpoint), dtype=torch.float16)
    merged = merge(family.checkpoint, path, tmp_path / "merged")
    with make_llm(family, dtype="bfloat16") as llm:
        for prompt in PROMPTS:
            request = LoRARequest("half", 1, path)
            [output] = llm.generate(prompt, GREEDY, lora_request=request, use_tqdm=False)
            tokens = output.outputs[0].token_ids
            assert_same_greedy(merged, prompt, tokens, GREEDY.max_tokens or 0, torch.bfloat16)


def test_everything_else_a_request_can_be(family: Family, llm: LLM) -> None:
    """Several completions, a seed, logprobs of the prompt, beams: as an engine with the merged
    weights gives them."""
    params = SamplingParams(
        n=3, temperature=1, seed=3, max_tokens=6, ignore_eos=True, prompt_logprobs=0
    )
    beams = BeamSearchParams(3, 5, ignore_eos=True)
    adapter = family.requests[1]
    with LLM(family.folders[1], block_size=4, num_kv_blocks=64) as merged:
        [expected] = merged.generate(STORY, params, use_tqdm=False)
        [expected_beams] = merged.beam_search(STORY, beams)
    [output] = llm.generate(STORY, params, lora_request=adapter, use_tqdm=False)
    assert [each.token_ids for each in output.outputs] == [
        each.token_ids for each in expected.outputs
    ]
    assert output.prompt_logprobs and expected.prompt_logprobs
    for token, ours, theirs in zip(
        STORY[1:], output.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True
    ):
        assert ours and theirs
        assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-3)
    [found] = llm.beam_search(STORY, beams, lora_request=adapter)
    assert [each.tokens for each in found.sequences] == [
        each.tokens for each in expected_beams.sequences
    ]
    assert {each.lora_request for each in found.sequences} == {adapter}


def test_stream_chat_and_queues_take_adapters(family: Family, llm: LLM) -> None:
    one, two = family.requests[1], family.requests[2]
    texts: dict[str, list[int]] = {}
    for output in llm.stream([STORY, STORY], GREEDY, lora_request=[one, two]):
        texts.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
    for number, tokens in zip((1, 2), texts.values(), strict=True):
        assert_same_greedy(family.folders[number], STORY, tokens, 12)
    llm.enqueue([STORY, PROMPTS[1]], GREEDY, lora_request=two)
    for prompt, output in zip(PROMPTS, llm.wait_for_completion(use_tqdm=False), strict=False):
        family.check(2, prompt, output)
    llm.add_request("own", STORY, GREEDY, lora_request=one)
    while llm.has_unfinished_requests():
        last = llm.step()
    family.check(1, STORY, last[0])


def test_blocks_of_an_adapter_are_found_by_it_alone(family: Family, llm: LLM) -> None:
    """The same prompt, by turns: hits are of the adapter's own blocks, of 4 tokens each."""
    prompt = [NOISE.randrange(2, 320) for _ in range(21)]
    for turn, expected in enumerate((0, 20)):
        for number in (0, 1, 2):
            request = family.requests[number]
            [output] = llm.generate(prompt, GREEDY, lora_request=request, use_tqdm=False)
            assert output.num_cached_tokens == expected, (turn, number)
            family.check(number, prompt, output)


def test_an_async_engine(family: Family) -> None:
    """Each task has an adapter of its own; adapters come and go while others are in use."""

    async def ask(llm: AsyncLLM, number: int, prompt: list[int]) -> None:
        async for output in llm.generate(prompt, GREEDY, lora_request=family.requests[number]):
            last = output
        family.check(number, prompt, last)

    async def run() -> None:
        options = {"enable_lora": True, "num_kv_blocks": 128, "block_size": 4}
        with AsyncLLM(EngineArgs(str(family.checkpoint), **options)) as llm:
            assert await llm.add_lora(family.requests[1])
            assert not await llm.add_lora(family.requests[1])
            assert await llm.list_loras() == {1}
            await asyncio.gather(*[ask(llm, number, prompt) for number, prompt in MIX])
            assert await llm.list_loras() == {1, 2, 3}
            assert await llm.remove_lora(2)
            assert not await llm.remove_lora(2)
            await ask(llm, 2, STORY)

    asyncio.run(asyncio.wait_for(run(), 60))


# -- the products --


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lora_ids=st.lists(st.integers(-1, 3), min_size=1, max_size=9),
    is_graph=st.booleans(),
    seed=st.integers(0, 99),
)
def test_fast_ways_do_what_the_definition_does(
    monkeypatch: pytest.MonkeyPatch, lora_ids: list[int], is_graph: bool, seed: int
) -> None:
    """What other slots hold does not matter, be it infinite."""
    monkeypatch.setattr(layers, "TILE", 3)
    slots, generator = _fake_slots(), torch.Generator().manual_seed(seed)
    x = torch.randn(len(lora_ids), 6, generator=generator)
    base = torch.randn(len(x), 5, generator=generator)
    a = torch.randn(4, 3, 6, generator=generator)
    b = torch.randn(5, 4, 3, generator=generator)
    ids = np.array(lora_ids)
    expected = layers.add_lora_loop(base.clone(), x, a, b, torch.from_numpy(ids))
    for slot in {*range(4)} - {*lora_ids}:
        a[slot] = torch.inf
    step = StepArrays(*[ids] * 10)
    plan = slots.plan(step, StepArrays(*[torch.from_numpy(ids)] * 10), (1, 1) if is_graph else None)
    if plan is None:
        assert set(lora_ids) == {-1}
        return
    result = plan.add(base.clone(), x, a, b)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(result[ids < 0], base[ids < 0])


def _fake_slots() -> Any:
    """LoRASlots without a model."""
    from nanoserve.staging import StagingBuffer

    class Runner:
        staging = StagingBuffer(0, torch.device("cpu"))

    slots = object.__new__(layers.LoRASlots)
    slots.runner = Runner
    return slots


def test_a_slot_holds_nothing_of_the_adapter_before(family: Family) -> None:
    """Adapters 1 (of all matrices, rank 4) and 3 (of three, rank 1), in one slot."""
    with make_llm(family, max_loras=1) as llm:
        generate(llm, family)
        slots, manager = llm.engine.executor.runner.lora_slots, llm.engine.lora_manager
        first, last = (manager.adapters[number].files.load() for number in (1, 3))
        buffers = [b for layer in slots.layers.values() for b in (layer.lora_a, layer.lora_b)]
        for buffer in buffers:
            buffer.zero_()
        slots.load(0, last)
        expected = [buffer.clone() for buffer in buffers]
        slots.load(0, first)
        slots.load(0, last)
        assert all(map(torch.equal, buffers, expected))


def test_the_definition_by_hand() -> None:
    """Two tokens with an adapter of rank 1, x A = 2 and 3, B = (1, 10); one token without."""
    x = torch.tensor([[2.0, 0.0], [5.0, 5.0], [3.0, 0.0]])
    a, b = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[1.0]], [[10.0]]])
    result = layers.add_lora_loop(torch.zeros(3, 2), x, a, b, torch.tensor([0, -1, 0]))
    assert result.tolist() == [[2, 20], [0, 0], [3, 30]]


# -- the door --


def test_an_engine_without_adapters_says_so(demo_llm: LLM, family: Family) -> None:
    with pytest.raises(VLLMValidationError, match="enable_lora=True"):
        demo_llm.generate("A", lora_request=family.requests[1])
    assert not demo_llm.has_unfinished_requests()


@pytest.mark.parametrize(
    ("lora_request", "error", "message"),
    [
        ("pirate", TypeError, "LoRARequest"),
        (7, TypeError, "LoRARequest"),
        ([None], ValueError, "1 items for 2 prompts"),
        (LoRARequest("x", 99, "no/such/folder"), ValueError, "not a folder"),
        (LoRARequest("another", 1, "no/such/folder"), ValueError, "number of its own"),
        (LoRARequest("adapter 1", 1, "no/such/folder"), ValueError, "number of its own"),
    ],
)
def test_a_bad_adapter_queues_nothing(
    llm: LLM, family: Family, lora_request: Any, error: type[Exception], message: str
) -> None:
    llm.generate(STORY, GREEDY, lora_request=family.requests[1], use_tqdm=False)
    with pytest.raises(error, match=message):
        llm.generate([STORY, STORY], GREEDY, lora_request=lora_request)
    assert not llm.has_unfinished_requests()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lora_int_id", [], "lora_int_id must be an int, got "),
        ("lora_int_id", "x", "lora_int_id must be an int, got 'x'"),
        ("lora_path", 5, "lora_path must be a string, got 5"),
        ("lora_path", None, "lora_path must be a string, got None"),
        ("lora_path", ..., "not a whole LoRARequest: .* no attribute 'lora_path'"),  # deleted
        ("lora_int_id", ..., "not a whole LoRARequest: .* no attribute 'lora_int_id'"),
    ],
)
def test_a_lora_request_that_was_changed_is_checked_again(
    llm: LLM, family: Family, field: str, value: Any, message: str
) -> None:
    forged = replace(family.requests[1])
    if value is ...:
        object.__delattr__(forged, field)
    else:
        object.__setattr__(forged, field, value)
    with pytest.raises(TypeError, match=message):
        llm.generate(STORY, GREEDY, lora_request=forged)
    assert not llm.has_unfinished_requests()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_int_id": 0}, "lora_int_id is 0; allowed: 1 to"),
        ({"lora_int_id": True}, "lora_int_id must be an int"),
        ({"lora_name": ""}, "lora_name is ''"),
        ({"lora_name": 7}, "lora_name must be a string"),
        ({"lora_path": ""}, "lora_path is an empty string"),
        ({"lora_path": 7}, "lora_path must be a string"),
        ({"base_model_name": 7}, "base_model_name must be"),
        ({"load_inplace": True}, "new lora_int_id"),
        ({"load_inplace": 1}, "load_inplace must be True or False"),
    ],
)
def test_a_lora_request_is_checked(fields: dict[str, Any], message: str) -> None:
    given = {"lora_name": "a", "lora_int_id": 1, "lora_path": "path", **fields}
    with pytest.raises((ValueError, TypeError), match=message):
        LoRARequest(**given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_loras": 0}, "max_loras is 0"),
        ({"max_lora_rank": 0}, "max_lora_rank is 0"),
        ({"max_loras": 3, "max_cpu_loras": 2}, "max_cpu_loras is 2, less than max_loras 3"),
        ({"model_impl": "transformers"}, "runs through transformers here, whose layers take no"),
        ({"max_loras": 65536, "max_lora_rank": 65536}, "Lower the two"),
        ({"max_loras": 2**63 - 1}, "Lower the two"),
    ],
)
def test_bad_options(family: Family, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_llm(family, **options)


def test_without_the_chapter_the_option_says_so(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nanoserve.extras.lora.manager", None)
    with pytest.raises(ValueError, match=r"needs nanoserve/extras/lora, .* Leave enable_lora out"):
        make_llm(family)


def test_experts_have_no_adapters_but_attention_has(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """An adapter that names experts is refused with a sentence."""
    checkpoint = make_checkpoint("mixtral", num_local_experts=4, num_experts_per_tok=2)
    shapes = shapes_of(checkpoint)
    attention = write_adapter(tmp_path / "attention", shapes, targets=ATTENTION)
    merged = merge(checkpoint, attention, tmp_path / "merged")
    experts = write_adapter(tmp_path / "experts", shapes, targets=("w1", "q_proj"))
    with LLM(checkpoint, enable_lora=True, num_kv_blocks=32) as llm:
        with pytest.raises(ValueError, match="adapters of experts are not supported"):
            llm.generate(STORY, GREEDY, lora_request=LoRARequest("experts", 1, experts))
        request = LoRARequest("attention", 2, attention)
        [output] = llm.generate(STORY, GREEDY, lora_request=request, use_tqdm=False)
    assert_same_greedy(merged, STORY, output.outputs[0].token_ids, 12)


def test_peft_agrees(family: Family, llm: LLM, tmp_path: Path) -> None:
    """An adapter that PEFT has made and saved: greedy tokens of PEFT's own model."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(family.checkpoint, dtype=torch.float32)
    config = peft.LoraConfig(
        r=8,
        lora_alpha=12,
        target_modules="all-linear",
        rank_pattern={"layers.1.self_attn.q_proj": 3},
        alpha_pattern={"down_proj": 40},
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(tmp_path)
    request = LoRARequest("peft", 50, tmp_path)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            answer = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=12,
                pad_token_id=0,
            )
        [output] = llm.generate(prompt, GREEDY, lora_request=request, use_tqdm=False)
        assert output.outputs[0].token_ids == answer[0, len(prompt) :].tolist()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantized_model_takes_adapters(
    family: Family, tmp_path: Path, quantization: str
) -> None:
    """What is added to a quantized weight is in floating point. The oracle has the weights that the
    quantized layers multiply by, merged with the adapter."""
    pytest.importorskip("nanoserve.extras.quantization")
    weights = load_file(family.checkpoint / "model.safetensors")
    with make_llm(family, quantization=quantization) as llm:
        outputs = generate(llm, family)
        for name, layer in llm.engine.executor.runner.lora_slots.layers.items():
            for matrix in layer.matrices(name):
                identity = torch.eye(matrix.shape[1])
                base = layer.linear_method.base.apply(layer, identity, None, None)
                weights[f"{matrix.name}.weight"] = base.T[matrix.rows].contiguous()
        head = llm.engine.executor.runner.model
        logits = head.compute_logits(torch.eye(64))
    shutil.copytree(family.checkpoint, tmp_path / "quantized")
    if "lm_head.weight" in weights:
        weights["lm_head.weight"] = logits.T.contiguous()
    save_file(weights, tmp_path / "quantized" / "model.safetensors", metadata={"format": "pt"})
    for number in (1, 2, 3):
        path = Path(family.requests[number].lora_path)
        scale = (2, 2, 3)[number - 1]
        merged = merge(tmp_path / "quantized", path, tmp_path / f"merged {number}", scale)
        for (of, prompt), output in zip(MIX, outputs, strict=True):
            if of == number:
                assert_same_greedy(merged, prompt, output.outputs[0].token_ids, 12)
