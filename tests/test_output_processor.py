"""Tokens to text: incremental detokenization, stop strings, the text that is safe to show."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from fakes import make_sequence
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanoserve import SamplingParams
from nanoserve.config import DEMO_MODEL
from nanoserve.input_processor import load_tokenizer
from nanoserve.output_processor import Detokenizer, OutputProcessor, find_stop_string
from nanoserve.sampling_params import RequestOutputKind
from nanoserve.sequence import SequenceStatus, SequenceUpdate

# Letters of one to four bytes, joined emoji, combining marks, and anything else there is.
TEXTS = st.text(
    st.one_of(
        st.sampled_from(
            "ab é ñ 你好世界 한국 ไทย 😀🎉 👩\u200d👩\u200d👧 e\u0301 a\u0308\u0323 \n\t"
        ),
        st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"),
    ),
    max_size=30,
)


@lru_cache(maxsize=1)
def demo_tokenizer() -> Any:
    return load_tokenizer(DEMO_MODEL, explicit=False)


def pieces_of(
    tokenizer: Any, prompt: list[int], output: list[int], skip_special_tokens: bool = True
) -> list[str]:
    """The text that a Detokenizer returns for each output token, and at the end."""
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens)
    return [*(detokenizer.append(token_id) for token_id in output), detokenizer.flush()]


def test_a_character_of_several_tokens_comes_whole() -> None:
    """The demo tokenizer writes 你 as three tokens, one for each byte."""
    tokenizer = demo_tokenizer()
    assert len(tokenizer.encode("你")) == 3
    assert pieces_of(tokenizer, tokenizer.encode("a"), tokenizer.encode("你b")) == [
        "",
        "",
        "你",
        "b",
        "",
    ]


def test_an_unfinished_character_is_flushed_as_a_replacement() -> None:
    """max_tokens may end a text anywhere."""
    tokenizer = demo_tokenizer()
    output = tokenizer.encode("a你")[:-1]
    assert pieces_of(tokenizer, tokenizer.encode("x"), output) == ["a", "", "", "\ufffd"]


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, cut=st.integers(0, 100))
@example(text="你好", cut=2)  # the prompt ends within a character
@example(text="你", cut=0)  # no context at all
@example(text="a\u0301", cut=1)  # a mark on a letter of the prompt
def test_pieces_of_any_text_join_to_the_text(text: str, cut: int) -> None:
    """The prompt may end anywhere, also within a character. No half character is shown."""
    tokenizer = demo_tokenizer()
    token_ids = tokenizer.encode(text)
    prompt, output = token_ids[:cut], token_ids[cut:]
    pieces = pieces_of(tokenizer, prompt, output)
    assert "".join(pieces) == tokenizer.decode(output, skip_special_tokens=True)
    if not tokenizer.decode(prompt).endswith("\ufffd"):
        assert "\ufffd" not in "".join(pieces)
        assert pieces[-1] == ""  # nothing was left to flush


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_of_any_tokens_join_to_their_text(data: st.DataObject, skip: bool) -> None:
    """Models also write broken bytes, and special tokens within a sentence."""
    tokenizer = demo_tokenizer()
    any_token = st.one_of(
        st.integers(0, len(tokenizer) - 1),
        st.integers(0, 260),  # special tokens and single bytes
        st.sampled_from(tokenizer.encode("你😀é")),
    )
    prompt = data.draw(st.lists(any_token, max_size=12))
    output = data.draw(st.lists(any_token, max_size=20))
    pieces = pieces_of(tokenizer, prompt, output, skip)
    assert "".join(pieces) == tokenizer.decode(output, skip_special_tokens=skip)


def test_special_tokens_are_hidden_or_shown() -> None:
    tokenizer = demo_tokenizer()
    output = tokenizer.encode("a<|im_end|>b")
    assert "".join(pieces_of(tokenizer, [5], output, skip_special_tokens=True)) == "ab"
    shown = pieces_of(tokenizer, [5], output, skip_special_tokens=False)
    assert "".join(shown) == "a<|im_end|>b"


# -- tokenizers with spaces as part of words, as in SentencePiece --


def as_transformers(backend: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend)


@lru_cache(maxsize=1)
def llama_like_tokenizer() -> Any:
    """BPE with "▁" for a space and bytes for unknown characters, as in Llama 2. The first space of
    a text is dropped, so the text of a token depends on its place: first, or later."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh", "▁a", "▁b"]
    merges = [("▁", "a"), ("▁", "b")]
    vocab = {word: i for i, word in enumerate(words)}
    bpe = models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    backend = Tokenizer(bpe)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return as_transformers(backend)


