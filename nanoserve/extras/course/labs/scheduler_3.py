"""Lab 3, Scheduler: who runs in this step, with how many tokens?

One rule: the computed tokens of each sequence catch up with the known ones, within the token
budget, max_num_seqs and the free blocks. No torch.
"""

from __future__ import annotations

from nanoserve.extras.course.labs.board import Board
from nanoserve.extras.course.spec import Lab, Task, must

MODULE = "nanoserve.scheduler"
RUNNING = Task("3.1", MODULE, "Scheduler._schedule_running")
NUM_TOKENS = Task("3.2", MODULE, "Scheduler._num_tokens_to_admit")
SLOT = Task("3.3", MODULE, "Scheduler.has_seq_slot")
ADMIT = Task("3.4", MODULE, "Scheduler._admit")
WAITING = Task("3.5", MODULE, "Scheduler._schedule_waiting")
TOKENS = Task("3.6", MODULE, "Scheduler._schedule_tokens")
LAB = Lab(3, "Scheduler", [RUNNING, NUM_TOKENS, SLOT, ADMIT, WAITING, TOKENS])


# -- 3.1 --


@RUNNING.behaviour(1, "every running sequence advances in every step")
def all_advance() -> None:
    board = Board(budget=16)
    for _ in range(3):
        board.add(4, 6)
    board.step(1)
    got = board.num_scheduled(board.step())
    must(got == {"A": 1, "B": 1, "C": 1}, f"three sequences decode; the step has {got}")


@RUNNING.behaviour(1.5, "a chunk leaves one token of the budget to each one behind it")
def leaves_a_token() -> None:
    board = Board(budget=8, num_blocks=64, long_prefill_token_threshold=6)
    board.add(30, 4)
    board.add(1, 6)
    board.add(1, 6)
    board.step(1)  # A: 6 of its 30 tokens; B and C: their prompts
    got = board.num_scheduled(board.step())
    must(got.get("B") == 1 and got.get("C") == 1, f"B and C decode and were left out: {got}")
    board.scheduler.max_chunk = 64
    got = board.num_scheduled(board.step())
    must(
        got == {"A": 6, "B": 1, "C": 1},
        f"the budget is 8, B and C need one token each; the step has {got}, A should get 6",
    )


@RUNNING.behaviour(0.5, "a chunk is never longer than long_prefill_token_threshold")
def chunk_limit() -> None:
    board = Board(budget=64, long_prefill_token_threshold=5)
    board.add(23, 4)
    sizes = [board.num_scheduled(board.step())["A"] for _ in range(5)]
    must(sizes == [5, 5, 5, 5, 3], f"a prompt of 23 tokens in chunks of 5 ran as {sizes}")


@RUNNING.behaviour(1, "the same tokens whatever the settings", is_property=True)
def running_is_right(seed: int) -> None:
    Board.try_random(seed)


# -- 3.2 --


@NUM_TOKENS.behaviour(1, "what is left of the budget, and no more than is missing")
def fits_the_budget() -> None:
    board = Board(budget=10)
    board.add(4, 3)
    board.add(20, 3)
    got = board.num_scheduled(board.step())
    must(got == {"A": 4, "B": 6}, f"the budget is 10, A has 4 tokens and B 20: the step has {got}")


@NUM_TOKENS.behaviour(1, "without chunked prefill a prompt runs whole or not at all")
def whole_or_not() -> None:
    board = Board(budget=32, max_model_len=32, enable_chunked_prefill=False)
    board.add(20, 3)
    board.add(20, 3)
    got = board.num_scheduled(board.step())
    must(
        got == {"A": 20},
        f"the budget is 32, prompts of 20 may not be cut: the first step has {got}",
    )


# -- 3.3 --


@SLOT.behaviour(1, "max_num_seqs sequences run, and not one more")
def exactly_as_many() -> None:
    board = Board(max_num_seqs=2)
    for _ in range(3):
        board.add(4, 6)
    got = board.num_scheduled(board.step())
    must(sorted(got) == ["A", "B"], f"max_num_seqs is 2; {sorted(got)} run")


@SLOT.behaviour(1, "branches that will fork off need places, too")
def counts_branches() -> None:
    board = Board(max_num_seqs=4)
    parent = board.add(4, 6)
    parent.num_pending_forks = 2
    board.add(4, 6)
    board.add(4, 6)
    got = board.num_scheduled(board.step())
    must(
        sorted(got) == ["A", "B"],
        f"A will be 3 sequences, max_num_seqs is 4: one more has room. {sorted(got)} were admitted",
    )


# -- 3.4 --


@ADMIT.behaviour(1, "the blocks that are cached are not computed again")
def uses_the_cache() -> None:
    board = Board(block_size=4)
    board.add(12, 2, first=0)
    board.finish()
    board.add(14, 2, first=0)
    got = board.num_scheduled(board.step())
    must(got == {"B": 2}, f"12 of B's 14 tokens are cached; the step computes {got}")


