"""Quantized weights: every format means what its writer meant, on every rank, and the tokens are
those of transformers on the same numbers in floating point."""

from __future__ import annotations

import json
import shutil
import sys
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_same_greedy
from quantized_checkpoints import (
    GREEDY,
    PROMPTS,
    SIZES,
    answers,
    any_json,
    awq,
    change,
    fp8,
    gptq,
    linear_layers,
    load,
    read_or_refuse,
    weight_of,
    write_checkpoint,
)
from ranks import ThreadExecutor
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.extras.quantization.base_config import (
    Section,
    check_pattern,
    get_quantization_config,
    matches,
)
from nanoserve.extras.quantization.gptq import GPTQConfig
from nanoserve.extras.quantization.online import (
    OnlineConfig,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)
from nanoserve.kernels.quantized import QuantizedWeight
from nanoserve.layers import ColumnParallelLinear, LayerConfig, LinearBase, RowParallelLinear
from nanoserve.models.base import Model
from nanoserve.models.moe import ExpertsLinear
from nanoserve.parallel import ParallelState

MakeCheckpoint = Callable[..., Path]
FORMATS: dict[str, Any] = {
    "gptq": gptq(),
    "gptq, 8 bits": gptq(bits=8, group_size=32),
    "gptq, zeros": gptq(sym=False),
    "gptq, 8 bits, zeros": gptq(bits=8, sym=False),
    "gptq, one group": gptq(group_size=-1),
    "gptq_v2, zeros": gptq(sym=False, version="gptq_v2"),
    "gptq, act-order": gptq(desc_act=True),
    "gptq, 8 bits, act-order": gptq(bits=8, desc_act=True, sym=False),
    "awq": awq(),
    "awq, large groups": awq(group_size=32),
    "fp8": fp8(),
    "fp8, static": fp8("static", is_flat=True),
    "fp8, blocks": fp8(block=[32, 16]),
}


@pytest.fixture(scope="session")
def make_quantized(
    make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Path]]:
    """make_quantized("awq", "llama") -> folders with codes and with the numbers they stand for."""

    @cache
    def make(name: str, model_type: str = "llama", **overrides: Any) -> tuple[Path, Path]:
        source = make_checkpoint(model_type, **{**SIZES, **overrides})
        return write_checkpoint(source, tmp_path_factory.mktemp("quantized"), *FORMATS[name])

    return make


# -- formats --


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", [name for name in FORMATS if "order" not in name])
def test_codes_mean_what_was_written(
    name: str, tp_size: int, make_quantized: Callable[..., tuple[Path, Path]]
) -> None:
    """Each rank has its part of the numbers, bit for bit."""
    quantized, plain = make_quantized(name)
    for rank in range(tp_size):
        expected = linear_layers(load(plain, rank, tp_size))
        layers = linear_layers(load(quantized, rank, tp_size))
        for key, layer in layers.items():
            assert torch.equal(weight_of(layer), weight_of(expected[key])), key
        names = [
            key.rpartition(".")[2] for key in layers if hasattr(layers[key], "quantized_weight")
        ]
        assert set(names) == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}


@pytest.mark.parametrize("name", [name for name in FORMATS if "order" in name])
def test_with_act_order_columns_are_sorted_by_group(
    name: str, make_quantized: Callable[..., tuple[Path, Path]]
) -> None:
    quantized, plain = make_quantized(name)
    expected, layers = linear_layers(load(plain)), linear_layers(load(quantized))
    for key, layer in layers.items():
        assert torch.equal(weight_of(layer), weight_of(expected[key])), key
    order = layers["model.layers.0.self_attn.qkv_proj"].quantized_weight.order
    assert sorted(order.tolist()) == list(range(64)) != order.tolist()
    with pytest.raises(ValueError, match=r"o_proj: with act-order.*tensor_parallel_size=1"):
        load(quantized, 0, 2)


