"""How does nested text, such as JSON, stay valid token by token?

JSON nests without a limit, so a finite automaton is not enough: behind "}" one has to know what was
open before. The package xgrammar (C++) compiles a grammar to a pushdown automaton, and prepares the
masks at compile time: most tokens are allowed or forbidden in a state whatever the stack holds, so
only a few are tried in a step.

    {"a": [1, 2             the stack: object > array > number
                            allowed: a digit, "." or "e", ",", "]", spaces, "]}", ...

*What is refused.* xgrammar ignores some keywords of JSON schemas, others it ignores beside certain
keywords: its text then matches the grammar, but not the schema. `find_unsupported` says what these
are, so that the request is refused, or gets another backend. What is left is stricter than the
schema in two ways: properties come in the order of the schema, and an object without
additionalProperties has no others. Regular expressions are rewritten, because xgrammar has a
dialect of its own, and writes bare quotes into a string whose pattern is not ASCII. (In a string
without a pattern it allows the bytes of a surrogate, ED A0 80. A text has U+FFFD for them, so it is
JSON all the same.)

*What is slow.* A mask takes a few microseconds, but a hundred times as long where many tokens may
be too long for the rest of a text: near the end of a string with maxLength, or within many optional
parts ("a?a?a?a?"). llguidance has no such places.

Left out: captures, temperatures in a grammar, jump-forward decoding.

Dong and others, XGrammar, arXiv 2411.15100.
vLLM: vllm/v1/structured_output/backend_xgrammar.py (V1).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

import xgrammar
from torch import Tensor
from xgrammar import Grammar

from nanoserve.exceptions import VLLMValidationError, brief
from nanoserve.extras.structured_output.backend import (
    GrammarSpec,
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
    describe_misfit,
)
from nanoserve.extras.structured_output.dfa import rewrite
from nanoserve.extras.structured_output.json_schema import (
    adapt,
    find_unsupported,
    rewrite_patterns,
)
from nanoserve.extras.structured_output.vocabulary import Vocabulary

MAX_THREADS = 8  # for one grammar
LONG = 4096  # characters: what is longer may take long
# A weak model writes line breaks and spaces for ever if it may. This is enough for three levels.
MAX_WHITESPACE = 8  # characters in a row, between two parts of JSON


class XgrammarBackend(StructuredOutputBackend):
    """Everything, by the package xgrammar."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        tokens = [token or b"" for token in vocabulary.tokens]  # b"": never allowed
        tokens += [b""] * (-len(tokens) % 32)  # so that no bit behind them is 1
        info = xgrammar.TokenizerInfo(
            tokens,
            xgrammar.VocabType.RAW,
            stop_token_ids=sorted(vocabulary.eos_token_ids),
        )
        threads = min(MAX_THREADS, os.cpu_count() or 1)
        # The manager has a cache of its own.
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False)

    @classmethod
    def check(cls, spec: GrammarSpec) -> None:
        if spec.whitespace_pattern is not None:
            raise _refuse("whitespace_pattern", "Leave it out, or use the backend 'guidance'")
        if spec.disable_additional_properties:
            raise _refuse("disable_additional_properties", "It never allows others unless asked")
        if spec.request_type is StructuredOutputOptions.JSON_OBJECT and spec.disable_any_whitespace:
            raise _refuse("disable_any_whitespace in values without a schema", "Leave it out")
        text = _adapt(spec)
        if len(text) <= LONG:
            _to_grammar(spec, text)

    def may_take_long(self, spec: GrammarSpec) -> bool:
        kinds = (StructuredOutputOptions.REGEX, StructuredOutputOptions.GRAMMAR)
        is_long = len(spec.grammar_spec) > LONG or "pattern" in spec.grammar_spec
        return spec.request_type in kinds or is_long

    def compile_grammar(self, spec: GrammarSpec) -> XgrammarGrammar:
        try:
            compiled = self.compiler.compile_grammar(_to_grammar(spec, _adapt(spec)))
        except RuntimeError as error:
            raise _error(spec, error) from error
        return XgrammarGrammar(compiled, spec.stop_token_ids)

    def destroy(self) -> None:
        del self.compiler


