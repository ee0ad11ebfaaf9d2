"""Every architecture and option against transformers: same checkpoint, same tokens."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import assert_same_greedy, greedy_tokens, reference_logits

from nanoserve import LLM, SamplingParams
from nanoserve.attention import StepMetadata
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.kernels.selector import make_layer_config
from nanoserve.layers import LayerConfig
from nanoserve.models.decoder import CausalLM
from nanoserve.models.loader import load_model
from nanoserve.models.registry import ModelRegistry
from nanoserve.parallel import ParallelState

MakeCheckpoint = Callable[..., Path]
MAX_TOKENS = 10
LENGTHS = (1, 2, 15, 16, 17, 60, 300)  # around a block of 16, and many chunks long
# A budget so small that prompts run in chunks of at most 40 tokens, beside sequences that decode.
TIGHT: dict[str, Any] = {"max_num_batched_tokens": 40, "max_num_seqs": 4, "block_size": 4}

QWEN3_MOE: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-eps": ("llama", {"rms_norm_eps": 0.3}),
    "mistral-window": ("mistral", {"sliding_window": 11}),
    "mistral-window-of-one": ("mistral", {"sliding_window": 1}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
    "qwen2-window-not-used": ("qwen2", {"use_sliding_window": False, "sliding_window": 9}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-head-dim": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-attention-bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mixtral-window": ("mixtral", {"num_local_experts": 4, "sliding_window": 11}),
    "mixtral-one-of-three": (
        "mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "intermediate_size": 50},
    ),
    "qwen3-moe": ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3-moe-weights-as-they-are": ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": False}),
    "qwen3-moe-some-layers": (
        "qwen3_moe",
        {**QWEN3_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    "qwen3-moe-window": (
        "qwen3_moe",
        {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 9},
    ),
}

ORIGINAL = 512  # the length before any stretching, of the models below
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.5 * i for i in range(8)],
        "original_max_position_embeddings": ORIGINAL,
    },
}


def prompts_of(lengths: tuple[int, ...], vocab_size: int = 320) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(2, vocab_size) for _ in range(length)] for length in lengths]


def answers(folder: Path, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Greedy answers of the whole engine, all prompts in one call."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with LLM(folder, **{"dtype": "float32", "num_kv_blocks": 1000, **options}) as llm:
        return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


def assert_all_same_greedy(
    folder: Path, lengths: tuple[int, ...] = LENGTHS, **options: Any
) -> None:
    prompts = prompts_of(lengths)
    for prompt, tokens in zip(prompts, answers(folder, prompts, **options), strict=True):
        assert_same_greedy(folder, prompt, tokens, MAX_TOKENS)


def edit_config(source: Path, target: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint, its config.json edited."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    file = target / "config.json"
    config = json.loads(file.read_text())
    edit(config)
    file.write_text(json.dumps(config))
    return target


# ------------------------------------------------------------------------------ same tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(
    make_checkpoint: MakeCheckpoint, name: str
) -> None:
    model_type, overrides = FAMILIES[name]
    assert_all_same_greedy(make_checkpoint(model_type, **overrides), **TIGHT)


def test_all_prompts_in_one_step(make_checkpoint: MakeCheckpoint) -> None:
    assert_all_same_greedy(make_checkpoint("qwen3", head_dim=16))


@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_type(make_checkpoint: MakeCheckpoint, rope: str) -> None:
    """Two types depend on the length of the text; up to the original length they agree."""
    length = {"max_position_embeddings": ORIGINAL}
    if rope == "longrope":
        length = {"max_position_embeddings": 2 * ORIGINAL}
    folder = make_checkpoint("llama", rope_parameters=ROPES[rope], **length)
    assert_all_same_greedy(folder, max_model_len=ORIGINAL, **TIGHT)


@pytest.mark.parametrize("rope", ROPES)
def test_both_config_layouts_say_the_same(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, rope: str
) -> None:
    """transformers 5 writes rope_parameters; before, rope_theta stood beside rope_scaling."""

    def to_old_layout(config: dict[str, Any]) -> None:
        settings = config.pop("rope_parameters")
        config["rope_theta"] = settings.pop("rope_theta")
        if settings["rope_type"] != "default":
            config["rope_scaling"] = {"type": settings.pop("rope_type"), **settings}
        config["torch_dtype"] = config.pop("dtype")

    folder = make_checkpoint(
        "llama", rope_parameters=ROPES[rope], max_position_embeddings=2 * ORIGINAL
    )
    old = edit_config(folder, tmp_path / "old", to_old_layout)
    prompts = prompts_of((5, 100))
    assert answers(old, prompts) == answers(folder, prompts)


def test_an_old_qwen2_config_has_no_layer_types(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    model_type, overrides = FAMILIES["qwen2-window"]
    folder = make_checkpoint(model_type, **overrides)
    old = edit_config(folder, tmp_path / "old", lambda config: config.pop("layer_types"))
    prompts = prompts_of((5, 100))
    assert answers(old, prompts) == answers(folder, prompts)


def test_an_old_qwen2_config_names_a_window_that_is_not_used(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """As Qwen2.5's own files do: "use_sliding_window": false beside a sliding_window."""

    def to_old_layout(config: dict[str, Any]) -> None:
        del config["layer_types"]
        config.update(use_sliding_window=False, sliding_window=9, max_window_layers=0)

    folder = make_checkpoint("qwen2")
    old = edit_config(folder, tmp_path / "old", to_old_layout)
    prompts = prompts_of((5, 100))
    assert answers(old, prompts) == answers(folder, prompts)


