"""What a notebook shows: well-formed HTML that says the truth and runs nothing."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser

import pytest
from engines import finish, make_engine, params

from nanoserve import LLM, RequestOutput, SamplingParams
from nanoserve.tools import as_html

VOID = {"br", "hr", "img"}


class Reader(HTMLParser):
    """The text, the tags, and the titles of cells; raises if a tag is not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.titles: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.titles += [value for name, value in attrs if name == "title" and value]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_map_of_the_blocks() -> None:
    """A cell for each block. Its title says who holds it, or that it is free, as check() counts."""
    engine = make_engine(num_kv_blocks=12)
    engine.add_request("ended", [5, 6, 7, 8, 9], params(max_tokens=1))
    finish(engine)
    engine.add_request("a", [5, 6, 7, 8, 1], params(max_tokens=20))
    engine.step()
    engine.add_request("b", [5, 6, 7, 8, 2, 3], params(max_tokens=20))
    engine.step()
    manager = engine.block_manager
    read = Reader(manager._repr_html_() or "")
    assert len(read.titles) == 12
    for block_id, title in enumerate(read.titles):
        held_by = {seq for seq, table in manager.block_tables.items() if block_id in table}
        assert {int(seq) for seq in re.findall(r"sequence (\d+)", title)} == held_by
        assert title.startswith("held by" if held_by else "free")
    assert any(title.count("sequence") == 2 for title in read.titles), "the shared prefix"
    assert "12 blocks of 4 tokens" in read.text
    assert read.tags <= {"div", "span", "b"}


def test_a_large_cache_is_cut() -> None:
    engine = make_engine(num_kv_blocks=as_html.MOST_BLOCKS + 7)
    read = Reader(as_html.blocks(engine.block_manager))
    assert len(read.titles) == as_html.MOST_BLOCKS
    assert "and 7 more blocks" in read.text


def one_output(prompt: object, **fields: object) -> RequestOutput:
    engine = make_engine()
    engine.add_request("<r>", [5, 6], params(max_tokens=3))
    output = finish(engine)["<r>"]
    object.__setattr__(output, "prompt", prompt)
    for name, value in fields.items():
        object.__setattr__(output.outputs[0], name, value)
    return output


def test_an_output_is_shown_and_nothing_in_it_is_run() -> None:
    """Prompt, text and names may hold anything."""
    evil = "<script>alert('x')</script> & <b>"
    output = one_output(evil, text=evil, stop_reason=evil, finish_reason="stop")
    read = Reader(output._repr_html_() or "")
    assert read.text.count(evil) == 3
    assert "<r>" in read.text
    assert read.tags <= {"div", "span", "b"}
    assert "2 prompt tokens, 0 of them cached" in read.text
    assert "(3 tokens, stop: " in read.text


def test_token_ids_and_long_texts() -> None:
    read = Reader(as_html.output(one_output(None, text="a" * 5000 + "z")))
    assert "[token ids]" in read.text
    assert len(read.text) < as_html.MOST_CHARS + 200
    assert "az (3 tokens, length)" in read.text


def test_several_completions(demo_llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=4, seed=1)
    [output] = demo_llm.generate("Once upon a time", params, use_tqdm=False)
    read = Reader(as_html.output(output))
    for completion in output.outputs:
        assert completion.text in read.text


def test_without_tools_the_repr_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """None means: show the repr."""
    for name in ("nanoserve.tools.as_html", "nanoserve.tools"):
        monkeypatch.setitem(sys.modules, name, None)
    assert one_output("a")._repr_html_() is None
    assert make_engine().block_manager._repr_html_() is None