@given(
    name=st.sampled_from(["gptq", "gptq_v2", "awq", "fp8"]),
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([-1, 2, 8, 16, 24]),
    outputs=st.sampled_from([8, 16, 24, 64]),
    inputs=st.sampled_from([8, 16, 48, 64]),
    tp_size=st.sampled_from([1, 2, 4]),
    is_row=st.booleans(),
)
def test_a_cut_is_right_or_refused(
    name: str, bits: int, group: int, outputs: int, inputs: int, tp_size: int, is_row: bool
) -> None:
    """Layers of any size on any number of ranks."""
    if group != -1 and inputs % group:
        return
    if name == "awq":
        settings, write = awq(group)
    elif name == "fp8":
        settings, write = fp8(block=[bits * 2, inputs if group == -1 else group])
    else:
        settings, write = gptq(bits, group, sym=False, version=name)
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    tensors, expected = write("q_proj", weight)
    hf = {"quantization_config": settings}
    for rank in range(tp_size):
        layer_config = LayerConfig(
            parallel=ParallelState(rank, tp_size),
            quant_config=get_quantization_config(None, FakeModelConfig(hf)),
            prefix="q_proj",
        )
        try:
            if is_row:
                layer: LinearBase = RowParallelLinear(
                    inputs, outputs, bias=False, layer_config=layer_config
                )
            else:
                layer = ColumnParallelLinear(
                    inputs, {"q_proj": outputs}, bias=False, layer_config=layer_config
                )
            shards = list(layer.shards("mlp.q_proj"))
        except ValueError as error:
            assert "tensor_parallel_size" in str(error) and tp_size > 1  # noqa: PT017
            return
        for key, shard in shards:
            if (tensor := tensors.get(key.removeprefix("mlp.q_proj."))) is not None:
                assert tensor.shape == shard.full_shape
                shard.weight_loader(shard.target, tensor[shard.slices])
        [matrix] = layer.matrices("mlp.q_proj")
        size = outputs // tp_size if matrix.dim == 0 else inputs // tp_size
        part = expected.narrow(matrix.dim, matrix.start, size)
        assert torch.equal(weight_of(layer), part)


class FakeModelConfig(NamedTuple):
    hf_config: dict[str, Any]
    path: Path = Path("folder")


EXPERTS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


@pytest.mark.parametrize(
    ("name", "model_type"),
    [("gptq", "mixtral"), ("fp8", "mixtral"), ("gptq, 8 bits", "qwen3_moe"), ("awq", "qwen3_moe")],
)
def test_experts_are_quantized(
    name: str, model_type: str, make_quantized: Callable[..., tuple[Path, Path]]
) -> None:
    quantized, plain = make_quantized(name, model_type, **EXPERTS[model_type])
    for rank in range(2):
        expected, layers = (
            linear_layers(load(plain, rank, 2)),
            linear_layers(load(quantized, rank, 2)),
        )
        experts = {key for key, layer in layers.items() if isinstance(layer, ExpertsLinear)}
        assert len(experts) == 4
        for key, layer in layers.items():
            assert hasattr(layer, "quantized_weight") or key not in experts
            assert torch.equal(weight_of(layer), weight_of(expected[key])), key
    with LLM(quantized, num_kv_blocks=32, max_model_len=64) as llm:
        for prompt, tokens in zip(PROMPTS, answers(llm), strict=True):
            assert_same_greedy(plain, prompt, tokens, 12)


# -- the engine --


OFTEN = ("gptq, zeros", "gptq, 8 bits, act-order", "awq", "fp8, blocks")  # in every run


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in FORMATS],
)
def test_greedy_tokens_are_those_of_transformers(
    name: str, make_quantized: Callable[..., tuple[Path, Path]]
) -> None:
    """On the numbers that the codes stand for. (Scales of FP8 inputs are for GPUs.)"""
    quantized, plain = make_quantized(name)
    with LLM(quantized, num_kv_blocks=32, max_model_len=64) as llm:
        for prompt, tokens in zip(PROMPTS, answers(llm), strict=True):
            assert_same_greedy(plain, prompt, tokens, 12)


@pytest.mark.parametrize(
    "model_type", ["qwen2", "qwen3", pytest.param("mistral", marks=pytest.mark.slow)]
)
def test_other_families(model_type: str, make_quantized: Callable[..., tuple[Path, Path]]) -> None:
    """With biases, norms of heads, windows."""
    quantized, plain = make_quantized("gptq, zeros", model_type)
    with LLM(quantized, num_kv_blocks=32, max_model_len=64, quantization="gptq") as llm:
        for prompt, tokens in zip(PROMPTS, answers(llm), strict=True):
            assert_same_greedy(plain, prompt, tokens, 12)


