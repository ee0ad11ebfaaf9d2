"""What would a run here use, and does it work?

    $ nanoserve doctor
    python        3.11.7 on Linux x86_64
    packages      torch 2.13.0, triton 3.7.1, transformers 5.23.0, safetensors 0.8.0
    device        cpu: 2 cores, 20.1 GiB free
    compiler      found: kernels/native_cpu.cpp runs
    plain         attention reference: ' there was a kind girl named Mia.', as transformers would
    fast          attention native: ' there was a kind girl named Mia.', as transformers would

The last two lines are the self-check: the demo model generates some tokens with the code of the
flat modules ("plain") and with that of kernels/ ("fast"). Each token must be the likeliest one that
transformers computes for the same text. The exit status is 1 if one is not.

`python -m torch.utils.collect_env` says more about the machine, `nanoserve bench` how fast it is.

vLLM: vllm/collect_env.py (V1).
"""

from __future__ import annotations

import argparse
import platform
from importlib import import_module
from typing import Literal

from nanoserve.kernels.memory import available_memory, describe_size
from nanoserve.kernels.threads import load_torch, num_cores
from nanoserve.llm import LLM
from nanoserve.models.config import DEMO_MODEL
from nanoserve.sampling_params import SamplingParams

PACKAGES = ("torch", "triton", "transformers", "safetensors")
PROMPT, NUM_TOKENS = "Once upon a time", 10
# Rounding can change which of two almost equal logits is the higher one, above all in bfloat16. So
# a logit may be this much lower than the highest one, in standard deviations of the logits.
TOLERANCE = 0.05


def main(arguments: list[str]) -> int:
    """Print the report; return the exit status."""
    argparse.ArgumentParser("nanoserve doctor").parse_args(arguments)
    load_torch()
    print(f"python        {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"packages      {', '.join(f'{name} {find_version(name)}' for name in PACKAGES)}")
    print(f"device        {describe_device()}")
    print(f"compiler      {describe_compiler()}")
    return 0 if all([check("plain"), check("fast")]) else 1


def find_version(package: str) -> str:
    """As the package itself says: torch's has the build, such as 2.13.0+cu130."""
    try:
        return getattr(import_module(package), "__version__", "(unknown)")
    except ImportError:
        return "(none)"


def describe_device() -> str:
    import torch

    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for a CPU"
        memory = describe_size(available_memory())
        return f"cpu: {num_cores()} cores, {memory} free (torch is built {built}, and sees no GPU)"
    free, total = map(describe_size, torch.cuda.mem_get_info())
    major, minor = torch.cuda.get_device_capability()
    return f"cuda: {torch.cuda.get_device_name()} (sm {major}.{minor}), {free} of {total} free"


def describe_compiler() -> str:
    from nanoserve.kernels.native_cpu import load_library

    if load_library() is None:
        return "none that works: on a CPU, kernels/attention_cpu.py takes the place of native_cpu"
    return "found: kernels/native_cpu.cpp runs"


def check(kernels: Literal["plain", "fast"]) -> bool:
    """Generate, compare and print: is each token transformers' choice?"""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    try:
        with LLM(kernels=kernels) as llm:
            backend = llm.llm_engine.executor.runner.backend.name
            [output] = llm.generate(PROMPT, params, use_tqdm=False)
        completion = output.outputs[0]
        gap = largest_gap(output.prompt_token_ids, completion.token_ids)
    except Exception as error:  # the message names the cause
        print(f"{kernels:<14}FAILED: {error!r}")
        return False
    verdict = "as transformers would" if gap <= TOLERANCE else f"FAILED: {gap:.2f} deviations off"
    print(f"{kernels:<14}attention {backend}: {completion.text!r}, {verdict}")
    return gap <= TOLERANCE


def largest_gap(prompt: list[int], output: list[int]) -> float:
    """The largest difference between transformers' highest logit (on a CPU, in float32) and the
    logit of the token in `output`, in standard deviations of the logits."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return float(((logits.max(-1).values - chosen) / logits.std(-1)).max())
