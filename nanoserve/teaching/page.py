"""The page of moving pictures: five runs of the engine that one can step through in a browser.

    python -m nanoserve.teaching.page                    writes notebooks/pictures/index.html

Every frame is block_map's picture of one recorded step; nothing is drawn by hand. Most shapes stand
in many frames, so the page holds each shape once, and a frame is a list of numbers:

    shapes  ["<rect .../>", "<text ...>", ...]       frame 3  [0, 1, 17, 18, 204, ...]

The page is one file, and it loads nothing. Its text (English and Chinese) and its player, in plain
JavaScript, are player.html.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanoserve.block_manager import BlockManager
from nanoserve.llm import LLM
from nanoserve.teaching.lesson import serve, small_llm
from nanoserve.teaching.pictures import Picture, block_map, colour_of, drafts_of, timeline
from nanoserve.teaching.recorder import Frame, View

TEMPLATE = Path(__file__).parent / "player.html"
PAGE = Path(__file__).parent.parent.parent / "notebooks" / "pictures" / "index.html"
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2}


class StalePool(BlockManager):
    """Forgets to forget a hash, as in notebook 03."""

    def reset(self) -> None:
        super().reset()
        self.pool.uncache = lambda block_id: None  # type: ignore[method-assign]


def hit() -> LLM:
    llm = small_llm(num_blocks=20)
    serve(llm, {"A": (10, 1), "B": (10, 4), "C": (10, 7)})
    return llm


def chunks() -> LLM:
    llm = small_llm(num_blocks=25, max_num_batched_tokens=10)
    serve(llm, {"A": 24, "B": (24, 2), "D": (10, 6)})
    return llm


def preemption() -> LLM:
    llm = small_llm(num_blocks=13, enable_prefix_caching=False)
    serve(llm, {"A": 24, "B": 24})
    return llm


def guesses() -> LLM:
    llm = small_llm(num_blocks=25, speculative_config=SPECULATIVE)
    serve(llm, {"X: Repeat after me: the red fox and the blue bird": 24, "D": (24, 3)})
    return llm


def stale() -> LLM:
    llm = small_llm(num_blocks=11, block_manager_cls=StalePool)
    for name in ("C", "D", "C2"):
        serve(llm, {name: 18})
    return llm


# Name in the address of the page -> run. What is said of each stands in player.html.
RUNS: dict[str, Callable[[], LLM]] = {
    "prefix-hit": hit,
    "chunked-prefill": chunks,
    "preemption": preemption,
    "drafts": guesses,
    "stale-hash": stale,
}
Event = tuple[str, dict[str, Any]]  # kind, values; the sentences stand in player.html


def events(frame: Frame, before: Frame | None, seen: dict[str, int]) -> list[Event]:
    """What is worth a sentence in a step: (kind, values). seen: name -> length of its prompt."""
    found: list[Event] = [("preempted", {"name": name}) for name in frame.preempted]
    ran = {name for name, seq in before.views.items() if seq.num_scheduled} if before else set()
    for name, seq in frame.views.items():
        if seq.num_scheduled:
            found += describe(frame, seq, name in ran, seen)
    return found + [("end", {"name": name}) for name in frame.finished]


def describe(frame: Frame, seq: View, ran: bool, seen: dict[str, int]) -> list[Event]:
    """What one scheduled sequence does."""
    name, new = seq.name, seq.num_scheduled
    values = {"name": name, "new": new, "old": seq.num_computed - new}
    if name not in seen:
        seen[name] = len(seq.token_ids)
        return [("hit" if values["old"] else "start", values)]
    if guessed := drafts_of(frame, name):
        right = len(frame.sampled[name]) - 1
        return [("drafts", values | {"guessed": len(guessed), "right": right})]
    if seq.num_computed <= seen[name] and new > 1:
        return [("chunk", values)]
    return [("return", values)] if not ran and new > 1 else []


def record_run(run: Callable[[], LLM], number_of: Callable[[str], int]) -> dict[str, Any]:
    """The frames of a run: shapes by number, what happens, and the answers so far."""
    llm = run()
    scheduler: Any = llm.engine.scheduler
    tokenizer: Any = llm.get_tokenizer()
    frames: list[Frame] = scheduler.frames
    room, before = max(len(frame.views) for frame in frames), None
    seen: dict[str, int] = {}
    texts: dict[str, list[int]] = {}
    steps = []
    for frame in frames:
        said, before = events(frame, before, seen), frame
        for name, tokens in frame.sampled.items():
            texts[name] = [*texts.get(name, []), *tokens]
        picture = block_map(llm, "", frame.number, room=room, truth=True)
        steps.append(
            {
                "shapes": numbers(picture, number_of),
                "said": said,
                "answers": {
                    name: tokenizer.decode(token_ids, skip_special_tokens=True)
                    for name, token_ids in texts.items()
                },
            }
        )
    line = timeline(llm, "")
    return {
        "steps": steps,
        "height": picture.height,
        "timeline": numbers(line, number_of),
        "timelineHeight": line.height,
        "cell": min(34.0, 740 / len(frames)),
        "colours": {name: colour_of(name) for name in seen},
    }


def numbers(picture: Picture, number_of: Callable[[str], int]) -> list[int]:
    return [number_of(shape) for shape in picture.shapes[1:]]  # without the title


def make_page() -> str:
    """The whole page."""
    shapes: dict[str, int] = {}
    runs = [
        {"name": name, **record_run(run, lambda shape: shapes.setdefault(shape, len(shapes)))}
        for name, run in RUNS.items()
    ]
    data = json.dumps({"shapes": list(shapes), "runs": runs}, ensure_ascii=False)
    return TEMPLATE.read_text(encoding="utf-8").replace("{DATA}", data.replace("</", "<\\/"))


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
    print(f"{PAGE}: {PAGE.stat().st_size / 1000:.0f} kB")
