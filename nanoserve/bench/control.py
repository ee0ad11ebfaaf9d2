"""The control plane alone: what does deciding cost, and how much KV memory is wasted?

The real Scheduler and BlockManager run; no model does. Instead of a forward pass, every sequence
whose last token was in the step is handed a token. So these suites need no GPU, take seconds, and
measure just what is the same on every machine: the books.

    scheduler   microseconds of schedule() + update_from_output() for 16 to 1024 running sequences
    memory      which share of the reserved KV slots holds tokens, for the PagedAttention paper's
                (arXiv 2309.06180, figure 2) four ways to reserve them

vLLM: benchmarks/ has neither; the paper's simulation was never published.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tqdm import tqdm

from nanoserve.bench.workload import Request
from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import ModelOutput, RequestMetrics, SchedulerOutput, Sequence

BLOCK_SIZE = 16
TOKEN = 7  # what the absent model always says


def make_scheduler(
    num_blocks: int, max_num_seqs: int, budget: int = 8192, prefix_caching: bool = True
) -> Scheduler:
    """A scheduler with a KV cache that exists only on paper."""
    config = EngineConfig(
        max_model_len=num_blocks * BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(budget, max_num_seqs),
        num_kv_blocks=num_blocks,
        block_size=BLOCK_SIZE,
    )
    return Scheduler(config, BlockManager(num_blocks, BLOCK_SIZE, prefix_caching))


def make_sequence(number: int, request: Request) -> Sequence:
    return Sequence(
        seq_id=number,
        request_id=str(number),
        prompt_token_ids=request.prompt,
        sampling_params=SamplingParams(
            temperature=0, max_tokens=request.num_output, ignore_eos=True
        ),
        max_tokens=request.num_output,
        stop_token_ids=frozenset(),
        seed=0,
        metrics=RequestMetrics(arrival_time=float(number)),
    )


@dataclass(frozen=True)
class Step:
    """One turn of the crank, and what it cost in seconds."""

    decision: SchedulerOutput
    schedule_seconds: float
    update_seconds: float


def run_steps(scheduler: Scheduler) -> Iterator[Step]:
    """Turn the crank until nothing is unfinished; every sequence gets a token when it is due.

    Yields between the decision and its consequences: the blocks of the step are allocated, nothing
    is freed yet. `update_seconds` is that of the step before.
    """
    update_seconds = 0.0
    while scheduler.has_unfinished():
        start = time.perf_counter()
        decision = scheduler.schedule()
        schedule_seconds = time.perf_counter() - start
        sampled: dict[int, tuple[int, ...]] = {}
        for item in decision.scheduled:
            seq = scheduler.sequences[item.seq_id]
            if seq.num_computed_tokens >= seq.num_tokens:
                sampled[item.seq_id] = (TOKEN,)
        output = ModelOutput(sampled, {})
        yield Step(decision, schedule_seconds, update_seconds)
        start = time.perf_counter()
        scheduler.update_from_output(decision, output)
        update_seconds = time.perf_counter() - start


# -- suite: scheduler --


def scheduler_suite(
    sizes: list[int], contexts: list[int], num_steps: int, use_tqdm: bool = True
) -> dict:
    """Median microseconds of a decode step, for each number of running sequences and each context
    length. `growth` compares the longest context with the shortest, at the same number."""
    rows = []
    cases = [(size, context) for size in sizes for context in contexts]
    for size, context in tqdm(cases, desc="scheduler", unit="case", disable=not use_tqdm):
        rows.append(measure_decode_steps(size, context, num_steps))
    growth = {}
    for size in sizes:
        times = [row["step_us"] for row in rows if row["num_running"] == size]
        growth[str(size)] = times[-1] / times[0]
    return {"rows": rows, "growth_with_context": growth, "contexts": contexts}


def measure_decode_steps(size: int, context: int, num_steps: int) -> dict:
    """`size` sequences of `context` tokens each decode; the first steps, a new block for each
    included, are not counted."""
    length = 2 * BLOCK_SIZE + num_steps
    blocks_each = -(-(context + length) // BLOCK_SIZE)
    scheduler = make_scheduler(size * blocks_each, size, budget=size * context)
    for number in range(size):  # prompts differ from the first token on: no block is shared
        prompt = [number, *range(1, context)]
        scheduler.add(make_sequence(number, Request(prompt, length)))
    schedule: list[float] = []
    update: list[float] = []
    for number, step in enumerate(run_steps(scheduler)):
        if number > BLOCK_SIZE:
            update.append(step.update_seconds * 1e6)  # of the step before
        if number == BLOCK_SIZE + num_steps:
            break
        if number >= BLOCK_SIZE:
            schedule.append(step.schedule_seconds * 1e6)
    total = [a + b for a, b in zip(schedule, update, strict=True)]
    return {
        "num_running": size,
        "context": context,
        "schedule_us": statistics.median(schedule),
        "update_us": statistics.median(update),
        "step_us": statistics.median(total),
        "slowest_us": max(total),
    }


def control_plane_seconds(requests: list[Request], prefix_caching: bool) -> float:
    """Seconds of all schedule() and update_from_output() calls for a workload."""
    longest = max(len(request.prompt) + request.num_output for request in requests)
    num_blocks = len(requests) * -(-longest // BLOCK_SIZE)
    scheduler = make_scheduler(num_blocks, len(requests), prefix_caching=prefix_caching)
    for number, request in enumerate(requests):
        scheduler.add(make_sequence(number, request))
    return sum(step.schedule_seconds + step.update_seconds for step in run_steps(scheduler))


# -- suite: memory --


def memory_suite(requests: list[Request], max_model_len: int, num_slots: int) -> dict:
    """Which share of the reserved KV slots holds tokens, and how many requests run at once.

    num_slots: tokens that the KV cache holds. The paper's three contiguous ways reserve a request's
    slots when it begins: as many as the model allows (max), as the next power of two above its
    final length (pow2), or, knowing the future, as it will need (oracle). Paged ones are reserved
    block by block, by the real scheduler.
    """
    longest = max(len(request.prompt) + request.num_output for request in requests)
    if max(longest, max_model_len) > num_slots:
        raise ValueError(f"{num_slots} slots do not hold one request of {max_model_len} tokens.")

    def final(request: Request) -> int:
        return len(request.prompt) + request.num_output

    rows = [
        {"way": "paged", **_paged(requests, num_slots)},
        {"way": "contiguous, oracle", **_contiguous(requests, num_slots, final)},
        {
            "way": "contiguous, power of two",
            **_contiguous(requests, num_slots, lambda r: 1 << (final(r) - 1).bit_length()),
        },
        {
            "way": "contiguous, maximum",
            **_contiguous(requests, num_slots, lambda _: max_model_len),
        },
    ]
    return {
        "rows": rows,
        "max_model_len": max_model_len,
        "num_slots": num_slots,
        "num_requests": len(requests),
        "block_size": BLOCK_SIZE,
    }


def _paged(requests: list[Request], num_slots: int) -> dict:
    scheduler = make_scheduler(num_slots // BLOCK_SIZE, len(requests))
    for number, request in enumerate(requests):
        scheduler.add(make_sequence(number, request))
    used = reserved = num_running = num_steps = 0
    tables = scheduler.block_manager.block_tables
    for _ in run_steps(scheduler):
        used += sum(seq.num_computed_tokens for seq in scheduler.running)
        reserved += BLOCK_SIZE * len({block for table in tables.values() for block in table})
        num_running += len(scheduler.running)
        num_steps += 1
    return _shares(used, reserved, num_running, num_steps, num_slots)


def _contiguous(requests: list[Request], num_slots: int, reserve: Callable[[Request], int]) -> dict:
    """First come, first served; a request runs from the step in which its reservation fits."""
    waiting = list(requests)
    running: list[list[int]] = []  # [tokens now, tokens at the end, slots reserved]
    free = num_slots
    used = reserved = num_running = num_steps = 0
    while waiting or running:
        while waiting and reserve(waiting[0]) <= free:
            request = waiting.pop(0)
            slots = reserve(request)
            free -= slots
            tokens = len(request.prompt)
            running.append([tokens, tokens + request.num_output, slots])
        used += sum(tokens for tokens, _, _ in running)
        reserved += sum(slots for _, _, slots in running)
        num_running += len(running)
        num_steps += 1
        for entry in running:
            entry[0] += 1
        free += sum(slots for tokens, end, slots in running if tokens >= end)
        running = [entry for entry in running if entry[0] < entry[1]]
    return _shares(used, reserved, num_running, num_steps, num_slots)


def _shares(used: int, reserved: int, num_running: int, num_steps: int, num_slots: int) -> dict:
    """Over all steps: the share of the reserved slots that hold tokens, and of those that do
    not."""
    return {
        "used_share": used / reserved,
        "wasted_share": 1 - used / reserved,
        "mean_running": num_running / num_steps,
        "num_steps": num_steps,
        "cache_filled": reserved / num_steps / num_slots,
    }
