"""Who compiles a constraint, and when?

The thread that adds the request, at once: what the backend refuses is refused at the door, and the
engine never waits. With "backend": "auto" a regex or a choice is for our own automaton ("nano"),
all else for xgrammar.

Vocabulary and package are loaded for the first request that needs them. The constraints that were
used last stay compiled, so a second request with the same one starts at once.

Left out: a limit of time. (vLLM compiles in other threads, and the request waits in the scheduler.)

vLLM: vllm/v1/structured_output/__init__.py (V1).
"""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from typing import Any

from nanoserve.chapters.structured_output.automaton import NanoBackend
from nanoserve.chapters.structured_output.backend import (
    GrammarSpec,
    StructuredOutputBackend,
    StructuredOutputGrammar,
    pack_bits,
)
from nanoserve.chapters.structured_output.params import (
    StructuredOutputsConfig,
    StructuredOutputsParams,
)
from nanoserve.chapters.structured_output.vocabulary import Vocabulary, read_vocabulary
from nanoserve.models.config import ModelConfig

CACHE_SIZE = 64  # constraints that stay compiled


class StructuredOutputManager:
    """Compiles the constraints of one engine. Any thread may call it."""

    def __init__(self, config: StructuredOutputsConfig, model: ModelConfig, tokenizer: Any) -> None:
        self.config, self.model_config, self.tokenizer = config, model, tokenizer
        self.compile_or_find = lru_cache(CACHE_SIZE)(self.compile_grammar)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        model = self.model_config
        return read_vocabulary(self.tokenizer, model.vocab_size, model.eos_token_ids)

    @cached_property
    def nano(self) -> StructuredOutputBackend:
        return NanoBackend(self.vocabulary)

    @cached_property
    def xgrammar(self) -> StructuredOutputBackend:
        from nanoserve.chapters.structured_output.backend_xgrammar import XgrammarBackend

        return XgrammarBackend(self.vocabulary)

    def grammar_init(
        self, wanted: StructuredOutputsParams, stop_token_ids: frozenset[int]
    ) -> StructuredOutputGrammar:
        """A grammar at its beginning. Raises ValueError for what the backend refuses."""
        is_compact = wanted.disable_any_whitespace or self.config.disable_any_whitespace
        return self.compile_or_find(GrammarSpec(*wanted.key, stop_token_ids, is_compact)).fork()

    def compile_grammar(self, spec: GrammarSpec) -> StructuredOutputGrammar:
        """Raises ValueError. The first mask is made at once: it may take as long as compiling."""
        backend = self.config.backend
        if backend == "auto":
            backend = "nano" if spec.kind in ("regex", "choice") else "xgrammar"
        try:
            grammar = getattr(self, backend).compile_grammar(spec)
            grammar.fill_bitmask(mask := pack_bits((), self.model_config.vocab_size))
            if not mask.any():
                raise ValueError("the tokens of this model can write no text that is allowed")
        except ImportError as error:
            how = 'pip install "nanoserve[structured]"'
            raise ValueError(f"structured_outputs: {spec.kind} needs xgrammar: {how}.") from error
        except Exception as error:  # xgrammar raises many types
            why = re.sub(r"\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()  # no line of its source
            what = f"the {spec.kind} {spec.text[:100]!r}"
            raise ValueError(f"structured_outputs: {what} is refused: {why}") from error
        return grammar
