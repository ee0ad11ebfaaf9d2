"""The three backends of structured outputs against each other, `re` and `jsonschema`: masks, tokens
taken back, and texts made by drawing allowed tokens at random.

JSON_SCHEMA_TEST_SUITE names a checkout of github.com/json-schema-org/JSON-Schema-Test-Suite, for
the test that reads it (`pytest -m slow -s` shows what each backend takes).
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_automaton import allowed_tokens, patterns

from nanoserve.exceptions import VLLMValidationError
from nanoserve.extras.structured_output.backend import (
    GrammarSpec,
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
    get_backend_cls,
)
from nanoserve.extras.structured_output.compile_process import CompileGuard
from nanoserve.extras.structured_output.vocabulary import Vocabulary

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("xgrammar")
pytest.importorskip("llguidance")

EOS = 0
STOPS = frozenset({EOS})
NAMES = ("nano", "xgrammar", "guidance")
JSON_NAMES = NAMES[1:]


@cache
def vocabulary() -> Vocabulary:
    """Every byte, tokens that cross the borders of JSON and of characters, special tokens."""
    pieces = [
        '"a',
        '":',
        '": ',
        '", "',
        '"]',
        "}}",
        '{"',
        "true",
        "null",
        "12",
        "0.",
        "-1",
        "ab",
        "  ",
    ]
    pieces += ["é", "éa", "name", "\n ", ',"', "]}", "[[", "e+", '\\"', "\\u00"]
    tokens = [None, *(bytes([byte]) for byte in range(256)), *(text.encode() for text in pieces)]
    tokens += ["😀".encode()[1:], b"a" + "é".encode()[:1], None, None]
    return Vocabulary(tuple(tokens), STOPS)


@cache
def backend(name: str) -> StructuredOutputBackend:
    return get_backend_cls(name)(vocabulary())


def spec_of(kind: str, text: str, **options: Any) -> GrammarSpec:
    return GrammarSpec(StructuredOutputOptions[kind], text, STOPS, **options)


def make_grammar(name: str, kind: str, text: str, **options: Any) -> StructuredOutputGrammar:
    """Raises ValueError at the door or in compiling."""
    spec = spec_of(kind, text, **options)
    get_backend_cls(name).check(spec)
    return backend(name).compile_grammar(spec)


def mask(grammar: StructuredOutputGrammar) -> set[int]:
    return allowed_tokens(grammar, len(vocabulary().tokens))


def write(tokens: list[int]) -> str:
    """The text of these tokens."""
    return b"".join(vocabulary().tokens[token] or b"" for token in tokens).decode(errors="replace")


def read(text: str) -> list[int]:
    """Tokens for a text: one for each byte."""
    return [1 + byte for byte in text.encode()]


def walk(grammar: StructuredOutputGrammar, seed: int, most: int = 300) -> list[int] | None:
    """Draw allowed tokens until the end; None if it does not come. Now and then a token that closes
    something is preferred, so that most texts do end."""
    rng, tokens = random.Random(seed), list[int]()
    closing = {EOS} | {i for i, t in enumerate(vocabulary().tokens) if t and t in b'"}]'}
    while len(tokens) < most:
        allowed = sorted(mask(grammar))
        preferred = [token for token in allowed if token in closing]
        token = rng.choice(preferred if preferred and rng.random() < 0.3 else allowed)
        assert grammar.accept_tokens("", [token])
        if grammar.is_terminated():
            return tokens
        tokens.append(token)
    return None


# -- what all three have in common --


@pytest.mark.parametrize("name", JSON_NAMES)
@given(patterns(), st.integers(0, 100))
@settings(max_examples=20)
def test_masks_of_three_backends_are_equal(name: str, pattern: str, seed: int) -> None:
    """One expression has one meaning, though each library has a dialect of its own."""
    ours = make_grammar("nano", "REGEX", pattern)
    theirs = make_grammar(name, "REGEX", pattern)
    rng = random.Random(seed)
    for _ in range(8):
        allowed = mask(ours)
        assert mask(theirs) == allowed
        token = rng.choice(sorted(allowed))
        assert ours.accept_tokens("", [token]) and theirs.accept_tokens("", [token])
        assert ours.is_terminated() == theirs.is_terminated()
        if ours.is_terminated():
            break


DIALECTS = [  # what some library reads otherwise than Python's re
    (r"\A[a-c]+\Z", ("ab", "Aab", "abZ")),
    (r"^\d\w\s?$", ("1a", "1é", "٣a", "1a\xa0")),
    (r"^[^]a]$", ("b", "a", "]", "ba]")),
    (r"^[]a]$", ("a", "]", "a]")),
    ("^a{,2}$", ("a", "aaa", "a{,2}")),
    (r"^\060.$", ("0é", "00", "\x0060")),
    ("(?x) ^ a b # a comment $", ("ab", " a b")),
    ("^(?P<name>a)(?#comment)b$", ("ab", "acommentb")),
    ("^(?:|a|bb)$", ("", "a", "bb", "b")),
    (r"^[\w.-]+@[^\W_]{2}\.(?:de|no)$", ("a.b-c@x1.de", "é@x1.no", "a@_1.no")),
    (r"^\u00e9\N{SNOWMAN}\U0001f642$", ("é☃🙂", "é☃")),
]


@pytest.mark.parametrize("name", JSON_NAMES)
@pytest.mark.parametrize(("pattern", "texts"), DIALECTS)
def test_dialects_of_regular_expressions(name: str, pattern: str, texts: tuple[str, ...]) -> None:
    """In JSON, too, each library is told what is meant."""
    forms = [
        ("REGEX", pattern, ""),
        ("JSON", json.dumps({"type": "string", "pattern": pattern}), '"'),
    ]
    if name == "xgrammar":
        tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}}
        forms.append(("STRUCTURAL_TAG", json.dumps(tag), ""))
    for kind, constraint, quote in forms:
        grammar = make_grammar(name, kind, constraint)
        for text in texts:
            found = grammar.validate_tokens([*read(quote + text + quote), EOS])
            assert (EOS in found) == bool(re.fullmatch(pattern, text, re.ASCII)), (kind, text)


@pytest.mark.parametrize("name", JSON_NAMES)
@pytest.mark.parametrize(
    "data", [b"\xed\xa0\x80", b"\xc0\x80", b"\xe0\x80\x80", b"\xf4\x90\x80\x80", b"\xff"]
)
def test_a_character_is_written_in_valid_bytes(name: str, data: bytes) -> None:
    """What is no character would become several in the text: more than a pattern allows."""
    grammar = make_grammar(name, "JSON", '{"type": "string", "pattern": "^[^a]$"}')
    found = grammar.validate_tokens([1 + byte for byte in (*b'"', *data)])
    assert len(found) < 1 + len(data)


@pytest.mark.parametrize("name", JSON_NAMES)
def test_spaces_of_a_schema(name: str) -> None:
    """There is no agreement about those beyond ASCII: \\s has none of them, \\S neither."""
    cases = {r"^\S$": "xé", r"^[^\s]$": "xé", r"^[\S ]$": "x é", "^.$": " é"}
    for pattern, allowed in cases.items():
        grammar = make_grammar(name, "JSON", json.dumps({"type": "string", "pattern": pattern}))
        for char in (*allowed, "\u2028", "\u2029"):
            found = grammar.validate_tokens([*read(f'"{char}"'), EOS])
            assert (EOS in found) == (char in allowed), (pattern, char)
        for char in "\xa0\u3000\ufeff" if pattern != "^.$" else "":
            assert EOS not in grammar.validate_tokens([*read(f'"{char}"'), EOS])
    for pattern in (r"^\s$", r"^[^\S]$"):
        grammar = make_grammar(name, "JSON", json.dumps({"type": "string", "pattern": pattern}))
        assert EOS in grammar.validate_tokens([*read('" "'), EOS])
        assert EOS not in grammar.validate_tokens([*read('"\xa0"'), EOS])


@pytest.mark.parametrize("name", JSON_NAMES)
@pytest.mark.parametrize("pattern", ["^[^é]$", "^é?.$", r"^[^\u00e9]$"])
def test_a_class_writes_no_quote_into_json(name: str, pattern: str) -> None:
    """It would end the string, or begin an escape."""
    grammar = make_grammar(name, "JSON", json.dumps({"type": "string", "pattern": pattern}))
    assert EOS in grammar.validate_tokens([*read('"x"'), EOS])
    for text in ('"""', '"\\"', '"\x01"', '"\n"'):
        assert EOS not in grammar.validate_tokens([*read(text), EOS])


