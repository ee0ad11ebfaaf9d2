"""What turns a constraint into masks?

A backend compiles a constraint once for its vocabulary. What comes out is a grammar: one sequence's
place in the compiled rules. It says which tokens may follow, and goes on by the tokens that did:

    backend.compile_grammar(spec)         regex "ab|ac", vocabulary a b c ab <eos>
    grammar.fill_bitmask(bitmask, 0)      a: yes   b: no    c: no    ab: yes   <eos>: no
    grammar.accept_tokens("0", [0])       "a"
    grammar.fill_bitmask(bitmask, 0)      a: no    b: yes   c: yes   ab: no    <eos>: no
    grammar.rollback(1)                   at the beginning again

A bitmask is a tensor [num_rows, ceil(vocab_size / 32)] of int32. Bit j of word i is token
32 * i + j, 1 if the token is allowed. Stop tokens are allowed exactly where the text may end. The
special tokens of a tokenizer are never text.

Several requests with the same constraint share the compiled rules (`fork`).

vLLM: vllm/model_executor/guided_decoding/__init__.py (V0);
vllm/v1/structured_output/backend_types.py (V1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, auto
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

from nanoserve.entrypoints.errors import VLLMValidationError, describe_error

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve.chapters.structured_output.vocabulary import Vocabulary

# name -> module of this folder, class
BACKENDS = {
    "nano": ("automaton", "NanoBackend"),
    "xgrammar": ("backend_xgrammar", "XgrammarBackend"),
    "guidance": ("backend_guidance", "GuidanceBackend"),
}


class StructuredOutputOptions(Enum):
    """The kinds of constraints."""

    JSON = auto()
    JSON_OBJECT = auto()
    REGEX = auto()
    GRAMMAR = auto()
    CHOICE = auto()
    STRUCTURAL_TAG = auto()


# What "auto" tries, in this order. (xgrammar is slow where a regex nests quantifiers.)
AUTO = dict.fromkeys(
    (StructuredOutputOptions.REGEX, StructuredOutputOptions.CHOICE),
    ("nano", "guidance", "xgrammar"),
)
OTHERS = ("xgrammar", "guidance")


@dataclass(frozen=True)
class GrammarSpec:
    """All that compiled rules depend on, beside the vocabulary: two equal ones share them."""

    request_type: StructuredOutputOptions
    grammar_spec: str  # of CHOICE: a JSON list of strings
    stop_token_ids: frozenset[int] = frozenset()
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class StructuredOutputGrammar(ABC):
    """One sequence's place in compiled rules. One thread at a time uses it."""

    num_bytes: int = 0  # of memory that the compiled rules take, about

    @abstractmethod
    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Go on by these tokens. False: one of them is not allowed; those before it are accepted.
        What follows a stop token is ignored."""

    @abstractmethod
    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """The first of these tokens, as far as they are allowed one after another. Nothing
        changes."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take the last accepted tokens back, a stop token too."""

    @abstractmethod
    def fill_bitmask(self, bitmask: Tensor, batch_index: int) -> None:
        """Write the row bitmask[batch_index]: which tokens may come next."""

    @abstractmethod
    def is_terminated(self) -> bool:
        """True if a stop token was accepted: nothing may follow."""

    @abstractmethod
    def fork(self) -> StructuredOutputGrammar:
        """Another place in the same rules: the beginning."""


class StructuredOutputBackend(ABC):
    """Compiles constraints for one vocabulary. Several threads may call it at once."""

    name: ClassVar[str]

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @classmethod
    @abstractmethod
    def check(cls, spec: GrammarSpec) -> None:
        """Raise ValueError for what this backend refuses, as far as milliseconds can tell."""

    @abstractmethod
    def compile_grammar(self, spec: GrammarSpec) -> StructuredOutputGrammar:
        """Compile the rules; the grammar is at their beginning. Raises ValueError for bad ones."""

    def may_take_long(self, spec: GrammarSpec) -> bool:
        """True if this is to be compiled in a process first, which can be killed at a limit."""
        return False

    def allocate_token_bitmask(self, max_num_seqs: int) -> Tensor:
        """Rows for so many sequences, in which all tokens are allowed."""
        import torch

        num_words = -(-len(self.vocabulary.tokens) // 32)
        return torch.full((max_num_seqs, num_words), -1, dtype=torch.int32, device="cpu")

    def destroy(self) -> None:  # noqa: B027
        """Release what a backend holds beside Python's objects. Nothing may be compiled later."""


def get_backend_cls(name: str) -> type[StructuredOutputBackend]:
    """The class of this name. Raises ImportError if its package is not installed."""
    module, class_name = BACKENDS[name]
    cls: type[StructuredOutputBackend] = getattr(
        import_module(f"{__package__}.{module}"), class_name
    )
    return cls


def choose_backend(backend: str, spec: GrammarSpec) -> type[StructuredOutputBackend]:
    """The class that compiles this: `backend`, or for "auto" the first one that can. Raises
    VLLMValidationError with the reasons of all that refuse it."""
    refused_by: dict[str, list[str]] = {}  # reason -> names
    advice = ""
    for name in AUTO.get(spec.request_type, OTHERS) if backend == "auto" else [backend]:
        try:
            cls = get_backend_cls(name)
            cls.check(spec)
            return cls
        except ImportError as error:
            refused_by.setdefault(f"{error}.", []).append(name)
            advice = '\npip install -e ".[structured]" installs what is missing.'
        except ValueError as error:
            refused_by.setdefault(str(error), []).append(name)
    reasons = "".join(f"\n  {', '.join(names)}: {why}" for why, names in refused_by.items())
    raise VLLMValidationError(
        f"structured_outputs: no backend takes it.{reasons}{advice}",
        parameter="structured_outputs",
    )


def describe_misfit(error: Exception) -> str:
    """What to say of an error that came of JSON with other parts than expected."""
    return f"a part of it is missing, or has a wrong type ({describe_error(error)})"
