"""Where does each weight of a checkpoint go, and what does a layer compute?

    placements(model)              which rows of which parameter each checkpoint tensor fills
    packed_weights(title, model)   one layer: the checkpoint's matrices beside the model's own
    rank_weights(title, models)    one layer: which rows, columns and heads each rank holds
    two_matrices(title, x, w1, w2)  x @ w1 @ w2 on two ranks, with all numbers
    rope_pairs(title, rotary, ...) how pairs of dimensions turn, and what a query then sees of a key
    hidden_states(layers)          a list of what each layer gives, while a `with` block lasts
    layer_words(title, ...)        what the model would say if it ended after each layer

The functions read a model and change nothing. `packed_weights` and `rank_weights` know the names of
the Llama family. Matrices are drawn to scale, as they are stored: a row for each output.

Left out: experts, biases, norms.

vLLM: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from nanoserve.extras.trace.frames import Tokens
from nanoserve.extras.trace.style import FAINT, INK, LINE, box, fit, label, panels, show
from nanoserve.layers import RotaryEmbedding, apply_rope
from nanoserve.models.base import Model
from nanoserve.models.shards import Shard

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Not the colours of the requests: a weight or a rank is no request.
PART_COLOURS = {
    "q_proj": "#9FD0F2",
    "k_proj": "#F7EC8B",
    "v_proj": "#EDB08C",
    "o_proj": "#DDDDDD",
    "gate_proj": "#C9E4F8",
    "up_proj": "#F6D5C2",
    "down_proj": "#E8E8E8",
}
RANK_COLOURS = ("#7DBBEA", "#FBF2AE", "#EDB08C", "#D0D0D0")
EDGE: dict[str, Any] = {"edgecolor": INK, "linewidth": 0.8}


class Placement(NamedTuple):
    """One checkpoint tensor, and the rows of the parameter that it fills."""

    name: str  # in the checkpoint: "model.layers.0.self_attn.k_proj.weight"
    parameter: str  # in the model: "model.layers.0.self_attn.qkv_proj.weight"
    rows: tuple[int, int]  # first row and last row + 1
    shard: Shard


def placements(model: Model) -> list[Placement]:
    """Where each checkpoint tensor goes, in the order of the model's modules. Raises ValueError for
    quantized weights, which lie elsewhere."""
    if any(hasattr(module, "quantized_weight") for module in model.modules()):
        raise ValueError("the weights of this model are quantized; allowed: floating-point ones.")
    found = []
    for module_name, module in model.named_modules():
        if module is model or not hasattr(module, "shards"):
            continue
        for name, shard in module.shards(module_name):
            parameter_name = f"{module_name}.{name.rpartition('.')[2]}"
            parameter, target = model.get_parameter(parameter_name), shard.target
            first = target.storage_offset() // max(1, parameter.stride(0))
            num_rows = target.shape[0] if target.dim() == parameter.dim() else 1
            found.append(Placement(name, parameter_name, (first, first + num_rows), shard))
    return found


def _matrices(model: Model, layer: int) -> dict[str, Placement]:
    """The matrices of one layer: "q_proj" -> its placement."""
    return {
        place.name.split(".")[-2]: place
        for place in placements(model)
        if f".layers.{layer}." in place.name and len(place.shard.full_shape) == 2
    }


# -- from names to packed weights --


def packed_weights(title: str, model: Model, head_dim: int, layer: int = 0) -> None:
    """The matrices of one layer as the checkpoint names them, and the matrices that they fill;
    below, the output of the first one for one token."""
    matrices = _matrices(model, layer)
    unit = matrices["q_proj"].shard.full_shape[1]  # columns that one unit of width stands for
    axes = panels(1, 5.6, title, 2, width_ratios=(1, 1.22))
    groups = (("q_proj", "k_proj", "v_proj"), "o_proj"), (("gate_proj", "up_proj"), "down_proj")
    heights = []
    for ax, (stacked, single) in zip(axes, groups, strict=True):
        heights.append(_draw_group(ax, matrices, stacked, single, unit))
        ax.axis("off")
    heads = {name: matrices[name].shard.full_shape[0] // head_dim for name in groups[0][0]}
    _draw_output(axes[0], heads, heights[0] + 0.55 * unit, 0.3 * unit)
    gap = 0.5 * unit
    for ax, width in zip(axes, (3.6, 4.4), strict=True):
        ax.set(xlim=(-0.05, width), ylim=(max(heights), -gap))
    show()


def _draw_group(
    ax: Axes, matrices: dict[str, Placement], stacked: Seq[str], single: str, unit: int
) -> float:
    """Matrices of the same input, stacked into one; below them the one that reads its output."""
    gap, right, y = 0.42 * unit, 1.8, 0.0
    for x, text in ((0.0, "in the checkpoint"), (right, "in the model")):
        label(ax, x, -0.2 * unit, text, 9, ha="left", color=FAINT)
    sizes = {name: matrices[name].shard.full_shape for name in (*stacked, single)}
    total = sum(sizes[name][0] for name in stacked)
    top = gap * (len(stacked) - 1) / 2  # of the stacked matrix
    for name in stacked:
        first, last = matrices[name].rows
        text = f"rows {first} to {last - 1}"
        _draw_pair(ax, name, sizes[name], (0.0, y), (right, top + first), text, unit)
        y += sizes[name][0] + gap
    text = f"{matrices[stacked[0]].parameter.split('.')[-2]}\n[{total}, {unit}]"
    label(ax, right + 1.06, top + total / 2, text, 10, ha="left", weight="bold")
    y += 0.3 * gap
    rows, columns = sizes[single]
    if columns > unit:  # too wide to be drawn twice
        box(ax, 0.0, y, columns / unit, rows, facecolor=PART_COLOURS[single], **EDGE)
        text = f"{single} [{rows}, {columns}]\nthe same in both"
        label(ax, columns / unit / 2, y + rows / 2, text, 9)
    else:
        _draw_pair(ax, single, sizes[single], (0.0, y), (right, y), "the same", unit)
    return y + rows + 0.1 * unit


def _draw_output(ax: Axes, heads: dict[str, int], y: float, height: float) -> None:
    """One row of x qkv_proj.T: the heads of q, k and v side by side."""
    width, x = 3.0 / sum(heads.values()), 0.0
    label(ax, 0, y - 0.5 * height, "what qkv_proj makes of one token, head by head", 9, ha="left")
    for name, number in heads.items():
        for head in range(number):
            box(ax, x, y, width, height, facecolor=PART_COLOURS[name], **EDGE)
            label(ax, x + width / 2, y + height / 2, f"{name[0]}{head}", 9)
            x += width


def _draw_pair(
    ax: Axes,
    name: str,
    size: tuple[int, ...],
    source: tuple[float, float],
    target: tuple[float, float],
    text: str,
    unit: int,
) -> None:
    """A matrix of the checkpoint, and the place that it fills, with a band between the two."""
    rows, width, colour = size[0], size[1] / unit, PART_COLOURS[name]
    box(ax, *target, width, rows, facecolor=colour, **EDGE)
    box(ax, *source, width, rows, facecolor=colour, **EDGE)
    break_ = "\n" if rows > 0.7 * unit else " "
    label(ax, source[0] + width / 2, source[1] + rows / 2, f"{name}{break_}[{rows}, {size[1]}]", 9)
    tops, x = (source[1], target[1]), (source[0] + width, target[0])
    ax.fill_between(x, tops, (tops[0] + rows, tops[1] + rows), color=colour, alpha=0.4, lw=0)
    label(ax, target[0] + width / 2, target[1] + rows / 2, text, 9)


# -- what each rank holds --


def rank_weights(title: str, models: Seq[Model], head_dim: int, layer: int = 0) -> None:
    """One layer's matrices and the embedding, each coloured by the rank that holds the part.

    models: the model of each rank (they may be on torch's "meta" device). The embedding is drawn
    with fewer rows than it has.
    """
    from matplotlib.patches import Patch

    parts = [_matrices(model, layer) for model in models]
    for model, part in zip(models, parts, strict=True):
        part["embed_tokens"] = next(p for p in placements(model) if "embed_tokens" in p.name)
    unit = parts[0]["q_proj"].shard.full_shape[1]
    rows = ("embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj")
    axes = panels(2, 6.8, title, height_ratios=(1.75, 3.2))
    for ax, names in zip(axes, (rows, ("gate_proj", "up_proj", "down_proj")), strict=True):
        x, height = 0.0, 0.0
        for name in names:
            shards = [part[name].shard for part in parts]
            drawn: float = min(shards[0].full_shape[0], 3 * unit)
            if name == "embed_tokens":
                drawn = 1.4 * unit
            width = _draw_division(ax, name, shards, x, drawn, unit, head_dim)
            x, height = x + width + 0.3, max(height, drawn)
        ax.set(xlim=(-0.05, 7.5), ylim=(height + 0.2 * unit, -0.35 * unit), aspect=1 / unit)
        ax.axis("off")
    k_projs = [part["k_proj"].shard for part in parts]
    _draw_kv_cache(axes[1], k_projs, head_dim, 3.0, 1.75 * unit, 0.9 * unit)
    ranks = [Patch(facecolor=RANK_COLOURS[rank], **EDGE) for rank in range(len(models))]
    labels = [f"rank {rank}" for rank in range(len(models))]
    axes[0].figure.legend(ranks, labels, loc="upper right", ncols=len(models), frameon=False)
    show()


def _draw_kv_cache(
    ax: Axes, k_projs: Seq[Shard], head_dim: int, x: float, y: float, height: float
) -> None:
    """The key heads that each rank stores for each token of one layer."""
    name = "KV cache of the layer: each rank has all blocks, with its own heads"
    label(ax, x, y - 0.13 * height, name, 9, ha="left", weight="bold")
    width = 3.0 / len(k_projs)
    for rank, shard in enumerate(k_projs):
        box(ax, x, y, width, height, facecolor=RANK_COLOURS[rank], **EDGE)
        first, last = shard.start // head_dim, (shard.start + len(shard.target)) // head_dim - 1
        heads = f"key head {first}" if first == last else f"key heads {first} to {last}"
        label(ax, x + width / 2, y + height / 2, f"keys and values of\n{heads}")
        x += width


def _draw_division(
    ax: Axes, name: str, shards: Seq[Shard], x: float, drawn: float, unit: int, head_dim: int
) -> float:
    """One matrix of the checkpoint, `drawn` rows high, its parts coloured by rank."""
    rows, columns = shards[0].full_shape
    width, scale = columns / unit, drawn / rows
    for rank, shard in enumerate(shards):
        start, size = shard.start, shard.target.shape[shard.dim]
        if shard.dim == 0:
            left, top, wide, high = x, start * scale, width, size * scale
        else:
            left, top, wide, high = x + start / unit, 0.0, size / unit, drawn
        box(ax, left, top, wide, high, facecolor=RANK_COLOURS[rank], **EDGE)
        text = f"{('rows', 'columns')[shard.dim]}\n{start} to {start + size - 1}"
        if name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            first, last = start // head_dim, (start + size) // head_dim - 1
            heads = f"head {first}" if first == last else f"heads {first}, {last}"
            heads = heads.replace(" ", "\n", 1) if wide < 0.7 else heads
            text = heads if high < 0.35 * unit else f"{text}\n{heads}"
        label(ax, left + wide / 2, top + high / 2, text, 8 if wide > 0.7 else 7.2, linespacing=1.1)
    text = f"{name} [{rows}, {columns}]"
    label(ax, x, -0.12 * unit, text, 9, ha="left", weight="bold")
    if drawn != rows:
        label(ax, x + width / 2, drawn + 0.12 * unit, "(drawn smaller)", 8, color=FAINT)
    return max(width, 0.064 * len(text))  # room for the name


# -- two matrices on two ranks --


def two_matrices(title: str, x: Tensor, w1: Tensor, w2: Tensor, is_open: bool = False) -> None:
    """x @ w1 @ w2 by two ranks: w1 is cut by columns, w2 by rows, and the two products are added.

    For small whole numbers in float tensors: each number is written into its cell. is_open: the
    partial sums and the total show "?".
    """
    [ax] = panels(1, 4.0, title)
    half, h = w1.shape[1] // 2, x @ w1
    high = w1.shape[0]
    for rank, top in enumerate((0.0, high + 2.0)):
        part, colour = slice(rank * half, (rank + 1) * half), RANK_COLOURS[rank]
        label(ax, -0.5, top + high / 2, f"rank {rank}", 11, ha="right", weight="bold")
        left = 0.0
        for values, name, sign in (
            (x, "x, a copy", "×"),
            (w1[:, part], f"W1, columns {part.start} to {part.stop - 1}", "="),
            (h[:, part], f"h{rank} stays here", "×"),
            (w2[part], f"W2, rows {part.start} to {part.stop - 1}", "="),
            (h[:, part] @ w2[part], f"partial sum p{rank}", ""),
        ):
            fill = "white" if name == "x, a copy" else colour
            num_rows, num_columns = values.shape
            is_hidden = is_open and name.startswith("partial")
            _draw_matrix(ax, left, top + (high - num_rows) / 2, values, fill, name, is_hidden)
            following = left + max(num_columns, 3.2) + 1.0
            label(ax, (left + num_columns + following) / 2, top + high / 2, sign, 14)
            left = following
        arrow = {"arrowstyle": "->", "color": INK, "lw": 1.5}
        middle = high + 1.0 + (-0.5, 0.5)[rank]
        ax.annotate("", (left + 0.7, middle), (left - 1.6, top + high / 2), arrowprops=arrow)
    y = high + 1.0 - x.shape[0] / 2
    _draw_matrix(ax, left + 0.9, y, h @ w2, "white", "all-reduce: p0 + p1", is_open)
    label(ax, left + 0.9, y + x.shape[0] + 0.5, "= x W1 W2, on both", 8, ha="left", color=FAINT)
    ax.set(xlim=(-2.6, left + 1.4 + w2.shape[1]), ylim=(2 * high + 2.4, -0.8), aspect="equal")
    ax.axis("off")
    show()


def _draw_matrix(
    ax: Axes, x: float, y: float, values: Tensor, colour: str, name: str, is_hidden: bool = False
) -> None:
    for row, numbers in enumerate(values.tolist()):
        for column, number in enumerate(numbers):
            box(ax, x + column, y + row, 1, 1, facecolor=colour, **EDGE)
            text = "?" if is_hidden else f"{number:.0f}"
            label(ax, x + column + 0.5, y + row + 0.5, text, 9)
    label(ax, x, y - 0.3, name, 8, ha="left")


# -- rotary embedding --


def rope_pairs(
    title: str,
    rotary: RotaryEmbedding,
    query: Tensor,
    key: Tensor,
    pairs: Seq[int] = (0, 2, 6),
    num_positions: int = 8,
) -> None:
    """Pairs of dimensions at positions 0, 1, 2, ...; and the scores of a query and a key [head_dim]
    at all pairs of the first 24 positions."""
    axes = panels(1, 3.0, title, len(pairs) + 1, width_ratios=(1,) * len(pairs) + (1.3,))
    half = query.shape[-1] // 2
    cos, sin = rotary(torch.arange(num_positions))
    for ax, pair in zip(axes, pairs, strict=False):
        arrows = torch.zeros(num_positions, 1, 2 * half)
        arrows[..., pair] = 1  # (1, 0) in the plane of dimensions pair and pair + half
        turned = apply_rope(arrows, cos, sin)[:, 0]
        _draw_clock(ax, turned[:, pair].tolist(), turned[:, pair + half].tolist())
        degrees = torch.rad2deg(torch.atan2(turned[1, pair + half], turned[1, pair])).item()
        name = f"dimensions {pair} and {pair + half}"
        ax.set_title(f"{name}\n{degrees:.1f}° a position", fontsize=9, color=INK)
    cos, sin = rotary(torch.arange(24))
    queries = apply_rope(query.expand(24, 1, -1).clone(), cos, sin)[:, 0]
    keys = apply_rope(key.expand(24, 1, -1).clone(), cos, sin)[:, 0]
    ax = axes[-1]
    image = ax.imshow(queries @ keys.T, cmap="cividis")
    ax.set_xlabel("position of the key", fontsize=9)
    ax.set_ylabel("position of the query", fontsize=9)
    ax.set_title("score of one query and one key\nat all pairs of positions", fontsize=9, color=INK)
    ax.figure.colorbar(image, ax=ax, shrink=0.9).ax.tick_params(labelsize=8)
    show()


def _draw_clock(ax: Axes, xs: list[float], ys: list[float]) -> None:
    """Arrows from the middle to (x, y), the first one light, the last one dark, with numbers where
    there is room."""
    ax.plot(*_circle(), color=LINE, lw=0.8)
    labelled: list[tuple[float, float]] = []
    numbers = list(range(len(xs)))
    for number in numbers:
        shade = str(0.75 * (1 - number / numbers[-1]))
        arrow = {"arrowstyle": "->", "color": shade, "lw": 1.4, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (xs[number], ys[number]), (0, 0), arrowprops=arrow)
    for number in (0, numbers[-1], *numbers[1:-1]):
        x, y = xs[number], ys[number]
        if all(abs(x - other_x) + abs(y - other_y) > 0.2 for other_x, other_y in labelled):
            label(ax, 1.2 * x, 1.2 * y, str(number), 9)
            labelled.append((x, y))
    ax.set(xlim=(-1.32, 1.32), ylim=(-1.32, 1.32), aspect="equal")
    ax.axis("off")


def _circle() -> tuple[list[float], list[float]]:
    angles = torch.linspace(0, 2 * torch.pi, 100)
    return angles.cos().tolist(), angles.sin().tolist()


# -- what each layer gives --


@contextmanager
def hidden_states(layers: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
    """A list of the residual stream [num_tokens, hidden_size] behind each of these layers, of
    nanoserve's model or of the one in transformers, for each run while the `with` block lasts."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        x, residual = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
        x = x[0] if isinstance(x, tuple) else x  # some versions of transformers: a tuple of one
        total = x.detach().clone() if residual is None else x.detach() + residual.detach()
        seen.append(total[0] if total.dim() == 3 else total)  # transformers has a batch in front

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(keep).remove)
        yield seen


