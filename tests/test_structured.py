"""Outputs that obey a grammar: what may come is what trying every token finds, and whatever else
the engine does, the text is valid. `re` and `jsonschema` are the judges.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from nanoserve import LLM, RequestOutput, SamplingParams

pytest.importorskip("xgrammar")
from nanoserve import StructuredOutputsParams
from nanoserve.chapters.structured_output import dfa
from nanoserve.chapters.structured_output.automaton import NanoBackend
from nanoserve.chapters.structured_output.backend import GrammarSpec, StructuredOutputGrammar
from nanoserve.chapters.structured_output.backend_xgrammar import XgrammarBackend
from nanoserve.chapters.structured_output.manager import StructuredOutputManager
from nanoserve.chapters.structured_output.parts import apply_bitmask
from nanoserve.chapters.structured_output.vocabulary import Vocabulary, read_vocabulary
from nanoserve.tools.check_blocks import check_blocks

PIECES = ("ab", "bé", "aab", "1😀", '"a', '":', '", "', '"]', "}}", "true", "12", "-1", "  ", "éa")
EOS, BYTES = 0, [None, *(bytes([byte]) for byte in range(256)), *(text.encode() for text in PIECES)]
BYTES += ["😀".encode()[1:], b"a" + "é".encode()[:1], None]
VOCABULARY = Vocabulary(tuple(BYTES), frozenset({EOS}))
BACKENDS = {"nano": NanoBackend, "xgrammar": XgrammarBackend}


def make_grammar(name: str, kind: str, text: str, *args: Any) -> StructuredOutputGrammar:
    """On a vocabulary of all bytes, tokens across characters, and special tokens."""
    spec = GrammarSpec(kind, text, *(args or [frozenset({EOS})]))
    return BACKENDS[name](VOCABULARY).compile_grammar(spec)


def mask_of(grammar: StructuredOutputGrammar) -> set[int]:
    """The tokens that may come."""
    grammar.fill_bitmask(words := np.full(-(-len(BYTES) // 32), -1, np.int32))
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


# -- regular expressions --


@st.composite
def patterns(draw: st.DrawFn, is_finite: bool = False) -> str:
    """Regular expressions; of up to four characters of "ab1é😀" if is_finite."""
    atoms = ["a", "b", "é", "😀", "[ab]", "[1]"] if is_finite else [".", "[^a]", r"\W", r"[^\Wé]"]
    repeats = ["?", "{0,1}"] if is_finite else ["*", "+", "{2}", "{1,3}", "{,2}", "{2,}", "*?"]

    def extend(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        pairs = st.tuples(inner, inner)
        return st.one_of(
            pairs.map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
            pairs.map("".join),
            st.tuples(inner, st.sampled_from(repeats)).map(lambda pair: f"({pair[0]}){pair[1]}"),
        )

    leaves = st.sampled_from([*atoms, "a", "[ab1]", "é"])
    return draw(st.recursive(leaves, extend, max_leaves=3 if is_finite else 6))


def is_match(pattern: str, text: str) -> bool:
    automaton = dfa.determinize(dfa.build_nfa(pattern))
    return bool(automaton.is_accepting[automaton.walk(dfa.START, text.encode())])


@settings(max_examples=60)
@given(st.data(), patterns())
def test_matches_what_re_matches(data: st.DataObject, pattern: str) -> None:
    alphabet = st.sampled_from("ab1é\n😀")
    valid = st.from_regex(pattern, fullmatch=True, alphabet=alphabet)
    text = data.draw(st.text(alphabet, max_size=6) | valid)
    assert is_match(pattern, text) == bool(re.fullmatch(pattern, text, re.ASCII))


SYNTAX = {"^a$|^b$": "b", "": "", r"\A\x41A\U0001F600\Z": "AA😀", "(?P<name>a)(?#comment)b": "ab"}
SYNTAX |= {
    "(?x) a b # comment": "ab",
    r"[\]\-a]+": "]-a",
    r"\s\S\w\W\d\D": " a_é1é",
    "[^a-zb]+": "1",
}


@pytest.mark.parametrize("pattern", SYNTAX)
def test_syntax(pattern: str) -> None:
    assert re.fullmatch(pattern, SYNTAX[pattern], re.ASCII)
    assert is_match(pattern, SYNTAX[pattern]) and not is_match(pattern, SYNTAX[pattern] + "c")


@given(st.characters(), st.characters(), st.characters())
def test_classes_of_characters_of_any_length(low: str, high: str, char: str) -> None:
    low, high = min(low, high), max(low, high)
    pattern = f"[\\U{ord(low):08x}-\\U{ord(high):08x}]"
    for each in (low, high, char, chr(ord(low) - 1), chr(ord(high) + 1)) if low > "\0" else "":
        if not "\ud800" <= each <= "\udfff":
            assert is_match(pattern, each) == (low <= each <= high)


REFUSED = ["a(?=b)", "(?<!b)a", r"(a)\1", r"a\b", "a^b", "(a$)*", "(a$|b)c", "(?i)a", "(?i:a)"]
REFUSED += ["(a", "[b-a]", r"\p{L}", r"b[^\x00-\U0010ffff]", "(" * 5000 + ")" * 5000]
REFUSED += ["[ab]*a[ab]{20}", "(a{9999}){9999}", "((a{1,99}){1,99}){1,99}", "(.?){3000}"]


@pytest.mark.parametrize("pattern", REFUSED)
def test_refused_or_too_large(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dfa, "MAX_SECONDS", 0.1)
    with pytest.raises(ValueError, match=r".+"):
        dfa.determinize(dfa.build_nfa(pattern))


# -- masks --


TEXTS = ["".join(each) for n in range(5) for each in itertools.product("ab1é😀", repeat=n)]


def assert_masks(grammar: StructuredOutputGrammar, texts: set[bytes], rng: random.Random) -> None:
    """A token is allowed if one of these texts begins with the output and this token. Follow some
    tokens; now and then, take some back."""
    beginnings = {text[:n] for text in texts for n in range(len(text) + 1)}
    tokens: list[int] = []
    while not grammar.is_terminated():
        text = b"".join(BYTES[token] or b"" for token in tokens)
        expected = {i for i, token in enumerate(BYTES) if token and text + token in beginnings}
        expected |= {EOS} if text in texts else set()
        assert mask_of(grammar) == expected
        wrong = rng.randrange(len(BYTES))
        assert grammar.accept_tokens([wrong]) == (wrong in expected)
        grammar.rollback(int(wrong in expected))
        if tokens and rng.random() < 0.2:
            number = rng.randint(1, len(tokens))
            grammar.rollback(number)
            del tokens[-number:]
            continue
        tokens.append(rng.choice(sorted(expected)))
        assert grammar.accept_tokens(tokens[-1:]) == 1 and grammar.num_tokens == len(tokens)
    assert grammar.accept_tokens([1]) == 0


@settings(max_examples=30)
@given(patterns(is_finite=True), st.integers(0, 99))
def test_masks_of_a_regex_are_what_trying_every_token_finds(pattern: str, seed: int) -> None:
    texts = {text.encode() for text in TEXTS if re.fullmatch(pattern, text)}
    assert_masks(make_grammar("nano", "regex", pattern).fork(), texts, random.Random(seed))


@pytest.mark.parametrize("name", BACKENDS)
def test_masks_of_a_choice(name: str) -> None:
    """Taken literally; a character is written in one token, or byte by byte."""
    choices = ["ab", '.* "q" \\', "tab\t, line\n, \x01", "é😀", "é", "aabé"]
    grammar = make_grammar(name, "choice", json.dumps(choices))
    for seed in range(5):
        assert_masks(grammar.fork(), {text.encode() for text in choices}, random.Random(seed))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_stop_token_is_no_text(name: str) -> None:
    """A stop token of the request's own may have bytes; it is allowed at an end only."""
    a, b, c = (1 + ord(letter) for letter in "abc")
    grammar = make_grammar(name, "regex", "a[ac]?", frozenset({EOS, b}))
    for allowed in ({a}, {EOS, a, b, c}, {EOS, b}):
        assert mask_of(grammar) == allowed
        assert grammar.accept_tokens([a]) == (a in allowed)
    assert grammar.accept_tokens([b]) == 1 and grammar.is_terminated()


