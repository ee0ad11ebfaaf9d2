"""What do the ranks of one engine say to each other in a step?

    with listen(llm.engine.executor.runner.parallel) as messages:
        llm.step()
    conversation("One decode step", messages)

`listen` writes down each operation of this process's rank, in order. All ranks call the same
operations in the same order, so rank 0's list is the list of all of them.

Left out: when an operation began and how long it took.

vLLM: none.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from nanoserve.extras.trace.style import FAINT, INK, label, panels, show
from nanoserve.parallel import CommStats, ParallelState


class Message(NamedTuple):
    """One operation of rank 0."""

    name: str  # as in CommStats: "all_reduce", "gather", "broadcast", "control", "send", "receive"
    num_bytes: int  # of rank 0's own tensor


@contextmanager
def listen(parallel: ParallelState) -> Iterator[list[Message]]:
    """A list to which every operation of this rank is added while the block lasts."""
    messages: list[Message] = []
    count = CommStats.count

    def count_and_write(self: CommStats, name: str, tensor: Tensor) -> None:
        count(self, name, tensor)
        if self is parallel.comm_stats:
            messages.append(Message(name, tensor.nbytes))

    CommStats.count = count_and_write  # type: ignore[method-assign]
    try:
        yield messages
    finally:
        CommStats.count = count  # type: ignore[method-assign]


# name -> colour, label, arrow of matplotlib from rank 0 (above) to rank 1 (below)
KINDS = {
    "control": ("#777777", "the step (SchedulerOutput)", "->"),
    "all_reduce": ("#56B4E9", "all-reduce: both send, both get the sum", "<->"),
    "gather": ("#D55E00", "gather: rank 1's part of the logits to rank 0", "<-"),
    "broadcast": ("#222222", "broadcast: the chosen tokens", "->"),
    "send": ("#009E73", "send: hidden states to the next stage", "->"),
    "receive": ("#D55E00", "receive: the logits from the last stage", "<-"),
}


def conversation(title: str, messages: Seq[Message]) -> None:
    """One step of two ranks: an arrow for each operation, with the bytes of rank 0's tensor."""
    from matplotlib.lines import Line2D

    [ax] = panels(1, 3.6, title)
    for y, name in ((1, "rank 0"), (0, "rank 1")):
        ax.plot((-0.5, len(messages) - 0.5), (y, y), color=INK, lw=1.2)
        label(ax, -0.7, y, name, 10, ha="right", weight="bold")
    num_sums = 0
    for x, message in enumerate(messages):
        colour, _, style = KINDS[message.name]
        arrow = {"arrowstyle": style, "color": colour, "lw": 2, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (x, 0.03), (x, 0.97), arrowprops=arrow)
        label(ax, x, 1.1, f"{message.num_bytes:,}", 8)
        places = {"control": "begin", "send": "hidden\nstates", "broadcast": "tokens"}
        place = places.get(message.name, "logits")
        if message.name == "all_reduce":
            layer, is_mlp = divmod(num_sums - 1, 2)
            part = "MLP" if is_mlp else "attention"
            place = f"layer {layer}\n{part}" if num_sums else "embed-\nding"
            num_sums += 1
        label(ax, x, -0.08, place, 8, va="top")
    label(ax, -0.7, 1.1, "bytes", 8, ha="right", color=FAINT)
    kinds = dict.fromkeys(message.name for message in messages)
    lines = [Line2D([], [], color=KINDS[name][0], lw=2) for name in kinds]
    names = [KINDS[name][1] for name in kinds]
    ax.figure.legend(lines, names, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    ax.set(xlim=(-1.9, len(messages) - 0.4), ylim=(-0.35, 1.2))
    ax.axis("off")
    show()
