"""Where does a query read, block by block, and what does attention cost?

    token_texts(llm, token_ids)                     tokens as they stand in the pictures
    slot_weights(query, key_cache, ...)             the weights of attention, by physical slot
    online_softmax(title, reads, expected, texts)   a panel for each KV block that a query reads
    roofline(title, gpu, rate, bandwidth, work)     how fast a GPU can be, by operations per byte

A panel of online_softmax shows what a query knows after one more block: m (the largest score so
far), total (the sum of e^(score - m)), and the output as it would be if the block were the last
one. An outline shows the definition's output: in the last panel the bars fill it.

A roofline is the lesser of two limits: operations per second, and bytes per second times operations
per byte. Where they cross, memory and arithmetic need the same time.

Left out: more than one query and one head at a time; measured points (bench/roofline.py measures).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nanoserve.arg_utils import engine_of
from nanoserve.extras.trace.blocks import heat
from nanoserve.extras.trace.frames import Tokens
from nanoserve.extras.trace.style import (
    ALARM,
    COLOURS,
    DPI,
    FAINT,
    INK,
    LINE,
    TITLE,
    WIDTH,
    box,
    canvas,
    fit,
    label,
    pyplot,
    show,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

    from nanoserve.attention import StepMetadata

NUM_BARS = 8  # numbers of an output that a panel has room for
PANEL, GAP = 1.62, 0.12  # inches: the height of a panel, and what is between two
BAR = COLOURS[0]


# -- weights --


def token_texts(llm_or_engine: Any, token_ids: Sequence[int]) -> list[str]:
    """The texts of tokens as the pictures show them: [" red", "\n"] -> ["red", "↵"]."""
    engine = engine_of(llm_or_engine)
    tokens = Tokens(engine.tokenizer)
    return [tokens.text(token_id) for token_id in token_ids]


def slot_weights(query: Tensor, key_cache: Tensor, metadata: StepMetadata, scale: float) -> Tensor:
    """The weights of each query on each slot: [num_tokens, num_heads, num_blocks, block_size].

    The definition of attention returns sums of weight x value, and no weights. So the value of each
    slot is replaced by the slot's name, a vector with a 1 at the number of the slot: the sum of
    these is the list of all weights. With 2 slots and weights 0.3 and 0.7:

        0.3 x [1, 0] + 0.7 x [0, 1] = [0.3, 0.7]
    """
    import torch

    from nanoserve.attention import AttentionBackend

    num_blocks, block_size, num_kv_heads, _ = key_cache.shape
    names = torch.eye(num_blocks * block_size).view(num_blocks, block_size, 1, -1)
    caches = (key_cache, names.expand(-1, -1, num_kv_heads, -1))
    weights = AttentionBackend().attend(query, caches, metadata, scale=scale)
    return weights.unflatten(-1, (num_blocks, block_size))


# -- online softmax --


class BlockRead(NamedTuple):
    """What a query knows after one more block. Most of these tensors hold one number."""

    block_id: int
    weight: Tensor  # [keys in the block]: e^(score - m)
    shrink: Tensor  # what the sums of the blocks before were multiplied by
    m: Tensor
    total: Tensor
    output: Tensor  # [value_dim]: acc / total


def online_softmax(
    title: str,
    reads: Sequence[BlockRead],
    expected: Tensor,
    texts: Sequence[Sequence[str]],
    columns: int = 5,
) -> None:
    """Draw one panel for each block. `expected` is the definition's output [value_dim]; `texts`
    are the tokens of each block."""
    num_rows = -(-len(reads) // columns)
    height = 0.6 + num_rows * (PANEL + GAP)
    ax = canvas(height, title)
    legend = (
        "number below a token: e^(score - m) of its key.  bars: the output so far, acc / total "
        f"(its first {NUM_BARS} numbers).  outline: the definition's output"
    )
    label(ax, 0, height - 0.43, legend, 8.5, ha="left", color=FAINT)
    width = (WIDTH - GAP * (columns - 1)) / columns
    outputs = [expected, *(read.output for read in reads)]
    largest = max(float(output[:NUM_BARS].abs().max()) for output in outputs)
    for index, (read, words) in enumerate(zip(reads, texts, strict=True)):
        row, column = divmod(index, columns)
        x, top = column * (width + GAP), height - 0.6 - row * (PANEL + GAP)
        box(ax, x, top - PANEL, width, PANEL, facecolor="#FAFAFA", linewidth=0.6)
        _draw_read(ax, read, words, x + 0.08, top, width - 0.16)
        _draw_output(ax, read.output, expected, x + 0.08, top - 1.22, width - 0.16, 0.33 / largest)
        if index == len(reads) - 1 and read.output.allclose(expected, rtol=1e-4, atol=1e-4):
            text = "= the definition"
            label(ax, x + width - 0.08, top - 0.13, text, ha="right", weight="bold", color=BAR)
    show()


def _draw_read(
    ax: Axes, read: BlockRead, words: Sequence[str], x: float, top: float, width: float
) -> None:
    """The block's tokens, coloured by weight, and the running numbers."""
    label(ax, x, top - 0.13, f"block {read.block_id}", 9, weight="bold", ha="left")
    if 0 < read.shrink < 0.995:
        shrink = float(read.shrink)
        text = f"old sums × {shrink:.2f}" if shrink >= 0.01 else f"old sums × {shrink:.0e}"
        label(ax, x + width, top - 0.13, text, ha="right", color=ALARM, weight="bold")
    cell = width / 4
    for index, (word, weight) in enumerate(zip(words, read.weight.tolist(), strict=True)):
        left = x + index * cell
        box(ax, left, top - 0.5, cell, 0.25, facecolor=heat(weight))
        text, size = fit(word, 0.88 * cell, 8.5)
        label(ax, left + cell / 2, top - 0.375, text, size, color="white" if weight > 0.55 else INK)
        label(ax, left + cell / 2, top - 0.595, f"{weight:.2f}", 7.5, color=FAINT)
    numbers = f"m = {float(read.m):.2f}    total = {float(read.total):.2f}"
    label(ax, x, top - 0.78, numbers, 9, ha="left")


