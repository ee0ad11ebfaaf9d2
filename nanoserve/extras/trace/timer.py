"""Where does the time of a step go? The parts of a step, measured inside the engine.

A Recorder knows the three times that the engine reports (schedule, execute, update). A StepTimer
also measures the parts of execute: prepare, model and sample. It replaces methods of one engine by
methods that measure, so it is for measurements, not for production.

    timer = trace.StepTimer(llm)
    llm.generate(prompts)
    timer.milliseconds()      {"schedule": 0.05, "prepare": 0.2, "model": 3.1, "sample": 0.2, ...}

vLLM: none; its --profile uses torch's profiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from nanoserve.arg_utils import engine_of

# part -> the methods of the engine whose time it is
PARTS: dict[str, tuple[str, ...]] = {
    "schedule": ("scheduler.schedule",),
    "prepare": ("executor.runner.update_batch", "executor.runner.prepare_inputs"),
    "model": ("executor.runner.forward",),
    "sample": ("executor.runner.sample",),
    "update": ("scheduler.update_from_output", "output_processor.process_outputs"),
}


class StepTimer:
    """Replaces the PARTS of one engine by methods that measure their time, until close().

    On a GPU, `model` is the time to launch the work, and `gpu_seconds` the time that the device
    takes for that work, between events in its stream; `sample` then includes the waiting for the
    device.
    """

    def __init__(self, llm_or_engine: Any, device: str = "cpu") -> None:
        self.is_gpu = device != "cpu"
        self.reset()
        self._replaced: list[tuple[Any, str, Any]] = []  # with what another tool had put there
        engine = engine_of(llm_or_engine)
        for part, paths in PARTS.items():
            for path in paths:
                where, _, name = path.rpartition(".")
                owner = attrgetter(where)(engine)
                self._replaced.append((owner, name, vars(owner).get(name)))
                setattr(owner, name, self._timed(part, getattr(owner, name)))

    def reset(self) -> None:
        """Forget what was measured."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.num_steps = 0
        self.events: list[tuple[Any, Any]] = []

    def close(self) -> None:
        """Give the engine back the methods that it had. Of two timers, close the later first."""
        for owner, name, before in self._replaced:
            vars(owner).pop(name, None)
            vars(owner).update({name: before} if before else {})
        self._replaced = []

    def milliseconds(self) -> dict[str, float]:
        """Each part's mean over the steps so far."""
        return {part: 1000 * s / max(self.num_steps, 1) for part, s in self.seconds.items()}

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                self.seconds[part] += time.perf_counter() - start

        def run_model(*arguments: Any, **options: Any) -> Any:
            self.num_steps += 1
            if not self.is_gpu:
                return run(*arguments, **options)
            import torch

            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            hidden = run(*arguments, **options)
            end.record()
            self.events.append((begin, end))
            return hidden

        return run_model if part == "model" else run

    def gpu_seconds(self) -> float:
        """Seconds of the device for the work of `model`, over all steps."""
        import torch

        torch.cuda.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self.events) / 1000
