"""Adapters change the tokens of their requests as merged weights would, and nobody else's.

The oracle is transformers on the checkpoint with W + scale * B A in the place of W.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ALL, PREFIX, merge, shapes_of, write_adapter
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same_greedy
from safetensors.torch import load_file, save_file
from simulated_cuda import simulated_cuda
from test_ranks import thread_ranks  # noqa: F401 (a fixture)

from nanoserve import LLM, SamplingParams
from nanoserve.models.config import DEMO_MODEL
from nanoserve.tools.check_blocks import check_blocks

pytest.importorskip("nanoserve.chapters.lora")
from nanoserve.chapters.lora import LoRARequest, manager
from nanoserve.chapters.lora.layers import add_groups, add_together
from nanoserve.chapters.lora.peft_helper import read_adapter

LENGTH = 10
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH)
NOISE = random.Random(0)
STORY = [NOISE.randrange(2, 320) for _ in range(21)]
PROMPTS = [STORY, STORY[:9], [NOISE.randrange(2, 320) for _ in range(26)]]
MIX = [(number, prompt) for number in (1, 0, 2, 3) for prompt in PROMPTS]
# Targets, scale alpha / rank (or sqrt of it), and the rest: 8 / 4, 8 / sqrt(16), 3 / 1.
ADAPTERS: list[tuple[float, dict[str, Any]]] = [
    (2, {"targets": ALL}),
    (2, {"targets": ("q_proj", "v_proj"), "rank": 16, "use_rslora": True}),
    (3, {"targets": ("o_proj", "down_proj", "k_proj"), "rank": 1, "alpha": 3}),
]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


class Family:
    """A checkpoint with a bias of q, k and v; three adapters of it; the merged checkpoints."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.checkpoint, self.requests, self.merged = checkpoint, [None], [checkpoint]
        for number, (scale, fields) in enumerate(ADAPTERS, start=1):
            path = write_adapter(folder / f"{number}", shapes_of(checkpoint), seed=number, **fields)
            self.requests.append(LoRARequest(f"adapter {number}", number, path))
            self.merged.append(merge(checkpoint, path, folder / f"merged {number}", scale))

    def make(self, **options: Any) -> LLM:
        usual = {"block_size": 4, "num_gpu_blocks_override": 128, "max_loras": 2, **options}
        return LLM(self.checkpoint, enable_lora=True, max_model_len=96, **usual)

    def ask(self, llm: LLM, mix: Any) -> list[list[int]]:
        given_ = {"lora_request": [self.requests[number] for number, _ in mix], "use_tqdm": False}
        self.outputs = llm.generate([prompt for _, prompt in mix], GREEDY, **given_)
        return [list(output.outputs[0].token_ids) for output in self.outputs]

    def check(self, llm: LLM, mix: Any = MIX) -> None:
        """The answers are those of transformers with the adapter merged."""
        for (number, prompt), tokens in zip(mix, self.ask(llm, mix), strict=True):
            assert_same_greedy(self.merged[number], prompt, tokens, LENGTH)
        check_blocks(llm.engine.block_manager)
        assert not llm.engine.block_manager.block_tables


@pytest.fixture(scope="module")
def family(make_checkpoint: Callable[..., Path], tmp_path_factory: Any) -> Family:
    return Family(make_checkpoint("qwen2"), tmp_path_factory.mktemp("adapters"))


