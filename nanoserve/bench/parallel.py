"""How long does a decode step take on one rank and on several, and what crosses the wire?

`measure_ranks` builds an engine on real ranks and measures its decode steps: bench.py's suite
"parallel". tools/parallel_demo.py shows what each rank holds.

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
