"""Outputs that obey a grammar: in the engine, beside others, whatever else the engine does.

The masks themselves (equal to brute force) are in test_structured_output_backends.py, the server in
test_server_tools.py. Here `re` judges whole outputs of the demo model.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engines import make_engine
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nanoserve import LLM, AsyncLLM, EngineArgs, RequestOutput, SamplingParams
from nanoserve.exceptions import VLLMValidationError

pytest.importorskip("nanoserve.extras.structured_output")
from nanoserve import StructuredOutputsParams
from nanoserve.extras.speculative.proposer import TokenProposer
from nanoserve.extras.structured_output import automaton, manager, params
from nanoserve.sampling_params import StructuredOutputsParams as SameParams

TIMEOUT = 60  # seconds, of everything that waits
# Each of them ends by itself within MAX_TOKENS tokens.
REGEXES = [
    "[a-f]{3,9}",
    r"\d{4}-\d\d-\d\d",
    "(yes|no|maybe)( [a-z]{1,5}){0,2}",
    '("[^"]{0,4}",){1,3}',
]
REGEXES += ["[éà☃🙂]{2,4}", "(ab|abc|abcd)+x|a{0,6}"]  # characters of several tokens; tokens across
MAX_TOKENS = 48
PROMPTS = ["Once upon a time", "The cat", "1, 2, 3, 4"]


def constrained(seed: int = 0, regex: str = REGEXES[0], **fields: Any) -> SamplingParams:
    structured = StructuredOutputsParams(regex=regex)
    settings = {"temperature": 1.5, "seed": seed, "max_tokens": MAX_TOKENS, **fields}
    return SamplingParams(structured_outputs=structured, **settings)


def free(seed: int = 0, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=1.5, seed=seed, max_tokens=12, **fields)


REQUESTS = [(PROMPTS[i % 3], constrained(i, regex, n=1 + i % 2)) for i, regex in enumerate(REGEXES)]
REQUESTS += [(prompt, free(i, n=1 + i % 2)) for i, prompt in enumerate(PROMPTS)]


class WildGuesses(TokenProposer):
    """Drafts that a grammar forbids at once, or later, or not at all."""

    def propose_one(self, seq_id: int, token_ids: np.ndarray, most: int) -> list[int]:
        rng = np.random.default_rng(int(token_ids.sum()))
        seen = rng.choice(token_ids, most).tolist()
        return seen if rng.random() < 0.5 else rng.integers(0, 2048, most).tolist()


GUESSES = {
    "method": "custom_class",
    "model": f"{__name__}.WildGuesses",
    "num_speculative_tokens": 3,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
FEW_BLOCKS = {"num_kv_blocks": 20, "block_size": 4, "max_num_batched_tokens": 9, "max_num_seqs": 5}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"async_scheduling": True},
    "recompute": FEW_BLOCKS,
    "swap": {**FEW_BLOCKS, "preemption_mode": "swap", "async_scheduling": True},
    "one place": {"max_num_seqs": 1},
    "ngram": {"speculative_config": NGRAM},
    "wild drafts": {"speculative_config": GUESSES, "num_kv_blocks": 24, "block_size": 4},
}
Texts = list[tuple[str, tuple[int, ...], str | None]]


@pytest.fixture(scope="module")
def get_llm() -> Iterator[Callable[..., LLM]]:
    """get_llm("swap") -> the engine of that name on the demo model, one for the whole module."""
    made: dict[str, LLM] = {}

    def get(name: str = "plain") -> LLM:
        if name not in made:
            made[name] = LLM(
                **{"num_kv_blocks": 256, "max_num_batched_tokens": 512, **ENGINES[name]}
            )
        return made[name]

    yield get
    for llm in made.values():
        with closing(llm):
            assert_idle(llm)


def assert_idle(llm: LLM) -> None:
    manager = llm.engine.block_manager
    manager.check()
    assert manager.num_free_blocks == llm.engine.executor.num_kv_blocks
    assert not llm.engine.has_unfinished_requests()


def texts(output: RequestOutput) -> Texts:
    return [(each.text, tuple(each.token_ids), each.finish_reason) for each in output.outputs]


def run(llm: LLM) -> dict[str, RequestOutput]:
    """Step to the end; the last output of each request."""
    last: dict[str, RequestOutput] = {}
    for _ in range(5000):
        if not llm.engine.has_unfinished_requests():
            return last
        last |= {output.request_id: output for output in llm.engine.step()}
    raise AssertionError("it does not end")


@pytest.fixture(scope="module")
def alone(get_llm: Callable[..., LLM]) -> list[Texts]:
    """The outputs of REQUESTS, each without any other in the engine."""
    return [texts(get_llm().generate(*request, use_tqdm=False)[0]) for request in REQUESTS]


def test_every_output_is_valid(alone: list[Texts]) -> None:
    """From a model at temperature 1.5, which without a grammar writes nothing of the kind."""
    for i, regex in enumerate(REGEXES):
        for text, _, finish_reason in alone[i]:
            assert re.fullmatch(regex, text) and finish_reason == "stop"
    assert not any(
        re.fullmatch(r, text) for r in REGEXES for each in alone[6:] for text, *_ in each
    )


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "plain"])
@settings(
    max_examples=3,
    phases=[Phase.generate],  # to shrink orders would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(order=st.permutations(range(len(REQUESTS))), gaps=st.lists(st.integers(0, 4), min_size=9))
def test_the_same_tokens_in_any_company(
    get_llm: Callable[..., LLM], alone: list[Texts], name: str, order: list[int], gaps: list[int]
) -> None:
    """With grammars and without, the tokens of a request do not depend on the batch, on
    preemptions, on overlap or on drafts."""
    llm = get_llm(name)
    found: dict[str, RequestOutput] = {}
    for i, gap in zip(order, gaps, strict=False):
        llm.engine.add_request(str(i), *REQUESTS[i])
        for _ in range(gap):
            found |= {output.request_id: output for output in llm.engine.step()}
    found |= run(llm)
    assert {i: texts(found[str(i)]) for i in order} == dict(enumerate(alone))


def test_drafts_are_accepted(get_llm: Callable[..., LLM]) -> None:
    """In a text that repeats itself, several tokens of a grammar come in one step."""
    request = constrained(regex="(abcabcabc){8}", max_tokens=200)
    [output] = get_llm("ngram").generate("abcabcabcabc", request, use_tqdm=False)
    assert output.outputs[0].text == "abcabcabc" * 8
    assert output.metrics is not None and output.metrics.num_accepted_tokens > 10


@pytest.mark.parametrize("rejects", [False, True])
def test_drafts_are_checked_by_the_grammar_first(
    get_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, rejects: bool
) -> None:
    """What is behind a forbidden one is not computed. A RejectionSampler gets that one itself: it
    rejects it, and draws from what the draft's probability leaves."""
    llm = get_llm()
    a, b, z = (llm.get_tokenizer().encode(char, add_special_tokens=False)[0] for char in "abz")
    request = llm.engine.make_request("0", "x", constrained(regex="abab?"))
    grammar = request.root.structured_output_request
    monkeypatch.setattr(grammar.manager, "rejects_drafts", rejects)
    grammar.start(pytest.fail)
    grammar.manager.compile_or_find(grammar).result(TIMEOUT)
    assert grammar.validate_drafts((a, b, a)) == (a, b, a)
    assert grammar.validate_drafts((a, z, b, a)) == (a, z)[: 1 + rejects]
    assert grammar.accept_tokens((a, b)) is None and grammar.accept_tokens((b,)) is not None
    assert grammar.validate_drafts((a, 2, b)) == (a, 2, b)[: 2 + rejects]  # 2 is <|im_end|>
    assert grammar.accept_tokens((a, 2, b)) is None and grammar.is_terminated()
    assert grammar.validate_drafts((a,)) == ()
    grammar.rollback_to(1)
    assert grammar.accept_tokens((b, a, b, 2)) is None


