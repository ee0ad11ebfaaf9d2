"""Does the simulation find as much in the prefix caches as real servers did? Hit rates, beside it.

`bench.py --suite serve --replicas 2` has measured, over HTTP, what share of the prompts' tokens was
in the cache of the replica that got them (replicas.py). Here the same chats go through the
simulation of scale.py: as many, of the same lengths, with the same blocks, all at once and then the
next turn of all. A hit rate depends on router, scheduler and block manager, and hardly on the time
of a step, so it can be compared though the seconds cannot:

    routed by prefix    measured 81.2%    simulated 81.2%

vLLM: none.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from nanoserve.bench.cost_model import ModelShape
from nanoserve.bench.replicas import ANSWER_LEN, QUESTION_LEN
from nanoserve.bench.scale import (
    MODEL,
    Conversation,
    SimulatedReplica,
    Simulation,
    make_router,
)
from nanoserve.tools.fake_executor import VOCAB_SIZE

FILE = "cpu-demo-replicas.json"
ROUNDS = 3  # of new chats, on caches that hold the old ones
BUDGET = 8192  # tokens of a step
# What the file calls it -> policy of the simulation, whether one engine has the blocks of all
ENGINES = {
    "nanoserve": ("prefix affinity", False),
    "nanoserve, round_robin": ("round robin", False),
    "nanoserve, one engine": ("round robin", True),
}


class HitRate(NamedTuple):
    engine: str  # one of ENGINES
    measured: float
    simulated: float


def hit_rates(folder: Path) -> list[HitRate]:
    """Those of the result in `folder`."""
    suite = json.loads((folder / FILE).read_text("utf-8"))["suites"]["replicas"]
    return [
        HitRate(row["engine"], row["hits"], simulate_hits(suite, *ENGINES[row["engine"]]))
        for row in suite["rows"]
    ]


def simulate_hits(suite: dict[str, Any], policy: str, is_one: bool, seed: int = 0) -> float:
    """The hit rate of chats like those of the suite "replicas"."""
    rng = Random(f"hits {seed}")
    number, blocks, chats = suite["num_replicas"], suite["blocks_of_each"], suite["num_chats"]
    if is_one:
        number, blocks = 1, blocks * number
    replicas = [SimulatedReplica(blocks, chats, BUDGET) for _ in range(number)]
    simulation = Simulation([], make_router(policy, blocks), replicas, ModelShape.named(MODEL))
    for _ in range(ROUNDS):
        run_round(simulation, suite, rng)
    simulation.check()
    return float(simulation.summarize()["hit_rate"])


def run_round(simulation: Simulation, suite: dict[str, Any], rng: Random) -> None:
    """All turns of new chats, which begin alike: each turn of all at once, in a random order."""

    def draw(length: int) -> list[int]:
        return rng.choices(range(VOCAB_SIZE), k=length)

    prompt_len = suite["longest"] - suite["num_turns"] * (QUESTION_LEN + ANSWER_LEN)
    shared = draw(suite["shared"])
    chats = [Conversation([], [], []) for _ in range(suite["num_chats"])]
    for chat in chats:
        chat.hear(shared + draw(prompt_len - len(shared)))
    for _ in range(suite["num_turns"]):
        for chat in chats:
            chat.turns = [(draw(QUESTION_LEN), ANSWER_LEN)]
        simulation.chats = rng.sample(chats, len(chats))
        for _ in simulation.run([simulation.now] * len(chats)):
            pass