LEAVES = [
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 120},
    {"type": "number"},
    {"type": ["boolean", "null"]},
    {"type": "string", "minLength": 1, "maxLength": 3},
    {"type": "string", "pattern": "^[a-c]+-[0-9]{2}$"},
    {"enum": ["x", 1, None, [2], 'a "b" \\']},
    {"$ref": "#/$defs/n"},
]


def extend_schema(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "if", "name", "é", 'q"'])
    objects = st.dictionaries(names, inner, min_size=1, max_size=3).map(
        lambda found: {"type": "object", "properties": found, "required": list(found)[::2]}
    )
    arrays = inner.map(lambda each: {"type": "array", "items": each, "minItems": 1, "maxItems": 3})
    return objects | arrays | st.lists(inner, min_size=1, max_size=3).map(lambda s: {"anyOf": s})


SCHEMAS = st.recursive(st.sampled_from(LEAVES), extend_schema, max_leaves=5)


@settings(max_examples=40)
@example({"enum": [{"not": "é"}]}, True, 0)
@given(SCHEMAS, st.booleans(), st.integers(0, 99))
def test_texts_of_a_schema_fit_it(schema: Any, is_compact: bool, seed: int) -> None:
    """Whichever allowed tokens are drawn."""
    schema = {**schema, "$defs": {"n": {"type": "integer", "maximum": 9}}}
    schema_text, rng, tokens = json.dumps(schema), random.Random(seed), list[int]()
    grammar = make_grammar("xgrammar", "json", schema_text, frozenset({EOS}), is_compact)
    closing = {EOS} | {i for i, token in enumerate(BYTES) if token and token in b'"}],'}
    while not grammar.is_terminated() and len(tokens) < 300:
        allowed = mask_of(grammar)
        tokens.append(rng.choice(sorted((rng.random() < 0.3 and allowed & closing) or allowed)))
        assert grammar.accept_tokens(tokens[-1:]) == 1
    if grammar.is_terminated():
        text = b"".join(BYTES[token] or b"" for token in tokens).decode(errors="replace")
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(("rows", "vocab_size"), [([0, 1, 2], 64), ([2, 1], 31), ([2], 100)])
def test_bits_meet_logits(rows: list[int], vocab_size: int) -> None:
    logits = torch.randn(3, vocab_size)
    allowed = np.random.default_rng(0).random((len(rows), -(-vocab_size // 32) * 32)) < 0.5
    bits = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little").view(np.int32))
    expected = logits.clone()
    for row, is_allowed in zip(rows, torch.from_numpy(allowed), strict=True):
        expected[row, ~is_allowed[:vocab_size]] = -torch.inf
    assert torch.equal(apply_bitmask(torch.tensor(rows), bits, logits), expected)


# -- the engine --

PROPERTIES = {
    "name": {"type": "string", "maxLength": 8},
    "age": {"type": "integer", "minimum": 0, "maximum": 99},
    "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES)}
REGEXES = ["[a-f]{3,9}", r"\d{4}-\d\d-\d\d", "(yes|no|maybe)( [a-z]{1,5}){0,2}"]
REGEXES += ["[éà☃🙂]{2,4}", "(ab|abc|abcd)+x|a{0,6}"]  # characters of several tokens, and across
CONSTRAINTS: list[dict[str, Any]] = [{"regex": regex} for regex in REGEXES]
CONSTRAINTS += [{"choice": ["Ada", "Adam", "🙂"]}, {"grammar": 'root ::= "(" root ")" | "x"'}]
CONSTRAINTS += [{"json": SCHEMA, "disable_any_whitespace": True}]
PROMPTS = ["Once upon a time", "The cat", "ababababab, 1, 2, 3"]


def ask(number: int = 0, **fields: Any) -> SamplingParams:
    """Of a model at a temperature of 1.5, which without a grammar writes nothing of the kind."""
    structured = fields.pop("structured_outputs", CONSTRAINTS[number % len(CONSTRAINTS)])
    settings = {"temperature": 1.5, "seed": number, "max_tokens": 60, "n": 1 + number % 3}
    return SamplingParams(structured_outputs=structured, **{**settings, **fields})


REQUESTS = [(PROMPTS[i % 3], ask(i)) for i in range(len(CONSTRAINTS))]
REQUESTS += [(prompt, ask(i, structured_outputs=None)) for i, prompt in enumerate(PROMPTS)]
FEW = {"num_gpu_blocks_override": 24, "block_size": 4, "max_num_batched_tokens": 9}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"async_scheduling": True},
    "recompute": {**FEW, "max_num_seqs": 5},
    "swap": {**FEW, "max_num_seqs": 5, "preemption_mode": "swap", "async_scheduling": True},
    "drafts": {"speculative_config": NGRAM},
    "rejection": {"speculative_config": {**NGRAM, "rejection_sample_method": "standard"}},
}
GetLLM = Callable[..., LLM]
Texts = list[tuple[str, tuple[int, ...], str | None]]


@pytest.fixture(scope="module")
def get_llm() -> Iterator[GetLLM]:
    """get_llm("swap") -> the engine of that name on the demo model, one for the whole module."""
    made: dict[str, LLM] = {}

    def get(name: str = "plain") -> LLM:
        if name not in made:
            made[name] = LLM(**{"num_gpu_blocks_override": 256, **ENGINES[name]})
        return made[name]

    yield get
    for llm in made.values():
        with llm:
            check_blocks(llm.llm_engine.block_manager)
            assert not (llm.llm_engine.block_manager.block_tables or llm.llm_engine.requests)


def texts_of(output: RequestOutput) -> Texts:
    return [(each.text, tuple(each.token_ids), each.finish_reason) for each in output.outputs]


def generate(llm: LLM, *requests: tuple[str, SamplingParams]) -> list[Texts]:
    prompts, params = map(list, zip(*requests, strict=True))
    return [texts_of(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def assert_valid(texts: Texts, constraint: dict[str, Any]) -> None:
    for text, _, finish_reason in texts:
        assert finish_reason == "stop"
        if "json" in constraint:
            jsonschema.validate(json.loads(text), SCHEMA)
        elif "grammar" in constraint:
            assert text == "(" * (len(text) // 2) + "x" + ")" * (len(text) // 2)
        else:
            words = "|".join(map(re.escape, constraint.get("choice", ())))
            assert re.fullmatch(constraint.get("regex", words), text)


@pytest.fixture(scope="module")
def alone(get_llm: GetLLM) -> list[Texts]:
    """The outputs of REQUESTS, each without any other in the engine."""
    return [found for request in REQUESTS for found in generate(get_llm(), request)]


def test_every_output_is_valid(alone: list[Texts]) -> None:
    for texts, constraint in zip(alone, CONSTRAINTS, strict=False):
        assert_valid(texts, constraint)


@pytest.mark.parametrize("name", ["plain", "overlapped", "recompute", "swap", "drafts"])
def test_the_same_tokens_in_any_company(get_llm: GetLLM, alone: list[Texts], name: str) -> None:
    """With grammars and without, whatever is preempted, overlapped or drafted."""
    assert generate(get_llm(name), *REQUESTS[::-1]) == alone[::-1]


def test_drafts_are_accepted_and_rejected(get_llm: GetLLM) -> None:
    """A text that repeats itself needs fewer steps; rejection sampling keeps to the grammar."""
    request = ask(structured_outputs={"regex": "(abc){20}"}, temperature=0, max_tokens=200)
    outputs = list(get_llm("drafts").stream("abcabcabc", request))
    assert "".join(output.outputs[0].text for output in outputs) == "abc" * 20
    assert len(outputs) < sum(len(output.outputs[0].token_ids) for output in outputs) / 2
    found = generate(get_llm("rejection"), *REQUESTS)
    for texts, constraint in zip(found, CONSTRAINTS, strict=False):
        assert_valid(texts, constraint)


def test_steps_that_fail_are_computed_again(
    get_llm: GetLLM, alone: list[Texts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grammars follow the known tokens. Other requests are aborted in between."""
    llm = get_llm()
    executor, abort = llm.llm_engine.executor, llm.llm_engine.abort_request
    launch, steps = executor.launch, itertools.count()

    def launch_or_fail(step: Any) -> Any:
        if (number := next(steps)) in (1, 7, 20):
            raise RuntimeError("the device has failed")
        abort(f"other {number}")
        return launch(step)

    monkeypatch.setattr(executor, "launch", launch_or_fail)
    for number in range(3, 9):
        llm.llm_engine.add_request(f"other {number}", "a", ask(number, max_tokens=9))
    assert generate(llm, *REQUESTS) == alone


def test_where_an_output_ends(get_llm: GetLLM) -> None:
    llm = get_llm()
    [letter] = llm.get_tokenizer().encode("a", add_special_tokens=False)
    for fields, expected in (
        ({"stop_token_ids": [letter], "ignore_eos": True}, "[ab]{2}c?"),  # its own end
        ({"ignore_eos": True}, "[ab]{2}c"),  # as late as it can
        ({"min_tokens": 9}, "[ab]{2}c"),  # the grammar counts more
        ({"stop": ["b"]}, "a*c?"),
    ):
        request = ask(8, structured_outputs={"regex": "[ab]{2}c?"}, **fields)
        for text, _, finish_reason in generate(llm, ("a", request))[0]:
            assert re.fullmatch(expected, text) and finish_reason == "stop", (fields, text)
    cut = ask(structured_outputs={"regex": "[a-f]{40}"}, max_tokens=3)
    [[(text, _, finish_reason)]] = generate(llm, ("x", cut))
    assert re.fullmatch("[a-f]{3,39}", text) and finish_reason == "length"  # a beginning


def test_what_ends_one_request_alone(get_llm: GetLLM) -> None:
    """A processor that forces a forbidden token, limits that leave none, a grammar that fails."""
    llm = get_llm()
    [forbidden] = llm.get_tokenizer().encode("z", add_special_tokens=False)

    def force(output: list[int], logits: Any) -> Any:
        return logits.index_fill(0, torch.tensor(forbidden), 99.0) if len(output) == 2 else logits

    forced = ask(structured_outputs={"regex": "[a-f]{30}"}, logits_processors=[force])
    none_left = ask(structured_outputs={"regex": "é"}, allowed_token_ids=[5])
    requests = llm.make_requests(["a"] * 4, [forced, none_left, ask(), ask()], {})
    requests[2].root.grammar.accept_token = lambda token: 1 // 0
    outputs = {output.request_id: texts_of(output) for output in llm.run_requests(requests)}
    *errors, good = (outputs[request.request_id] for request in requests)
    assert [texts[0][2] for texts in errors] == ["error"] * 3
    assert len(errors[0][0][1]) == 2  # without the forbidden token
    assert_valid(good, CONSTRAINTS[0])


def test_logprobs_are_of_the_model(get_llm: GetLLM) -> None:
    """Before the mask: what the model would rather have said is seen."""
    request = ask(temperature=0, logprobs=1, structured_outputs={"choice": ["zzz"]})
    [output] = get_llm().generate("Once upon a time", request, use_tqdm=False)
    assert output.outputs[0].text == "zzz"
    assert max(each.rank for entry in output.outputs[0].logprobs for each in entry.values()) > 1


@pytest.mark.slow
def test_several_ranks(alone: list[Texts]) -> None:
    with LLM(tensor_parallel_size=2, num_gpu_blocks_override=128) as llm:
        assert generate(llm, *REQUESTS) == alone


# -- the door --

BAD: list[Any] = [
    {},
    {"regex": "a", "choice": ["a"]},
    *({"regex": each} for each in (5, "", "a\0", "(", "(?i)a")),
    *({"choice": each} for each in ([], "yes", ["a", 1])),
    *({"json": each} for each in ("{", 5, {"a": {1, 2}}, {"type": "no type"}, {"multipleOf": 3})),
    *({"json": each} for each in ({"items": {"not": {}}}, '{"items":' * 99 + "{}" + "}" * 99)),
    *({"json": {}, name: 1} for name in ("disable_any_whitespace", "whitespace_pattern")),
    *({"json_object": False}, {"grammar": "root ::= other"}, {"structural_tag": "x"}, 5),
]


@pytest.mark.parametrize("constraint", BAD)
def test_bad_constraints(get_llm: GetLLM, constraint: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        get_llm().generate("a", SamplingParams(structured_outputs=constraint))


def test_a_misspelt_name_is_told() -> None:
    with pytest.raises(TypeError, match="'choise'"):
        StructuredOutputsParams(choise=["a"])
    with pytest.raises(TypeError, match=r"'choise', but .*choice"):
        StructuredOutputsParams.read({"choise": ["a"]})
    for config in ({"backend": "outlines"}, {"backed": "auto"}, 5):
        with pytest.raises((ValueError, TypeError), match=r"back|structured_outputs_config"):
            LLM(structured_outputs_config=config)


def test_without_xgrammar(get_llm: GetLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regex and choice work; others say what to install."""
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    monkeypatch.delitem(sys.modules, XgrammarBackend.__module__)
    used = get_llm().llm_engine.input_processor.structured_output_manager
    manager = StructuredOutputManager(used.config, used.model_config, used.tokenizer)
    manager.grammar_init(StructuredOutputsParams(choice=["a"]), frozenset({EOS}))
    with pytest.raises(ValueError, match="pip install"):
        manager.grammar_init(StructuredOutputsParams(json={}), VOCABULARY.eos_token_ids)


def test_the_options_of_an_engine() -> None:
    """And nothing is loaded before the first request that needs it."""
    config = {"backend": "xgrammar", "disable_any_whitespace": True}
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    with LLM(num_gpu_blocks_override=64, structured_outputs_config=config) as llm:
        generate(llm, ("a", SamplingParams(max_tokens=1)))
        manager = llm.llm_engine.input_processor.structured_output_manager
        assert not {"vocabulary", "nano", "xgrammar"} & vars(manager).keys()
        request = ask(2, structured_outputs=StructuredOutputsParams(json=schema))
        assert {text for text, *_ in generate(llm, ("a", request))[0]} == {'{"a":null}'}
        assert_valid(*generate(llm, ("a", ask(2))), CONSTRAINTS[2])


def test_tokens_are_their_bytes(get_llm: GetLLM) -> None:
    """The bytes of a text's tokens are those of the text; special tokens have none."""
    tokenizer = get_llm().get_tokenizer()
    vocabulary = read_vocabulary(tokenizer, 2100, frozenset(tokenizer.all_special_ids))
    text = "Ada: 12 😀\té, naïve   \n☃ <tool_call>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(vocabulary.tokens[i] or b"?" for i in ids).decode() == text
    assert not any(vocabulary.tokens[i] for i in tokenizer.all_special_ids)
    assert len(vocabulary.tokens) == 2100 and vocabulary.tokens[-1] is None


def test_bytes_of_sentencepiece() -> None:
    """Its tokens write a space as "▁", and bytes by their numbers."""
    pieces = ["<unk>", "</s>", "▁a", "b", "<0xC3>", "<0xA9>", "▁"]
    model = tokenizers.models.BPE(dict(zip(pieces, range(7), strict=True)), [], byte_fallback=True)
    backend, parts = tokenizers.Tokenizer(model), tokenizers.decoders
    backend.decoder = parts.Sequence([parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=pieces[0], eos_token=pieces[1]
    )
    found = read_vocabulary(tokenizer, 7, frozenset({1})).tokens
    assert found == (None, None, b" a", b"b", b"\xc3", b"\xa9", b" ")
