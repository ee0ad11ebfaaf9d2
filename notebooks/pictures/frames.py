"""From a run of the engine to frames: what a picture of each step has to show.

A Recorder listens to the steps of an engine. All that it draws of a step comes from the step's
StepReport, in the way the model runner learns it: block tables are kept up to date from the deltas
of the SchedulerOutput. Only what nobody owns (free blocks that can still be found) and who waits is
read from the engine.

    recorder = Recorder(llm.engine)
    ... add requests, run steps ...
    recorder.frames()[3].requests[1]
        RequestView(name="B", state="running", text="17 + ",
                    events=(Event("hit", 8, 0),), num_scheduled=10)

Left out: swapped sequences (their blocks are not in the KV cache), and everything that is a
picture; drawing is hero.py's part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nanoserve import LLMEngine
from nanoserve.engine import StepReport
from nanoserve.sequence import ScheduledSequence, Sequence


@dataclass(frozen=True)
class Event:
    """Something worth a word that a step did to a request.

    "hit": the request was admitted, with `count` tokens from the prefix cache.
    "fork": one of n completions begins, with the `count` computed tokens that it shares.
    "chunk": chunk number `count` of `total` of its prompt was computed (total 0: was never done).
    "preempted": its blocks were taken away.
    "back": it runs again; `count` tokens came from the prefix cache.
    "finished": its last token came.
    """

    kind: str
    count: int = 0
    total: int = 0


@dataclass(frozen=True)
class Slot:
    """One token in a block, and whether this step wrote it."""

    text: str
    is_new: bool


@dataclass(frozen=True)
class BlockView:
    """One block of the KV cache. No owners, but slots: free, and can be found by its hash."""

    owners: tuple[str, ...]
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class RequestView:
    """One request after a step. `state` is "running", "waiting", "preempted" or "finished"."""

    name: str
    state: str
    text: str
    num_scheduled: int
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Frame:
    """One step: its number (from 1), the requests that have arrived, all blocks, the budget."""

    number: int
    budget: int
    requests: tuple[RequestView, ...]
    blocks: tuple[BlockView, ...]


@dataclass
class _Record:
    """What is known of one sequence: the runner's view (block table, tokens) and its history."""

    name: str
    table: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    start: int = 0  # tokens [start, end) were computed in the sequence's latest step
    end: int = 0
    text: str = ""
    state: str = "waiting"
    was_admitted: bool = False
    chunks: list[list[Event]] = field(default_factory=list)  # the steps' events, for numbering


def name_of(seq: Sequence) -> str:
    """ "A" for request A, "A.2" for its completion 2."""
    return seq.request_id + (f".{seq.branch}" if seq.branch else "")


class Recorder:
    """Listens to every step of an engine from now on; `frames` is what it saw."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._records: dict[int, _Record] = {}  # seq_id -> record, in order of arrival
        self._steps: list[Callable[[], Frame]] = []  # complete when the chunks are counted
        engine.step_listeners.append(self)

    def frames(self) -> list[Frame]:
        return [make() for make in self._steps]

    def __call__(self, report: StepReport) -> None:
        """Called by the engine at the end of each step."""
        step, scheduler = report.scheduler_output, self.engine.scheduler
        for seq_id, seq in report.sequences.items():
            self._records.setdefault(seq_id, _Record(name_of(seq)))
        for seq in scheduler.waiting:
            self._records.setdefault(seq.seq_id, _Record(name_of(seq)))
        events: dict[int, list[Event]] = {seq_id: [] for seq_id in self._records}
        dropped = self._records if step.is_restart else step.finished_seq_ids
        for seq_id in dropped:  # finished in an earlier step, or preempted in this one
            record = self._records[seq_id]
            record.table, record.chunks = [], []
            if record.state == "running" and seq_id in scheduler.sequences:
                record.state = "preempted"
                events[seq_id].append(Event("preempted"))
            elif seq_id not in scheduler.sequences:  # also one that was aborted
                record.state = "finished"
        for new in step.new_sequences:
            self._records[new.seq_id].table = list(new.block_ids)
        num_scheduled = {item.seq_id: item.num_scheduled_tokens for item in step.scheduled}
        for item in step.scheduled:
            self._see(item, report.sequences[item.seq_id], events[item.seq_id])
        blocks = self._view_blocks(num_scheduled)
        views = [
            (record.name, record.state, record.text, num_scheduled.get(seq_id, 0), events[seq_id])
            for seq_id, record in self._records.items()
        ]
        number, budget = len(self._steps) + 1, scheduler.token_budget
        self._steps.append(
            lambda: Frame(
                number,
                budget,
                tuple(RequestView(*view, events=tuple(seen)) for *view, seen in views),
                blocks,
            )
        )

    def _see(self, item: ScheduledSequence, seq: Sequence, events: list[Event]) -> None:
        """Bring the record of a scheduled sequence up to date, and note what happened to it."""
        record = self._records[item.seq_id]
        record.table[item.first_new_block :] = item.new_block_ids
        record.start = item.num_computed_tokens
        record.end = record.start + item.num_scheduled_tokens
        if record.state == "preempted":
            events.append(Event("back", record.start))
        elif not record.was_admitted and record.start:
            events.append(Event("fork" if seq.branch else "hit", record.start))
        record.was_admitted, record.state = True, "running"
        is_partial = len(record.token_ids or seq.prompt_token_ids) > record.end
        record.token_ids = seq.token_ids[:]
        if is_partial or record.chunks:
            record.chunks.append(events)
            events.append(Event("chunk", len(record.chunks)))
        if not is_partial:
            number_chunks(record.chunks)
            record.chunks = []
        record.text = self.engine.tokenizer.decode(seq.output_token_ids, skip_special_tokens=True)
        if seq.status.finish_reason is not None:
            record.state = "finished"
            events.append(Event("finished"))

    def _view_blocks(self, num_scheduled: dict[int, int]) -> tuple[BlockView, ...]:
        """Every block during the step: its owners and their tokens, or what it still holds."""
        manager = self.engine.block_manager
        size, hashes = manager.block_size, manager.pool.block_hashes
        views = []
        for block_id in range(manager.num_blocks):
            owners: list[str] = []
            slots: dict[int, Slot] = {}
            for seq_id, record in self._records.items():
                if block_id not in record.table:
                    continue
                owners.append(record.name)
                first = record.table.index(block_id) * size
                start = record.start if seq_id in num_scheduled else record.end
                for position in range(first, min(first + size, record.end)):
                    text = self.token_text(record.token_ids[position])
                    was_new = position in slots and slots[position].is_new
                    slots[position] = Slot(text, was_new or position >= start)
            held = hashes[block_id]
            if not owners and held is not None:
                slots = {i: Slot(self.token_text(t), False) for i, t in enumerate(held.token_ids)}
            views.append(BlockView(tuple(owners), tuple(slots.values())))
        return tuple(views)

    def token_text(self, token_id: int) -> str:
        """A token's text: "▸" for a special token, "↵" for a new line, "␣" for a space alone."""
        text: str = self.engine.tokenizer.decode([token_id])
        if text.startswith("<|"):
            return "▸"
        return text.replace("\n", "↵").strip() or "␣"


def number_chunks(steps: list[list[Event]]) -> None:
    """Write the total into the "chunk" events of the steps that computed one prompt."""
    for events in steps:
        for index, event in enumerate(events):
            if event.kind == "chunk":
                events[index] = Event("chunk", event.count, len(steps))
