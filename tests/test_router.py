"""The policies by which requests are divided among replicas."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("nanoserve.extras.replicas")

from nanoserve.extras.replicas.router import (
    CHUNK_CHARACTERS,
    CHUNK_TOKENS,
    MOST_CHUNKS,
    PrefixRouter,
    RoundRobin,
    hash_chunks,
)

LETTERS = st.lists(st.sampled_from("ab"), max_size=5)
# A prompt of text or of token ids: some full chunks, of two kinds, and a rest.
PROMPTS = st.builds(
    lambda chunks, rest, is_text: (
        "".join(each * CHUNK_CHARACTERS for each in chunks) + "r" * rest
        if is_text
        else [ord(each) for each in chunks for _ in range(CHUNK_TOKENS)] + [0] * rest
    ),
    LETTERS,
    st.integers(0, CHUNK_TOKENS - 1),
    st.booleans(),
)
LOADS = st.dictionaries(st.integers(0, 3), st.integers(0, 40), min_size=1)
CALLS = st.lists(st.tuples(PROMPTS, LOADS), max_size=20)


def num_common(a: Sequence[object], b: Sequence[object]) -> int:
    """Full chunks in which two prompts begin alike, by the definition."""
    if isinstance(a, str) != isinstance(b, str):
        return 0
    size = CHUNK_CHARACTERS if isinstance(a, str) else CHUNK_TOKENS
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return (min(len(a), len(b)) if length is None else length) // size


@given(CALLS)
def test_affinity_unless_it_overloads(calls: list[tuple[str | list[int], dict[int, int]]]) -> None:
    router = PrefixRouter[int](cache_threshold=0.4)
    sent: dict[int, list[str | list[int]]] = {}
    for prompt, loads in calls:
        known = {r: max([num_common(prompt, p) for p in sent.get(r, ())] or [0]) for r in loads}
        most, size = max(known.values()), CHUNK_CHARACTERS if isinstance(prompt, str) else 16
        chosen, least = router.choose(prompt, loads), min(loads.values())
        busy = loads[chosen] > max(least + 8, 1.5 * least)
        best = min(loads[r] for r in loads if known[r] == most)
        follows = most > 0 and most / (len(prompt) // size) >= 0.4
        if follows and not best > max(least + 8, 1.5 * least):
            assert known[chosen] == most
            assert loads[chosen] == best
        else:
            assert loads[chosen] == least
        assert not busy
        assert chosen == router.choose(prompt, loads), "it depends on more than what was added"
        router.add(prompt, chosen)
        sent.setdefault(chosen, []).append(prompt)


@given(CALLS, st.integers(1, 6))
def test_memory_is_bounded_and_has_no_gaps(
    calls: list[tuple[str | list[int], dict[int, int]]], most: int
) -> None:
    router = PrefixRouter[int](max_chunks=most)
    for prompt, loads in calls:
        for replica in loads:
            router.add(prompt, replica)
            assert router.num_chunks(replica) <= most
            _, share = router.match(prompt, [replica])
            hashes = hash_chunks(prompt)
            assert share == min(len(hashes), most) / max(1, len(hashes)), "the newest is known"
    for prompt, loads in calls:
        for replica in loads:
            held = [each in router._chunks[replica] for each in hash_chunks(prompt)]
            assert held == sorted(held, reverse=True), "a chunk is there, one before it is not"


def test_the_next_turn_of_a_chat_follows_the_last_one() -> None:
    router = PrefixRouter[str]()
    chats = [f"{name}: " + "tell me more. " * 20 for name in ("Ada", "Bob", "Cleo", "Dora")]
    homes = {}
    for chat in chats:  # new ones are spread
        loads = {name: list(homes.values()).count(name) for name in ("x", "y")}
        homes[chat] = router.choose(chat, loads)
        router.add(chat, homes[chat])
    assert sorted(homes.values()) == ["x", "x", "y", "y"]
    idle = {"x": 0, "y": 0}
    assert all(router.choose(chat + "And then?" * 9, idle) == homes[chat] for chat in chats)
    router.remove("x")  # it has died, and comes back with an empty cache
    assert {router.choose(chat, {"x": 0, "y": 1}) for chat in chats if homes[chat] == "x"} == {"x"}
    assert {router.choose(chat, {"x": 1, "y": 0}) for chat in chats if homes[chat] == "x"} == {"y"}
    assert {router.choose(chat, {"x": 0, "y": 5}) for chat in chats if homes[chat] == "y"} == {"y"}
    assert {router.choose(chat, {"x": 0}) for chat in chats} == {"x"}


def test_replicas_whose_memory_is_full_take_turns() -> None:
    """New prompts, one after the other: nobody knows them, nobody has anything else to do."""
    router = PrefixRouter[int](max_chunks=3)
    chosen = []
    for number in range(40):
        prompt = f"{number:02d}" * 4 * CHUNK_CHARACTERS
        chosen.append(router.choose(prompt, dict.fromkeys(range(4), 0)))
        router.add(prompt, chosen[-1])
    assert [chosen.count(replica) for replica in range(4)] == [10] * 4


def test_a_long_prompt_is_compared_in_few_steps() -> None:
    """Each replica is asked for ten of a thousand chunks, not for all."""

    class Counted(OrderedDict[bytes, None]):
        num_asked = 0

        def __contains__(self, key: object) -> bool:
            self.num_asked += 1
            return super().__contains__(key)

    router = PrefixRouter[int]()
    text = "".join(map(chr, range(65, 65 + MOST_CHUNKS))) * CHUNK_CHARACTERS
    router._chunks[0] = chunks = Counted()
    for cut in (0, CHUNK_CHARACTERS, len(text) // 3, len(text)):
        router.add(text[:cut], 0)
        chunks.num_asked = 0
        _, share = router.match(text, [0])
        assert share == cut // CHUNK_CHARACTERS / MOST_CHUNKS
        assert chunks.num_asked <= 11


def test_round_robin_takes_turns_among_those_that_are_there() -> None:
    router = RoundRobin[int]()
    assert [router.choose("a", {0: 9, 1: 0, 2: 0}) for _ in range(4)] == [0, 1, 2, 0]
    router.add("a", 1)
    router.remove(0)
    assert sorted(router.choose("a", {1: 9, 2: 0}) for _ in range(4)) == [1, 1, 2, 2]


def test_chunks_of_long_and_odd_prompts() -> None:
    assert len(hash_chunks("a" * CHUNK_CHARACTERS * (MOST_CHUNKS + 7))) == MOST_CHUNKS
    assert len(set(hash_chunks("\ud800" * 4 * CHUNK_CHARACTERS))) == 4
    assert hash_chunks("") == hash_chunks([]) == []
    assert hash_chunks([1, 11] * 8) != hash_chunks([11, 1] * 8)


@pytest.mark.parametrize(
    "options",
    [
        {"cache_threshold": 1.1},
        {"cache_threshold": float("nan")},
        {"balance_abs_threshold": -1},
        {"balance_rel_threshold": 0.9},
        {"max_chunks": 0},
    ],
)
def test_bad_thresholds_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} .*allowed"):
        PrefixRouter(**options)  # type: ignore[arg-type]
