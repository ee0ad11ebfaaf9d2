"""nanoserve/bench/scale.py: the real control plane of many replicas, in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("nanoserve.extras.replicas")

from nanoserve.bench import hit_rates, report, scale
from nanoserve.bench.cost_model import DGX_H100, Layout, ModelShape, decode, pass_seconds, prefill
from nanoserve.bench.roofline import MachineLimits
from nanoserve.bench.turns import Settings
from nanoserve.block_manager import BlockManager

SMALL = {"num_systems": 2, "system_len": 40, "question": (3, 30), "answer": (1, 9)}


@given(
    policy=st.sampled_from(scale.POLICIES),
    num_replicas=st.integers(1, 4),
    num_chats=st.integers(1, 12),
    num_blocks=st.integers(14, 40),
    budget=st.integers(16, 80),
    seed=st.integers(0, 99),
)
@settings(max_examples=12, deadline=None)
def test_nothing_is_lost(
    policy: str, num_replicas: int, num_chats: int, num_blocks: int, budget: int, seed: int
) -> None:
    """Few blocks, small budgets: chats are preempted and cut. Each has all its tokens, and the
    right ones (Conversation.check_answer), and every block is free (Simulation.check)."""

    def run() -> dict[str, Any]:
        small = {"num_blocks": num_blocks, "budget": budget, **SMALL}
        return scale.simulate(policy, num_replicas, num_chats, seed, **small).summarize()

    asked = [turn for chat in scale.draw_chats(num_chats, seed, **SMALL) for turn in chat.turns]
    result = run()
    assert result["num_requests"] == len(asked)
    assert result["num_output_tokens"] == sum(length for _, length in asked)
    assert 0 <= result["hit_rate"] < 1 and 0 <= result["least_busy"] <= result["busy"] <= 1
    assert result["most_running"] <= num_chats
    assert result == run(), "a run depends on its seed alone"


@given(seed=st.integers(0, 99), num_replicas=st.integers(2, 8))
@settings(max_examples=8, deadline=None)
def test_affinity_finds_as_much_as_turns(seed: int, num_replicas: int) -> None:
    """With room for all chats."""
    found = {
        policy: scale.simulate(policy, num_replicas, 24, seed, 4000, **SMALL).summarize()
        for policy in ("prefix affinity", "round robin")
    }
    assert found["prefix affinity"]["hit_rate"] >= found["round robin"]["hit_rate"]


def test_a_wrong_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same block for every part of the prefix: the digests behind it are wrong."""
    find = BlockManager.get_cached_blocks

    def mix_up(self: BlockManager, seq: Any) -> list[int]:
        return [find(self, seq)[0]] * len(found) if (found := find(self, seq)) else []

    monkeypatch.setattr(BlockManager, "get_cached_blocks", mix_up)
    with pytest.raises(AssertionError):
        scale.simulate("round robin", 1, 4, num_blocks=200, **SMALL)


def test_a_chat_alone_takes_the_time_of_its_steps() -> None:
    """No one else is there: the time to the first token is that of the prompt, and the time
    between tokens that of decode steps."""
    alone = {"num_systems": 1, "system_len": 32, "num_turns": (1, 1), "question": (8, 8)}
    simulation = scale.simulate("least load", 2, 1, **alone, answer=(3, 3))
    model = ModelShape.named(scale.MODEL)

    def seconds(step: Any) -> float:
        return pass_seconds(model, DGX_H100, Layout(), step)

    assert simulation.ttfts == [pytest.approx(seconds(prefill(40)))]
    both = seconds(decode(1, 41)) + seconds(decode(1, 42))
    assert simulation.tpots == [pytest.approx(both / 2)]


def test_the_least_loaded_replica_and_then_each_in_turn() -> None:
    router = scale.LeastLoad()
    assert [router.choose("", {0: 1, 1: 0, 2: 0}) for _ in range(3)] == [1, 2, 1]


@given(seed=st.integers(0, 99), pause=st.floats(0, 1))
@settings(max_examples=10, deadline=None)
def test_one_replica_finds_what_was_said_before(seed: int, pause: float) -> None:
    """But for the first time that a system prompt is said, and what fills no block."""
    workload = {**SMALL, "num_systems": 1, "pause": (pause, pause)}
    chats = scale.draw_chats(6, seed, **workload)
    share = scale.share_said_before(chats)
    result = scale.simulate("round robin", 1, 6, seed, 2000, **workload).summarize()
    prompts = sum(len(turns) for turns in (chat.turns for chat in chats))
    queried = result["num_queried_tokens"]
    assert share * queried - 16 * prompts - 40 <= result["hit_rate"] * queried <= share * queried


def test_the_suite_and_its_table(tmp_path: Path) -> None:
    limits = MachineLimits(1e9, 1e9)
    given_ = Settings(tmp_path, "demo", "cpu", "float32", limits, 1, 1, 1, use_tqdm=False)
    result = scale.scale_suite(given_, sizes=(1, 2), num_chats=4)
    assert [(row["replicas"], row["chats"]) for row in result["rows"]] == [(2, 4)] * 3 + [
        (1, 2)
    ] * 3
    shown = report.format_suite("scale", result)
    assert "simulated, not measured: qwen3-8b" in shown
    assert all(policy in shown for policy in scale.POLICIES)


def test_the_hit_rates_of_real_servers() -> None:
    """Those measured over HTTP, with each way to choose a replica: within one point."""
    found = hit_rates.hit_rates(Path(__file__).parent.parent / "notebooks" / "results")
    assert {each.engine for each in found} == set(hit_rates.ENGINES)
    assert [each for each in found if abs(each.simulated - each.measured) > 0.01] == []


def test_what_affinity_brings_hangs_on_the_load() -> None:
    """As the page's last table says: with a quarter of the chats a replica, affinity finds much
    more and has little more output, as nobody waits for a replica."""
    best, other = (
        scale.simulate(policy, 4, 156).summarize() for policy in ("prefix affinity", "least load")
    )
    assert best["hit_rate"] > 1.3 * other["hit_rate"]
    assert best["ttft_ms"]["p50"] < 0.7 * other["ttft_ms"]["p50"]
    assert 1 < best["tokens_per_second"] / other["tokens_per_second"] < 1.2


def test_what_the_page_says_of_the_recorded_run() -> None:
    """notebooks/results/scale.md, in words: affinity finds nearly all that was said before, has a
    third more output, and its first tokens come in a third of the time."""
    file = Path(__file__).parent.parent / "notebooks" / "results" / "scale.json"
    suite = json.loads(file.read_text("utf-8"))["suites"]["scale"]
    rows = {(row["policy"], row["replicas"]): row for row in suite["rows"]}
    best = rows["prefix affinity", 64]
    assert best["most_running"] == best["chats"] == 10_000
    for policy in ("least load", "round robin"):
        other, few = rows[policy, 64], rows[policy, 4]
        assert other["hit_rate"] < few["hit_rate"] < best["hit_rate"] < suite["said_before"]
        assert best["tokens_per_second"] > 1.3 * other["tokens_per_second"]
        assert best["ttft_ms"]["p50"] < 0.4 * other["ttft_ms"]["p50"]
    assert suite["said_before"] - best["hit_rate"] < 0.05
