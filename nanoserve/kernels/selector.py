"""Plain or fast: which code runs?

The flat modules are plain PyTorch, and what one reads there is what runs a small model. A large one
on a CPU, and any on a GPU, gets the fast code of this folder in the place of some of it, once it is
loaded (LLM(kernels="plain") or "fast" decides otherwise):

    in place of                     plain                    fast on a CPU    fast on CUDA
    AttentionBackend                attention.py             native_cpu.py    attention_triton.py
    LinearMethod                    layers.py                linear_cpu.py    layers.py
    Attention, MLP, Decoder         model.py                 fused.py         fused.py
    choose_tokens                   sampler.py               sampling.py      sampling.py

Without a C++ compiler, and in float16, a CPU has attention_cpu.py in place of native_cpu.py, and
model.py in place of fused.py. In float16 it has layers.py in place of linear_cpu.py, too.

vLLM: vllm/attention/selector.py (V0); vllm/v1/attention/selector.py (V1).
"""

from __future__ import annotations

import logging
import subprocess
from importlib.util import find_spec

import torch

from nanoserve import sampler
from nanoserve.attention import AttentionBackend
from nanoserve.config import EngineConfig
from nanoserve.kernels import sampling
from nanoserve.kernels.attention_cpu import TorchBackend
from nanoserve.kernels.fused import fuse
from nanoserve.kernels.linear_cpu import has_instructions, make_linear_method
from nanoserve.kernels.native_cpu import NAMES, Native, NativeBackend, load_library
from nanoserve.kernels.quantized_cache import QuantizedReference
from nanoserve.kernels.threads import SMALL_MODEL
from nanoserve.layers import LinearBase, LinearMethod
from nanoserve.models.base import Model
from nanoserve.models.config import ModelConfig

logger = logging.getLogger("nanoserve")


def choose_dtype(wanted: str, model_config: ModelConfig, device: torch.device) -> torch.dtype:
    """ "auto" is the checkpoint's own type; float16 for bfloat16 on a GPU without it (T4). On a CPU
    it is float32, the most exact, but for a large model in bfloat16 if the CPU multiplies in it."""
    if wanted == "auto":
        wanted = model_config.dtype.removeprefix("torch.")
        if device.type == "cpu":
            sizes = [file.stat().st_size for file in model_config.path.glob("*.safetensors")]
            is_faster = sum(sizes) >= SMALL_MODEL and has_instructions("avx512_bf16", "amx_bf16")
            wanted = wanted if wanted == "bfloat16" and is_faster else "float32"
        elif wanted == "bfloat16" and torch.cuda.get_device_capability(device) < (8, 0):
            wanted = "float16"
    dtype = getattr(torch, wanted, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype {wanted!r} is not supported; use float32, bfloat16 or float16.")
    return dtype


def choose_kernels(
    model: Model, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> tuple[AttentionBackend, sampler.Choose]:
    """Give a loaded model its kernels; what attends, and what chooses tokens. Raises ValueError as
    get_attn_backend does."""
    is_large = device.type == "cuda" or model.num_bytes() >= SMALL_MODEL
    is_fast = config.kernels == "fast" or (config.kernels == "auto" and is_large)
    wanted = config.attention_backend
    if wanted == "auto" and not is_fast:
        wanted = "reference"
    attention = get_attn_backend(wanted, device, dtype)
    if type(attention) is AttentionBackend and config.kv_cache_dtype != "auto":
        attention = QuantizedReference()
    for module in model.modules():
        if isinstance(getattr(module, "backend", None), AttentionBackend):
            setattr(module, "backend", attention)  # noqa: B010 (nn.Module hides it from mypy)
    if is_fast:
        speed_up(model, attention, dtype)
    what = "fast" if is_fast else "plain: what runs is what the flat modules say"
    logger.info("kernels: %s (on %s; attention: %s)", what, device, attention.name)
    return attention, sampling.choose_tokens if is_fast else sampler.choose_tokens


def speed_up(model: Model, attention: AttentionBackend, dtype: torch.dtype) -> None:
    """Exchange the plain parts of a loaded model for fast ones."""
    if next(model.parameters()).is_cpu and dtype in NAMES:
        method = make_linear_method(dtype)
        for layer in model.modules():
            if isinstance(layer, LinearBase) and type(layer.linear_method) is LinearMethod:
                layer.linear_method = method
                method.process_weights_after_loading(layer)
    if isinstance(attention, NativeBackend) and dtype in NAMES:
        fuse(model, Native(attention.library, dtype))
    elif attention.name == "triton":
        from nanoserve.kernels.fused_triton import TritonOps  # a Mac has no Triton

        fuse(model, TritonOps())


def get_attn_backend(
    wanted: str | AttentionBackend | type[AttentionBackend],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> AttentionBackend:
    """The backend of a name; or the AttentionBackend itself, given as an instance or a class.

    "auto" is "triton" on a CUDA GPU where Triton is installed, "native" on a CPU with a compiler,
    and "torch" elsewhere. Raises ValueError for a name that is none, and for one that cannot run
    here. On a CPU, "triton" takes Triton's interpreter, which TRITON_INTERPRET=1 in the environment
    asks for (slow: for tests and for reading along).
    """
    if not isinstance(wanted, str):
        return wanted if isinstance(wanted, AttentionBackend) else wanted()
    is_native = wanted in ("auto", "native") and device.type == "cpu" and dtype in NAMES
    if is_native and (library := load_library()):
        return NativeBackend(library)
    if wanted == "triton" or (wanted == "auto" and device.type == "cuda" and find_spec("triton")):
        return make_triton_backend(device)
    backends = {"auto": TorchBackend, "torch": TorchBackend, "reference": AttentionBackend}
    if wanted not in backends:
        raise ValueError(
            f"attention_backend is {wanted!r}, with {dtype} on {device}. Allowed: auto, reference, "
            "torch, native (on a CPU, in float32 or bfloat16, with Linux and GCC with OpenMP: c++, "
            "or the compiler that $CXX names), triton (on a CUDA GPU), or an "
            "AttentionBackend of your own (a class or an instance)."
        )
    return backends[wanted]()


def make_triton_backend(device: torch.device) -> AttentionBackend:
    """Raises ValueError where Triton cannot run: here it can say what to do."""
    try:
        import triton  # here: a Mac has none, and a CPU run needs none

        from nanoserve.kernels.attention_triton import TritonBackend

        if not triton.knobs.runtime.interpret:
            if device.type != "cuda":
                raise RuntimeError(f"the model is on {device}")
            triton.runtime.driver.active.get_current_device()
    except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"attention_backend is 'triton', which cannot run here: {error}. It takes a CUDA GPU, "
            "the package triton, a C compiler and Python's headers (on Ubuntu: apt install "
            "build-essential python3-dev); or TRITON_INTERPRET=1 in the environment (slow). Use "
            "'auto' or 'torch'."
        ) from error
    return TritonBackend()
