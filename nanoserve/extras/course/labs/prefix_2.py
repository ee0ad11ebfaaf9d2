"""Lab 2, Prefix cache: which blocks already hold the beginning of a prompt?

Block hashes are a chain: the hash of a block stands for everything up to its end. No torch.
"""

from __future__ import annotations

from nanoserve.block_manager import BlockHash, BlockHashTable, BlockManager, BlockPool
from nanoserve.extras.course.labs.helpers import make_sequence, operate, show, try_random_operations
from nanoserve.extras.course.spec import Lab, Task, must
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import Sequence

MODULE = "nanoserve.block_manager"
GET = Task("2.1", MODULE, "BlockHashTable.get")
CACHE = Task("2.2", MODULE, "BlockPool.cache")
UNCACHE = Task("2.3", MODULE, "BlockPool.uncache")
HASHES = Task("2.4", MODULE, "BlockManager._hashes_of")
CACHED = Task("2.5", MODULE, "BlockManager.get_cached_blocks")
CAN_ALLOCATE = Task("2.6", MODULE, "BlockManager.can_allocate")
CACHE_BLOCKS = Task("2.7", MODULE, "BlockManager.cache_blocks")
LAB = Lab(2, "Prefix cache", [GET, CACHE, UNCACHE, HASHES, CACHED, CAN_ALLOCATE, CACHE_BLOCKS])


def run(manager: BlockManager, seq: Sequence) -> list[int]:
    """Admit a sequence, compute its prompt, end it. Returns the blocks that it found."""
    cached = manager.get_cached_blocks(seq)
    manager.allocate(seq, cached)
    operate(manager, seq, seq.num_tokens - seq.num_computed_tokens)
    manager.free(seq)
    return cached


# -- 2.1 --


@GET.behaviour(1, "equal content is the same object")
def same_object() -> None:
    table = BlockHashTable()
    root = table.get(None, None)
    first = table.get(root, (1, 2))
    must(table.get(root, (1, 2)) is first, "the same parent and tokens gave two different hashes")
    must(
        isinstance(first, BlockHash) and first.parent is root and first.token_ids == (1, 2),
        f"the hash of (1, 2) after the root is {first!r}; its parent and tokens are lost",
    )


@GET.behaviour(1, "the parent counts: the same tokens after another beginning are another block")
def parent_counts() -> None:
    table = BlockHashTable()
    root = table.get(None, None)
    one, other = table.get(root, (1, 2)), table.get(root, (3, 4))
    must(table.get(root, (1, 2)) is one, "the same tokens after the same parent: two hashes")
    must(
        table.get(one, (5, 6)) is not table.get(other, (5, 6)),
        "1 2 | 5 6 and 3 4 | 5 6 have the same hash: a request would read the keys and values of "
        "another text",
    )
    must(table.get(None, "salt") is not root, "requests of different salts must share nothing")


# -- 2.2 --


@CACHE.behaviour(1, "the block can be found by its content, and knows it")
def can_be_found() -> None:
    pool, content = BlockPool(2), BlockHash(None, "a b")
    block = pool.allocate()
    pool.cache(block, content)
    must(pool.cached_blocks.get(content) == block, "cached_blocks does not lead to the block")
    must(pool.block_hashes[block] is content, "the block does not know its own hash")


@CACHE.behaviour(1, "two blocks of one content: the first one stays the one that is found")
def first_one_stays() -> None:
    pool, content = BlockPool(2), BlockHash(None, "a b")
    first, second = pool.allocate(), pool.allocate()
    pool.cache(first, content)
    pool.cache(second, content)
    must(pool.cached_blocks[content] == first, "the second block replaced the first one")
    must(
        pool.block_hashes[second] is None,
        "the second block claims a hash that leads to the first one: when the second is reused, "
        "the first one could no longer be found",
    )


# -- 2.3 --


@UNCACHE.behaviour(1, "afterwards nobody finds the block")
def is_forgotten() -> None:
    pool, content = BlockPool(2), BlockHash(None, "a b")
    block = pool.allocate()
    pool.cache(block, content)
    pool.uncache(block)
    must(content not in pool.cached_blocks, "the content still leads to the block")
    must(pool.block_hashes[block] is None, "the block still has its hash")


