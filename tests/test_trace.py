"""The recorder and its pictures: what is recorded is what happened, and what is drawn is what was
recorded."""

from __future__ import annotations

import ast
import gc
import json
import random
import re
import subprocess
import sys
import textwrap
import threading
import weakref
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from engines import fail_in_executor, make_engine, params
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve import LLM, LLMEngine, SamplingParams
from nanoserve.block_manager import BlockPool, BlockState
from nanoserve.extras import trace
from nanoserve.extras.trace import chrome, movie, states, steps, style, timer
from nanoserve.extras.trace.frames import COMING, NEW, Frame, chunks_of, name_of
from nanoserve.extras.trace.snapshot import snapshot
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence, SequenceStatus

NAMES = "ABCDEFGH"


# -- random runs of the engine over the fake model --


def random_options(draw: random.Random) -> dict[str, Any]:
    return {
        "num_kv_blocks": draw.choice([8, 12, 40]),
        "max_num_batched_tokens": draw.choice([7, 16, 64]),
        "max_num_seqs": draw.choice([2, 4, 6]),
        "enable_prefix_caching": draw.random() < 0.7,
        "preemption_mode": draw.choice(["recompute", "swap"]),
        "async_scheduling": draw.random() < 0.4,
    }


def random_run(engine: LLMEngine, draw: random.Random, fails: bool = False) -> Iterator[None]:
    """Requests of all kinds, with aborts and, if `fails`, failing steps; yields after each step."""
    names = iter(NAMES[: draw.randint(2, 8)])
    name: str | None = next(names)
    for _ in range(400):
        while name is not None and draw.random() < 0.5:
            prompt = [5, 6, 7, 8, 9, 10, 11][: draw.choice([0, 4, 7])]
            prompt += [draw.randrange(40) for _ in range(draw.randint(1, 14))]
            fields = {"n": draw.choice([1, 1, 3]), "max_tokens": draw.randint(1, 12)}
            fields |= {"ignore_eos": draw.random() < 0.7, "temperature": 1.0}
            engine.add_request(name, prompt, params(**fields))
            name = next(names, None)
        if draw.random() < 0.04:
            engine.abort_request(draw.choice(NAMES))
        if fails and draw.random() < 0.08:
            engine.executor.fail_next_step = True
        if not engine.has_unfinished_requests() and name is None:
            return
        engine.step()
        yield


# -- the recorder --


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=60)
def test_frames_agree_with_the_block_manager(seed: int, fails: bool) -> None:
    """After every step: tables, owners, reference counts, contents and the free queue."""
    draw = random.Random(seed)
    engine = make_engine(**random_options(draw))
    recorder, num_reports = trace.Recorder(engine), 0
    for _ in random_run(engine, draw, fails):
        if len(recorder.steps) == num_reports:
            continue  # the step failed, or is in flight: nothing was reported
        num_reports = len(recorder.steps)
        agree(recorder.steps[-1], engine)
    for number, frame in enumerate(recorder.steps, start=1):
        assert frame.number == number
        assert 0 <= frame.num_scheduled <= frame.budget


def agree(frame: Frame, engine: LLMEngine) -> None:
    manager, scheduler = engine.block_manager, engine.scheduler
    pool = manager.pool
    live = {view.seq_id: view for view in frame.sequences if not view.is_over}
    assert live.keys() == scheduler.sequences.keys()
    for seq_id, view in live.items():
        seq = scheduler.sequences[seq_id]
        assert view.name == name_of(seq)
        assert view.status is seq.status
        assert list(view.table) == manager.block_tables.get(seq_id, [])
        assert list(view.cpu_table) == manager.swapped_tables.get(seq_id, [])
        assert (view.num_tokens, view.num_computed) == (seq.num_tokens, seq.num_computed_tokens)
    assert frame.free_queue == tuple(pool.free_queue)
    assert list(frame.blocks) == list(range(pool.num_blocks))
    for block_id, block in frame.blocks.items():
        owners = {
            name_of(scheduler.sequences[seq_id])
            for seq_id, table in manager.block_tables.items()
            if block_id in table
        }
        assert set(block.owners) == owners
        assert block.ref_count == len(owners) == pool.ref_counts[block_id]
        block_hash = pool.block_hashes[block_id]
        assert block.is_cached == (block_hash is not None)
        if block_hash is not None:
            assert tuple(slot.token_id for slot in block.slots) == block_hash.token_ids
        assert bool(block.slots) == bool(owners or block.is_cached)


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=40)
def test_the_slots_are_those_of_the_cache(seed: int, is_async: bool) -> None:
    """A written slot holds this token in the cache; only a step in flight has "coming" slots."""
    draw = random.Random(seed)
    engine = make_engine(**{**random_options(draw), "async_scheduling": is_async})
    recorder, num_reports = trace.Recorder(engine), 0
    for _ in random_run(engine, draw):
        if len(recorder.steps) == num_reports:
            continue
        num_reports, frame = len(recorder.steps), recorder.steps[-1]
        in_flight = {
            item.seq_id
            for launched in engine._in_flight
            for item in launched.scheduler_output.scheduled
        }
        coming_names = {view.name for view in frame.sequences if view.seq_id in in_flight}
        moved = {target for _, target in (*frame.copied, *frame.swapped_in)}
        for block_id, block in frame.blocks.items():
            has_coming = any(slot.state == COMING for slot in block.slots)
            assert not has_coming or set(block.owners) & coming_names
            if in_flight or block_id in moved:
                continue  # the fake does the work of a step at its launch
            start = block_id * frame.block_size
            held = engine.executor.layers[0][start : start + len(block.slots)]
            assert held == [slot.token_id for slot in block.slots]


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=60)
def test_each_scheduled_token_is_counted_once(seed: int, fails: bool) -> None:
    """As first time or as again; without preemptions, nothing is computed again."""
    draw = random.Random(seed)
    engine = make_engine(**random_options(draw))
    recorder = trace.Recorder(engine)
    reports: list[Any] = []
    engine.step_listeners.append(reports.append)
    for _ in random_run(engine, draw, fails):
        pass
    again = 0
    for frame, report in zip(recorder.steps, reports, strict=True):
        items = {item.seq_id: item for item in report.scheduler_output.scheduled}
        assert {view.seq_id for view in frame.scheduled} == items.keys() & report.sequences.keys()
        for view in frame.scheduled:
            assert view.num_scheduled == items[view.seq_id].num_scheduled_tokens
            assert 0 <= view.num_again <= view.num_scheduled
            assert view.num_first_time + view.num_again == view.num_scheduled
            again += view.num_again
        times = (report.schedule_time, report.execute_time, report.update_time)
        assert (frame.schedule_time, frame.execute_time, frame.update_time) == times
    kinds = Counter(event.kind for frame in recorder.steps for event in frame.events)
    if not (kinds["preempted"] or kinds["swapped out"] or fails):
        assert again == 0


