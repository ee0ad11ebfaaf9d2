"""What is a scheduling decision worth? One engine against itself: batching, chunked.

    batching  continuous batching against static batches: throughput, and the requests that run
    chunked   long prompts arrive while others decode, with prompts in chunks and without: the time
              to the long prompt's first token, and the gaps between the tokens of the others

Both build engines of this process that differ in one option, have as many KV blocks each, and let
them take turns. So they show what the decision itself is worth, and nothing of what else two
systems differ in.

Static batching, as servers had it before Orca (OSDI 2022), is a scheduler of three lines, given to
the same engine by its seam (`scheduler_cls`). It is static batching at its best: a row that has
ended costs nothing here, whereas a padded batch computes it to the end.

                static                          continuous
    step 1      A B                             A B
    step 2      A .     (B has ended)           A C
    step 3      A .                             A C
    step 4      C D                             D

Papers: Orca, Yu et al., OSDI 2022 (continuous batching); Sarathi-Serve, Agrawal et al., arXiv
2403.02310 (chunked prefill). vLLM: vllm/benchmarks/ compares engines, not policies.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

from nanoserve import LLM
from nanoserve.bench.inside import greedy, run_here
from nanoserve.bench.suites import percentiles
from nanoserve.bench.turns import WARM_UP, Settings
from nanoserve.bench.workload import Request, draw_requests
from nanoserve.engine import StepReport
from nanoserve.scheduler import Scheduler


class StaticBatchScheduler(Scheduler):
    """Nobody joins a batch before all of its requests have ended."""

    def _schedule_waiting(self, step: Any) -> None:
        if not self.running and not self.swapped:
            super()._schedule_waiting(step)


class StepLog:
    """A step listener: what every step ran, and when every token came."""

    def __init__(self) -> None:
        self.num_running: list[int] = []  # per step
        self.token_times: dict[str, list[float]] = {}  # request id -> seconds of perf_counter

    def __call__(self, report: StepReport) -> None:
        now = time.perf_counter()
        self.num_running.append(len(report.scheduler_output.scheduled))
        for update in report.updates:
            times = self.token_times.setdefault(update.sequence.request_id, [])
            times += [now] * len(update.new_token_ids)


@contextmanager
def logged(llm: LLM) -> Iterator[StepLog]:
    log = StepLog()
    llm.engine.step_listeners.append(log)
    try:
        yield log
    finally:
        llm.engine.step_listeners.remove(log)


# -- suite: batching --


def batching_suite(settings: Settings) -> dict[str, Any]:
    """The throughput suite's requests, of which a quarter fit into a batch, by both schedulers.

    "continuous_is" is how many times as fast the continuous batches were, the median of the rounds.
    """
    batch_size = max(1, settings.num_requests // 4)
    common = {
        "max_num_seqs": batch_size,
        "max_num_batched_tokens": batch_size * settings.max_len,  # a whole batch of prompts at once
        "max_model_len": 2 * settings.max_len,
    }
    options: dict[str, dict[str, Any]] = {
        "continuous": common,
        "static": {**common, "scheduler_cls": StaticBatchScheduler},
    }
    seconds: dict[str, list[float]] = {name: [] for name in options}
    logs: dict[str, StepLog] = {}
    with settings.llms(options) as llms:
        for round_ in settings.progress(range(WARM_UP, settings.repeat), "batching"):
            requests = settings.draw_warm_up() if round_ == WARM_UP else settings.draw(round_)
            for name, llm in llms.items():
                with logged(llm) as logs[name]:
                    taken, _ = run_here(llm, requests, settings.device)
                if round_ != WARM_UP:
                    seconds[name].append(taken)
    requests = settings.draw(0)
    num_output = sum(request.num_output for request in requests)
    rows = [
        {
            "batching": name,
            "seconds": seconds[name],
            "tokens_per_second": num_output / statistics.median(seconds[name]),
            "num_steps": len(logs[name].num_running),
            "mean_running": statistics.mean(logs[name].num_running),
            "continuous_is": statistics.median(
                theirs / ours
                for ours, theirs in zip(seconds["continuous"], seconds[name], strict=True)
            ),
        }
        for name in options
    ]
    return {
        "num_requests": len(requests),
        "batch_size": batch_size,
        "lengths": settings.lengths,
        "num_output_tokens": num_output,
        "rows": rows,
    }


# -- suite: chunked --


def chunked_suite(
    settings: Settings,
    num_decoding: int = 8,
    num_arrivals: int = 4,
    steps_between: int = 12,
    budgets: tuple[int, ...] = (256, 64),
) -> dict[str, Any]:
    """`num_decoding` requests decode; every `steps_between` steps a prompt of prefix_len tokens
    arrives. Without chunks it is computed in one step, for which all others wait; with chunks, a
    step has at most `budget` tokens.

    Gaps are the times between two tokens of a decoding request, from the first arrival on.
    """
    vocab_size = settings.model_config.vocab_size
    prompt_len = min(settings.prefix_len, settings.model_config.max_model_len - 2)
    steps_between = min(steps_between, max(1, prompt_len // (2 * num_arrivals)))
    all_tokens = num_decoding + prompt_len
    common = {"max_model_len": prompt_len + 2, "max_num_seqs": num_decoding + num_arrivals}
    options: dict[str, dict[str, Any]] = {
        "off": {
            **common,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": all_tokens,
        }
    }
    for budget in budgets:
        if common["max_num_seqs"] < budget < all_tokens:
            options[f"{budget} tokens"] = {**common, "max_num_batched_tokens": budget}
    gaps: dict[str, list[float]] = {name: [] for name in options}
    first_tokens: dict[str, list[float]] = {name: [] for name in options}
    seconds: dict[str, list[float]] = {name: [] for name in options}
    with settings.llms(options) as llms:
        for round_ in settings.progress(range(WARM_UP, settings.repeat), "chunked"):
            drawn = draw_requests(
                num_decoding + num_arrivals, prompt_len, prompt_len, vocab_size, round_=round_
            )
            arriving = [replace(each, num_output=1) for each in drawn[num_decoding:]]
            decoding = [Request(each.prompt[:1], prompt_len) for each in drawn[:num_decoding]]
            for name, llm in llms.items():
                measured = interrupt(llm, decoding, arriving, steps_between)
                if round_ != WARM_UP:
                    for kept, new in zip((gaps, first_tokens, seconds), measured, strict=True):
                        kept[name] += new
    rows = [
        {
            "chunks": name,
            "ttft_ms": percentiles([second * 1000 for second in first_tokens[name]]),
            "gap_ms": percentiles([second * 1000 for second in gaps[name]]),
            "largest_gap_ms": max(gaps[name]) * 1000,
            "seconds": seconds[name],
            "against_off": {
                "ttft": statistics.median(first_tokens[name])
                / statistics.median(first_tokens["off"]),
                "gap_p99": percentiles(gaps[name])["p99"] / percentiles(gaps["off"])["p99"],
            },
        }
        for name in options
    ]
    sizes = {"num_decoding": num_decoding, "num_arrivals": num_arrivals, "prompt_len": prompt_len}
    return {**sizes, "steps_between": steps_between, "rows": rows}


def interrupt(
    llm: LLM, decoding: list[Request], arriving: list[Request], steps_between: int
) -> tuple[list[float], list[float], list[float]]:
    """Let `decoding` run while `arriving` come one by one. Seconds: the gaps between tokens of the
    decoding ones, the times to the arriving ones' first tokens, and the whole time."""
    added_at: dict[str, float] = {}
    with logged(llm) as log:
        for number, request in enumerate(decoding):
            llm.add_request(f"decoding {number}", request.prompt, greedy(request))
        while len(log.token_times) < len(decoding):
            llm.step()
        start = time.perf_counter()
        for number, request in enumerate(arriving):
            for _ in range(steps_between):
                llm.step()
            name = f"arriving {number}"
            added_at[name] = time.perf_counter()
            llm.add_request(name, request.prompt, greedy(request))
        while not all(log.token_times.get(name) for name in added_at):
            llm.step()
        end = time.perf_counter()
        llm.abort_request([f"decoding {number}" for number in range(len(decoding))])
    first_arrival = min(added_at.values())
    gaps = [
        later - earlier
        for name, times in log.token_times.items()
        if name not in added_at
        for earlier, later in pairwise(times)
        if later > first_arrival
    ]
    waits = [log.token_times[name][0] - moment for name, moment in added_at.items()]
    return gaps, waits, [end - start]
