"""How does nested text, such as JSON, stay valid token by token?

JSON nests without a limit, so a finite automaton is not enough: behind "}" one has to know what was
open before. The package xgrammar (C++) compiles a grammar to a pushdown automaton, and prepares the
masks at compile time: most tokens are allowed or forbidden in a state whatever the stack holds, so
only a few are tried in a step.

    {"a": [1, 2             the stack: object > array > number
                            allowed: a digit, "." or "e", ",", "]", spaces, "]}", ...

*What is refused.* xgrammar ignores some keywords of JSON schemas: its text would match the grammar,
but not the schema. So a schema with one of them is refused. What is left is stricter than the
schema in two ways: properties come in the order of the schema, and an object that lists its
properties has no others, unless the schema says so.

Left out: captures, temperatures in a grammar; finding every combination of keywords that xgrammar
does not enforce (of oneOf, for example, it takes every alternative).

Dong and others, XGrammar, arXiv 2411.15100.
vLLM: vllm/v1/structured_output/backend_xgrammar.py (V1).
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import xgrammar
from xgrammar import Grammar

from nanoserve.chapters.structured_output.backend import (
    GrammarSpec,
    StructuredOutputBackend,
    StructuredOutputGrammar,
)
from nanoserve.chapters.structured_output.vocabulary import Vocabulary

MAX_THREADS = 8  # for one grammar
# A weak model writes line breaks and spaces for ever if it may. This is enough for three levels.
MAX_WHITESPACE = 8  # characters in a row, between two parts of JSON
MAX_DEPTH = 64  # schemas inside each other: xgrammar is recursive
IGNORED = {"multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "not", "if"}
IGNORED |= {"dependencies", "dependentRequired", "dependentSchemas"}
VALUES = {"const", "default", "enum", "examples"}  # hold no schemas
NAMED = {"$defs", "definitions", "patternProperties", "properties"}  # names, and schemas
# What JSON writes in a string as it is: no quote, backslash, control character or surrogate.
CHARACTER = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"


class XgrammarBackend(StructuredOutputBackend):
    """Everything, by the package xgrammar."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        tokens = [token or b"" for token in vocabulary.tokens]  # b"": never allowed
        tokens += [b""] * (-len(tokens) % 32)  # so that no bit behind them is 1
        info = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.RAW, stop_token_ids=sorted(vocabulary.eos_token_ids)
        )
        # The manager has a cache of its own.
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=MAX_THREADS, cache_enabled=False)

    def compile_grammar(self, spec: GrammarSpec) -> XgrammarGrammar:
        compiled = self.compiler.compile_grammar(to_grammar(spec))
        return XgrammarGrammar(compiled, spec.stop_token_ids)


class XgrammarGrammar(StructuredOutputGrammar):
    """One sequence's place in a grammar that xgrammar has compiled."""

    def __init__(self, compiled: Any, stop_token_ids: frozenset[int]) -> None:
        self.compiled, self.stop_token_ids = compiled, stop_token_ids
        self.matcher = xgrammar.GrammarMatcher(
            compiled, override_stop_tokens=sorted(stop_token_ids)
        )

    def accept_token(self, token: int) -> bool:
        return self.matcher.accept_token(token)

    def take_back(self, num_tokens: int) -> None:
        self.matcher.rollback(num_tokens)

    def fill_bitmask(self, mask: np.ndarray) -> None:
        self.matcher.fill_next_token_bitmask(torch.from_numpy(mask[None]))

    def is_terminated(self) -> bool:
        return self.matcher.is_terminated()

    def fork(self) -> XgrammarGrammar:
        return XgrammarGrammar(self.compiled, self.stop_token_ids)


def to_grammar(spec: GrammarSpec) -> Grammar:
    """The constraint in xgrammar's form. Raises ValueError or RuntimeError."""
    match spec.kind:
        case "json":
            text = json.dumps(adapt(json.loads(spec.text)))
            if spec.is_compact:
                return Grammar.from_json_schema(text, any_whitespace=False, separators=(",", ":"))
            return Grammar.from_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE)
        case "regex":
            return Grammar.from_regex(spec.text)
        case "choice":
            texts = [json.dumps(each, ensure_ascii=False) for each in json.loads(spec.text)]
            return Grammar.from_ebnf(f"root ::= {' | '.join(texts)}")
        case "structural_tag":
            return Grammar.from_structural_tag(spec.text)
    return (Grammar.from_ebnf if "::=" in spec.text else Grammar.from_lark)(spec.text)


def adapt(schema: Any, depth: int = 0) -> Any:
    """The same schema, as xgrammar has to be told: with minLength or maxLength it allows control
    characters, with a pattern it does not. Raises ValueError for what xgrammar ignores."""
    if depth > MAX_DEPTH:
        raise ValueError(f"the schema is nested more than {MAX_DEPTH} levels deep.")
    if isinstance(schema, list):
        return [adapt(part, depth + 1) for part in schema]
    if not isinstance(schema, dict):
        return schema
    has_length, adapted = {"minLength", "maxLength"} & schema.keys(), {}
    ignored = IGNORED & schema.keys()
    ignored |= has_length if {"pattern", "format"} & schema.keys() else set()
    ignored |= {"allOf"} if len(schema.get("allOf", ())) > 1 else set()
    if ignored:
        raise ValueError(f"it does not enforce {', '.join(sorted(ignored))}.")
    for key, part in schema.items():
        if key in NAMED and isinstance(part, dict):
            adapted[key] = {name: adapt(each, depth + 1) for name, each in part.items()}
        elif key not in has_length:
            adapted[key] = part if key in VALUES else adapt(part, depth + 1)
    if has_length:
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        adapted["pattern"] = f"^{CHARACTER}{{{low},{high}}}$"
    return adapted
