"""hero.svg: four requests share one KV cache, step by step. Made from a real run.

A small engine (blocks of 4 tokens, 16 tokens a step) answers four questions with the demo model.
Each step becomes a frame: the step's token budget, the requests and what the step did to them, and
every block of the KV cache with its owners. `record_story` runs the engine, and insists that the
run shows what the picture is for: a hit in the prefix cache, chunked prefill beside decodes, a
preemption, and the return through the prefix cache.

`python notebooks/pictures/make.py` writes this picture and the others.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from frames import BlockView, Event, Frame, Recorder, RequestView
from svg import COLOURS, ON_COLOURS, Film, document, element, rect, text, text_width

from nanoserve import LLM, SamplingParams

BLOCK_SIZE = 4
# The first combination with the whole story is drawn. There are others for the day when the demo
# model is trained again: with another tokenizer, prompts have other lengths.
BUDGETS = (16, 15, 14, 13, 12)  # tokens in one step
NUM_BLOCKS = (25, 24, 23, 22, 21, 20)
ARRIVALS = (
    (0, 1, 3, 4),
    (0, 2, 3, 4),
    (0, 1, 2, 3),
    (0, 2, 4, 6),
)  # the step before which each comes


class Ask(NamedTuple):
    name: str
    question: str
    answer: str  # must be in the text


ASKS = (
    Ask("A", "What is 17 + 25?", "42"),
    Ask("B", "What is 17 + 26?", "43"),
    Ask("C", "What is the capital of France?", "Paris"),
    Ask("D", "Remember: The red box holds 7341. What does the red box hold?", "7341"),
)


# -- the run --


def record_run(budget: int, num_blocks: int, arrivals: tuple[int, ...]) -> list[Frame]:
    """Run the four requests on an engine of this size; they arrive before the given steps."""
    params = SamplingParams(temperature=0, max_tokens=24)
    with LLM(
        num_kv_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=budget,
        max_num_seqs=len(ASKS),
        device="cpu",
    ) as llm:
        tokenizer, recorder, step = llm.get_tokenizer(), Recorder(llm.engine), 0
        while step <= max(arrivals) or llm.has_unfinished_requests():
            for ask, arrival in zip(ASKS, arrivals, strict=True):
                if arrival == step:
                    message = [{"role": "user", "content": ask.question}]
                    prompt = tokenizer.apply_chat_template(
                        message, add_generation_prompt=True, return_dict=False
                    )
                    llm.add_request(ask.name, prompt, params)
            llm.step()
            step += 1
        return recorder.frames()


def missing_in(frames: list[Frame]) -> list[str]:
    """What the picture should show and this run does not. Empty: a good run."""
    seen = [(f, event) for f in frames for each in f.requests for event in each.events]
    kinds = [event.kind for _, event in seen]
    hits = [event.count for _, event in seen if event.kind == "hit"]
    chunks = [(event.total, len(scheduled(f))) for f, event in seen if event.kind == "chunk"]
    returns = [event.count for _, event in seen if event.kind == "back"]
    final = {each.name: each.text for each in frames[-1].requests if each.state == "finished"}
    checks = {
        "prefix hit of two blocks": max(hits, default=0) >= 2 * BLOCK_SIZE,
        "block that two requests share": any(len(b.owners) > 1 for f in frames for b in f.blocks),
        "prompt in three chunks beside two decodes": any(t >= 3 and n >= 3 for t, n in chunks),
        "end of every chunked prompt": all(total > 0 for total, _ in chunks),
        "single preemption": kinds.count("preempted") == 1,
        "return through the prefix cache": max(returns, default=0) >= BLOCK_SIZE,
        "right answer everywhere": all(ask.answer in final.get(ask.name, "") for ask in ASKS),
    }
    return [name for name, is_there in checks.items() if not is_there]


def record_story() -> list[Frame]:
    """The frames of the first run that has it all. Raises ValueError if there is none."""
    found = []
    for budget, num_blocks, arrivals in product(BUDGETS, NUM_BLOCKS, ARRIVALS):
        frames = record_run(budget, num_blocks, arrivals)
        missing = missing_in(frames)
        if not missing:
            return frames
        found.append(
            f"{budget} tokens, {num_blocks} blocks, {arrivals}: no {', no '.join(missing)}"
        )
    raise ValueError("no run shows the whole story. Change ASKS:\n" + "\n".join(found))


def scheduled(frame: Frame) -> list[RequestView]:
    return [request for request in frame.requests if request.num_scheduled]


# -- the words --

WORDS = {
    "en": {
        "title": "nanoserve: four requests share one KV cache, step by step",
        "description": "A real run of the demo model. Requests share a prefix, a long prompt is "
        "computed in chunks beside the decodes of others, one request is preempted when no block "
        "is free, and returns through the prefix cache.",
        "step": "Step {}",
        "budget": "token budget: {} of {}",
        "cache": "KV cache",
        "blocks": "{} blocks of {} tokens, {} in use",
        "written": "written in this step",
        "free": "free, but still cached",
        "legend": "Top: one square for each token of the step. "
        "In the blocks: ▸ special token, ␣ space, ↵ new line.",
        "hit": "prefix hit: {count} tokens",
        "chunk": "chunk {count} of {total}: {tokens} tokens",
        "preempted": "preempted: no free block",
        "back": "back: {count} tokens from the prefix cache",
        "finished": "finished",
        "prefill": "prefill: {tokens} tokens",
        "decode": "decode: 1 token",
        "waiting": "waiting",
        "waits again": "waiting, preempted",
    },
    "zh-CN": {
        "title": "nanoserve：四个请求逐步共享同一个 KV cache",
        "description": "演示模型的一次真实运行：请求共享前缀，长 prompt 分块与其他请求的 "
        "decode 在同一 step 中计算；没有空闲 block 时一个请求被抢占，随后借助前缀缓存恢复。",
        "step": "第 {} 步",
        "budget": "token 预算：{} / {}",
        "cache": "KV cache",
        "blocks": "{} 个 block，每个 {} 个 token，已用 {} 个",
        "written": "本步写入",
        "free": "空闲，但仍在缓存中",
        "legend": "顶部：每个方格是本步计算的一个 token。block 内：▸ 特殊 token，␣ 空格，↵ 换行。",
        "hit": "前缀命中：{count} 个 token",
        "chunk": "第 {count} / {total} 块：{tokens} 个 token",
        "preempted": "被抢占：没有空闲 block",
        "back": "恢复：{count} 个 token 来自前缀缓存",
        "finished": "完成",
        "prefill": "prefill：{tokens} 个 token",
        "decode": "decode：1 个 token",
        "waiting": "等待",
        "waits again": "被抢占，等待中",
    },
}
NOTABLE = ("preempted", "back", "hit", "chunk")  # these get a pill; the first one is shown


def label_of(request: RequestView, words: dict[str, str]) -> tuple[str, bool]:
    """What this step meant to a request, in a few words, and whether that is worth a pill."""
    events = {event.kind: event for event in request.events}
    for kind in NOTABLE:
        if kind in events:
            event: Event = events[kind]
            values = {"count": event.count, "total": event.total, "tokens": request.num_scheduled}
            return words[kind].format(**values), True
    if request.state == "finished":
        return words["finished"], False
    if request.num_scheduled > 1:
        return words["prefill"].format(tokens=request.num_scheduled), True
    if request.num_scheduled:
        return words["decode"], False
    return words["waits again" if request.state == "preempted" else "waiting"], False


# -- the picture --

WIDTH, MARGIN = 760, 16
ROW_TOP, ROW = 60, 48  # of the requests
COLUMNS, GAP, BLOCK_HEIGHT = 5, 7, 29
OWNER_WIDTH = 19
BLOCK_WIDTH = (WIDTH - 2 * MARGIN - (COLUMNS - 1) * GAP) / COLUMNS
SLOT = (BLOCK_WIDTH - OWNER_WIDTH) / BLOCK_SIZE
CACHE_TOP = ROW_TOP + ROW * len(ASKS) + 37
LEGEND = 25  # height of the last line
QUICK, SLOW, LAST = 0.9, 2.8, 5.0  # seconds of a frame: nothing new, something to read, the end


def colour(name: str) -> str:
    return COLOURS[(ord(name[0]) - ord("A")) % len(COLOURS)]


def on_colour(name: str) -> str:
    return ON_COLOURS[(ord(name[0]) - ord("A")) % len(COLOURS)]


def draw(frames: list[Frame], language: str = "en") -> str:
    """The whole SVG file."""
    words = WORDS[language]
    film = Film([seconds_of(frame, words) for frame in frames[:-1]] + [LAST])
    for index, frame in enumerate(frames):
        draw_budget(film, index, frame, words)
        for row, request in enumerate(frame.requests):
            draw_request(film, index, row, request, words)
        draw_cache(film, index, frame, words)
    rows = -(-len(frames[0].blocks) // COLUMNS)
    height = round(CACHE_TOP + rows * (BLOCK_HEIGHT + GAP) - GAP + LEGEND + MARGIN)
    for index in range(len(frames)):
        film.add(index, text(MARGIN, height - MARGIN, words["legend"], 14, "faint"))
    still = max(range(len(frames)), key=lambda index: interest_of(frames[index], words))
    title, description = words["title"], words["description"]
    return document(WIDTH, height, title, description, film.style(), film.body(still))


def seconds_of(frame: Frame, words: dict[str, str]) -> float:
    has_pill = any(label_of(request, words)[1] for request in frame.requests)
    return SLOW if has_pill else QUICK


def interest_of(frame: Frame, words: dict[str, str]) -> tuple[bool, int, int]:
    """The still picture is the step that preempts; else that with the most requests, then pills."""
    pills = sum(label_of(request, words)[1] for request in frame.requests)
    return is_preempting(frame), len(scheduled(frame)), pills


def is_preempting(frame: Frame) -> bool:
    return any(event.kind == "preempted" for each in frame.requests for event in each.events)


def draw_budget(film: Film, index: int, frame: Frame, words: dict[str, str]) -> None:
    """The step's number, and one cell for each token that it may compute."""
    film.add(index, text(MARGIN, 37, words["step"].format(frame.number), 20, "ink bold"))
    left, cell = 112, 26.5
    names = [request.name for request in scheduled(frame) for _ in range(request.num_scheduled)]
    for place in range(frame.budget):
        x = left + place * cell
        if place >= len(names):
            film.add(index, rect(x, 18, cell - 3, 26, "edge", rx=4, stroke_dasharray="3 3"))
            continue
        name = names[place]
        film.add(index, rect(x, 18, cell - 3, 26, fill=colour(name), rx=4))
        letter = text(
            x + cell / 2 - 1.5, 37, name, 15, "bold", anchor="middle", fill=on_colour(name)
        )
        film.add(index, letter)
    used = words["budget"].format(len(names), frame.budget)
    film.add(index, text(WIDTH - MARGIN, 37, used, 15, "faint", anchor="end"))


