"""What if a grammar takes for ever to compile?

The libraries compile in C++ and Rust, in calls that nothing in the same process can stop. So a
grammar that may be too large is compiled in a process of its own first (see nanoserve/guard.py,
which does the same with templates and tokenizers):

    the engine's process                      the process of the CompileGuard
    compile(backend, spec) ------------->     compile it; forget it
                           <-------------     done, or an error
    compile it again                          killed after SECONDS, or at its limit of memory

What ends there in time takes about the same time here. Nothing is sent back: compiled rules of a
large vocabulary are larger than what made them. The process starts with the first such grammar and
waits for the next one.

Left out: a limit of memory on macOS and Windows, as in guard.py.

vLLM: compile_regex_with_timeout in vllm/v1/structured_output/utils.py, after which its thread works
on.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nanoserve.exceptions import Caught
from nanoserve.extras.structured_output.backend import (
    BACKENDS,
    GrammarSpec,
    StructuredOutputBackend,
    StructuredOutputOptions,
    get_backend_cls,
)
from nanoserve.guard import Guard, main

if TYPE_CHECKING:
    from nanoserve.extras.structured_output.vocabulary import Vocabulary


class CompileGuard(Guard):
    """A process that compiles grammars, each under limits. Any thread may call it; the calls take
    turns."""

    module = __name__

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.vocabulary = vocabulary

    def start_args(self) -> tuple[Any, ...]:
        return self.vocabulary.tokens, self.vocabulary.eos_token_ids

    def compile(self, backend: str, spec: GrammarSpec) -> None:
        """Compile it there. Raises GuardError if that fails or reaches a limit."""
        self.call("compile", backend, {**asdict(spec), "request_type": spec.request_type.name})


class CompilePrograms:
    """What the process can be asked for."""

    def start(self, tokens: tuple[bytes | None, ...], eos_token_ids: frozenset[int]) -> None:
        """Import what the calls need, so that it does not count as a call's time."""
        from nanoserve.extras.structured_output.vocabulary import Vocabulary

        self.backends: dict[str, StructuredOutputBackend] = {}
        for name in BACKENDS:
            with Caught():  # its package is not installed
                cls = get_backend_cls(name)
                if cls.may_take_long is not StructuredOutputBackend.may_take_long:
                    self.backends[name] = cls(Vocabulary(tokens, eos_token_ids))

    def compile(self, backend: str, spec: dict[str, Any]) -> None:
        kind = StructuredOutputOptions[spec["request_type"]]
        self.backends[backend].compile_grammar(GrammarSpec(**{**spec, "request_type": kind}))


if __name__ == "__main__":
    main(CompilePrograms())