def _draw_output(
    ax: Axes, output: Tensor, expected: Tensor, x: float, y: float, width: float, scale: float
) -> None:
    """Bars around the line y."""
    step = width / NUM_BARS
    pairs = zip(output[:NUM_BARS].tolist(), expected[:NUM_BARS].tolist(), strict=True)
    for index, (so_far, final) in enumerate(pairs):
        left = x + (index + 0.14) * step
        box(ax, left, y, 0.72 * step, so_far * scale, facecolor=BAR, linewidth=0)
        outline = {"facecolor": "none", "edgecolor": INK, "linewidth": 1.0, "zorder": 3}
        box(ax, left, y, 0.72 * step, final * scale, **outline)
    ax.plot([x, x + width], [y, y], color=LINE, linewidth=0.8, zorder=0)


# -- roofline --


class Work(NamedTuple):
    """A piece of work on a GPU, with numbers of 2 bytes (bfloat16)."""

    operations: float  # additions and multiplications
    num_bytes: float  # read from memory, or written to it

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.num_bytes

    @classmethod
    def attention(
        cls, num_queries: int, num_keys: int, num_heads: int, num_kv_heads: int, dim: int
    ) -> Work:
        """One layer's attention. The queries are those of the last of the keys' tokens."""
        pairs = num_queries * num_keys - num_queries * (num_queries - 1) // 2  # causality
        keys_and_values = 2 * num_keys * num_kv_heads * dim
        queries_and_outputs = 2 * num_queries * num_heads * dim
        return cls(4 * pairs * num_heads * dim, 2 * (keys_and_values + queries_and_outputs))

    @classmethod
    def product(cls, num_tokens: int, num_inputs: int, num_outputs: int) -> Work:
        """The vectors of some tokens times one matrix of weights."""
        numbers = num_inputs * num_outputs + num_tokens * (num_inputs + num_outputs)
        return cls(2 * num_tokens * num_inputs * num_outputs, 2 * numbers)


