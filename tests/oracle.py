"""What transformers says: the reference that greedy tokens of the engine are compared with.

    tokens = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8))[0]...token_ids
    assert_same_greedy(folder, prompt, tokens, 8)

Two correct programs round differently, so where two logits are nearly equal they may choose
differently, and from there on their texts have nothing in common. So the reference is run again on
the engine's own tokens ("teacher-forced"), and each of them must be the likeliest there, or tie.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# The gap of a tie, in deviations of the logits.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@lru_cache(maxsize=4)
def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of the checkpoint in `folder`, computing in `dtype` on the CPU.

    Its plainest way: attention in full (by default transformers takes SDPA, which left Gemma 2's
    soft cap out at times), experts in a loop.
    """
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@lru_cache(maxsize=1024)
def _generate(folder: Path, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = reference_model(folder).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
        )
    return tuple(output[0, len(prompt) :].tolist())


def greedy_tokens(folder: Path, prompt: list[int], max_tokens: int) -> list[int]:
    """What transformers' generate answers: alone in its batch, float32, an EOS token included."""
    return list(_generate(folder, tuple(prompt), max_tokens))


def reference_logits(
    folder: Path, token_ids: list[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Logits [len(token_ids), vocab_size], in float32, of one forward pass."""
    with torch.inference_mode():
        return reference_model(folder, dtype)(torch.tensor([token_ids])).logits[0].float()


def assert_same_greedy(
    folder: Path,
    prompt: list[int],
    tokens: list[int],
    max_tokens: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Assert that `tokens` are a greedy answer of at most `max_tokens` tokens to `prompt`.

    Token for token as transformers' generate; failing that, each is the likeliest after those
    before it, or nearly ties with it, and the answer ends where an answer must.
    """
    if dtype == torch.float32 and tokens == greedy_tokens(folder, prompt, max_tokens):
        return
    logits = reference_logits(folder, prompt + tokens, dtype)[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    gaps = (logits.amax(dim=-1) - chosen) / logits.std(dim=-1)
    worst = int(gaps.argmax())
    assert gaps[worst] <= TOLERANCE[dtype], (
        f"token {worst} of {len(tokens)} after a prompt of {len(prompt)} is {tokens[worst]}; the "
        f"likeliest is {int(logits[worst].argmax())}, {float(gaps[worst]):.2g} deviations above it"
    )
    eos = reference_model(folder, dtype).generation_config.eos_token_id
    eos_ids = set(eos) if isinstance(eos, list) else {eos}
    assert not eos_ids & set(tokens[:-1]), "the answer goes on after an EOS token"
    assert len(tokens) == max_tokens or tokens[-1] in eos_ids, "the answer ends too early"
