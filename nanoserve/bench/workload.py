"""Which model, which requests? The same for every engine of a comparison.

Models are folders in Hugging Face's format. `write_dummy` makes one with random weights in a
published shape, so that a comparison needs no download: speed does not depend on what the weights
say, as long as every request runs to the length asked for.

Requests are drawn as nano-vllm's bench.py draws them (lengths uniform in a range, then token ids),
so that `draw_requests(256, 100, 1024, seed=0)` is its published workload: 142,827 prompt tokens and
133,966 output tokens. A later round keeps the lengths and changes the token ids, so that no engine
finds anything of the round before in its prefix cache.

vLLM: vllm/benchmarks/datasets/ (RandomDataset) has the same two ideas.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
    "bos_token_id": 0,
}
QWEN2_5 = {**QWEN3, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
LLAMA_3 = {
    **QWEN3,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "mlp_bias": False,
}


def _shape(
    base: dict[str, Any],
    layers: int,
    hidden: int,
    intermediate: int,
    heads: tuple[int, int],
    tied: bool,
    **others: Any,
) -> dict[str, Any]:
    """A config.json: the family's, with the sizes of one member. heads: (query, key and value)."""
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "tie_word_embeddings": tied,
    }
    return {**base, **sizes, **others}


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


# Against linear layers that keep a vector's size, embeddings are small: else a model with tied
# embeddings would just say its last token again and again.
EMBEDDING_STD = 0.02

SMALL = {"head_dim": 64, "vocab_size": 8192, "max_position_embeddings": 4096}
TINY = {"head_dim": 16, "vocab_size": 320, "max_position_embeddings": 1024}

# name -> config.json. All but the last two are the published shapes of released models.
DUMMY_MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _shape(QWEN3, 28, 1024, 3072, (16, 8), True),
    "qwen3-1.7b": _shape(QWEN3, 28, 2048, 6144, (16, 8), True),
    "qwen3-4b": _shape(QWEN3, 36, 2560, 9728, (32, 8), True),
    "qwen3-8b": _shape(QWEN3, 36, 4096, 12288, (32, 8), False),
    "qwen3-14b": _shape(QWEN3, 40, 5120, 17408, (40, 8), False),
    "qwen2.5-0.5b": _shape(QWEN2_5, 24, 896, 4864, (14, 2), True, head_dim=64),
    "llama-3.1-8b": _shape(
        LLAMA_3, 32, 4096, 14336, (32, 8), False, rope_scaling=_llama3_rope(8.0)
    ),
    "llama-3.2-1b": _shape(
        LLAMA_3, 16, 2048, 8192, (32, 8), True, head_dim=64, rope_scaling=_llama3_rope(32.0)
    ),
    "qwen3-29m": _shape(QWEN3, 8, 512, 1536, (8, 4), True, **SMALL),
    "qwen3-tiny": _shape(QWEN3, 2, 64, 112, (4, 2), True, **TINY),
}


def write_dummy(name: str, folder: Path, dtype: str, seed: int = 0) -> Path:
    """Write a checkpoint of random weights to `folder`/name-dtype, unless it is there; return it.

    One safetensors file per layer, so that an 8B model never stands in memory as a whole. Raises
    ValueError for a name that DUMMY_MODELS does not have.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    if name not in DUMMY_MODELS:
        raise ValueError(f"no dummy model {name!r}; allowed: {', '.join(DUMMY_MODELS)}.")
    target = folder / f"{name}-{dtype}"
    index = target / "model.safetensors.index.json"
    if index.exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    config = {**DUMMY_MODELS[name], "torch_dtype": dtype}
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    with torch.device("meta"):  # names and shapes, no memory
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target))
    generator = torch.Generator().manual_seed(seed)
    files: dict[str, dict[str, torch.Tensor]] = {}
    weight_map: dict[str, str] = {}
    shapes = {key: parameter.shape for key, parameter in model.named_parameters()}
    last_of_file = {_file_of(key): key for key in shapes}
    for key, shape in shapes.items():
        is_linear = len(shape) == 2 and "embed" not in key
        noise = torch.randn(shape, generator=generator) * (
            shape[1] ** -0.5 if is_linear else EMBEDDING_STD
        )
        file = weight_map[key] = _file_of(key)
        weights = files.setdefault(file, {})
        weights[key] = (noise + 1 if "norm" in key else noise).to(getattr(torch, dtype))
        if key == last_of_file[file]:
            save_file(files.pop(file), target / file, metadata={"format": "pt"})
    total = {"total_size": sum(shape.numel() for shape in shapes.values())}
    index.write_text(json.dumps({"metadata": total, "weight_map": weight_map}), encoding="utf-8")
    return target


def _file_of(key: str) -> str:
    """ "model.layers.3.mlp.up_proj.weight" -> "model-3.safetensors"."""
    parts = key.split(".")
    return f"model-{parts[2] if parts[1] == 'layers' else 'rest'}.safetensors"


@dataclass(frozen=True)
class Request:
    """One prompt, and how many tokens to generate, whatever they are."""

    prompt: list[int]  # token ids
    num_output: int  # tokens


def draw_requests(
    number: int, low: int, high: int, vocab_size: int, seed: int = 0, round_: int = 0
) -> list[Request]:
    """`number` random prompts; prompt and output lengths uniform in [low, high].

    Token ids are below 10,001 and the vocabulary's end. Round 0 is nano-vllm's draw, later rounds
    have its lengths and other ids.
    """
    if not 1 <= low <= high:
        raise ValueError(f"lengths are {low} to {high} tokens; allowed: 1 <= low <= high.")
    rng = Random(seed)
    last_id = min(10000, vocab_size - 1)
    prompts = [
        [rng.randint(0, last_id) for _ in range(rng.randint(low, high))] for _ in range(number)
    ]
    outputs = [rng.randint(low, high) for _ in range(number)]
    if round_:
        rng = Random(f"{seed} {round_}")
        prompts = [[rng.randint(0, last_id) for _ in prompt] for prompt in prompts]
    return [Request(prompt, length) for prompt, length in zip(prompts, outputs, strict=True)]


def draw_shared_prefix(
    number: int, prefix_len: int, suffix_len: int, num_output: int, vocab_size: int, seed: int = 0
) -> list[Request]:
    """`number` prompts that begin with the same `prefix_len` tokens and go on differently."""
    rng = Random(f"prefix {seed}")
    prefix = [rng.randrange(vocab_size) for _ in range(prefix_len)]
    return [
        Request([*prefix, *(rng.randrange(vocab_size) for _ in range(suffix_len))], num_output)
        for _ in range(number)
    ]