def test_a_class_of_no_character() -> None:
    """Must not become an empty text."""
    pattern = r"[^\x00-\U0010ffff]|a"
    for name in ("nano", "guidance"):
        assert mask(make_grammar(name, "REGEX", pattern)) == set(read("a"))
    with pytest.raises(VLLMValidationError, match="no character"):
        make_grammar("xgrammar", "REGEX", pattern)


GRAMMARS = {
    "nano": ("REGEX", "([a-cé]{1,3}-?)*"),
    "xgrammar": ("JSON", '{"type": "array", "items": {"enum": ["a", "é", 12, null]}}'),
    "guidance": ("JSON", '{"type": "array", "items": {"enum": ["a", "é", 12, null]}}'),
}


@pytest.mark.parametrize("name", NAMES)
def test_tokens_taken_back(name: str) -> None:
    """After any accept, rollback and validate, the mask is that of a grammar which got only
    the tokens that are left."""
    rng = random.Random(1)
    first = make_grammar(name, *GRAMMARS[name])
    for _ in range(20):
        grammar, tokens = first.fork(), list[int]()
        for _ in range(12):
            allowed = sorted(mask(grammar))
            drafts = [rng.choice(allowed) if allowed else EOS, rng.randrange(270), EOS]
            valid = grammar.validate_tokens(drafts)
            other = first.fork()
            assert other.accept_tokens("", tokens)
            assert valid == take_valid(other, drafts)
            match rng.randrange(5):
                case 0 if tokens:
                    count = rng.randint(1, len(tokens))
                    grammar.rollback(count)
                    del tokens[-count:]
                case _ if not grammar.is_terminated():
                    ok = grammar.accept_tokens("", drafts)
                    assert ok == (valid == drafts or EOS in valid)
                    tokens += valid
            fresh = first.fork()
            assert fresh.accept_tokens("", tokens)
            assert mask(grammar) == mask(fresh)
            assert grammar.is_terminated() == fresh.is_terminated() == (EOS in tokens)
    assert mask(first) == mask(make_grammar(name, *GRAMMARS[name]))


