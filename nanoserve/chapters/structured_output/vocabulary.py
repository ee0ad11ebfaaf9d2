"""Which bytes is each token?

A grammar speaks of text, the model of token ids, and each kind of tokenizer writes its tokens in
its own way:

    byte-level BPE (GPT-2, Llama 3, Qwen)       "Ġcat" is " cat"    "Ã" is C3, the first half of é
    SentencePiece with byte fallback            "▁cat" is " cat"    "<0xC3>" is C3
    special tokens, padding of the vocabulary   None: no grammar allows them

A special token ("<|im_end|>") is no text: a user never sees it. An added token that is not special
("<tool_call>" of Qwen) is written as it stands, so it is text. All backends get the same
Vocabulary, so they agree on what a token is.

vLLM: vllm/v1/structured_output/utils.py (V1), get_outlines_vocabulary; xgrammar's TokenizerInfo.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

# Decoders that write each token the same wherever it stands, from the second token on.
DECODERS = {"ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Sequence", "Strip"}


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model, as bytes."""

    tokens: tuple[bytes | None, ...]  # by token id; None: never allowed
    eos_token_ids: frozenset[int]


def read_vocabulary(tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> Vocabulary:
    """The Vocabulary of a model whose logits have vocab_size entries. Raises ValueError for a
    tokenizer whose tokens are not known as bytes."""
    backend = tokenizer.backend_tokenizer
    state = backend.decoder.__getstate__().decode() if backend.decoder else ""
    kinds = set(re.findall(r'"type":"(\w+)"', state))
    if not kinds or kinds - DECODERS:
        raise ValueError(
            "structured_outputs needs a byte-level or SentencePiece tokenizer; this one's decoder "
            f"is {' + '.join(sorted(kinds)) or None}."
        )
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    special.update(tokenizer.all_special_ids)
    tokens: list[bytes | None] = [None] * vocab_size
    for token, token_id in backend.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size and token_id not in special:
            tokens[token_id] = to_bytes(token, kinds, backend.decoder) or None
    return Vocabulary(tuple(tokens), eos_token_ids)


def to_bytes(token: str, kinds: set[str], decoder: Any) -> bytes:
    """What a token of the vocabulary stands for."""
    if "ByteLevel" in kinds:
        if all(character in BYTES for character in token):
            return bytes(BYTES[character] for character in token)
        return token.encode()  # added as text
    if "ByteFallback" in kinds and re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes.fromhex(token[3:5])
    # Behind another token: at the start of a text a space may be missing.
    return decoder.decode(["a", token]).removeprefix("a").encode()


def byte_alphabet() -> dict[str, int]:
    """Character -> byte: GPT-2 writes a visible byte as itself, and the others as U+0100 and on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


BYTES = byte_alphabet()