def test_drafts_of_the_rejection_sampler() -> None:
    config = {**GUESSES, "rejection_sample_method": "standard"}
    with LLM(num_kv_blocks=64, speculative_config=config) as llm:
        for i, regex in enumerate(REGEXES):
            [output] = llm.generate("The cat", constrained(i, regex), use_tqdm=False)
            assert re.fullmatch(regex, output.outputs[0].text)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def test_a_json_schema(get_llm: Callable[..., LLM]) -> None:
    """The stack of a pushdown automaton goes back with the drafts, too."""
    pytest.importorskip("xgrammar")
    structured = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    requests = [
        SamplingParams(structured_outputs=structured, temperature=1.5, seed=i, max_tokens=99, n=2)
        for i in range(3)
    ]
    found = {
        name: list(map(texts, get_llm(name).generate(PROMPTS, requests, use_tqdm=False)))
        for name in ("plain", "overlapped", "swap", "wild drafts", "ngram")
    }
    for text, _, finish_reason in (each for output in found["plain"] for each in output):
        value = json.loads(text)
        assert list(value) == ["name", "age", "tags"] and finish_reason == "stop"
        assert len(value["name"]) <= 8 and 0 <= value["age"] <= 99
        assert {*value["tags"]} <= {"a", "b"} and len(value["tags"]) <= 3
    assert all(each == found["plain"] for each in found.values())