@pytest.mark.parametrize("name", ["awq", "gptq, one group"])
def test_two_ranks_say_the_same(
    name: str, make_quantized: Callable[..., tuple[Path, Path]]
) -> None:
    quantized, plain = make_quantized(name)
    ranks = {"tensor_parallel_size": 2, "executor_cls": ThreadExecutor}
    with LLM(quantized, num_kv_blocks=32, max_model_len=64, **ranks) as llm:
        for prompt, tokens in zip(PROMPTS, answers(llm), strict=True):
            assert_same_greedy(plain, prompt, tokens, 12)


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks and preemption": {"max_num_batched_tokens": 8, "num_kv_blocks": 8, "block_size": 4},
    "swap": {"num_kv_blocks": 8, "block_size": 4, "preemption_mode": "swap"},
    "overlap": {"async_scheduling": True, "max_num_seqs": 2},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "a drafter": {
        "speculative_config": {"method": "draft_model", "num_speculative_tokens": 2, "model": ""}
    },
    "8-bit keys": {"kv_cache_dtype": "fp8"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_the_engine(
    setting: str, make_quantized: Callable[..., tuple[Path, Path]]
) -> None:
    """Prefixes that are cached, several completions and sampled requests beside each other. The
    drafter is the same model in floating point: its own config.json counts."""
    quantized, plain = make_quantized("gptq, zeros")
    options = {"num_kv_blocks": 64, "max_model_len": 64, **SETTINGS[setting]}
    if "drafter" in setting:
        options["speculative_config"] = {**options["speculative_config"], "model": str(plain)}
        options["quantization"] = "gptq"
    prompts = [*PROMPTS, PROMPTS[1] + [3], PROMPTS[1]]
    sampled = SamplingParams(temperature=1, seed=1, n=2, max_tokens=6)
    with LLM(quantized, **options) as llm:
        for _ in range(2):
            results = llm.generate([*prompts, PROMPTS[0]], [GREEDY] * len(prompts) + [sampled])
            if setting != "8-bit keys":
                for prompt, done in zip(prompts, results, strict=False):
                    assert_same_greedy(plain, prompt, list(done.outputs[0].token_ids), 12)
            assert [len(each.token_ids) for each in results[-1].outputs] == [6, 6]
        llm.engine.block_manager.check()


def test_the_first_log_lines_name_the_format(
    make_quantized: Callable[..., tuple[Path, Path]],
) -> None:
    quantized, plain = make_quantized("awq")
    for folder, quantization, words in [
        (quantized, None, ", weights=awq"),
        (plain, "int8", ", weights=int8"),
    ]:
        with LLM(folder, num_kv_blocks=8, max_model_len=64, quantization=quantization) as llm:
            assert words in llm.engine.executor.describe()


# -- while loading --


def test_rounding_errs_by_half_a_step() -> None:
    """And a row of zeros stays one."""
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    weight[:, 5] *= 20
    for kind, quantize, step in (
        ("int8", quantize_int8, lambda w: w.abs().amax(1, keepdim=True).expand_as(w) / 127),
        ("int4", quantize_int4, _int4_step),
    ):
        codes = QuantizedWeight(kind, *quantize(weight.clone()))
        error = (codes.dequantize() - weight).abs()
        assert (error <= step(weight) * 0.5001 + 1e-6).all()
        assert not codes.dequantize()[3].any()
    codes = QuantizedWeight("fp8", *quantize_fp8(weight))
    relative = (codes.dequantize() - weight).abs() / weight.abs().clamp(min=1e-9)
    large = weight.abs() > weight.abs().amax(1, keepdim=True) / 448 / 64  # above the subnormals
    assert (relative[large] <= 2**-4).all()  # 3 bits of mantissa
    assert not codes.dequantize()[3].any()


def _int4_step(weight: Tensor) -> Tensor:
    groups = weight.unflatten(1, (-1, 64))
    steps = (groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0)) / 15
    return steps.repeat_interleave(64, 1) * 2  # the zero is rounded, too


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
def test_while_loading_every_rank_gets_the_same_codes(
    kind: str, model_type: str, make_checkpoint: MakeCheckpoint
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, **EXPERTS.get(model_type, {})}
    folder = make_checkpoint(model_type, **{**sizes, "moe_intermediate_size": 128})
    whole = _matrices(load(folder, quantization=kind))
    for rank in range(2):
        for name, (part, dim, start) in _matrices(load(folder, rank, 2, quantization=kind)).items():
            expected = whole[name][0].narrow(dim, start, part.shape[dim])
            assert torch.equal(part, expected), name