def draw_request(
    film: Film, index: int, row: int, request: RequestView, words: dict[str, str]
) -> None:
    """Two lines: the question; the answer so far, and what this step meant to the request."""
    top, name = ROW_TOP + row * ROW, request.name
    question = next(ask.question for ask in ASKS if ask.name == name)
    film.add(index, rect(MARGIN, top, 28, 38, fill=colour(name), rx=5))
    letter = text(MARGIN + 14, top + 25, name, 17, "bold", anchor="middle", fill=on_colour(name))
    film.add(index, letter, text(56, top + 15, question, 16.5, "faint"))
    cursor = element("tspan", "▍", fill=colour(name)) if request.state == "running" else ""
    answer = text(56, top + 37, request.text, 18, "ink bold")
    film.add(index, answer.replace("</text>", cursor + "</text>"))
    label, is_notable = label_of(request, words)
    right = WIDTH - MARGIN
    if is_notable:
        width = text_width(label, 15.5) + 26
        film.add(index, rect(right - width, top + 21, width, 23, fill=colour(name), rx=11.5))
        middle = right - width / 2
        style = {"anchor": "middle", "fill": on_colour(name)}
        film.add(index, text(middle, top + 38, label, 15.5, "bold", **style), layer=1)
    else:
        film.add(index, text(right - 8, top + 38, label, 15.5, "faint", anchor="end"), layer=1)


