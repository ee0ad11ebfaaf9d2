"""What would a run here use, and does it work?

    python -m nanoserve doctor                          the demo model
    python -m nanoserve doctor --model Qwen/Qwen3-0.6B  and room for this one (config.json alone)

One screen: versions, device, what the engine chose when it was built (device, dtype, attention),
threads, how many KV blocks the memory holds, and a self-check: ten tokens of the demo model, each
of which transformers, given the same text, must hold for the likeliest too. Whatever is missing or
odd comes last, with what to do about it. The exit status is 1 if the self-check fails.

    device        cpu: x86_64, 2 cores; 20.1 GiB free
    KV blocks     demo: 16384 of 16 tokens, 128 sequences of 2048 tokens
    self-check    passed: ' there was a kind girl named Mia. ', as transformers would

Left out: measuring speed (bench.py), and anything that changes the machine.

vLLM: vllm/collect_env.py (V1).
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from nanoserve.config import DEMO_MODEL, EngineConfig, ModelConfig
from nanoserve.kv_cache import CPU_CACHE_SHARE, available_memory
from nanoserve.layers import LayerConfig
from nanoserve.llm import LLM
from nanoserve.model_runner import choose_dtype
from nanoserve.models.registry import ModelRegistry, build_model
from nanoserve.parallel import choose_device
from nanoserve.sampling_params import SamplingParams

PROMPT = "Once upon a time"
NUM_TOKENS = 10
# A token may lose against transformers' likeliest by so much of the logits' standard deviation:
# near ties come out either way, above all in bfloat16.
TOLERANCE = 0.05
GIB = 2**30


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
    """Look at everything. Raises ValueError if `model` has no readable config.json."""
    report = Report()
    config = None if model is None else read_config(model)
    check_versions(report)
    device = choose_device("auto")
    check_device(report, device)
    check_threads(report)
    with LLM() as llm:
        check_engine(report, llm)
        if config is not None:
            check_room(report, config, device)
        self_check(report, llm)
    return report


def read_config(model: str) -> ModelConfig:
    """Of a folder, or of a Hugging Face id; of that no more than config.json is downloaded."""
    if Path(model).is_dir():
        return ModelConfig.from_folder(Path(model))
    from huggingface_hub import hf_hub_download

    try:
        return ModelConfig.from_folder(Path(hf_hub_download(model, "config.json")).parent)
    except Exception as error:  # the hub's own errors are many; all mean: not to be had
        raise ValueError(
            f"model {model!r} is not a folder, and the Hugging Face hub did not deliver its "
            f"config.json ({type(error).__name__}). Check the name and the connection."
        ) from error


def check_versions(report: Report) -> None:
    """Python and the packages that nanoserve needs, against the ranges it was made for."""
    report.add("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    required = {}
    for text in _requirements():
        from packaging.requirements import Requirement

        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            required[requirement.name] = requirement.specifier
    for name in ("torch", "triton", "transformers", "safetensors"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            report.add(name, "not installed")
            if name in required:
                report.advice.append(f"install {name}: pip install '{name}{required[name]}'")
            continue
        wanted = required.get(name)
        fits = wanted is None or wanted.contains(version, prereleases=True)
        report.add(name, version if fits else f"{version}, made for {wanted}")
        if not fits:
            report.advice.append(f"pip install '{name}{wanted}'")


def _requirements() -> list[str]:
    """Those of the installed package; none if it runs from a checkout that is not installed."""
    try:
        return metadata.requires("nanoserve") or []
    except metadata.PackageNotFoundError:
        return []


def check_device(report: Report, device: torch.device) -> None:
    """The device that "auto" means here, and its memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        memory = f"{total / GIB:.1f} GiB, {free / GIB:.1f} free"
        report.add("device", f"{device}: {name} (sm {capability}), {memory}")
        if free < 0.5 * total:
            report.advice.append(
                "less than half of the GPU's memory is free: look for other processes (nvidia-smi)"
            )
        return
    report.add(
        "device",
        f"cpu: {platform.processor() or platform.machine()}, {_num_cores()} cores; "
        f"{available_memory() / GIB:.1f} GiB free",
    )
    if shutil.which("nvidia-smi") and torch.version.cuda is None:
        report.advice.append(
            "an NVIDIA driver is here, but this torch is built without CUDA: see "
            "https://pytorch.org/get-started/locally"
        )
    elif shutil.which("nvidia-smi"):
        report.advice.append(
            f"an NVIDIA driver is here, but torch (CUDA {torch.version.cuda}) sees no GPU: run "
            "nvidia-smi, look at CUDA_VISIBLE_DEVICES, or take a torch for your driver"
        )


