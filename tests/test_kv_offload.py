"""The second level of the prefix cache: the same tokens, hits that a hand count knows, ARC."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve import LLM, SamplingParams
from nanoserve.block_manager import BlockHash
from nanoserve.chapters.kv_offload.policies import ARCPool, LRUPool
from nanoserve.tools.check_blocks import check_blocks

SMALL = {"block_size": 4, "num_gpu_blocks_override": 24, "max_model_len": 80}


def make_prompts() -> list[list[int]]:
    """Each beginning is that of three prompts, which come far from each other."""
    rng = random.Random(0)
    begins = [[rng.randrange(5, 900) for _ in range(rng.randint(20, 50))] for _ in range(5)]
    prompts = [begin + [rng.randrange(5, 900)] * 3 for begin in begins for _ in range(3)]
    rng.shuffle(prompts)
    return prompts


@cache
def generate_plainly() -> list[list[int]]:
    return generate(1)[0]


def generate(rounds: int, **options: Any) -> tuple[list[list[int]], int]:
    """Output tokens, and how many tokens were found on the CPU."""
    prompts = make_prompts()
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=9) for i in range(len(prompts))]
    with LLM(max_num_seqs=4, max_num_batched_tokens=32, **SMALL, **options) as llm:
        manager, tokens = llm.llm_engine.block_manager, []
        for _ in range(rounds):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens.append([output.outputs[0].token_ids for output in outputs])
            check_blocks(manager)
        assert all(each == tokens[0] for each in tokens)
        return tokens[0], getattr(manager, "num_external_hit_tokens", 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_offloading_policy": "arc", "async_scheduling": True},
        {"kv_offloading_policy": "arc", "preemption_mode": "swap"},
        {"preemption_mode": "swap", "kv_offloading_size": 0.0003},  # some 30 blocks, for both
    ],
)
def test_same_tokens(options: dict[str, Any]) -> None:
    tokens, num_hits = generate(2, **{"kv_offloading_size": 0.002, **options})
    assert num_hits > 0
    assert tokens == generate_plainly()


def test_hits_are_counted_by_hand() -> None:
    """A prompt of ten blocks: all but its last token's block are found again, here or there."""
    prompt, other = list(range(10, 50)), list(range(100, 170))
    one = SamplingParams(max_tokens=1)
    with LLM(kv_offloading_size=0.01, **SMALL) as llm:

        def num_cached() -> int:
            return llm.generate(prompt, one, use_tqdm=False)[0].num_cached_tokens

        manager = llm.llm_engine.block_manager
        assert (num_cached(), num_cached()) == (0, 36)
        assert manager.num_external_hit_tokens == 0
        llm.generate(other, one, use_tqdm=False)  # takes 18 of the 24 blocks
        assert num_cached() == 36
        on_cpu = manager.num_external_hit_tokens
        assert 36 - 6 * 4 <= on_cpu <= 36
        assert llm.reset_prefix_cache()  # both levels
        assert (num_cached(), manager.num_external_hit_tokens) == (0, on_cpu)


@pytest.mark.parametrize("more", [{"swap_space": 2.0}, {"enable_prefix_caching": False}])
def test_options_that_do_not_go_together(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="kv_offloading_size"):
        LLM(kv_offloading_size=1.0, **more)


def access(pool: LRUPool, block_hash: BlockHash) -> bool:
    """A request uses a block: is it there? If not, it comes, as in OffloadBlockManager."""
    if (block_id := pool.cached_blocks.get(block_hash)) is not None:
        pool.share(block_id)
        pool.free(block_id)
        return True
    block_id = pool.allocate_for(block_hash)
    pool.cache(block_id, block_hash)
    pool.free(block_id)
    return False


def test_a_scan_drives_out_what_lru_keeps() -> None:
    """The example of policies.py: two hits against three."""
    hashes = {name: BlockHash(None, name) for name in "abcde"}
    lru, arc = LRUPool(3), ARCPool(3)
    assert sum(access(lru, hashes[name]) for name in "ababcdea") == 2
    assert sum(access(arc, hashes[name]) for name in "ababcdea") == 3


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 5))
def test_the_lists_of_arc_agree(accesses: list[int], size: int) -> None:
    pool, hashes = ARCPool(size), [BlockHash(None, number) for number in range(10)]
    for number in accesses:
        access(pool, hashes[number])
        assert {**pool.t1, **pool.t2} == pool.cached_blocks
        assert len(pool.t1) + len(pool.b1) <= size
        lists = [*pool.t1, *pool.t2, *pool.b1, *pool.b2]
        assert len(lists) == len(set(lists)) <= 2 * size
        assert 0 <= pool.target <= size
        assert len(pool.free_queue) == size
