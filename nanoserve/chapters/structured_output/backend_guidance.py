"""And if a JSON schema needs more than xgrammar has?

The package llguidance (Rust) computes each mask when it is needed, from derivatives of regular
expressions and an Earley parser over the trie of the vocabulary. It prepares little, so compiling
is quick, and it takes more of JSON Schema: properties beside additionalProperties, multipleOf,
several allOf, patterns with lengths. What it does not implement it refuses.

    xgrammar      compiles longer       masks are mostly ready
    llguidance    compiles at once      a mask costs more in a state that is new

Its limits of work hold for compiling and for each mask. A grammar that reaches one in the middle of
a text allows no token from then on, so that its request ends with an error.

Left out: structural tags of the newer form; forced tokens.

vLLM: vllm/v1/structured_output/backend_guidance.py (V1).
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import llguidance
import numpy as np
from llguidance import LLMatcher, LLTokenizer, StructTag, TokenizerWrapper
from torch import Tensor

from nanoserve.exceptions import VLLMValidationError, brief
from nanoserve.extras.structured_output.backend import (
    GrammarSpec,
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
    describe_misfit,
)
from nanoserve.extras.structured_output.dfa import rewrite
from nanoserve.extras.structured_output.json_schema import close, rewrite_patterns
from nanoserve.extras.structured_output.vocabulary import Vocabulary

# Where only one text can follow, any tokens of it are allowed, and not only those that a tokenizer
# would choose.
OPTIONS = '%llguidance {"no_forcing": true}\n'
LONGEST = 500  # characters of a reason of llguidance in an error message


class GuidanceBackend(StructuredOutputBackend):
    """Everything, by the package llguidance."""

    name = "guidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.tokenizer = LLTokenizer(TokenizerWrapper(ByteTokenizer(vocabulary)))

    @classmethod
    def check(cls, spec: GrammarSpec) -> None:
        try:
            grammar = _to_grammar(spec)
        except (AssertionError, AttributeError, KeyError, TypeError) as error:
            raise _error(spec, describe_misfit(error)) from error
        message = LLMatcher.validate_grammar(grammar)
        if message and not message.startswith("WARNING"):
            raise _error(spec, message)

    def compile_grammar(self, spec: GrammarSpec) -> GuidanceGrammar:
        matcher = LLMatcher(self.tokenizer, _to_grammar(spec), log_level=0)
        if matcher.is_error():
            raise _error(spec, matcher.get_error())
        return GuidanceGrammar(matcher, spec.stop_token_ids, self._stop_bits(spec.stop_token_ids))

    def _stop_bits(self, stop_token_ids: frozenset[int]) -> np.ndarray:
        """int32 [ceil(vocab_size / 32)]: the bits of these tokens."""
        is_stop = np.zeros(self.allocate_token_bitmask(1).shape[1] * 32, bool)
        is_stop[sorted(stop_token_ids)] = True
        return np.packbits(is_stop, bitorder="little").view("<i4")


class GuidanceGrammar(StructuredOutputGrammar):
    """One sequence's place in a grammar of llguidance. The matcher sees text tokens only: which
    stop tokens there are is up to the request."""

    num_bytes = 2**20  # it does not tell

    def __init__(
        self, origin: LLMatcher, stop_token_ids: frozenset[int], stop_bits: np.ndarray
    ) -> None:
        """origin: stays at the beginning, to be copied."""
        self.origin, self.matcher = origin, origin.deep_copy()
        self.stop_token_ids, self.stop_bits = stop_token_ids, stop_bits
        self.has_stopped = False

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        if self.has_stopped:
            return True
        text = self._cut(tokens)
        accepted = self.matcher.try_consume_tokens(text) if text else 0
        if accepted == len(text) < len(tokens):  # may a stop token come behind it?
            self.has_stopped = self.matcher.is_accepting()
        return self.has_stopped or accepted == len(tokens)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        if self.has_stopped:
            return []
        text = self._cut(tokens)
        accepted = self.matcher.validate_tokens(text) if text else 0
        if accepted == len(text) < len(tokens):  # as above
            self.matcher.consume_tokens(text)
            accepted += self.matcher.is_accepting()
            self.matcher.rollback(len(text))
        return tokens[:accepted]

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and self.has_stopped:
            self.has_stopped = False
            num_tokens -= 1
        if num_tokens:
            self.matcher.rollback(num_tokens)

    def fill_bitmask(self, bitmask: Tensor, batch_index: int) -> None:
        row = bitmask.numpy()[batch_index]
        if self.has_stopped or self.matcher.is_error():
            row[:] = 0
            return
        place = bitmask.data_ptr() + batch_index * row.nbytes  # a third of the time of row.ctypes
        self.matcher.unsafe_compute_mask_ptr(place, row.nbytes)
        row &= ~self.stop_bits
        if self.matcher.is_accepting():
            row |= self.stop_bits

    def is_terminated(self) -> bool:
        return self.has_stopped

    def fork(self) -> GuidanceGrammar:
        return GuidanceGrammar(self.origin, self.stop_token_ids, self.stop_bits)

    def _cut(self, tokens: list[int]) -> list[int]:
        """The tokens before the first stop token."""
        stops = (index for index, token in enumerate(tokens) if token in self.stop_token_ids)
        return tokens[: next(stops, len(tokens))]


class ByteTokenizer:
    """What llguidance needs to know of a Vocabulary."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = vocabulary.tokens
        self.tokens = [token or b"" for token in tokens]
        self.special_token_ids = [i for i, token in enumerate(tokens) if token is None]
        self.eos_token_id = min(vocabulary.eos_token_ids, default=None)

    def __call__(self, data: bytes) -> list[int]:
        return []  # it would be asked for tokens of text that is certain: see OPTIONS


