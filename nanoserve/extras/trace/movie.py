"""A run, step by step, as SVG: an animation that GitHub shows.

Each step is a picture: the tokens of the step, the requests and what the step did to them, and the
blocks of the KV cache with their owners. What stays the same from one step to the next is written
once (svg.py). The animation is made of CSS keyframes; it has colours for light and dark, and a
still picture for readers who want no motion.

Left out: runs with many requests, and large KV caches. The first MOST_REQUESTS requests have a line
each; all are in the blocks. Of more than MOST_BLOCKS blocks, those that had an owner come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from nanoserve.extras.trace.frames import (
    COMING,
    HELD,
    NEW,
    Block,
    Event,
    Frame,
    SequenceView,
    chunks_of,
)
from nanoserve.extras.trace.style import colour, on_colour
from nanoserve.extras.trace.svg import Film, document, element, rect, text, text_width
from nanoserve.sequence import SequenceStatus

WORDS = {
    "en": {
        "title": "nanoserve: {requests} requests share one KV cache, step by step",
        "description": "A real run, step by step: the tokens of each step, the requests, and who "
        "owns which block of the KV cache.",
        "step": "Step {}",
        "budget": "token budget: {} of {}",
        "cache": "KV cache",
        "blocks": "{} blocks of {} tokens, {} in use",
        "drawn": "({} of {} blocks are drawn)",
        "written": "written in this step",
        "free": "free, but still cached",
        "legend": "Top: one square for each token of the step. "
        "In the blocks: ▸ special token, ␣ space, ↵ new line.",
        "hit": "prefix hit: {count} tokens",
        "fork": "fork: shares {count} tokens",
        "copied": "copy-on-write: one block",
        "chunk": "chunk {count} of {total}: {tokens} tokens",
        "preempted": "preempted: no free block",
        "swapped out": "swapped out: {count} blocks",
        "back": "back: {count} tokens from the prefix cache",
        "swapped in": "back: {count} blocks from the CPU",
        "finished": "finished",
        "abort": "aborted",
        "error": "ended with an error",
        "prefill": "prefill: {tokens} tokens",
        "prefill 1": "prefill: 1 token",
        "decode": "decode: 1 token",
        "waiting": "waiting",
        "waits again": "waiting, preempted",
        "more": "and {} more requests",
        "player": "A player with {} steps: move the slider, or press ← and →. (If there is no "
        "slider here: it needs a trusted notebook in Jupyter, Colab or VS Code. Run the cell.)",
    },
    "zh-CN": {
        "title": "nanoserve：{requests} 个请求逐步共享同一个 KV cache",
        "description": "一次真实运行的逐步画面：每一步的 token、各个请求，以及 KV cache "
        "中每个 block 的归属。",
        "step": "第 {} 步",
        "budget": "token 预算：{} / {}",
        "cache": "KV cache",
        "blocks": "{} 个 block，每个 {} 个 token，已用 {} 个",
        "drawn": "（画出 {1} 个 block 中的 {0} 个）",
        "written": "本步写入",
        "free": "空闲，但仍在缓存中",
        "legend": "顶部：每个方格是本步计算的一个 token。block 内：▸ 特殊 token，␣ 空格，↵ 换行。",
        "hit": "前缀命中：{count} 个 token",
        "fork": "分叉：共享 {count} 个 token",
        "copied": "写时复制：一个 block",
        "chunk": "第 {count} / {total} 块：{tokens} 个 token",
        "preempted": "被抢占：没有空闲 block",
        "swapped out": "换出：{count} 个 block",
        "back": "恢复：{count} 个 token 来自前缀缓存",
        "swapped in": "换入：{count} 个 block",
        "finished": "完成",
        "abort": "已中止",
        "error": "因错误结束",
        "prefill": "prefill：{tokens} 个 token",
        "prefill 1": "prefill：1 个 token",
        "decode": "decode：1 个 token",
        "waiting": "等待",
        "waits again": "被抢占，等待中",
        "more": "另有 {} 个请求",
        "player": "共 {} 步的播放器：拖动滑块，或按 ← 和 → 键。（如果这里没有滑块：请在 Jupyter、"
        "Colab 或 VS Code 中打开受信任的 notebook，并运行此单元。）",
    },
}
# These get a pill; the first one is shown.
NOTABLE = ("preempted", "swapped out", "back", "swapped in", "fork", "hit", "copied", "chunk")

SHADES = {HELD: "old", NEW: "new"}  # of slots, as classes of svg.PALETTE
WIDTH, MARGIN = 760, 16
ROW_TOP, ROW = 60, 48  # of the requests
GAP, BLOCK_HEIGHT, OWNER_WIDTH = 7, 29, 19
LEGEND, REMARK = 25, 20  # height of the last line, and of one on blocks that are not drawn
QUICK, SLOW, LAST = 0.9, 2.8, 5.0  # seconds of a frame: nothing new, something to read, the end
MOST_REQUESTS, MOST_BLOCKS = 12, 150
BUDGET_LEFT, BUDGET_CELL, MOST_CELLS = 112, 26.5, 18
MOST_CHARS = 76  # of a question
MOST_ANSWER = 60
SMALLEST = 9.4  # pixels of a letter: 7 points


class RequestView(NamedTuple):
    """One request in one step, as it is drawn."""

    name: str
    question: str
    text: str
    state: str  # "running", "waiting", "preempted" or "finished"
    ending: str  # how it finished: a key of WORDS
    num_scheduled: int
    is_decode: bool
    events: Mapping[str, Event]
    chunk: tuple[int, int] | None


class Scene(NamedTuple):
    """One step, as it is drawn."""

    frame: Frame
    requests: tuple[RequestView, ...]


def scenes_of(frames: Iterable[Frame], questions: Mapping[str, str] | None = None) -> list[Scene]:
    """What is drawn of each step: all requests that have arrived, also those that have ended."""
    frames, scenes = list(frames), []
    chunks, latest = chunks_of(frames), dict[str, RequestView]()
    for frame in frames:
        for view in frame.sequences:
            latest[view.name] = _view_request(frame, view, chunks, questions or {})
        seen = {view.name for view in frame.sequences}
        for name in latest.keys() - seen:
            latest[name] = latest[name]._replace(
                num_scheduled=0, is_decode=False, events={}, chunk=None
            )
        scenes.append(Scene(frame, tuple(latest.values())))
    return scenes


def _view_request(
    frame: Frame,
    view: SequenceView,
    chunks: Mapping[tuple[int, int], tuple[int, int]],
    questions: Mapping[str, str],
) -> RequestView:
    tokens = frame.tokens
    question = questions.get(view.name, questions.get(view.name.rpartition(".")[0]))
    if question is None:
        question = tokens.question_of(view.seq_id, view.num_prompt)
    state, ending = "running", ""
    if view.is_over:
        state, reason = "finished", str(view.status.finish_reason)
        ending = reason if reason in ("abort", "error") else "finished"
    elif view.is_waiting:
        was_running = view.status is SequenceStatus.SWAPPED or view.num_tokens > view.num_prompt
        was_running |= any(e.name == view.name and e.kind == "preempted" for e in frame.events)
        state = "preempted" if was_running else "waiting"
    return RequestView(
        name=view.name,
        question=_shorten(question, MOST_CHARS),
        text=tokens.text_of(view.seq_id, view.num_prompt, view.num_tokens),
        state=state,
        ending=ending,
        num_scheduled=view.num_scheduled,
        is_decode=view.is_decode,
        events={event.kind: event for event in frame.events if event.name == view.name},
        chunk=chunks.get((frame.number, view.seq_id)),
    )


def _shorten(content: str, most: int) -> str:
    return content if len(content) <= most else content[: most - 1] + "…"


def label_of(request: RequestView, words: Mapping[str, str]) -> tuple[str, bool]:
    """What this step meant to a request, in a few words, and whether that is worth a pill."""
    tokens = request.num_scheduled
    for kind in NOTABLE:
        if kind == "chunk" and request.chunk:
            count, total = request.chunk
            return words[kind].format(count=count, total=total, tokens=tokens), True
        if kind in request.events:
            return words[kind].format(count=request.events[kind].count, tokens=tokens), True
    if request.state == "finished":
        return words[request.ending], False
    if request.is_decode:
        return words["decode"], False
    if tokens:
        return words["prefill" if tokens > 1 else "prefill 1"].format(tokens=tokens), True
    return words["waits again" if request.state == "preempted" else "waiting"], False


# -- one step --


class Painter:
    """Draws the steps of one run into a Film; the same places in all steps."""

    def __init__(
        self,
        frames: Iterable[Frame],
        title: str = "",
        questions: Mapping[str, str] | None = None,
        language: str = "en",
    ) -> None:
        """Raises ValueError if there is no step to draw."""
        self.words = WORDS[language]
        self.scenes = scenes_of(frames, questions)
        if not self.scenes:
            raise ValueError("no step was recorded: attach the Recorder before the requests run.")
        first = self.scenes[0].frame
        self.block_size = first.block_size
        self.block_ids = self.choose_blocks()
        self.names = list(dict.fromkeys(r.name for s in self.scenes for r in s.requests))
        self.rows = self.names[:MOST_REQUESTS]
        self.more_height = 22 if len(self.names) > len(self.rows) else 0
        self.columns = max(1, min(5, 20 // self.block_size))
        self.block_width = (WIDTH - 2 * MARGIN - (self.columns - 1) * GAP) / self.columns
        self.slot = (self.block_width - OWNER_WIDTH) / self.block_size
        self.cache_top = ROW_TOP + ROW * len(self.rows) + self.more_height + 37
        lines = -(-len(self.block_ids) // self.columns)
        bottom = self.cache_top + lines * (BLOCK_HEIGHT + GAP) - GAP
        self.is_part = len(self.block_ids) < first.num_blocks
        self.height = round(bottom + (REMARK if self.is_part else 0) + LEGEND + MARGIN)
        self.title = title or self.words["title"].format(requests=len(self.names))
        self._drawn: dict[tuple[Block, float, float], list[tuple[int, str]]] = {}
        self.film = Film([self.seconds_of(scene) for scene in self.scenes[:-1]] + [LAST])
        for index, scene in enumerate(self.scenes):
            self.draw_budget(index, scene)
            for row, request in enumerate(scene.requests[:MOST_REQUESTS]):
                self.draw_request(index, row, request)
            self.draw_cache(index, scene)
            legend = text(MARGIN, self.height - MARGIN, self.words["legend"], 14, "faint")
            self.film.add(index, legend)

    def choose_blocks(self) -> list[int]:
        """The ids that are drawn: all, or MOST_BLOCKS of them, first those that had an owner."""
        has_owner: dict[int, bool] = {}
        for scene in self.scenes:
            for block_id, block in scene.frame.blocks_in_step.items():
                has_owner[block_id] = has_owner.get(block_id, False) or bool(block.owners)
        ids = sorted(has_owner, key=lambda block_id: (not has_owner[block_id], block_id))
        return sorted(ids[:MOST_BLOCKS])

    @property
    def still(self) -> int:
        """The step for readers who want no motion: the one that preempts; else the one with the
        most requests, then pills."""
        return max(range(len(self.scenes)), key=lambda index: self.interest_of(self.scenes[index]))

    def interest_of(self, scene: Scene) -> tuple[bool, int, int]:
        pills = sum(label_of(request, self.words)[1] for request in scene.requests)
        is_preempting = any(event.kind == "preempted" for event in scene.frame.events)
        return is_preempting, len(scene.frame.scheduled), pills

    def seconds_of(self, scene: Scene) -> float:
        has_pill = any(label_of(request, self.words)[1] for request in scene.requests)
        return SLOW if has_pill else QUICK

    def draw_budget(self, index: int, scene: Scene) -> None:
        """The step's number, and one cell for each token that it may compute."""
        film, words, frame = self.film, self.words, scene.frame
        film.add(index, text(MARGIN, 37, words["step"].format(frame.number), 20, "ink bold"))
        names = [r.name for r in scene.requests if r.num_scheduled for _ in range(r.num_scheduled)]
        if frame.budget <= MOST_CELLS:
            self.draw_cells(index, names, frame.budget)
        else:
            self.draw_share(index, names)
        used = words["budget"].format(len(names), frame.budget)
        film.add(index, text(WIDTH - MARGIN, 37, used, 15, "faint", anchor="end"))

    def draw_cells(self, index: int, names: list[str], budget: int) -> None:
        left, cell, film = BUDGET_LEFT, BUDGET_CELL, self.film
        for place in range(budget):
            x = left + place * cell
            if place >= len(names):
                film.add(index, rect(x, 18, cell - 3, 26, "edge", rx=4, stroke_dasharray="3 3"))
                continue
            name = names[place]
            film.add(index, rect(x, 18, cell - 3, 26, fill=colour(name), rx=4))
            film.add(index, letter(x + cell / 2 - 1.5, 37, name, 15))

    def draw_share(self, index: int, names: list[str]) -> None:
        """A budget of more than MOST_CELLS tokens: one bar, as long as the fullest step needs."""
        most = max(scene.frame.num_scheduled for scene in self.scenes)
        x, width = float(BUDGET_LEFT + 12), 440 / max(most, 1)
        for name in dict.fromkeys(names):
            length = names.count(name) * width
            self.film.add(index, rect(x, 18, max(length - 1, 0.5), 26, fill=colour(name), rx=3))
            if length > 14:
                self.film.add(index, letter(x + length / 2, 37, name, 15))
            x += length

    def draw_request(self, index: int, row: int, request: RequestView) -> None:
        """Two lines: the question; the answer so far, and what this step meant to the request."""
        film, top, name = self.film, ROW_TOP + row * ROW, request.name
        film.add(index, rect(MARGIN, top, 28, 38, fill=colour(name), rx=5))
        film.add(index, letter(MARGIN + 14, top + 25, name, 17 if len(name) < 3 else 12))
        film.add(index, text(56, top + 15, request.question, 16.5, "faint"))
        cursor = element("tspan", "▍", fill=colour(name)) if request.state == "running" else ""
        shown = request.text if len(request.text) <= MOST_ANSWER else "…" + request.text[-58:]
        answer = text(56, top + 37, shown, 18 if len(shown) < 46 else 15, "ink bold")
        film.add(index, answer.replace("</text>", cursor + "</text>"))
        label, is_notable = label_of(request, self.words)
        right = WIDTH - MARGIN
        if is_notable:
            width = text_width(label, 15.5) + 26
            film.add(index, rect(right - width, top + 21, width, 23, fill=colour(name), rx=11.5))
            style: dict[str, Any] = {"anchor": "middle", "fill": on_colour(name)}
            pill = text(right - width / 2, top + 38, label, 15.5, "bold", **style)
            film.add(index, pill, layer=1)
        else:
            film.add(index, text(right - 8, top + 38, label, 15.5, "faint", anchor="end"), layer=1)
        if self.more_height and row == 0:
            more = self.words["more"].format(len(self.names) - len(self.rows))
            y = ROW_TOP + ROW * len(self.rows) + 14
            film.add(index, text(56, y, more, 14, "faint"))

    def draw_cache(self, index: int, scene: Scene) -> None:
        """The heading with its legend, and all blocks."""
        film, words, frame, y = self.film, self.words, scene.frame, self.cache_top - 12
        blocks = frame.blocks_in_step
        in_use = sum(bool(block.owners) for block in blocks.values())
        numbers = words["blocks"].format(frame.num_blocks, frame.block_size, in_use)
        heading = element("tspan", words["cache"], class_="ink bold", font_size=15.5)
        line = text(MARGIN, y, "\u2002" + numbers, 14, "faint")
        film.add(index, line.replace(">", f">{heading}", 1))
        free, written = words["free"], words["written"]
        x = WIDTH - MARGIN - text_width(free, 14, 0.52)
        film.add(index, text(x, y, free, 14, "faint"), rect(x - 20, y - 11, 14, 14, "grey", rx=3))
        x -= text_width(written, 14, 0.52) + 38
        film.add(index, text(x, y, written, 14, "faint"))
        film.add(index, rect(x - 20, y - 11, 14, 14, "faint new", rx=3))
        empty = Block((), (), False, 0)
        for place, block_id in enumerate(self.block_ids):
            row, column = divmod(place, self.columns)
            left = MARGIN + column * (self.block_width + GAP)
            top = self.cache_top + row * (BLOCK_HEIGHT + GAP)
            block = blocks.get(block_id, empty)
            if (block, left, top) not in self._drawn:  # most blocks stay as they are
                self._drawn[block, left, top] = self.draw_block(frame, block, left, top)
            for layer, each in self._drawn[block, left, top]:
                film.add(index, each, layer=layer)
        if self.is_part:
            remark = words["drawn"].format(len(self.block_ids), frame.num_blocks)
            film.add(index, text(MARGIN, self.height - MARGIN - LEGEND + 2, remark, 14, "faint"))

    def draw_block(
        self, frame: Frame, block: Block, left: float, top: float
    ) -> list[tuple[int, str]]:
        """(layer, element): owners on the left, each with a stripe of its colour; then tokens."""
        drawn: list[tuple[int, str]] = []
        width = self.block_width
        outline: dict[str, Any] = {"rx": 3}
        if not (block.owners or block.slots):
            outline["stroke_dasharray"] = "3 3"
        drawn.append((2, rect(left, top, width, BLOCK_HEIGHT, "edge", **outline)))
        if not block.owners and block.slots:
            drawn.append((0, rect(left, top, width, BLOCK_HEIGHT, "grey", rx=3)))
        share = BLOCK_HEIGHT / max(1, len(block.owners))
        size = min(14.0, share)
        for place, name in enumerate(block.owners):
            y = top + place * share
            drawn.append((0, rect(left, y, OWNER_WIDTH, share, fill=colour(name))))
            baseline = y + share / 2 + 0.36 * size
            fits = size if len(name) < 3 else min(size, 9)
            drawn.append((1, letter(left + OWNER_WIDTH / 2, baseline, name, fits)))
            for column, slot in enumerate(block.slots):
                x = left + OWNER_WIDTH + column * self.slot
                style: dict[str, Any] = {"fill": colour(name), "class_": SHADES.get(slot.state)}
                if slot.state == COMING:
                    style["fill_opacity"] = 0.12
                drawn.append((0, rect(x, y, self.slot, share, **style)))
        most = max(1, int(0.95 * self.slot / (0.6 * SMALLEST)))
        for column, slot in enumerate(block.slots):
            content = frame.tokens.short_text(slot.token_id)
            shown = content if len(content) <= most else content[: max(1, most - 2)] + "…"
            middle = left + OWNER_WIDTH + (column + 0.5) * self.slot
            fitting = max(SMALLEST, min(13.0, 0.95 * self.slot / (0.66 * len(shown))))
            shade = "ink" if block.owners else "faint"
            token = text(middle, top + 19, shown, fitting, shade, anchor="middle")
            drawn.append((1, token))
        return drawn


def letter(x: float, y: float, name: str, size: float) -> str:
    """Bold text on the full colour of a request."""
    return text(x, y, name, size, "bold", anchor="middle", fill=on_colour(name))


# -- the whole run --


def to_svg(
    frames: Iterable[Frame],
    title: str = "",
    questions: Mapping[str, str] | None = None,
    language: str = "en",
    description: str = "",
) -> str:
    """The animation, a whole SVG file."""
    painter = Painter(frames, title, questions, language)
    film, about = painter.film, description or painter.words["description"]
    body = film.body(painter.still)
    return document(WIDTH, painter.height, painter.title, about, film.style(), body)
