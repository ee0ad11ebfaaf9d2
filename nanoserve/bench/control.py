"""The control plane alone: what does a decision cost, and how much KV memory is wasted?

The real Scheduler and BlockManager run, without a model. Instead of a forward pass, every sequence
whose last token was in the step is given one more token. So these suites need no GPU and take
seconds.

    scheduler   microseconds of a decode step: schedule(), update_from_output(), and the runner's
                preparation of its inputs; for 16 to 1024 running sequences, contexts of up to
                32,768 tokens, and 100,000 waiting requests
    memory      which share of the reserved KV slots holds tokens, for the PagedAttention paper's
                (arXiv 2309.06180, figure 2) four ways to reserve them

vLLM: benchmarks/ has neither; the paper's simulation was never published.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from nanoserve import sequence
from nanoserve.attention import AttentionBackend
from nanoserve.bench.turns import Settings
from nanoserve.bench.workload import Request, draw_requests
from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig
from nanoserve.input_batch import RequestState
from nanoserve.model_runner import ModelRunner
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import ModelOutput, RequestMetrics, SchedulerOutput
from nanoserve.staging import StagingBuffer, staging_bytes

BLOCK_SIZE = 16
TOKEN = 7  # every output token is this one
MOST_TOKENS = 2**21  # of all contexts of a case together: more would need gigabytes of Python lists


def make_config(num_blocks: int, max_num_seqs: int, budget: int = 8192) -> EngineConfig:
    """Limits that `num_blocks` KV blocks allow."""
    return EngineConfig(
        max_model_len=num_blocks * BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(budget, max_num_seqs),
        num_gpu_blocks_override=num_blocks,
        block_size=BLOCK_SIZE,
    )


def make_scheduler(
    requests: list[Request],
    num_blocks: int,
    max_num_seqs: int,
    budget: int = 8192,
    prefix_caching: bool = True,
) -> Scheduler:
    """A scheduler to which all requests have been added."""
    config = make_config(num_blocks, max_num_seqs, budget)
    scheduler = Scheduler(config, BlockManager(num_blocks, BLOCK_SIZE, prefix_caching))
    for number, request in enumerate(requests):
        length = request.num_output
        seq = sequence.Sequence(
            seq_id=number,
            request_id=str(number),
            prompt_token_ids=request.prompt,
            sampling_params=SamplingParams(temperature=0, max_tokens=length, ignore_eos=True),
            max_tokens=length,
            stop_token_ids=frozenset(),
            seed=0,
            metrics=RequestMetrics(arrival_time=0.0, queued_ts=float(number)),
        )
        scheduler.add(seq)
    return scheduler


class InputRunner(ModelRunner):
    """The half of a ModelRunner that turns a SchedulerOutput into tensors. It has no model."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        config = make_config(-(-max_model_len // BLOCK_SIZE), max_num_seqs)
        self.block_size = BLOCK_SIZE
        self.device = torch.device("cpu")
        self.dtype = self.kv_cache_dtype = torch.float32
        self.backend = AttentionBackend()
        self.graphs = self.lora_slots = None
        self.staging = StagingBuffer(staging_bytes(config), self.device)
        self.req_states = RequestState(max_num_seqs, max_model_len, BLOCK_SIZE, 1000, self.staging)

    def prepare_seconds(self, scheduler_output: SchedulerOutput) -> float:
        """The time to write what changed and to send the step. Then every scheduled sequence whose
        last token is in the step gets TOKEN."""
        start = time.perf_counter()
        self.staging.begin_step()
        rows = self.update_batch(scheduler_output)
        inputs = self.prepare_inputs(scheduler_output.scheduled, rows)
        end = time.perf_counter()
        sampled = input_batch.arrays.sampled_rows
        positions = self.req_states.append_placeholders(sampled)
        self.req_states.token_ids[sampled, positions] = np.int32(TOKEN)
        return end - start


class StepSeconds(NamedTuple):
    """Of one step. `update` is that of the step before."""

    schedule: float
    update: float
    prepare: float


