"""What does a router do to 10,000 requests over 64 replicas? Suite "scale": virtual time, no model.

Each replica has the real scheduler and the real block manager; the router is the server's own
(extras/replicas), which gets token ids here and text there. Only two things are not real. A step
takes no time: its end is an event, as many seconds later as the cost model says (cost_model.py),
and the clock jumps from event to event. And tokens come from a fake model in Python. So seconds of
64 GPUs take minutes of one core, and a run depends on its seed alone.

    time      event                                    what follows
    0.000 s   chat 7 sends its first turn              replica 3 is chosen, and idle: a step of 600
                                                       tokens, which ends at 0.014 s
    0.004 s   chat 9 sends its first turn              replica 3 is chosen: it waits
    0.014 s   the step ends, chat 7 has its first      a step of 1 + 580 tokens, which ends at
              token                                    0.028 s

Every chat has several turns: what was said before, and a new question, which a reader needs some
time to write. So a prompt is mostly old, and where its old part is computed the turn is cheap. A
replica's prefix cache holds the chats that it was sent. A router that looks at loads alone, or at
nothing, sends a chat back to one of n replicas with a chance of 1 / n.

The fake model carries a digest from token to token in its KV cache (`ChainExecutor`). A token
computed behind a wrong block is a wrong token, and every answer is compared with that of a chain
without a cache: an error of scheduler, block manager or router's bookkeeping ends the simulation.

    hit rate      tokens of prompts that were in the cache of the replica that got the prompt
    busy          share of the time in which a replica computes: the mean, and the idlest one's
    imbalance     the most requests that a replica served, against the mean

vLLM: none. Its balancer: vllm/v1/engine/core_client.py DPLBAsyncMPClient (by load alone).
"""

from __future__ import annotations

import heapq
import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from random import Random
from typing import Any

from tqdm import tqdm

from nanoserve import sequence
from nanoserve.bench.control import BLOCK_SIZE, make_config
from nanoserve.bench.cost_model import (
    DGX_H100,
    Cluster,
    Layout,
    ModelShape,
    Step,
    most_sequences,
    pass_seconds,
)
from nanoserve.bench.suites import percentiles
from nanoserve.bench.turns import Settings
from nanoserve.block_manager import BlockManager
from nanoserve.extras.replicas.router import PrefixRouter, RoundRobin, Router
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import ModelOutput, RequestMetrics, SchedulerOutput, SequenceUpdate
from nanoserve.tools.fake_executor import VOCAB_SIZE, FakeExecutor, Layers

MODEL = "qwen3-8b"
START = 7  # of every chain of digests


# -- the fake model --


def chain(token_ids: Sequence[int], digest: int = START) -> list[int]:
    """A digest for each token: of all tokens up to there. The model's next token is the last one
    modulo VOCAB_SIZE."""
    digests = accumulate(token_ids, lambda last, token: (last * 31 + token + 1) % (2**31 - 1),
                         initial=digest)  # fmt: skip
    return list(digests)[1:]