def take_valid(grammar: StructuredOutputGrammar, tokens: list[int]) -> list[int]:
    """What validate_tokens has to find, by the masks."""
    found = list[int]()
    for token in tokens:
        if token not in mask(grammar):
            break
        assert grammar.accept_tokens("", [token])
        found.append(token)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_choices(name: str) -> None:
    choices = ["yes", 'a "quoted" one', "tab\t, line\n, \\ and \x01\x7f\b\f", "é😀", "ye"]
    grammar = make_grammar(name, "CHOICE", json.dumps(choices))
    for choice in choices:
        assert grammar.validate_tokens([*read(choice), EOS]) == [*read(choice), EOS]
    seen = {write(walk(grammar.fork(), seed) or []) for seed in range(60)}
    assert seen == set(choices)


@pytest.mark.parametrize("name", NAMES)
def test_no_special_token_is_ever_allowed(name: str) -> None:
    anything = make_grammar(name, "REGEX", r"(.|\n)*")
    special = {i for i, token in enumerate(vocabulary().tokens) if token is None}
    assert mask(anything) & special == {EOS}
    assert anything.validate_tokens([max(special)]) == []
    assert not anything.accept_tokens("", [max(special)])
    assert anything.accept_tokens("", read("ok"))


# -- JSON --


@pytest.mark.parametrize("name", JSON_NAMES)
@pytest.mark.parametrize("compact", [False, True])
def test_json_object(name: str, compact: bool) -> None:
    if name == "xgrammar" and compact:
        with pytest.raises(VLLMValidationError, match="disable_any_whitespace"):
            make_grammar(name, "JSON_OBJECT", "", disable_any_whitespace=True)
        return
    grammar = make_grammar(name, "JSON_OBJECT", "", disable_any_whitespace=compact)
    spaces = "" if compact else " \n"
    for text in ("{}", '{"a":[1.5e3,null,{"b":"\\u0007"}]}', f'{{"a":{spaces}true}}'):
        assert grammar.validate_tokens([*read(text), EOS])[-1:] == [EOS], text
    for text in ("[]", "1", '{"a"', "{a:1}", '{"a":01}'):
        assert EOS not in grammar.validate_tokens([*read(text), EOS]), text
    for seed in range(10):
        if (tokens := walk(grammar.fork(), seed)) is not None:
            text = write(tokens)
            assert isinstance(json.loads(text), dict)
            assert not compact or not re.search(
                r"[{:,\[] |\n", re.sub(r'"([^"\\]|\\.)*"', "", text)
            )


