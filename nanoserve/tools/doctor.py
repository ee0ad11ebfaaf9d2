"""What would a run here use, and does it work?

    nanoserve doctor                          the demo model
    nanoserve doctor --model Qwen/Qwen3-0.6B  and room for this model (config.json alone)

The report is one screen: versions, device, threads, the choices of the engine (device, dtype,
attention), how many KV blocks the memory holds, and a self-check. The self-check generates ten
tokens with the demo model. Each token must be the likeliest one that transformers computes for the
same text. On a CPU, ten tokens are also timed with other threads, because the right number depends
on what else runs. The last lines name each problem and its remedy. The exit status is 1 if the
self-check fails.

    device        cpu: x86_64, 2 cores; 20.1 GiB free
    threads       1 for the demo model (torch has 2), waiting ones sleep; load 0.3 on 2 cores
    ten tokens    11 ms on 1 thread; on 2 threads 24 ms if waiting ones sleep, 12 ms if they spin
    KV blocks     demo: 16384 of 16 tokens, 128 sequences of 2048 tokens
    self-check    passed: ' there was a kind girl named Mia. ', as transformers would

torch is imported after the arguments are read. Left out: measuring speed (bench.py), and changes
to the machine.

vLLM: vllm/collect_env.py (V1).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from nanoserve.config import DEMO_MODEL, EngineConfig, ModelConfig, find_folder
from nanoserve.kernels.threads import (
    WAITING_VARIABLES,
    load_torch,
    most_threads,
    num_cores,
    slow_threads_hint,
    waiting_threads,
)
from nanoserve.llm import LLM
from nanoserve.logger import configure_logging
from nanoserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

PROMPT = "Once upon a time"
NUM_TOKENS = 10
# Rounding can change which of two almost equal logits is the higher one, above all in bfloat16. So
# a logit may be this much lower than the highest one, in standard deviations of the logits.
TOLERANCE = 0.05
CLEARLY = 1.5  # times as fast; less may be chance
GIB = 2**30
DEMO_BYTES = sum(file.stat().st_size for file in DEMO_MODEL.glob("*.safetensors"))


@dataclass
class Report:
    """Lines to print, and advice for the end."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    is_healthy: bool = True

    def add(self, name: str, value: str) -> None:
        self.lines.append((name, value))

    def __str__(self) -> str:
        text = "\n".join(f"{name:<14}{value}" for name, value in self.lines)
        advice = "".join(f"\n  - {line}" for line in self.advice) or " nothing"
        return f"{text}\nto do:{advice}"


def examine(model: str | None = None) -> Report:
    """Make the whole report. Raises ValueError if `model` has no readable config.json."""
    load_torch()
    from nanoserve.device import choose_device

    report, device = Report(), choose_device("auto")
    model_config = None if model is None else read_config(model)
    check_versions(report)
    check_device(report, device)
    if device.type == "cpu":
        check_threads(report)
    with LLM() as llm:
        executor = llm.engine.executor
        report.add("engine", executor.describe())
        room = describe_room(executor.num_kv_blocks, llm.engine.config)
        report.add("KV blocks", f"demo: {room}")
        if model_config is not None:
            check_room(report, model_config, device)
        self_check(report, llm)
    return report


def read_config(model: str) -> ModelConfig:
    """The config of a folder or of a Hugging Face id; downloads config.json and nothing else."""
    if not model:
        raise ValueError("model is an empty string. Give a folder or a Hugging Face id.")
    if (folder := find_folder(model)) is not None:
        return ModelConfig.from_folder(folder)
    from huggingface_hub import hf_hub_download

    try:
        return ModelConfig.from_folder(Path(hf_hub_download(model, "config.json")).parent)
    except Exception as error:  # the hub has many errors; each means that there is no config.json
        raise ValueError(
            f"model {model!r} is not a folder, and the Hugging Face hub did not deliver its "
            f"config.json ({type(error).__name__}). Check the name and the connection."
        ) from error


