"""Writes the pictures of the READMEs: `python notebooks/pictures/make.py` (or some names only).

    hero            hero.svg, hero.zh-CN.svg: a run of the demo model, step by step
    architecture    architecture.svg, architecture.zh-CN.svg: the two planes
    benchmark       benchmark.svg, benchmark.zh-CN.svg: throughput, from notebooks/results/
    scale           scale.svg, scale.zh-CN.svg: what a cost model says of more GPUs
    replicas        replicas.svg, replicas.zh-CN.svg: routers, from notebooks/results/

Needs no GPU, no download, and no package but nanoserve. After a change to the engine, the demo
model or a result, run it again; `pytest tests/test_pictures.py` says when that is due.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported
FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent.parent)]  # this folder's modules, this checkout

LANGUAGES = {"en": "", "zh-CN": ".zh-CN"}


def make_hero() -> dict[str, str]:
    """File name -> content."""
    import hero

    frames = hero.record_story()
    return {f"hero{s}.svg": hero.draw(frames, name) for name, s in LANGUAGES.items()}


def make_architecture() -> dict[str, str]:
    import architecture

    return {f"architecture{s}.svg": architecture.draw(name) for name, s in LANGUAGES.items()}


def make_benchmark() -> dict[str, str]:
    import benchmark

    return {f"benchmark{s}.svg": benchmark.draw(name) for name, s in LANGUAGES.items()}


def make_scale() -> dict[str, str]:
    import scale

    return {f"scale{s}.svg": scale.draw_scale(name) for name, s in LANGUAGES.items()}


def make_replicas() -> dict[str, str]:
    import scale

    return {f"replicas{s}.svg": scale.draw_replicas(name) for name, s in LANGUAGES.items()}


MAKERS = {
    "hero": make_hero,
    "architecture": make_architecture,
    "benchmark": make_benchmark,
    "scale": make_scale,
    "replicas": make_replicas,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MAKERS)}")
    names = parser.parse_args().names or list(MAKERS)
    if unknown := set(names) - set(MAKERS):
        parser.error(f"no picture is called {', '.join(unknown)}; there are {', '.join(MAKERS)}")
    for name in names:
        for file, content in MAKERS[name]().items():
            (FOLDER / file).write_text(content, "utf-8")
            print(f"{file}: {len(content.encode()) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