def test_events_tell_what_happened() -> None:
    """In 8 blocks: a hit, a fork, a copy, a preemption, a return, an abort."""
    engine = make_engine(num_kv_blocks=8, max_num_batched_tokens=12)
    recorder = trace.Recorder(engine)
    for name in "AB":
        engine.add_request(name, [5, 6, 7, 8, 9, 10], params(max_tokens=14))
    engine.add_request("C", [1, 2, 3], params(n=2, max_tokens=6))
    engine.step()
    engine.step()
    engine.abort_request("C", index=1)
    while engine.has_unfinished_requests():
        engine.step()
    events = [event for frame in recorder.steps for event in frame.events]
    kinds = Counter(event.kind for event in events)
    assert {"hit", "fork", "copied", "preempted", "back", "finished"} <= kinds.keys()
    assert kinds["finished"] == len({event.name for event in events if event.kind == "finished"})
    assert kinds["preempted"] == kinds["back"]
    [aborted] = {
        v.name
        for f in recorder.steps
        for v in f.sequences
        if v.status is SequenceStatus.FINISHED_ABORTED
    }
    assert aborted == "C.1"
    assert next(event for event in events if event.kind == "hit").count == 4


def test_chunks_are_numbered() -> None:
    """A prompt of 20 tokens with a budget of 8: 8, 8, 4."""
    engine = make_engine(max_num_batched_tokens=8)
    recorder = trace.Recorder(engine)
    engine.add_request("A", list(range(20)), params(max_tokens=3))
    while engine.has_unfinished_requests():
        engine.step()
    assert chunks_of(recorder.steps) == {(1, 0): (1, 3), (2, 0): (2, 3), (3, 0): (3, 3)}


@given(st.integers(0, 10**6))
@settings(max_examples=20)
def test_a_recorder_changes_no_token(seed: int) -> None:
    def tokens(is_recorded: bool) -> dict[str, list[tuple[int, ...]]]:
        draw = random.Random(seed)
        engine = make_engine(**random_options(draw))
        if is_recorded:
            trace.Recorder(engine)
        updates: dict[str, list[tuple[int, ...]]] = {}

        def note(report: Any) -> None:
            for update in report.updates:
                updates.setdefault(name_of(update.sequence), []).append(update.new_token_ids)

        engine.step_listeners.append(note)
        for _ in random_run(engine, draw):
            pass
        return updates

    assert tokens(True) == tokens(False)


def test_a_recorder_keeps_no_engine_alive() -> None:
    engine = make_engine()
    recorder = trace.Recorder(engine)
    engine.add_request("A", [5, 6, 7], params())
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()
    assert recorder.now().number == len(recorder.steps)
    alive = weakref.ref(engine)
    del engine
    gc.collect()
    assert alive() is None
    assert "10 tokens" not in repr(recorder.steps)
    assert recorder.play().to_html().startswith("<!DOCTYPE html>")


