"""Which model, which requests? The same for every engine of a comparison.

A model is a folder in Hugging Face's format. `write_dummy` writes one with random weights in a
published shape, so that a comparison needs no download. Speed does not depend on the values of the
weights, as long as every request runs to the length asked for.

Requests are drawn as nano-vllm's bench.py draws them (lengths uniform in a range, then token ids):
`draw_requests(256, 100, 1024, seed=0)` is its published workload, 142,827 prompt tokens and 133,966
output tokens. Every other round keeps the lengths and draws other token ids, so that no engine
finds a prompt of an earlier round in its prefix cache:

    round   -1 (warm-up)      0                  1
    prompt  [81, 5, 33]       [4, 61, 27]        [90, 7, 12]        3 tokens in every round

Speculative decoding is the exception: its speed depends on what is said. `draw_questions` asks the
demo model what it can answer.

vLLM: vllm/benchmarks/datasets/ (RandomDataset) has the same two ideas.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
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


SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)
SMALL = {"head_dim": 64, "vocab_size": 8192, "max_position_embeddings": 4096}
TINY = {"head_dim": 16, "vocab_size": 320, "max_position_embeddings": 1024}


def make_shape(family: dict[str, Any], *sizes: int, **others: Any) -> dict[str, Any]:
    """A config.json: the family's entries, then SIZES in order, then what this member changes."""
    return {**family, **dict(zip(SIZES, sizes, strict=True)), **others}


# name -> config.json. All but the last two have the published shapes of released models. (Llama's
# scaling of the rope's frequencies is left out: it costs no time.)
DUMMY_MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": make_shape(QWEN3, 28, 1024, 3072, 16, 8, True),
    "qwen3-1.7b": make_shape(QWEN3, 28, 2048, 6144, 16, 8, True),
    "qwen3-4b": make_shape(QWEN3, 36, 2560, 9728, 32, 8, True),
    "qwen3-8b": make_shape(QWEN3, 36, 4096, 12288, 32, 8, False),
    "qwen3-14b": make_shape(QWEN3, 40, 5120, 17408, 40, 8, False),
    "qwen2.5-0.5b": make_shape(QWEN2_5, 24, 896, 4864, 14, 2, True, head_dim=64),
    "llama-3.1-8b": make_shape(LLAMA_3, 32, 4096, 14336, 32, 8, False),
    "llama-3.2-1b": make_shape(LLAMA_3, 16, 2048, 8192, 32, 8, True, head_dim=64),
    "qwen3-29m": make_shape(QWEN3, 8, 512, 1536, 8, 4, True, **SMALL),
    "qwen3-tiny": make_shape(QWEN3, 2, 64, 112, 4, 2, True, **TINY),
}

# Linear layers keep the size of a vector. Embeddings are small beside them: with large ones, a
# model with tied embeddings would repeat its last token for ever.
EMBEDDING_STD = 0.02