def roofline(
    title: str, gpu: str, rate: float, bandwidth: float, work: Mapping[str, Mapping[str, Work]]
) -> None:
    """Draw how many operations per second a GPU can do at best, and where each piece of work is on
    this line.

    `rate` is in operations per second, `bandwidth` in bytes per second. `work` has two groups of
    pieces (name -> Work) at most: they get a colour each.
    """
    fig = pyplot().figure(figsize=(WIDTH, 4.2), dpi=DPI)
    ax = fig.add_axes((0.065, 0.125, 0.5, 0.74))
    fig.text(0.008, 0.955, title, va="center", fontsize=TITLE, weight="bold", color=INK)
    limits = (
        f"{rate / 1e12:,.0f} × 10¹² operations, {bandwidth / 1e12:,.3g} × 10¹² bytes per second"
    )
    fig.text(0.992, 0.955, f"{gpu}: {limits}", va="center", ha="right", fontsize=8.5, color=FAINT)
    ridge = rate / bandwidth
    xs, ys = (0.4, ridge, 10_000), (0.4 * bandwidth / 1e12, rate / 1e12, rate / 1e12)
    low = 0.35 * ys[0]
    ax.loglog(xs, ys, color=INK, linewidth=2, zorder=2)
    ax.axvspan(xs[0], ridge, color="#F2F2F2", linewidth=0, zorder=0)
    ax.set(xlim=(xs[0], xs[-1]), ylim=(low, ys[-1] * 3))
    remark = {"fontsize": 9, "color": FAINT}
    ax.text(ridge * 0.88, low * 1.2, "limited by memory", ha="right", **remark)
    ax.text(ridge * 1.14, low * 1.2, "limited by arithmetic", **remark)
    ax.text(ridge, ys[-1] * 1.25, f"{ridge:,.0f}", ha="center", fontsize=9, color=INK)
    ax.set_xlabel("operations per byte", fontsize=9)
    ax.set_ylabel("10¹² operations per second", fontsize=9)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    y, number = 0.84, 0
    heading = {"fontsize": 8.5, "color": FAINT, "ha": "right"}
    fig.text(0.875, y, "op/byte", **heading)
    fig.text(0.992, y, "of the peak", **heading)
    for (group, pieces), shade, side in zip(work.items(), (BAR, ALARM), (1, -1), strict=False):
        y -= 0.085
        fig.text(0.6, y, group, fontsize=9.5, weight="bold", color=shade)
        for name, piece in pieces.items():
            number, y = number + 1, y - 0.065
            reached = min(rate, piece.intensity * bandwidth)
            ax.plot(piece.intensity, reached / 1e12, "o", color=shade, markersize=6, zorder=3)
            _draw_badge(ax, str(number), piece.intensity, reached / 1e12, side, shade)
            line = {"fontsize": 8.5, "color": INK}
            fig.text(0.6, y, f"{number}  {name}", **line)
            fig.text(0.875, y, f"{piece.intensity:,.0f}", ha="right", **line)
            share = 100 * reached / rate
            fig.text(0.992, y, f"{share:.{0 if share >= 10 else 1}f} %", ha="right", **line)
    show()


def _draw_badge(ax: Axes, text: str, x: float, y: float, side: int, shade: str) -> None:
    """A number beside a point: above the roof (side 1) or below it (side -1)."""
    ax.annotate(
        text,
        (x, y),
        xytext=(-12 * side, 16 * side),
        textcoords="offset points",
        fontsize=8,
        ha="center",
        va="center",
        bbox={"boxstyle": "circle,pad=0.2", "facecolor": "white", "edgecolor": shade},
        arrowprops={"arrowstyle": "-", "color": shade, "linewidth": 0.8},
        zorder=4,
    )
