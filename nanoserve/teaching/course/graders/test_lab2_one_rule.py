"""Lab 2: who runs in this step, with how many tokens?"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from nanoserve.scheduler import Scheduler, StepPlan
from nanoserve.teaching.course.toy import MOST_STEPS, ToyEngine, right_answer
from nanoserve.tools.check_blocks import check_blocks


def start(scheduler_cls: Any, prompts: list[int], **options: Any) -> ToyEngine:
    """Requests A, B, ... whose prompts have these lengths, and no token in common. Budget 8."""
    toy = ToyEngine(scheduler_cls, **{"max_num_batched_tokens": 8, "max_num_seqs": 8, **options})
    for number, length in enumerate(prompts):
        toy.add("ABCDEFGH"[number], range(100 * number, 100 * number + length), max_tokens=8)
    return toy


def test_2_1_the_budget_and_the_longest_chunk_are_limits(mine: Any) -> None:
    scheduler = start(
        mine("MyScheduler", "first_chunk"), [], long_prefill_token_threshold=5
    ).scheduler
    for uncomputed, budget, right in [(3, 8, 3), (9, 8, 5), (9, 2, 2), (4, 0, 0)]:
        got = scheduler.first_chunk(uncomputed, StepPlan(budget))
        assert got == right, (
            f"{uncomputed} tokens, budget {budget}, chunks of 5: {right}, not {got}"
        )


def test_2_1_without_chunks_all_or_nothing(mine: Any) -> None:
    options = {"enable_chunked_prefill": False, "max_model_len": 8}
    scheduler = start(mine("MyScheduler", "first_chunk"), [], **options).scheduler
    for uncomputed, budget, right in [(6, 8, 6), (6, 5, 0)]:
        got = scheduler.first_chunk(uncomputed, StepPlan(budget))
        assert got == right, f"no chunks, {uncomputed} tokens, budget {budget}: {right}, not {got}"


@pytest.mark.points(2)
def test_2_2_the_last_running_one_is_preempted(mine: Any) -> None:
    toy = start(
        mine("MyScheduler", "preempt_until_fits"),
        [7, 4, 4],
        num_blocks=5,
        max_num_batched_tokens=16,
    )
    toy.step()
    a, b, c = toy.scheduler.running
    assert toy.scheduler.preempt_until_fits(a, 1), "one token of A fits: nobody has to go"
    assert toy.scheduler.running == [a, b, c], "A's next token fits, and somebody was preempted"
    assert toy.scheduler.preempt_until_fits(a, 12), "A fits when C, and then B, give their blocks"
    left = [seq.request_id for seq in toy.scheduler.running]
    assert left == ["A"], f"A needs 3 blocks more, 2 are free, B and C hold 1 each: {left} run"


def test_2_2_who_does_not_fit_alone_is_preempted_itself(mine: Any) -> None:
    toy = start(mine("MyScheduler", "preempt_until_fits"), [4], num_blocks=2)
    toy.step()
    [a] = toy.scheduler.running
    assert toy.scheduler.preempt_until_fits(a, 9) is False, "A was preempted itself: False"
    assert toy.scheduler.waiting == [a], "A was preempted, and does not wait"


@pytest.mark.points(2)
def test_2_3_a_chunk_leaves_a_token_to_each_one_behind_it(mine: Any) -> None:
    toy = start(mine("MyScheduler", "schedule_running"), [20, 2, 2], long_prefill_token_threshold=4)
    toy.step()
    toy.scheduler.max_chunk = 8
    got = toy.step()
    assert got.get("B") and got.get("C"), f"B and C decode and were left out: {got}"
    assert got["A"] == 6, f"the budget is 8, B and C decode: 6 are left for A, not {got['A']}"


def test_2_3_a_chunk_has_a_limit(mine: Any) -> None:
    toy = start(mine("MyScheduler", "schedule_running"), [20], long_prefill_token_threshold=3)
    toy.step()
    got = toy.step()
    assert got == {"A": 3}, f"no chunk is longer than 3, yours is {got}"


def test_2_3_a_preemption_is_reported(mine: Any) -> None:
    toy = start(mine("MyScheduler", "schedule_running"), [4, 4], num_blocks=3)
    toy.step()
    got = toy.scheduler.schedule_running(StepPlan(8))
    assert got is False, "A and B need a block each, one is free: B is preempted, and that is False"
    names = [seq.request_id for seq in toy.scheduler.running]
    assert names == ["A"], f"A runs, B was preempted; yours: {names}"


@pytest.mark.points(2)
def test_2_4_a_sequence_begins_behind_its_cached_blocks(mine: Any) -> None:
    toy = start(mine("MyScheduler", "admit"), [], max_num_batched_tokens=16)
    toy.add("A", range(10), max_tokens=2)
    toy.run()
    b = toy.add("B", range(10), max_tokens=2)
    got = toy.step()
    assert got == {"B": 2}, f"8 of B's 10 tokens are cached: 2 are left to compute, not {got}"
    assert b.num_cached_tokens == 8, f"B reports {b.num_cached_tokens} cached tokens, not 8"
    assert toy.run()["B"] == right_answer(range(10), 2), "B's answer is wrong"


@pytest.mark.points(2)
def test_2_4_who_does_not_fit_changes_nothing(mine: Any) -> None:
    cases = [({"max_num_seqs": 1}, [4, 4]), ({"num_blocks": 3}, [8, 8]), ({}, [8, 1])]
    for options, prompts in cases:
        toy = start(mine("MyScheduler", "admit"), prompts, **options)
        got = toy.step()
        assert got == {"A": prompts[0]}, f"{options or 'budget 8'}: B does not fit, and got {got}"
        assert [seq.request_id for seq in toy.scheduler.waiting] == ["B"], "B waits on"
        check_blocks(toy.block_manager)


def test_2_5_what_is_left_of_the_budget(mine: Any) -> None:
    got = start(mine("MyScheduler", "schedule_waiting"), [3, 9, 2]).step()
    right = {"A": 3, "B": 5}
    assert got == right, f"the budget is 8: A takes 3, B begins with 5, C waits; yours: {got}"


@pytest.mark.points(2)
def test_2_5_nobody_overtakes(mine: Any) -> None:
    toy = start(
        mine("MyScheduler", "schedule_waiting"), [4, 12, 1], num_blocks=3, max_num_batched_tokens=32
    )
    got = toy.step()
    assert got == {"A": 4}, f"B needs 3 blocks, 2 are free. C must not overtake it: {got}"


@pytest.mark.points(3)
def test_2_6_your_rule_carries_an_engine(mine: Any) -> None:
    rng, lengths = random.Random(2), [1, 3, 9, 17, 26]
    for options in (
        {},
        {"num_blocks": 9},
        {"long_prefill_token_threshold": 3},
        {"max_num_seqs": 2},
    ):
        toy, prompts = start(mine("MyScheduler"), [], **options), {}
        for number in range(20):
            prompts[f"R{number}"] = [rng.randrange(2) for _ in range(rng.choice(lengths))]
            toy.add(f"R{number}", prompts[f"R{number}"], max_tokens=6)
        for _ in range(MOST_STEPS):
            if not toy.scheduler.sequences:
                break
            got = toy.step()
            assert sum(got.values()) <= 8, f"{options}: the budget is 8, and a step has {got}"
            check_blocks(toy.block_manager)
        for name, answer in toy.run().items():
            right = right_answer(prompts[name], 6)
            assert answer == right, f"{options}: {name} says {answer} and should say {right}"


# -- the contest --


@functools.cache
def play(scheduler_cls: type[Scheduler], seed: int) -> tuple[int, float]:
    """(how many of 120 requests got their first token within 0.3 s, the longest wait in s).

    A step takes 4 ms, and 0.5 ms for each token. One request in five has a long prompt.
    """
    rng, clock, arrivals = random.Random(seed), 0.0, [0.0]
    options: Any = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 1024}
    toy = ToyEngine(scheduler_cls, num_blocks=512, **options)
    for _ in range(119):
        arrivals.append(arrivals[-1] + rng.expovariate(18))
    waits: dict[str, float] = {}
    due = dict(enumerate(arrivals))
    while due or toy.scheduler.sequences:
        if not toy.scheduler.sequences:
            clock = max(clock, min(due.values()))
        for number in [number for number, arrival in due.items() if arrival <= clock]:
            length = rng.randint(200, 400) if rng.random() < 0.2 else rng.randint(8, 40)
            prompt = [rng.randrange(10**6) for _ in range(length)]
            toy.add(f"R{number}", prompt, rng.randint(4, 20), due.pop(number))
        clock += 0.004 + 0.0005 * sum(toy.step().values())
        for name, seq in toy.sequences.items():
            if seq.num_output_tokens:
                waits.setdefault(name, clock - arrivals[int(name[1:])])
    return sum(wait <= 0.3 for wait in waits.values()), max(waits.values())


def score(scheduler_cls: Any) -> int:
    return sum(play(scheduler_cls, seed)[0] for seed in range(4))


def test_2_7_contest_more_requests_in_time(mine: Any, record_property: Any) -> None:
    got, least = score(mine("MyPolicy")), score(Scheduler)
    record_property("leaderboard", {"name": "requests in time, of 480", "value": got})
    assert got > least, f"{got} of 480 requests are in time; first come, first served: {least}"


def test_2_7_contest_many_more(mine: Any) -> None:
    got = score(mine("MyPolicy"))
    assert got >= 400, f"{got} of 480 requests are in time: reach 400"


def test_2_7_contest_and_nobody_waits_for_ever(mine: Any) -> None:
    longest = max(play(mine("MyPolicy"), seed)[1] for seed in range(4))
    assert longest <= 2, f"one request waits {longest:.1f} s for its first token: 2 s at most"