def _matrices(model: Model) -> dict[str, tuple[Tensor, int, int]]:
    """Each matrix of the checkpoint, as far as it is here: numbers, dim and start of the cut."""
    return {
        matrix.name: (weight_of(layer)[matrix.rows, matrix.columns], matrix.dim, matrix.start)
        for key, layer in linear_layers(model).items()
        for matrix in layer.matrices(key)
    }


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_a_model_that_is_quantized_while_loading(
    kind: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The tokens of transformers on the rounded numbers, from a quarter of the bytes."""
    source = make_checkpoint("qwen3", **SIZES)
    plain = Path(shutil.copytree(source, tmp_path / "plain"))
    rounded = {
        name: part for name, (part, _, _) in _matrices(load(source, quantization=kind)).items()
    }
    tensors = load_file(source / "model.safetensors")
    for name, numbers in rounded.items():
        if f"{name}.weight" in tensors:
            tensors[f"{name}.weight"] = numbers.contiguous()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    with LLM(source, num_kv_blocks=32, max_model_len=64, quantization=kind) as llm:
        for prompt, tokens in zip(PROMPTS, answers(llm), strict=True):
            assert_same_greedy(plain, prompt, tokens, 12)
        layers = llm.engine.executor.runner.model.model.layers
        floats = sum(tensors[f"{name}.weight"].nbytes for name in rounded if ".layers." in name)
        assert layers.get_submodule("0") is not None
        num_bytes = sum(tensor.nbytes for tensor in [*layers.parameters(), *layers.buffers()])
        assert num_bytes < floats / 2


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused(
    kind: str, value: float, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Rounded, it would be a code like any other."""
    folder = Path(shutil.copytree(make_checkpoint("llama", **SIZES), tmp_path / "damaged"))
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    tensors[name][3, 5] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"{name} holds a number that is NaN or infinite"):
        load(folder, quantization=kind)


