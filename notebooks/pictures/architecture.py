"""architecture.svg: two planes, and what goes from one to the other.

The control plane decides and imports no torch; the data plane executes and knows no scheduler. A
step is one value each way: SchedulerOutput to the right, ModelOutput back. The names are those of
the package, and the test of this picture compares them with it.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap

from nanoserve.extras.trace.style import COLOURS
from nanoserve.extras.trace.svg import document, element, rect, text

PACKAGE = Path(__file__).resolve().parents[2] / "nanoserve"
# The dozen: (module, its question in English and Chinese). A row of two modules is one box.
CONTROL = [
    ("sequence", "what is a request?", "请求是什么？"),
    ("input_processor", "text in: what must be true of it?", "输入文本：须满足什么？"),
    ("scheduler", "who runs, with how many tokens?", "谁运行，算多少 token？"),
    ("block_manager", "who owns which KV block?", "每个 KV block 归谁？"),
    ("output_processor", "what do new tokens mean as text?", "新 token 成为什么文本？"),
]
DATA = [
    ("model_runner", "how does a step become tensors?", "一步如何变成张量？"),
    ("input_batch", "what is known of each sequence?", "每个序列要记住什么？"),
    ("layers, models/decoder", "how do token ids become logits?", "token id 如何变成 logits？"),
    ("attention", "how are scattered keys read?", "分散的 key 如何读取？"),
    ("sampler", "how do logits become a token?", "logits 如何变成 token？"),
]
# The others of each plane, in this order. Those that a checkout does not have are not drawn.
CONTROL_OTHERS = ["inputs", "sampling_params", "logprobs", "config", "checkpoint", "arg_utils"]
CONTROL_OTHERS += ["guard", "memory", "interrupts", "fault_isolation", "exceptions", "logger"]
DATA_OTHERS = ["models/", "kernels/", "kv_cache", "staging", "cuda_graph", "executor", "device"]
DATA_OTHERS += ["parallel", "distributed/", "logits_processors", "prompt_logprobs"]
AROUND = ["extras/", "tools/", "bench/", "demo/"]

WORDS = {
    "en": {
        "title": "nanoserve: two planes",
        "description": "The control plane decides and imports no torch. The data plane executes. "
        "A SchedulerOutput goes from the first to the second in each step, a ModelOutput back.",
        "control": ("Control plane", "decides; imports no torch"),
        "data": ("Data plane", "executes; knows no scheduler"),
        "there": ("SchedulerOutput", ["who runs,", "how many tokens,", "which blocks"]),
        "back": ("ModelOutput", ["the sampled", "tokens"]),
        "engine": "the loop of steps; alone knows both planes",
        "llm": "generate, chat, stream",
        "around": "built on it: {}",
    },
    "zh-CN": {
        "title": "nanoserve：控制面与数据面",
        "description": "控制面做决策，不 import torch；数据面负责执行。"
        "每个 step 由控制面向数据面传一个 SchedulerOutput，数据面传回一个 ModelOutput。",
        "control": ("控制面", "只做决策；不 import torch"),
        "data": ("数据面", "只管执行；不知道 scheduler"),
        "there": ("SchedulerOutput", ["谁运行、", "算多少 token、", "用哪些 block"]),
        "back": ("ModelOutput", ["采样得到的", "token"]),
        "engine": "逐步循环；只有它同时知道两个平面",
        "llm": "generate、chat、stream",
        "around": "建立在其上：{}",
    },
}

WIDTH, MARGIN, PANEL = 760, 16, 276
TOP, ROW, BOX = 74, 52, 45
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


def exists(name: str) -> bool:
    """Is there such a module, or folder ("models/"), in the package?"""
    return (PACKAGE / (name if name.endswith("/") else f"{name}.py")).exists()


def draw(language: str = "en") -> str:
    """The whole SVG file."""
    words, column = WORDS[language], 1 if language == "en" else 2
    right = WIDTH - MARGIN - PANEL
    body = draw_plane(MARGIN, COLOURS[0], words["control"], CONTROL, CONTROL_OTHERS, column)
    body += draw_plane(right, COLOURS[2], words["data"], DATA, DATA_OTHERS, column)
    gap = (MARGIN + PANEL + 8, right - 8)
    body += draw_arrow(*gap, TOP + 66, *words["there"])
    body += draw_arrow(*reversed(gap), TOP + 208, *words["back"])
    top = TOP + ROW * len(DATA) + 110
    for x, width, name in ((MARGIN, 420, "engine"), (MARGIN + 432, 296, "llm")):
        body += draw_box(x, top, width, name, words[name])
    around = words["around"].format("  ".join(filter(exists, AROUND)))
    body.append(text(WIDTH / 2, top + BOX + 25, around, 14, "faint", anchor="middle"))
    style = f".mono{{font-family:{MONO}}}"
    title, description = words["title"], words["description"]
    return document(WIDTH, top + BOX + 40, title, description, style, body)


def draw_plane(
    x: float,
    colour: str,
    heading: tuple[str, str],
    modules: list[tuple[str, str, str]],
    others: list[str],
    column: int,
) -> list[str]:
    """A panel: its name and what is special about it, a box for each row, the other modules."""
    height = TOP - MARGIN + ROW * len(modules) + 96
    shapes = [
        rect(x, MARGIN, PANEL, height, "panel", rx=10),
        rect(x, MARGIN, PANEL, height, fill="none", stroke=colour, stroke_width=2, rx=10),
        text(x + 14, MARGIN + 24, heading[0], 18, "ink bold"),
        text(x + 14, MARGIN + 42, heading[1], 14, "faint"),
    ]
    for row, module in enumerate(modules):
        shapes += draw_box(x + 10, TOP + row * ROW, PANEL - 20, module[0], module[column])
    shown = "  ".join(filter(exists, others))
    for line, part in enumerate(wrap(shown, 33)):
        y = TOP + ROW * len(modules) + 15 + 17 * line
        shapes.append(text(x + 14, y, part, 12, "faint mono"))
    return shapes


def draw_box(x: float, y: float, width: float, name: str, about: str) -> list[str]:
    return [
        rect(x, y, width, BOX, "back", rx=6),
        rect(x, y, width, BOX, "edge", rx=6),
        text(x + 10, y + 19, name, 15, "ink mono bold"),
        text(x + 10, y + 37, about, 13.5, "faint"),
    ]


def draw_arrow(start: float, end: float, y: float, name: str, about: list[str]) -> list[str]:
    """An arrow at height y; its name above, what it carries below."""
    middle, tip = (start + end) / 2, 10 if end > start else -10
    head = f"M{end - tip} {y - 7}L{end} {y}L{end - tip} {y + 7}Z"
    lines = [
        element("path", d=f"M{start} {y}H{end - tip / 2}", class_="line", stroke_width=2.5),
        element("path", d=head, class_="faint"),
        text(middle, y - 14, name, 15.5, "ink bold", anchor="middle"),
    ]
    for line, part in enumerate(about):
        lines.append(text(middle, y + 24 + 18 * line, part, 14, "faint", anchor="middle"))
    return lines