@ADMIT.behaviour(1, "the first chunk is counted from the cached tokens on")
def chunk_after_cache() -> None:
    board = Board(block_size=4, budget=8)
    board.add(8, 1, first=0)
    board.finish()
    board.add(12, 2, first=0)
    got = board.num_scheduled(board.step())
    must(got == {"B": 4}, f"8 of 12 tokens are cached, the budget is 8: {got}, and 4 are missing")


@ADMIT.behaviour(1, "a sequence is admitted only if all its tokens will fit")
def all_must_fit() -> None:
    board = Board(num_blocks=4, block_size=4, budget=8)
    board.add(9, 3)
    got = board.num_scheduled(board.step())
    must(got == {"A": 8}, f"A is alone and fits, the budget is 8: the step has {got}")
    board.add(9, 1)
    got = board.num_scheduled(board.step())
    must("B" not in got, f"B needs 3 blocks of 4, one is free; it was admitted: {got}")


@ADMIT.behaviour(0.5, "it runs, it waits no longer, and its cached tokens are noted")
def is_moved() -> None:
    board = Board(block_size=4)
    board.add(12, 1, first=0)
    board.finish()
    seq = board.add(14, 2, first=0)
    board.step()
    must(seq in board.scheduler.running, "it was admitted and is not in `running`" + board.show())
    must(seq not in board.scheduler.waiting, "it was admitted and still waits" + board.show())
    must(seq.num_cached_tokens == 12, f"num_cached_tokens is {seq.num_cached_tokens}, not 12")
    must(seq.metrics.scheduled_ts is not None, "metrics.scheduled_ts was not set")


@ADMIT.behaviour(1, "the same tokens whatever the settings", is_property=True)
def admission_is_right(seed: int) -> None:
    Board.try_random(seed)


# -- 3.5 --


@WAITING.behaviour(1, "the first who waits is admitted first")
def in_order() -> None:
    board = Board(max_num_seqs=1)
    for _ in range(3):
        board.add(4, 1)
    order = [next(iter(board.num_scheduled(board.step())), None) for _ in range(3)]
    must(order == ["A", "B", "C"], f"A, B, C arrived in this order and ran as {order}")


@WAITING.behaviour(1.5, "one that does not fit is not passed: or it would wait for ever")
def nobody_passes() -> None:
    board = Board(num_blocks=6, block_size=4)
    board.add(15, 9)
    got = board.num_scheduled(board.step())
    must(got == {"A": 15}, f"A is alone and fits: the step has {got}")
    board.add(12, 4)
    board.add(2, 2)
    got = board.num_scheduled(board.step())
    must(
        "C" not in got,
        f"B is too long for the free blocks and C behind it is short: the step has {got}. With a "
        "stream of short requests B would never run",
    )


@WAITING.behaviour(0.5, "one that is not ready is passed over")
def passes_unready() -> None:
    board = Board()
    board.add(4, 2).is_held = True
    board.add(4, 2)
    got = board.num_scheduled(board.step())
    must(got == {"B": 4}, f"A must wait and B may run; the step has {got}")


@WAITING.behaviour(1, "swapped sequences come back before less urgent ones begin", is_property=True)
def swapped_first(seed: int) -> None:
    Board.try_random(seed, num_blocks=14, preemption_mode="swap")


# -- 3.6 --


@TOKENS.behaviour(1, "its tokens count against the budget and as computed")
def is_counted() -> None:
    board = Board(budget=12)
    seq = board.add(9, 3)
    board.add(9, 3)
    got = board.num_scheduled(board.step())
    must(sum(got.values()) <= 12, f"the step has {sum(got.values())} tokens, the budget is 12")
    must(seq.num_computed_tokens == 9, f"{seq.num_computed_tokens} of A's 9 tokens are computed")


@TOKENS.behaviour(1, "a new sequence is sent to the runner once, with its block table")
def is_sent_once() -> None:
    board = Board()
    board.add(9, 3)
    first = board.scheduler.schedule()
    names = [new.seq_id for new in first.new_sequences]
    must(names == [0], f"the first step announces {names}")
    board.scheduler.update_from_output(first, board.executor.execute_model(first))
    second = board.step()
    must(not second.new_sequences, "the second step sends the sequence again")
    [item] = first.scheduled
    given = (item.num_computed_tokens, item.num_scheduled_tokens, len(item.new_block_ids))
    must(given == (0, 9, 3), f"(computed, scheduled, new blocks) is {given}, not (0, 9, 3)")


@TOKENS.behaviour(1, "a token is on its way exactly if all known ones are scheduled")
def placeholder() -> None:
    board = Board(budget=4, max_num_seqs=4)
    seq = board.add(6, 3)
    board.scheduler.schedule()
    must(seq.num_output_placeholders == 0, "4 of 6 tokens are computed: no new token comes yet")
    board = Board(budget=8)
    seq = board.add(6, 3)
    board.scheduler.schedule()
    number = seq.num_output_placeholders
    must(number == 1, f"the whole prompt is scheduled: one token will come, not {number}")


@TOKENS.behaviour(1, "the same tokens whatever the settings", is_property=True)
def tokens_are_right(seed: int) -> None:
    Board.try_random(seed)