def check_versions(report: Report) -> None:
    """Python and the packages that nanoserve needs, with the versions that setup.cfg allows."""
    from packaging.requirements import Requirement

    report.add("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    # The requirements are known only if nanoserve is installed.
    texts = metadata.requires("nanoserve") if _version("nanoserve") else None
    requirements = {item.name: item for item in map(Requirement, texts or [])}
    for name in ("torch", "triton", "transformers", "safetensors"):
        version, wanted = _version(name), requirements.get(name)
        report.add(name, version or "not installed")
        if wanted is None or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        if not version or not wanted.specifier.contains(version, prereleases=True):
            report.advice.append(f"pip install '{name}{wanted.specifier}'")


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def check_device(report: Report, device: torch.device) -> None:
    """The device that "auto" means here, and its memory."""
    import torch

    from nanoserve.memory import available_memory

    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        major, minor = torch.cuda.get_device_capability(device)
        name = f"{device}: {torch.cuda.get_device_name(device)} (sm {major}.{minor})"
        report.add("device", f"{name}, {total / GIB:.1f} GiB, {free / GIB:.1f} free")
        if free < 0.5 * total:
            report.advice.append("half of the GPU's memory is in use: see nvidia-smi for programs")
        return
    name = f"cpu: {platform.processor() or platform.machine()}, {num_cores()} cores"
    report.add("device", f"{name}; {available_memory() / GIB:.1f} GiB free")
    if shutil.which("nvidia-smi"):
        build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        problem = f"an NVIDIA driver is here, but torch (built {build}) sees no GPU"
        remedy = "run nvidia-smi, check CUDA_VISIBLE_DEVICES, see pytorch.org/get-started/locally"
        report.advice.append(f"{problem}: {remedy}")


def check_threads(report: Report) -> None:
    """How many threads torch has, what waiting ones do, and which choice is the fastest now."""
    import torch

    threads, cores = torch.get_num_threads(), num_cores()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # Windows has none
    text = "" if load is None else f"load {load:.1f} on {cores} {'core' if cores == 1 else 'cores'}"
    number = min(threads, most_threads(DEMO_BYTES) or threads)
    report.add(
        "threads",
        f"{number} for the demo model (torch has {threads}), waiting ones {waiting_threads()}"
        + (text and f"; {text}"),
    )
    if load is not None and load >= cores:
        report.advice.append(
            f"other programs use the cores ({text}): expect slower runs; end some programs, or wait"
        )
    is_set = "OMP_NUM_THREADS" in os.environ
    hint = slow_threads_hint(threads if is_set else min(threads, cores))  # as the engine does
    if threads < (cores + 1) // 2:
        hint = f"most cores are idle: set OMP_NUM_THREADS={cores}"
    report.advice += [hint] if hint else []
    if min(threads, cores) > 1:
        compare_threads(report, min(threads, cores))


def compare_threads(report: Report, num_threads: int) -> None:
    """Time ten tokens of the demo model on one thread, and on several that sleep or spin while they
    wait. OpenMP reads the way of waiting once, so each way has a process."""
    alone, sleeping = time_tokens(num_threads, "passive")
    _, spinning = time_tokens(num_threads, "active")
    report.add(
        "ten tokens",
        f"{1000 * alone:.0f} ms on 1 thread; on {num_threads} threads {1000 * sleeping:.0f} ms if "
        f"waiting ones sleep, {1000 * spinning:.0f} ms if they spin",
    )
    gain = sleeping / spinning
    is_busy = any("other programs" in advice for advice in report.advice)
    if waiting_threads() == "sleep" and gain > CLEARLY and not is_busy:
        report.advice.append(
            "as long as nothing else runs here, OMP_WAIT_POLICY=active makes models of 10M to 100M "
            "parameters faster"
        )
    elif waiting_threads() == "spin" and gain < 1 / CLEARLY:
        chosen = [name for name in WAITING_VARIABLES if name in os.environ]
        what = f"unset {chosen[0]}" if chosen else "set OMP_WAIT_POLICY=passive"
        report.advice.append(f"other programs use the cores: {what}")


TIMED = """
import statistics, time, torch
from nanoserve import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
llm, times = LLM(num_kv_blocks=64, device="cpu"), []
for num_threads in (1, torch.get_num_threads()):
    torch.set_num_threads(num_threads)
    for _ in range(5):
        start = time.perf_counter()
        llm.generate("Once upon a time", params, use_tqdm=False)
        times.append(time.perf_counter() - start)
print(statistics.median(times[1:5]), statistics.median(times[6:]))
"""


def time_tokens(num_threads: int, wait_policy: str) -> tuple[float, float]:
    """Seconds for ten tokens on one thread and on `num_threads`, in a process of its own."""
    environment = {name: v for name, v in os.environ.items() if name not in WAITING_VARIABLES}
    environment |= {
        "OMP_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": wait_policy,
        "NANOSERVE_LOGGING_LEVEL": "ERROR",
        "NANOSERVE_LOG_SCHEDULER": "0",
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
    }
    command = [sys.executable, "-c", TIMED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    alone, together = done.stdout.split()[-2:]
    return float(alone), float(together)


def describe_room(num_blocks: int, config: EngineConfig) -> str:
    """For example "1000 of 16 tokens, 7 sequences of 2048 tokens"."""
    size, length = config.block_size, config.max_model_len
    assert length, "EngineConfig not resolved"
    num_sequences = num_blocks * size // length
    return f"{num_blocks} of {size} tokens, {num_sequences} sequences of {length} tokens"


def check_room(report: Report, model_config: ModelConfig, device: torch.device) -> None:
    """How many KV blocks would fit beside the weights of a model that is not loaded."""
    import torch

    from nanoserve.kernels.selector import choose_dtype
    from nanoserve.kv_cache import CPU_CACHE_SHARE, choose_kv_cache_dtype
    from nanoserve.layers import LayerConfig
    from nanoserve.memory import available_memory
    from nanoserve.models.registry import ModelRegistry, build_model

    name, architecture = model_config.path.name, model_config.architecture
    if ModelRegistry.get(architecture) is None:
        report.add("", f"{name}: {architecture} runs through transformers; its size is not known")
        return
    config = EngineConfig(device=device.type).resolve(model_config)
    assert config.max_model_len and config.max_num_seqs, "EngineConfig not resolved"
    dtype = choose_dtype("auto", model_config.dtype, device)
    layer_config = LayerConfig(dtype=dtype, device=torch.device("meta"))  # shapes, no memory
    model = build_model(model_config, config.max_model_len, layer_config)
    weights = model.num_bytes()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory = free - weights - total * (1 - config.gpu_memory_utilization)
    else:
        free = available_memory()
        memory = (free - weights) * CPU_CACHE_SHARE
    kv_dtype = choose_kv_cache_dtype(config.kv_cache_dtype, dtype)
    block = sum(spec.num_bytes(config.block_size, kv_dtype) for spec in model.kv_cache_specs())
    per_sequence = -(-config.max_model_len // config.block_size)
    num_blocks = max(0, min(int(memory // block), per_sequence * config.max_num_seqs))
    room = describe_room(num_blocks, config)
    report.add("", f"{name}: {room}, beside {weights / GIB:.1f} GiB of weights in {dtype}")
    if weights > free:
        report.advice.append(f"{name} does not fit: {weights / GIB:.1f} GiB of weights alone")
    elif num_blocks < per_sequence:
        length = max(1, num_blocks * config.block_size)
        report.advice.append(f"{name}: one sequence does not fit; max_model_len={length} would")


def self_check(report: Report, llm: LLM) -> None:
    """Generate NUM_TOKENS tokens with the demo model, and compare each with transformers' choice
    for the same text."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    [output] = llm.generate(PROMPT, params, use_tqdm=False)
    completion = output.outputs[0]
    try:
        gap = largest_gap(output.prompt_token_ids, completion.token_ids)
        problem = f"a token is {gap:.2f} standard deviations below transformers' choice"
    except Exception as error:  # the message of the error names the cause
        gap, problem = float("inf"), f"transformers could not run: {error}"
    report.is_healthy = gap <= TOLERANCE
    if report.is_healthy:
        report.add("self-check", f"passed: {completion.text!r}, as transformers would")
        return
    report.add("self-check", f"FAILED: {completion.text!r}; {problem}")
    report.advice.append("the self-check failed: run pytest; try device='cpu', dtype='float32'")


def largest_gap(prompt: list[int], output: list[int]) -> float:
    """The largest difference between transformers' highest logit (on a CPU, in float32) and the
    logit of the token in `output`, in standard deviations of the logits."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return float(((logits.max(-1).values - chosen) / logits.std(-1)).max())


def main(arguments: list[str]) -> int:
    """Print the report; return the exit status."""
    parser = argparse.ArgumentParser("nanoserve doctor", description="Examine this machine.")
    parser.add_argument("--model", help="folder or Hugging Face id: how many KV blocks would fit?")
    args = parser.parse_args(arguments)
    try:
        configure_logging("WARNING")  # the report says what an engine's first lines say
        report = examine(args.model)
    except ValueError as error:
        parser.error(str(error))
    print(report)
    return 0 if report.is_healthy else 1
