"""Where is each block: on the device, in main memory, on a disk?

    with trace.watch_tiers(llm, {"A": prompt_a, "B": prompt_b}) as steps:
        ...                                          an engine with kv_offloading_size runs
    trace.tier_map("...", steps)                     a line for each step: who is where
    trace.evictions("...", "ababcdea", rows=3)       LRU beside ARC, access by access

Time goes down. A block that a step copies has an arrow: from its KV block in the line above to its
row (a store), or from the row above to a KV block (a load). A save is an arrow within a line: the
step has filled the KV block itself.

Left out: blocks that are not full, which no other request can find; rows of other ranks.

vLLM: none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from nanoserve.block_manager import BlockHash
from nanoserve.extras.kv_offload.policies import (
    ARCPolicy,
    Block,
    CachePolicy,
    LRUPolicy,
)
from nanoserve.extras.trace.style import (
    FAINT,
    INK,
    LINE,
    WIDTH,
    box,
    canvas,
    colour,
    fit,
    label,
    on_colour,
    show,
    tint,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from nanoserve import LLM
    from nanoserve.engine import StepReport

CELL, HEIGHT, BETWEEN = 0.4, 0.3, 0.68  # inches: of a block, and from line to line
LEFT, GAP = 1.0, 0.35
BACK = "#D55E00"
Name = tuple[
    str, int
]  # the prompt that a block belongs to, and which of its blocks it is: 0, 1, ..


class TierStep(NamedTuple):
    """Who is where after a step."""

    names: tuple[str, ...]  # of the requests in the step
    kv_blocks: dict[int, Name]
    rows: dict[int, Name]
    files: tuple[Name, ...]
    sizes: tuple[int, int]  # how many KV blocks there are, and how many rows
    stores: tuple[tuple[int, int], ...] = ()  # (KV block, row), at the head of the step
    loads: tuple[tuple[int, int], ...] = ()  # (row, KV block), behind them
    saves: tuple[tuple[int, int], ...] = ()  # (KV block, row), at its end


@contextmanager
def watch_tiers(llm: LLM, prompts: Mapping[str, list[int]]) -> Iterator[list[TierStep]]:
    """The steps of an engine with a CPU tier, behind one for the beginning. A request, and a block,
    is named after the first prompt that begins with the same block. Each step waits for the disk,
    so that the picture is the same each time. Raises ValueError if the engine has no CPU tier."""
    if llm.engine.kv_connector is None:
        raise ValueError("this engine has no CPU tier: set kv_offloading_size.")
    size = llm.engine.config.block_size
    names: dict[tuple[int, ...], str] = {}
    for name, token_ids in prompts.items():
        names.setdefault(tuple(token_ids[:size]), name)
    files = name_files(llm, prompts)
    steps = [look(llm, names, files, (), None)]

    def note(report: StepReport) -> None:
        seqs = [update.sequence for update in report.updates]
        running = [names.get(tuple(seq.prompt_token_ids[:size]), "?") for seq in seqs]
        metadata = report.scheduler_output.kv_connector_metadata
        steps.append(look(llm, names, files, tuple(dict.fromkeys(running)), metadata))

    llm.engine.step_listeners.append(note)
    try:
        yield steps
    finally:
        llm.engine.step_listeners.remove(note)


def name_files(llm: LLM, prompts: Mapping[str, list[int]]) -> dict[str, Name]:
    """The name of each block's file -> the block, for all full blocks of the prompts."""
    size, digests = llm.engine.config.block_size, llm.engine.kv_connector.digests
    files: dict[str, Name] = {}
    for name, token_ids in prompts.items():
        node = BlockHash(None, None)
        for number in range(len(token_ids) // size):
            node = BlockHash(node, tuple(token_ids[number * size : (number + 1) * size]))
            files.setdefault(digests.get(node).hex(), (name, number))
    return files


def look(
    llm: LLM,
    names: Mapping[tuple[int, ...], str],
    files: Mapping[str, Name],
    running: tuple[str, ...],
    metadata: Any,
) -> TierStep:
    """Who is where now."""
    engine, connector = llm.engine, llm.engine.kv_connector
    cached_blocks = engine.block_manager.pool.cached_blocks
    kv_blocks = {block: name_block(key, names) for key, block in cached_blocks.items()}
    held = connector.manager.policy.items()
    rows = {block.block_id: name_block(key, names) for key, block in held}
    stored: list[Name] = []
    for tier in connector.tiers.tiers:
        if tier.tier_type == "fs":
            tier.drain_jobs(10.0)
            found = {path.stem for path in tier.files.mapper.folder.glob("*/*.bin")}
            stored += [name for file, name in files.items() if file in found]
    copies: Any = (metadata.stores, metadata.loads, metadata.saves) if metadata else ((), (), ())
    sizes = engine.executor.num_kv_blocks, connector.worker.num_blocks
    return TierStep(running, kv_blocks, rows, tuple(stored), sizes, *copies)


def name_block(block_hash: BlockHash, names: Mapping[Any, str]) -> Name:
    """The prompt that begins as this block's chain, and the block's place in the chain."""
    number, first = -1, block_hash
    node: BlockHash | None = block_hash
    while node is not None and node.parent is not None:
        number, first, node = number + 1, node, node.parent
    return names.get(first.token_ids, "?"), number


def tier_map(title: str, steps: Seq[TierStep]) -> None:
    """A line for each step. All tiers with their blocks, and the copies as arrows."""
    num_files = max(len(step.files) for step in steps)
    sizes = dict(zip(("KV blocks", "rows in main memory"), steps[-1].sizes, strict=True))
    sizes |= {"files": num_files} if num_files else {}
    cell = min(CELL, (WIDTH - LEFT - GAP * len(sizes)) / sum(sizes.values()))
    height = 0.95 + BETWEEN * len(steps)
    ax = canvas(height, title)
    lefts, x = dict[str, float](), LEFT
    for tier, number in sizes.items():
        lefts[tier] = x
        label(ax, x, height - 0.48, tier, 9, ha="left", color=FAINT)
        x += number * cell + GAP
    for number, step in enumerate(steps):
        y = height - 0.95 - BETWEEN * number
        text = f"{' '.join(step.names)}" if number else "before"
        label(ax, 0, y + HEIGHT / 2, text, 9, ha="left", weight="bold" if number else "normal")
        contents = [step.kv_blocks, step.rows, dict(enumerate(step.files))]
        for (tier, size), content in zip(sizes.items(), contents, strict=False):
            for place in range(size):
                left = lefts[tier] + place * cell
                if tier != "files" or place in content:
                    _draw_block(ax, left, y, cell, content.get(place))
        before = steps[number - 1] if number else step
        _draw_copies(ax, before, step, [lefts[tier] + cell / 2 for tier in sizes], cell, y)
    note = (
        "Arrows down and to the right: kept. Red: back into a KV block. Grey: from and to a file."
    )
    label(ax, WIDTH, 0.1, note, 8, ha="right", color=FAINT)
    show()


def _draw_block(ax: Axes, x: float, y: float, width: float, name: Name | None) -> None:
    if name is None:
        box(ax, x, y, width - 0.04, HEIGHT, facecolor="white", edgecolor=LINE, linewidth=0.5)
        return
    prompt, number = name
    face = tint(prompt, 0.45) if prompt != "?" else "#EEEEEE"
    box(ax, x, y, width - 0.04, HEIGHT, facecolor=face, edgecolor=LINE)
    text, size = fit(f"{prompt}{number}", width - 0.08, 9)
    label(ax, x + width / 2 - 0.02, y + HEIGHT / 2, text, size)


def _draw_copies(
    ax: Axes, before: TierStep, step: TierStep, lefts: list[float], cell: float, y: float
) -> None:
    """The arrows of a step's line; `lefts`: the middle of the first block of each tier."""
    kv, rows, *files = lefts
    top, above = y + HEIGHT, y + BETWEEN
    for block, row in step.stores:
        _draw_arrow(ax, (kv + block * cell, above), (rows + row * cell, top), INK)
    for row, block in step.loads:
        from_disk = before.rows.get(row) != step.rows.get(row)
        start, bend = (top, 0.1) if from_disk else (above, 0.0)
        _draw_arrow(ax, (rows + row * cell, start), (kv + block * cell, top), BACK, bend)
    for block, row in step.saves:
        _draw_arrow(ax, (kv + block * cell, y), (rows + row * cell, y), INK, 0.1)
    written = {row for _, row in (*step.stores, *step.saves)}
    for row, name in step.rows.items():
        if name not in step.files:
            continue
        file = files[0] + step.files.index(name) * cell
        if name not in before.files:
            _draw_arrow(ax, (rows + row * cell, y), (file, y), FAINT, 0.1)
        elif before.rows.get(row) != name and row not in written:
            _draw_arrow(ax, (file, top), (rows + row * cell, top), FAINT, 0.1)


def _draw_arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], shade: str, bend: float = 0
) -> None:
    """`bend`: how far to the right of its way the arrow goes, as a share of its length."""
    from matplotlib.patches import FancyArrowPatch

    style: Any = {"arrowstyle": "-|>", "mutation_scale": 8, "color": shade, "linewidth": 0.9}
    connection = f"arc3,rad={bend}"
    ax.add_patch(FancyArrowPatch(start, end, connectionstyle=connection, **style))


