"""The bytes of tokens: those of a text's tokens, one after the other, are the text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_output_processor import demo_tokenizer, llama_like_tokenizer, metaspace_tokenizer

from nanoserve.exceptions import VLLMValidationError
from nanoserve.extras.structured_output.vocabulary import Vocabulary, read_vocabulary

NO_EOS = frozenset[int]()


def read(tokenizer: Any, extra: int = 0) -> Vocabulary:
    return read_vocabulary(tokenizer, len(tokenizer) + extra, NO_EOS)


def join(vocabulary: Vocabulary, token_ids: list[int]) -> bytes:
    return b"".join(vocabulary.tokens[token_id] or b"" for token_id in token_ids)


@settings(max_examples=30)
@given(st.text(max_size=20))
def test_byte_level(text: str) -> None:
    """Also of halves of characters: "😀" is four tokens here."""
    tokenizer = demo_tokenizer()
    assert join(read(tokenizer), tokenizer.encode(text)) == text.encode()


@pytest.mark.parametrize("make_tokenizer", [llama_like_tokenizer, metaspace_tokenizer])
@given(st.text("abcdefgh  ", min_size=1, max_size=20))
def test_sentencepiece(make_tokenizer: Any, text: str) -> None:
    """A token has its space, also where decode() drops the first one of a text."""
    tokenizer = make_tokenizer()
    token_ids = tokenizer.encode("a" + text)
    assert join(read(tokenizer), token_ids).decode().lstrip(" ") == tokenizer.decode(token_ids)


@given(st.text("ab你😀é", min_size=1, max_size=8))
def test_byte_fallback(text: str) -> None:
    tokenizer = llama_like_tokenizer()
    assert join(read(tokenizer), tokenizer.encode(text)) == f" {text}".encode()


def test_special_tokens_are_no_text_and_added_ones_are() -> None:
    tokenizer = demo_tokenizer.__wrapped__()  # one of our own, to change
    tokenizer.add_tokens(["<tool_call>", "naïve €"])
    vocabulary = read(tokenizer, extra=3)
    added = tokenizer.convert_tokens_to_ids(["<tool_call>", "naïve €"])
    assert [vocabulary.tokens[i] for i in added] == [b"<tool_call>", "naïve €".encode()]
    assert all(vocabulary.tokens[i] is None for i in tokenizer.all_special_ids)
    assert vocabulary.tokens[-3:] == (None, None, None)


def test_other_tokenizers_are_refused() -> None:
    from tokenizers import Tokenizer, decoders, models

    backend = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    from transformers import PreTrainedTokenizerFast

    for decoder in (None, decoders.WordPiece()):
        if decoder is not None:
            backend.decoder = decoder
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
        with pytest.raises(VLLMValidationError, match="not possible with this tokenizer"):
            read(tokenizer)
    with pytest.raises(VLLMValidationError, match="it has no decoder"):
        read_vocabulary(object(), 8, NO_EOS)
