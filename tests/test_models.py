"""Every family answers as transformers does; what would answer wrongly is refused.

One engine for each family does several things at once: prompts in chunks beside sequences that
decode, prefixes from the cache, preemption (there are few blocks).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same_greedy, reference_logits
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoserve import LLM, SamplingParams
from nanoserve.layers import LayerConfig, RotaryEmbedding, silu_and_mul
from nanoserve.models.config import ModelConfig
from nanoserve.models.families import LlamaForCausalLM
from nanoserve.models.moe import (
    grouped_matmul_blocks,
    grouped_matmul_torch,
    route,
    run_experts_grouped,
)
from nanoserve.models.registry import ModelRegistry
from nanoserve.models.rope import rope_frequencies

MakeCheckpoint = Callable[..., Path]
NUM_TOKENS = 8
PROMPTS = [[(7 * i * i + 3 * i) % 311 + 2 for i in range(n)] for n in (1, 5, 40, 33)]
PROMPTS += [[*PROMPTS[2][:24], 9, 8]]
OPTIONS = {"block_size": 4, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 26}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "mistral": ("mistral", {"sliding_window": 11, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
        },
    ),
}
FALLBACK: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),  # learnt positions, other names in config.json
    "opt": ("opt", {"ffn_dim": 112, "word_embed_proj_dim": 32}),  # positions begin at 2
    "phi3": ("phi3", {"sliding_window": 11}),
    "gpt_neox": ("gpt_neox", {}),  # a quarter of each head is turned
    # Soft caps of scores and of logits, every second layer with a window.
    "gemma2": (
        "gemma2",
        {
            "head_dim": 24,
            "sliding_window": 11,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma3": ("gemma3_text", {"head_dim": 24, "sliding_window": 11}),  # two ropes
    "gpt_bigcode": ("gpt_bigcode", {"multi_query": True}),
    # Latent attention: keys of 16 + 8, values of 16, a scale that yarn changes; shared experts.
    "deepseek_v2": (
        "deepseek_v2",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "rope_parameters": {**YARN, "original_max_position_embeddings": 256},
        },
    ),
    "llama": ("llama", {}),
}


def check_like_transformers(
    folder: Path, dtype: torch.dtype = torch.float32, tolerance: float = 2e-4, **options: Any
) -> None:
    """Greedy tokens, and the log-probabilities of the prompts, are those of transformers."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, prompt_logprobs=0)
    name = str(dtype).removeprefix("torch.")
    with LLM(folder, dtype=name, max_model_len=64, **{**OPTIONS, **options}) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        logprobs = reference_logits(folder, prompt, dtype).log_softmax(-1)[:-1]
        expected = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        entries = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        found = torch.tensor([entry[token].logprob for entry, token in entries])
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        tokens = list(output.outputs[0].token_ids)
        assert_same_greedy(folder, prompt, tokens, NUM_TOKENS, dtype)


@pytest.mark.parametrize("name", NATIVE)
def test_families_of_our_own(name: str, make_checkpoint: MakeCheckpoint) -> None:
    family, settings = NATIVE[name]
    check_like_transformers(make_checkpoint(family, **settings))


@pytest.mark.parametrize("name", FALLBACK)
def test_families_of_transformers(name: str, make_checkpoint: MakeCheckpoint) -> None:
    family, settings = FALLBACK[name]
    check_like_transformers(make_checkpoint(family, **settings), model_impl="transformers")


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.06), ("float16", 0.01)])
def test_half_precision(
    family: str, dtype: str, tolerance: float, make_checkpoint: MakeCheckpoint
) -> None:
    check_like_transformers(make_checkpoint(family), getattr(torch, dtype), tolerance)


def test_files_in_shards_and_a_padded_context(make_checkpoint: MakeCheckpoint) -> None:
    """Several files with an index; max_model_len of the checkpoint; plain and fast kernels."""
    folder = make_checkpoint("llama", shards=3, num_hidden_layers=3)
    assert len(list(folder.glob("*.safetensors"))) > 1
    for kernels in ("plain", "fast"):
        check_like_transformers(folder, kernels=kernels, attention_backend="auto")