class XgrammarGrammar(StructuredOutputGrammar):
    """One sequence's place in a grammar that xgrammar has compiled."""

    def __init__(self, compiled: Any, stop_token_ids: frozenset[int]) -> None:
        self.compiled, self.stop_token_ids = compiled, stop_token_ids
        self.num_bytes = compiled.memory_size_bytes
        stops = sorted(stop_token_ids) or None
        self.matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=stops)
        self.has_stopped = False  # matcher.is_terminated(): each call of xgrammar takes its time

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        for token in tokens:
            if self.has_stopped:
                break
            if not self.matcher.accept_token(token):
                return False
            self.has_stopped = token in self.stop_token_ids
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        accepted = 0
        while accepted < len(tokens) and not self.has_stopped:
            if not self.accept_tokens("", [tokens[accepted]]):
                break
            accepted += 1
        self.rollback(accepted)
        return tokens[:accepted]

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self.matcher.rollback(num_tokens)
            self.has_stopped = False

    def fill_bitmask(self, bitmask: Tensor, batch_index: int) -> None:
        if self.has_stopped:
            bitmask[batch_index] = 0
        else:
            self.matcher.fill_next_token_bitmask(bitmask, batch_index)

    def is_terminated(self) -> bool:
        return self.has_stopped

    def fork(self) -> XgrammarGrammar:
        return XgrammarGrammar(self.compiled, self.stop_token_ids)


# -- what xgrammar is told --


def _adapt(spec: GrammarSpec) -> str:
    """The text of a constraint, so that xgrammar does what it says. Raises VLLMValidationError if
    that is not possible."""
    kind, text = spec.request_type, spec.grammar_spec

    def adapt_schema(schema: Any) -> Any:
        if (what := find_unsupported(schema, spec.disable_any_whitespace)) is not None:
            raise _refuse(f"a JSON schema with {what}", "Write it otherwise")
        return adapt(rewrite_patterns(schema))

    try:
        match kind:
            case StructuredOutputOptions.JSON:
                return json.dumps(adapt_schema(json.loads(text)))
            case StructuredOutputOptions.JSON_OBJECT:
                return '{"type": "object", "additionalProperties": true}'
            case StructuredOutputOptions.REGEX:
                return rewrite(text)  # what is refused here, it ignores
            case StructuredOutputOptions.CHOICE:
                choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
                return f"root ::= {' | '.join(choices)}"
            case StructuredOutputOptions.STRUCTURAL_TAG:
                return json.dumps(_adapt_tag(json.loads(text), adapt_schema))
    except (AttributeError, KeyError, TypeError) as error:
        raise _error(spec, describe_misfit(error)) from error
    return text


def _to_grammar(spec: GrammarSpec, text: str) -> Grammar:
    """xgrammar's rules of an adapted text. Raises VLLMValidationError."""
    options: dict[str, Any] = {"any_whitespace": not spec.disable_any_whitespace}
    if spec.disable_any_whitespace:
        options["separators"] = (",", ":")
    else:
        options["max_whitespace_cnt"] = MAX_WHITESPACE
    try:
        match spec.request_type:
            case StructuredOutputOptions.JSON | StructuredOutputOptions.JSON_OBJECT:
                return Grammar.from_json_schema(text, **options)
            case StructuredOutputOptions.REGEX:
                return Grammar.from_regex(text)
            case StructuredOutputOptions.STRUCTURAL_TAG:
                return _read_tag(json.loads(text))
        return (Grammar.from_ebnf if "::=" in text else Grammar.from_lark)(text)
    except (AttributeError, KeyError, TypeError) as error:
        raise _error(spec, describe_misfit(error)) from error
    except (RuntimeError, ValueError) as error:
        raise _error(spec, error) from error


def _adapt_tag(tag: Any, function: Callable[[Any], Any]) -> Any:
    """A structural tag, or a part of it, with the function's results instead of its schemas, and
    with regular expressions that xgrammar reads as we do."""
    if isinstance(tag, list):
        return [_adapt_tag(part, function) for part in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "regex":
        return {**tag, "pattern": rewrite(tag["pattern"])}
    schemas = {"json_schema", "schema"} if "begin" in tag else {"json_schema"}
    return {
        key: function(part) if key in schemas else _adapt_tag(part, function)
        for key, part in tag.items()
    }


def _read_tag(tag: Any) -> Grammar:
    if "structures" not in tag:
        return Grammar.from_structural_tag(tag)
    items = [  # vLLM's older form
        xgrammar.StructuralTagItem(
            begin=item["begin"], schema=json.dumps(item["schema"]), end=item["end"]
        )
        for item in tag["structures"]
    ]
    return Grammar.from_structural_tag(items, tag["triggers"])


def _refuse(what: str, advice: str) -> VLLMValidationError:
    return VLLMValidationError(
        f"the backend 'xgrammar' does not support {what}. {advice}.",
        parameter="structured_outputs",
    )


def _error(spec: GrammarSpec, error: Exception | str) -> VLLMValidationError:
    kind, given = spec.request_type.name.lower(), brief(spec.grammar_spec)
    why = re.sub(r"\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()  # without the place in its source
    return VLLMValidationError(
        f"xgrammar cannot read this {kind}, {given}: {why}", parameter="structured_outputs"
    )