# -- who has to go --


class Access(NamedTuple):
    """Both policies after an access; each list with the next to be evicted, or forgotten, first."""

    key: str
    lru: tuple[str, ...]
    lru_hit: bool
    arc: dict[str, tuple[str, ...]]  # "b1", "t1", "t2", "b2"
    arc_hit: bool
    target: float  # p


def run_policies(accesses: str, rows: int) -> list[Access]:
    """The policies of the CPU tier, which decide about letters in place of blocks."""
    lru, arc, found = LRUPolicy[str](rows), ARCPolicy[str](rows), []
    for key in accesses:
        lru_hit, arc_hit = use(lru, key), use(arc, key)
        lists = {name: tuple(getattr(arc, name)) for name in ("b1", "t1", "t2", "b2")}
        found.append(Access(key, tuple(lru), lru_hit, lists, arc_hit, arc.target_t1_size))
    return found


def use(policy: CachePolicy[str], key: str) -> bool:
    """One access, as CPUOffloadingManager makes it. Was the block here?"""
    if policy.get(key):
        policy.touch(key)
        return True
    policy.miss(key)
    if len(list(policy)) == policy.capacity:
        policy.evict(key, lambda other, block: True)
    policy.insert(key, Block(0))
    return False


def evictions(title: str, accesses: str, rows: int) -> None:
    """LRU beside ARC: a line for each access, a box for each block. Ghosts are dashed."""
    found = run_policies(accesses, rows)
    height = 1.3 + 0.36 * len(found)
    ax = canvas(height, title)
    wide = {name: max(1, *(len(each.arc[name]) for each in found)) for name in found[0].arc}
    lefts, x = {"LRU": 1.0}, 1.0 + (rows + 1.6) * CELL
    for name, number in wide.items():
        lefts[name] = x
        x += (number + 0.8) * CELL
    for name, left in (*lefts.items(), ("access", 0.0), ("p", x)):
        shown = f"ARC: {name}" if name == "b1" else name
        label(ax, left, height - 0.5, shown, 9, ha="left", color=FAINT)
    for number, each in enumerate(found):
        y = height - 0.98 - 0.36 * number
        label(ax, 0.2, y + HEIGHT / 2, each.key, 10, weight="bold")
        _draw_list(ax, lefts["LRU"], y, each.lru, each.key if each.lru_hit else "")
        for name, keys in each.arc.items():
            hit = each.key if each.arc_hit and name[0] == "t" else ""
            _draw_list(ax, lefts[name], y, keys, hit, is_ghost=name[0] == "b")
        label(ax, x + 0.05, y + HEIGHT / 2, f"{each.target:g}", 9)
    hits = f"hits: LRU {sum(e.lru_hit for e in found)}, ARC {sum(e.arc_hit for e in found)}"
    note = f"{hits}. Thick: a hit. Dashed: a ghost, which has no row."
    label(ax, WIDTH, 0.1, note, 8, ha="right", color=FAINT)
    show()


def _draw_list(
    ax: Axes, x: float, y: float, keys: Seq[str], hit: str, is_ghost: bool = False
) -> None:
    for place, key in enumerate(keys):
        face = "white" if is_ghost else colour(key.upper())
        style = {"linestyle": "--"} if is_ghost else {}
        edge, width = (INK, 2.4) if key == hit else (LINE, 0.8)
        left = x + place * CELL
        box(
            ax,
            left,
            y,
            CELL - 0.06,
            HEIGHT,
            facecolor=face,
            edgecolor=edge,
            linewidth=width,
            **style,
        )
        ink = FAINT if is_ghost else on_colour(key.upper())
        label(ax, left + CELL / 2 - 0.03, y + HEIGHT / 2, key, 9, color=ink)
