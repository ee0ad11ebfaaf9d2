"""Which model, which requests? The same ones for every engine of a comparison.

A dummy model has the published shape of a real one, random weights, and random words for tokens.
Its speed is that of the real one, because every request runs to the length that it asks for,
whatever it says.

Requests are random token ids. Each round has the lengths of the first one and other ids, so that no
engine finds a prompt of an earlier round in its prefix cache:

    round   -1 (warm-up)      0                1
    prompt  [81, 5, 33]       [14, 61, 27]     [90, 17, 12]       3 tokens in every round

vLLM: vllm/benchmarks/datasets/ (RandomDataset).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

from nanoserve.models.config import DEMO_MODEL

SHAPE: tuple[str, ...] = ("num_hidden_layers", "hidden_size", "intermediate_size")
SHAPE += ("num_attention_heads", "num_key_value_heads", "head_dim")
SHAPE += ("vocab_size", "tie_word_embeddings")
# name -> (type of transformers' config, what SHAPE names). The last two are shapes of our own.
DUMMY_MODELS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "qwen3-0.6b": ("qwen3", (28, 1024, 3072, 16, 8, 128, 151936, True)),
    "qwen3-1.7b": ("qwen3", (28, 2048, 6144, 16, 8, 128, 151936, True)),
    "qwen3-4b": ("qwen3", (36, 2560, 9728, 32, 8, 128, 151936, True)),
    "qwen3-8b": ("qwen3", (36, 4096, 12288, 32, 8, 128, 151936, False)),
    "llama-3.2-1b": ("llama", (16, 2048, 8192, 32, 8, 64, 128256, True)),
    "llama-3.1-8b": ("llama", (32, 4096, 14336, 32, 8, 128, 128256, False)),
    "qwen3-29m": ("qwen3", (8, 512, 1536, 8, 4, 64, 8192, True)),
    "qwen3-tiny": ("qwen3", (2, 64, 112, 4, 2, 16, 320, True)),
}
CACHE = Path.home() / ".cache" / "nanoserve"
FIRST_TOKEN = 10  # smaller ids are special tokens in many vocabularies


@dataclass(frozen=True)
class Request:
    prompt: list[int]  # token ids
    num_output: int  # tokens to generate; end-of-sequence tokens are ignored
    arrival: float = 0.0  # seconds after the begin of the round
    after: int = 0  # and not before the first request has as many tokens


def write_dummy(name: str, dtype: str = "float32", folder: Path = CACHE) -> Path:
    """Write a checkpoint of random weights to folder/name-dtype, unless it is there, and return
    that path. Raises ValueError for a name that DUMMY_MODELS does not have."""
    if name not in DUMMY_MODELS:
        raise ValueError(f"no dummy model {name!r}; allowed: {', '.join(DUMMY_MODELS)}.")
    target = folder / f"{name}-{dtype}"
    if (target / "tokenizer_config.json").exists():
        return target
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, shape = DUMMY_MODELS[name]
    sizes = dict(zip(SHAPE, shape, strict=True))
    length = 32768 if sizes["vocab_size"] > 2**16 else 4096
    config = AutoConfig.for_model(kind, **sizes, max_position_embeddings=length, eos_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        for key, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in key:  # keeps the size of a vector: so the
                parameter.data.normal_(std=parameter.shape[1] ** -0.5)  # likeliest token is clear
    model.save_pretrained(target)
    write_tokenizer(target, sizes["vocab_size"])
    return target


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """The demo model's tokens, and random words: a grammar, or a server, has text to work on."""
    from tokenizers import Tokenizer, decoders, models

    demo = json.loads((DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    words, random = dict.fromkeys([*demo["model"]["vocab"]][:vocab_size]), Random(0)
    while len(words) < vocab_size:
        word = "".join(random.choices(ascii_lowercase, k=random.randint(3, 9)))
        words.setdefault(random.choice(("", "Ġ")) + word)  # Ġ is a space
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def read_vocab_size(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]


def draw_requests(
    number: int, low: int, high: int, vocab_size: int, round_: int = 0, prefix_len: int = 0
) -> list[Request]:
    """`number` prompts, prompt and output lengths uniform in [low, high]. All prompts of a round
    begin with the same `prefix_len` tokens."""
    if not 1 <= low <= high:
        raise ValueError(f"lengths are {low} to {high} tokens; allowed: 1 <= low <= high.")
    lengths, ids = Random(0), Random(f"round {round_}")

    def draw(length: int) -> list[int]:
        return [ids.randrange(FIRST_TOKEN, vocab_size) for _ in range(length)]

    prefix = draw(prefix_len)
    sizes = [(lengths.randint(low, high), lengths.randint(low, high)) for _ in range(number)]
    return [Request(prefix + draw(size), num_output) for size, num_output in sizes]


def draw_arrivals(number: int, rate: float, round_: int = 0) -> list[float]:
    """Seconds at which `number` requests arrive, in order: a Poisson process of `rate` a second."""
    random, now, arrivals = Random(f"arrivals {round_}"), 0.0, []
    for _ in range(number):
        arrivals.append(now)
        now += random.expovariate(rate)
    return arrivals
