"""How likely were the tokens, and how is each of them written?

A log-probability alone is a number at a token id. The user gets it with the token's rank and text:

    TokenLogprobs(token_ids=(12, 7), logprobs=(-0.1, -2.3), sampled_rank=1)
    -> {12: Logprob(-0.1, rank=1, decoded_token=" cat"), 7: Logprob(-2.3, rank=2, ...)}

A character may be several tokens long. The token that completes a character has all of its text,
and the tokens before it have none (as in vLLM):

    tokens of "你"     E4    BD    A0
    decoded_token      ""    ""    "你"

vLLM: vllm/sequence.py (V0); vllm/logprobs.py, vllm/v1/engine/logprobs.py (V1).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from nanoserve.sequence import TokenLogprobs

MAX_CONTEXT = 4  # tokens before a token: a character has four bytes at most


@dataclass
class Logprob:
    """One token's log-probability at one position."""

    logprob: float
    rank: int | None = None  # 1 for the likeliest token
    decoded_token: str | None = None  # None without a tokenizer, or with detokenize=False


def name_logprobs(
    entry: TokenLogprobs, tokenizer: Any | None, previous: Seq[Mapping[int, Logprob] | None] = ()
) -> dict[int, Logprob]:
    """token id -> Logprob: of the sampled (or prompt) token, then of the likeliest ones.

    previous: the positions before this one. The first token of each is the sampled (or prompt) one.
    """
    context = [next(iter(named)) for named in previous[-MAX_CONTEXT:] if named]
    ranks = [entry.sampled_rank, *range(1, len(entry.token_ids))]
    named: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
        if token_id not in named:
            text = None if tokenizer is None else decode_token(tokenizer, token_id, context)
            named[token_id] = Logprob(logprob, rank, text)
    return named


def decode_token(tokenizer: Any, token_id: int, context: list[int]) -> str:
    """The text of one token. If it ends a character, the whole character; empty if it is the
    beginning or the middle of one. context: the tokens before it."""
    for length in range(len(context) + 1):
        before = context[len(context) - length :]
        text = tokenizer.decode([*before, token_id])
        if text.endswith("\ufffd"):  # inside a character, as far as these tokens show
            continue
        while before and tokenizer.decode(before[-1:]).endswith("\ufffd"):
            before = before[:-1]
        known = tokenizer.decode(before) if before else ""
        pairs = zip(known, text, strict=False)
        num_known = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return text[num_known:]
    return ""
