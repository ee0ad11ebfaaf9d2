"""How fast is it, beside its peers and beside the limits of this machine?

    python bench.py                                   the demo model, most suites, 3 minutes
    python bench.py throughput --dummy qwen3-29m --compare hf,hf-continuous,vllm
    python bench.py gpu --json gpu.json --plot gpu.png

(`nanoserve bench` and `python -m nanoserve.bench` are the same command.)

This module reads the command line and checks all of it before an engine is built. It imports no
torch, so that --help and a refusal take no time; run.py does the rest.

Peers run the same requests on the same checkpoint in the same run, each in a process of its own. A
peer that is not importable is left out, and the result says so. Shown are medians over `--repeat`
rounds, the ratio of nanoserve to each peer, and the share of the roofline: of the speed that the
measured bandwidth and operation rate of this machine allow. On a busy machine, ratios close to 1
say nothing: see the range.

Suites: throughput, batch, latency, batching, chunked, prefix, spec, structured, quantization,
offload, scheduler, memory, steps, kernel, parallel, scale, serve, replicas; `gpu` is throughput,
batch, batching, chunked, steps and kernel in nano-vllm's published workload (Qwen3-0.6B's shape,
256 requests).
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nanoserve.arg_utils import python_value, read_options
from nanoserve.bench.peers import PEER_NAMES, PEERS
from nanoserve.bench.workload import DUMMY_MODELS
from nanoserve.config import EngineConfig
from nanoserve.kernels.threads import load_torch

Values = dict[str, Any]

SERVICE_LEVELS = ("ttft", "tpot", "e2el")  # times that can be limited, by vLLM's names

# The names of run.py's SUITES; "gpu" stands for several.
SUITE_NAMES = (
    "throughput", "batch", "latency", "batching", "chunked", "prefix", "spec", "structured",
    "quantization", "offload",
    "scheduler", "memory", "steps", "kernel", "parallel", "scale", "serve", "replicas", "gpu",
)  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    prog = "bench.py" if Path(sys.argv[0]).name == "bench.py" else "nanoserve bench"
    parser = argparse.ArgumentParser(
        prog=prog, usage="%(prog)s [SUITE ...] [options]", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("suites", nargs="*", type=suite, metavar="SUITE", help="the same as --suite")
    add("--suite", type=names_of("suite", SUITE_NAMES), metavar="SUITE,...",
        help=f"{', '.join(SUITE_NAMES)}; several with commas (default: all but batch, spec, "
        "structured, quantization, offload, parallel, scale, serve, replicas and gpu)")  # fmt: skip
    add("--model", help="folder or Hugging Face id (default: the demo model)")
    add("--dummy", choices=DUMMY_MODELS, help="random weights in a published shape instead")
    add("--dummy-dir", type=Path, help="keep random weights here for the next run")
    add("--compare", type=names_of("peer", (*PEER_NAMES, "none")), metavar="PEER,...",
        help="peers: hf, hf-continuous, vllm, nano-vllm; or none (default: all)")  # fmt: skip
    add("--peer-python", type=peer_python, action="append", default=[], metavar="PEER=PYTHON",
        help="run a peer in another environment, by its interpreter")  # fmt: skip
    add("--nano-vllm", metavar="FOLDER", help="a checkout of nano-vllm, if it is not installed")
    add("--variant", type=variant, action="append", dest="variants",
        metavar="NAME:OPTION=VALUE,...",
        help="a further nanoserve, with options of LLM")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    add("--dtype", choices=("float32", "bfloat16", "float16"),
        help="default: float32 on a CPU, bfloat16 on a GPU")  # fmt: skip
    add("--num-requests", type=count, help="default: 32 on a CPU, 256 on a GPU")
    add("--min-len", type=int, help="tokens, of prompts and of outputs (default: 50, GPU 100)")
    add("--max-len", type=int, help="tokens, of prompts and of outputs (default: 256, GPU 1024)")
    add("--latency-requests", type=count, default=4, help="requests of the latency suite")
    add(
        "--batch-sizes",
        type=numbers,
        help="of the suites batch, spec and quantization (default: 1,2,4,8,16,32)",
    )
    add("--hf-batch-sizes", type=numbers, default=(32, 8), help="static batches of the peer hf")
    add(
        "--prefix-len",
        type=count,
        default=512,
        help="shared tokens of the prefix suite; in the spec suite, tokens of a model's own text; "
        "in the offload suite, tokens that a chat begins with",
    )
    add("--num-speculative-tokens", type=count, default=5, help="drafts in the spec suite")
    add(
        "--request-rates",
        type=rates,
        metavar="RATE,...",
        default=(),
        help="requests per second of the serve suite (default: by the speed of LLM.generate)",
    )
    add("--goodput", type=service_level, nargs="+", metavar="NAME:MS", default=[],
        help="limits of the serve suite: ttft, tpot and e2el in ms, such as ttft:200 tpot:50 "
        "(default: by the latencies without load)")  # fmt: skip
    add("--replicas", type=count, metavar="N",
        help="the serve suite compares ways to choose among N replicas (2 or more)")  # fmt: skip
    add("--temperature", type=float, help="default: 0, in the gpu suite 0.6")
    add("--threads", type=count, help="of every engine's CPU work (default: each one's own choice)")
    add("--repeat", type=count, help="rounds; medians are shown (default: 3)")
    add("--seed", type=int, default=0, help="of the requests and of random weights")
    add("--json", type=new_file, help="write the result to this file")
    add("--note", default="", help="a remark to keep with the result, such as: busy machine")
    add(
        "--plot",
        type=picture,
        help="draw the result to this file (adds batch and steps if no "
        "suite of the run has a picture)",
    )
    return parser


def set_threads(number: int | None) -> None:
    """Load torch with this number of threads (None: each engine's own choice). Its waiting threads
    sleep, because this process waits while the engines are measured."""
    if number is not None:
        os.environ["OMP_NUM_THREADS"] = str(number)
    load_torch()


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit here, so that engines are ended, too: a process of theirs that is
    stopped until its turn (process.py) would never see that this one is gone."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it runs them
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: list[str] | None = None) -> int:
    """Measure, and return 0. A command line that cannot be measured ends with status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser()
    args = parser.parse_intermixed_args(arguments)
    set_threads(args.threads)
    from nanoserve.bench import plot, run

    try:
        with ended_by_sigterm(), tempfile.TemporaryDirectory() as scratch:
            result = run.measure(args, arguments, Path(scratch))
        if args.plot:
            plot.draw(result, args.plot)
    except ValueError as error:
        parser.error(str(error))
    return 0


# -- the values of options; argparse shows an ArgumentTypeError's message --


def names_of(what: str, allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    """A function: "hf,vllm" -> ["hf", "vllm"]."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := sorted(set(names) - set(allowed)):
            nearest = get_close_matches(unknown[0], allowed, n=1)
            hint = "".join(f" Did you mean {name}?" for name in nearest)
            message = f"no {what} {', '.join(unknown)}; allowed: {', '.join(allowed)}.{hint}"
            raise argparse.ArgumentTypeError(message)
        return names

    return parse


def suite(text: str) -> str:
    """ "latency" -> "latency"."""
    return names_of("suite", SUITE_NAMES)(text)[0]


def peer_python(text: str) -> tuple[str, str]:
    """ "vllm=~/vllm/bin/python" -> ("vllm", "/home/me/vllm/bin/python")."""
    name, _, python = text.partition("=")
    if name not in PEERS or not Path(python).expanduser().is_file():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not PEER=PYTHON, with the path of an interpreter."
        )
    return name, str(Path(python).expanduser())


def variant(text: str) -> tuple[str, Values]:
    """ "eager:enforce_eager=True" -> ("eager", {"enforce_eager": True}). Refuses what LLM would
    refuse, now and not after the first rounds."""
    name, colon, options = text.partition(":")
    pairs = [option.partition("=") for option in options.split(",")]
    if not colon or not all(equals for _, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:OPTION=VALUE,OPTION=VALUE.")
    values = {option: python_value(value) for option, _, value in pairs}
    for option in sorted({"model", "dtype", "device"} & values.keys()):
        raise argparse.ArgumentTypeError(
            f"{text!r}: {option} is the same for all engines. Give --{option} instead."
        )
    try:
        EngineConfig(**read_options("LLM", values))
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    return name, values


def count(text: str) -> int:
    """ "3" -> 3."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an int of 1 or more.")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """ "1,2,4" -> (1, 2, 4)."""
    return tuple(map(count, text.split(",")))


def rates(text: str) -> tuple[float, ...]:
    """ "0.5,2" -> (0.5, 2.0)."""
    found = tuple(float(number) for number in text.split(","))
    if not all(0 < rate < math.inf for rate in found):
        raise argparse.ArgumentTypeError(f"{text!r} has a rate that is not above 0.")
    return found


def service_level(text: str) -> tuple[str, float]:
    """ "ttft:200" -> ("ttft", 200.0)."""
    name, _, value = text.partition(":")
    try:
        limit = float(value)
    except ValueError:
        limit = 0.0
    if name not in SERVICE_LEVELS or not limit > 0:
        allowed = ", ".join(SERVICE_LEVELS)
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME:MS, with a name of {allowed} and a time in ms above 0."
        )
    return name, limit


def new_file(text: str) -> Path:
    """A path that can be written later: its folder exists."""
    file = Path(text).expanduser()
    if file.is_dir() or not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists.")
    return file


def picture(text: str) -> Path:
    """The file of a picture, which matplotlib draws."""
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("pictures need matplotlib: pip install matplotlib.")
    from matplotlib.backend_bases import FigureCanvasBase

    file, formats = new_file(text), FigureCanvasBase.get_supported_filetypes()
    if file.suffix[1:].lower() not in formats:
        allowed = ", ".join(f".{each}" for each in formats)
        raise argparse.ArgumentTypeError(f"{text!r} ends with none of {allowed}.")
    return file