def test_a_frame_holds_no_tensor() -> None:
    """All that a recorder reaches is plain Python, and the tokenizer."""
    with LLM(num_kv_blocks=16, block_size=4) as llm:
        recorder = trace.Recorder(llm)
        llm.generate("Once upon", SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    import torch

    seen: set[int] = set()
    todo: list[Any] = [vars(frame) for frame in recorder.steps]
    while todo:
        value = todo.pop()
        if id(value) in seen or value is recorder._tokens.tokenizer:
            continue
        seen.add(id(value))
        assert not isinstance(value, (torch.Tensor, LLMEngine, torch.nn.Module))
        if not isinstance(value, type):
            todo += gc.get_referents(value)


def test_close_and_with_end_the_recording() -> None:
    engine = make_engine()
    with trace.Recorder(engine) as recorder:
        engine.add_request("A", [5, 6, 7], params())
        engine.step()
    engine.step()
    assert len(recorder.steps) == 1
    recorder.close()  # a second time: nothing happens
    assert engine.step_listeners == []
    with pytest.raises(TypeError, match="an LLMEngine is needed, got 5"):
        trace.Recorder(5)


def test_the_last_steps_only() -> None:
    engine = make_engine()
    recorder = trace.Recorder(engine, last=3)
    engine.add_request("A", [5, 6, 7], params())
    while engine.has_unfinished_requests():
        engine.step()
    assert [frame.number for frame in recorder.steps] == [8, 9, 10]
    assert recorder.step(9).number == 9
    with pytest.raises(ValueError, match="step 2 was not recorded; recorded steps: 8 to 10"):
        recorder.step(2)
    for number in range(20):
        engine.add_request(str(number), [number], params(max_tokens=1))
        engine.step()
    assert len(recorder._tokens.ids) < 7, "tokens of sequences that no kept step has"


def test_a_large_cache_costs_little() -> None:
    """Of a cache with many blocks, frames hold the block tables and nothing that grows with it."""
    engine = make_engine(num_kv_blocks=5000)
    recorder = trace.Recorder(engine)
    engine.add_request("A", list(range(9)), params(max_tokens=4))
    engine.step()
    frame = recorder.steps[-1]
    assert not frame.contents and not frame.free_queue and not frame.ref_counts
    assert frame.num_free == 4997
    assert list(frame.blocks) == [0, 1, 2]
    assert "A" in recorder.play().to_html()


# -- in the middle of a step --


def test_what_is_scheduled_is_not_yet_written() -> None:
    """The four lines of a step by hand, on the real runner."""
    with LLM(num_kv_blocks=16, block_size=4, device="cpu") as llm:
        engine = llm.engine
        llm.add_request("A", [5, 6, 7, 8, 9], SamplingParams(temperature=0, max_tokens=4))
        for _ in range(3):  # the prompt, and two decodes
            step = engine.scheduler.schedule()
            assert states_of(snapshot(engine, step), "A") == Counter({COMING: new_tokens(step)})
            output = engine.executor.execute_model(step)
            assert states_of(snapshot(engine, step), "A") == Counter({NEW: new_tokens(step)})
            updates = engine.scheduler.update_from_output(step, output)
            engine.output_processor.process_outputs(updates)
            assert states_of(snapshot(engine, step), "A") == Counter({NEW: new_tokens(step)})
            assert states_of(snapshot(engine), "A") == Counter()


def new_tokens(step: Any) -> int:
    return sum(item.num_scheduled_tokens for item in step.scheduled)


def states_of(frame: Frame, name: str) -> Counter[str]:
    """How many slots of a sequence are new or coming."""
    view = frame.view(name)
    assert view is not None
    slots = [slot for block_id in view.table for slot in frame.blocks[block_id].slots]
    return Counter(slot.state for slot in slots if slot.state in (NEW, COMING))


# -- the state machines --


def test_every_transition_is_in_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random runs, in all modes, with failing steps, errors and aborts: what happens is allowed,
    and all that is allowed for unfinished sequences happens."""
    seen: set[tuple[SequenceStatus, SequenceStatus]] = set()
    seen_blocks: set[tuple[str, BlockState, BlockState]] = set()

    def note(seq: Sequence, name: str, value: Any) -> None:
        before = getattr(seq, name, None) if name == "status" else None
        object.__setattr__(seq, name, value)
        if before is not None and before is not value:
            seen.add((before, value))

    def noting(method: Any) -> Any:
        def call(pool: BlockPool, *arguments: Any) -> Any:
            before = [pool.get_state(block_id) for block_id in range(pool.num_blocks)]
            result = method(pool, *arguments)
            after = [pool.get_state(block_id) for block_id in range(pool.num_blocks)]
            kind = "CPU" if pool.held is BlockState.SWAPPED else "KV"
            changes = zip(before, after, strict=True)
            seen_blocks.update((kind, a, b) for a, b in changes if a is not b)
            return result

        return call

    monkeypatch.setattr(Sequence, "__setattr__", note)
    for name in ("allocate", "share", "free"):
        monkeypatch.setattr(BlockPool, name, noting(getattr(BlockPool, name)))
    for seed in range(80):
        draw = random.Random(seed)
        options = random_options(draw)
        if seed % 4 == 0:
            options |= {"num_kv_blocks": 8, "preemption_mode": "swap"}
        engine = make_engine(**options)
        if seed % 3 == 0:
            fail_in_executor(engine, "A", num_output_tokens=2)
        for _ in random_run(engine, draw, fails=seed % 2 == 0):
            pass
    assert seen <= states.allowed_sequence_changes()
    assert {(change.source, change.target) for change in states.SEQUENCE_CHANGES} <= seen
    assert {target for _, target in seen} == set(SequenceStatus)
    assert seen_blocks == states.allowed_block_changes()


def test_the_picture_has_every_member_of_the_enums() -> None:
    drawn = {status for pair in states.allowed_sequence_changes() for status in pair}
    assert drawn == set(SequenceStatus)
    blocks = {state for _, *pair in states.allowed_block_changes() for state in pair}
    assert blocks == set(BlockState)
    owners = {"Scheduler", "BlockPool", "BlockManager"}
    for change in (*states.SEQUENCE_CHANGES, *states.BLOCK_CHANGES):
        owner, *names = re.findall(r"\w+", change.code)
        assert owner in owners
        modules = ("scheduler", "block_manager")
        classes = [
            getattr(__import__(f"nanoserve.{m}", fromlist=[m]), owner, None) for m in modules
        ]
        assert all(any(hasattr(c, name) for c in classes) for name in names), change.code


# -- a recorded story, shared by the tests of pictures --


@pytest.fixture(scope="module")
def story() -> Iterator[tuple[LLM, trace.Recorder, list[Any]]]:
    """Three requests on the demo model, in a cache that is too small for them."""
    with LLM(num_kv_blocks=14, block_size=4, max_num_batched_tokens=12, max_num_seqs=3) as llm:
        recorder, outputs = trace.Recorder(llm), []
        greedy = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
        llm.add_request("A", "Once upon a time there was", greedy)
        llm.add_request("B", "Once upon a time there was", greedy)
        llm.step()
        llm.add_request("C", '<b>&"One"</b> day a clever fox met the bear', greedy)
        while llm.has_unfinished_requests():
            outputs += [output for output in llm.step() if output.finished]
        assert any(e.kind == "preempted" for f in recorder.steps for e in f.events)
        yield llm, recorder, outputs


# -- the trace for Chrome and Perfetto --

REQUIRED = {"X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}}
REQUIRED |= {"C": {"name", "ph", "ts", "pid", "args"}, "M": {"name", "ph", "pid", "tid", "args"}}


def check_trace(text: str) -> list[dict[str, Any]]:
    """As the Trace Event Format wants it: keys, types, and spans of one track one after another."""
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    for event in events:
        assert event.keys() >= REQUIRED[event["ph"]]
        assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and event["args"]["name"]
    spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            track = spans.setdefault((event["pid"], event["tid"]), [])
            track.append((event["ts"], event["ts"] + event["dur"]))
    for track in spans.values():
        for (_, end), (start, _) in zip(sorted(track), sorted(track)[1:], strict=False):
            assert start >= end - 0.01
    return events


def test_the_trace_holds_the_run(story: Any, tmp_path: Path) -> None:
    _, recorder, _ = story
    recorder.save(tmp_path / "run.json")
    events = check_trace((tmp_path / "run.json").read_text("utf-8"))
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {"steps", "A", "B", "C"}
    steps = len(recorder.steps)
    for part in ("schedule", "execute", "update"):
        assert sum(event["name"] == part for event in events) == steps
    counters = [event for event in events if event["name"] == "KV blocks"]
    assert [event["args"]["in use"] for event in counters] == [
        frame.num_blocks - frame.num_free for frame in recorder.steps
    ]
    assert any(event["name"] == "waits" for event in events)


@given(st.integers(0, 10**6))
@settings(max_examples=20)
def test_every_run_makes_a_valid_trace(seed: int) -> None:
    draw = random.Random(seed)
    engine = make_engine(**random_options(draw))
    recorder = trace.Recorder(engine)
    for _ in random_run(engine, draw, fails=True):
        pass
    check_trace(chrome.to_json(recorder.steps))


# -- the player and the animation --


class Page(HTMLParser):
    """Tags with their attributes, texts of SVG; raises if a tag is not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_player_holds_all_steps(story: Any, tmp_path: Path) -> None:
    _, recorder, _ = story
    recorder.save(tmp_path / "run.html", title="A run")
    html = (tmp_path / "run.html").read_text("utf-8")
    page = Page(html)
    count = len(recorder.steps)
    groups = [attrs for tag, attrs in page.tags if tag == "g"]
    spans = [(int(g["data-from"] or 0), int(g["data-to"] or 0)) for g in groups]
    assert {first for first, _ in spans} | {end for _, end in spans} == set(range(count + 1))
    for index, frame in enumerate(recorder.steps):
        shown = "".join(
            re.findall(r'data-from="(\d+)" data-to="(\d+)">(.*?)</g>', html)[i][2]
            for i, (first, end) in enumerate(spans)
            if first <= index < end
        )
        assert f">Step {frame.number}<" in shown
    assert re.search(rf"count = {count}, first = 1,", html)
    assert any(a.get("type") == "range" for tag, a in page.tags if tag == "input")
    assert "&lt;b&gt;&amp;&quot;One&quot;&lt;/b&gt;" in html and "<b>&" not in html
    assert not re.search(r'(src|href)="|url\(|@import|https?://(?!www\.w3\.org/2000/svg)', html)


def test_a_notebook_shows_the_player_in_a_frame(story: Any) -> None:
    """So two of them do not disturb each other, and without a script one line of text stays."""
    _, recorder, _ = story
    player = recorder.play()
    shown = player._repr_html_()
    page = Page(shown)
    [frame] = [attrs for tag, attrs in page.tags if tag == "iframe"]
    assert frame["srcdoc"] == player.to_html()
    assert {tag for tag, _ in page.tags} == {"p", "iframe"}
    assert f"A player with {len(recorder.steps)} steps" in repr(player)
    assert repr(player) in unescape(shown)


def test_the_animation_is_valid_and_in_both_languages(story: Any, tmp_path: Path) -> None:
    _, recorder, _ = story
    for language, word in (("en", "preempted: no free block"), ("zh-CN", "被抢占：没有空闲 block")):
        recorder.save(tmp_path / "run.svg", language=language)
        picture = (tmp_path / "run.svg").read_text("utf-8")
        root = ET.fromstring(picture)
        assert word in ["".join(element.itertext()) for element in root.iter()]
        assert "prefers-reduced-motion" in picture and "prefers-color-scheme:dark" in picture
    assert movie.WORDS["en"].keys() == movie.WORDS["zh-CN"].keys()
    with pytest.raises(ValueError, match=r"run.png: a run is saved as .html, .svg or .json"):
        recorder.save(tmp_path / "run.png")
    engine = make_engine()
    with pytest.raises(ValueError, match="no step was recorded"):
        trace.Recorder(engine).play()


@given(st.integers(0, 10**6))
@settings(max_examples=20)
def test_every_run_can_be_played(seed: int) -> None:
    draw = random.Random(seed)
    engine = make_engine(**random_options(draw))
    recorder = trace.Recorder(engine)
    for _ in random_run(engine, draw, fails=True):
        pass
    if recorder.steps:
        Page(recorder.play().to_html())
        ET.fromstring(movie.to_svg(recorder.steps))


@pytest.mark.parametrize("num_blocks", [150, 151, 200, 300])
def test_of_a_large_cache_the_blocks_that_had_an_owner_are_drawn(num_blocks: int) -> None:
    """`first` pushes the blocks in use to high ids; a cache of 300 has no list of its free ones."""
    engine = make_engine(num_kv_blocks=num_blocks, max_num_seqs=80, max_num_batched_tokens=1024)
    for number in range(75):  # 2 full blocks each: 150 that keep their content
        prompt = [number % 30, number // 30] * 4
        engine.add_request(f"first {number}", prompt, params(max_tokens=1))
    while engine.has_unfinished_requests():
        engine.step()
    recorder = trace.Recorder(engine)
    engine.add_request("A", [31] * 14, params(max_tokens=3, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    used = {i for f in recorder.steps for i, b in f.blocks_in_step.items() if b.owners}
    assert max(used) >= 150 or num_blocks == 150
    ids = movie.Painter(recorder.steps).block_ids
    assert used <= set(ids) and ids == sorted(ids)
    picture = movie.to_svg(recorder.steps)
    remark = f"({len(ids)} of {num_blocks} blocks are drawn)"
    assert (remark in picture) is (len(ids) < num_blocks)
    assert len(ids) == (min(num_blocks, 150) if num_blocks <= 256 else len(used))


def test_names_and_texts_at_the_borders(tmp_path: Path) -> None:
    """A one-token prompt is no decode; a name used again; names that are no XML; dots in a name."""
    engine = make_engine()
    recorder = trace.Recorder(engine)
    engine.add_request("chat.1", [5], params(max_tokens=9))
    engine.step()
    [request] = movie.scenes_of(recorder.steps, {"chat.1": "Why?"})[0].requests
    assert request.question == "Why?"
    assert movie.label_of(request, movie.WORDS["en"]) == ("prefill: 1 token", True)
    engine.abort_request("chat.1")
    engine.add_request("chat.1", [1, 2, 3, 4], params())
    engine.add_request("\x1b\ud800</script><b>", [1], params())
    engine.step()
    view = recorder.steps[-1].view("chat.1")
    assert view is not None and view.num_scheduled == 4
    for suffix in ("svg", "html", "json"):
        recorder.save(tmp_path / f"run.{suffix}", title="@steps@ \x00")
    ET.parse(tmp_path / "run.svg")
    page = (tmp_path / "run.html").read_text("utf-8")
    Page(page)
    assert page.count("@steps@") == 2 and "</script><b>" not in page


def test_what_stays_the_same_is_kept_once() -> None:
    """Of three frames of one sequence, the free queue and the like change when it gets a block."""
    engine = make_engine(num_kv_blocks=16)  # of 4 tokens
    recorder = trace.Recorder(engine)
    engine.add_request("A", [5] * 4, params(max_tokens=9, ignore_eos=True))
    for _ in range(3):
        engine.step()
    _, gets_a_block, same = recorder.steps
    assert gets_a_block.free_queue and same.free_queue is gets_a_block.free_queue
    assert same.contents is gets_a_block.contents and same.ref_counts is gets_a_block.ref_counts


@pytest.mark.parametrize(("num_blocks", "has_queue"), [(256, True), (257, False)])
def test_the_free_queue_of_a_large_cache_is_not_recorded(num_blocks: int, has_queue: bool) -> None:
    engine = make_engine(num_kv_blocks=num_blocks)
    recorder = trace.Recorder(engine)
    engine.add_request("A", [5, 6, 7], params(max_tokens=2))
    engine.step()
    [frame] = recorder.steps
    assert frame.num_free == num_blocks - 1
    assert [bool(frame.free_queue), bool(frame.contents), bool(frame.ref_counts)] == [has_queue] * 3
    assert frame.blocks[frame.sequences[0].table[0]].owners == ("A",)


def test_a_recorder_may_come_in_the_middle() -> None:
    """The first frame knows the block table of a sequence that ends in it, and who has run."""
    engine = make_engine()
    engine.add_request("A", list(range(14)), params(max_tokens=6, ignore_eos=True))
    for _ in range(5):
        engine.step()
    recorder = trace.Recorder(engine)
    engine.step()
    [frame] = recorder.steps
    [view] = frame.scheduled
    assert view.is_over and view.table == (0, 1, 2, 3, 4)
    assert sum(len(block.slots) for block in frame.blocks_in_step.values() if block.owners) == 19


# -- pictures with matplotlib --


@pytest.fixture
def plt() -> Iterator[Any]:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.close("all")
    yield plt
    plt.close("all")


def drawn(plt: Any) -> list[str]:
    """All texts of the one open picture, which is drawn. None is smaller than 7 points, and none
    leaves the picture."""
    import matplotlib.text

    [number] = plt.get_fignums()
    figure = plt.figure(number)
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    hidden = labels_out_of_range(figure)
    texts = []
    for text in figure.findobj(matplotlib.text.Text):
        if text.get_text().strip() and text.get_visible() and text not in hidden:
            assert text.get_fontsize() >= style.SMALLEST, text.get_text()
            box = text.get_window_extent()
            inside = box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1
            assert inside, f"cut: {text.get_text()!r}"
            texts.append(text.get_text())
    plt.close("all")
    return texts


def labels_out_of_range(figure: Any) -> list[Any]:
    """The labels of ticks that are beyond the axes' limits; matplotlib does not draw them."""
    found = []
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            off = [tick for tick in ticks if not low <= tick.get_loc() <= high or not axes.axison]
            found += [label for tick in off for label in (tick.label1, tick.label2)]
    return found


def test_the_calls_of_a_request(plt: Any) -> None:
    """Who was called by whom, in which thread; afterwards nothing is watched."""
    engine = make_engine()
    before = [vars(Scheduler)["schedule"], vars(LLMEngine)["run_step"]]
    names = [
        *("engine.LLMEngine.run_step", "engine.LLMEngine.add_request"),
        *("scheduler.Scheduler.schedule", "block_manager.BlockManager.append"),
        *("scheduler.Scheduler.update_from_output", "extras.async_llm.AsyncLLM.add_request"),
    ]
    with trace.watch(names) as calls:
        engine.add_request("A", [1, 2, 3], params(max_tokens=2))
        thread = threading.Thread(target=engine.step, name="another thread")
        thread.start()
        thread.join()
        engine.step()
    assert [vars(Scheduler)["schedule"], vars(LLMEngine)["run_step"]] == before
    first, *steps = calls
    assert (first.name, first.depth, first.thread) == ("LLMEngine.add_request", 0, "MainThread")
    each = [("LLMEngine.run_step", 0), ("Scheduler.schedule", 1), ("BlockManager.append", 2)]
    each += [("Scheduler.update_from_output", 1)]
    assert [(call.name, call.depth) for call in steps] == each * 2
    assert [call.thread for call in steps] == ["another thread"] * 4 + ["MainThread"] * 4
    assert sorted(calls, key=lambda call: call.moment) == calls
    again = trace.Visit(steps[-1].moment, "MainThread", "Scheduler.update_from_output", 1)
    trace.call_chain("one request", [*calls, again])
    texts = drawn(plt)
    assert {"MainThread", "another thread", "ms", "0.0"} <= set(texts)
    assert "Scheduler.update_from_output  × 2" in texts
    trace.call_chain("nothing", [])
    assert drawn(plt) == ["nothing", "ms"]
    with pytest.raises(AttributeError), trace.watch([*names, "engine.LLMEngine.run_steps"]):
        pass
    with pytest.raises(ZeroDivisionError), trace.watch():
        raise ZeroDivisionError
    assert not hasattr(LLMEngine.run_step, "__wrapped__")


def test_block_map(story: Any, plt: Any) -> None:
    llm, recorder, _ = story
    recorder.block_map("After step 3", step=3)
    texts = drawn(plt)
    frame = recorder.step(3)
    assert "After step 3" in texts and "KV cache: 14 blocks of 4 tokens" in texts
    assert {f"block {i}" for i in range(14)} <= set(texts)
    assert "written in this step" in texts and "scheduled, not written yet" not in texts
    assert any(
        text.startswith("A") and f"refs {frame.blocks[0].ref_count}" in text for text in texts
    )
    trace.block_map(llm, "Now", mark={3: "look here"}, weights={3: [0, 0.5, 0, 0.25]})
    texts = drawn(plt)
    assert {"look here", "no sequence, no block table", "50%", "25%"} <= set(texts)
    assert "weight (largest 0.50)   0" in texts
    recorder.block_map()
    assert "free queue (14 blocks), next to be allocated first:" in drawn(plt)


def test_a_scheduled_step_is_hatched(plt: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(num_kv_blocks=12, block_size=4, device="cpu") as llm:
        engine = llm.engine
        llm.add_request("A", [5, 6, 7, 8, 9], SamplingParams(temperature=0, max_tokens=4))
        step = engine.scheduler.schedule()
        trace.block_map(engine, "After schedule", step)
        texts = drawn(plt)
        assert "scheduled, not written yet" in texts and "written in this step" not in texts
        assert "RUNNING, 5 of 5 tokens scheduled" in texts
        trace.decision(engine, step)
        assert "     0        A         0          5  0 1" in capsys.readouterr().out
        rows = engine.executor.runner.update_batch(step)
        inputs = engine.executor.runner.prepare_inputs(step.scheduled, rows)
        trace.step_tensors(engine, "One step", step, inputs)
        texts = drawn(plt)
        assert {"slot_mapping", "input_ids", "positions", "query_start_loc", "seq_lens"} <= set(
            texts
        )
        assert "slot = block_table[position // 4] × 4 + position % 4" in texts
        assert Counter(texts)["A"] >= 2


def test_timeline_and_timelines(story: Any, plt: Any) -> None:
    _, recorder, _ = story
    recorder.timeline("Who ran when")
    texts = drawn(plt)
    assert {"Who ran when", "A", "B", "C", "computed again", "token budget 12", "✕", "…"} <= set(
        texts
    )
    trace.timelines({"one": recorder, "two": recorder.steps[:5]}, capacity=3)
    texts = drawn(plt)
    busy = sum(len(frame.scheduled) for frame in recorder.steps)
    total = 3 * len(recorder.steps)
    [summary] = [text for text in texts if text.startswith(f"{len(recorder.steps)} steps")]
    assert f"; {total - busy} of {total} places idle" in summary
    assert {"one", "two", "place 1", "place 3", "step"} <= set(texts)


@pytest.mark.parametrize("more", [0, 1, pytest.param(140, marks=pytest.mark.slow)])
def test_a_timeline_has_a_limit_of_lanes(more: int, plt: Any) -> None:
    engine = make_engine(num_kv_blocks=256, max_num_seqs=200, max_num_batched_tokens=256)
    recorder = trace.Recorder(engine)
    for number in range(steps.MOST_LANES + more):
        engine.add_request(f"r{number}", [5], params(max_tokens=2))
    while engine.has_unfinished_requests():
        engine.step()
    recorder.timeline()
    [height] = {plt.figure(number).get_figheight() for number in plt.get_fignums()}
    texts = drawn(plt)
    assert height < 26  # inches
    assert f"r{steps.MOST_LANES - 1}" in texts and f"r{steps.MOST_LANES}" not in texts
    assert [text for text in texts if text.endswith("more")] == [f"and {more} more"] * bool(more)


def test_times(story: Any, plt: Any) -> None:
    _, recorder, outputs = story
    trace.step_times("Parts", recorder)
    texts = drawn(plt)
    assert any(re.fullmatch(r"execute \(\d+% of the run\)", text) for text in texts)
    trace.gantt("Requests", outputs)
    texts = drawn(plt)
    assert {"A", "B", "C", "waits"} <= set(texts)
    assert sum("first token after" in text for text in texts) == 3


def test_a_part_of_a_step_has_one_colour_in_all_pictures(story: Any, plt: Any) -> None:
    from matplotlib.colors import to_hex

    def colours() -> dict[str, str]:
        handles, labels = plt.gca().get_legend_handles_labels()
        faces = [to_hex(handle[0].get_facecolor()).upper() for handle in handles]
        drawn(plt)
        return dict(zip(labels, faces, strict=True))

    _, recorder, _ = story
    trace.step_times("Parts", recorder)
    of_run = colours()
    trace.shares("Parts", {"a step": dict.fromkeys(timer.PARTS, 1.0)})
    of_shares = colours()
    assert list(of_run) == ["schedule", "execute", "update"]
    assert list(of_shares) == ["schedule", "prepare", "model", "sample", "update"]
    assert of_run | of_shares == style.STEP_COLOURS
    assert {part: of_shares[part] for part in of_run if part in of_shares} == {
        part: face for part, face in of_run.items() if part != "execute"
    }


def test_charts(plt: Any) -> None:
    import torch

    probabilities = {"all": torch.tensor([0.5, 0.3, 0.2]), "top_k=1": [1.0, 0.0, 0.0]}
    trace.distribution("Filters", probabilities, [" a", "b", "$c$"])
    texts = drawn(plt)
    assert {"␣a", "b", "3 tokens are possible", "1 token is possible"} <= set(texts)
    assert Counter(texts)["✕"] == 2
    trace.bars("Memory", {"with pages": 12.5, "reserved": 4096}, "KiB")
    assert {"12.5 KiB", "4,096 KiB", "with pages"} <= set(drawn(plt))
    trace.lines("Speed", {"a": [(1, 2), (2, 4)], "b": [(1, 1), (2, 3)]}, "batch", "tok/s", log=True)
    assert {"a", "b", "batch", "tok/s"} <= set(drawn(plt))
    places = {"left": [(0, 1), (2, 3), (4, 4)], "right": torch.eye(3)[:, :2]}
    trace.points("Vectors", places, ["cat", "dog", "cat"])
    left, right = plt.gcf().axes
    assert [len(group.get_offsets()) for group in left.collections] == [2, 1]
    assert right.collections[0].get_offsets().tolist() == [[1, 0], [0, 0]]
    assert {text.get_text() for text in plt.gcf().legends[0].get_texts()} == {"cat", "dog"}


def test_state_machines(plt: Any) -> None:
    trace.sequence_states("A sequence")
    assert {status.name for status in SequenceStatus} <= set(drawn(plt))
    trace.block_states("A block")
    assert {state.name for state in BlockState} <= set(drawn(plt))


def test_colours() -> None:
    assert [style.colour(name) for name in "ABCDEF"] == list(style.COLOURS)
    greys = {style.colour(name) for name in "XYZ"}
    assert all(re.fullmatch(r"#(..)\1\1", grey) for grey in greys) and len(greys) == 3
    branches = {style.colour(name) for name in ("A", "A.1", "A.2", "A.3")}
    assert len(branches) == 4 and not branches & {style.colour(name) for name in "BCDEF"}
    light_and_dark = ["#fff", "#111", "#111", "#111", "#111", "#fff"]
    assert [style.on_colour(name) for name in "ABCDEF"] == light_and_dark


# -- an extra --


def test_matplotlib_is_imported_by_functions_only() -> None:
    """Without it, a run can be recorded, played and saved; pictures say how to install it."""
    for file in Path(trace.__file__).parent.glob("*.py"):
        for node in ast.parse(file.read_text("utf-8")).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "matplotlib"], file.name
    code = """
import sys
sys.modules["matplotlib"] = None
from nanoserve import LLM
from nanoserve.extras import trace
with LLM(num_kv_blocks=16) as llm:
    recorder = trace.Recorder(llm)
    llm.generate("Once", use_tqdm=False)
assert recorder.play().to_html()
try:
    trace.bars("title", {"a": 1})
except ImportError as error:
    print(error)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 'pictures need matplotlib: pip install -e ".[notebooks]"\n'


def test_tab_completion_knows_names_that_were_not_used() -> None:
    """In a new interpreter; a module is still imported when a name of it is used."""
    code = """
import sys
from nanoserve.extras import trace
print({*trace.__all__, "HOMES"} <= set(dir(trace)), "nanoserve.extras.trace.beams" in sys.modules)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "True False\n", done.stderr


def test_the_example_of_the_package_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own run in three lines."""
    assert trace.__doc__
    example = "\n".join(line for line in trace.__doc__.splitlines()[:9] if line.startswith("    "))
    assert "save(" in example
    monkeypatch.chdir(tmp_path)
    exec(textwrap.dedent(example), {})
    assert (tmp_path / "run.html").read_text("utf-8").startswith("<!DOCTYPE html>")


def test_timers_and_calls_give_back_what_they_found() -> None:
    with LLM(num_kv_blocks=16, block_size=4, device="cpu") as llm:
        first, second = trace.StepTimer(llm), trace.StepTimer(llm)
        second.close()
        with trace.calls(llm):
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), use_tqdm=False)
        first.reset()
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), use_tqdm=False)
        assert first.num_steps == 2 and min(first.seconds.values()) > 0
        first.close()
        assert not {"schedule", "update_from_output"} & vars(llm.engine.scheduler).keys()


def test_the_timer_gives_the_methods_back() -> None:
    with LLM(num_kv_blocks=16, block_size=4, device="cpu") as llm:
        runner = llm.engine.executor.runner
        timer = trace.StepTimer(llm)
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        parts = timer.milliseconds()
        assert list(parts) == ["schedule", "prepare", "model", "sample", "update"]
        assert min(parts.values()) > 0 and timer.num_steps == 3
        timer.close()
        assert "forward" not in vars(runner) and "schedule" not in vars(llm.engine.scheduler)
