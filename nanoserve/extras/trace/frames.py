"""What does a picture know of a step?

A Frame holds one step of an engine, or one moment: each sequence with its counters and its block
table, what the step did to it, the free queue, and the three times of the step. All pictures are
drawn from frames. A frame is immutable and holds no tensor, and so it can be drawn when the engine
is closed.

    recorder.steps[3].number                       4: steps are counted from 1
    recorder.steps[3].view("B").num_scheduled      tokens of B in this step
    recorder.steps[3].blocks[7].owners             ("A", "B"): both own block 7

A slot of a block is "held" (an earlier step wrote it), "new" (this step wrote it), or "coming" (it
is scheduled, and not written yet). With overlapped steps, some slots are "coming" at the end of
each step, because the next step is in flight by then.

The text of a token is looked up when a picture is drawn, not when a step is recorded.

Left out: what the free blocks of a large KV cache still hold (more than MOST_BLOCKS blocks). Such a
cache does not fit into a picture, and copying its free queue would cost time in each step.

vLLM: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from nanoserve.sequence import Sequence, SequenceStatus

MOST_BLOCKS = 256  # of a KV cache whose free queue is recorded
MOST_WAITING = 64  # sequences of a queue that are recorded
HELD, NEW, COMING = "held", "new", "coming"


class Slot(NamedTuple):
    """One slot of the KV cache that holds a token, or soon will."""

    token_id: int  # -1: the token is in flight, so nobody knows it yet
    state: str  # HELD, NEW or COMING


class Block(NamedTuple):
    """One block of the KV cache. No owners, but slots: it is free and can be found by its hash."""

    owners: tuple[str, ...]
    slots: tuple[Slot, ...]
    is_cached: bool  # can be found by its hash
    ref_count: int


@dataclass(frozen=True)
class Event:
    """Something that a step did to a sequence.

    "hit": admitted; `count` tokens came from the prefix cache.
    "fork": it branched off with `count` computed tokens that it shares.
    "preempted": its blocks were taken away. "swapped out": they were moved to `count` CPU blocks.
    "back": it runs again; `count` tokens came from the prefix cache. "swapped in": `count` blocks
    came back from the CPU.
    "copied": before it wrote, it got a copy of a shared block.
    "finished": it ended, in this step or since the last one; its view's status says how.
    """

    kind: str
    name: str
    count: int = 0


class SequenceView(NamedTuple):
    """One sequence at the end of a step (or now)."""

    seq_id: int
    name: str
    status: SequenceStatus
    num_prompt: int
    num_tokens: int
    num_computed: int  # in the KV cache, or on their way to it
    first_new: int  # tokens [first_new, first_coming) were written by this step,
    first_coming: int  # tokens [first_coming, num_computed) are scheduled and not written yet
    num_scheduled: int  # tokens that the step computed
    num_again: int  # of these, how many had been computed before, and lost in a preemption
    num_sampled: int  # tokens that the step brought
    table: tuple[int, ...]  # block table; of a sequence that ended in this step, its last one
    cpu_table: tuple[int, ...]  # the CPU blocks of a swapped sequence

    @property
    def num_first_time(self) -> int:
        """Tokens that no earlier step had computed."""
        return self.num_scheduled - self.num_again

    @property
    def is_over(self) -> bool:
        """It has ended; its blocks are free."""
        return self.status.finish_reason is not None

    @property
    def is_waiting(self) -> bool:
        """It holds no KV blocks, and waits for some."""
        return self.status in (SequenceStatus.WAITING, SequenceStatus.SWAPPED)

    @property
    def is_decode(self) -> bool:
        """The step computed one token, and it is not one of the prompt."""
        return self.num_scheduled == 1 and self.first_new >= self.num_prompt

    @property
    def is_partial(self) -> bool:
        """The step computed a chunk of its tokens, and more are left before the next sample."""
        return self.num_scheduled > 0 and self.num_sampled == 0


class Tokens:
    """The tokens of all recorded sequences, and their texts. Holds a tokenizer, and no engine."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: dict[int, list[int]] = {}  # seq_id -> token ids; they only ever get longer
        self._texts: dict[int, str] = {}

    def see(self, seq: Sequence) -> None:
        """Remember the tokens of `seq` that are new."""
        known = self.ids.setdefault(seq.seq_id, [])
        if len(known) < len(seq.token_ids):
            known += seq.token_ids[len(known) :]

    def keep(self, seq_ids: set[int]) -> None:
        """Forget all other sequences."""
        self.ids = {seq_id: ids for seq_id, ids in self.ids.items() if seq_id in seq_ids}

    def at(self, seq_id: int, position: int) -> int:
        """The token at this position; -1 if it is in flight, or was forgotten."""
        ids = self.ids.get(seq_id, ())
        return ids[position] if position < len(ids) else -1

    def text(self, token_id: int, limit: int = 7) -> str:
        """A token in at most `limit` letters: no leading space, white space made visible.

        " capital" -> "capital", " " -> "␣", "<|im_start|>" -> "‹start›" (or "‹s›"), -1 -> "?"
        """
        text = self._decode(token_id)
        if text.startswith("<|") and text.endswith("|>"):
            name = text[2:-2].removeprefix("im_")
            return f"‹{name}›" if len(name) < limit else f"‹{name[:1]}›"
        text = text.replace("\n", "↵").lstrip(" ") or "␣"
        return text if len(text) <= limit else text[: limit - 2] + "…"

    def short_text(self, token_id: int) -> str:
        """A token as one sign, if it is special or white space; else its text without spaces."""
        text = self._decode(token_id)
        return "▸" if text.startswith("<|") else text.replace("\n", "↵").strip() or "␣"

    def text_of(self, seq_id: int, start: int, end: int) -> str:
        """The text of tokens [start, end) of a sequence, without special tokens."""
        ids = self.ids.get(seq_id, [])[start:end]
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def question_of(self, seq_id: int, num_prompt: int) -> str:
        """The prompt in one line; of a chat (ChatML) the last message of the user."""
        ids = self.ids.get(seq_id, [])[:num_prompt]
        whole = self.tokenizer.decode(ids) if self.tokenizer is not None else ""
        _, mark, last = whole.rpartition("<|im_start|>user\n")
        text = last.split("<|im_end|>")[0] if mark else self.text_of(seq_id, 0, num_prompt)
        return " ".join(text.split())

    def _decode(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            is_known = token_id >= 0 and self.tokenizer is not None
            text = self.tokenizer.decode([token_id]) if is_known else str(token_id)
            text = self._texts[token_id] = "?" if token_id < 0 else text
        return text


@dataclass(frozen=True)
class Frame:
    """One step of an engine, as it was when the step had ended; or an engine as it is now."""

    number: int  # from 1; 0: not a recorded step
    budget: int  # tokens that a step may compute
    block_size: int
    num_blocks: int
    num_free: int
    num_waiting: int  # waiting and swapped sequences, also those that `sequences` leaves out
    sequences: tuple[SequenceView, ...]  # in order of arrival
    events: tuple[Event, ...] = ()
    # The next three are empty for a KV cache of more than MOST_BLOCKS blocks.
    free_queue: tuple[int, ...] = ()  # next to be allocated first
    contents: tuple[tuple[int, ...] | None, ...] = ()  # tokens by which a block can be found
    ref_counts: tuple[int, ...] = ()
    swapped_out: tuple[tuple[int, int], ...] = ()  # (KV block, CPU block)
    swapped_in: tuple[tuple[int, int], ...] = ()  # (CPU block, KV block)
    copied: tuple[tuple[int, int], ...] = ()  # (shared block, the writer's own)
    started: float = 0.0  # seconds of time.perf_counter()
    schedule_time: float = 0.0  # seconds; see engine.StepReport
    execute_time: float = 0.0
    update_time: float = 0.0
    tokens: Tokens = field(default_factory=lambda: Tokens(None), repr=False, compare=False)

    @cached_property
    def scheduled(self) -> tuple[SequenceView, ...]:
        """The sequences of the step."""
        return tuple(view for view in self.sequences if view.num_scheduled)

    @property
    def num_scheduled(self) -> int:
        return sum(view.num_scheduled for view in self.scheduled)

    def view(self, name: str) -> SequenceView | None:
        """The sequence of this name, if the frame has it; of several, the latest one."""
        return next((view for view in reversed(self.sequences) if view.name == name), None)

    @cached_property
    def blocks(self) -> dict[int, Block]:
        """Block id -> block, at the end of the step. Of a large KV cache: blocks with owners."""
        return self._make_blocks(with_ended=False)

    @cached_property
    def blocks_in_step(self) -> dict[int, Block]:
        """The same while the step ran: sequences that it ended still own their blocks."""
        return self._make_blocks(with_ended=True)

    def _make_blocks(self, with_ended: bool) -> dict[int, Block]:
        owners: dict[int, list[str]] = {}
        slots: dict[int, list[Slot]] = {}
        for view in self.sequences:
            if view.is_over and not with_ended:
                continue
            for index, block_id in enumerate(view.table):
                owners.setdefault(block_id, []).append(view.name)
                _merge(slots.setdefault(block_id, []), self._slots_of(view, index))
        for block_id, found in enumerate(self.contents):
            if found is not None:
                slots.setdefault(block_id, [Slot(token_id, HELD) for token_id in found])
        is_small = bool(self.contents)
        return {
            block_id: Block(
                owners=tuple(owners.get(block_id, ())),
                slots=tuple(slots.get(block_id, ())),
                is_cached=is_small and self.contents[block_id] is not None,
                ref_count=self.ref_counts[block_id] if is_small else len(owners[block_id]),
            )
            for block_id in (range(self.num_blocks) if is_small else sorted(owners))
        }

    def _slots_of(self, view: SequenceView, index: int) -> list[Slot]:
        """What the block at `index` of a block table holds of this sequence."""
        start = index * self.block_size
        end = min(start + self.block_size, view.num_computed)
        return [
            Slot(
                self.tokens.at(view.seq_id, position),
                COMING
                if position >= view.first_coming
                else (NEW if position >= view.first_new else HELD),
            )
            for position in range(start, end)
        ]


def _merge(slots: list[Slot], others: list[Slot]) -> None:
    """Add what another owner knows of the same block: a slot is as late as any owner says."""
    lateness = (HELD, NEW, COMING)
    for index, other in enumerate(others):
        if index == len(slots):
            slots.append(other)
        elif lateness.index(other.state) > lateness.index(slots[index].state):
            slots[index] = Slot(slots[index].token_id, other.state)


def name_of(seq: Sequence) -> str:
    """The name of a sequence in the pictures: "A" for request A, "A.2" for its branch 2."""
    return f"{seq.request_id}.{seq.branch}" if seq.branch else seq.request_id


def names_in(frames: Iterable[Frame]) -> list[str]:
    """The names of all sequences that were scheduled, in order of arrival."""
    found: dict[int, str] = {}
    for frame in frames:
        found |= {view.seq_id: view.name for view in frame.scheduled}
    return list(dict.fromkeys(found[seq_id] for seq_id in sorted(found)))


def chunks_of(frames: Iterable[Frame]) -> Mapping[tuple[int, int], tuple[int, int]]:
    """(step, seq_id) -> (this is chunk 2, of 3), for the steps that computed a prompt in parts."""
    series: dict[int, list[int]] = {}  # seq_id -> the steps of the chunks so far
    numbered: dict[tuple[int, int], tuple[int, int]] = {}

    def end(seq_id: int) -> None:
        steps = series.pop(seq_id, [])
        for index, number in enumerate(steps, start=1):
            numbered[number, seq_id] = (index, len(steps))

    for frame in frames:
        for view in frame.sequences:
            if view.num_scheduled and (view.is_partial or view.seq_id in series):
                series.setdefault(view.seq_id, []).append(frame.number)
            if not view.is_partial and view.seq_id in series:
                end(view.seq_id)
    for seq_id in list(series):
        end(seq_id)
    return numbered