def test_layer_types_of_a_mistral_config_count(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """transformers reads such a config as Ministral's."""
    folder = make_checkpoint("mistral", sliding_window=8, num_hidden_layers=3)
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    mixed = edit_config(folder, tmp_path / "mixed", lambda config: config.update(layer_types=kinds))
    assert_all_same_greedy(mixed)


def test_length_dependent_ropes_are_fixed_by_max_model_len(
    make_checkpoint: MakeCheckpoint,
) -> None:
    """In a stretched model short texts, too, use the stretched frequencies: the output of a request
    does not depend on its batch. transformers decides by the longest text of the batch."""
    folder = make_checkpoint(
        "llama", rope_parameters=ROPES["longrope"], max_position_embeddings=2 * ORIGINAL
    )
    short, long = prompts_of((40, ORIGINAL + 20))
    alone = answers(folder, [short])
    assert answers(folder, [short, long])[0] == alone[0]
    for max_model_len, key in ((ORIGINAL, "short_factor"), (2 * ORIGINAL, "long_factor")):
        frequencies = load(folder, max_model_len).model.rotary_emb.table[1, :8]
        plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
        scaling = (1 + torch.tensor(2.0).log() / torch.tensor(float(ORIGINAL)).log()).sqrt()
        expected = (plain / torch.tensor(ROPES["longrope"][key])).cos() * scaling
        torch.testing.assert_close(frequencies, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_checkpoints_compute_in_float32_on_a_cpu(
    make_checkpoint: MakeCheckpoint, dtype: str
) -> None:
    folder = make_checkpoint("qwen3", dtype=dtype, head_dim=16)
    assert_all_same_greedy(folder, dtype="auto")


def test_bfloat16_runs_and_stays_near(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint("qwen3", dtype="bfloat16", head_dim=16)
    prompts = prompts_of((1, 16, 60))
    for prompt, tokens in zip(prompts, answers(folder, prompts, dtype="bfloat16"), strict=True):
        assert_same_greedy(folder, prompt, tokens, MAX_TOKENS, dtype=torch.bfloat16)


def test_sharded_and_single_file_checkpoints_give_the_same(make_checkpoint: MakeCheckpoint) -> None:
    single, sharded = make_checkpoint("llama"), make_checkpoint("llama", shards=3)
    assert len(list(single.glob("*.safetensors"))) == 1
    assert len(list(sharded.glob("*.safetensors"))) > 1
    prompts = prompts_of((3, 50))
    assert answers(sharded, prompts) == answers(single, prompts)
    assert_all_same_greedy(sharded, (3, 50))


def test_a_batch_of_many_prompts(make_checkpoint: MakeCheckpoint) -> None:
    """More prompts than rows, some of them equal or prefixes of others, on few blocks."""
    prompts = prompts_of((1, 7, 33, 64, 64, 200, 3, 18, 90))
    prompts += [prompts[5], prompts[5][:96], [*prompts[5][:97], 5, 6]]
    folder = make_checkpoint("qwen3", head_dim=16)
    tokens = answers(folder, prompts, num_kv_blocks=40, max_num_seqs=5, max_num_batched_tokens=50)
    for prompt, answer in zip(prompts, tokens, strict=True):
        assert_same_greedy(folder, prompt, answer, MAX_TOKENS)


def test_generation_ends_at_every_eos_token_the_checkpoint_names(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Both generation_config.json's and config.json's; the EOS token is part of the answer."""
    folder = make_checkpoint("llama")
    first, second = prompts_of((9, 21))
    eos = [greedy_tokens(folder, first, 5)[3], greedy_tokens(folder, second, 5)[4]]
    other = edit_config(folder, tmp_path / "eos", lambda config: config.update(eos_token_id=eos))
    file = other / "generation_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "eos_token_id": eos}))
    for prompt, tokens in zip((first, second), answers(other, [first, second]), strict=True):
        assert tokens[-1] in eos
        assert_same_greedy(other, prompt, tokens, MAX_TOKENS)


# ------------------------------------------------------------------------------ the model itself


def load(
    folder: Path, max_model_len: int = 64, layer_config: LayerConfig | None = None, **build: Any
) -> CausalLM:
    model_config = ModelConfig.from_folder(folder)
    config = EngineConfig(model=str(folder), max_model_len=max_model_len).resolve(model_config)
    layer_config = layer_config or LayerConfig(**build)
    model = load_model(config, model_config, layer_config, use_tqdm=False)
    assert isinstance(model, CausalLM)
    return model


PLAIN = LayerConfig()
CHOSEN = make_layer_config(torch.device("cpu"), torch.float32, ParallelState())


@pytest.mark.parametrize("layer_config", [PLAIN, CHOSEN], ids=["plain", "chosen"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_all_positions(
    make_checkpoint: MakeCheckpoint, name: str, layer_config: LayerConfig
) -> None:
    """The forward pass step by step: caches, metadata, hidden states, logits of chosen tokens; by
    the definition of attention and plain layers, and by what a CPU runs."""
    model_type, overrides = FAMILIES[name]
    folder = make_checkpoint(model_type, **overrides)
    [prompt] = prompts_of((50,))
    model = load(folder, layer_config=layer_config)
    caches = [
        spec.allocate(4, 16, torch.float32, torch.device("cpu")) for spec in model.kv_cache_specs()
    ]
    block_table = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32)
    positions = torch.arange(50)
    metadata = StepMetadata(
        slot_mapping=block_table[0, positions // 16].long() * 16 + positions % 16,
        block_table=block_table,
        query_start_loc=torch.tensor([0, 50], dtype=torch.int32),
        seq_lens=torch.tensor([50], dtype=torch.int32),
    )
    with torch.inference_mode():
        hidden = model(torch.tensor(prompt), positions, caches, metadata)
        logits = model.compute_logits(hidden)
        some = model.compute_logits(hidden[[3, 49]])
    expected = reference_logits(folder, prompt)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * float(expected.std()))
    torch.testing.assert_close(some, logits[[3, 49]])


def test_kv_cache_specs_say_what_each_layer_keeps(make_checkpoint: MakeCheckpoint) -> None:
    model_type, overrides = FAMILIES["qwen2-window"]
    model = load(make_checkpoint(model_type, **overrides))
    assert [spec.sliding_window for spec in model.kv_cache_specs()] == [None, 9, 9]
    assert {
        (spec.num_kv_heads, spec.key_dim, spec.value_dim) for spec in model.kv_cache_specs()
    } == {(2, 16, 16)}
    halves = load(make_checkpoint(model_type, **overrides), parallel=ParallelState(1, 2))
    assert [spec.num_kv_heads for spec in halves.kv_cache_specs()] == [1, 1, 1]


# ------------------------------------------------------------------------------ refused by name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"architectures": ["UnknownForCausalLM"]},
            "UnknownForCausalLM.*" + ", ".join(ModelRegistry.architectures()),
        ),
        ({"architectures": None}, "none.*" + ", ".join(ModelRegistry.architectures())),
        ({"hidden_act": "gelu"}, "gelu.*silu"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 .*num_key_value_heads 3"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral.*yarn"),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "spiral.*yarn"),
    ],
)
def test_what_is_not_supported_is_named(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = edit_config(
        make_checkpoint("llama"), tmp_path / "other", lambda config: config.update(change)
    )
    with pytest.raises(ValueError, match=words):
        LLM(folder, num_kv_blocks=10)


@pytest.mark.parametrize(
    ("what", "sizes", "tp_size"),
    [
        ("attention heads", {"vocab_size": 321}, 3),
        (
            "key and value heads",
            {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 96},
            4,
        ),
        ("gate_proj", {"intermediate_size": 113}, 2),
    ],
)
def test_what_cannot_be_divided_among_ranks_is_named(
    make_checkpoint: MakeCheckpoint, what: str, sizes: dict[str, int], tp_size: int
) -> None:
    """The vocabulary can: it is padded."""
    folder = make_checkpoint("llama", **sizes)
    with pytest.raises(ValueError, match=f"{what}: .*{tp_size} ranks"):
        load(folder, parallel=ParallelState(0, tp_size))
