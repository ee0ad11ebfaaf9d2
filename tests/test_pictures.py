"""The READMEs' pictures: they show a real run, the package as it is, and measured figures only."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_architecture import CONTROL_PLANE, CORE, CORE_FOLDERS, DATA_PLANE, FILES, OUTER_FOLDERS

from nanoserve import LLM, SamplingParams

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "notebooks" / "pictures"
sys.path.insert(0, str(PICTURES))
make, svg, frames = map(import_module, ("make", "svg", "frames"))
hero, architecture, benchmark = map(import_module, ("hero", "architecture", "benchmark"))

NAMES = ("hero", "architecture", "benchmark")
FILE_NAMES = [f"{name}{suffix}.svg" for name in NAMES for suffix in make.LANGUAGES.values()]
each_picture = pytest.mark.parametrize("file", FILE_NAMES)


@pytest.fixture(scope="module")
def story() -> list[Any]:
    return hero.record_story()


@pytest.fixture(scope="module")
def fresh(story: list[Any]) -> dict[str, str]:
    """File name -> what make.py would write now."""
    made = {}
    for language, suffix in make.LANGUAGES.items():
        made[f"hero{suffix}.svg"] = hero.draw(story, language)
        made[f"architecture{suffix}.svg"] = architecture.draw(language)
        made[f"benchmark{suffix}.svg"] = benchmark.draw(language)
    return made


def texts_of(picture: str) -> list[str]:
    return ["".join(e.itertext()) for e in ET.fromstring(picture).iter() if e.tag.endswith("}text")]


# -- every picture --


@each_picture
def test_the_stored_picture_is_what_the_script_draws(file: str, fresh: dict[str, str]) -> None:
    stored = (PICTURES / file).read_text("utf-8")
    assert stored == fresh[file], "run: python notebooks/pictures/make.py"


@each_picture
def test_a_picture_works_in_an_img_element(file: str, fresh: dict[str, str]) -> None:
    """Valid XML, nothing that an <img> would not run or load, colours for light and dark."""
    picture = fresh[file]
    tags = {
        element.tag.removeprefix("{http://www.w3.org/2000/svg}")
        for element in ET.fromstring(picture).iter()
    }
    assert tags <= {"svg", "title", "desc", "style", "rect", "text", "tspan", "path", "g"}
    assert not re.search(r"href|url\(|@import|<!|\bon\w+=", picture)
    assert "@media (prefers-color-scheme:dark)" in picture
    assert len(picture.encode()) < 150_000
    assert picture.startswith("<svg ") and picture.endswith("</svg>\n")


@each_picture
def test_nothing_is_drawn_outside_the_picture(file: str, fresh: dict[str, str]) -> None:
    root = ET.fromstring(fresh[file])
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for shape in root.iter():
        x, y = float(shape.get("x", 0)), float(shape.get("y", 0))
        assert 0 <= x <= x + float(shape.get("width", 0) if shape is not root else 0) <= width
        assert 0 <= y <= height


def test_every_language_has_all_words() -> None:
    for module in (hero, architecture, benchmark):
        assert set(module.WORDS) == set(make.LANGUAGES)
        english, *others = module.WORDS.values()
        assert all(other.keys() == english.keys() for other in others)


def test_make_writes_what_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(make, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["make.py", "architecture"])
    make.main()
    assert {file.name for file in tmp_path.iterdir()} == {
        "architecture.svg",
        "architecture.zh-CN.svg",
    }
    monkeypatch.setattr(sys, "argv", ["make.py", "zero"])
    with pytest.raises(SystemExit):
        make.main()
    assert "no picture is called zero; there are hero, architecture, benchmark" in (
        capsys.readouterr().err
    )


# -- frames in time --


def visible_at(style: str, name: str, percent: float) -> bool:
    """Does CSS show class `name` at this moment of the animation? (step-end: a value holds until
    the next keyframe)"""
    frames = re.search(rf"@keyframes {name}{{((?:[\d.]+%{{visibility:\w+}})+)}}", style)
    assert frames and f".{name}{{animation-name:{name}}}" in style
    is_visible = False
    for moment, value in re.findall(r"([\d.]+)%{visibility:(\w+)}", frames[1]):
        if float(moment) <= percent:
            is_visible = value == "visible"
    return is_visible


@given(
    st.lists(st.sets(st.sampled_from("abcd")), min_size=1, max_size=6),
    st.lists(st.floats(0.5, 4), min_size=6, max_size=6),
    st.data(),
)
def test_each_element_is_visible_in_its_frames(
    shown: list[set[str]], seconds: list[float], data: st.DataObject
) -> None:
    seconds = seconds[: len(shown)]
    film, still = svg.Film(seconds), data.draw(st.integers(0, len(shown) - 1))
    for index, names in enumerate(shown):
        film.add(index, *(f"<{name}/>" for name in sorted(names)))
    style, total = film.style(), sum(seconds)
    for index, names in enumerate(shown):
        middle = 100 * (sum(seconds[:index]) + seconds[index] / 2) / total
        seen: list[str] = []
        without_motion: list[str] = []
        for line in film.body(still):
            classes = re.match(r'<g class="(f|f s) (k\d+-\d+)">', line)
            elements = re.findall(r"<(\w)/>", line)
            if classes is None or visible_at(style, classes[2], middle):
                seen += elements
            if classes is None or classes[1] == "f s":
                without_motion += elements
        assert sorted(seen) == sorted(names)
        assert index != still or sorted(without_motion) == sorted(names)


def test_text_is_escaped() -> None:
    request = frames.RequestView("A", "running", '<b>&"quoted"</b>', 1, ())
    block = frames.BlockView(("A",), (frames.Slot("<", True), frames.Slot("&", False)))
    picture = hero.draw(
        [frames.Frame(1, 16, (request,), (block,)), frames.Frame(2, 16, (request,), (block,))]
    )
    assert '<b>&"quoted"</b>▍' in texts_of(picture)
    assert {"<", "&"} <= set(texts_of(picture))


# -- the run --


def test_a_picture_without_the_story_is_refused(
    story: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hero.missing_in(story) == []
    first = next(
        index
        for index, frame in enumerate(story)
        if any(event.kind == "preempted" for each in frame.requests for event in each.events)
    )
    assert set(hero.missing_in(story[:first])) == {
        "single preemption",
        "return through the prefix cache",
        "right answer everywhere",
    }
    assert "prefix hit of two blocks" in hero.missing_in(story[:1])
    monkeypatch.setattr(hero, "record_run", lambda *arguments: story[:first])
    with pytest.raises(ValueError, match=r"16 tokens, 25 blocks, .*: no single preemption, no ret"):
        hero.record_story()


def test_the_events_are_in_the_picture(story: list[Any], fresh: dict[str, str]) -> None:
    shown = texts_of(fresh["hero.svg"])
    [back] = [e for f in story for r in f.requests for e in r.events if e.kind == "back"]
    assert f"back: {back.count} tokens from the prefix cache" in shown
    assert "preempted: no free block" in shown
    assert any(re.fullmatch(r"chunk 2 of 3: \d+ tokens", text) for text in shown)
    assert "prefix hit: 8 tokens" in shown
    for ask in hero.ASKS:
        assert ask.question in shown
        assert any(ask.answer in text for text in shown)


def test_the_still_picture_is_the_preemption(story: list[Any], fresh: dict[str, str]) -> None:
    """For readers who want no motion: the caption speaks of it."""
    for language, suffix in make.LANGUAGES.items():
        groups = [e for e in ET.fromstring(fresh[f"hero{suffix}.svg"]) if e.tag.endswith("}g")]
        still = {
            "".join(e.itertext())
            for group in groups
            if group.attrib["class"].startswith("f s ")
            for e in group
        }
        [number] = [f.number for f in story if hero.is_preempting(f)]
        words = hero.WORDS[language]
        assert {words["step"].format(number), words["preempted"]} <= still


def test_the_budget_is_kept_in_every_frame(story: list[Any]) -> None:
    for number, frame in enumerate(story, start=1):
        assert frame.number == number
        assert 0 < sum(request.num_scheduled for request in frame.requests) <= frame.budget


@pytest.mark.parametrize("num_blocks", [64, 7])
def test_the_recorder_sees_the_engines_blocks(num_blocks: int) -> None:
    """After every step: which blocks each request has, and their tokens; with forks, copies of
    shared blocks, an aborted request and (in 7 blocks) preemptions."""
    with LLM(num_kv_blocks=num_blocks, block_size=4, max_num_batched_tokens=12) as llm:
        recorder, scheduler = frames.Recorder(llm.engine), llm.engine.scheduler
        tables, pool = llm.engine.block_manager.block_tables, llm.engine.block_manager.pool
        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        fork = SamplingParams(n=2, seed=1, max_tokens=6, ignore_eos=True)
        llm.add_request("A", "Once upon a time there was", greedy)
        llm.add_request("B", "Once upon a time there was", fork)
        llm.add_request("C", "One day a clever fox", greedy)
        while llm.has_unfinished_requests():
            llm.step()
            frame = recorder.frames()[-1]
            views = {request.name: request for request in frame.requests}
            for seq in scheduler.running:
                if frames.name_of(seq) not in views:
                    continue  # forked in this step
                drawn = [i for i, b in enumerate(frame.blocks) if frames.name_of(seq) in b.owners]
                assert drawn == sorted(tables[seq.seq_id])
                slots = [slot.text for i in tables[seq.seq_id] for slot in frame.blocks[i].slots]
                computed = seq.token_ids[: seq.num_computed_tokens]
                assert slots[: len(computed)] == [recorder.token_text(i) for i in computed]
            for block, block_hash in zip(frame.blocks, pool.block_hashes, strict=True):
                is_findable = block_hash is not None
                assert block.owners or bool(block.slots) == is_findable
            if frame.number == 9:
                llm.engine.abort_request("C")
        events = [e.kind for f in recorder.frames() for r in f.requests for e in r.events]
        assert ("preempted" in events) == ("back" in events) == (num_blocks == 7)
        assert {request.state for request in recorder.frames()[-1].requests} == {"finished"}
        assert {"A", "B", "B.1", "C"} == {r.name for r in recorder.frames()[-1].requests}
        assert "fork" in events
        assert any(len(block.owners) > 1 for f in recorder.frames() for block in f.blocks)


def test_chunks_are_numbered_when_their_prompt_is_done(story: list[Any]) -> None:
    """Chunks of a request count up to their total, over consecutive steps."""
    for ask in hero.ASKS:
        chunks = [
            (frame.number, event)
            for frame in story
            for request in frame.requests
            for event in request.events
            if request.name == ask.name and event.kind == "chunk"
        ]
        for start, count in enumerate(chunks, start=1):
            number, event = count
            assert event == frames.Event("chunk", start, len(chunks))
            assert number == chunks[0][0] + start - 1


# -- the package, and the figures --


@pytest.mark.parametrize("language", make.LANGUAGES)
def test_every_module_is_drawn_in_its_plane(language: str) -> None:
    def modules(rows: list[tuple[str, str, str]], others: list[str]) -> set[str]:
        boxes = {name for row in rows for name in row[0].split(", ")}
        return boxes | {name for name in others if architecture.exists(name)}

    flat = {name for name in FILES if "." not in name and name in CORE} - CORE_FOLDERS
    folders = {f"{name}/" for name in CORE_FOLDERS}
    control = modules(architecture.CONTROL, architecture.CONTROL_OTHERS)
    data = modules(architecture.DATA, architecture.DATA_OTHERS)
    assert control == flat & CONTROL_PLANE
    assert data == (flat & DATA_PLANE) | folders | {"models/decoder"}
    assert {name.rstrip("/") for name in architecture.AROUND} == OUTER_FOLDERS
    words = " ".join(texts_of(architecture.draw(language))).replace(",", "").split()
    assert control | data | {"engine", "llm", "SchedulerOutput", "ModelOutput"} <= set(words)


def test_bars_and_figures_are_those_of_the_result() -> None:
    name, result = benchmark.load_result()
    assert json.loads((ROOT / "notebooks" / "results" / name).read_text("utf-8")) == result
    rows = result["suites"]["throughput"]["rows"]
    picture = benchmark.draw()
    shapes = [e for e in ET.fromstring(picture).iter() if e.get("height") == str(benchmark.BAR)]
    widths = sorted(float(shape.attrib["width"]) for shape in shapes)
    speeds = sorted(row["tokens_per_second"] for row in rows)
    assert [w / widths[-1] for w in widths] == pytest.approx(
        [speed / speeds[-1] for speed in speeds], abs=1e-3
    )
    shown = texts_of(picture)
    for row in rows:
        assert f"{1 / row['nanoserve_is']:.2f} ×" in shown
        is_ours = row["engine"] == "nanoserve"
        assert is_ours or f"nanoserve is {row['nanoserve_is']:.2f} × as fast" in shown


def test_without_a_result_there_is_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match="no result of qwen3-29m on a CPU with vLLM"):
        benchmark.draw()
