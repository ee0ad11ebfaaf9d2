"""Requests that arrive at given steps: what does a scheduler make of them?

    run = serve({"A": 1, "B": 4})                     # B arrives before step 4; the first is step 1
    run = serve({"A": (1, 10), "B": (4, 2)})          # 10 and 2 tokens to generate
    run = serve({"A": (1, 10, 1), "B": (4, 2, 0)})    # and their priorities
    run.num_steps, run.answers["A"], run.wait("B").steps

Everything is counted in steps and tokens, nothing in seconds. So a run gives the same numbers on
each machine. Tokens are the better measure of work: the time of a step grows with its tokens.

Left out: random arrivals. bench/ measures those, in seconds.

vLLM: benchmarks/ (`vllm bench serve`) does this in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nanoserve import LLM, SamplingParams
from nanoserve.extras import lesson
from nanoserve.extras.trace.recorder import Recorder


class Wait(NamedTuple):
    """What a request waited for."""

    steps: int  # from its arrival to its first token
    tokens: int  # tokens of all requests that these steps computed
    gap: int  # the most tokens that were computed from one of its tokens to the next one


@dataclass(frozen=True)
class Run:
    """What `serve` did."""

    recorder: Recorder
    answers: dict[str, str]
    num_steps: int  # also those in which nobody ran
    num_generated: int  # tokens, of all requests

    def wait(self, name: str) -> Wait:
        """What this request waited for."""
        frames = [frame for frame in self.recorder.steps if frame.view(name)]
        gaps, tokens = [], 0
        steps = 0
        for number, frame in enumerate(frames, start=1):
            tokens += frame.num_scheduled
            view = frame.view(name)
            if view is not None and view.num_sampled:
                steps = steps or number
                gaps.append(tokens)
                tokens = 0
        first, *others = gaps
        return Wait(steps, first, max(others, default=0))

    def order(self) -> list[str]:
        """The names of the requests, in the order of their first tokens."""
        first: dict[str, int] = {}
        for frame in self.recorder.steps:
            for view in frame.scheduled:
                if view.num_sampled:
                    first.setdefault(view.name, frame.number)
        return sorted(first, key=lambda name: first[name])


def serve(requests: Mapping[str, Any], num_blocks: int = 48, **options: Any) -> Run:
    """Serve requests: name -> (step of its arrival, tokens to generate, priority), or its first
    parts. Without a number of tokens, a request ends where the model ends it. `options` are those
    of lesson.small_llm. The prefix cache is off: a prompt is computed as a whole."""
    planned = {n: r if isinstance(r, tuple) else (r,) for n, r in requests.items()}
    options = {"enable_prefix_caching": False, **options}
    answers, num_generated, step = dict[str, str](), 0, 0
    last = max(arrival for arrival, *_ in planned.values())
    with lesson.small_llm(num_blocks, **options) as llm:
        recorder = Recorder(llm)
        while step < last or llm.has_unfinished_requests():
            step += 1
            for name, (arrival, *rest) in planned.items():
                if arrival == step:
                    _add(llm, name, *rest)
            for output in llm.step():
                answers[output.request_id] = output.outputs[0].text
                num_generated += len(output.outputs[0].token_ids) if output.finished else 0
    return Run(recorder, answers, step, num_generated)


def _add(llm: LLM, name: str, length: int | None = None, priority: int = 0) -> None:
    params = SamplingParams(temperature=0, max_tokens=length or 32, ignore_eos=bool(length))
    llm.add_request(name, lesson.prompt(llm, name), params, priority=priority)
