"""Lab 6, Attention: how does a query read scattered keys?

From the step as arrays, over the definition of attention, to a softmax that reads block by block.
Each function is checked against a loop over single tokens.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoserve.attention import AttentionBackend, StepMetadata
from nanoserve.extras.course.labs.tensors import as_text, compare, make_case
from nanoserve.extras.course.spec import Lab, Task, must
from nanoserve.extras.online_softmax import OnlineSoftmax, Running, add_block, merge
from nanoserve.input_batch import InputBatch
from nanoserve.model_runner import ModelRunner, StepArrays
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import NewSequence, ScheduledSequence

ARRAYS = Task("6.1", "nanoserve.model_runner", "ModelRunner.gather_arrays")
STORE = Task("6.2", "nanoserve.attention", "AttentionBackend.store")
ATTEND = Task("6.3", "nanoserve.attention", "AttentionBackend.attend")
ADD = Task("6.4", "nanoserve.extras.online_softmax", "add_block")
MERGE = Task("6.5", "nanoserve.extras.online_softmax", "merge")
ONLINE = Task("6.6", "nanoserve.extras.online_softmax", "OnlineSoftmax.attend")
LAB = Lab(
    6,
    "Attention",
    [ARRAYS, STORE, ATTEND, ADD, MERGE, ONLINE],
    needs_torch=True,
    memory=4096,  # of address space: torch maps much and uses little
    seconds=15.0,
)


# -- 6.1 --

BLOCK_SIZE = 4
Work = tuple[int, int, int]  # (tokens known, computed before, scheduled now) of one sequence


def gather(
    works: list[Work], seed: int = 0, num_samples: int = 1
) -> tuple[StepArrays[np.ndarray], list[list[int]]]:
    """What the step of these sequences becomes, and their block tables. Token j of sequence i is
    100 * (i + 1) + j. A sequence has rows of the batch in an order of its own."""
    rng = random.Random(seed)
    runner = ModelRunner.__new__(ModelRunner)  # no model: the function reads two fields
    runner.block_size = BLOCK_SIZE
    runner.batch = InputBatch(len(works) + 1, 64, BLOCK_SIZE, 10_000)
    free, tables = list(range(200)), []
    rng.shuffle(free)
    order = list(range(len(works)))
    rng.shuffle(order)
    for seq_id in range(len(works)):
        tables.append([free.pop() for _ in range(-(-works[seq_id][0] // BLOCK_SIZE))])
    for seq_id in order:
        known = works[seq_id][0]
        new = NewSequence(
            seq_id=seq_id,
            token_ids=tuple(100 * (seq_id + 1) + j for j in range(known)),
            num_prompt_tokens=known,
            block_ids=tuple(tables[seq_id]),
            sampling_params=SamplingParams(),
            stop_token_ids=frozenset(),
            bad_word_ids=(),
            seed=0,
            branch=0,
            num_samples=num_samples,
        )
        runner.batch.add(new)
    scheduled = tuple(
        ScheduledSequence(seq_id, computed, now, 0, [])
        for seq_id, (_, computed, now) in enumerate(works)
    )
    rows = np.array([runner.batch.row_of[seq_id] for seq_id in range(len(works))], np.int64)
    return runner.gather_arrays(scheduled, rows), tables


def check_arrays(works: list[Work], *names: str, seed: int = 0) -> None:
    """These fields, beside a loop over tokens."""
    arrays, tables = gather(works, seed)
    right: dict[str, list[int]] = {
        "positions": [],
        "input_ids": [],
        "slot_mapping": [],
        "logits_indices": [],
        "query_start_loc": [0],
        "seq_lens": [],
    }
    for seq_id, (known, computed, now) in enumerate(works):
        for position in range(computed, computed + now):
            if position == known - 1:
                right["logits_indices"].append(len(right["positions"]))
            right["positions"].append(position)
            right["input_ids"].append(100 * (seq_id + 1) + position)
            block = tables[seq_id][position // BLOCK_SIZE]
            right["slot_mapping"].append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        right["query_start_loc"].append(len(right["positions"]))
        right["seq_lens"].append(computed + now)
    picture = "".join(
        f"\n  sequence {seq_id}: {known} tokens known, {computed} computed before, {now} now, "
        f"block table {tables[seq_id]}"
        for seq_id, (known, computed, now) in enumerate(works)
    )
    for name in names or right:
        got = getattr(arrays, name).tolist()
        must(got == right[name], f"{name} is {got}, and should be {right[name]}{picture}")
    for seq_id, table in enumerate(tables):
        number = -(-right["seq_lens"][seq_id] // BLOCK_SIZE)
        got = arrays.block_table[seq_id, :number].tolist()
        must(got == table[:number], f"block_table[{seq_id}] begins with {got}{picture}")


@ARRAYS.behaviour(1, "positions go on where the sequence was, and the tokens are those there")
def positions() -> None:
    check_arrays([(3, 0, 3)], "positions", "input_ids")
    check_arrays([(9, 8, 1), (10, 4, 6)], "positions", "input_ids")


@ARRAYS.behaviour(1, "a slot is block_table[position // block_size] * block_size + the rest")
def slots() -> None:
    check_arrays([(3, 0, 3)], "slot_mapping")
    check_arrays([(9, 8, 1), (10, 4, 6), (4, 3, 1)], "slot_mapping")


@ARRAYS.behaviour(0.5, "query_start_loc says where each sequence begins, seq_lens how many keys")
def starts_and_lengths() -> None:
    check_arrays([(9, 8, 1), (10, 4, 6), (4, 3, 1)], "query_start_loc", "seq_lens")


@ARRAYS.behaviour(1, "logits are wanted behind the last known token, and not within a prompt")
def last_tokens_only() -> None:
    check_arrays([(9, 8, 1), (10, 0, 6), (4, 0, 4)], "logits_indices")
    arrays, _ = gather([(3, 0, 3)], num_samples=3)
    must(
        arrays.logits_indices.tolist() == [2, 2, 2],
        f"3 samples of one token: logits_indices is {arrays.logits_indices.tolist()}",
    )


@ARRAYS.behaviour(0.5, "as a loop over tokens does it", is_property=True)
def arrays_like_a_loop(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        works = []
        for _ in range(rng.randint(1, 5)):
            known = rng.randint(1, 30)
            computed = rng.randrange(known)
            works.append((known, computed, rng.randint(1, known - computed)))
        check_arrays(works, seed=rng.randrange(2**20))


# -- 6.2 --


def store(slots: list[int], block_size: int = 4, num_blocks: int = 3) -> None:
    """Store a token in each of these slots; look at the whole cache."""
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(len(slots), 2, dim, generator=generator) for dim in (3, 5))
    caches = (
        torch.zeros(num_blocks, block_size, 2, 3),
        torch.zeros(num_blocks, block_size, 2, 5),
    )
    none = torch.zeros(0, dtype=torch.int32)
    metadata = StepMetadata(torch.tensor(slots), none, none, none)
    AttentionBackend().store(key, value, caches, metadata)
    for name, cache, new in zip(("key", "value"), caches, (key, value), strict=True):
        for slot, got in enumerate(cache.flatten(0, 1)):
            place = f"slot {slot} (block {slot // block_size}, offset {slot % block_size})"
            if slot in slots:
                token = slots.index(slot)
                is_right = torch.equal(got, new[token])
                must(is_right, f"{place} does not hold the {name} of token {token}; slots {slots}")
            else:
                must(not got.any(), f"{place} was written, and no token has it; slots {slots}")


@STORE.behaviour(1, "key and value of each token go to its slot")
def to_its_slot() -> None:
    store([0, 1])
    store([9, 2, 4])
    store([5, 0, 2], block_size=2)


@STORE.behaviour(1, "a negative slot is not stored, not even in the last block")
def negative_slots() -> None:
    store([3, -1])
    store([-1, 6, -1])


# -- 6.3, 6.6 --


def check_attention(
    backend: AttentionBackend,
    seqs: list[tuple[int, int]],
    window: int | None = None,
    cap: float | None = None,
    scale: float = 0.5,
    **options: Any,
) -> None:
    case = make_case(seqs, **options)
    size = case.caches[0].shape[1]
    metadata = backend.plan(case.metadata, size, torch.float32)
    output = backend.attend(
        case.query, case.caches, metadata, scale=scale, sliding_window=window, logits_soft_cap=cap
    )
    compare(case, output, scale, window, cap)


def try_random_steps(backend: AttentionBackend, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        seqs = []
        for _ in range(rng.randint(1, 4)):
            keys = rng.randint(1, 14)
            seqs.append((rng.choice([1, keys, rng.randint(1, keys)]), keys))
        check_attention(
            backend,
            seqs,
            rng.choice([None, None, rng.randint(1, 9)]),
            rng.choice([None, None, 2.0]),
            scale=rng.choice([0.3, 1.0]),
            block_size=rng.choice([1, 2, 4]),
            num_kv_heads=rng.choice([1, 2, 3]),
            group=rng.choice([1, 2, 3]),
            seed=rng.randrange(2**20),
        )


@ATTEND.behaviour(1, "softmax of the scaled scores, times the values")
def one_query() -> None:
    check_attention(AttentionBackend(), [(1, 3)], scattered=False)
    check_attention(AttentionBackend(), [(1, 3)], scattered=False, scale=1.5)


@ATTEND.behaviour(1, "keys are found through the block table, and no others are read")
def scattered_blocks() -> None:
    for seed in range(3):
        check_attention(AttentionBackend(), [(1, 7), (1, 2), (1, 9)], seed=seed)


@ATTEND.behaviour(1.5, "each query sees the keys up to its own position, also in a chunk")
def causal() -> None:
    check_attention(AttentionBackend(), [(5, 5)])
    check_attention(AttentionBackend(), [(3, 9)])
    check_attention(AttentionBackend(), [(1, 6), (4, 7), (2, 2)])


@ATTEND.behaviour(1, "neighbouring query heads share a key head")
def grouped_heads() -> None:
    check_attention(AttentionBackend(), [(2, 5)], num_kv_heads=2, group=2)
    check_attention(AttentionBackend(), [(2, 5)], num_kv_heads=3, group=2)


@ATTEND.behaviour(1, "a sliding window counts the query's own key; the soft cap is of the score")
def window_and_cap() -> None:
    check_attention(AttentionBackend(), [(3, 9)], window=1)
    check_attention(AttentionBackend(), [(3, 9), (9, 9)], window=4)
    check_attention(AttentionBackend(), [(2, 5)], cap=1.5, scale=2.0)


@ATTEND.behaviour(0.5, "as a loop over single queries does it", is_property=True)
def attention_like_a_loop(seed: int) -> None:
    try_random_steps(AttentionBackend(), seed)


@ONLINE.behaviour(1, "blocks of one sequence, one after the other")
def block_by_block() -> None:
    check_attention(OnlineSoftmax(), [(1, 3)])
    check_attention(OnlineSoftmax(), [(1, 11)])


@ONLINE.behaviour(1.5, "a chunk: each query sees the keys up to its own position")
def online_causal() -> None:
    check_attention(OnlineSoftmax(), [(5, 5), (3, 9), (1, 6)], num_kv_heads=2, group=2)


@ONLINE.behaviour(1, "the end of the last block is not read")
def end_of_the_block() -> None:
    check_attention(OnlineSoftmax(), [(2, 2), (1, 5), (1, 4)])


@ONLINE.behaviour(1, "several splits, also more than blocks")
def splits() -> None:
    for num_splits in (2, 3, 5):
        check_attention(OnlineSoftmax(num_splits), [(1, 11), (3, 9)])


@ONLINE.behaviour(0.5, "window and soft cap as in the definition")
def online_window() -> None:
    check_attention(OnlineSoftmax(2), [(3, 11), (9, 9)], window=4)
    check_attention(OnlineSoftmax(2), [(3, 11)], cap=1.5, scale=2.0)


@ONLINE.behaviour(0.5, "as a loop over single queries does it", is_property=True)
def online_like_a_loop(seed: int) -> None:
    for num_splits in (1, 2, 4):
        try_random_steps(OnlineSoftmax(num_splits), seed + num_splits)


# -- 6.4, 6.5 --


def nothing(queries: int = 1) -> Running:
    """Before the first key."""
    zeros = torch.zeros(1, queries, 1, dtype=torch.float64)
    return Running(zeros - torch.inf, zeros, zeros.expand(-1, -1, 2))


def read(blocks: list[Tensor], values: list[Tensor], running: Running | None = None) -> Running:
    """Blocks [queries, keys] one after the other, with values [keys, 2]."""
    running = nothing(len(blocks[0])) if running is None else running
    for score, value in zip(blocks, values, strict=True):
        running = add_block(running, score[None], value[None])
    return running


def check_running(running: Running, blocks: list[Tensor], values: list[Tensor]) -> None:
    """The three numbers and the output, beside those of all keys at once."""
    scores, value = torch.cat(blocks, dim=-1), torch.cat(values)
    m = scores.amax(dim=-1, keepdim=True)
    total = (scores - m).exp().sum(dim=-1, keepdim=True)
    output = scores.softmax(dim=-1) @ value
    shown = " | ".join(as_text(block) for block in blocks)
    found = {"m": running.m[0], "total": running.total[0], "acc": running.acc[0]}
    right = {"m": m, "total": total, "acc": output * total}
    for name, expected in right.items():
        got = found[name]
        must(
            got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-9, atol=1e-12),
            f"scores {shown}: {name} is {as_text(got)} and should be {as_text(expected)}",
        )


def some_blocks(*blocks: list[float]) -> tuple[list[Tensor], list[Tensor]]:
    """Of one query; the value of key j is [j, 1]."""
    scores, values, number = [], [], 0
    for block in blocks:
        scores.append(torch.tensor([block], dtype=torch.float64))
        keys = torch.arange(number, number + len(block), dtype=torch.float64)
        values.append(torch.stack((keys, torch.ones_like(keys)), dim=-1))
        number += len(block)
    return scores, values


@ADD.behaviour(1, "the first block gives m, total and acc of its keys")
def first_block() -> None:
    for block in ([1.0, 3.0], [-2.0], [0.5, 0.5, 0.5]):
        blocks = some_blocks(block)
        check_running(read(*blocks), *blocks)


@ADD.behaviour(1.5, "a block that raises m shrinks what was summed before")
def raises_the_maximum() -> None:
    blocks = some_blocks([1.0, 3.0], [4.0, 2.0])
    check_running(read(*blocks), *blocks)


@ADD.behaviour(1, "a block that does not raise m is added to the same m")
def keeps_the_maximum() -> None:
    blocks = some_blocks([4.0, 2.0], [1.0, 3.0], [-5.0])
    check_running(read(*blocks), *blocks)


@ADD.behaviour(1, "scores of hundreds overflow nowhere")
def no_overflow() -> None:
    for blocks in (some_blocks([800.0], [900.0, -900.0]), some_blocks([-900.0], [-800.0])):
        check_running(read(*blocks), *blocks)


@ADD.behaviour(1, "a block of which a query sees nothing changes nothing")
def hidden_block() -> None:
    hidden = torch.full((1, 1, 2), -torch.inf, dtype=torch.float64)
    value = torch.ones(1, 2, 2, dtype=torch.float64)
    still = add_block(nothing(), hidden, value)
    must(
        bool(still.total == 0) and not still.acc.any() and bool(still.m == -torch.inf),
        f"no key is seen yet: m -inf, total 0, acc 0; they are {as_text(still.m)}, "
        f"{as_text(still.total)}, {as_text(still.acc)}",
    )
    blocks = some_blocks([1.0, 3.0])
    check_running(add_block(read(*blocks), hidden, value), *blocks)


def random_blocks(rng: random.Random) -> tuple[list[Tensor], list[Tensor]]:
    """Three queries; the first key is visible, others may be hidden."""
    generator = torch.Generator().manual_seed(rng.randrange(2**20))
    blocks, values = [], []
    for number in range(rng.randint(1, 5)):
        keys = rng.randint(1, 4)
        score = 9 * torch.randn(3, keys, generator=generator, dtype=torch.float64)
        hidden = torch.rand(3, keys, generator=generator) < 0.4
        hidden[:, 0] &= number > 0
        blocks.append(score.masked_fill(hidden, -torch.inf))
        values.append(torch.randn(keys, 2, generator=generator, dtype=torch.float64))
    return blocks, values


@ADD.behaviour(0.5, "as the softmax of all keys at once", is_property=True)
def any_blocks(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        blocks = random_blocks(rng)
        check_running(read(*blocks), *blocks)


def check_merge(cut: int, blocks: list[Tensor], values: list[Tensor]) -> None:
    """Two parts: the blocks before `cut`, and the others. It calls no function of task 6.4."""
    parts = []
    for part in (slice(0, cut), slice(cut, None)):
        running = nothing(len(blocks[0]))
        if blocks[part]:
            scores, value = torch.cat(blocks[part], dim=-1), torch.cat(values[part])
            m = scores.amax(dim=-1, keepdim=True)
            weights = (scores - m.masked_fill(m == -torch.inf, 0)).exp()
            running = Running(m[None], weights.sum(-1, keepdim=True)[None], (weights @ value)[None])
        parts.append(running)
    check_running(merge(parts), blocks, values)
    check_running(merge(parts[::-1]), blocks, values)


@MERGE.behaviour(1.5, "parts with another m are brought to one m, then added")
def two_parts() -> None:
    check_merge(1, *some_blocks([1.0, 3.0], [4.0, 2.0]))
    check_merge(1, *some_blocks([800.0], [900.0]))


@MERGE.behaviour(0.5, "a part that has read nothing adds nothing")
def empty_part() -> None:
    check_merge(0, *some_blocks([1.0, 3.0]))


@MERGE.behaviour(1, "as the softmax of all keys at once", is_property=True)
def any_parts(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        blocks = random_blocks(rng)
        check_merge(rng.randint(0, len(blocks[0])), *blocks)
