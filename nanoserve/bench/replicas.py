"""What does it matter which replica gets a request? The serve suite with --replicas N.

Chats of several turns, each of which sends all that was said before, and a question more. The chats
begin with the same instructions. All chats send a turn at once, in a random order, and the next
one when all are answered:

    nanoserve                 N replicas, chosen by the prompt and the loads (cache_aware)
    nanoserve, round_robin    N replicas, each in turn
    nanoserve, one engine     one engine with the blocks of all

A replica has blocks for its part of the chats and half as many more; so the N caches hold what the
one holds, if each chat stays where it is.

    hits        share of the prompts' tokens that were in the cache of the replica that got them
    computed    the other ones, in a round
    TTFT        of the turns after the first

Hits and computed tokens are counted by the servers (/metrics). They depend on no clock. Seconds do:
where all replicas share few cores, they are the seconds of one machine, and only the ratio of the
first two engines tells something.

SGLang measures its router with shared prefixes (benchmark/, bench_serving.py with
generated-shared-prefix). vLLM: benchmarks/multi_turn/.
"""

from __future__ import annotations

import statistics
from random import Random
from typing import Any

from nanoserve.bench.suites import percentiles
from nanoserve.bench.turns import EngineSpec, ServerProcess, Settings, run_in_turns
from nanoserve.bench.workload import Request

NUM_TURNS, QUESTION_LEN, ANSWER_LEN = 4, 32, 16
BLOCK_SIZE = 16
SPARE = 1.5  # blocks of a replica, of those that its part of the chats fills
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
Values = dict[str, Any]


def replicas_suite(settings: Settings) -> Values:
    """The same chats with each way to choose."""
    num_replicas = settings.replicas
    num_chats = max(num_replicas, settings.num_requests // 2)
    longest = settings.prefix_len + NUM_TURNS * (QUESTION_LEN + ANSWER_LEN)
    own = longest - settings.prefix_len // 2
    num_blocks = int(SPARE * num_chats * own / BLOCK_SIZE) + 2 * settings.prefix_len // BLOCK_SIZE
    each = {"num_gpu_blocks_override": num_blocks // num_replicas, "block_size": BLOCK_SIZE}
    size = {"data_parallel_size": num_replicas}
    options = {
        "nanoserve": {**each, **size},
        "nanoserve, round_robin": {**each, **size, "router_policy": "round_robin"},
        "nanoserve, one engine": {**each, "num_gpu_blocks_override": num_blocks},
    }
    specs = [
        EngineSpec(label, "nanoserve", {"llm_options": its}, is_server=True, wait_policy=None)
        for label, its in options.items()
    ]

    def job(engine: Any, round_: int) -> Values:
        return chat(settings, engine, num_chats, round_)

    measured = run_in_turns(settings, specs, job, "replicas")
    rows = []
    for label, rounds in measured.results.items():
        num_prompt, num_hits = (sum(result[key] for result in rounds) for key in ("prompt", "hits"))
        rows.append(
            {
                **measured.engines[label],
                "hits": num_hits / num_prompt,
                "computed": (num_prompt - num_hits) // len(rounds),
                "ttft_ms": percentiles([1000 * ttft for r in rounds for ttft in r["ttft"]]),
                "seconds": statistics.median(result["seconds"] for result in rounds),
                "nanoserve_is": measured.ratio(label, lambda result: 1 / result["seconds"]),
                "same_tokens": [result["token_ids"] for result in rounds]
                == [result["token_ids"] for result in measured.results["nanoserve"]],
            }
        )
    return {
        "num_replicas": num_replicas,
        "num_chats": num_chats,
        "num_turns": NUM_TURNS,
        "longest": longest,
        "shared": settings.prefix_len // 2,
        "blocks_of_each": num_blocks // num_replicas,
        "rows": rows,
        "skipped": measured.skipped,
    }


def chat(settings: Settings, engine: ServerProcess, num_chats: int, round_: int) -> Values:
    """All turns of all chats. Half of the first prompt is the same in all."""
    rng = Random(f"replicas {settings.seed} {round_}")
    last_id = min(10_000, settings.model_config.vocab_size - 1)

    def draw(number: int) -> list[int]:
        return [rng.randint(0, last_id) for _ in range(number)]

    shared = draw(settings.prefix_len // 2)
    chats = [shared + draw(settings.prefix_len - len(shared)) for _ in range(num_chats)]
    before = engine.counters()
    result: Values = {"seconds": 0.0, "ttft": [], "token_ids": []}
    for turn in range(NUM_TURNS):
        order = rng.sample(range(num_chats), num_chats)
        for said in chats:
            said += draw(QUESTION_LEN)
        requests = [Request(list(chats[i]), ANSWER_LEN) for i in order]
        load = engine.replay(requests, [0.0] * num_chats)
        result["seconds"] += load["seconds"]
        for i, stream in zip(order, load["streams"], strict=True):
            chats[i] += stream["token_ids"]
            result["ttft"] += stream["times"][:1] if turn else []
            result["token_ids"].append(stream["token_ids"])
    after = engine.counters()
    prompt, hits = (after[name] - before.get(name, 0) for name in (QUERIES, HITS))
    return {**result, "prompt": int(prompt), "hits": int(hits)}