@pytest.mark.parametrize("impl", ["nanoserve", "transformers"])
def test_values_over_those_of_config_json(
    impl: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """hf_overrides gives what a file with these values gives."""
    over = {"rope_parameters": {**YARN, "original_max_position_embeddings": 64}}
    over |= {"max_position_embeddings": 300, "rms_norm_eps": 0.5}
    folder = make_checkpoint("llama")
    edited = shutil.copytree(folder, tmp_path / "edited")
    config = json.loads((folder / "config.json").read_text())
    (edited / "config.json").write_text(json.dumps({**config, **over}))
    params, found = SamplingParams(temperature=0, max_tokens=9, logprobs=0), []
    for where, values in ((edited, None), (folder, over), (folder, None)):
        options = {"hf_overrides": values, "skip_tokenizer_init": True, "model_impl": impl}
        with LLM(where, **options, **OPTIONS) as llm:
            found.append([llm.llm_engine.config.max_model_len])
            found[-1] += [o.outputs[0].logprobs for o in llm.generate(PROMPTS, params)]
    assert found[0] == found[1] != found[2]
    with pytest.raises(TypeError, match="hf_overrides"):
        LLM(folder, hf_overrides="rope")


# -- rotary embedding --

LENGTHS = {"max_position_embeddings": 256}
ORIGINAL = {"original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"long_factor": [1.0 + i for i in range(8)], "short_factor": [1.0 + i / 8 for i in range(8)]}
ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 500000.0},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    {"rope_scaling": {**LLAMA3, **ORIGINAL}, "rope_theta": 500000.0},
    {"rope_parameters": {**YARN, **ORIGINAL}},
    {"rope_parameters": {**YARN, **ORIGINAL, "mscale": 0.7, "mscale_all_dim": 0.9}},
    {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LONG, **ORIGINAL}},
]


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_rope_is_that_of_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    """At every position of the longest text: cos, and sin with the sign of the first half."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = {"vocab_size": 9, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    hf = {"architectures": ["LlamaForCausalLM"], "intermediate_size": 9, **sizes, **LENGTHS, **rope}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    config = ModelConfig.from_folder(tmp_path)
    frequencies, scaling = rope_frequencies(16, config.rope_parameters, 256)
    table = RotaryEmbedding(frequencies, scaling, 256, LayerConfig())
    positions = torch.arange(256)
    cos, sin = table(positions)
    expected = LlamaRotaryEmbedding(LlamaConfig.from_dict(hf))
    their_cos, their_sin = expected(torch.zeros(1), positions[None])
    sign = torch.tensor([-1.0] * 8 + [1.0] * 8)
    torch.testing.assert_close(cos[:, 0], their_cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[:, 0], their_sin[0] * sign, rtol=0, atol=1e-6)


# -- experts --


def run_experts_loop(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, expert_ids: Tensor
) -> Tensor:
    """The definition: each expert on the tokens that chose it, one after the other."""
    output = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        tokens, places = (expert_ids == expert).nonzero(as_tuple=True)
        y = silu_and_mul(x[tokens] @ gate_up[expert].T) @ down[expert].T
        output.index_add_(0, tokens, y * weights[tokens, places, None])
    return output


@given(
    num_experts=st.integers(1, 6),
    num_tokens=st.integers(0, 12),
    top_k=st.integers(1, 6),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("matmul", [grouped_matmul_torch, grouped_matmul_blocks])
def test_grouped_experts_are_a_loop_over_experts(
    matmul: Callable[[Tensor, Tensor, Tensor], Tensor],
    num_experts: int,
    num_tokens: int,
    top_k: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(num_experts, 16, 16, generator=generator)
    down = torch.randn(num_experts, 16, 8, generator=generator)
    x = torch.randn(num_tokens, 16, generator=generator)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    weights, expert_ids = route(logits, min(top_k, num_experts), normalize=True)
    expected = run_experts_loop(x, gate_up, down, weights, expert_ids)
    found = run_experts_grouped(x, gate_up, down, weights, expert_ids, matmul)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# -- what is refused, and what is not needed --


def copy(folder: Path, tmp_path: Path, **keys: Any) -> Path:
    """A copy with other keys in config.json; None: without this key."""
    new = Path(shutil.copytree(folder, tmp_path / "copy"))
    hf = {**json.loads((new / "config.json").read_text()), **keys}
    text = json.dumps({key: value for key, value in hf.items() if value is not None})
    (new / "config.json").write_text(text)
    return new


NORM = "model.norm.weight"
EDITS: dict[str, Callable[[dict[str, Tensor]], Any]] = {  # what is named -> what was done
    "other.weight": lambda tensors: tensors.update({"other.weight": tensors[NORM].clone()}),
    NORM: lambda tensors: tensors.pop(NORM),
    "norm.weight": lambda tensors: tensors.update({NORM: tensors[NORM][:-1].clone()}),
    "I8": lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.int8)}),
}


@pytest.mark.parametrize("impl", ["nanoserve", "transformers"])
@pytest.mark.parametrize("named", EDITS)
def test_weights_that_do_not_fit_are_named(
    named: str, impl: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    file = copy(make_checkpoint("llama"), tmp_path) / "model.safetensors"
    tensors = load_file(file)
    EDITS[named](tensors)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=named):
        LLM(file.parent, model_impl=impl)


def test_computed_tensors_may_be_there(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    file = copy(make_checkpoint("llama"), tmp_path) / "model.safetensors"
    tensors = load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(tensors, file, {"format": "pt"})
    with LLM(file.parent, **OPTIONS) as llm:
        assert llm.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False)


def test_files_that_are_damaged_or_not_there(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Pickles beside them are never read."""
    file = copy(make_checkpoint("llama"), tmp_path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        LLM(file.parent)
    file.rename(file.with_name("pytorch_model.bin"))
    with pytest.raises(ValueError, match="safetensors"):
        LLM(file.parent)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "hidden_size": ("llama", {"hidden_size": None}),
    "num_hidden_layers": ("llama", {"num_hidden_layers": "2"}),
    "architectures": ("llama", {"architectures": None}),
    "hidden_act": ("llama", {"hidden_act": "gelu"}),
    "multiple of num_key_value_heads": ("llama", {"num_key_value_heads": 3}),
    "layer_types": ("mistral", {"layer_types": ["full_attention"]}),
    "no causal language model": ("llama", {"architectures": ["NobodysModel"]}),
    "bitsandbytes|quantiz": ("gpt2", {"quantization_config": {"quant_method": "bitsandbytes"}}),
}