def test_a_tensor_is_quantized_when_it_is_read(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than one matrix in floating point is there at a time."""
    from nanoserve.extras.quantization import online

    alive: list[Any] = []

    def watched(weight: Tensor) -> Any:
        assert not any(ref() is not None for ref in alive), "the last matrix is still there"
        alive.append(weakref.ref(weight))
        return quantize_int8(weight)

    monkeypatch.setitem(online.QUANTIZE, "int8", watched)
    load(make_checkpoint("llama"), quantization="int8")
    assert len(alive) == 2 * 7


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8", "gptq, act-order"])
def test_dummy_weights(name: str, make_quantized: Callable[..., tuple[Path, Path]]) -> None:
    quantized, _ = make_quantized(name)
    with LLM(quantized, num_kv_blocks=32, max_model_len=64, load_format="dummy") as llm:
        assert all(len(tokens) == 12 for tokens in answers(llm))


# -- which layers --


def test_layers_that_stay_in_floating_point(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """By name or by a part of it; a layer that is computed with others only with them."""
    source = make_checkpoint("llama", **SIZES)
    for number, (ignored, config) in enumerate(
        [
            ("layers.1.mlp", awq(modules_to_not_convert=["model.layers.1.mlp", "lm_head"])),
            ("self_attn", awq(modules_to_not_convert=["self_attn"])),
            ("down_proj", gptq(dynamic={r"-:.*\.down_proj": {}})),
            (
                "mlp",
                gptq(
                    modules_in_block_to_quantize=[
                        ["self_attn.q_proj", "self_attn.k_proj"],
                        ["self_attn.v_proj", "self_attn.o_proj"],
                    ]
                ),
            ),
        ]
    ):
        quantized, plain = write_checkpoint(source, tmp_path / str(number), *config, ignored)
        expected = linear_layers(load(plain))
        for key, layer in linear_layers(load(quantized)).items():
            is_float = ignored in key or key in ("lm_head", "model.embed_tokens")
            assert hasattr(layer, "quantized_weight") != is_float, key
            assert torch.equal(weight_of(layer), weight_of(expected[key])), key
    quantized, _ = write_checkpoint(
        source, tmp_path / "part", *awq(modules_to_not_convert=["k_proj"]), "k_proj"
    )
    with pytest.raises(ValueError, match=r"q_proj.*k_proj.*one product"):
        load(quantized)


def test_rules_of_gptq_for_some_layers(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """8 bits and other groups in one layer."""
    _, four = gptq()
    config, eight = gptq(bits=8, group_size=32)
    config |= {"bits": 4, "group_size": 16}
    config["dynamic"] = {r"+:.*layers\.1\..*": {"bits": 8, "group_size": 32}}

    def writer(name: str, weight: Tensor) -> Any:
        return (eight if "layers.1." in name else four)(name, weight)

    quantized, plain = write_checkpoint(make_checkpoint("llama", **SIZES), tmp_path, config, writer)
    expected = linear_layers(load(plain))
    for key, layer in linear_layers(load(quantized)).items():
        assert torch.equal(weight_of(layer), weight_of(expected[key])), key


def test_a_rule_of_gptq_is_for_the_beginning_of_a_name() -> None:
    """As in GPTQModel, which matches and does not search."""
    dynamic = {"-:mlp": {}, r"-:.*\.o_proj": {}}
    section = Section({"bits": 4, "group_size": 16, "dynamic": dynamic}, "config.json")
    config = GPTQConfig.from_config(section)
    assert config.method_of("model.layers.0.mlp.up_proj") is not None
    assert config.method_of("model.layers.0.self_attn.o_proj") is None


@pytest.mark.parametrize(("num_inputs", "num_groups"), [(128, 2), (96, 3), (80, 5), (72, 1)])
def test_groups_of_int4_while_loading(num_inputs: int, num_groups: int) -> None:
    """64 inputs, or what divides them and the row; less than 16 are not worth a scale."""
    layer_config = LayerConfig(quant_config=OnlineConfig("int4"))
    layer = ColumnParallelLinear(num_inputs, {"x": 8}, bias=False, layer_config=layer_config)
    weight: Any = layer.quantized_weight
    assert weight.scales.shape == (8, num_groups)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_quantized_head(tp_size: int, make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """The vocabulary is divided among ranks, in whole int32 numbers."""
    source = make_checkpoint("llama", **SIZES)
    quantized, plain = write_checkpoint(source, tmp_path, *gptq(lm_head=True), with_head=True)
    for rank in range(tp_size):
        head = load(quantized, rank, tp_size).lm_head
        expected = load(plain, rank, tp_size).lm_head
        assert torch.equal(weight_of(head), expected.weight)
    with LLM(quantized, num_kv_blocks=32, max_model_len=64) as llm:
        for prompt, tokens in zip(PROMPTS, answers(llm), strict=True):
            assert_same_greedy(plain, prompt, tokens, 12)


def test_names_and_patterns() -> None:
    names = ("lm_head", "model.layers.3.mlp.gate", "re:.*visual.*", "mlp.up_proj")
    yes = ["lm_head", "model.layers.3.mlp.gate", "a.visual.b", "model.layers.0.mlp.up_proj"]
    no = ["model.layers.3.mlp.gate_proj", "model.layers.30.mlp.gate", "lm", "x.lm_heads", ""]
    assert all(matches(name, names) for name in yes)
    assert not any(matches(name, names) for name in no)


@given(st.sampled_from(["(a+)+", "(a|aa)*b", ".*.*.*.*.*x", "(", "a{2}{3}(", "(.*)*$", "x" * 2000]))
def test_patterns_that_could_hang_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"^config\.json: .*"):
        check_pattern(pattern, "config.json")


# -- errors --


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("gptq", {"bits": 3}, "bits is 3; allowed: 4 or 8"),
        ("gptq", {"bits": None}, "has no 'bits'"),
        ("gptq", {"bits": True}, "bits is True"),
        ("gptq", {"group_size": 0}, "group_size is 0; allowed: -1 or an even int"),
        ("gptq", {"group_size": 48}, "64 inputs .* 1 ranks.*groups of 48.*another quantization"),
        (
            "gptq",
            {"group_size": 32},
            r"qzeros in model.safetensors has shape \(4, \d+\), expected \(2,",
        ),
        ("gptq", {"desc_act": "x"}, "desc_act is 'x'; allowed: true or false"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; allowed: gptq"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format is True"),
        ("gptq", {"dynamic": {"+:(a+)+": {}}}, "could take very long"),
        ("gptq", {"dynamic": {f"-:{n}": {} for n in range(2000)}}, "so many regular expressions"),
        ("fp8", {"ignored_layers": ["re:.*a.*b.*c.*d"] * 80}, "so many regular expressions"),
        ("gptq", {"dynamic": {"+:.*": {"bits": 5}}}, r"dynamic.*bits is 5"),
        ("gptq", {"dynamic": {"+:.*": 5}}, "allowed: an object"),
        ("gptq", {"quant_method": "exl2"}, r"quantization_config \(exl2\).*supported: awq"),
        ("gptq", {"quant_method": None}, "no method named"),
        ("awq", {"bits": 8}, "bits is 8; allowed: an int from 4 to 4"),
        ("awq", {"version": "gemv"}, "version is 'gemv'; allowed: gemm"),
        ("awq", {"zero_point": False}, "zero_point is False; allowed: true"),
        ("awq", {"modules_to_not_convert": "x"}, "allowed: a list"),
        ("fp8", {"activation_scheme": "x"}, "allowed: 'dynamic' or 'static'"),
        ("fp8", {"activation_scheme": "static"}, "missing: .*input_scale"),
        ("fp8", {"weight_block_size": [1, 2, 3]}, r"allowed: \[outputs, inputs\]"),
        ("fp8", {"weight_block_size": [32, 48]}, "64 inputs.*groups of 48"),
    ],
)
def test_what_config_json_may_not_say(
    name: str,
    keys: dict[str, Any],
    message: str,
    make_quantized: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load(change(make_quantized(name)[0], tmp_path, **keys))


def test_what_the_user_may_ask_for(
    make_quantized: Callable[..., tuple[Path, Path]], make_checkpoint: MakeCheckpoint
) -> None:
    quantized, plain = make_quantized("awq")
    for folder, wanted, message in [
        (quantized, "gptq", r"has quantization_config \(awq\). Leave quantization out"),
        (quantized, "int8", "the weights are quantized already"),
        (plain, "awq", "has no quantization_config.*one of fp8, int8, int4"),
        (make_checkpoint("gpt2"), "int8", "through transformers"),
    ]:
        with pytest.raises(ValueError, match=f"(?s){message}"):
            load(folder, quantization=wanted)
    assert EngineConfig(quantization="gptq_marlin").quantization == "gptq"
    with pytest.raises(ValueError, match="quantization is 'bitsandbytes'; allowed: fp8, int8"):
        EngineConfig(quantization="bitsandbytes")


@pytest.mark.parametrize(
    ("name", "file", "renamed"),
    [
        ("gptq", "quantize_config.json", {}),
        ("awq", "quant_config.json", {"bits": "w_bit", "group_size": "q_group_size"}),
    ],
)
def test_files_beside_config_json_are_read_if_asked_for(
    name: str,
    file: str,
    renamed: dict[str, str],
    make_quantized: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    """Where older tools wrote what is in config.json today."""
    quantized, plain = make_quantized(name)
    copy = Path(shutil.copytree(quantized, tmp_path / "old"))
    settings = json.loads((copy / "config.json").read_text())
    section = settings.pop("quantization_config")
    del section["quant_method"]
    (copy / file).write_text(json.dumps({renamed.get(k, k): v for k, v in section.items()}))
    (copy / "config.json").write_text(json.dumps(settings))
    expected = linear_layers(load(plain))
    for key, layer in linear_layers(load(copy, quantization=name)).items():
        assert torch.equal(weight_of(layer), weight_of(expected[key])), key
    with pytest.raises(ValueError, match="unexpected"):
        load(copy)


KEYS = [
    *("bits", "group_size", "desc_act", "sym", "checkpoint_format", "dynamic", "lm_head"),
    *("modules_in_block_to_quantize", "zero_point", "version", "modules_to_not_convert"),
    *("activation_scheme", "weight_block_size", "ignored_layers", "fmt", "kv_cache_scheme"),
]


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8"])
@given(keys=st.dictionaries(st.sampled_from(KEYS), any_json(KEYS), max_size=3))
@settings(max_examples=25)
def test_any_config_is_read_or_refused(
    name: str, keys: dict[str, Any], make_quantized: Callable[..., tuple[Path, Path]]
) -> None:
    folder = make_quantized(name)[0]
    read_or_refuse(folder, lambda section: section.update(keys))


Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("gptq", lambda t: t.pop(f"{Q_PROJ}.scales"), f"missing: {Q_PROJ}.scales"),
        ("gptq", lambda t: t.update({f"{Q_PROJ}.x": torch.ones(1)}), f"unexpected: {Q_PROJ}.x"),
        ("gptq", lambda t: t[f"{Q_PROJ}.g_idx"].fill_(3), "g_idx does not give each group 16"),
        ("gptq", lambda t: t[f"{Q_PROJ}.g_idx"].sub_(1), "g_idx does not give each group 16"),
        ("gptq", lambda t: t[f"{Q_PROJ}.g_idx"].copy_(t[f"{Q_PROJ}.g_idx"].flip(0)), "its own"),
        ("gptq", lambda t: t.update({f"{Q_PROJ}.bias": torch.ones(64)}), "bias is not zero"),
        (
            "gptq, act-order",
            lambda t: t[f"{Q_PROJ}.g_idx"].copy_(t[f"{Q_PROJ}.g_idx"].roll(1)),
            "differs from that of another",
        ),
        (
            "gptq, act-order",
            lambda t: t.pop(f"{Q_PROJ}.g_idx"),
            f"missing: {Q_PROJ}.g_idx",
        ),
        (
            "gptq",
            lambda t: t.update({f"{Q_PROJ}.qweight": t[f"{Q_PROJ}.qweight"].float()}),
            "qweight in .* has type F32; allowed: I32",
        ),
        (
            "fp8",
            lambda t: t.update({f"{Q_PROJ}.weight": t[f"{Q_PROJ}.weight"].float()}),
            "weight in .* has type F32; allowed: F8_E4M3",
        ),
        *(
            (
                "fp8",
                lambda t, code=code: t[f"{Q_PROJ}.weight"].view(torch.uint8)[3, 5:6].fill_(code),
                "q_proj.weight holds a number that is NaN",
            )
            for code in (0x7F, 0xFF)
        ),
        (
            "fp8",
            lambda t: t.update({f"{Q_PROJ}.weight_scale": torch.ones(2)}),
            r"weight_scale in .* has shape \(2,\)",
        ),
    ],
)
def test_damaged_files(
    name: str,
    edit: Callable[[dict[str, Tensor]], Any],
    message: str,
    make_quantized: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    copy = Path(shutil.copytree(make_quantized(name)[0], tmp_path / "damaged"))
    tensors = load_file(copy / "model.safetensors")
    edit(tensors)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load(copy)


def test_what_a_file_may_lack_or_have(
    make_quantized: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    """No g_idx; a bias of zeros; scales of somebody's KV cache."""
    quantized, plain = make_quantized("gptq")
    copy = Path(shutil.copytree(quantized, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if "g_idx" not in name}
    tensors[f"{Q_PROJ}.bias"] = torch.zeros(64)
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    expected = linear_layers(load(plain))
    for key, layer in linear_layers(load(copy)).items():
        assert torch.equal(weight_of(layer), weight_of(expected[key])), key


def test_matrices_of_one_product_share_the_largest_input_scale(
    make_quantized: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    """In whatever order the file has them. It is used on GPUs with FP8 units only."""
    quantized, _ = make_quantized("fp8, static")
    for number, largest in enumerate(("q_proj", "k_proj", "v_proj")):
        copy = Path(shutil.copytree(quantized, tmp_path / str(number)))
        tensors = load_file(copy / "model.safetensors")
        for part in ("q_proj", "k_proj", "v_proj"):
            scale = tensors[f"model.layers.0.self_attn.{part}.input_scale"]
            scale.fill_(2.0 if part == largest else 0.5)
        save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        layer = linear_layers(load(copy))["model.layers.0.self_attn.qkv_proj"]
        assert layer.quantized_weight.input_scale.item() == 2.0, largest


def test_cuts_through_what_belongs_together(
    make_quantized: Callable[..., tuple[Path, Path]], make_checkpoint: MakeCheckpoint
) -> None:
    """The message has the sizes."""
    quantized, _ = make_quantized("awq, large groups", intermediate_size=96)
    with pytest.raises(ValueError, match=r"down_proj has 48 inputs on each of 2 ranks.*of 32"):
        load(quantized, 0, 2)
    quantized, _ = make_quantized("fp8, blocks")
    with pytest.raises(ValueError, match=r"q_proj has 64 outputs.*has 16 from number 16.*32 share"):
        load(quantized, 1, 4)
    quantized, _ = make_quantized("fp8", "mixtral", num_local_experts=4, intermediate_size=100)
    with pytest.raises(ValueError, match="each expert has 50 of 100 rows on each of 2 ranks"):
        load(quantized, 0, 2)


def test_without_the_chapter_the_core_says_so(
    make_quantized: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nanoserve.extras.quantization.base_config", None)
    with pytest.raises(
        ValueError, match=r"quantization_config \(awq\).*extras/quantization is not"
    ):
        load(make_quantized("awq")[0])