@lru_cache(maxsize=1)
def metaspace_tokenizer() -> Any:
    """Unigram with Metaspace, as T5's and many others'."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<unk>", "▁", *"abcdefgh", "▁a", "▁b", "ab", "▁cd"]
    backend = Tokenizer(models.Unigram([(word, -float(len(word) < 2)) for word in words], 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return as_transformers(backend)


@pytest.mark.parametrize("make_tokenizer", [llama_like_tokenizer, metaspace_tokenizer])
def test_spaces_between_words_survive(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    prompt, output = tokenizer.encode("ab cd"), tokenizer.encode("a b cd")
    assert tokenizer.decode(output) == "a b cd"
    assert "".join(pieces_of(tokenizer, prompt, output)) == " a b cd"


@pytest.mark.parametrize("make_tokenizer", [llama_like_tokenizer, metaspace_tokenizer])
@settings(max_examples=100, deadline=None)
@given(text=st.text("abcdefgh  ", min_size=1, max_size=30), cut=st.integers(1, 29))
def test_prompt_and_pieces_join_to_the_text(make_tokenizer: Any, text: str, cut: int) -> None:
    """The prompt may end anywhere. The output begins with a space exactly if the text has one."""
    tokenizer = make_tokenizer()
    token_ids = tokenizer.encode(text)
    prompt, output = token_ids[:cut], token_ids[cut:]
    joined = tokenizer.decode(prompt) + "".join(pieces_of(tokenizer, prompt, output))
    assert joined == tokenizer.decode(token_ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab 你😀é", min_size=1, max_size=12), cut=st.integers(1, 30))
@example(text="你aaé你😀😀 ", cut=19)  # the last tokens of the prompt begin within a character
def test_bytes_of_a_llama_like_tokenizer_become_characters(text: str, cut: int) -> None:
    tokenizer = llama_like_tokenizer()
    token_ids = tokenizer.encode(text)
    prompt, output = token_ids[:cut], token_ids[cut:]
    if tokenizer.decode(prompt).endswith("\ufffd"):
        return  # the text of half a character is not defined
    pieces = pieces_of(tokenizer, prompt, output)
    assert tokenizer.decode(prompt) + "".join(pieces) == tokenizer.decode(token_ids)
    assert "\ufffd" not in "".join(pieces)


# -- stop strings --

AB = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def find_by_brute_force(text: str, stops: list[str], num_new: int) -> tuple[int, str] | None:
    """Try every position, for every stop string that ends within the new characters."""
    found = [
        (position, stop)
        for position in range(len(text))
        for stop in stops
        if text[position : position + len(stop)] == stop
        and position + len(stop) > len(text) - num_new
    ]
    return min(found) if found else None


def test_where_a_stop_string_starts() -> None:
    assert find_stop_string("a END b", ["END"], 4) == (2, "END")
    assert find_stop_string("a END b", ["END"], 2) is None  # END is older than the new characters
    assert find_stop_string("a END b", ["b", "END"], 7) == (2, "END")  # the first one in the text
    assert find_stop_string("a END b", [], 7) is None


@settings(max_examples=300, deadline=None)
@given(text=AB, stops=STOPS, num_new=st.integers(0, 12))
def test_stop_strings_as_by_brute_force(text: str, stops: list[str], num_new: int) -> None:
    num_new = min(num_new, len(text))
    assert find_stop_string(text, stops, num_new) == find_by_brute_force(text, stops, num_new)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab你 ", min_size=1, max_size=12),
    stops=st.lists(st.text("ab你 ", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    num_missing=st.integers(0, 2),
)
@example(text="aab", stops=["ab"], include=False, num_missing=0)
@example(text="ab", stops=["abb", "b"], include=False, num_missing=0)
@example(text="abbb", stops=["abb", "bb"], include=True, num_missing=0)
@example(text="a你", stops=[], include=False, num_missing=1)  # ends within a character
def test_what_is_shown_is_never_taken_back(
    text: str, stops: list[str], include: bool, num_missing: int
) -> None:
    """At each step the text so far is a prefix of the final text, which is the decoded text up to
    the first stop string. Deltas and cumulative outputs agree."""
    output_processor = OutputProcessor(demo_tokenizer())
    seqs = []
    for seq_id, kind in enumerate((RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE)):
        params = SamplingParams(
            max_tokens=99, stop=stops, include_stop_str_in_output=include, output_kind=kind
        )
        seqs.append(make_sequence(seq_id, [5], sampling_params=params))
    token_ids = demo_tokenizer().encode(text)
    token_ids = token_ids[: max(1, len(token_ids) - num_missing)]
    decoded = demo_tokenizer().decode(token_ids)
    shown: list[str] = []
    for seq in seqs:
        output_processor.add(seq, None)
    for i, token_id in enumerate(token_ids, start=1):
        texts = []
        for seq in seqs:
            seq.token_ids.append(token_id)
            if i == len(token_ids):
                seq.status = SequenceStatus.FINISHED_LENGTH
            stop = output_processor.append(SequenceUpdate(seq, (token_id,), ()))
            if stop is not None:
                seq.status, seq.stop_reason = SequenceStatus.FINISHED_STOPPED, stop
            output = output_processor.build_output([seq])
            assert output is not None
            texts.append(output.outputs[0].text)
        shown.append(shown[-1] + texts[0] if shown else texts[0])
        assert shown[-1] == texts[1]
        if output.finished:
            break
    final = shown[-1]
    assert all(final.startswith(earlier) for earlier in shown)
    assert decoded.startswith(final)
    assert not output_processor.requests
    if output.outputs[0].finish_reason == "stop":
        stop = str(output.outputs[0].stop_reason)
        assert stop in stops
        assert final.endswith(stop) if include else decoded.startswith(final + stop)
    else:
        assert final == decoded
    if not include:
        assert not any(stop in final for stop in stops)