def draw_cache(film: Film, index: int, frame: Frame, words: dict[str, str]) -> None:
    """The heading with its legend, and all blocks."""
    y = CACHE_TOP - 12
    in_use = sum(bool(block.owners) for block in frame.blocks)
    numbers = words["blocks"].format(len(frame.blocks), BLOCK_SIZE, in_use)
    heading = element("tspan", words["cache"], class_="ink bold", font_size=15.5)
    line = text(MARGIN, y, "\u2002" + numbers, 14, "faint")
    film.add(index, line.replace(">", f">{heading}", 1))
    free, written = words["free"], words["written"]
    x = WIDTH - MARGIN - text_width(free, 14)
    film.add(index, text(x, y, free, 14, "faint"), rect(x - 20, y - 11, 14, 14, "grey", rx=3))
    x -= text_width(written, 14) + 38
    film.add(index, text(x, y, written, 14, "faint"))
    film.add(index, rect(x - 20, y - 11, 14, 14, "faint new", rx=3))
    for block_id, block in enumerate(frame.blocks):
        row, column = divmod(block_id, COLUMNS)
        left = MARGIN + column * (BLOCK_WIDTH + GAP)
        draw_block(film, index, block, left, CACHE_TOP + row * (BLOCK_HEIGHT + GAP))


