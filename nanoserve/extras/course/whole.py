"""Does a student's whole engine give the right answers?

    child, with the student's package:   python whole.py tight 7   ->  [[501, 88, ...], ...]
    parent, with its own:                compare("tight", 7, ...)  ->  right, or what differs

The engine runs on the fake model, which reads its next token back out of the KV cache
(nanoserve/tools/fake_executor.py). So a wrong block, a lost token or a stale cache hit is a wrong
answer. The right answer is a function of the prompt alone, which the parent computes without any
engine: an answer cannot be right by chance, and a child cannot say that it is right.

The module imports only what a student's package has, and of that only when it answers.

vLLM: none.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from typing import Any, NamedTuple

LIMIT_STEPS = 20_000


class Load(NamedTuple):
    """One kind of work."""

    title: str
    options: dict[str, Any]  # of EngineConfig
    num_requests: int
    longest: int  # tokens of a prompt
    n: int = 1


MANY = {"num_gpu_blocks_override": 400, "block_size": 4, "max_num_batched_tokens": 512}
FEW = {**MANY, "num_gpu_blocks_override": 24}
LOADS = {
    "one": Load("one request after the other", {**MANY, "max_num_seqs": 1}, 6, 30),
    "batch": Load("many requests at once, with room for all", {**MANY, "max_num_seqs": 16}, 24, 30),
    "chunks": Load(
        "long prompts in chunks",
        {**MANY, "max_num_seqs": 8, "max_num_batched_tokens": 16},
        12,
        60,
    ),
    "tight": Load("too few blocks: preemption", {**FEW, "max_num_seqs": 8}, 20, 30),
    "swap": Load(
        "too few blocks: swap", {**FEW, "max_num_seqs": 8, "preemption_mode": "swap"}, 20, 30
    ),
    "branches": Load("several completions of each prompt", {**MANY, "max_num_seqs": 16}, 8, 30, 3),
}


def draw(load: str, seed: int) -> list[tuple[list[int], int]]:
    """The prompts and the numbers of tokens to make. Prompts share beginnings."""
    rng, shape = random.Random(f"{load} {seed}"), LOADS[load]
    common = [rng.randrange(900) for _ in range(shape.longest)]
    requests = []
    for _ in range(shape.num_requests):
        shared = rng.choice([0, 8, 12, 16])
        length = rng.randint(1, shape.longest)
        prompt = (common[:shared] + [rng.randrange(900) for _ in range(length)])[:length]
        requests.append((prompt, rng.randint(1, 12)))
    return requests


def answer(load: str, seed: int) -> list[list[list[int]]]:
    """What this engine makes of the requests: [request][completion] -> token ids."""
    from nanoserve.block_manager import BlockManager
    from nanoserve.config import EngineConfig
    from nanoserve.sampling_params import SamplingParams
    from nanoserve.scheduler import Scheduler
    from nanoserve.sequence import RequestMetrics, Sequence
    from nanoserve.tools.fake_executor import FakeExecutor

    shape = LOADS[load]
    config = EngineConfig(max_model_len=200, **shape.options)
    executor = FakeExecutor(config)
    size, has_cpu_blocks = config.block_size, executor.num_cpu_blocks
    manager = BlockManager(executor.num_kv_blocks, size, True, has_cpu_blocks)
    scheduler = Scheduler(config, manager)
    outputs: dict[int, list[int]] = {}
    for number, (prompt, length) in enumerate(draw(load, seed)):
        seq = Sequence(
            seq_id=number * shape.n,
            request_id=str(number),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=length, n=shape.n, ignore_eos=True),
            max_tokens=length,
            stop_token_ids=frozenset(),
            seed=number,
            metrics=RequestMetrics(0.0, 0.0),
            num_pending_forks=shape.n - 1,
        )
        scheduler.add(seq)
    for _ in range(LIMIT_STEPS):
        if not scheduler.has_unfinished():
            break
        step = scheduler.schedule()
        if step.is_empty:
            raise RuntimeError("a step is empty, and requests wait: nobody will ever run")
        for update in scheduler.update_from_output(step, executor.execute_model(step)):
            outputs[update.sequence.seq_id] = update.sequence.output_token_ids
    else:
        raise RuntimeError(f"after {LIMIT_STEPS} steps there are unfinished requests")
    if manager.num_free_blocks != manager.num_blocks:
        raise RuntimeError(f"all have ended, and {manager!r}")
    return [
        [outputs[number * shape.n + branch] for branch in range(shape.n)]
        for number in range(shape.num_requests)
    ]


def compare(load: str, seed: int, text: str) -> tuple[str, str]:
    """(status, message) for what a child printed."""
    from nanoserve.tools.fake_executor import reference_output

    with contextlib.suppress(ValueError):
        given = json.loads(text)
        for number, (prompt, length) in enumerate(draw(load, seed)):
            for branch in range(LOADS[load].n):
                right = reference_output(prompt, length, seed=number, branch=branch)
                got = given[number][branch] if isinstance(given, list) else None
                if got != right:
                    return "wrong", (
                        f"request {number}, completion {branch}, {len(prompt)} prompt tokens: the "
                        f"tokens should be {right}, and are {got}"
                    )
        return "right", ""
    return "wrong", "your engine printed no answers"


if __name__ == "__main__":
    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (768 * 2**20, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CPU, (30, 31))
    print(json.dumps(answer(sys.argv[1], int(sys.argv[2]))))
