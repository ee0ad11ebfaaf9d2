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
from engines import make_engine, params
from hypothesis import given
from hypothesis import strategies as st
from test_architecture import CONTROL_PLANE, CORE, CORE_FOLDERS, DATA_PLANE, FILES, OUTER_FOLDERS

from nanoserve.extras.trace import movie, svg
from nanoserve.extras.trace.frames import Frame, chunks_of
from nanoserve.extras.trace.recorder import Recorder

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "notebooks" / "pictures"
sys.path.insert(0, str(PICTURES))
make, hero, architecture, benchmark, scale = map(
    import_module, ("make", "hero", "architecture", "benchmark", "scale")
)

NAMES = ("hero", "architecture", "benchmark", "scale", "replicas")
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
        made[f"scale{suffix}.svg"] = scale.draw_scale(language)
        made[f"replicas{suffix}.svg"] = scale.draw_replicas(language)
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
    for module in (hero, architecture, benchmark, scale, movie):
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
    assert (
        "no picture is called zero; there are hero, architecture, benchmark, scale, replicas"
        in (capsys.readouterr().err)
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
    """The questions, and all that a user or a model wrote."""
    engine = make_engine()
    recorder = Recorder(engine)
    engine.add_request("<A&>", [5, 6], params(max_tokens=2))
    while engine.has_unfinished_requests():
        engine.step()
    picture = movie.to_svg(recorder.steps, "<title>", {"<A&>": '<b>&"quoted"</b>'})
    assert {'<b>&"quoted"</b>', "<A&>"} <= set(texts_of(picture))


# -- the run --


def is_preempting(frame: Frame) -> bool:
    return any(event.kind == "preempted" for event in frame.events)


def test_a_picture_without_the_story_is_refused(
    story: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hero.missing_in(story) == []
    first = next(index for index, frame in enumerate(story) if is_preempting(frame))
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
    [back] = [event for frame in story for event in frame.events if event.kind == "back"]
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
        [number] = [frame.number for frame in story if is_preempting(frame)]
        words = movie.WORDS[language]
        assert {words["step"].format(number), words["preempted"]} <= still


def test_the_budget_is_kept_in_every_frame(story: list[Any]) -> None:
    for number, frame in enumerate(story, start=1):
        assert frame.number == number
        assert 0 < frame.num_scheduled <= frame.budget


def test_chunks_are_numbered_when_their_prompt_is_done(story: list[Any]) -> None:
    """Chunks of a request count up to their total, over consecutive steps."""
    numbered = chunks_of(story)
    for seq_id in {seq_id for _, seq_id in numbered}:
        steps = sorted(step for step, other in numbered if other == seq_id)
        for count, step in enumerate(steps, start=1):
            assert numbered[step, seq_id] == (count, len(steps))
            assert step == steps[0] + count - 1


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
