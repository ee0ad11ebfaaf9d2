"""Which bytes is each token?

A grammar speaks of text, the model of token ids, and each kind of tokenizer writes its tokens in
its own way:

    byte-level BPE (GPT-2, Llama 3, Qwen)       "Ġcat" is " cat"    "Ã" is C3, the first half of é
    SentencePiece with byte fallback            "▁cat" is " cat"    "<0xC3>" is C3
    special tokens, padding of the vocabulary   None: no grammar allows them

A special token ("<|im_end|>") is no text: a user never sees it. An added token that is not special
("<tool_call>" of Qwen) is written as it stands, so it is text.

All backends get the same Vocabulary, so they agree on what a token is.

vLLM: vllm/v1/structured_output/utils.py (V1), get_outlines_vocabulary; xgrammar's TokenizerInfo.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from nanoserve.entrypoints.errors import VLLMValidationError

# Decoders that write each token the same wherever it stands, from the second token on.
DECODERS = {"ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Sequence", "Strip"}


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model, as bytes."""

    tokens: tuple[bytes | None, ...]  # by token id; None: never allowed
    eos_token_ids: frozenset[int]


def read_vocabulary(tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> Vocabulary:
    """The Vocabulary of a model whose logits have vocab_size entries. Raises VLLMValidationError
    for a tokenizer whose tokens are not known as bytes."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    kinds = set() if decoder is None else set(_find_types(json.loads(decoder.__getstate__())))
    if not kinds or kinds - DECODERS:
        given = f"it has the decoder {' + '.join(sorted(kinds))}" if kinds else "it has no decoder"
        raise VLLMValidationError(
            f"structured outputs are not possible with this tokenizer: {given}; allowed: "
            f"{', '.join(sorted(DECODERS))}. Use a model with a byte-level or SentencePiece "
            "tokenizer.",
            parameter="structured_outputs",
        )
    added = backend.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    special.update(tokenizer.all_special_ids)
    tokens: list[bytes | None] = [None] * vocab_size
    for token, token_id in backend.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size and token_id not in special:
            tokens[token_id] = _to_bytes(token, kinds, decoder) or None
    return Vocabulary(tuple(tokens), eos_token_ids)


def _find_types(part: dict[str, Any]) -> list[str]:
    """The types of a decoder and of its parts."""
    inner = [name for each in part.get("decoders", ()) for name in _find_types(each)]
    return [part["type"], *inner]


def _to_bytes(token: str, kinds: set[str], decoder: Any) -> bytes:
    if "ByteLevel" in kinds:
        if all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        return token.encode()  # added as text
    if "ByteFallback" in kinds and len(token) == 6 and token.startswith("<0x"):
        return bytes.fromhex(token[3:5])
    # Behind another token: at the start of a text a space may be missing.
    return decoder.decode(["a", token]).removeprefix("a").encode()


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte: GPT-2 writes a visible byte as itself, and the others as U+0100 and on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()
