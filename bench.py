"""How fast is it, beside its peers and beside what this machine could do, now?

    python bench.py                                   the demo model, all suites, about two minutes
    python bench.py --suite throughput --dummy qwen3-29m --compare hf,hf-continuous,vllm
    python bench.py --suite gpu --json gpu.json --plot gpu.png

Peers serve the same requests on the same checkpoint in the same run, each in a process of its own;
one that is not importable is left out with a word. Shown are medians over `--repeat` rounds, the
ratio of nanoserve to each peer, and the share of the floor: the time that the measured bandwidth
and operation rate of this machine allow. On a busy machine ratios close to 1 say nothing: see the
range. What is measured, and how, is in nanoserve/bench/, one file per concern.

Suites: throughput, batch, latency, prefix, scheduler, memory, steps, kernel; `gpu` is throughput,
batch, steps and kernel in nano-vllm's published workload (Qwen3-0.6B's shape, 256 requests).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanoserve.bench import control, inside, kernels, plot, readme, report, suites
from nanoserve.bench.floor import measure_limits
from nanoserve.bench.peers import PEERS
from nanoserve.bench.turns import Settings
from nanoserve.bench.workload import DUMMY_MODELS, draw_requests, write_dummy
from nanoserve.config import ModelConfig, resolve_folder

Suite = Callable[[Settings], dict[str, Any]]


def scheduler_suite(settings: Settings) -> dict[str, Any]:
    sizes, contexts = [16, 64, 256, 1024], [128, 512, 2048]
    return control.scheduler_suite(sizes, contexts, 200, settings.use_tqdm)


def memory_suite(settings: Settings) -> dict[str, Any]:
    """As in the paper, requests end long before the length that the model would allow."""
    requests = draw_requests(256, 50, 512, 1000, settings.seed)
    return control.memory_suite(requests, max_model_len=2048, num_slots=64 * 1024)


def kernel_suite(settings: Settings) -> dict[str, Any]:
    has_its_dtype = settings.is_cpu or settings.dtype == "bfloat16"
    limits = settings.limits if has_its_dtype else None
    return kernels.kernel_suite(settings.device, limits, settings.use_tqdm)


# name -> a function that measures and returns plain values, as --json writes them; "rows", if there
# are any, become a table.
SUITES: dict[str, Suite] = {
    "throughput": suites.throughput_suite,
    "batch": suites.batch_suite,
    "latency": suites.latency_suite,
    "prefix": inside.prefix_suite,
    "scheduler": scheduler_suite,
    "memory": memory_suite,
    "steps": inside.steps_suite,
    "kernel": kernel_suite,
    "parallel": inside.parallel_suite,
}
DEFAULT_SUITES = ("throughput", "latency", "prefix", "scheduler", "memory", "steps", "kernel")
GPU_SUITES = ("throughput", "batch", "steps", "kernel")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--suite", help=f"{', '.join(SUITES)} or gpu; several with commas")
    add("--model", help="folder or Hugging Face id (default: the demo model)")
    add("--dummy", choices=DUMMY_MODELS, help="random weights in a published shape instead")
    add("--dummy-dir", type=Path, help="keep random weights here for the next run")
    add("--compare", help="peers: hf, hf-continuous, vllm, nano-vllm; or none (default: all)")
    add("--peer-python", action="append", default=[], metavar="PEER=PYTHON",
        help="run a peer in another environment, by its interpreter")  # fmt: skip
    add("--nano-vllm", metavar="FOLDER", help="a checkout of nano-vllm, if it is not installed")
    add("--variant", action="append", default=[], metavar="NAME:OPTION=VALUE,...",
        help="a further nanoserve, with options of LLM")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    add("--dtype", help="default: float32 on a CPU, bfloat16 on a GPU")
    add("--num-requests", type=int, help="default: 32 on a CPU, 256 on a GPU")
    add("--min-len", type=int, help="tokens, of prompts and of outputs (default: 50, GPU 100)")
    add("--max-len", type=int, help="tokens, of prompts and of outputs (default: 256, GPU 1024)")
    add("--latency-requests", type=int, default=4, help="requests of the latency suite")
    add("--batch-sizes", default="1,2,4,8,16,32", help="of the batch suite")
    add("--hf-batch-sizes", default="32,8", help="static batches of the peer hf")
    add("--prefix-len", type=int, default=512, help="shared tokens of the prefix suite")
    add("--temperature", type=float, help="default: 0, in the gpu suite 0.6")
    add("--threads", type=int, help="of every engine's CPU work (default: each one's own choice)")
    add("--repeat", type=int, default=3, help="rounds; medians are shown")
    add("--seed", type=int, default=0)
    add("--json", type=Path, help="write the result to this file")
    add("--note", default="", help="a remark to keep with the result, such as: busy machine")
    add("--plot", type=Path, help="draw the result to this file (adds batch and steps)")
    add("--update-readme", action="store_true",
        help="measure nothing; write the READMEs' table from notebooks/results/")  # fmt: skip
    return parser


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.update_readme:
        readme.update_readmes(readme.load_results())
        return
    try:
        with tempfile.TemporaryDirectory() as scratch:
            result = measure(args, arguments, Path(scratch))
        if args.plot:
            plot.draw(result, args.plot)
    except ValueError as error:
        parser.error(str(error))


def measure(args: argparse.Namespace, arguments: list[str], scratch: Path) -> dict[str, Any]:
    """Run the suites one after the other, print each, and return (and write) the whole result."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    is_toy = args.suite == "gpu" and device == "cpu"
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.suite == "gpu":
        preset_gpu(args, is_toy)
    names = list(chosen_suites(args))
    settings = make_settings(args, device, scratch)
    result = {
        **report.describe_run(arguments, device),
        "model": settings.model,
        "parameters": settings.costs.num_parameters,
        "dtype": settings.dtype,
        "device": device,
        "is_toy": is_toy,
        "note": args.note,
        "limits": settings.limits.as_dict(),
        "suites": {},
    }
    if is_toy:
        print("No CUDA device: toy sizes on the CPU, only to show that the command runs.")
    print(report.format_run(result))
    for name in names:
        result["suites"][name] = SUITES[name](settings)
        print(f"\n{report.format_suite(name, result['suites'][name])}", flush=True)
        if args.json:  # after each, so that an interrupted run leaves what it has
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def preset_gpu(args: argparse.Namespace, is_toy: bool) -> None:
    """nano-vllm's published workload; options that were given stay."""
    args.suite = ",".join(GPU_SUITES)
    args.compare = args.compare or "hf-continuous,nano-vllm,vllm"
    args.temperature = 0.6 if args.temperature is None else args.temperature
    if not args.model:
        args.dummy = args.dummy or ("qwen3-tiny" if is_toy else "qwen3-0.6b")
    if not args.variant:
        args.variant = ["overlapped:async_scheduling=True", "eager:enforce_eager=True"]
    if is_toy:
        args.num_requests, args.min_len, args.max_len = args.num_requests or 4, 8, 16
        args.batch_sizes, args.repeat, args.variant = "1,2", 1, []
    elif args.batch_sizes == "1,2,4,8,16,32":
        args.batch_sizes = "1,4,16,64,256"