def _num_cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_threads(report: Report) -> None:
    threads, cores = torch.get_num_threads(), _num_cores()
    policy = os.environ.get("OMP_WAIT_POLICY", "").lower()
    waiting = "waiting threads sleep" if policy == "passive" else "waiting threads may spin"
    report.add("threads", f"{threads} of torch on {cores} cores; {waiting}")
    if threads > cores:
        report.advice.append(f"more threads than cores: set OMP_NUM_THREADS={cores}")
    elif threads < (cores + 1) // 2:
        report.advice.append(
            f"most cores are left idle: unset OMP_NUM_THREADS, or set it to {cores}"
        )
    if policy != "passive" and not torch.cuda.is_available():
        report.advice.append(
            "if other programs share these cores: OMP_WAIT_POLICY=passive keeps waiting threads "
            "from taking them"
        )


def check_engine(report: Report, llm: LLM) -> None:
    """What the engine says it chose, and the demo model's KV cache."""
    engine = llm.engine
    report.add("engine", engine.executor.describe())
    if not torch.cuda.is_available():
        report.add("CUDA graphs", "none without a GPU")
    if platform.system() == "Linux" and find_spec("triton") is None:
        report.advice.append(
            "no Triton: GPU attention would fall back to PyTorch; pip install triton"
        )
    assert engine.config.max_model_len, "EngineConfig not resolved"
    room = describe_room(
        engine.executor.num_kv_blocks, engine.config.block_size, engine.config.max_model_len
    )
    report.add("KV blocks", f"demo: {room}")


def describe_room(num_blocks: int, block_size: int, max_model_len: int) -> str:
    """ "1000 of 16 tokens, 7 sequences of 2048 tokens"."""
    sequences = num_blocks * block_size // max_model_len
    return f"{num_blocks} of {block_size} tokens, {sequences} sequences of {max_model_len} tokens"


def check_room(report: Report, model_config: ModelConfig, device: torch.device) -> None:
    """How many KV blocks there would be beside the weights of a model that is not loaded."""
    name = model_config.path.name
    if ModelRegistry.get(model_config.architecture) is None:
        architecture = model_config.architecture
        report.add("", f"{name}: {architecture} runs through transformers; its size is not known")
        return
    config = EngineConfig(device=device.type).resolve(model_config)
    assert config.max_model_len and config.max_num_seqs, "EngineConfig not resolved"
    dtype = choose_dtype("auto", model_config.dtype, device)
    layer_config = LayerConfig(dtype=dtype, device=torch.device("meta"))
    model = build_model(model_config, config.max_model_len, layer_config)  # shapes, no memory
    weights = model.num_bytes()
    block = sum(spec.num_bytes(config.block_size, dtype) for spec in model.kv_cache_specs())
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory = free - weights - total * (1 - config.gpu_memory_utilization)
    else:
        free = available_memory()
        memory = (free - weights) * CPU_CACHE_SHARE
    per_sequence = -(-config.max_model_len // config.block_size)
    num_blocks = max(0, min(int(memory // block), per_sequence * config.max_num_seqs))
    room = describe_room(num_blocks, config.block_size, config.max_model_len)
    report.add("", f"{name}: {room}, beside {weights / GIB:.1f} GiB of weights in {dtype}")
    if weights > free:
        report.advice.append(f"{name} does not fit: {weights / GIB:.1f} GiB of weights alone")
    elif num_blocks < per_sequence:
        fitting = max(1, num_blocks * config.block_size)
        report.advice.append(
            f"{name}: no room for one sequence of full length; max_model_len={fitting} would fit"
        )


def self_check(report: Report, llm: LLM) -> None:
    """Ten tokens of the demo model, as transformers sees them: given the same text, each must be
    its likeliest, up to near ties."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    [output] = llm.generate(PROMPT, params, use_tqdm=False)
    completion = output.outputs[0]
    try:
        worst = worst_gap(output.prompt_token_ids, completion.token_ids)
    except Exception as error:  # transformers is a peer here; what it lacks, it says
        worst, problem = float("inf"), f"transformers could not run: {error}"
    else:
        problem = f"a token loses by {worst:.2f} standard deviations against transformers' choice"
    report.is_healthy = worst <= TOLERANCE
    if report.is_healthy:
        report.add("self-check", f"passed: {completion.text!r}, as transformers would")
        return
    report.add("self-check", f"FAILED: {completion.text!r}; {problem}")
    report.advice.append(
        "the self-check failed: run the tests (pytest), and see whether device='cpu', "
        "dtype='float32' helps"
    )


def worst_gap(prompt: list[int], output: list[int]) -> float:
    """By how much, in standard deviations of the logits, a token of `output` loses at worst against
    the likeliest by transformers, on a CPU in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return float(((logits.max(-1).values - chosen) / logits.std(-1)).max())


def main(arguments: list[str]) -> int:
    """Print the report; return the exit status."""
    parser = argparse.ArgumentParser(
        "python -m nanoserve doctor", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", help="folder or Hugging Face id: how many KV blocks would fit?")
    args = parser.parse_args(arguments)
    try:
        report = examine(args.model)
    except ValueError as error:
        parser.error(str(error))
    print(report)
    return 0 if report.is_healthy else 1
