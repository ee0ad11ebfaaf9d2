"""The hash chain of the prefix cache as a picture: which prompts share which blocks.

A full block is known by the block before it, its own tokens, and the extra keys at the beginning of
the chain. So prompts with the same beginning share the first blocks of their chains, and part at
the first block that differs:

    root -> [start user ↵ What] -> [is ␣ 1 7] -> [+ ␣ 2 5] -> ...   A
                                             |-> [+ ␣ 2 6] -> ...   B

The chains are the engine's own (`BlockManager.get_cached_blocks` makes them). The short hashes are
the first digits of a SHA-256, which vLLM has; nanoserve has an object in place of each hash.

Left out: the blocks of answers. Only prompts are drawn.

vLLM: v1/core/kv_cache_utils.py, `hash_block_tokens` and `generate_block_hash_extra_keys`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nanoserve import LLMEngine, SamplingParams
from nanoserve.extras.trace.frames import Tokens
from nanoserve.extras.trace.style import (
    CACHED,
    FAINT,
    INK,
    LINE,
    WIDTH,
    box,
    canvas,
    colour,
    fit,
    label,
    show,
    text_width,
    tint,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT, GAP, TAG, ROW = 1.05, 0.24, 0.8, 0.7  # inches
CELLS, BOX = 0.27, 0.46  # heights: of the tokens, and of the whole block


def hash_chain(
    engine: LLMEngine,
    title: str,
    prompts: dict[str, list[int]],
    salts: dict[str, str] | None = None,
    columns: int = 5,
    loras: dict[str, Any] | None = None,
) -> None:
    """Draw the chains of `prompts` (name -> token ids) as a tree, some with a cache salt (`salts`:
    name -> salt) or an adapter (`loras`: name -> LoRARequest). At most `columns` blocks of a prompt
    are drawn; a block that several chains pass is drawn once, with a stripe for each."""
    keys = {name: ((salts or {}).get(name), (loras or {}).get(name)) for name in prompts}
    chains = {name: _chain(engine, ids, *keys[name]) for name, ids in prompts.items()}
    passing: dict[Any, list[str]] = {}  # BlockHash -> names
    for name, chain in chains.items():
        for block_hash in (chain[0].parent, *chain):
            passing.setdefault(block_hash, []).append(name)
    height = 0.42 + ROW * len(prompts)
    ax = canvas(height, title)
    width, size = (WIDTH - ROOT - TAG) / columns - GAP, engine.block_manager.block_size
    places: dict[Any, tuple[float, float]] = {}  # right end of the box, middle of it
    for row, (name, chain) in enumerate(chains.items()):
        y = height - 0.42 - ROW * row
        is_cut = len(prompts[name]) > columns * size
        drawn = chain[: columns - 1] if is_cut else chain[:columns]
        for column, block_hash in enumerate((chain[0].parent, *drawn)):
            if block_hash in places:
                continue
            x = ROOT + GAP + (column - 1) * (width + GAP) if column else 0.0
            places[block_hash] = (x + width if column else ROOT, y - CELLS / 2)
            if column:
                _draw_arrow(ax, places[block_hash.parent], (x, y - CELLS / 2))
                _draw_block(ax, engine, block_hash, passing[block_hash], x, y, width)
            else:
                _draw_root(ax, *keys[name], y)
        end, middle = places[drawn[-1]]
        rest = prompts[name][len(drawn) * size :]
        if rest:
            _draw_arrow(ax, (end, middle), (end + GAP, middle))
            _draw_rest(ax, engine, rest, end + GAP, y, width, is_cut)
        x = ROOT + GAP + (len(drawn) + bool(rest)) * (width + GAP) - GAP / 2
        box(ax, x, y - CELLS, TAG - 0.1, CELLS, facecolor=tint(name[0], 0.75))
        label(ax, x + TAG / 2 - 0.05, y - CELLS / 2, *fit(name, TAG - 0.16, 9), weight="bold")
    show()


def block_digests(engine: LLMEngine, token_ids: list[int], salt: str | None = None) -> list[str]:
    """The hashes in the picture in full: 64 hexadecimal digits for each block of a prompt that a
    hit may take. The hash of a block is SHA-256(repr((parent, tokens))); the root's is
    SHA-256(repr(("", salt)))."""
    return [_digest(block_hash) for block_hash in _chain(engine, token_ids, salt)]


def _chain(
    engine: LLMEngine, token_ids: list[int], salt: str | None, wish: Any = None
) -> list[Any]:
    """The BlockHashes of the blocks of a prompt that a request may find in the cache."""
    params = SamplingParams(temperature=0)
    seq = engine.input_processor.process("drawn", token_ids, params, cache_salt=salt)
    if wish is not None:
        engine.lora_manager.attach(seq, wish)
    engine.block_manager.get_cached_blocks(seq)  # makes the hashes; changes nothing else
    return list(seq.block_hashes)


def _digest(block_hash: Any) -> str:
    """SHA-256 over (hash of the parent, token ids), as hexadecimal digits."""
    if block_hash is None:
        return ""
    content = repr((_digest(block_hash.parent), block_hash.token_ids))
    return hashlib.sha256(content.encode()).hexdigest()


def _cells(
    engine: LLMEngine, token_ids: Iterable[int], x: float, width: float
) -> list[tuple[str, float, float]]:
    """(text, left, width) of each token: `width` is divided as the texts need it."""
    tokens = Tokens(engine.tokenizer)
    texts = [tokens.text(token_id, limit=9) for token_id in token_ids]
    needs = [text_width(text, 8.5) + 0.1 for text in texts]
    cells = [width * need / sum(needs) for need in needs]
    lefts = [x + sum(cells[:index]) for index in range(len(cells))]
    return list(zip(texts, lefts, cells, strict=True))


def _draw_root(ax: Axes, salt: str | None, wish: Any, y: float) -> None:
    box(ax, 0, y - CELLS, ROOT, CELLS, facecolor=CACHED)
    texts = [f"salt {salt!r}"] if salt is not None else []
    texts += [f"LoRA {wish.lora_name!r}"] if wish is not None else []
    text = ", ".join(texts) or "no extra keys"
    label(ax, ROOT / 2, y - CELLS / 2, *fit(text, ROOT - 0.06, 8.5))


def _draw_block(
    ax: Axes,
    engine: LLMEngine,
    block_hash: Any,
    names: list[str],
    x: float,
    top: float,
    width: float,
) -> None:
    """The tokens of a block, a stripe for each chain that passes it, and its short hash."""
    share = CELLS / len(names)
    for text, left, cell in _cells(engine, block_hash.token_ids, x, width):
        for part, name in enumerate(names):
            bottom = top - (part + 1) * share
            box(ax, left, bottom, cell, share, facecolor=tint(name[0]), linewidth=0)
        label(ax, left + cell / 2, top - CELLS / 2, *fit(text, 0.94 * cell))
        box(ax, left, top - CELLS, cell, CELLS, facecolor="none", linewidth=0.6)
    edge = INK if len(names) > 1 else colour(names[0][0])
    box(ax, x, top - CELLS, width, CELLS, facecolor="none", edgecolor=edge, linewidth=1.4)
    text = f"hash {_digest(block_hash)[:4]}…"
    label(ax, x, top - BOX + 0.07, text, size=7.5, ha="left", color=FAINT)
    block_id = engine.block_manager.pool.cached_blocks.get(block_hash)
    if block_id is not None:
        text = f"in block {block_id}"
        label(ax, x + width, top - BOX + 0.07, text, size=7.5, ha="right")


def _draw_rest(
    ax: Axes,
    engine: LLMEngine,
    token_ids: list[int],
    x: float,
    top: float,
    width: float,
    is_cut: bool,
) -> None:
    """The end of a prompt: a block that a hit may not take, or a note that more blocks follow."""
    block_size = engine.block_manager.block_size
    if is_cut:
        text = f"… {(len(token_ids) - 1) // block_size} more blocks"
        label(ax, x, top - CELLS / 2, text, size=8.5, ha="left", color=FAINT)
        return
    share = len(token_ids) / block_size
    for text, left, cell in _cells(engine, token_ids, x, share * width):
        text, size = fit(text, 0.94 * cell)
        label(ax, left + cell / 2, top - CELLS / 2, text, size, color=FAINT)
    style = {"facecolor": "none", "edgecolor": LINE, "linestyle": "--"}
    box(ax, x, top - CELLS, width, CELLS, **style)
    note = "not full: no hash" if len(token_ids) < block_size else "its last token: never taken"
    label(ax, x, top - BOX + 0.07, note, size=7.5, ha="left", color=FAINT)


def _draw_arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """From a block to the next: straight, or down and to the right."""
    (x0, y0), (x1, y1) = start, end
    if y0 != y1:
        bend = x0 + GAP / 2
        ax.plot([x0, bend, bend], [y0, y0, y1], color=FAINT, linewidth=1)
        x0 = bend
    arrow = {"arrowstyle": "-|>", "color": FAINT, "linewidth": 1, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", xy=(x1, y1), xytext=(x0, y1), arrowprops=arrow)
