"""What does a router do to 10,000 chats over 64 replicas? Virtual time, no model, no GPU.

Each replica has the real scheduler and the real block manager; the router is the one of
chapters/ray (its text has four characters for each token). Two things are not real. A step takes no
time: its end is an event, as many seconds later as the cost model says, and the clock jumps from
event to event. And every token of an answer is the same. So seconds of 64 GPUs take minutes of one
core, and a run depends on its seed alone.

    time      event                                    what follows
    0.000 s   chat 7 sends its first turn              replica 3 is chosen, and idle: a step of 600
                                                       tokens, which ends at 0.014 s
    0.004 s   chat 9 sends its first turn              replica 3 is chosen: it waits
    0.014 s   the step ends, chat 7 has its first      a step of 1 + 580 tokens, ...
              token

A chat has two to four turns. Each prompt is all that was said before and a new question, which a
reader needs up to a second to write: a replica that has computed the chat has little to do.

    nanoserve bench scale              the figures of scale.md
    python -m nanoserve.bench.scale    its picture

vLLM: none. Its balancer, by load alone: vllm/v1/engine/core_client.py DPLBAsyncMPClient.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from nanoserve.bench.cost_model import Shape, add, gpu, named, prefill
from nanoserve.block_manager import BlockManager
from nanoserve.chapters.ray.router import PrefixRouter
from nanoserve.config import EngineConfig
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import ModelOutput, RequestMetrics, SampledToken, SchedulerOutput, Sequence
from nanoserve.tools.check_blocks import check_blocks

# Datasheet: bytes and operations per second (dense), and 90% of the bytes of memory.
H100, MEMORY = gpu(3.35e12, 989e12), 0.9 * 80e9
BLOCK, VOCAB, ANSWER = 16, 20_000, 0  # tokens of a block; token ids; the one token of the model


def most_tokens(shape: Shape) -> int:
    """That a GPU's memory holds beside the weights."""
    free = MEMORY / shape.itemsize - shape.layer_weights - 2 * shape.head_weights
    return int(free / shape.kv_numbers)


@dataclass
class Chat:
    said: list[int]  # token ids; it begins with a system prompt that others have, too
    turns: list[tuple[list[int], int, float]]  # question, tokens of the answer, seconds until then
    sent: float = 0.0


def draw_chats(number: int, seed: int) -> list[Chat]:
    random, chats = Random(f"chats {seed}"), []

    def draw(low: int, high: int) -> list[int]:
        return random.choices(range(1, VOCAB), k=random.randint(low, high))

    systems = [draw(512, 512) for _ in range(32)]
    for _ in range(number):
        sizes = [(random.randint(16, 64), random.random()) for _ in range(random.randint(2, 4))]
        turns = [(draw(64, 256), *size) for size in sizes]
        chats.append(Chat(list(random.choice(systems)), turns))
    return chats


class LoadRouter(PrefixRouter):
    """The replica with the fewest requests."""

    def num_known(self, hashes: list[bytes], name: Any) -> int:
        return 0


POLICIES = {"prefix": PrefixRouter, "load": LoadRouter}