def write_dummy(name: str, folder: Path, dtype: str, seed: int = 0) -> Path:
    """Write a checkpoint of random weights to `folder`/name-dtype and return that path. A folder
    that exists already is kept.

    Each layer is a safetensors file of its own, so that an 8B model is never in memory as a whole.
    In its tokenizer each token id is a word (5: "w5"), so that text has to be made as from a real
    one. Raises ValueError for a name that DUMMY_MODELS does not have.
    """
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    if name not in DUMMY_MODELS:
        raise ValueError(f"no dummy model {name!r}; allowed: {', '.join(DUMMY_MODELS)}.")
    target = folder / f"{name}-{dtype}"
    index = target / "model.safetensors.index.json"
    if index.exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    _write_json(target / "config.json", {**DUMMY_MODELS[name], "torch_dtype": dtype})
    _write_json(target / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    words = {f"w{number}": number for number in range(DUMMY_MODELS[name]["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(target / "tokenizer.json"))
    with torch.device("meta"):  # names and shapes, no memory
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target))
    generator = torch.Generator().manual_seed(seed)

    def draw(key: str, shape: torch.Size) -> torch.Tensor:
        is_linear = len(shape) == 2 and "embed" not in key
        std = shape[1] ** -0.5 if is_linear else EMBEDDING_STD
        noise = torch.randn(shape, generator=generator) * std
        return (noise + 1 if "norm" in key else noise).to(getattr(torch, dtype))

    weight_map: dict[str, str] = {}
    by_layer = groupby(model.named_parameters(), key=lambda item: item[0].split(".")[:3])
    for number, (_, parameters) in enumerate(by_layer):
        weights = {key: draw(key, parameter.shape) for key, parameter in parameters}
        file = f"model-{number}.safetensors"
        save_file(weights, target / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(weights, file)
    _write_json(index, {"metadata": {}, "weight_map": weight_map})
    return target


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")


@dataclass(frozen=True)
class Request:
    """A prompt, and the number of tokens to generate (end-of-sequence tokens are ignored)."""

    prompt: list[int]  # token ids
    num_output: int  # tokens


def draw_requests(
    number: int, low: int, high: int, vocab_size: int, seed: int = 0, round_: int = 0
) -> list[Request]:
    """`number` random prompts; prompt and output lengths uniform in [low, high].

    Token ids are at most 10,000, and in the vocabulary. Round 0 is nano-vllm's draw; all other
    rounds (-1 is the warm-up) have its lengths and other token ids.
    """
    if not 1 <= low <= high:
        raise ValueError(f"lengths are {low} to {high} tokens; allowed: 1 <= low <= high.")
    rng = Random(seed)
    last_id = min(10000, vocab_size - 1)
    prompts = [
        [rng.randint(0, last_id) for _ in range(rng.randint(low, high))] for _ in range(number)
    ]
    outputs = [rng.randint(low, high) for _ in range(number)]
    if round_ != 0:
        rng = Random(f"{seed} {round_}")
        prompts = [[rng.randint(0, last_id) for _ in prompt] for prompt in prompts]
    return [Request(prompt, length) for prompt, length in zip(prompts, outputs, strict=True)]


def draw_arrivals(number: int, seed: int = 0, round_: int = 0) -> list[float]:
    """When `number` requests arrive at a rate of 1, in order: seconds from the start. Divided by a
    rate, they arrive at that rate.

    They are a Poisson process: given how many requests arrive in a time, each one's moment is
    uniform in it, and independent of the others'.
    """
    rng = Random(f"arrivals {seed} {round_}")
    return sorted(rng.uniform(0, number) for _ in range(number))


def draw_shared_prefix(
    number: int, prefix_len: int, suffix_len: int, num_output: int, vocab_size: int, seed: int = 0
) -> list[Request]:
    """`number` prompts that begin with the same `prefix_len` tokens and then differ."""
    rng = Random(f"prefix {seed}")
    prefix = [rng.randrange(vocab_size) for _ in range(prefix_len)]
    return [
        Request([*prefix, *(rng.randrange(vocab_size) for _ in range(suffix_len))], num_output)
        for _ in range(number)
    ]


NAMES = ["Mia", "Tom", "Lily", "Ben", "Anna", "Max", "Zoe", "Leo", "Emma", "Sam", "Rosa", "Jack"]
ANIMALS = ["fox", "rabbit", "bear", "mouse", "cat", "dog", "owl", "duck", "frog", "pony", "wolf"]
COLOURS = ["red", "blue", "green", "yellow"]
WORDS = [
    *(*ANIMALS, *COLOURS, "apple", "ball", "boat", "book", "bread", "bridge", "cake", "castle"),
    *("cloud", "coat", "drum", "flute", "garden", "hat", "hill", "honey", "key", "lamp", "market"),
    *("mirror", "moon", "rain", "river", "snow", "spoon", "star", "stone", "tree", "wagon"),
]


def ask_for_a_copy(rng: Random) -> str:
    return f"Repeat: {' '.join(rng.sample(WORDS, 14))}"


def ask_for_json(rng: Random) -> str:
    name, age = rng.choice(NAMES), rng.randint(1, 20)
    pet, colour = rng.choice(["cat", "dog", "pony"]), rng.choice(COLOURS)
    return f"Make a JSON record: name {name}, age {age}, pet {pet}, colour {colour}."


def ask_for_a_story(rng: Random) -> str:
    return f"Tell me a story about a {rng.choice(ANIMALS)} named {rng.choice(NAMES)}."


def ask_to_count(rng: Random) -> str:
    first = rng.randint(1, 69)
    return f"Count from {first} to {first + rng.randint(20, 30)}."


# What the demo model can do (nanoserve/demo/README.md), from what is in the prompt to what is not.
QUESTIONS: dict[str, Callable[[Random], str]] = {
    "copying": ask_for_a_copy,
    "JSON": ask_for_json,
    "counting": ask_to_count,
    "stories": ask_for_a_story,
}


def draw_questions(kind: str, number: int, seed: int = 0, round_: int = 0) -> list[str]:
    """`number` questions of a kind of QUESTIONS, other ones in every round."""
    rng = Random(f"{kind} {seed} {round_}")
    return [QUESTIONS[kind](rng) for _ in range(number)]