def run_steps(scheduler: Scheduler, runner: InputRunner | None = None) -> Iterator[StepSeconds]:
    """Run until no sequence is unfinished; yield the seconds of each step. Without a runner,
    nothing is prepared.

    At the yield, the blocks of the step are allocated and none is freed yet.
    """
    update_seconds = 0.0
    while scheduler.has_unfinished():
        start = time.perf_counter()
        scheduler_output = scheduler.schedule()
        schedule_seconds = time.perf_counter() - start
        sampled: dict[int, tuple[int, ...]] = {}
        for item in scheduler_output.scheduled:
            seq = scheduler.sequences[item.seq_id]
            if seq.num_computed_tokens >= seq.num_tokens:
                sampled[item.seq_id] = (TOKEN,)
        prepare_seconds = runner.prepare_seconds(scheduler_output) if runner else 0.0
        yield StepSeconds(schedule_seconds, update_seconds, prepare_seconds)
        start = time.perf_counter()
        scheduler.update_from_output(scheduler_output, ModelOutput(sampled, {}))
        update_seconds = time.perf_counter() - start


# -- suite: scheduler --


def scheduler_suite(
    settings: Settings,
    sizes: Sequence[int] = (16, 64, 256, 1024),
    contexts: Sequence[int] = (128, 512, 2048, 32768),
    num_steps: int = 200,
    num_waiting: int = 100_000,
) -> dict[str, Any]:
    """Median microseconds of the parts of a decode step, for each number of running sequences and
    each context length; then 256 sequences again with `num_waiting` others in the queue.

    `growth` compares the step with the longest context to that with the shortest, at the same
    number; `growth_with_queue` the step with the queue to that without.
    """
    cases = [(size, context, 0) for size in sizes for context in contexts]
    cases = [case for case in cases if case[0] * case[1] <= MOST_TOKENS]
    size = min(sizes, key=lambda size: abs(size - 256))
    cases.append((size, contexts[0], num_waiting))
    rows = [
        measure_decode_steps(number, context, waiting, num_steps)
        for number, context, waiting in settings.progress(cases, "scheduler")
    ]
    growth = {}
    for number in sizes:
        times = [row["step_us"] for row in rows[:-1] if row["num_running"] == number]
        growth[str(number)] = round(times[-1] / times[0], 4)
    alone = next(row for row in rows if (row["num_running"], row["context"]) == (size, contexts[0]))
    return {
        "rows": rows,
        "growth_with_context": growth,
        "growth_with_queue": round(rows[-1]["step_us"] / alone["step_us"], 4),
        "contexts": contexts,
    }