@UNCACHE.behaviour(0.5, "a block that was never cached is left alone")
def nothing_to_forget() -> None:
    pool, content = BlockPool(2), BlockHash(None, "a b")
    pool.cache(0, content)
    pool.uncache(1)
    must(pool.cached_blocks == {content: 0}, f"cached_blocks is {pool.cached_blocks}")
    pool.uncache(0)
    must(not pool.cached_blocks, "block 0 was cached; after uncache(0) it is still found")


# -- 2.4 --


@HASHES.behaviour(1, "one hash for each full block, each with the one before as its parent")
def is_a_chain() -> None:
    manager = BlockManager(8, 4)
    seq = make_sequence(range(10))
    hashes = manager._hashes_of(seq, 2)
    must(len(hashes) == 2, f"2 blocks were asked for, {len(hashes)} hashes came")
    must(hashes[1].parent is hashes[0], "the second hash does not continue the first one")
    got = hashes[0].token_ids, hashes[1].token_ids
    must(got == ((0, 1, 2, 3), (4, 5, 6, 7)), f"the two blocks hold {got}")


@HASHES.behaviour(1, "what is known stays known: only new blocks are hashed")
def grows() -> None:
    manager = BlockManager(8, 4)
    seq = make_sequence(range(12))
    first = list(manager._hashes_of(seq, 1))
    later = manager._hashes_of(seq, 3)
    must(later[0] is first[0] and len(later) == 3, f"after 1 came {len(later)} hashes")
    must(seq.block_hashes == list(later), "seq.block_hashes does not keep them")
    must(len(manager._hashes_of(seq, 2)) == 3, "asking for fewer must not forget any")


@HASHES.behaviour(0.5, "the chain begins with the request's cache salt")
def salt_is_the_root() -> None:
    manager = BlockManager(8, 4)
    plain, salted = make_sequence(range(8)), make_sequence(range(8), cache_salt="mine")
    a, b = manager._hashes_of(plain, 1)[0], manager._hashes_of(salted, 1)[0]
    must(a is not b, "a request with a salt has the same hashes as one without")


# -- 2.5 --


@CACHED.behaviour(1, "the longest beginning that is cached is found")
def longest_beginning() -> None:
    manager = BlockManager(8, 4)
    run(manager, make_sequence(range(12)))
    for length, expected in [(13, 3), (9, 2), (4, 0)]:
        found = manager.get_cached_blocks(make_sequence(range(length), seq_id=1))
        must(
            len(found) == expected,
            f"12 tokens are cached in 3 blocks; a prompt of the first {length} found {len(found)} "
            f"blocks, not {expected}" + show(manager),
        )


@CACHED.behaviour(1.5, "the last token is always computed: its logits are needed")
def last_token() -> None:
    manager = BlockManager(8, 4)
    run(manager, make_sequence(range(8)))
    found = manager.get_cached_blocks(make_sequence(range(8), seq_id=1))
    must(
        len(found) == 1,
        f"all 8 tokens of the prompt are cached. {len(found)} blocks were taken, so "
        f"{8 - 4 * len(found)} tokens are left to compute: who would give the next token?",
    )


@CACHED.behaviour(1, "the search ends at the first block that is not there")
def stops_at_a_miss() -> None:
    manager = BlockManager(8, 4)
    seq = make_sequence(range(12))
    run(manager, seq)
    middle = manager.pool.cached_blocks[seq.block_hashes[1]]
    del manager.pool.cached_blocks[seq.block_hashes[1]]
    manager.pool.block_hashes[middle] = None
    found = manager.get_cached_blocks(make_sequence(range(13), seq_id=1))
    must(
        len(found) == 1,
        f"block 2 of 3 is gone; {len(found)} blocks were found. Tokens behind a gap would stand at "
        "the wrong positions",
    )


@CACHED.behaviour(0.5, "a request that must see every logit of its prompt takes nothing")
def reads_no_cache() -> None:
    manager = BlockManager(8, 4)
    run(manager, make_sequence(range(12)))
    found = manager.get_cached_blocks(make_sequence(range(12), seq_id=2))
    must(len(found) == 2, f"without prompt_logprobs it takes 2 blocks, not {len(found)}")
    params = SamplingParams(max_tokens=4, prompt_logprobs=1)
    found = manager.get_cached_blocks(make_sequence(range(12), seq_id=1, params=params))
    must(found == [], f"with prompt_logprobs={params.prompt_logprobs} it took the blocks {found}")