class Replica:
    """An engine's control plane."""

    def __init__(self, shape: Shape) -> None:
        self.block_manager = BlockManager(most_tokens(shape) // BLOCK, BLOCK)
        config = EngineConfig(max_num_seqs=1024, max_num_batched_tokens=8192)
        self.scheduler = Scheduler(config, self.block_manager)
        self.is_running, self.num_requests = False, 0


class Simulation:
    def __init__(self, policy: str, num_replicas: int, num_chats: int, seed: int = 0) -> None:
        self.shape, self.router = named("qwen3-8b", 2), POLICIES[policy]()
        self.replicas = [Replica(self.shape) for _ in range(num_replicas)]
        self.loads: dict[Any, int] = dict.fromkeys(range(num_replicas), 0)
        self.chat_of: dict[int, Chat] = {}  # by the number of the request
        self.ttfts: list[float] = []
        self.now, self.num_tokens, self.numbers = 0.0, 0, count()
        self.events: list[tuple[float, int, Any]] = []  # time, number, a chat or the end of a step
        for chat in draw_chats(num_chats, seed):  # the first turns come within a quarter second
            self.at(chat.turns[-1][2] / 4, chat)

    def at(self, time: float, event: Any) -> None:
        heapq.heappush(self.events, (time, next(self.numbers), event))

    def run(self) -> dict[str, float]:
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            if isinstance(event, Chat):
                self.send(event)
            else:
                self.end_step(*event)
        assert not self.chat_of, "a request has no answer"
        for replica in self.replicas:
            check_blocks(replica.block_manager)
            assert not any(replica.block_manager.pool.ref_counts), "a block is lost"
        return self.summarize()

    def send(self, chat: Chat) -> None:
        """The next turn of a chat."""
        question, length, _ = chat.turns.pop()
        chat.said, chat.sent = chat.said + question, self.now
        prompt = "".join(chr(0x4E00 + token) * 4 for token in chat.said)
        chosen: Any = self.router.choose(prompt, self.loads)
        self.router.add(prompt, chosen)
        replica, number = self.replicas[chosen], next(self.numbers)
        self.chat_of[number], self.loads[chosen] = chat, self.loads[chosen] + 1
        replica.num_requests += 1
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        metrics = RequestMetrics(self.now, queued_ts=self.now)
        ids = number, str(number), chat.said
        replica.scheduler.add(Sequence(*ids, params, length, frozenset(), 0, metrics))
        if not replica.is_running:
            self.begin_step(chosen)

    def begin_step(self, index: int) -> None:
        replica = self.replicas[index]
        step = replica.scheduler.schedule()
        replica.is_running = bool(step.scheduled)
        costs, output = [], ModelOutput()
        for item in step.scheduled:  # an executor that computes nothing
            end = item.num_computed_tokens + item.num_scheduled_tokens
            costs.append(prefill(end, item.num_computed_tokens))
            if end == replica.scheduler.sequences[item.seq_id].num_tokens:
                output.sampled[item.seq_id] = [SampledToken(ANSWER)]
        if costs:
            seconds = H100.expected_seconds(self.shape, add(costs))
            self.at(self.now + seconds, (index, step, output))

    def end_step(self, index: int, step: SchedulerOutput, output: ModelOutput) -> None:
        for update in self.replicas[index].scheduler.update_from_output(step, output):
            seq, self.num_tokens = update.sequence, self.num_tokens + len(update.tokens)
            chat = self.chat_of[seq.seq_id]
            if seq.num_output_tokens == 1:
                self.ttfts.append(self.now - chat.sent)
            if seq.status.finish_reason is not None:
                del self.chat_of[seq.seq_id]
                self.loads[index] -= 1
                chat.said = seq.token_ids
                if chat.turns:
                    self.at(self.now + chat.turns[-1][2], chat)
        self.begin_step(index)

    def summarize(self) -> dict[str, float]:
        managers = [replica.block_manager for replica in self.replicas]
        served = [replica.num_requests for replica in self.replicas]
        hits = sum(manager.num_hit_tokens for manager in managers)
        ttfts = sorted(self.ttfts)
        return {
            "hit_rate": hits / sum(manager.num_queried_tokens for manager in managers),
            "tokens_per_s": self.num_tokens / self.now,
            "ttft_ms_p50": 1000 * ttfts[len(ttfts) // 2],
            "ttft_ms_p99": 1000 * ttfts[len(ttfts) * 99 // 100],
            "imbalance": max(served) * len(served) / sum(served),
        }


def measure_scale(is_quick: bool = False) -> dict[str, dict[str, float]]:
    """All policies, with 156 chats for each replica."""
    sizes, each = ((2, 4), 20) if is_quick else ((1, 4, 16, 64), 10_000 / 64)
    print(f"scale: {', '.join(map(str, sizes))} replicas; {'seconds' if is_quick else 'minutes'}")
    pairs = [(size, policy) for size in sizes for policy in POLICIES]
    return {f"{n} by {policy}": Simulation(policy, n, int(n * each)).run() for n, policy in pairs}


if __name__ == "__main__":
    from nanoserve.teaching.pictures import lines

    found = measure_scale()
    curves: dict[str, list[tuple[float, float]]] = {policy: [] for policy in POLICIES}
    for label, row in found.items():
        size, _, policy = label.split()
        curves[policy].append((float(size), row["hit_rate"]))
    picture = lines("Tokens of prompts that were in the cache", curves, "replicas", "hit rate")
    picture.save(Path(__file__).with_suffix(".svg"))
