"""nanoserve bench: the command line, the table, the JSON file.

    $ nanoserve bench latency --variant "fast:kernels=fast" --json result.json
    latency: 3 rounds of nanoserve, fast; about 14 s
    latency    itl_ms  ttft_ms     x  same_tokens
    nanoserve    5.31     8.71  1.00         1.00
    fast         2.02     3.90  2.63         1.00

Without a suite, all of them run at their quick size.

vLLM: vllm/entrypoints/cli/benchmark/ (0.32).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from nanoserve.bench.workload import DUMMY_MODELS

SUITES = ("throughput", "latency", "prefix", "serve", "kernel")
QUICK = {"num_requests": 8, "min_len": 16, "max_len": 48, "prefix_len": 256, "repeat": 2}
SIZES = {
    "num_requests": (32, "requests of a round"),
    "min_len": (50, "tokens of the shortest prompt and output"),
    "max_len": (256, "tokens of the longest prompt and output"),
    "prefix_len": (512, "tokens with which all prompts begin (prefix)"),
    "repeat": (3, "rounds"),
}
ABOUT = "How fast is nanoserve, beside its peers and beside itself with another option?"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("nanoserve bench", description=ABOUT)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--quick", action="store_true", help="small sizes: all suites in a minute")
    parser.add_argument("--model", default="", help="a folder or Hugging Face id; the demo model")
    parser.add_argument("--dummy", choices=DUMMY_MODELS, help="random weights of this shape")
    parser.add_argument("--dtype", default="float32", help="of the dummy's weights")
    text = "nanoserve again, as LABEL:OPTION=VALUE;OPTION=VALUE (may be repeated)"
    parser.add_argument("--variant", action="append", default=[], help=text)
    text = "vllm or transformers, as NAME or NAME=PYTHON, the Python that has it (may be repeated)"
    parser.add_argument("--peer", action="append", default=[], help=text)
    for name, (value, text) in SIZES.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, help=f"{text}; {value}, quick: {QUICK[name]}")
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second (serve); 4")
    parser.add_argument("--url", help="measure this server (serve), such as http://localhost/v1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, too")
    return parser


def main(argv: list[str]) -> int:
    """Measure; print a table for each suite."""
    parser = make_parser()
    args = parser.parse_intermixed_args(argv)
    if wrong := [each for each in args.suites if each not in SUITES]:
        parser.error(f"no suite {wrong[0]!r}; allowed: {', '.join(SUITES)}.")
    args.quick |= not args.suites
    results = measure(args)
    if args.json:
        content = {"machine": describe_machine(), "arguments": argv, "results": results}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """suite -> engine -> figures. Each table is printed when its suite has ended."""
    from nanoserve.bench import suites
    from nanoserve.bench.workload import write_dummy
    from nanoserve.models.config import resolve_folder

    folder = (
        write_dummy(args.dummy, args.dtype) if args.dummy else resolve_folder(args.model or None)
    )
    variants = [suites.Variant("nanoserve"), *map(suites.parse_variant, args.variant)]
    variants += map(suites.parse_peer, args.peer)
    sizes: dict[str, Any] = {name: value for name, (value, _) in SIZES.items()} | (
        QUICK if args.quick else {}
    )
    sizes |= {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    if args.quick:
        print("quick: all suites in about a minute; without --quick, each takes minutes")
    settings = suites.Settings(folder, tuple(variants), **sizes, rate=args.rate)
    results: dict[str, Any] = {}
    for suite in args.suites or SUITES:
        found: dict[str, Any] = {}
        if suite == "kernel":
            from nanoserve.bench.kernels import measure_kernels

            found = measure_kernels(args.quick)
        elif suite == "serve" and args.url:
            from nanoserve.bench.client import measure_server

            found["serve"] = measure_server(args.url, settings)
        else:
            own = [each for each in variants if suite != "serve" or each.engine != "transformers"]
            found[suite] = suites.compare(suite, replace(settings, variants=tuple(own)))
        for title, result in found.items():
            print(make_table(title, result), flush=True)
        results |= found
    return results


def make_table(title: str, result: Mapping[str, Mapping[str, float]]) -> str:
    """One row for each engine, one column for each figure."""
    keys = list(next(iter(result.values())))
    rows = [[title, *keys]]
    rows += [[label, *(f"{each[key]:,.2f}" for key in keys)] for label, each in result.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for label, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([label.ljust(widths[0]), *padded]))
    return "\n".join([*lines, ""])


def describe_machine() -> dict[str, Any]:
    """What a figure depends on, beside the engine."""
    import torch

    versions = {"python": platform.python_version()}
    for package in ("nanoserve", "torch", "triton", "transformers", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpu = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return {"versions": versions, "gpu": gpu, "cpu": cpu}