@pytest.mark.parametrize("kind", ["JSON", "JSON_OBJECT"])
def test_white_space_ends(kind: str) -> None:
    """Or else a weak model that has begun a line break would never come to the brace."""
    schema = {"type": "object", "properties": {"a": {"type": "object"}}}
    grammar = make_grammar("xgrammar", kind, json.dumps(schema) if kind == "JSON" else "")
    for text in ("{%s}", '{"a":%s{}}', '{"a":{%s}}', '{"a":{}%s}'):
        for spaces, may_end in (("\n" + 6 * " ", True), (100 * "\n", False)):
            found = grammar.validate_tokens([*read(text % spaces), EOS])
            assert (EOS in found) is may_end, text


@pytest.mark.parametrize("name", JSON_NAMES)
def test_grammars(name: str) -> None:
    """Nested text, in the notations that the package reads."""
    for text in ('root ::= "(" root ")" | "x"', 'start: "(" start ")" | "x"'):
        grammar = make_grammar(name, "GRAMMAR", text)
        assert grammar.validate_tokens([*read("((x))"), EOS])[-1] == EOS
        assert grammar.validate_tokens(read("((x)))")) == read("((x))")


TAG = {
    "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f"],
}


@pytest.mark.parametrize("name", JSON_NAMES)
def test_structural_tags(name: str) -> None:
    grammar = make_grammar(name, "STRUCTURAL_TAG", json.dumps(TAG))
    for text in ("free text", "a <f>12</f> b <f>3</f>"):
        assert grammar.validate_tokens([*read(text), EOS])[-1] == EOS
    assert grammar.validate_tokens(read("a <f>x")) == read("a <f>")


LEAVES = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "integer", "minimum": -3, "exclusiveMaximum": 120},
        {"type": "number", "minimum": 0.5, "maximum": 7},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 3},
        {"type": "string", "pattern": "^[a-c]+-[0-9]{2}$"},
        {"type": "string", "pattern": "b.d"},
        {"type": "string", "pattern": r"^[^é]{1,2}\S+[^\s<]$"},
        {"type": "string", "format": "date"},
        {"enum": ["x", 1, None, [2], {"y": "é"}]},
        {"const": 'a "b" \\'},
        {"type": ["integer", "null"]},
        {"type": "array", "maxItems": 2},
        True,
    ]
)


def extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.sampled_from(["a", "b", "name", "é", 'q"\\']), inner, max_size=3)

    @st.composite
    def objects(draw: st.DrawFn) -> dict[str, Any]:
        properties = draw(named)
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        schema["required"] = [name for name in properties if draw(st.booleans())]
        if draw(st.booleans()):
            schema["additionalProperties"] = draw(st.sampled_from([False, {"type": "null"}]))
        if draw(st.booleans()):
            schema["maxProperties"] = len(properties)
        if draw(st.booleans()):
            schema["minProperties"] = min(1, len(properties))
        return schema

    @st.composite
    def arrays(draw: st.DrawFn) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "items": draw(inner), "maxItems": 3}
        if draw(st.booleans()):
            schema["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=2))
        if draw(st.booleans()):
            schema["minItems"] = draw(st.integers(0, 3))
        return schema

    return st.one_of(objects(), arrays(), st.lists(inner, min_size=1, max_size=3).map(any_of))


def any_of(schemas: list[Any]) -> dict[str, Any]:
    return {"anyOf": schemas}


SCHEMAS = st.recursive(LEAVES, extend, max_leaves=6)


@pytest.mark.parametrize("name", JSON_NAMES)
@given(SCHEMAS, st.integers(0, 1000))
@settings(max_examples=40)
def test_texts_fit_their_schema(name: str, schema: Any, seed: int) -> None:
    """Whatever the model draws; a schema that the backend cannot follow is refused."""
    assert_fit(name, schema, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", JSON_NAMES)
@given(SCHEMAS, st.integers(0, 1000))
@settings(max_examples=1000)
def test_many_texts_fit_their_schema(name: str, schema: Any, seed: int) -> None:
    assert_fit(name, schema, seed)


def assert_fit(name: str, schema: Any, seed: int) -> bool:
    """False if the schema is refused, or no text came to its end."""
    try:
        grammar = make_grammar(name, "JSON", json.dumps(schema))
    except VLLMValidationError:
        return False
    ended = [walk(grammar.fork(), seed + i) for i in range(3)]
    for tokens in filter(None, ended):
        text = write(tokens)
        value = json.loads(text, parse_constant=refuse_constant)
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
    return any(ended)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


KEYS = """type properties items required anyOf oneOf allOf enum const $ref pattern patternProperties
propertyNames minLength maxLength minProperties additionalProperties format uniqueItems minimum a
structures triggers begin schema end json_schema"""
ANYTHING = st.recursive(
    st.sampled_from([None, True, 1, -1.5, "a", "string", "object", "#", "#/a", "(", []]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(KEYS.split()),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("name", JSON_NAMES)
@pytest.mark.parametrize("kind", ["JSON", "STRUCTURAL_TAG"])
@given(ANYTHING.filter(lambda value: isinstance(value, dict)))
@settings(max_examples=50)
def test_nonsense_is_a_value_error(name: str, kind: str, schema: Any) -> None:
    """What is refused is refused at the door or by the compiler, with an error of the request."""
    with suppress(VLLMValidationError):
        mask(make_grammar(name, kind, json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"minimum": 3}, "minimum without a type"),
        ({"type": []}, "an empty type"),
        ({"type": "array", "items": {"anyOf": []}}, "an empty anyOf"),
        ({"type": "string", "minLength": "2"}, "the minLength '2'"),
        ({"anyOf": [{"type": "object"}], "minProperties": 2}, "minProperties beside anyOf"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "may overlap"),
        ({"type": "object", "required": ["a"]}, "not in properties"),
        ({"properties": {"a": {"not": {}}}}, "not"),
        ({"type": "string", "pattern": "a(?=b)"}, "look-ahead"),
        ({"type": "string", "format": "idn-email"}, "idn-email"),
        ({"type": "string", "pattern": r'^"\\\\$'}, "pattern with the character"),
        ({"type": "string", "pattern": r"^\t$"}, "pattern with the character"),
        ({"type": "string", "pattern": "^[\x01-\x05]$"}, "pattern with the character"),
        ({"type": "string", "format": "ipv4"}, "ipv4"),
        ({"type": "string", "format": "json-pointer"}, "json-pointer"),
        ({"type": "number", "minimum": 1e-9, "maximum": 2e-9}, "numbers between"),
        ({"$ref": "https://example.com/schema"}, r"\$ref"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "uniqueItems": True}}},
            "uniqueItems",
        ),
        ({"allOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}, "allOf of several"),
        (
            {"properties": {"a": {}}, "additionalProperties": {"type": "null"}},
            "additionalProperties beside properties",
        ),
        (
            {"properties": {"a": {"type": "null"}}, "additionalProperties": True},
            "additionalProperties beside properties",
        ),
    ],
)
def test_what_xgrammar_would_ignore_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words):
        make_grammar("xgrammar", "JSON", json.dumps(schema))