def measure_decode_steps(
    size: int, context: int, num_waiting: int, num_steps: int
) -> dict[str, Any]:
    """`size` sequences of `context` tokens each decode, and `num_waiting` wait. The first steps do
    not count: there, each sequence gets its first new block."""
    length = 2 * BLOCK_SIZE + num_steps
    blocks_each = -(-(context + length) // BLOCK_SIZE)
    # Prompts differ from the first token on, so that no block is shared.
    rest = [token_id % 1000 for token_id in range(1, context)]
    requests = [Request([number, *rest], length) for number in range(size)]
    requests += [Request([1, 2, 3], length)] * num_waiting
    scheduler = make_scheduler(requests, size * blocks_each, size, budget=size * context)
    runner = InputRunner(size, blocks_each * BLOCK_SIZE)
    measured = list(islice(run_steps(scheduler, runner), BLOCK_SIZE, BLOCK_SIZE + num_steps + 1))
    schedule = [seconds.schedule * 1e6 for seconds in measured[:-1]]
    update = [seconds.update * 1e6 for seconds in measured[1:]]  # of the step before
    prepare = [seconds.prepare * 1e6 for seconds in measured[:-1]]
    total = [a + b for a, b in zip(schedule, update, strict=True)]
    return {
        "num_running": size,
        "context": context,
        "num_waiting": num_waiting,
        "schedule_us": statistics.median(schedule),
        "update_us": statistics.median(update),
        "step_us": statistics.median(total),
        "slowest_us": max(total),
        "prepare_us": statistics.median(prepare),
    }


def control_plane_seconds(requests: list[Request], prefix_caching: bool) -> float:
    """Seconds of all schedule() and update_from_output() calls for a workload."""
    num_blocks = len(requests) * -(-max(map(final_length, requests)) // BLOCK_SIZE)
    scheduler = make_scheduler(requests, num_blocks, len(requests), prefix_caching=prefix_caching)
    return sum(seconds.schedule + seconds.update for seconds in run_steps(scheduler))


# -- suite: memory --


class Occupancy(NamedTuple):
    """Of the KV cache, in one step."""

    num_tokens: int  # slots that hold a token
    num_reserved: int  # slots that no other request can use
    num_running: int  # requests


def memory_suite(
    settings: Settings, max_model_len: int = 2048, num_slots: int = 64 * 1024
) -> dict[str, Any]:
    """Which share of the reserved KV slots holds tokens, and how many requests run at once.

    num_slots: tokens that the KV cache holds. The paper's three contiguous ways reserve all slots
    of a request when it begins: as many as the model allows (maximum), as the next power of two
    above its final length, or exactly its final length (an oracle knows it). Paged ones are
    reserved block by block, by the real scheduler. As in the paper, requests end long before the
    length that the model allows.
    """
    requests = draw_requests(256, 50, 512, 1000, settings.seed)
    ways: dict[str, Callable[[Request], int]] = {
        "contiguous, oracle": final_length,
        "contiguous, power of two": lambda r: 1 << (final_length(r) - 1).bit_length(),
        "contiguous, maximum": lambda _: max_model_len,
    }
    rows = [{"way": "paged", **summarize(run_paged(requests, num_slots))}]
    for way, reserve in ways.items():
        rows.append({"way": way, **summarize(run_contiguous(requests, num_slots, reserve))})
    return {
        "rows": rows,
        "max_model_len": max_model_len,
        "num_slots": num_slots,
        "num_requests": len(requests),
        "block_size": BLOCK_SIZE,
    }


def final_length(request: Request) -> int:
    return len(request.prompt) + request.num_output


def run_paged(requests: list[Request], num_slots: int) -> Iterator[Occupancy]:
    scheduler = make_scheduler(requests, num_slots // BLOCK_SIZE, len(requests))
    tables = scheduler.block_manager.block_tables
    for _ in run_steps(scheduler):
        num_tokens = sum(seq.num_computed_tokens for seq in scheduler.running)
        num_blocks = len({block for table in tables.values() for block in table})
        yield Occupancy(num_tokens, num_blocks * BLOCK_SIZE, len(scheduler.running))


def run_contiguous(
    requests: list[Request], num_slots: int, reserve: Callable[[Request], int]
) -> Iterator[Occupancy]:
    """First come, first served; a request runs from the step in which its reservation fits."""
    waiting = list(requests)
    running: list[tuple[Request, int]] = []  # (request, step in which it began)
    step = 0
    while waiting or running:
        reserved = sum(reserve(request) for request, _ in running)
        while waiting and reserved + reserve(waiting[0]) <= num_slots:
            reserved += reserve(waiting[0])
            running.append((waiting.pop(0), step))
        num_tokens = sum(len(request.prompt) + step - begun for request, begun in running)
        yield Occupancy(num_tokens, reserved, len(running))
        step += 1
        running = [
            (request, begun) for request, begun in running if step - begun < request.num_output
        ]


def summarize(steps: Iterable[Occupancy]) -> dict[str, float]:
    """Over all steps: the share of the reserved slots that hold tokens, and of the others."""
    num_tokens, num_reserved, num_running = zip(*steps, strict=True)
    used = sum(num_tokens) / sum(num_reserved)
    return {
        "used_share": used,
        "wasted_share": 1 - used,
        "mean_running": statistics.mean(num_running),
    }