# -- 2.6 --


@CAN_ALLOCATE.behaviour(1, "room for all tokens of the sequence, to the last block")
def room_for_all() -> None:
    manager = BlockManager(3, 4)
    for length, expected in [(12, True), (13, False)]:
        got = manager.can_allocate(make_sequence(range(length)), [])
        must(bool(got) == expected, f"{length} tokens, 3 free blocks of 4: can_allocate is {got}")


@CAN_ALLOCATE.behaviour(1.5, "a cached block that is free leaves the queue: it counts once")
def counts_once() -> None:
    manager = BlockManager(3, 4)
    run(manager, make_sequence(range(8)))
    long = make_sequence([*range(8), 20, 21, 22, 23, 24], seq_id=1)
    cached = manager.get_cached_blocks(long)
    must(len(cached) == 2, "2 blocks are cached")
    must(
        not manager.can_allocate(long, cached),
        "13 tokens need 4 blocks of 4, and there are 3 in all. Two of the free ones are the cached "
        "ones: they cannot be taken a second time" + show(manager),
    )
    short = make_sequence([*range(8), 20], seq_id=2)
    must(manager.can_allocate(short, cached), "9 tokens need 3 blocks, 2 of them cached: they fit")


@CAN_ALLOCATE.behaviour(0.5, "a cached block that others hold costs nothing")
def shared_is_free() -> None:
    manager = BlockManager(3, 4)
    first = make_sequence(range(8))
    manager.allocate(first, [])
    operate(manager, first, 8)
    second = make_sequence([*range(8), 9], seq_id=1)
    cached = manager.get_cached_blocks(second)
    must(manager.can_allocate(second, cached), "2 blocks are shared, 1 is free: 9 tokens fit")


# -- 2.7 --


@CACHE_BLOCKS.behaviour(1, "a block that is full can be found at once")
def full_ones() -> None:
    manager = BlockManager(8, 4)
    seq = make_sequence(range(11))
    manager.allocate(seq, [])
    operate(manager, seq, 11)
    must(
        len(manager.pool.cached_blocks) == 2,
        f"11 tokens fill 2 blocks of 4; {len(manager.pool.cached_blocks)} can be found",
    )
    found = manager.get_cached_blocks(make_sequence([*range(8), 50], seq_id=1))
    must(found == manager.block_tables[0][:2], f"a prompt with the same beginning found {found}")


@CACHE_BLOCKS.behaviour(1, "block by block, as chunks and decodes fill them")
def chunk_by_chunk() -> None:
    manager = BlockManager(8, 4)
    seq = make_sequence(range(9))
    manager.allocate(seq, [])
    for chunk, expected in [(3, 0), (1, 1), (2, 1), (3, 2)]:
        operate(manager, seq, chunk)
        got = len(manager.pool.cached_blocks)
        must(got == expected, f"{seq.num_computed_tokens} tokens are computed; {got} blocks found")


@CACHE_BLOCKS.behaviour(0.5, "without prefix caching nothing can be found")
def switched_off() -> None:
    manager = BlockManager(8, 4)
    filled = make_sequence(range(8), seq_id=1)
    manager.allocate(filled, [])
    operate(manager, filled, 8)
    must(len(manager.pool.cached_blocks) == 2, "with prefix caching, 8 tokens fill 2 blocks")
    manager = BlockManager(8, 4, enable_prefix_caching=False)
    seq = make_sequence(range(8))
    manager.allocate(seq, [])
    operate(manager, seq, 8)
    must(not manager.pool.cached_blocks, "prefix caching is off, and blocks can be found")


@CACHED.behaviour(1, "what is found is always the prompt's own beginning", is_property=True)
def right_content(seed: int) -> None:
    try_random_operations(seed, prefix=True)


@HASHES.behaviour(0.5, "what is found is always the prompt's own beginning", is_property=True)
def right_hashes(seed: int) -> None:
    try_random_operations(seed, prefix=True)


@GET.behaviour(0.5, "what is found is always the prompt's own beginning", is_property=True)
def right_keys(seed: int) -> None:
    try_random_operations(seed, prefix=True)