def layer_words(
    title: str,
    llm: Any,
    ours: Seq[Tensor],
    theirs: Seq[Tensor],
    answer: Seq[int],
) -> list[list[int]]:
    """What the model would say if it ended after each layer: a row for each layer, a column for
    each token of the answer, shaded where it is the answer's. On the left, the largest difference
    between `ours` and `theirs` (see hidden_states), as a share of the largest number.

    Returns the token ids: a list for each layer.
    """
    model, tokens = llm.engine.executor.runner.model, Tokens(llm.get_tokenizer())
    said = [
        model.compute_logits(model.model.norm(x[-len(answer) :])).argmax(-1).tolist() for x in ours
    ]
    [ax] = panels(1, 0.9 + 0.36 * (len(said) + 1), title)
    for x, text in ((-0.2, "answer"), (-1.35, "difference"), (-2.4, "")):
        label(ax, x, -1, text, 9, ha="right", color=FAINT)
    rows = [list(answer), *said]
    for row, (token_ids, y) in enumerate(zip(rows, range(-1, len(said)), strict=True)):
        for x, token_id in enumerate(token_ids):
            is_right = token_id == answer[x]
            colour = "white" if row == 0 else ("#9FD0F2" if is_right else "#EFEFEF")
            box(ax, x, y - 0.5, 1, 1, facecolor=colour)
            text, size = fit(tokens.text(token_id), 0.72, 9)
            label(ax, x + 0.5, y, text, size, weight="bold" if is_right else "normal")
    for y, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        label(ax, -0.2, y, f"after layer {y}", 9, ha="right")
        difference = ((a - b).abs().max() / b.abs().max()).item()
        label(ax, -1.35, y, f"{difference:.0e}", 9, ha="right")
    ax.set(xlim=(-2.6, len(answer)), ylim=(len(said) - 0.4, -1.6))
    ax.axis("off")
    show()
    return said