def chosen_suites(args: argparse.Namespace) -> list[str]:
    names = args.suite.split(",") if args.suite else list(DEFAULT_SUITES)
    unknown = sorted(set(names) - set(SUITES))
    if unknown:
        allowed = ", ".join([*SUITES, "gpu (alone)"])
        raise ValueError(f"no suite {', '.join(unknown)}; allowed: {allowed}.")
    if args.plot:
        names += [name for name in ("batch", "steps") if name not in names]
    return names


def make_settings(args: argparse.Namespace, device: str, scratch: Path) -> Settings:
    """The command line, with every default filled in. Raises ValueError for what does not fit."""
    is_cpu = device == "cpu"
    dtype = args.dtype or ("float32" if is_cpu else "bfloat16")
    if args.dummy and args.model:
        raise ValueError("--dummy and --model name two models; give one of them.")
    if args.dummy:
        folder = write_dummy(args.dummy, args.dummy_dir or scratch, dtype, args.seed)
    else:
        folder = resolve_folder(args.model)
    low, high = args.min_len or (50 if is_cpu else 100), args.max_len or (256 if is_cpu else 1024)
    longest = ModelConfig.from_folder(folder).max_model_len
    if not 1 <= low <= high <= longest // 2:
        raise ValueError(
            f"lengths are {low} to {high} tokens, in and out; allowed for this model: 1 to "
            f"{longest // 2}. Set --min-len and --max-len."
        )
    return Settings(
        folder=folder,
        model=args.dummy or (folder.name if args.model is None else Path(args.model).name),
        device=device,
        dtype=dtype,
        num_requests=args.num_requests or (32 if is_cpu else 256),
        low=low,
        high=high,
        latency_requests=args.latency_requests,
        batch_sizes=tuple(int(size) for size in args.batch_sizes.split(",")),
        prefix_len=args.prefix_len,
        compare=chosen_peers(args.compare),
        variants=dict(parse_variant(text) for text in args.variant),
        peer_python=dict(parse_peer_python(text) for text in args.peer_python),
        nano_vllm=args.nano_vllm,
        hf_batch_sizes=tuple(int(size) for size in args.hf_batch_sizes.split(",")),
        repeat=args.repeat,
        seed=args.seed,
        temperature=args.temperature or 0.0,
        threads=args.threads,
        limits=measure_limits(torch.device(device), getattr(torch, dtype)),  # last: it takes time
    )


def chosen_peers(text: str | None) -> tuple[str, ...]:
    """ "hf,vllm" -> ("hf", "vllm"); None: all; "none": none."""
    peers = [name for name in PEERS if name != "nanoserve"]
    names = peers if text is None else [name for name in text.split(",") if name != "none"]
    unknown = sorted(set(names) - set(peers))
    if unknown:
        raise ValueError(f"no peer {', '.join(unknown)}; allowed: {', '.join(peers)}, none.")
    return tuple(names)


def parse_peer_python(text: str) -> tuple[str, str]:
    """ "vllm=~/vllm/bin/python" -> ("vllm", "/home/me/vllm/bin/python")."""
    name, _, python = text.partition("=")
    if name not in PEERS or not Path(python).expanduser().is_file():
        raise ValueError(f"--peer-python {text!r} is not PEER=PYTHON, with an interpreter's path.")
    return name, str(Path(python).expanduser())


def parse_variant(text: str) -> tuple[str, dict[str, Any]]:
    """ "eager:enforce_eager=True" -> ("eager", {"enforce_eager": True})."""
    name, colon, options = text.partition(":")
    pairs = [option.partition("=") for option in options.split(",")]
    if not colon or not all(equals for _, equals, _ in pairs):
        raise ValueError(f"--variant {text!r} is not NAME:OPTION=VALUE,OPTION=VALUE.")
    return name, {option: parse_value(value) for option, _, value in pairs}


def parse_value(text: str) -> Any:
    """ "True" -> True, "16" -> 16, "triton" -> "triton"."""
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    main()
