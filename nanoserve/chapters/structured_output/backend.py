"""What turns a constraint into masks?

A backend compiles a constraint once for its vocabulary. What comes out is a grammar: one sequence's
place in the compiled rules. It says which tokens may follow, and goes on by the tokens that did:

    backend.compile_grammar(spec)     regex "ab|ac", vocabulary a b c ab <eos>
    grammar.fill_bitmask(mask)        a: yes   b: no    c: no    ab: yes   <eos>: no
    grammar.accept_tokens([0])        "a"
    grammar.fill_bitmask(mask)        a: no    b: yes   c: yes   ab: no    <eos>: no
    grammar.rollback(1)               at the beginning again

A mask is an array [ceil(vocab_size / 32)] of int32. Bit j of word i is token 32 * i + j, 1 if the
token is allowed. Stop tokens are allowed exactly where the text may end. The special tokens of a
tokenizer are never text. Requests with the same constraint share the compiled rules (`fork`).

vLLM: vllm/model_executor/guided_decoding/__init__.py (V0);
vllm/v1/structured_output/backend_types.py (V1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from nanoserve.chapters.structured_output.vocabulary import Vocabulary


class GrammarSpec(NamedTuple):
    """All that compiled rules depend on, beside the vocabulary: two equal ones share them."""

    kind: str  # "json", "regex", "choice", "grammar", "structural_tag"
    text: str  # of "choice": a JSON list of strings
    stop_token_ids: frozenset[int]  # tokens that end a text; never empty
    is_compact: bool = False  # no whitespace between the parts of JSON


class StructuredOutputGrammar(ABC):
    """One sequence's place in compiled rules. One thread at a time uses it.

    Invariant: num_tokens tokens were accepted, and not taken back.
    """

    num_tokens = 0

    def accept_tokens(self, tokens: Collection[int]) -> int:
        """Go on by these tokens, as far as they are allowed. Returns how many were."""
        before = self.num_tokens
        for token in tokens:
            if self.is_terminated() or not self.accept_token(token):
                break
            self.num_tokens += 1
        return self.num_tokens - before

    def rollback(self, num_tokens: int) -> None:
        """Take the last accepted tokens back, a stop token too."""
        if num_tokens:
            self.take_back(num_tokens)
            self.num_tokens -= num_tokens

    @abstractmethod
    def accept_token(self, token: int) -> bool:
        """Go on by one token, if it is allowed; no stop token was accepted before."""

    @abstractmethod
    def take_back(self, num_tokens: int) -> None:
        """Go back by so many tokens: at least one."""

    @abstractmethod
    def fill_bitmask(self, mask: np.ndarray) -> None:
        """Write which tokens may come next; no stop token was accepted before."""

    @abstractmethod
    def is_terminated(self) -> bool:
        """True if a stop token was accepted: nothing may follow."""

    @abstractmethod
    def fork(self) -> StructuredOutputGrammar:
        """Another place in the same rules: the beginning."""


class StructuredOutputBackend(ABC):
    """Compiles constraints for one vocabulary. Several threads may call it at once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @abstractmethod
    def compile_grammar(self, spec: GrammarSpec) -> StructuredOutputGrammar:
        """Compile the rules; the grammar is at their beginning. Raises an exception, whose words
        tell the user why, for rules that are wrong or not supported."""


def pack_bits(token_ids: Collection[int], vocab_size: int) -> np.ndarray:
    """The mask [ceil(vocab_size / 32)] int32 that allows these tokens alone."""
    is_allowed = np.zeros(-(-vocab_size // 32) * 32, bool)
    is_allowed[list(token_ids)] = True
    return np.packbits(is_allowed, bitorder="little").view(np.int32)