class ChainExecutor(FakeExecutor):
    """A FakeExecutor whose step reads one slot of each sequence, not its whole context.

    A slot holds the digest of the sequence up to there. A step reads the digest in front of its
    first token, through the block table, and continues from it.
    """

    def _make_layers(self, num_blocks: int) -> Layers:
        return [array("q", [-1]) * (num_blocks * self.block_size)]  # type: ignore[list-item]

    def _run(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        self._update_rows(scheduler_output)
        slots, output = self.layers[0], ModelOutput({}, {})
        for item in scheduler_output.scheduled:
            row, positions = self.rows[item.seq_id], self._positions(item)
            start, stop = positions.start, positions.stop
            before = slots[self._slot(row, start - 1)] if start else START
            assert before is not None and before >= 0, f"{item}: read an empty slot"
            digests = chain(row.token_ids[start:stop], before)
            for position, digest in zip(positions, digests, strict=True):
                slots[self._slot(row, position)] = digest
            if stop == len(row.token_ids):
                token_id = digests[-1] % self.vocab_size
                row.token_ids.append(token_id)
                output.sampled_token_ids[item.seq_id] = (token_id,)
        return output


# -- the requests --


@dataclass
class Conversation:
    """A conversation: it begins with a system prompt that others have, too."""

    token_ids: list[int]  # all that was said
    turns: list[tuple[list[int], int]]  # question, tokens of the answer; the next one is the last
    pauses: list[float]  # seconds of its reader, between an answer and the next question
    digest: int = START  # of token_ids
    sent_at: float = 0.0
    first_token_at: float = 0.0

    def ask(self) -> tuple[list[int], int]:
        """The next prompt, and the tokens of its answer."""
        question, length = self.turns.pop()
        self.hear(question)
        return list(self.token_ids), length

    def hear(self, token_ids: list[int]) -> None:
        self.digest = [self.digest, *chain(token_ids, self.digest)][-1]
        self.token_ids += token_ids

    def check_answer(self, token_ids: list[int]) -> None:
        """Raises AssertionError unless it is what a model without a cache says."""
        for token_id in token_ids:
            assert token_id == self.digest % VOCAB_SIZE, "an answer has a wrong token"
            self.hear([token_id])


def draw_chats(
    number: int,
    seed: int,
    num_systems: int = 32,
    system_len: int = 512,
    num_turns: tuple[int, int] = (2, 4),
    question: tuple[int, int] = (64, 256),
    answer: tuple[int, int] = (16, 64),
    pause: tuple[float, float] = (0.0, 1.0),
) -> list[Conversation]:
    """Numbers of turns and of tokens, and the seconds of a reader's pause, are uniform in their
    ranges."""
    rng = Random(f"chats {seed}")

    def draw(length: int) -> list[int]:
        return rng.choices(range(VOCAB_SIZE), k=length)

    systems = [draw(system_len) for _ in range(num_systems)]
    chats = []
    for _ in range(number):
        number_of_turns = rng.randint(*num_turns)
        turns = [
            (draw(rng.randint(*question)), rng.randint(*answer)) for _ in range(number_of_turns)
        ]
        pauses = [rng.uniform(*pause) for _ in turns]
        chats.append(Conversation([], turns, pauses))
        chats[-1].hear(rng.choice(systems))
    return chats


def share_said_before(chats: list[Conversation]) -> float:
    """Of the tokens of all prompts, those that are no new question: what one cache for all, without
    an end, would have found. The chats have not begun yet."""
    before = questions = 0
    for chat in chats:
        length = len(chat.token_ids)
        for question, answer in reversed(chat.turns):
            before, questions = before + length, questions + len(question)
            length += len(question) + answer
    return before / (before + questions)


# -- the replicas --


class LeastLoad(RoundRobin[int]):
    """The replica with the fewest requests; of several, each in turn."""

    def choose(self, prefix: str | Sequence[int], loads: Mapping[int, int]) -> int:
        least = min(loads.values())
        return super().choose(prefix, {i: load for i, load in loads.items() if load == least})


POLICIES = ("prefix affinity", "least load", "round robin")


def make_router(policy: str, num_blocks: int) -> Router[int]:
    """`num_blocks`: KV blocks of a replica; the router forgets as a replica does."""
    if policy == "prefix affinity":
        return PrefixRouter[int](max_chunks=num_blocks)
    return LeastLoad() if policy == "least load" else RoundRobin[int]()


class SimulatedReplica:
    """An engine's control plane over the fake model."""

    def __init__(self, num_blocks: int, max_num_seqs: int, budget: int) -> None:
        config = make_config(num_blocks, max_num_seqs, budget)
        self.block_manager = BlockManager(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(config, self.block_manager)
        self.executor = ChainExecutor(config)
        self.is_running = False
        self.busy_seconds = 0.0
        self.num_requests = 0
        self.num_preemptions = 0

    def add(self, seq_id: int, prompt: list[int], length: int, now: float) -> None:
        self.num_requests += 1
        seq = sequence.Sequence(
            seq_id=seq_id,
            request_id=str(seq_id),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(temperature=0, max_tokens=length, ignore_eos=True),
            max_tokens=length,
            stop_token_ids=frozenset(),
            seed=0,
            metrics=RequestMetrics(arrival_time=now, queued_ts=now),
        )
        self.scheduler.add(seq)


def work_of(scheduler_output: SchedulerOutput, output: ModelOutput) -> Step:
    num_keys = num_attended = 0
    for item in scheduler_output.scheduled:
        before, new = item.num_computed_tokens, item.num_scheduled_tokens
        num_keys += before + new
        num_attended += new * before + new * (new + 1) // 2
    num_tokens = scheduler_output.total_num_scheduled_tokens
    return Step(num_tokens, len(output.sampled_token_ids), num_keys, num_attended)


@dataclass
class Simulation:
    """Chats, a router and replicas on one clock. `run` ends when every chat has all its answers."""

    chats: list[Conversation]
    router: Router[int]
    replicas: list[SimulatedReplica]
    model: ModelShape
    cluster: Cluster = DGX_H100
    layout: Layout = field(default_factory=Layout)
    now: float = 0.0  # seconds
    ttfts: list[float] = field(default_factory=list)
    tpots: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    num_running: int = 0  # requests, now
    most_running: int = 0

    def __post_init__(self) -> None:
        self._events: list[tuple[float, int, Any]] = []
        self._numbers = count()  # of events: two at the same time come in this order
        self._chat_of: dict[int, Conversation] = {}  # by the number of the request
        self._loads = dict.fromkeys(range(len(self.replicas)), 0)

    def run(self, starts: list[float]) -> Iterator[int]:
        """Let chat i begin at starts[i]. Yields after each event how many requests have ended."""
        for chat, start in zip(self.chats, starts, strict=True):
            self._at(start, chat)
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            if isinstance(event, Conversation):
                self._send(event)
            else:
                self._end_step(*event)
            yield len(self.tpots)

    def _at(self, time: float, event: Any) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def _send(self, chat: Conversation) -> None:
        """A chat's next turn."""
        prompt, length = chat.ask()
        chosen = self.router.choose(prompt, self._loads)
        self.router.add(prompt, chosen)
        chat.sent_at, number = self.now, next(self._numbers)
        self._chat_of[number] = chat
        self._loads[chosen] += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        self.replicas[chosen].add(number, prompt, length, self.now)
        if not self.replicas[chosen].is_running:
            self._begin_step(chosen)

    def _begin_step(self, index: int) -> None:
        replica = self.replicas[index]
        scheduler_output = replica.scheduler.schedule()
        replica.is_running = not scheduler_output.is_empty
        if scheduler_output.is_empty:
            assert not replica.scheduler.has_unfinished(), "unfinished requests, and no step"
            return
        output = replica.executor.execute_model(scheduler_output)
        work = work_of(scheduler_output, output)
        seconds = pass_seconds(self.model, self.cluster, self.layout, work)
        replica.busy_seconds += seconds
        self._at(self.now + seconds, (index, scheduler_output, output))

    def _end_step(self, index: int, step: SchedulerOutput, output: ModelOutput) -> None:
        for update in self.replicas[index].scheduler.update_from_output(step, output):
            self._take(index, update)
        self._begin_step(index)

    def _take(self, index: int, update: SequenceUpdate) -> None:
        """A request has a new token, perhaps its last one."""
        seq = update.sequence
        chat = self._chat_of[seq.seq_id]
        if seq.num_output_tokens == 1:
            chat.first_token_at = self.now
            self.ttfts.append(self.now - chat.sent_at)
        if seq.status.finish_reason is None:
            return
        del self._chat_of[seq.seq_id]
        assert seq.num_output_tokens == seq.max_tokens, "an answer is too short"
        chat.check_answer(seq.output_token_ids)
        self.num_output_tokens += seq.num_output_tokens
        self.tpots.append((self.now - chat.first_token_at) / max(1, seq.num_output_tokens - 1))
        self.replicas[index].num_preemptions += seq.metrics.num_preemptions
        self._loads[index] -= 1
        self.num_running -= 1
        if chat.turns:
            self._at(self.now + chat.pauses.pop(), chat)

    def check(self) -> None:
        """After the end: nothing is lost, every block is free."""
        assert not self._chat_of and not any(chat.turns for chat in self.chats)
        for replica in self.replicas:
            manager = replica.block_manager
            manager.check()
            assert manager.num_free_blocks == manager.num_blocks, "a block is lost"

    def summarize(self) -> dict[str, Any]:
        managers = [replica.block_manager for replica in self.replicas]
        busy = [replica.busy_seconds / self.now for replica in self.replicas]
        served = [replica.num_requests for replica in self.replicas]
        queried = sum(manager.num_queried_tokens for manager in managers)
        return {
            "hit_rate": sum(manager.num_hit_tokens for manager in managers) / queried,
            "tokens_per_second": self.num_output_tokens / self.now,
            "ttft_ms": percentiles([1e3 * each for each in self.ttfts]),
            "tpot_ms": percentiles([1e3 * each for each in self.tpots]),
            "seconds": self.now,
            "busy": statistics.fmean(busy),
            "least_busy": min(busy),
            "imbalance": max(served) / statistics.fmean(served),
            "num_requests": len(self.ttfts),
            "num_queried_tokens": queried,
            "most_running": self.most_running,
            "num_output_tokens": self.num_output_tokens,
            "num_preemptions": sum(replica.num_preemptions for replica in self.replicas),
        }


# -- suite: scale --


def simulate(
    policy: str,
    num_replicas: int,
    num_chats: int,
    seed: int = 0,
    num_blocks: int | None = None,
    use_tqdm: bool = False,
    budget: int = 8192,
    **workload: Any,
) -> Simulation:
    """All chats begin within a quarter of a second, so that all of their first turns are there at
    once. `num_blocks` of a replica: those that an H100 holds beside the weights. `workload` goes to
    draw_chats."""
    model = ModelShape.named(MODEL)
    num_blocks = num_blocks or most_sequences(model, DGX_H100, Layout(), BLOCK_SIZE)
    chats = draw_chats(num_chats, seed, **workload)
    replicas = [SimulatedReplica(num_blocks, num_chats, budget) for _ in range(num_replicas)]
    simulation = Simulation(chats, make_router(policy, num_blocks), replicas, model)
    rng = Random(f"starts {seed}")
    starts = [rng.uniform(0, 0.25) for _ in chats]
    total = sum(len(chat.turns) for chat in chats)
    title = f"scale: {policy}, {num_replicas}"
    with tqdm(total=total, desc=title, unit="request", disable=not use_tqdm) as bar:
        for num_ended in simulation.run(starts):
            if num_ended - bar.n >= 100 or num_ended == total:
                bar.update(num_ended - bar.n)
    simulation.check()
    return simulation


def scale_suite(
    settings: Settings, sizes: Sequence[int] = (4, 16, 64), num_chats: int = 10_000
) -> dict[str, Any]:
    """Every policy with the largest number of replicas, then with fewer: as many chats for each
    replica. The model and the machines are those of the cost model, not those of the run."""
    rows = []
    for size in sorted(sizes, reverse=True):
        for policy in POLICIES:
            number = num_chats * size // max(sizes)
            simulation = simulate(policy, size, number, settings.seed, use_tqdm=settings.use_tqdm)
            row = {"policy": policy, "replicas": size, "chats": number}
            rows.append({**row, **simulation.summarize()})
    return {
        "simulated_model": MODEL,
        "simulated_device": "H100",
        "said_before": share_said_before(draw_chats(num_chats, settings.seed)),
        "rows": rows,
    }