def draw_block(film: Film, index: int, block: BlockView, left: float, top: float) -> None:
    """Owners on the left, each with a stripe of its colour; then the tokens."""
    outline = {"rx": 3} if block.owners or block.slots else {"rx": 3, "stroke_dasharray": "3 3"}
    film.add(index, rect(left, top, BLOCK_WIDTH, BLOCK_HEIGHT, "edge", **outline), layer=2)
    if not block.owners and block.slots:
        film.add(index, rect(left, top, BLOCK_WIDTH, BLOCK_HEIGHT, "grey", rx=3))
    share = BLOCK_HEIGHT / max(1, len(block.owners))
    size = min(14.0, share)
    for place, name in enumerate(block.owners):
        y = top + place * share
        film.add(index, rect(left, y, OWNER_WIDTH, share, fill=colour(name)))
        style = {"anchor": "middle", "fill": on_colour(name)}
        baseline = y + share / 2 + 0.36 * size
        film.add(
            index, text(left + OWNER_WIDTH / 2, baseline, name, size, "bold", **style), layer=1
        )
        for column, slot in enumerate(block.slots):
            x, shade = left + OWNER_WIDTH + column * SLOT, "new" if slot.is_new else "old"
            film.add(index, rect(x, y, SLOT, share, shade, fill=colour(name)))
    for column, slot in enumerate(block.slots):
        shown = slot.text if len(slot.text) <= 5 else slot.text[:4] + "…"
        middle = left + OWNER_WIDTH + (column + 0.5) * SLOT
        fitting = min(13.0, 0.95 * SLOT / (0.66 * len(shown)))
        shade = "ink" if block.owners else "faint"
        film.add(index, text(middle, top + 19, shown, fitting, shade, anchor="middle"), layer=1)