def test_a_deleted_working_directory_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    guard = CompileGuard(vocabulary())
    guard.compile("xgrammar", spec_of("REGEX", "a+"))
    guard.close()


@pytest.mark.parametrize("name", JSON_NAMES)
@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("STRUCTURAL_TAG", '{"structures": 5, "triggers": 5}', "a wrong type"),
        ("STRUCTURAL_TAG", '{"structures": []}', "a part of it is missing"),
        ("JSON", '{"type": "nothing"}', "(Unsupported|Invalid) type"),
    ],
)
def test_what_is_no_schema_is_told_in_words(name: str, kind: str, text: str, words: str) -> None:
    """And without the place in the package's own source."""
    with pytest.raises(VLLMValidationError, match=words) as caught:
        make_grammar(name, kind, text)
    assert ".cc:" not in str(caught.value)


def test_alternatives_that_exclude_each_other() -> None:
    """As pydantic writes a union with a discriminator."""
    kinds = [
        {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
        for kind in ("cat", "dog")
    ]
    schema = {"oneOf": [{"$ref": "#/$defs/cat"}, kinds[1]], "$defs": {"cat": kinds[0]}}
    assert assert_fit("xgrammar", schema, 0)


def recursive(name: str) -> dict[str, Any]:
    properties = {"next": {"$ref": f"#/$defs/{name}"}}
    return {"type": "object", "properties": properties, "required": ["next"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"const": number} for number in range(5000)]},
        {"oneOf": [{"enum": [*range(0, 9000, 2)]}, {"enum": [*range(1, 9000, 2)]}]},
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {"a": recursive("a"), "b": recursive("b")},
        },
    ],
)
def test_alternatives_that_are_too_many_to_compare(schema: Any) -> None:
    """What does not end soon is not tried: the door is no place to wait."""
    start = time.perf_counter()
    with pytest.raises(VLLMValidationError, match="may overlap"):
        make_grammar("xgrammar", "JSON", json.dumps(schema))
    assert time.perf_counter() - start < 1


# -- the JSON Schema Test Suite --

SUITE = os.environ.get("JSON_SCHEMA_TEST_SUITE")
DRAFT = "tests/draft2020-12"


@pytest.mark.slow
@pytest.mark.skipif(SUITE is None, reason="set JSON_SCHEMA_TEST_SUITE to a checkout of the suite")
@pytest.mark.parametrize("name", JSON_NAMES)
def test_json_schema_test_suite(name: str) -> None:
    """No value that a schema of the suite forbids is allowed, and all texts drawn are valid, for
    every schema that the backend takes."""
    taken, total, mistakes, unread = Counter[str](), Counter[str](), list[str](), 0
    for file in sorted(Path(SUITE or "", DRAFT).glob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8")):
            schema = case["schema"]
            total[file.stem] += 1
            try:
                grammar = make_grammar(name, "JSON", json.dumps(schema))
            except VLLMValidationError:
                continue
            taken[file.stem] += 1
            title = f"{file.stem}: {case['description']}"
            for test in case["tests"]:
                text = json.dumps(test["data"], ensure_ascii=False)
                if not test["valid"] and EOS in grammar.validate_tokens([*read(text), EOS]):
                    mistakes.append(f"{title}: {test['description']}: {text}")
            try:
                for seed in range(5):
                    assert_fit(name, schema, seed)
            except (jsonschema.SchemaError, re.error):
                unread += 1  # a pattern of ECMAScript that Python's re does not have
            except (AssertionError, ValueError, jsonschema.ValidationError) as error:
                mistakes.append(f"{title}: {str(error).splitlines()[0]}")
    print(f"\n{name}: {taken.total()} of {total.total()} schemas; {unread} not read by jsonschema")
    print("  ".join(f"{stem} {taken[stem]}/{number}" for stem, number in sorted(total.items())))
    assert not mistakes, "\n".join(mistakes)
