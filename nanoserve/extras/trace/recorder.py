"""What did an engine do, step by step?

A Recorder listens to the steps of one engine and keeps a Frame of each (frames.py). It reads and
changes nothing: an engine with a Recorder makes the same tokens.

    recorder = trace.Recorder(llm)
    llm.generate(prompts)
    recorder.play()                       # in a notebook: a player with a slider
    recorder.timeline("Who ran when")     # pictures, with matplotlib
    recorder.save("run.svg")              # or run.html, run.json (Chrome and Perfetto read it)

*What it costs.* About 20 to 40 microseconds a step and 3 to 4 for each sequence in it, on one CPU
core: one to three percent of a step of the demo model. Pictures cost time only when they are drawn.
Frames stay in memory until the Recorder is dropped (or, with `last`, the last steps only): about
700 bytes a step and 160 for each sequence in it. A step that allocates or frees blocks takes 24
bytes more for each block of the KV cache; no such lists are kept of a cache of more than 256 blocks
(frames.MOST_BLOCKS).

*What it keeps alive.* Token ids, counters, block tables and the tokenizer; no tensor, and not the
engine: a Recorder holds a weak reference, and can draw when the engine is closed or gone.

Left out: steps that failed, requests that were aborted before their first step, and the tokens of
sequences that were aborted while their step ran; the engine reports none of them.

vLLM: none; for times, its --profile and torch's profiler.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence as Seq
from itertools import islice
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

from nanoserve.arg_utils import engine_of
from nanoserve.engine import StepReport
from nanoserve.extras.trace.blocks import draw_frame
from nanoserve.extras.trace.chrome import to_json
from nanoserve.extras.trace.frames import MOST_WAITING, Event, Frame, SequenceView, Tokens, name_of
from nanoserve.extras.trace.movie import to_svg
from nanoserve.extras.trace.player import Player
from nanoserve.extras.trace.snapshot import in_flight, make_view, pool_fields, snapshot
from nanoserve.extras.trace.steps import timeline
from nanoserve.sequence import ScheduledSequence, SchedulerOutput, Sequence, SequenceStatus


class Recorder:
    """Listens to every step of an engine from now on; `steps` is what it saw.

    Listening ends with close(), at the end of a `with` block, or with the engine.
    """

    def __init__(self, llm_or_engine: Any, last: int | None = None) -> None:
        """last: keep this many steps, the last ones. None: keep all."""
        engine = engine_of(llm_or_engine)
        self._engine = weakref.ref(engine)
        self._frames: deque[Frame] = deque(maxlen=last)
        self._number = 0
        self._tokens = Tokens(getattr(engine, "tokenizer", None))
        self._live: dict[int, Sequence] = {}  # unfinished ones, of the latest frame
        self._status: dict[int, SequenceStatus] = {}  # of these, at the latest frame
        self._tables: dict[int, tuple[int, ...]] = {}
        self._ran: set[int] = set()  # unfinished sequences that were scheduled before
        self._reached: dict[int, int] = {}  # seq_id -> tokens that were computed once already
        for seq in engine.scheduler.sequences.values():  # of a run that has begun
            end = seq.num_computed_tokens
            self._live[seq.seq_id], self._status[seq.seq_id] = seq, seq.status
            self._tables[seq.seq_id] = tuple(engine.block_manager.block_tables.get(seq.seq_id, ()))
            self._reached[seq.seq_id] = in_flight(engine).get(seq.seq_id, end)
            if end or seq.num_output_tokens:  # a preempted one has output, and nothing computed
                self._ran.add(seq.seq_id)
        engine.step_listeners.append(self)

    def __repr__(self) -> str:
        return f"Recorder({self._number} steps)"

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening. What was recorded stays."""
        engine = self._engine()
        if engine is not None and self in engine.step_listeners:
            engine.step_listeners.remove(self)

    @property
    def steps(self) -> list[Frame]:
        """The recorded steps, oldest first."""
        return list(self._frames)

    def step(self, number: int) -> Frame:
        """The step of this number; steps are counted from 1. Raises ValueError if there is none."""
        for frame in self._frames:
            if frame.number == number:
                return frame
        recorded = "none" if not self._frames else f"{self._frames[0].number} to {self._number}"
        raise ValueError(f"step {number} was not recorded; recorded steps: {recorded}.")

    # -- pictures --

    def timeline(self, title: str = "Who ran when") -> None:
        """Draw the tokens of each step as bars, and a lane for each sequence."""
        timeline(title, self.steps)

    def block_map(self, title: str = "Who owns which block", step: int | None = None) -> None:
        """Draw block tables, KV cache and free queue after this step. None: now, or if the engine
        is closed, after the last step."""
        draw_frame(self.step(step) if step is not None else self.now(), title)

    def now(self) -> Frame:
        """The engine as it is now; of a closed engine, its last step."""
        engine = self._engine()
        if engine is not None and not getattr(engine, "_is_closed", False):
            return snapshot(engine)
        if not self._frames:
            raise ValueError("nothing was recorded, and the engine is closed.")
        return self._frames[-1]

    def play(
        self, title: str = "", questions: dict[str, str] | None = None, language: str = "en"
    ) -> Player:
        """A player for a notebook, with a slider through the steps. `questions` (request -> text)
        stand beside the requests; without them, their prompts do."""
        return Player(self.steps, title, questions, language)

    def save(
        self,
        file: str | Path,
        title: str = "",
        questions: dict[str, str] | None = None,
        language: str = "en",
    ) -> None:
        """Write the run: run.html is the player, run.svg an animation, run.json a trace for
        chrome://tracing and ui.perfetto.dev."""
        path = Path(file)
        if path.suffix == ".json":
            content = to_json(self.steps)
        elif path.suffix == ".svg":
            content = to_svg(self.steps, title, questions, language)
        elif path.suffix == ".html":
            content = self.play(title, questions, language).to_html()
        else:
            raise ValueError(f"{path.name}: a run is saved as .html, .svg or .json.")
        path.write_text(content, "utf-8")

    # -- listening --

    def __call__(self, report: StepReport) -> None:
        """Called by the engine at the end of each step."""
        engine = self._engine()
        if engine is None:
            return
        step = report.scheduler_output
        sequences = self._sequences_of(engine.scheduler, report)
        known = report.sequences  # not those that were aborted while the step ran
        items = {item.seq_id: item for item in step.scheduled if item.seq_id in known}
        admitted = {new.seq_id: new.block_ids for new in step.new_sequences}
        sampled = {u.sequence.seq_id: len(u.new_token_ids) for u in report.updates}
        coming, has_copies = in_flight(engine), bool(step.blocks_to_copy)
        tables, cpu_tables = engine.block_manager.block_tables, engine.block_manager.swapped_tables
        views: list[SequenceView] = []
        events: list[Event] = []
        for seq_id in sorted(sequences):
            seq, item = sequences[seq_id], items.get(seq_id)
            self._tokens.see(seq)
            new_table = admitted.get(seq_id)
            if self._status.get(seq_id) is not seq.status or new_table is not None or has_copies:
                events += self._events_of(seq, item, step, new_table)  # nothing in most steps
            table = self._tables[seq_id] = self._table_of(tables, seq, item, new_table)
            again = self._count_again(item) if item else 0
            number, first = sampled.get(seq_id, 0), coming.get(seq_id)
            cpu_table = cpu_tables.get(seq_id, ())
            views.append(make_view(seq, table, cpu_table, item, first, again, number))
        self._number += 1
        times = (report.schedule_time, report.execute_time, report.update_time)
        self._frames.append(
            Frame(
                number=self._number,
                sequences=tuple(views),
                events=tuple(events),
                swapped_out=step.blocks_to_swap_out,
                swapped_in=step.blocks_to_swap_in,
                copied=step.blocks_to_copy,
                started=perf_counter() - sum(times),
                schedule_time=times[0],
                execute_time=times[1],
                update_time=times[2],
                tokens=self._tokens,
                **pool_fields(engine, self._frames[-1] if self._frames else None),
            )
        )
        self._remember(sequences, views)

    def _sequences_of(self, scheduler: Any, report: StepReport) -> dict[int, Sequence]:
        """What the frame shows: the step's sequences, those that run or wait, and those that have
        ended since the last frame (an abort)."""
        found = dict(report.sequences)
        queues: list[Seq[Sequence]] = [scheduler.running, scheduler.swapped, scheduler.waiting]
        for queue, most in zip(queues, (None, MOST_WAITING, MOST_WAITING), strict=True):
            found |= {seq.seq_id: seq for seq in islice(queue, most)}
        for seq_id, seq in self._live.items():
            if seq_id not in found and seq.status.finish_reason is not None:
                found[seq_id] = seq
        return found

    def _table_of(
        self,
        tables: dict[int, list[int]],
        seq: Sequence,
        item: ScheduledSequence | None,
        new_table: tuple[int, ...] | None,
    ) -> tuple[int, ...]:
        """The block table. Of a sequence that this step ended: the table that it had."""
        known = self._tables.get(seq.seq_id, ())
        table = tables.get(seq.seq_id)
        if table is not None:
            is_known = len(known) == len(table) > 0 and known[-1] == table[-1]
            return known if is_known and new_table is None else tuple(table)
        if item is None or seq.status.finish_reason is None:
            return ()
        last = list(known if new_table is None else new_table)
        last[item.first_new_block :] = item.new_block_ids
        return tuple(last)

    def _count_again(self, item: ScheduledSequence) -> int:
        """How many of these tokens an earlier step has computed already."""
        start, end = item.num_computed_tokens, item.num_computed_tokens + item.num_scheduled_tokens
        reached = self._reached.get(item.seq_id, 0)
        self._reached[item.seq_id] = max(reached, end)
        return max(0, min(reached, end) - start)

    def _events_of(
        self,
        seq: Sequence,
        item: ScheduledSequence | None,
        step: SchedulerOutput,
        new_table: tuple[int, ...] | None,
    ) -> list[Event]:
        """What the step did to `seq`; `new_table` is its block table if it was admitted."""
        name, before = name_of(seq), self._status.get(seq.seq_id)
        events = []
        if item is not None and new_table is not None:
            start = item.num_computed_tokens
            if before is SequenceStatus.SWAPPED:
                events.append(Event("swapped in", name, len(new_table)))
            elif seq.seq_id in self._ran:
                events.append(Event("back", name, start))
            elif start and before is SequenceStatus.RUNNING:
                events.append(Event("fork", name, start))
            elif start:
                events.append(Event("hit", name, start))
        if item is not None and any(new in item.new_block_ids for _, new in step.blocks_to_copy):
            events.append(Event("copied", name, 1))
        if before is SequenceStatus.RUNNING or item is not None:
            if seq.status is SequenceStatus.WAITING:
                events.append(Event("preempted", name))
            elif seq.status is SequenceStatus.SWAPPED:
                events.append(Event("swapped out", name, len(self._tables.get(seq.seq_id, ()))))
        if seq.status.finish_reason is not None:
            events.append(Event("finished", name))
        return events

    def _remember(self, sequences: dict[int, Sequence], views: list[SequenceView]) -> None:
        """Keep what the next frame is compared with; forget sequences that have ended."""
        self._ran |= {view.seq_id for view in views if view.num_scheduled}
        live = [view for view in views if not view.is_over]
        self._live = {view.seq_id: sequences[view.seq_id] for view in live}
        self._status = {view.seq_id: view.status for view in live}
        self._tables = {view.seq_id: view.table for view in live}
        for view in views:
            if view.is_over:
                self._ran.discard(view.seq_id)
                self._reached.pop(view.seq_id, None)
        if self._frames.maxlen and self._number % self._frames.maxlen == 0:
            self._tokens.keep({view.seq_id for frame in self._frames for view in frame.sequences})