# -- the end of an output --


def test_an_end_where_the_grammar_may_end(get_llm: Callable[..., LLM]) -> None:
    """A token that ends an output is allowed there only, the user's own ones too."""
    llm = get_llm()
    [letter] = llm.get_tokenizer().encode("a", add_special_tokens=False)
    request = constrained(regex="[ab]{2}c?", stop_token_ids=[letter], n=8, ignore_eos=True)
    [output] = llm.generate("a", request, use_tqdm=False)
    for each in output.outputs:
        assert re.fullmatch("[ab]{2}c?", each.text) and each.stop_reason == letter


def test_the_end_is_found_in_the_bits(
    get_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a request without stop tokens it is asked after each token: no row of logits is made."""
    llm = get_llm()
    [a] = llm.get_tokenizer().encode("a", add_special_tokens=False)
    request = llm.engine.make_request("0", "x", constrained(regex="aa", ignore_eos=True))
    grammar = request.root.structured_output_request
    monkeypatch.delattr(manager.StructuredOutputManager, "grammar_bitmask")
    grammar.start(pytest.fail)
    grammar.manager.compile_or_find(grammar).result(TIMEOUT)
    for is_over in (False, False, True):
        assert grammar.is_terminated() is is_over
        assert is_over or grammar.accept_tokens((a,)) is None


@pytest.mark.parametrize("name", ["plain", "overlapped", "ngram"])
@pytest.mark.parametrize("regex", ["[ab]{3}", "(abc){2,4}", "a|bb"])
def test_without_stop_tokens_the_grammar_ends_it(
    get_llm: Callable[..., LLM], name: str, regex: str
) -> None:
    """As late as it can."""
    request = constrained(3, regex, ignore_eos=True, n=3)
    [output] = get_llm(name).generate("abcabc", request, use_tqdm=False)
    longest = {"[ab]{3}": 3, "(abc){2,4}": 12}
    for each in output.outputs:
        assert re.fullmatch(regex, each.text) and each.finish_reason == "stop"
        assert each.stop_reason is None and len(each.text) == longest.get(regex, len(each.text))


def test_a_cut_output_is_a_beginning(get_llm: Callable[..., LLM]) -> None:
    request = constrained(regex="[a-f]{40}", max_tokens=3)
    [output] = get_llm().generate("x", request, use_tqdm=False)
    assert re.fullmatch("[a-f]{3,39}", output.outputs[0].text)
    assert output.outputs[0].finish_reason == "length"


def test_stop_strings_and_min_tokens_compose(get_llm: Callable[..., LLM]) -> None:
    llm, regex = get_llm(), "[a-e]{2,30}"
    [output] = llm.generate("x", constrained(1, regex, stop=["e"], n=6), use_tqdm=False)
    assert all(re.fullmatch("[a-d]*", each.text) for each in output.outputs)
    [output] = llm.generate("x", constrained(1, regex, min_tokens=9, n=6), use_tqdm=False)
    assert all(len(each.token_ids) >= 9 for each in output.outputs)


# -- other settings that change logits --


def test_other_limits_compose(get_llm: Callable[..., LLM]) -> None:
    """A token must be allowed by all of them."""
    llm = get_llm()
    encode = llm.get_tokenizer().encode
    a, b, c = (encode(char, add_special_tokens=False)[0] for char in "abc")
    eos = llm.engine.model_config.eos_token_ids
    for fields, allowed in (
        ({"allowed_token_ids": [a, b, c, *eos]}, "abc"),
        ({"allowed_token_ids": [a, b, c, *eos], "bad_words": ["b"]}, "ac"),
        ({"allowed_token_ids": [a, b, *eos], "logit_bias": {a: -1e9}}, "b"),
        ({"allowed_token_ids": [a, b, *eos], "repetition_penalty": 1.3, "min_p": 0.01}, "ab"),
    ):
        request = constrained(regex="[a-f]{5,9}", n=4, **fields)
        [output] = llm.generate("x", request, use_tqdm=False)
        for each in output.outputs:
            assert re.fullmatch(f"[{allowed}]{{5,9}}", each.text), fields


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"allowed_token_ids": [5]}, "structured_outputs, allowed_token_ids forbid all"),
        ({"min_tokens": 20}, "structured_outputs, min_tokens forbid all"),
    ],
)
def test_limits_that_leave_no_token(
    get_llm: Callable[..., LLM], fields: dict[str, Any], names: str
) -> None:
    """The request ends with an error that names them; others go on."""
    requests = [constrained(regex="[é]{1,2}", **fields), constrained()]
    bad, good = get_llm().generate(["a", "a"], requests, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error" and names in str(bad.outputs[0].stop_reason)
    assert re.fullmatch(REGEXES[0], good.outputs[0].text)


def test_a_processor_that_forces_a_forbidden_token(get_llm: Callable[..., LLM]) -> None:
    """That completion ends with an error, before the token."""

    llm = get_llm()
    [forbidden] = llm.get_tokenizer().encode("z", add_special_tokens=False)

    def force(output: list[int], logits: Any) -> Any:
        logits[forbidden] = 99.0 if len(output) == 2 else -99.0
        return logits

    bad = constrained(regex="[a-f]{30}", logits_processors=[force], n=2)
    found = llm.generate(["a", "a"], [bad, constrained()], use_tqdm=False)
    for each in found[0].outputs:
        assert each.finish_reason == "error" and len(each.token_ids) == 2
        assert "structured_outputs" in str(each.stop_reason)
    assert re.fullmatch(REGEXES[0], found[1].outputs[0].text)


def test_logprobs_are_of_the_model(get_llm: Callable[..., LLM]) -> None:
    """As everywhere: of the logits before the mask."""
    request = constrained(regex="[é]{2}", logprobs=1)
    [output] = get_llm().generate("Once", request, use_tqdm=False)
    first = output.outputs[0].logprobs[0]
    assert len(first) == 2  # the likeliest token of the model is another one
    assert sum(np.exp(each.logprob) for each in first.values()) < 1


# -- compiling --


class Compiler:
    """Takes the place of the automaton's compiler: waits for `go`, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.num_calls, self.error = threading.Event(), 0, None
        compile_grammar = automaton.NanoBackend.compile_grammar

        def wait_and_compile(own: Any, spec: Any) -> Any:
            self.num_calls += 1
            assert self.go.wait(TIMEOUT)
            if self.error is not None:
                raise self.error
            return compile_grammar(own, spec)

        monkeypatch.setattr(automaton.NanoBackend, "compile_grammar", wait_and_compile)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    compiler = Compiler(monkeypatch)
    yield compiler
    compiler.go.set()


@pytest.mark.parametrize("name", ["plain", "overlapped"])
def test_compiling_delays_nobody_else(
    get_llm: Callable[..., LLM], compiler: Compiler, name: str
) -> None:
    engine = get_llm(name).engine
    engine.add_request("slow", "a", constrained(regex="[a-f]{3}1", n=2))
    engine.add_request("free", "a", free())
    done: list[str] = []
    for _ in range(40):
        done += [output.request_id for output in engine.step() if output.finished]
    assert done == ["free"] and engine.is_unfinished("slow")
    compiler.go.set()
    outputs = run(get_llm(name))["slow"].outputs
    assert [bool(re.fullmatch("[a-f]{3}1", each.text)) for each in outputs] == [True, True]


def test_abort_while_compiling(get_llm: Callable[..., LLM], compiler: Compiler) -> None:
    engine = get_llm().engine
    engine.add_request("slow", "a", constrained(regex="[a-f]{3}2"))
    engine.step()
    assert engine.abort_request("slow")
    assert run(get_llm()) == {}
    compiler.go.set()
    engine.add_request("slow", "a", constrained(regex="[a-f]{3}2"))
    assert re.fullmatch("[a-f]{3}2", run(get_llm())["slow"].outputs[0].text)
    assert compiler.num_calls == 1  # in the cache, though nobody waited for it


def test_what_nobody_waits_for_is_not_compiled(
    get_llm: Callable[..., LLM], compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who aborts many requests delays nobody. A later request of such a grammar gets it."""
    engine = get_llm().engine
    monkeypatch.setattr(manager.get_manager(engine), "executor", ThreadPoolExecutor(1))
    engine.add_request("first", "a", constrained(regex="[a-f]{3}3"))
    while not compiler.num_calls:
        time.sleep(0.001)
    for i in range(8):
        engine.add_request(str(i), "a", constrained(regex=f"[a-f]{{4}}{i}", n=2))
    engine.add_request("other", "a", constrained(regex="[a-f]{4}5"))
    for i in range(8):
        engine.abort_request(str(i))
    compiler.go.set()
    outputs = run(get_llm())
    assert {name: each.outputs[0].text[-1] for name, each in outputs.items()} == {
        "first": "3",
        "other": "5",
    }
    assert compiler.num_calls == 2
    engine.add_request("1", "a", constrained(regex="[a-f]{4}1"))
    assert re.fullmatch("[a-f]{4}1", run(get_llm())["1"].outputs[0].text)


@pytest.mark.parametrize("error", [ValueError("too large"), RuntimeError("a bug")])
def test_what_does_not_compile_is_an_error_of_that_request(
    get_llm: Callable[..., LLM], compiler: Compiler, error: Exception
) -> None:
    """It is tried again for the next request: limits of time and memory depend on the hour."""
    llm = get_llm()
    compiler.go.set()
    llm.generate("a", constrained(), use_tqdm=False)  # from now on its grammar is kept
    compiler.error = error
    regex = f"[a-f]{{3}}3{type(error).__name__}"
    found = llm.generate(["a", "b"], [constrained(regex=regex, n=2), constrained()], use_tqdm=False)
    for each in found[0].outputs:
        assert each.finish_reason == "error"
        assert re.fullmatch(f"structured_outputs: .*{error}", str(each.stop_reason))
    assert re.fullmatch(REGEXES[0], found[1].outputs[0].text)
    compiler.error = None
    [again] = llm.generate("a", constrained(regex=regex), use_tqdm=False)
    assert re.fullmatch(regex, again.outputs[0].text)


def test_masks_that_take_too_long(
    get_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar that takes longer with each token ends its own request, if it is the CPU that takes
    so long, and not a machine that is busy elsewhere."""
    fill = automaton.NanoGrammar.fill_bitmask
    clock = [0.0]

    def fill_slowly(own: Any, bitmask: Any, index: int) -> None:
        clock[0] += 0.3 if len(own.automaton.dfa.is_accepting) > 20 else 0.01
        fill(own, bitmask, index)

    monkeypatch.setattr(automaton.NanoGrammar, "fill_bitmask", fill_slowly)
    monkeypatch.setattr(manager.time, "perf_counter", lambda: clock[0])
    requests = [constrained(regex="[a-f]{30}"), constrained()]
    for output in get_llm().generate(["a", "a"], requests, use_tqdm=False):
        assert output.outputs[0].finish_reason != "error"
    monkeypatch.setattr(manager.time, "thread_time", lambda: clock[0])
    bad, good = get_llm().generate(["a", "a"], requests, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error" and len(bad.outputs[0].token_ids) < 10
    assert "masks have taken 1.2 s" in str(bad.outputs[0].stop_reason)
    assert re.fullmatch(REGEXES[0], good.outputs[0].text)


def test_close_while_compiling(compiler: Compiler) -> None:
    llm = LLM(num_kv_blocks=16)
    llm.engine.add_request("slow", "a", constrained())
    llm.engine.step()
    llm.engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a", constrained())


def test_close_beside_a_thread_that_compiles() -> None:
    """The thread counts what is in the cache, and may bring a backend of its own."""
    with LLM(num_kv_blocks=16) as llm:
        llm.generate("a", constrained(), use_tqdm=False)
        own = llm.engine.structured_output_manager
        [backend] = own.backends.values()
        backend.destroy = lambda: own.backends.update(other=SimpleNamespace(destroy=bool))
        with own._cache_lock:
            closing_thread = threading.Thread(target=own.close)
            closing_thread.start()
            closing_thread.join(0.2)
            assert own._cache
        closing_thread.join(TIMEOUT)
        assert not own._cache and not closing_thread.is_alive()


def test_a_constraint_is_compiled_once(
    get_llm: Callable[..., LLM], compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for requests that come while it compiles. The cache is bounded."""
    compiler.go.set()
    llm, regex = get_llm(), "[a-f]{3}4"
    llm.generate(["a", "b"], constrained(regex=regex), use_tqdm=False)
    llm.generate(["a", "b"], constrained(regex=regex, stop_token_ids=[7]), use_tqdm=False)
    assert compiler.num_calls == 2  # another end, another automaton
    monkeypatch.setattr(manager, "CACHE_ENTRIES", 2)
    for i in (5, 6, 7):
        llm.generate("a", constrained(regex=f"[a-f]{i}"), use_tqdm=False)
    cache = llm.engine.structured_output_manager._cache
    assert [spec.grammar_spec for _, spec in cache] == ["[a-f]6", "[a-f]7"]
    monkeypatch.setattr(manager, "CACHE_BYTES", 1)
    llm.generate("a", constrained(regex="[a-f]8"), use_tqdm=False)
    assert [spec.grammar_spec for _, spec in cache] == ["[a-f]8"]


# -- errors --


def test_an_update_that_fails_is_taken_back(
    get_llm: Callable[..., LLM], alone: list[Texts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of the step come again, and the grammar has not gone on twice."""
    for name in ("plain", "ngram"):
        llm = get_llm(name)
        scheduler = llm.engine.scheduler
        update = scheduler.update_from_output
        steps = iter(range(10**6))

        def fail_sometimes(*args: Any, update: Any = update, steps: Any = steps) -> Any:
            updates = update(*args)
            if next(steps) in (0, 9, 25):  # between them a probe, which must not fail
                raise RuntimeError("the update failed")
            return updates

        monkeypatch.setattr(scheduler, "update_from_output", fail_sometimes)
        for i, request in enumerate(REQUESTS[:4]):
            llm.engine.add_request(str(i), *request)
        assert {int(i): texts(output) for i, output in run(llm).items()} == dict(
            enumerate(alone[:4])
        )


class BrokenDict(dict[str, Any]):
    def items(self) -> Any:
        raise LookupError("no items")


class BrokenList(list[str]):
    def __iter__(self) -> Iterator[str]:
        raise LookupError("no items")


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "it has none; allowed: exactly one of json, regex"),
    ({"regex": "a", "choice": ["a"]}, "it has regex and choice"),
    ({"regex": 5}, "regex must be a string, got 5"),
    ({"regex": "a\0"}, "no NUL"),
    ({"regex": "\ud800"}, "no half of a character"),
    ({"regex": "a" * (params.SPEC_LIMIT + 1)}, "262145 characters; allowed: up to 262144"),
    ({"choice": []}, "a list of strings, not empty"),
    ({"choice": "yes"}, "a list of strings, not empty"),
    ({"choice": ["a", 1]}, "choice holds 1; allowed: strings"),
    ({"choice": ["a"] * 5000}, "5000 items; allowed: up to 4096"),
    ({"choice": BrokenList(["a"])}, r"choice is \['a'\], which cannot be read \(no items\)"),
    ({"json": BrokenDict(a=1)}, r"json is {'a': 1}, which cannot be written as JSON \(no items\)"),
    ({"json": {"enum": BrokenList(["a"])}}, "json is .* cannot be written as JSON"),
    ({"json": "{"}, "which is not JSON"),
    ({"json": "[]"}, "allowed: a JSON object"),
    ({"json": 5}, "json must be a dict or its JSON, got 5.*model_json_schema"),
    ({"json": {"a": {1, 2}}}, "cannot be written as JSON"),
    ({"json": {"a": float("nan")}}, "cannot be written as JSON"),
    ({"json": "[" * 10**5}, "nested more than 64 levels|not JSON"),
    ({"json": '{"a":' * 65 + "{}" + "}" * 65}, "nested more than 64 levels"),
    ({"json_object": False}, "json_object is False; allowed: True"),
    ({"grammar": " "}, "grammar is empty"),
    ({"structural_tag": "x"}, "not JSON"),
    ({"structural_tag": {}}, "must be a string.*json.dumps"),
    ({"regex": "a", "disable_any_whitespace": 1}, "must be True or False"),
    ({"json": {}, "whitespace_pattern": 1}, "whitespace_pattern must be a string"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_constraints(fields: dict[str, Any], message: str) -> None:
    """Refused at construction, and again if a field is assigned."""
    with pytest.raises((ValueError, TypeError), match=message):
        StructuredOutputsParams(**fields)
    good = StructuredOutputsParams(regex="a")
    vars(good).update({"regex": None, **fields})
    with pytest.raises((ValueError, TypeError), match=message):
        SamplingParams(structured_outputs=good)


@pytest.mark.parametrize(
    ("name", "message"),
    [("choise", "Did you mean 'choice'?"), ("backend", "structured_outputs_config={'backend'")],
)
def test_unknown_constraints_are_explained(name: str, message: str) -> None:
    with pytest.raises(TypeError, match=f"argument '{name}'.*{re.escape(message)}"):
        StructuredOutputsParams(**{name: ["a"]})


def test_what_no_backend_takes(get_llm: Callable[..., LLM]) -> None:
    """Refused when the request is added, with the reasons of each."""
    request = constrained(regex="(")
    with pytest.raises(
        VLLMValidationError, match=r"no backend takes it\.\n  nano, xgrammar: .*\n  guidance: .*$"
    ) as caught:
        get_llm().generate("a", request)
    assert caught.value.parameter == "structured_outputs"
    for wrong in (5, {"regex": "a"}, "a"):
        with pytest.raises(VLLMValidationError, match=r"allowed: StructuredOutputsParams\(json="):
            SamplingParams(structured_outputs=wrong)


def test_without_the_packages(get_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first message that many will see: what is missing, and one line that installs it."""
    folder = "nanoserve.extras.structured_output"
    for package, module in (("xgrammar", "backend_xgrammar"), ("llguidance", "backend_guidance")):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, f"{folder}.{module}", raising=False)
    request = SamplingParams(structured_outputs=StructuredOutputsParams(json={}))
    with pytest.raises(VLLMValidationError, match=r"xgrammar: .*\n  guidance: ") as caught:
        get_llm().generate("a", request)
    assert str(caught.value).count('pip install -e ".[structured]"') == 1
    [output] = get_llm().generate("a", constrained(), use_tqdm=False)
    assert re.fullmatch(REGEXES[0], output.outputs[0].text)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"backend": "outlines"}, "backend is 'outlines'; allowed: auto, nano, xgrammar, guidance"),
        ({"reasoning_parser": "x"}, "no parser of reasoning"),
        ({"backend": "nano", "other": 1}, "'other' is 1; it has: backend"),
        ("{", "not JSON"),
        (5, "must be a dict"),
        ({"disable_any_whitespace": 1}, "must be True or False"),
    ],
)
def test_bad_options(value: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        EngineArgs(structured_outputs_config=value).create_engine_config()


def test_the_backend_of_an_engine() -> None:
    """An engine option, as in vLLM."""
    with LLM(num_kv_blocks=16, structured_outputs_config='{"backend": "nano"}') as llm:
        [output] = llm.generate("a", constrained(), use_tqdm=False)
        assert re.fullmatch(REGEXES[0], output.outputs[0].text)
        with pytest.raises(ValueError, match="nano: "):
            llm.generate("a", SamplingParams(structured_outputs=StructuredOutputsParams(json={})))


def test_the_options_of_an_engine_hold_for_each_request() -> None:
    pytest.importorskip("llguidance")
    config: dict[str, Any] = {"backend": "guidance", "disable_any_whitespace": True}
    config["disable_additional_properties"] = True
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    structured = StructuredOutputsParams(json=schema)
    sampling_params = SamplingParams(
        structured_outputs=structured, temperature=1.5, seed=0, max_tokens=50, n=8
    )
    with closing(LLM(num_kv_blocks=64, structured_outputs_config=config)) as llm:
        [output] = llm.generate(PROMPTS[0], sampling_params, use_tqdm=False)
    assert {each.text for each in output.outputs} == {'{"a":null}'}


def test_a_model_without_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer"):
        make_engine().add_request("a", [1], constrained())


def test_without_the_chapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may be deleted: whoever asks for it is told so."""
    assert SameParams is StructuredOutputsParams
    given = StructuredOutputsParams(regex="a")
    monkeypatch.setitem(sys.modules, "nanoserve.extras.structured_output.params", None)
    with pytest.raises(VLLMValidationError, match="needs nanoserve/extras/structured_output"):
        SamplingParams(structured_outputs=given)
    with pytest.raises(ValueError, match="needs nanoserve/extras/structured_output"):
        EngineArgs(structured_outputs_config={}).create_engine_config()


# -- AsyncLLM, and several ranks --


def test_async_llm(compiler: Compiler) -> None:
    """Requests with and without a grammar at once; one is cancelled while its grammar compiles, one
    does not compile."""

    async def ask(llm: AsyncLLM, name: str, request: SamplingParams) -> RequestOutput:
        async for output in llm.generate("Once", request, name):
            last = output
        return last

    async def main() -> None:
        with AsyncLLM.from_engine_args(EngineArgs(num_kv_blocks=128)) as llm:
            slow = asyncio.create_task(ask(llm, "slow", constrained(regex="[a-f]{3}8")))
            cancelled = asyncio.create_task(ask(llm, "cancelled", constrained(regex="[a-f]{3}9")))
            assert (await ask(llm, "free", free())).finished
            cancelled.cancel()
            assert not slow.done()
            compiler.go.set()
            assert re.fullmatch("[a-f]{3}8", (await slow).outputs[0].text)
            compiler.error = ValueError("too large")
            failed = await ask(llm, "failed", constrained(regex="[a-f]{3}0"))
            assert failed.outputs[0].finish_reason == "error"

    asyncio.run(asyncio.wait_for(main(), TIMEOUT))


@pytest.mark.slow
def test_several_ranks(alone: list[Texts]) -> None:
    """Rank 0 alone makes masks; the tokens are the same."""
    with LLM(tensor_parallel_size=2, num_kv_blocks=128) as llm:
        prompts, requests = zip(*REQUESTS, strict=True)
        outputs = llm.generate(list(prompts), list(requests), use_tqdm=False)
    assert [texts(output) for output in outputs] == alone
