"""Which implementation runs on this device?

The flat modules hold the plain ways; the fast ones are in this folder. One function chooses among
them for a model that is to be built:

    device, dtype        attention   linear layers         between them
    CPU, float32         native      PackedLinearMethod    native_cpu.py
    CPU, bfloat16        native      PackedLinearMethod    native_cpu.py
    CPU, float16         torch       LinearMethod          layers.py
    CPU, no compiler     torch       as above              RMSNormCPU (float32), layers.py
    CUDA                 triton      LinearMethod          fused_triton.py (custom_ops="all")

vLLM: vllm/attention/selector.py (V0); vllm/v1/attention/selector.py (V1).
"""

from __future__ import annotations

import torch

from nanoserve.attention import AttentionBackend
from nanoserve.kernels.attention_cpu import TorchBackend
from nanoserve.kernels.linear_cpu import PackedLinearMethod, RMSNormCPU
from nanoserve.kernels.native_cpu import NAMES, Native, NativeBackend, load_library
from nanoserve.layers import LayerConfig, LinearMethod
from nanoserve.parallel import ParallelState


def choose_dtype(wanted: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """ "auto" is float32 on a CPU (its fastest and most exact), else the checkpoint's own."""
    if wanted == "auto":
        wanted = "float32" if device.type == "cpu" else checkpoint
    dtype = getattr(torch, wanted, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype {wanted!r} is not supported; use float32, bfloat16 or float16.")
    return dtype


def make_layer_config(
    device: torch.device,
    dtype: torch.dtype,
    parallel: ParallelState,
    attention_backend: str | AttentionBackend = "auto",
    custom_ops: str = "all",
) -> LayerConfig:
    """What the layers of a model get on this device. Raises ValueError as get_attn_backend does.

    The fused kernels come with the Triton backend, into whose cache one of them stores, unless
    `custom_ops` is "none".
    """
    attention = get_attn_backend(attention_backend, device, dtype)
    if attention.name == "triton" and custom_ops == "all":
        from nanoserve.kernels import fused_triton

        return LayerConfig(
            dtype,
            device,
            parallel,
            attention,
            add_rms_norm=fused_triton.add_rms_norm_triton,
            rope_and_store=fused_triton.rope_and_store_triton,
            silu_and_mul=fused_triton.silu_and_mul_triton,
        )
    is_packed = device.type == "cpu" and dtype != torch.float16
    linear = PackedLinearMethod() if is_packed else LinearMethod()
    if isinstance(attention, NativeBackend) and dtype in NAMES and custom_ops == "all":
        native = Native(attention.library, dtype)
        return LayerConfig(
            dtype,
            device,
            parallel,
            attention,
            linear,
            native.rms_norm,
            native.add_rms_norm,
            native.rope_and_store,
            native.silu_and_mul,
        )
    if device.type == "cpu" and dtype == torch.float32:
        norm = RMSNormCPU()
        return LayerConfig(dtype, device, parallel, attention, linear, norm, norm.add)
    return LayerConfig(dtype, device, parallel, attention, linear)


def get_attn_backend(
    wanted: str | AttentionBackend | type[AttentionBackend],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> AttentionBackend:
    """The backend of a name; or the AttentionBackend itself, given as an instance or a class.

    "auto" is "triton" on a CUDA GPU where Triton is installed, "native" on a CPU with a compiler,
    and "torch" elsewhere. Raises
    ValueError for "triton" where Triton cannot run. On a CPU that takes Triton's interpreter, which
    TRITON_INTERPRET=1 in the environment asks for (slow: for tests and for reading along).
    """
    if isinstance(wanted, type) and issubclass(wanted, AttentionBackend):
        try:
            return wanted()
        except TypeError as error:
            raise ValueError(
                f"attention_backend is {wanted!r}, a class that needs arguments ({error}). Give an "
                "instance of it."
            ) from error
    if isinstance(wanted, AttentionBackend):
        return wanted
    if wanted == "reference":
        return AttentionBackend()
    if wanted == "native":
        if device.type != "cpu":
            raise ValueError("attention_backend 'native' is for a CPU. Use 'auto'.")
        return NativeBackend()
    if wanted == "auto" and device.type == "cpu" and dtype in NAMES and (found := load_library()):
        return NativeBackend(found)
    if wanted == "torch" or (wanted == "auto" and device.type != "cuda"):
        return TorchBackend()
    if wanted not in ("auto", "triton"):
        raise ValueError(
            f"attention_backend is {wanted!r}; allowed: auto, native, reference, torch, triton, or "
            "an AttentionBackend of your own (a class or an instance)."
        )
    try:
        import triton  # here, because a Mac has no Triton, and a CPU run needs none
    except ImportError:
        if wanted == "auto":
            return TorchBackend()
        raise ValueError(
            "attention_backend is 'triton', but Triton is not installed here. Use 'auto'."
        ) from None
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(
            "attention_backend is 'triton', which needs a CUDA GPU. Use 'auto', or set "
            "TRITON_INTERPRET=1 in the environment to have Triton's interpreter run it (slowly)."
        )
    from nanoserve.kernels.attention_triton import TritonBackend

    return TritonBackend()
