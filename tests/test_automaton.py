"""Our own backend of structured outputs: what the automaton of a regular expression allows is what
`re` matches, and a mask is what trying every token finds.
"""

from __future__ import annotations

import itertools
import re
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nanoserve.exceptions import VLLMValidationError
from nanoserve.extras.structured_output.automaton import NanoBackend, NanoGrammar
from nanoserve.extras.structured_output.backend import GrammarSpec, StructuredOutputOptions
from nanoserve.extras.structured_output.dfa import DFA, build_nfa, determinize, utf8_sequences
from nanoserve.extras.structured_output.vocabulary import Vocabulary

EOS = frozenset({0})
CHARACTERS = "ab1é\n😀"  # of one, two and four bytes


def compile_dfa(pattern: str) -> DFA:
    return determinize(build_nfa(pattern))


def make_grammar(
    tokens: list[bytes | None], pattern: str, stop_token_ids: frozenset[int] = EOS
) -> NanoGrammar:
    backend = NanoBackend(Vocabulary(tuple(tokens), EOS))
    return backend.compile_grammar(
        GrammarSpec(StructuredOutputOptions.REGEX, pattern, stop_token_ids)
    )


def allowed_tokens(grammar: NanoGrammar, num_tokens: int) -> set[int]:
    """The bits of its mask."""
    bitmask = torch.full((2, -(-num_tokens // 32)), -1, dtype=torch.int32)
    grammar.fill_bitmask(bitmask, 1)
    bits = np.unpackbits(bitmask[1].numpy().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


# -- regular expressions --


@st.composite
def patterns(draw: st.DrawFn, is_finite: bool = False) -> str:
    """Regular expressions with all that is supported; of up to four characters if is_finite."""
    atoms = st.sampled_from(["a", "b", "é", "😀", "[ab]", "[^a]", r"\d", r"\W", ".", r"[^\W1]"])
    repeats = ["?", "{0,1}"] if is_finite else ["*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?"]

    def extend(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        pairs = st.tuples(inner, inner)
        return st.one_of(
            pairs.map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
            pairs.map("".join),
            st.tuples(inner, st.sampled_from(repeats)).map(lambda pair: f"({pair[0]}){pair[1]}"),
        )

    return draw(st.recursive(atoms, extend, max_leaves=3 if is_finite else 6))


@settings(max_examples=60)
@given(st.data(), patterns())
def test_matches_what_re_matches(data: st.DataObject, pattern: str) -> None:
    dfa = compile_dfa(pattern)
    alphabet = st.sampled_from(CHARACTERS)
    text = data.draw(
        st.text(alphabet, max_size=6) | st.from_regex(pattern, fullmatch=True, alphabet=alphabet)
    )
    assert dfa.matches(text) == bool(re.fullmatch(pattern, text, re.ASCII))


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("^a|b$", "b"),
        ("(^a)?b$", "ab"),
        ("", ""),
        (r"\x41A\U0001F600", "AA😀"),
        ("(?P<name>a)(?#comment)b", "ab"),
        ("(?x) a b # comment", "ab"),
        (r"[\]\-a]+", "]-a"),
        (r"\s\S\w\W\d\D", " a_é1é"),
        (r"[^\x00-\uffff]", "😀"),
    ],
)
def test_syntax(pattern: str, text: str) -> None:
    assert re.fullmatch(pattern, text, re.ASCII)
    assert compile_dfa(pattern).matches(text)
    assert not compile_dfa(pattern).matches(text + "ab")


@given(st.integers(0, 0xD7FF), st.integers(0xE000, 0x10FFFF))
def test_utf8_of_a_range_of_characters(first: int, last: int) -> None:
    """Its sequences are those of its characters and no others: ends, neighbours and borders."""
    for low, high in ((first, 0xD7FF), (0xE000, last)):
        sequences = list(utf8_sequences(low, high))
        points = {low, high, low - 1, high + 1, (low + high) // 2}
        points |= {border + step for border in (0x80, 0x800, 0x10000) for step in (-1, 0)}
        for point in points - set(range(0xD800, 0xE000)):
            if 0 <= point <= 0x10FFFF:
                data = chr(point).encode()
                fitting = [
                    sequence
                    for sequence in sequences
                    if len(sequence) == len(data)
                    and all(lo <= byte <= hi for byte, (lo, hi) in zip(data, sequence, strict=True))
                ]
                assert len(fitting) == (low <= point <= high)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a(?=b)", "look-ahead"),
        ("(?<!b)a", "look-behind"),
        (r"(a)\1", "back-reference"),
        (r"a\b", r"\\b"),
        ("a^b", "in the middle"),
        ("(a$)*", "in the middle"),
        ("(?i)a", "flags"),
        ("(?i:a)", "flags"),
        ("(a", "not valid: missing \\)"),
        ("[b-a]", "not valid: bad character range"),
        (r"\p{L}", "not valid: bad escape"),
        ("[[:alpha:]]+", r"a class such as \[\[:alpha:\]\]"),
        ("a{4294967296}", "not valid"),
        (r"[^\x00-\U0010ffff]", "no text at all"),
        ("(" * 5000 + ")" * 5000, "groups inside each other"),
    ],
)
def test_refuses(pattern: str, words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words):
        compile_dfa(pattern)


BOMBS = {
    "many states of the DFA": "[ab]*a[ab]{20}",
    "many states of the NFA": "(a{9999}){9999}",
    "nested quantifiers": "((a{1,99}){1,99}){1,99}",
    "empty text repeated": "(?:){4000000000}",
    "empty text repeated often": "((((){999}){999}){999}){999}",
    "many places at once": "(" + "|".join(f"[ab]*{i}" for i in range(4000)) + ")*",
    "large sets": "(.?){3000}",
    "long": "a" * 200_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end(name: str) -> None:
    with pytest.raises(VLLMValidationError, match=r"too large|allowed: 30000"):
        compile_dfa(BOMBS[name])


# -- masks --

PIECES = [text.encode() for text in ("a", "b", "1", "é", "😀", "ab", "bé", "aab", "1😀")]
PIECES += [
    "é".encode()[:1],
    "é".encode()[1:],
    "😀".encode()[:3],
    "😀".encode()[3:],
    b"\xff",
    b"a\xc3",
]


@cache
def all_texts() -> list[str]:
    return ["".join(each) for n in range(5) for each in itertools.product("ab1é😀\n", repeat=n)]


@settings(max_examples=40)
@given(patterns(is_finite=True), st.lists(st.sampled_from([*PIECES, None]), max_size=24), st.data())
def test_masks_are_what_trying_every_token_finds(
    pattern: str, tokens: list[bytes | None], data: st.DataObject
) -> None:
    """A token is allowed if tokens behind it can write the rest of a text that matches."""
    assume(not set(r".^W") & set(pattern))  # of few characters, so that all texts can be tried
    tokens = [None, *tokens]
    texts = {text.encode() for text in all_texts() if re.fullmatch(pattern, text, re.ASCII)}
    beginnings = {text[:n] for text in texts for n in range(len(text) + 1)}

    @cache
    def can_end(text: bytes) -> bool:
        return text in texts or any(can_end(text + tokens[i]) for i in try_all(text))

    def try_all(text: bytes) -> list[int]:
        return [i for i, token in enumerate(tokens) if token and text + token in beginnings]

    if not can_end(b""):
        with pytest.raises(VLLMValidationError, match="can write no text"):
            make_grammar(tokens, pattern)
        return
    grammar, text = make_grammar(tokens, pattern), b""
    while not grammar.is_terminated():
        expected = {i for i in try_all(text) if can_end(text + tokens[i])}
        expected |= EOS if text in texts else set()
        assert allowed_tokens(grammar, len(tokens)) == expected
        token_id = data.draw(st.sampled_from(sorted(expected)))
        assert grammar.accept_tokens("", [token_id])
        text += tokens[token_id] or b""
    assert allowed_tokens(grammar, len(tokens)) == set()
    assert text in texts


def test_a_character_split_over_tokens() -> None:
    """With a token for each byte, é and 😀 are written in two and four steps."""
    tokens: list[bytes | None] = [None, *(bytes([byte]) for byte in range(256))]
    grammar = make_grammar(tokens, "é|😀")
    assert allowed_tokens(grammar, 257) == {1 + 0xC3, 1 + 0xF0}
    assert grammar.accept_tokens("", [1 + byte for byte in "😀".encode()[:2]])
    assert allowed_tokens(grammar, 257) == {1 + "😀".encode()[2]}
    assert not grammar.accept_tokens("", [1 + byte for byte in (*"😀".encode()[2:], 0xC3)])
    assert allowed_tokens(grammar, 257) == EOS  # three were accepted, the fourth was not


def test_stop_tokens_are_no_text() -> None:
    """A stop token of the request's own may have bytes; it is allowed at an end only."""
    grammar = make_grammar([None, b"a", b"b"], "a[ab]?", frozenset({0, 2}))
    assert allowed_tokens(grammar, 3) == {1}
    assert grammar.accept_tokens("", [1])
    assert allowed_tokens(grammar, 3) == {0, 1, 2}
    assert grammar.accept_tokens("", [2])
    assert grammar.is_terminated()


def test_a_choice_is_taken_literally() -> None:
    backend = NanoBackend(Vocabulary((None, *(bytes([byte]) for byte in range(256))), EOS))
    spec = GrammarSpec(StructuredOutputOptions.CHOICE, '["a.c", "a\\n[x]", ""]', EOS)
    grammar = backend.compile_grammar(spec)
    assert allowed_tokens(grammar, 257) == {0, 1 + ord("a")}
    assert grammar.validate_tokens([1 + byte for byte in b"abc"]) == [1 + ord("a")]
    text = [1 + byte for byte in b"a\n[x]"]
    assert grammar.validate_tokens([*text, 0, 5]) == [*text, 0]
    assert grammar.states == [1]  # nothing has changed