def _to_grammar(spec: GrammarSpec) -> str:
    """The constraint in llguidance's form of Lark."""
    text = spec.grammar_spec
    match spec.request_type:
        case StructuredOutputOptions.JSON:
            lark = f"start: %json {json.dumps(_with_options(json.loads(text), spec))}"
        case StructuredOutputOptions.JSON_OBJECT:
            lark = f"start: %json {json.dumps(_with_options({'type': 'object'}, spec))}"
        case StructuredOutputOptions.REGEX:
            with suppress(VLLMValidationError):  # it may know what our parser does not
                text = rewrite(text)
            lark = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
        case StructuredOutputOptions.CHOICE:
            lark = f"start: /{'|'.join(map(_escape, json.loads(text)))}/"
        case StructuredOutputOptions.GRAMMAR:
            lark = llguidance.grammar_from("grammar", text)
        case StructuredOutputOptions.STRUCTURAL_TAG:
            lark = _tag_grammar(json.loads(text), spec)
    return lark if "%llguidance" in lark else OPTIONS + lark


def _with_options(schema: Any, spec: GrammarSpec) -> Any:
    """The schema with its options inside, instead of options that it brings."""
    if spec.disable_additional_properties:
        schema = close(schema)
    options: dict[str, Any] = {
        "lenient": False,  # refuse what is not implemented
        "whitespace_flexible": not spec.disable_any_whitespace,
    }
    if spec.whitespace_pattern is not None:
        options["whitespace_pattern"] = spec.whitespace_pattern
    schema = {True: {}, False: {"enum": []}}[schema] if isinstance(schema, bool) else schema
    return {**rewrite_patterns(schema), "x-guidance": options}


def _escape(text: str) -> str:
    """A regular expression of this text."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _tag_grammar(tag: Any, spec: GrammarSpec) -> str:
    """vLLM's older form of structural tags: text, in which a trigger begins a tag."""
    if "structures" not in tag:
        raise _error(spec, 'a structural tag needs "structures"; the backend xgrammar takes others')
    tags = []
    for item in tag["structures"]:
        trigger = next((text for text in tag["triggers"] if item["begin"].startswith(text)), None)
        if trigger is None:
            raise _error(spec, f"{brief(item['begin'])} begins with none of the triggers")
        grammar = _with_options(item["schema"], spec)
        tags.append(
            StructTag(trigger=trigger, begin=item["begin"], grammar=grammar, end=item["end"])
        )
    return StructTag.to_grammar(tags, assume_special=False).removeprefix("%llguidance {}\n")


def _error(spec: GrammarSpec, error: str) -> VLLMValidationError:
    kind = spec.request_type.name.lower()
    message = f"llguidance refuses this {kind}, {brief(spec.grammar_spec)}: {_essence(error)}"
    return VLLMValidationError(message, parameter="structured_outputs")


def _essence(error: str) -> str:
    """One line of what llguidance says: without its listing of the grammar, and without what of a
    regex is repeated over a line of carets."""
    text = re.sub(r"^at \d+\(\d+\): ", "", re.split(r"\n *\d+ \| ", error)[0])
    text = re.sub(
        r"( \(in regex\))?: regex parse error:\s.*?\nerror: ", ": ", text, flags=re.DOTALL
    )
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