WAYS: list[dict[str, Any]] = [
    {"max_loras": 3},
    {"max_loras": 1, "num_gpu_blocks_override": 20, "async_scheduling": True},
    {"max_num_batched_tokens": 7, "max_num_seqs": 5, "speculative_config": NGRAM},
    {"num_gpu_blocks_override": 26, "preemption_mode": "swap", "kernels": "fast"},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_tokens_are_those_of_the_merged_weights(family: Family, options: dict[str, Any]) -> None:
    """For requests of three adapters and of none in one batch; the second time with a step that
    fails, and a request that is aborted."""
    with family.make(**options) as llm:
        family.check(llm)
        launch, number = llm.engine.executor.launch, iter(range(10**6))

        def disturb(step: Any) -> Any:
            if next(number) == 3:
                llm.abort_request("beside")
                raise RuntimeError("planted")
            return launch(step)

        llm.engine.executor.launch = disturb
        llm.add_request("beside", STORY, GREEDY, lora_request=family.requests[3])
        family.check(llm)


@pytest.mark.usefixtures("thread_ranks")
def test_ranks_cut_adapters_as_they_cut_weights(family: Family) -> None:
    """With 4 ranks, two hold the same key and value head."""
    with family.make(tensor_parallel_size=4) as llm:
        family.check(llm)


def test_a_quantized_model_takes_adapters(family: Family) -> None:
    """Each request's tokens are the same alone and beside others."""
    with family.make(quantization="int8", enable_prefix_caching=False) as llm:
        assert family.ask(llm, MIX) == [family.ask(llm, [each])[0] for each in MIX]


def test_the_pirate() -> None:
    pirate = LoRARequest("pirate", 1, DEMO_MODEL / "lora")
    with LLM(enable_lora=True, num_gpu_blocks_override=64) as llm:
        hello = [[{"role": "user", "content": "Hello!"}]] * 2
        outputs = llm.chat(hello, GREEDY, lora_request=[pirate, None], use_tqdm=False)
    assert ["Ahoy" in output.outputs[0].text for output in outputs] == [True, False]


# -- who has a slot, what is in memory --


def test_blocks_of_an_adapter_are_found_by_it_alone(family: Family) -> None:
    with family.make() as llm:
        for expected in (0, 20):
            family.check(llm, [(number, STORY) for number in (0, 1, 2)])
            assert [output.num_cached_tokens for output in family.outputs] == [expected] * 3


def test_who_waits_for_a_slot(family: Family) -> None:
    """C is before the second request of A, which could keep it waiting for ever. Those whose
    adapter has a slot, and those without one, wait for nobody."""
    ended: list[str] = []
    with family.make() as llm:
        for name, number, length in zip(
            ORDER, (1, 2, 3, 1, 2, 0), (6, 20, 2, 2, 3, 3), strict=True
        ):
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            llm.add_request(name, STORY, params, lora_request=family.requests[number])
            if name == "b":
                llm.step()
        while llm.has_unfinished_requests():
            ended += [output.request_id for output in llm.step() if output.finished]
    assert ended == ["b2", "none", "a", "c", "a2", "b"]


ORDER = ("a", "b", "c", "a2", "b2", "none")


def test_weights_stay_in_memory_until_there_is_no_room(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one slot and room for two, the one that was wanted last but one goes."""
    read: list[str] = []

    def note(folder: Path, *rest: Any) -> Any:
        read.append(folder.name)
        return read_adapter(folder, *rest)

    monkeypatch.setattr(manager, "read_adapter", note)
    with family.make(max_loras=1, max_cpu_loras=2) as llm:
        for number in (1, 2, 1, 3, 1, 2):
            family.check(llm, [(number, STORY)])
        assert llm.engine.list_loras() == {1, 2}
    assert read == ["1", "2", "3", "2"]


def test_adapters_come_and_go(family: Family) -> None:
    """A number may get another adapter, and none of the blocks of the first, whose request goes
    on."""
    with family.make() as llm:
        engine, second = llm.engine, LoRARequest("another", 1, family.requests[2].lora_path)
        assert engine.add_lora(family.requests[1])
        with pytest.raises(ValueError, match="another"):
            llm.generate(STORY, GREEDY, lora_request=second)
        llm.add_request("first", STORY, GREEDY, lora_request=family.requests[1])
        llm.step()
        assert [engine.remove_lora(1), engine.remove_lora(1)] == [True, False]
        llm.add_request("second", STORY, GREEDY, lora_request=second)
        outputs = {output.request_id: output for _ in range(30) for output in llm.step()}
    for name, number in (("first", 1), ("second", 2)):
        tokens = list(outputs[name].outputs[0].token_ids)
        assert_same_greedy(family.merged[number], STORY, tokens, LENGTH)
    assert outputs["second"].num_cached_tokens == 0


def test_steps_without_adapters_have_graphs_of_their_own() -> None:
    """They have no launch for adapters: what a graph has recorded is counted by replays."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    pirate = LoRARequest("pirate", 1, str(DEMO_MODEL / "lora"))
    options = {"max_num_seqs": 2, "max_model_len": 64, "dtype": "float32", "device": "cuda:0"}
    with (
        simulated_cuda() as device,
        LLM(enable_lora=True, attention_backend=device.backend, **options) as llm,
    ):
        runner = llm.llm_engine.executor.runner
        for adapter, graphs in ((pirate, "lora_graphs"), (None, "plain_graphs")):
            used = getattr(runner, graphs)
            replayed = []
            used.replay = lambda shape, used=used, log=replayed: (
                log.append(shape) or type(used).replay(used, shape)
            )
            llm.generate("Once", params, use_tqdm=False, lora_request=adapter)
            assert len(replayed) == 4
        assert runner.lora_graphs is not runner.plain_graphs


# -- the products --


@given(ids=st.lists(st.integers(-1, 3), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_both_ways_to_add(ids: list[int], seed: int) -> None:
    """What other slots hold does not matter, be it infinite."""
    generator, lora_ids = torch.Generator().manual_seed(seed), torch.tensor(ids)
    x, y = (torch.randn(len(ids), size, generator=generator) for size in (6, 5))
    a, b = torch.randn(4, 3, 6, generator=generator), torch.randn(5, 4, 3, generator=generator)
    expected = y.clone()
    for i, slot in enumerate(ids):
        expected[i] += b[:, slot] @ a[slot] @ x[i] * (slot >= 0)
    for slot in {*range(4)} - {*ids}:
        a[slot] = torch.inf
    groups = [(slot, (lora_ids == slot).nonzero()[:, 0]) for slot in {*ids} - {-1}]
    groups = [(slot, None if len(each) == len(ids) else each) for slot, each in groups]
    one = add_groups(y.clone(), x, a, b, groups)
    torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)
    other = add_together(y.clone(), x, a, b, lora_ids[:, None] != torch.arange(4))
    torch.testing.assert_close(other, expected, rtol=1e-4, atol=1e-5)


# -- the door --

SHAPES = {"model.layers.0.self_attn.q_proj": (6, 4), "model.layers.0.self_attn.k_proj": (6, 4)}
A, B = (f"{PREFIX}model.layers.0.self_attn.q_proj.lora_{part}.weight" for part in "AB")
REFUSED: dict[str, Any] = {
    "peft_type": {"peft_type": "IA3"}, "use_dora": {"use_dora": True}, "bias": {"bias": "all"},
    "modules_to_save": {"modules_to_save": ["lm_head"]}, "quantum_lora": {"quantum_lora": 3},
    "fan_in_fan_out": {"fan_in_fan_out": True}, "lora_alpha": {"lora_alpha": "16"},
    "init_lora_weights": {"init_lora_weights": "pissa_niter_16"},
    "alpha_pattern": {"alpha_pattern": {".*q_proj": 4}}, "rank 4, and r is 8": {"r": 8},
    "lacks lora_B": {B: None}, r"\(4, 5\)": {A: torch.zeros(4, 5)}, r"\(\)": {A: torch.zeros(())},
    "max_lora_rank is 8": {A: torch.zeros(9, 4), B: torch.zeros(6, 9)},
    "floating-point": {A: torch.zeros(4, 4, dtype=torch.int8)},
    "NaN": {B: torch.full((6, 4), torch.nan)},
    "lora_magnitude": {A.replace("A.weight", "magnitude_vector"): torch.zeros(6)},
    "lm_head": {f"{PREFIX}lm_head.lora_A.weight": torch.zeros(4, 4)},
    "layers.7": {A.replace("layers.0", "layers.7"): torch.zeros(4, 4)},
}  # fmt: skip


@pytest.mark.parametrize("word", REFUSED)
def test_what_would_be_silently_wrong_is_refused(word: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, SHAPES)
    config, file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    changes, tensors = REFUSED[word], load_file(file)
    tensors |= {k: value for k, value in changes.items() if isinstance(value, torch.Tensor)}
    save_file({k: value for k, value in tensors.items() if changes.get(k, 0) is not None}, file)
    fields = {k: value for k, value in changes.items() if k.isidentifier()}
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    with pytest.raises(ValueError, match=word):
        read_adapter(folder, SHAPES, 8)


SCALES: list[Any] = [
    ({}, 2), ({"use_rslora": True}, 4), ({"alpha_pattern": {"q_proj": 16}, "task_type": None}, 4),
    ({"alpha_pattern": {"oj": 16, "k_proj": 16}, "a_key_of_the_future": None}, 2),
    ({"rank_pattern": {"q_proj": 4}, "r": 9, "target_modules": ".*(a+)+$"}, 2),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "scaling"), SCALES)
def test_the_scale(fields: dict[str, Any], scaling: float, tmp_path: Path) -> None:
    weights = read_adapter(write_adapter(tmp_path, SHAPES, **fields), SHAPES, 8)
    assert weights["model.layers.0.self_attn.q_proj"].scaling == scaling


def test_bad_files_and_requests(family: Family, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="adapter_config"):
        read_adapter(tmp_path, SHAPES, 8)
    file = write_adapter(tmp_path, SHAPES) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="adapter_model"):
        read_adapter(tmp_path, SHAPES, 8)
    for bad in (("", 1, "path"), ("a", 0, "path"), ("a", "1", "path"), ("a", 1, ""), ("a", 1, 7)):
        with pytest.raises(ValueError, match="lora_"):
            LoRARequest(*bad)
    with pytest.raises(ValueError, match="enable_lora"):
        family.make(model_impl="transformers")
    with family.make() as llm, pytest.raises(TypeError, match="LoRARequest"):
        llm.generate(STORY, GREEDY, lora_request="pirate")
