"""How long does a decode step take on one rank and on several, and what crosses the wire?

`measure_ranks` builds an engine on real ranks and measures its decode steps: bench.py's suite
"parallel". tools/parallel_demo.py shows what each rank holds.

`measure_pipeline` runs requests through pipeline stages, with few or many steps in flight. One step
in flight leaves all stages but one idle, a *bubble*; as many steps as stages fill the pipeline:

    1 in flight     stage 0  [ A ]       [ A ]           2 in flight   [ A ][ B ][ A ][ B ]
                    stage 1       [ A ]       [ A ]                         [ A ][ B ][ A ]

vLLM: benchmarks/benchmark_latency.py (V0), vllm/benchmarks/latency.py (V1).
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from nanoserve import LLM, SamplingParams


def measure_ranks(
    tensor_parallel_size: int,
    model: str | None = None,
    num_requests: int = 32,
    prompt_len: int = 128,
    num_steps: int = 32,
    **options: Any,
) -> dict[str, Any]:
    """Measure decode steps of `num_requests` sequences. `options` go to LLM.

    Returns the median seconds of a step, rank 0's bytes of weights, and rank 0's bytes in one step
    by the name of the operation.
    """
    rng = random.Random(0)
    with LLM(model, tensor_parallel_size=tensor_parallel_size, **options) as llm:
        vocab_size = llm.engine.model_config.vocab_size
        params = SamplingParams(temperature=0, max_tokens=num_steps + 2, ignore_eos=True)
        for number in range(num_requests):
            prompt = [rng.randrange(vocab_size) for _ in range(prompt_len)]
            llm.add_request(str(number), prompt, params)
        while llm.engine.scheduler.waiting:  # the prompts; then one step to warm up
            llm.step()
        llm.step()
        runner = llm.engine.executor.runner
        stats = runner.parallel.comm_stats
        bytes_before = stats.num_bytes.copy()
        seconds = []
        for _ in range(num_steps):
            start = time.perf_counter()
            llm.step()
            seconds.append(time.perf_counter() - start)
        num_bytes = stats.num_bytes - bytes_before
        return {
            "seconds_per_step": statistics.median(seconds),
            "weight_bytes_per_rank": runner.model.num_bytes(),
            "bytes_per_step": {name: number / num_steps for name, number in num_bytes.items()},
        }


def measure_pipeline(
    pp_size: int,
    batch_queue_size: int,
    model: str | None = None,
    num_requests: int = 32,
    prompt_len: int = 128,
    num_steps: int = 32,
    **options: Any,
) -> dict[str, Any]:
    """Decode `num_requests` sequences with at most `batch_queue_size` steps in flight, each with
    its share of the sequences. `options` go to LLM.

    Returns the output tokens per second after the prompts, and the share of this time in which
    stage 0 computed.
    """
    rng = random.Random(0)
    seconds = num_tokens = 0.0
    with LLM(model, pipeline_parallel_size=pp_size, **options) as llm:
        engine, runner = llm.engine, llm.engine.executor.runner
        engine.batch_queue_size = batch_queue_size
        engine.scheduler.max_concurrent_batches = batch_queue_size
        forward = runner.forward

        def timed_forward(inputs: Any) -> Any:
            nonlocal seconds
            start = time.perf_counter()
            hidden = forward(inputs)
            seconds += time.perf_counter() - start
            return hidden

        def count(report: Any) -> None:
            nonlocal num_tokens
            num_tokens += sum(len(update.new_token_ids) for update in report.updates)

        runner.forward = timed_forward
        engine.step_listeners.append(count)
        params = SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True)
        for number in range(num_requests):
            prompt = [rng.randrange(engine.model_config.vocab_size) for _ in range(prompt_len)]
            llm.add_request(str(number), prompt, params)
        while num_tokens < num_requests:  # the prompts
            llm.step()
        seconds = num_tokens = 0.0
        start = time.perf_counter()
        while llm.has_unfinished_requests():
            llm.step()
        elapsed = time.perf_counter() - start
    return {"tokens_per_second": num_tokens / elapsed, "stage_0_busy": seconds / elapsed}
