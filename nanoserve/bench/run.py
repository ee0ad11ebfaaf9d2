"""One run of bench.py: the options become Settings, the suites run one after the other.

    given     --suite gpu --repeat 5, on a machine without a GPU
    filled    throughput, batch, steps, kernel; repeat=5; of the rest what TOY, GPU_WORKLOAD, ON_CPU
              and DEFAULTS say, in this order

cli.py reads the command line. That is a module of its own, so that it imports no torch.

vLLM: vllm/benchmarks/throughput.py, latency.py: main.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from nanoserve.bench import (
    claims,
    control,
    inside,
    kernels,
    plot,
    policies,
    quantization,
    replicas,
    report,
    serving,
    speculation,
    suites,
)
from nanoserve.bench.peers import PEER_NAMES
from nanoserve.bench.roofline import measure_limits
from nanoserve.bench.turns import Settings
from nanoserve.bench.workload import write_dummy
from nanoserve.config import ModelConfig, resolve_folder

Values = dict[str, Any]


def suite_of_chapter(name: str, chapter: str) -> Callable[[Settings], Values]:
    """That of the module `name`. It raises ValueError where the chapter of nanoserve/extras that it
    measures, which can be deleted, is not there."""

    def suite(settings: Settings) -> Values:
        try:
            module = import_module(f"nanoserve.bench.{name}")
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("nanoserve.extras"):
                raise
            raise ValueError(
                f"the suite {name} measures nanoserve/extras/{chapter}/, which is not here. Put "
                "the folder back, or choose other suites."
            ) from error
        return getattr(module, f"{name}_suite")(settings)

    return suite


# name -> a function that measures and returns plain values, as --json writes them
SUITES: dict[str, Callable[[Settings], Values]] = {
    "throughput": suites.throughput_suite,
    "batch": suites.batch_suite,
    "latency": suites.latency_suite,
    "batching": policies.batching_suite,
    "chunked": policies.chunked_suite,
    "prefix": inside.prefix_suite,
    "spec": speculation.spec_suite,
    "structured": suite_of_chapter("structured", "structured_output"),
    "quantization": quantization.quantization_suite,
    "offload": suite_of_chapter("offload", "kv_offload"),
    "scheduler": control.scheduler_suite,
    "memory": control.memory_suite,
    "steps": inside.steps_suite,
    "kernel": kernels.kernel_suite,
    "parallel": inside.parallel_suite,
    "scale": suite_of_chapter("scale", "replicas"),
    "serve": serving.serve_suite,
    "replicas": replicas.replicas_suite,
}
DEFAULT_SUITES = (
    "throughput", "latency", "batching", "chunked", "prefix", "scheduler", "memory", "steps",
    "kernel",
)  # fmt: skip
GPU_SUITES = ("throughput", "batch", "batching", "chunked", "steps", "kernel")

# What an option is that was not given. A line wins over the lines below it.
TOY = {"num_requests": 4, "min_len": 8, "max_len": 16, "batch_sizes": (1, 2), "repeat": 1,
       "dummy": "qwen3-tiny", "variants": []}  # fmt: skip
GPU_WORKLOAD = {
    "compare": ("hf-continuous", "nano-vllm", "vllm"),
    "dummy": "qwen3-0.6b",
    "temperature": 0.6,
    "batch_sizes": (1, 4, 16, 64, 256),
    "variants": [
        ("overlapped", {"async_scheduling": True}),
        ("eager", {"enforce_eager": True}),
    ],
}
ON_CPU = {"dtype": "float32", "num_requests": 32, "min_len": 50, "max_len": 256}
ON_GPU = {"dtype": "bfloat16", "num_requests": 256, "min_len": 100, "max_len": 1024}
DEFAULTS = {
    "compare": PEER_NAMES,
    "batch_sizes": (1, 2, 4, 8, 16, 32),
    "temperature": 0.0,
    "repeat": 3,
    "replicas": 2,
    "variants": [],
}


def measure(args: argparse.Namespace, arguments: list[str], scratch: Path) -> Values:
    """Run the suites one after the other, print each, and return (and write) the whole result.

    A suite that cannot run on this machine (memory is too small for it, say) is left out, and the
    next one runs. If none can, the last one's error is raised.
    """
    names, is_toy = fill_in(args)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, and PyTorch finds no such GPU here. Leave it out.")
    settings = make_settings(args, scratch)
    result: Values = {
        **report.describe_run(arguments, settings.device),
        "model": settings.model,
        "parameters": settings.costs.num_parameters,
        "dtype": settings.dtype,
        "device": settings.device,
        "is_toy": is_toy,
        "note": args.note,
        "limits": asdict(settings.limits),
        "suites": {},
        "left_out": {},  # suite -> why
    }
    if is_toy:
        print("No CUDA device: toy sizes on the CPU, only to show that the command runs.")
    print(report.format_run(result))
    for name in names:
        try:
            result["suites"][name] = SUITES[name](settings)
        except (ValueError, MemoryError, torch.OutOfMemoryError) as error:
            result["left_out"][name] = str(error)
            if len(result["left_out"]) == len(names):
                raise
            print(f"\n{name} is left out: it cannot run here. {error}", flush=True)
            continue
        print(f"\n{report.format_suite(name, result['suites'][name])}", flush=True)
        if args.json:  # after each suite, so that an interrupted run keeps its results
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if text := claims.format_claims(result["suites"]):
        print(f"\n{text}")
    return result


def fill_in(args: argparse.Namespace) -> tuple[list[str], bool]:
    """Set the options that were not given. Returns the suites, and whether the sizes are a toy's:
    the gpu suite without a GPU."""
    if args.dummy and args.model:
        raise ValueError("--dummy and --model name two models; give one of them.")
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    given = [*args.suites, *(args.suite or [])]
    is_gpu_suite = "gpu" in given
    is_toy = is_gpu_suite and args.device == "cpu"
    defaults = {**DEFAULTS, **(ON_CPU if args.device == "cpu" else ON_GPU)}
    defaults |= (GPU_WORKLOAD if is_gpu_suite else {}) | (TOY if is_toy else {})
    if args.model:
        defaults.pop("dummy", None)
    if args.replicas == 1:
        raise ValueError("--replicas is 1; allowed: 2 or more. The serve suite has one engine.")
    if args.replicas:
        given = ["replicas" if name == "serve" else name for name in given]
    for option, value in defaults.items():
        if getattr(args, option) is None:
            setattr(args, option, value)
    names = [*(given or DEFAULT_SUITES)]
    if args.plot and not {*names, *(GPU_SUITES if is_gpu_suite else ())} & {*plot.SUITES}:
        names += ["batch", "steps"]
    for i, name in enumerate(names):
        if name == "gpu":
            names[i : i + 1] = GPU_SUITES
    return list(dict.fromkeys(names)), is_toy


def make_settings(args: argparse.Namespace, scratch: Path) -> Settings:
    """Raises ValueError for lengths that do not fit the model."""
    if args.dummy:
        folder = write_dummy(args.dummy, args.dummy_dir or scratch, args.dtype, args.seed)
    else:
        folder = resolve_folder(args.model)
    longest = ModelConfig.from_folder(folder).max_model_len // 2
    if not 1 <= args.min_len <= args.max_len <= longest:
        raise ValueError(
            f"lengths are {args.min_len} to {args.max_len} tokens, in and out; allowed for this "
            f"model: 1 to {longest}. Set --min-len and --max-len."
        )
    known = {name: value for name, value in vars(args).items() if name in Settings.__annotations__}
    known |= {
        "folder": folder,
        "model": args.dummy or (Path(args.model).name if args.model else folder.name),
        "compare": tuple(name for name in args.compare if name != "none"),
        "variants": dict(args.variants),
        "peer_python": dict(args.peer_python),
        "goodput": dict(args.goodput),
        # At the end, since it takes seconds.
        "limits": measure_limits(torch.device(args.device), getattr(torch, args.dtype)),
    }
    return Settings(**known)
