"""How is a checkpoint's tokenizer read, and how do tokens become text?

Detokenization is incremental, but not token by token, because a character can be several tokens
long. With a byte-level tokenizer:

    token        E4    BD    A0    E5 A5    BD         text is held back until a character is whole:
    new text     ""    ""    "你"   ""       "好"        no "�" ever reaches the user

vLLM: vllm/transformers_utils/: tokenizer.py, detokenizer.py (V0); vllm/tokenizers/,
vllm/v1/engine/: detokenizer.py, logprobs.py (V1).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import takewhile
from pathlib import Path
from typing import Any

from nanoserve.sequence import Logprob, TokenLogprobs


def load_tokenizer(folder: Path) -> Any | None:
    """The tokenizer in `folder`; None if it has none. Raises ValueError if it cannot be read."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((folder / name).exists() for name in names):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.backend_tokenizer  # noqa: B018 (the library that detokenizes incrementally)
    except Exception as error:  # of many types, with one meaning: no tokenizer
        raise ValueError(f"no fast tokenizer can be read from {folder}: {error}") from error
    return tokenizer


class Detokenizer:
    """The text of one sequence, token by token."""

    CONTEXT = 6  # prompt tokens to start from: some tokenizers write a first token differently

    def __init__(self, tokenizer: Any, prompt_token_ids: list[int], skip_special_tokens: bool):
        self.backend = tokenizer.backend_tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.held: list[int] = []  # token ids that are not a whole character yet
        self.stream = self._new_stream(self._find_context(prompt_token_ids))

    def _find_context(self, prompt_token_ids: list[int]) -> list[int]:
        """The last prompt tokens; a few more if the first of them is inside a character (of up to
        four bytes). An empty list if the prompt, as token ids, ends inside a character."""
        for length in range(self.CONTEXT, self.CONTEXT + 4):
            context = prompt_token_ids[-length:]
            text = self.backend.decode(context, skip_special_tokens=self.skip_special_tokens)
            if not text.endswith("�"):
                return context
        return []

    def append(self, token_id: int) -> str:
        """The text that this token completes; empty if the character is not whole yet."""
        self.held.append(token_id)
        try:
            text = self.stream.step(self.backend, token_id)
        except Exception:  # the stream rejects some invalid byte sequences: start again behind them
            self.stream = self._new_stream([])
            return self.flush()
        if text is None:
            return ""
        self.held.clear()
        return text

    def flush(self) -> str:
        """The text that is still held back; an incomplete character becomes U+FFFD."""
        text = self.backend.decode(self.held, skip_special_tokens=self.skip_special_tokens)
        self.held.clear()
        return text

    def _new_stream(self, context: list[int]) -> Any:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(ids=context, skip_special_tokens=self.skip_special_tokens)


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


def name_logprobs(
    entry: TokenLogprobs, tokenizer: Any | None, previous: Seq[Mapping[int, Logprob] | None]
) -> dict[int, Logprob]:
    """token id -> Logprob: of the sampled (or prompt) token, then of the likeliest ones.

    previous: the positions before this one. The first token of each is the sampled (or prompt) one.
    """
    context = [next(iter(named)) for named in previous if named]
    ranks = [entry.sampled_rank, *range(1, len(entry.token_ids))]
    named: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
        if token_id not in named:
            text = None if tokenizer is None else decode_token(tokenizer, token_id, context)
            named[token_id] = Logprob(logprob, rank, text)
    return named
