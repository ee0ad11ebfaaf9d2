"""What can be set?

Each field of EngineConfig is an option of LLM. The comment above it is its help text
(entrypoints/flags.py makes a flag of each). It is frozen: where "auto" or None is resolved, a new
object is made. (What the checkpoint's config.json says is a ModelConfig: models/config.py.)

    LLM(max_num_seqs=8)      ->  EngineConfig(max_num_seqs=8)
    LLM(max_num_seqs=0)      ->  ValueError: max_num_seqs is 0; allowed: 1 or more.

The options of a chapter (speculative_config, enable_lora, ...) are fields of the chapter's subclass
of EngineConfig.

vLLM: vllm/config.py, vllm/engine/arg_utils.py (V0); vllm/config/, vllm/engine/arg_utils.py (V1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from nanoserve.models.config import ModelConfig

GPU_BUDGET, CPU_BUDGET = 8192, 2048  # tokens: max_num_batched_tokens, if it is not given
# Of numbers that may be 0, or have a largest value: (smallest, largest).
RANGES = {
    "gpu_memory_utilization": (0.01, 1),
    "long_prefill_token_threshold": (0, 2**63),
    "max_logprobs": (-1, 2**31),
    "seed": (0, 2**63 - 1),
}


@dataclass(frozen=True)
class EngineConfig:
    """What the user can set: vLLM's EngineArgs. Raises ValueError or TypeError at construction for
    a value that is not allowed."""

    # Folder in Hugging Face format, or Hugging Face id; None: the embedded demo model.
    model: str | Path | None = None
    # Folder or Hugging Face id of the tokenizer; None: the model's own.
    tokenizer: str | Path | None = None
    # No tokenizer: prompts are token ids, and there are no texts.
    skip_tokenizer_init: bool = False
    # Values over those of the checkpoint's config.json: {"max_position_embeddings": 4096}.
    hf_overrides: dict | None = None
    # Type of the weights and the KV cache; auto: the checkpoint's, but on a CPU float32, except for
    # bfloat16 of 32 MiB and more if the CPU multiplies in it.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # Type of the KV cache; auto: dtype; fp8, int8: a byte for a number, and a scale for each token
    # and head.
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = "auto"
    # cpu, cuda or cuda:N; auto: a CUDA GPU if there is one.
    device: str = "auto"
    # Tokens of one request at most, prompt and output; None: what the model was made for, or less
    # if the KV cache holds less.
    max_model_len: int | None = None
    # Sequences in one step at most; None: 256, or the token budget if that is less.
    max_num_seqs: int | None = None
    # Token budget of one step; None: 8192 (2048 on a CPU), or more if it must be.
    max_num_batched_tokens: int | None = None
    # Ranks among which each layer is divided: GPUs, or processes on a CPU.
    tensor_parallel_size: int = 1
    # Tokens in one KV block.
    block_size: int = 16
    # KV blocks, on a CPU too; None: as many as the memory holds, up to max_num_seqs sequences of
    # full length.
    num_gpu_blocks_override: int | None = None
    # Bytes for the KV cache of each rank; None: from free memory.
    kv_cache_memory_bytes: int | None = None
    # Share of a GPU's memory that the engine may fill.
    gpu_memory_utilization: float = 0.9
    # Requests share the KV blocks of equal prefixes.
    enable_prefix_caching: bool = True
    # A prompt may be computed over several steps.
    enable_chunked_prefill: bool = True
    # Tokens of one sequence in one step at most; 0: no limit.
    long_prefill_token_threshold: int = 0
    # fcfs: first come, first served; priority: lower values of a request's priority first.
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    # recompute: the KV cache of a preempted sequence is dropped and computed again; swap: its KV
    # cache moves to CPU blocks and back.
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    # CPU blocks for preemption_mode swap; None: as many as KV blocks. Other modes have none.
    num_cpu_blocks: int | None = None
    # GiB of CPU memory for preemption_mode swap, of each rank; None: see num_cpu_blocks.
    swap_space: float | None = None
    # Source of the seeds of requests that have none of their own.
    seed: int = 0
    # auto: safetensors; dummy: random weights from config.json alone.
    load_format: Literal["auto", "dummy"] = "auto"
    # Whose code runs the model; auto: nanoserve's if there is any, else transformers'.
    model_impl: Literal["auto", "nanoserve", "transformers"] = "auto"
    # reference, torch, native, triton, or an AttentionBackend of your own; auto: the fastest.
    attention_backend: Any = "auto"
    # plain: the code of the flat modules; fast: that of kernels/; auto: plain for weights under 32
    # MiB on a CPU.
    kernels: Literal["auto", "plain", "fast"] = "auto"
    # Never use CUDA graphs (a CPU never does).
    enforce_eager: bool = False
    # Launch a step before the tokens of the last one are read: the same tokens, known one step()
    # later. None: on a GPU.
    async_scheduling: bool | None = None
    # Most logprobs or prompt_logprobs that a request may ask for; -1: no limit.
    max_logprobs: int = 20

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            check_option(name, getattr(self, name), hint)
        if self.swap_space is not None and self.num_cpu_blocks is not None:
            raise ValueError("swap_space and num_cpu_blocks both size the CPU pool. Give one.")
        budget, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if budget and seqs and budget < seqs:
            raise ValueError(
                f"max_num_batched_tokens is {budget}, less than max_num_seqs {seqs}: each running "
                "sequence needs a token a step. Raise the first or lower the second."
            )

    @property
    def has_cpu_blocks(self) -> bool:
        """Are there KV blocks on the CPU, too?"""
        return self.preemption_mode == "swap"

    @property
    def num_ranks(self) -> int:
        """Processes that share the model."""
        return self.tensor_parallel_size

    def resolve(self, model: ModelConfig) -> EngineConfig:
        """A new config in which device, max_model_len, max_num_seqs, max_num_batched_tokens and
        async_scheduling are known. Raises ValueError for numbers that the model was not made for.
        """
        from nanoserve.kernels.device import choose_device  # imports torch

        device, is_async = str(choose_device(self.device)), self.async_scheduling
        max_model_len = self.max_model_len or model.max_model_len
        if max_model_len > model.max_model_len:
            raise ValueError(
                f"max_model_len is {max_model_len}, but {model.path.name} was made for at most "
                f"{model.max_model_len} tokens. Ask for that or less."
            )
        usual = CPU_BUDGET if device == "cpu" else GPU_BUDGET
        budget = self.max_num_batched_tokens or max(usual, self.max_num_seqs or 0)
        if not self.enable_chunked_prefill and budget < max_model_len:
            if self.max_num_batched_tokens:
                raise ValueError(
                    f"max_num_batched_tokens is {budget}, but without chunked prefill one step "
                    f"must hold a prompt of max_model_len ({max_model_len}) tokens. Raise it."
                )
            budget = max_model_len
        return replace(
            self,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs or min(256, budget),
            max_num_batched_tokens=budget,
            async_scheduling=device != "cpu" if is_async is None else is_async,
        )


def check_option(name: str, value: Any, hint: Any) -> None:
    """Raise TypeError or ValueError, with the option's name, unless `value` fits its annotation."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if Any in kinds or (value is None and type(None) in kinds):
        return
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError(f"{name} is {value!r}; allowed: {', '.join(get_args(hint))}.")
    elif isinstance(value, bool) is not (bool in kinds) or not (
        isinstance(value, kinds) or (float in kinds and isinstance(value, int))
    ):
        names = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
        raise TypeError(f"{name} must be {names}, got {value!r}.")
    elif isinstance(value, (int, float)) and bool not in kinds:
        low, high = RANGES.get(name, (0 if float in kinds else 1, 2**63))
        if not low <= value <= high:
            allowed = f"{low} or more" if high == 2**63 else f"{low} to {high}"
            raise ValueError(f"{name} is {value}; allowed: {allowed}.")
