"""Which states has a sequence, and which has a block? Two state machines.

The states are the members of the enums SequenceStatus and BlockState. The transitions are the two
tables below; tests/test_trace.py runs random requests and finds every transition that happens in
the tables, and every transition of the tables in a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from nanoserve.block_manager import BlockState
from nanoserve.extras.trace.style import COLOURS, FAINT, INK, WIDTH, canvas, label, show
from nanoserve.sequence import SequenceStatus

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WAITING, RUNNING, SWAPPED = (
    SequenceStatus.WAITING,
    SequenceStatus.RUNNING,
    SequenceStatus.SWAPPED,
)


class Change(NamedTuple):
    """One arrow: what happens, and which function does it."""

    source: SequenceStatus
    target: SequenceStatus
    text: str
    code: str


class BlockChange(NamedTuple):
    """One arrow of a block. `pool`: "KV" or "CPU"."""

    pool: str
    source: BlockState
    target: BlockState
    text: str
    code: str


SEQUENCE_CHANGES = (
    Change(WAITING, RUNNING, "admitted: gets blocks", "Scheduler._admit"),
    Change(RUNNING, WAITING, "preempted: blocks freed", "Scheduler.preempt"),
    Change(RUNNING, SWAPPED, "blocks to the CPU", "Scheduler._swap_out"),
    Change(SWAPPED, RUNNING, "blocks come back", "Scheduler._swap_in"),
    Change(SWAPPED, WAITING, "a step failed", "Scheduler.preempt_all"),
)
# Any unfinished sequence can end in each of these ways. (One that waits can end by its own token
# with overlapped steps only: the token was in flight when the sequence was preempted.)
ENDINGS = {
    SequenceStatus.FINISHED_STOPPED: "a stop token or a stop string",
    SequenceStatus.FINISHED_LENGTH: "max_tokens, or nothing more fits",
    SequenceStatus.FINISHED_ABORTED: "abort_request",
    SequenceStatus.FINISHED_ERROR: "an error of this request",
}
FREE, ALLOCATED, ON_CPU = BlockState.FREE, BlockState.ALLOCATED, BlockState.SWAPPED
BLOCK_CHANGES = (
    BlockChange(
        "KV",
        FREE,
        ALLOCATED,
        "a sequence needs a block,\nor finds it by its hash",
        "BlockPool.allocate, share",
    ),
    BlockChange(
        "KV", ALLOCATED, FREE, "its last owner ends,\nis preempted or swapped", "BlockPool.free"
    ),
    BlockChange("CPU", FREE, ON_CPU, "a sequence is swapped out", "BlockManager.swap_out"),
    BlockChange("CPU", ON_CPU, FREE, "it comes back, or ends", "BlockManager.swap_in, free"),
)

NODE_WIDTH, NODE_HEIGHT = 1.5, 0.5  # inches


def allowed_sequence_changes() -> set[tuple[SequenceStatus, SequenceStatus]]:
    """All (source, target) of the picture."""
    ends = {(source, end) for source in (WAITING, RUNNING, SWAPPED) for end in ENDINGS}
    return ends | {(change.source, change.target) for change in SEQUENCE_CHANGES}


def allowed_block_changes() -> set[tuple[str, BlockState, BlockState]]:
    """All (pool, source, target) of the picture."""
    return {(change.pool, change.source, change.target) for change in BLOCK_CHANGES}


def sequence_states(title: str) -> None:
    """Draw SequenceStatus: boxes are its members, arrows are the changes of a running engine."""
    ax = canvas(4.05, title)
    places = {WAITING: (1.35, 2.75), RUNNING: (4.75, 2.75), SWAPPED: (4.75, 0.75)}
    for status, (x, y) in places.items():
        _node(ax, x, y, status.name, COLOURS[0] if status is RUNNING else "#FFFFFF")
    label(ax, 1.35, 3.28, "add_request, or a fork", 8.5, color=FAINT)
    _arrow(ax, (1.35, 3.2), (1.35, 3.01))
    changes = {(change.source, change.target): change for change in SEQUENCE_CHANGES}
    up, down = 0.13, -0.13
    left, right = 1.35 + NODE_WIDTH / 2, 4.75 - NODE_WIDTH / 2
    _edge(ax, (left, 2.75 + up), (right, 2.75 + up), changes.pop((WAITING, RUNNING)), (3.05, 3.12))
    _edge(
        ax, (right, 2.75 + down), (left, 2.75 + down), changes.pop((RUNNING, WAITING)), (3.05, 2.4)
    )
    _edge(ax, (4.55, 2.5), (4.55, 1.0), changes.pop((RUNNING, SWAPPED)), (3.76, 1.75))
    _edge(ax, (4.95, 1.0), (4.95, 2.5), changes.pop((SWAPPED, RUNNING)), (5.78, 1.75))
    _edge(ax, (4.0, 0.75), (1.35, 2.5), changes.pop((SWAPPED, WAITING)), (1.72, 1.2), bend=-0.25)
    assert not changes, f"no place for {changes}"
    _group(ax, 7.05, 0.4, WIDTH - 7.05, 3.1, "finished; its blocks are free")
    for row, (status, text) in enumerate(ENDINGS.items()):
        y = 2.75 - 0.68 * row
        _node(ax, 8.15, y, status.name, "#E4E4E4", 1.95, 0.4, 8.5)
        label(
            ax,
            9.2,
            y,
            text.replace(", ", ",\n").replace(" or a", "\nor a").replace("of this", "of\nthis"),
            8,
            ha="left",
        )
    _arrow(ax, (5.5, 2.75), (7.05, 2.75))
    label(ax, 6.27, 2.92, "ends", 8.5)
    label(ax, 6.27, 2.5, "from any state\non the left", 8, color=FAINT)
    show()


def block_states(title: str) -> None:
    """Draw BlockState, for the blocks of the KV cache and for those in CPU memory."""
    ax = canvas(4.1, title)
    _group(ax, 0.05, 2.1, WIDTH - 0.1, 1.55, "blocks of the KV cache")
    _group(ax, 0.05, 0.12, WIDTH - 0.1, 1.55, "blocks in CPU memory (only with swapping)")
    free_x, held_x = 2.2, 7.2
    for y, pool, held in ((2.8, "KV", ALLOCATED), (0.77, "CPU", ON_CPU)):
        _node(ax, free_x, y, FREE.name, "#FFFFFF")
        _node(ax, held_x, y, held.name, COLOURS[0] if pool == "KV" else COLOURS[4])
        a, b = free_x + NODE_WIDTH / 2, held_x - NODE_WIDTH / 2
        for change in BLOCK_CHANGES:
            if change.pool == pool and change.source is FREE:
                _edge(ax, (a, y + 0.13), (b, y + 0.13), change, ((a + b) / 2, y + 0.42))
            elif change.pool == pool:
                _edge(ax, (b, y - 0.13), (a, y - 0.13), change, ((a + b) / 2, y - 0.42))
    label(
        ax,
        0.2,
        2.35,
        "reference count 0; may still hold a\nprefix that can be found",
        8,
        ha="left",
        color=FAINT,
    )
    label(
        ax,
        8.1,
        2.8,
        "reference count 1 or more;\neach owner has the block\nin its block table",
        8,
        ha="left",
        color=FAINT,
    )
    label(ax, 8.1, 0.77, "holds one block of\na swapped sequence", 8, ha="left", color=FAINT)
    _arrow(ax, (held_x, 2.55), (held_x, 1.02), dashed=True)
    label(ax, held_x + 0.12, 1.87, "contents are copied, both ways", 8, ha="left")
    show()


# -- drawing --


def _node(
    ax: Axes,
    x: float,
    y: float,
    text: str,
    face: str,
    width: float = NODE_WIDTH,
    height: float = NODE_HEIGHT,
    size: float = 10,
) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner = (x - width / 2, y - height / 2)
    style: dict[str, Any] = {
        "boxstyle": "round,pad=0,rounding_size=0.12",
        "edgecolor": INK,
        "linewidth": 1.2,
    }
    ax.add_patch(FancyBboxPatch(corner, width, height, facecolor=face, zorder=3, **style))
    is_dark = face == COLOURS[0]
    label(ax, x, y, text, size, weight="bold", color="white" if is_dark else INK, zorder=4)


def _group(ax: Axes, x: float, y: float, width: float, height: float, text: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    style: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=0.1", "edgecolor": "none"}
    ax.add_patch(FancyBboxPatch((x, y), width, height, facecolor="#F4F5F7", zorder=0, **style))
    label(ax, x + 0.15, y + height - 0.16, text, 8.5, ha="left", color=FAINT, weight="bold")


def _arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    bend: float = 0.0,
    dashed: bool = False,
) -> None:
    from matplotlib.patches import FancyArrowPatch

    arrow = FancyArrowPatch(
        start,
        end,
        arrowstyle="<|-|>" if dashed else "-|>",
        connectionstyle=f"arc3,rad={bend}",
        mutation_scale=12,
        shrinkA=1,
        shrinkB=1,
        color=FAINT if dashed else INK,
        linewidth=1.2,
        linestyle="--" if dashed else "-",
        zorder=2,
    )
    ax.add_patch(arrow)


def _edge(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    change: Change | BlockChange,
    place: tuple[float, float],
    bend: float = 0.0,
) -> None:
    """An arrow with its text at `place`, and the function below the text."""
    _arrow(ax, start, end, bend)
    lines = change.text.count("\n") + 1
    offset = 0.075 * lines
    label(ax, place[0], place[1] + 0.075, change.text, 8.5)
    label(ax, place[0], place[1] - offset, change.code, 7.5, color=FAINT, family="monospace")
