"""Ctrl-C at random moments: KeyboardInterrupt arrives, the books are right, the engine serves on.

A timer sends SIGALRM; its handler raises SIGINT, sometimes twice in quick succession. A signal that
comes while this file's own code runs is put off: only the engine is under test.

Python drops what a handler raises inside a finalizer (`__del__`, the callback of a weak reference).
Such a Ctrl-C is lost in any program; it is no finding unless the finalizer is nanoserve's.

Left out: Windows, which has no such timer. The moments depend on the machine; the calls depend on
the seed.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from nanoserve.exceptions import describe_error
from nanoserve.llm import LLM
from nanoserve.sampling_params import SamplingParams
from nanoserve.tools.soak.rounds import Round

HERE = str(Path(__file__))
PACKAGE = str(Path(__file__).parents[2])
PROMPTS = ("Once upon a time", "One day, a little girl named Mia", "2 + 3 =")
POSTPONE = 2e-4  # seconds


class Interrupts:
    """Sends SIGINT after some moments; counts what was sent and what arrived.

    Invariant: a signal is sent only while code outside this file runs.
    """

    def __init__(self, moments: list[float]) -> None:
        """moments: seconds from the last signal (or the start) to the next; at least one."""
        self.moments = list(moments)
        self.num_sent = 0
        self.num_arrived = 0
        self.num_dropped = 0  # by Python, inside a finalizer of another library
        self.errors: list[str] = []  # others that Python dropped

    def send(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGALRM."""
        if frame is None or frame.f_code.co_filename == HERE:
            signal.setitimer(signal.ITIMER_REAL, POSTPONE)
            return
        self.num_sent += 1
        if self.moments:
            signal.setitimer(signal.ITIMER_REAL, self.moments.pop(0))
        signal.raise_signal(signal.SIGINT)

    def note_dropped(self, dropped: Any) -> None:
        """The hook for what Python drops (sys.unraisablehook)."""
        code = getattr(dropped.object, "__code__", getattr(dropped.object, "gi_code", None))
        is_ours = code is not None and code.co_filename.startswith(PACKAGE)
        if issubclass(dropped.exc_type, KeyboardInterrupt) and not is_ours:
            self.num_dropped += 1
        else:
            self.errors.append(f"{dropped.object}: {describe_error(dropped.exc_value)}")

    def run(self, action: Callable[[], Any]) -> None:
        """Call `action` again and again until all signals were sent."""
        previous = signal.signal(signal.SIGALRM, self.send)
        previous_hook, sys.unraisablehook = sys.unraisablehook, self.note_dropped
        num_signals = len(self.moments)
        signal.setitimer(signal.ITIMER_REAL, self.moments.pop(0))
        while self.num_sent < num_signals:
            try:
                action()
            except KeyboardInterrupt:
                self.num_arrived += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        sys.unraisablehook = previous_hook


class SignalPart:
    """Rounds of interrupted calls on two engines of the demo model."""

    def __init__(self, llm_cls: Callable[..., LLM] = LLM) -> None:
        # A shell lets its background jobs ignore SIGINT, and their children inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        options = {"num_kv_blocks": 24, "max_num_seqs": 8}
        self.engines = [llm_cls(async_scheduling=late, **options) for late in (False, True)]
        self.params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        self.right = self.generate(self.engines[0])

    def generate(self, llm: LLM) -> list[list[int]]:
        outputs = llm.generate(list(PROMPTS), self.params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def __call__(self, round: Round) -> None:
        if not hasattr(signal, "setitimer"):
            return
        rng = round.rng
        for _ in range(10):
            llm = rng.choice(self.engines)
            calls = [self.call_generate, self.call_stream, self.call_beams, self.call_steps]
            call = rng.choice(calls)
            interrupts = Interrupts([rng.uniform(1e-4, 0.06)])
            if round.chance(0.4):
                interrupts.moments.append(rng.choice([1e-5, 1e-4, 2e-3]))
            interrupts.run(partial(call, round, llm))
            round.num_requests += 1
            name = call.__name__
            is_told = interrupts.num_arrived + interrupts.num_dropped > 0
            round.expect(is_told, f"{name}: no KeyboardInterrupt arrived")
            round.expect(not interrupts.errors, f"{name}: Python dropped", interrupts.errors)
            is_restored = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            round.expect(is_restored, f"{name}: the handler of SIGINT was not restored")
            self.finish_steps(round, llm, {})
            self.check(round, llm, name)

    def check(self, round: Round, llm: LLM, name: str) -> None:
        """All blocks are free, and the next answers are right."""
        engine = llm.engine
        engine.block_manager.check()
        free, number = engine.block_manager.num_free_blocks, engine.executor.num_kv_blocks
        round.expect(not llm.has_unfinished_requests(), f"{name}: requests are left", engine)
        round.expect(free == number, f"{name}: {free} of {number} blocks are free")
        tokens = self.generate(llm)
        round.expect(tokens == self.right, f"{name}: wrong tokens afterwards", tokens, self.right)

    # -- the calls: each is correct by itself, or interrupted --

    def call_generate(self, round: Round, llm: LLM) -> None:
        tokens = self.generate(llm)
        round.expect(tokens == self.right, "generate: wrong tokens", tokens)

    def call_stream(self, round: Round, llm: LLM) -> None:
        tokens: dict[str, list[int]] = {}
        for output in llm.stream(list(PROMPTS), self.params):
            tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
        got = sorted(tokens.values())
        round.expect(got == sorted(self.right), "stream: wrong tokens", got)

    def call_beams(self, round: Round, llm: LLM) -> None:
        from nanoserve import BeamSearchParams

        [found] = llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=3, max_tokens=5))
        round.expect(len(found.sequences) == 3, "beam search: beams are missing")

    def call_steps(self, round: Round, llm: LLM) -> None:
        """Requests that were queued in an interrupted call go on in the next one."""
        names = [f"step-{i}" for i in range(len(PROMPTS))]
        tokens: dict[str, list[int]] = {}
        for name, prompt in zip(names, PROMPTS, strict=True):
            if not llm.engine.is_unfinished(name):
                llm.add_request(name, prompt, self.params)
        self.finish_steps(round, llm, tokens)

    def finish_steps(self, round: Round, llm: LLM, tokens: dict[str, list[int]]) -> None:
        """Step to the end. What ends has the right tokens."""
        deadline = time.monotonic() + 20
        while llm.has_unfinished_requests():
            for output in llm.step():
                tokens[output.request_id] = output.outputs[0].token_ids
                prefix, _, number = output.request_id.partition("-")
                if output.finished and prefix == "step":
                    right = self.right[int(number)]
                    got = tokens[output.request_id]
                    round.expect(got == right, "step: wrong tokens", got, right)
            if time.monotonic() > deadline:
                round.expect(False, "step: the requests do not end", llm.engine)
                llm.abort_request(list(llm.engine.output_processor.requests))
                return
