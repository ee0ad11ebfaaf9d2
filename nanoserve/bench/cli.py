"""nanoserve bench: the command line, the table, the JSON file.

    $ nanoserve bench latency --variant "fast:kernels=fast" --json result.json
    this machine: 28 GB/s, 199 GFLOP/s (measured, float32)
    latency: 3 rounds of nanoserve, fast; at most 14 s
    latency     tpot_ms  ttft_ms     x  same_tokens
    nanoserve      3.05     5.71  1.00         1.00
    fast           1.22     3.90  2.50         1.00
    cost model     1.33     1.84
    roofline       0.18     0.57

Without a suite, those of QUICK_SUITES run at their quick size. `gpu` is three suites at the size of
nano-vllm's published workload: Qwen3-0.6B's shape, 256 requests of 100 to 1024 tokens in and out.

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

QUICK_SUITES: tuple[str, ...] = ("throughput", "latency", "roofline", "prefix", "serve", "gap")
QUICK_SUITES += ("repeat", "structured", "chats", "kernel")
SUITES = (*QUICK_SUITES, "pipeline", "scale", "gpu")
# What some engines can run: they do not tell when a token came, or know no arrivals.
CAN_RUN = {"transformers": {*SUITES} - {"serve", "gap"}, "http": {*SUITES} - {"gap"}}
CAN_RUN |= {each: {"throughput", "prefix"} for each in ("nano-vllm", "mini-sglang")}
GPU_SUITES = ("throughput", "gap", "kernel")
GPU = {"num_requests": 256, "min_len": 100, "max_len": 1024, "long_len": 16384}
SIZES = {
    "num_requests": (32, "requests of a round"),
    "min_len": (50, "tokens of the shortest prompt and output"),
    "max_len": (256, "tokens of the longest prompt and output"),
    "prefix_len": (512, "tokens with which prompts begin (prefix, repeat, chats)"),
    "long_len": (2048, "tokens of the long prompt (gap)"),
    "repeat": (3, "rounds"),
}
QUICK = dict(zip(SIZES, (8, 16, 48, 256, 512, 2), strict=True))
ABOUT = "How fast is nanoserve, beside its peers and beside itself with another option?"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("nanoserve bench", description=ABOUT)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    text = "small sizes: all but the last three suites in a minute"
    parser.add_argument("--quick", action="store_true", help=text)
    parser.add_argument("--model", help="a folder or Hugging Face id; the demo model")
    parser.add_argument("--dummy", choices=DUMMY_MODELS, help="random weights of this shape")
    text = "of the dummy's weights; bfloat16, as published ones are"
    parser.add_argument("--dtype", default="bfloat16", help=text)
    text = "nanoserve again, as LABEL:OPTION=VALUE;OPTION=VALUE (may be repeated)"
    parser.add_argument("--variant", action="append", default=[], help=text)
    text = "transformers, vllm, nano-vllm, mini-sglang, http (our server); or NAME=ITS_PYTHON"
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
    sizes: dict[str, Any] = {name: value for name, (value, _) in SIZES.items()}
    if args.quick:
        sizes |= QUICK
    if "gpu" in args.suites:
        import torch

        if not torch.cuda.is_available():
            parser.error(f"gpu needs a CUDA GPU. A CPU runs its parts: {' '.join(GPU_SUITES)}.")
        args.suites, sizes = [*GPU_SUITES], sizes | GPU
        if not args.model:
            args.dummy = args.dummy or "qwen3-0.6b"
    sizes |= {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    results = measure(args, sizes)
    if args.json:
        content = {"machine": describe_machine(), "arguments": argv, "results": results}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(args: argparse.Namespace, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """suite -> engine -> figures. Each table is printed when its suite has ended."""
    from nanoserve.kernels.threads import load_torch

    load_torch()  # before anything else does, so that its threads wait as in an LLM
    from nanoserve.bench import suites
    from nanoserve.bench.cost_model import measure_machine
    from nanoserve.bench.workload import write_dummy
    from nanoserve.kernels.device import choose_device
    from nanoserve.kernels.selector import choose_dtype
    from nanoserve.models.config import ModelConfig, resolve_folder

    folder = write_dummy(args.dummy, args.dtype) if args.dummy else resolve_folder(args.model)
    variants = [suites.Variant("nanoserve"), *map(suites.parse_variant, args.variant)]
    variants += map(suites.parse_peer, args.peer)
    if args.quick:
        print(f"quick: {len(args.suites or QUICK_SUITES)} suites, in about a minute together")
    if args.url:
        variants = [suites.Variant("server", "http", {"url": args.url})]
    dtype = choose_dtype("auto", ModelConfig.from_folder(folder), choose_device("auto"))
    machine = measure_machine(dtype)
    limits = f"{machine.bandwidth / 1e9:,.0f} GB/s, {machine.rate / 1e9:,.0f} GFLOP/s"
    name = str(dtype).removeprefix("torch.")
    print(f"this machine: {limits} (measured, {name})")
    sizes = {**sizes, "rate": args.rate, "dtype": name, "machine": None if args.url else machine}
    settings = suites.Settings(folder, tuple(variants), **sizes)
    results: dict[str, Any] = {}
    for suite in args.suites or QUICK_SUITES:
        found: dict[str, Any] = {}
        if suite == "kernel":
            from nanoserve.bench.kernels import measure_kernels

            found = measure_kernels(machine, dtype, args.quick)
        elif suite == "scale":
            from nanoserve.bench.scale import measure_scale

            found[suite] = measure_scale(args.quick)
        else:
            own = [each for each in variants if suite in CAN_RUN.get(each.engine, {*SUITES})]
            found[suite] = suites.compare(suite, replace(settings, variants=tuple(own)))
        for title, result in found.items():
            print(make_table(title, result), flush=True)
        results |= found
    return results


def make_table(title: str, result: Mapping[str, Mapping[str, float]]) -> str:
    """One row for each engine, one column for each figure."""
    keys = list(next(iter(result.values())))
    rows = [[title, *keys]]
    for label, figures in result.items():
        rows.append([label, *(f"{figures[key]:,.2f}" if key in figures else "" for key in keys)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join([f"{{:{widths[0]}}}", *(f"{{:>{width}}}" for width in widths[1:])])
    return "\n".join([*(form.format(*row).rstrip() for row in rows), ""])


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
