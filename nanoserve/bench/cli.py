"""How fast is it, beside its peers and beside the limits of this machine?

    python bench.py                                   the demo model, all suites, about two minutes
    python bench.py --suite throughput --dummy qwen3-29m --compare hf,hf-continuous,vllm
    python bench.py --suite gpu --json gpu.json --plot gpu.png

(`python -m nanoserve.bench` is the same command.)

Peers run the same requests on the same checkpoint in the same run, each in a process of its own. A
peer that is not importable is left out, and the result says so. Shown are medians over `--repeat`
rounds, the ratio of nanoserve to each peer, and the share of the roofline: the time that the
measured bandwidth and operation rate of this machine allow. On a busy machine, ratios close to 1
say nothing: see the range.

Suites: throughput, batch, latency, prefix, scheduler, memory, steps, kernel, parallel; `gpu` is
throughput, batch, steps and kernel in nano-vllm's published workload (Qwen3-0.6B's shape, 256
requests).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from ast import literal_eval
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nanoserve.bench import control, inside, kernels, plot, report, suites
from nanoserve.bench.peers import PEERS
from nanoserve.bench.roofline import measure_limits
from nanoserve.bench.turns import Settings
from nanoserve.bench.workload import DUMMY_MODELS, write_dummy
from nanoserve.config import ModelConfig, resolve_folder

Values = dict[str, Any]


# name -> a function that measures and returns plain values, as --json writes them
SUITES: dict[str, Callable[[Settings], Values]] = {
    "throughput": suites.throughput_suite,
    "batch": suites.batch_suite,
    "latency": suites.latency_suite,
    "prefix": inside.prefix_suite,
    "scheduler": control.scheduler_suite,
    "memory": control.memory_suite,
    "steps": inside.steps_suite,
    "kernel": kernels.kernel_suite,
    "parallel": inside.parallel_suite,
}
DEFAULT_SUITES = ("throughput", "latency", "prefix", "scheduler", "memory", "steps", "kernel")
GPU_SUITES = ("throughput", "batch", "steps", "kernel")

PEER_NAMES = tuple(name for name in PEERS if name != "nanoserve")
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
    "variants": [],
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.py", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--suite", type=names_of("suite", [*SUITES, "gpu"]),
        help=f"{', '.join(SUITES)} or gpu; several with commas")  # fmt: skip
    add("--model", help="folder or Hugging Face id (default: the demo model)")
    add("--dummy", choices=DUMMY_MODELS, help="random weights in a published shape instead")
    add("--dummy-dir", type=Path, help="keep random weights here for the next run")
    add("--compare", type=names_of("peer", [*PEER_NAMES, "none"]),
        help="peers: hf, hf-continuous, vllm, nano-vllm; or none (default: all)")  # fmt: skip
    add("--peer-python", type=peer_python, action="append", default=[], metavar="PEER=PYTHON",
        help="run a peer in another environment, by its interpreter")  # fmt: skip
    add("--nano-vllm", metavar="FOLDER", help="a checkout of nano-vllm, if it is not installed")
    add("--variant", type=variant, action="append", dest="variants",
        metavar="NAME:OPTION=VALUE,...",
        help="a further nanoserve, with options of LLM")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    add("--dtype", help="default: float32 on a CPU, bfloat16 on a GPU")
    add("--num-requests", type=int, help="default: 32 on a CPU, 256 on a GPU")
    add("--min-len", type=int, help="tokens, of prompts and of outputs (default: 50, GPU 100)")
    add("--max-len", type=int, help="tokens, of prompts and of outputs (default: 256, GPU 1024)")
    add("--latency-requests", type=int, default=4, help="requests of the latency suite")
    add("--batch-sizes", type=numbers, help="of the batch suite (default: 1,2,4,8,16,32)")
    add("--hf-batch-sizes", type=numbers, default=(32, 8), help="static batches of the peer hf")
    add("--prefix-len", type=int, default=512, help="shared tokens of the prefix suite")
    add("--temperature", type=float, help="default: 0, in the gpu suite 0.6")
    add("--threads", type=int, help="of every engine's CPU work (default: each one's own choice)")
    add("--repeat", type=int, help="rounds; medians are shown (default: 3)")
    add("--seed", type=int, default=0, help="of the requests and of random weights")
    add("--json", type=Path, help="write the result to this file")
    add("--note", default="", help="a remark to keep with the result, such as: busy machine")
    add("--plot", type=Path, help="draw the result to this file (adds batch and steps)")
    return parser


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser()
    args = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            result = measure(args, arguments, Path(scratch))
        if args.plot:
            plot.draw(result, args.plot)
    except ValueError as error:
        parser.error(str(error))


def measure(args: argparse.Namespace, arguments: list[str], scratch: Path) -> Values:
    """Run the suites one after the other, print each, and return (and write) the whole result."""
    names, is_toy = fill_in(args)
    if args.threads:
        torch.set_num_threads(args.threads)
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
    }
    if is_toy:
        print("No CUDA device: toy sizes on the CPU, only to show that the command runs.")
    print(report.format_run(result))
    for name in names:
        result["suites"][name] = SUITES[name](settings)
        print(f"\n{report.format_suite(name, result['suites'][name])}", flush=True)
        if args.json:  # after each suite, so that an interrupted run keeps its results
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def fill_in(args: argparse.Namespace) -> tuple[list[str], bool]:
    """Set the options that were not given. Returns the suites, and whether the sizes are a toy's:
    the gpu suite without a GPU."""
    if args.dummy and args.model:
        raise ValueError("--dummy and --model name two models; give one of them.")
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    is_gpu_suite = "gpu" in (args.suite or [])
    is_toy = is_gpu_suite and args.device == "cpu"
    defaults = {**DEFAULTS, **(ON_CPU if args.device == "cpu" else ON_GPU)}
    defaults |= (GPU_WORKLOAD if is_gpu_suite else {}) | (TOY if is_toy else {})
    if args.model:
        defaults.pop("dummy", None)
    for option, value in defaults.items():
        if getattr(args, option) is None:
            setattr(args, option, value)
    names = [*(args.suite or DEFAULT_SUITES), *(("batch", "steps") if args.plot else ())]
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
    given = {name: value for name, value in vars(args).items() if name in Settings.__annotations__}
    given |= {
        "folder": folder,
        "model": args.dummy or (Path(args.model).name if args.model else folder.name),
        "compare": tuple(name for name in args.compare if name != "none"),
        "variants": dict(args.variants),
        "peer_python": dict(args.peer_python),
        # At the end, since it takes seconds.
        "limits": measure_limits(torch.device(args.device), getattr(torch, args.dtype)),
    }
    return Settings(**given)


# -- the values of options; argparse shows an ArgumentTypeError's message --


def names_of(what: str, allowed: list[str]) -> Callable[[str], list[str]]:
    """A function: "hf,vllm" -> ["hf", "vllm"]."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := sorted(set(names) - set(allowed)):
            message = f"no {what} {', '.join(unknown)}; allowed: {', '.join(allowed)}."
            raise argparse.ArgumentTypeError(message)
        return names

    return parse


def peer_python(text: str) -> tuple[str, str]:
    """ "vllm=~/vllm/bin/python" -> ("vllm", "/home/me/vllm/bin/python")."""
    name, _, python = text.partition("=")
    if name not in PEERS or not Path(python).expanduser().is_file():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not PEER=PYTHON, with the path of an interpreter."
        )
    return name, str(Path(python).expanduser())


def variant(text: str) -> tuple[str, Values]:
    """ "eager:enforce_eager=True" -> ("eager", {"enforce_eager": True})."""
    name, colon, options = text.partition(":")
    pairs = [option.partition("=") for option in options.split(",")]
    if not colon or not all(equals for _, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:OPTION=VALUE,OPTION=VALUE.")
    return name, {option: python_value(value) for option, _, value in pairs}


def python_value(text: str) -> Any:
    """ "True" -> True, "16" -> 16, "triton" -> "triton"."""
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def numbers(text: str) -> tuple[int, ...]:
    """ "1,2,4" -> (1, 2, 4)."""
    return tuple(int(number) for number in text.split(","))