@pytest.mark.parametrize("named", REFUSED)
def test_configs_that_are_refused(
    named: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    family, keys = REFUSED[named]
    with pytest.raises(ValueError, match=named):
        LLM(copy(make_checkpoint(family), tmp_path, **keys))


@pytest.mark.parametrize("family", ["bloom", "mamba", "falcon", "nemotron"])
def test_models_that_need_more_than_paged_attention(
    family: str, make_checkpoint: MakeCheckpoint
) -> None:
    """A bias for distances (ALiBi), a state, no way for the step to get to attention: without it,
    they would write nonsense."""
    with pytest.raises(ValueError, match=r"not supported|decoder-only"):
        LLM(make_checkpoint(family))


def test_code_of_a_checkpoint_is_not_run(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = copy(
        make_checkpoint("llama"),
        tmp_path,
        architectures=["MyModel"],
        auto_map={"AutoModelForCausalLM": "mine.MyModel", "AutoConfig": "mine.MyConfig"},
    )
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ValueError, match="MyModel"):
        LLM(folder)
    assert not (tmp_path / "ran").exists()


def test_a_class_of_ones_own(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    class Mine(LlamaForCausalLM):
        pass

    ModelRegistry.register("MineForCausalLM", Mine)
    folder = copy(make_checkpoint("llama"), tmp_path, architectures=["MineForCausalLM"])
    try:
        with LLM(folder, **OPTIONS) as llm:
            assert isinstance(llm.engine.executor.runner.model, Mine)
    finally:
        ModelRegistry.CLASSES.pop("MineForCausalLM")
    with pytest.raises(TypeError):
        ModelRegistry.register("Mine", object)


def test_random_weights_depend_on_the_seed_alone(make_checkpoint: MakeCheckpoint) -> None:
    """load_format "dummy" needs config.json alone; more than a memory holds is refused before it is
    taken."""
    folder, params = make_checkpoint("qwen3"), SamplingParams(max_tokens=8, seed=0)
    answers = []
    for seed in (0, 0, 1):
        with LLM(folder, load_format="dummy", seed=seed, **OPTIONS) as llm:
            answers.append(llm.generate([[5]], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1] != answers[2]


def test_weights_that_no_memory_holds(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = copy(make_checkpoint("llama"), tmp_path, num_hidden_layers=900, hidden_size=65536)
    with pytest.raises(ValueError, match="GiB"):
        LLM(folder, load_format="dummy")
