"""What can be set?

Two frozen dataclasses. EngineConfig holds what the user chose; ModelConfig holds what the
checkpoint's config.json says. A config never changes. Where "auto" or None is resolved, a new
object is made.

Each engine option is declared once, as a field of EngineConfig with its help text below it.
Everything else is made from the declaration:

    declaration          max_num_seqs: int | None = None
    check                EngineConfig(max_num_seqs=0)    ValueError: ... allowed: 1 or more.
    Python argument      LLM(max_num_seqs=8)
    command line         python example.py --max-num-seqs 8
    tables of options    OPTIONS

config.json is read as plain JSON, not through transformers' AutoConfig. AutoConfig would import
torch into the control plane, and it hides which of two layouts a checkpoint uses (rope_theta beside
rope_scaling, or both inside rope_parameters).

Left out: hybrid and multimodal configs, trust_remote_code (on purpose: no checkpoint runs code).

vLLM: vllm/config.py, vllm/engine/arg_utils.py (V0); vllm/config/, vllm/engine/arg_utils.py (V1).
"""

from __future__ import annotations

import argparse
import ast
import inspect
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from nanoserve.checkpoint import (
    FAMILY_DEFAULTS,
    INT32,
    read_architecture,
    read_dtype,
    read_head_dim,
    read_intermediate_size,
    read_json,
    read_key,
    read_required,
    read_rope_parameters,
    read_token_ids,
)
from nanoserve.exceptions import brief
from nanoserve.inputs import as_python
from nanoserve.interrupts import unless_signal
from nanoserve.memory import check_fits, total_memory

logger = logging.getLogger("nanoserve")

DEMO_MODEL = Path(__file__).parent / "demo"
DEMO_NAME = Path("nanoserve/demo")  # its path in the clone, and its name in every other folder
GPU_BUDGET, CPU_BUDGET = 8192, 2048  # tokens: the default max_num_batched_tokens
TOKEN_BYTES, ROW_BYTES = 40, 256  # what a token of a step, and a row, take beside their tables
INT64 = SEED_LIMIT = 2**63 - 1
ABOVE_ZERO = math.ulp(0.0)  # the smallest float that is more than 0
# A Hugging Face id, gpt2 or Qwen/Qwen3-0.6B; not ./x, and not the name of a file with weights.
HUB_ID = r"(?!\.)(?!.*\.(gguf|safetensors|bin|pth?|json)$)[\w.-]+(/[\w.-]+)?"
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# Architectures that make vectors, unless a class of the user's own has this name.
POOLING_SUFFIXES = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")


def to_flag(name: str) -> str:
    """An option's name on the command line: "max_num_seqs" -> "--max-num-seqs"."""
    return "--" + name.replace("_", "-")


def check_bool(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {brief(value)}.")


def check_number(name: str, value: Any, kind: type, low: float, high: float, allowed: str) -> None:
    """Raise unless `value` is a number with low <= value <= high (NaN never is). With kind=int it
    must be an int. `allowed` says the range in words."""
    noun, kinds = ("an int", int) if kind is int else ("a number", (int, float))
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"{name} must be {noun}, got {brief(value)}; allowed: {allowed}.")
    if not low <= value <= high:
        raise ValueError(f"{name} is {brief(value)}; allowed: {allowed}.")


def read_int(text: str) -> int:
    """An int as vLLM's flags have it: "1k" is 1000, "1K" 1024, "2.5k" 2500; also m, g, t, M, G, T.
    Raises ValueError for anything else, such as "1.5K"."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt])", text):
        return int(Decimal(match[1]) * DECIMAL[match[2]])
    if match := re.fullmatch(r"(\d+)([KMGT])", text):
        return int(match[1]) * BINARY[match[2]]
    return int(text)


class Option(NamedTuple):
    """One engine option, as EngineConfig declares it."""

    name: str  # such as "max_num_seqs"
    kind: Any  # bool, int, float or str; Any: the module that uses the option checks it
    default: Any  # if this is None, None is allowed
    help: str
    choices: tuple[str, ...]  # the allowed strings; (): not a choice among a few

    @property
    def flag(self) -> str:
        """The option on the command line, such as "--max-num-seqs"."""
        return to_flag(self.name)

    @property
    def cli_help(self) -> str:
        """The help text for the command line, where leaving the flag out stands for None."""
        if self.default is not None:
            return f"{self.help} (default: {self.default})"
        what, _, default = self.help.partition("; None: ")
        default, *others = default.split(". ", 1)
        return f"{what}.{''.join(f' {other}' for other in others)} (default: {default.strip('.')})"

    def read(self, text: str) -> Any:
        """The value that `text` stands for on the command line, or argparse's error."""
        is_number = self.kind in (int, float)
        if text == "None" or (text == "auto" and is_number):
            message = f"{text} is not a value: leave {self.flag} out for that"
            raise argparse.ArgumentTypeError(message)
        if not is_number:
            return VALUE_ALIASES.get(self.name, {}).get(text, text)
        try:
            return read_int(text) if self.name in WITH_SUFFIX else self.kind(text)
        except ValueError:
            noun = "an int" if self.kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {noun}") from None

    def check(self, value: Any) -> None:
        """Raise TypeError or ValueError, with the option's name, unless `value` is allowed."""
        if self.kind is Any or (value is None and self.default is None):
            return
        if self.kind is bool:
            check_bool(self.name, value)
        elif self.kind in (int, float):
            check_number(self.name, value, self.kind, *RANGES.get(self.name, POSITIVE))
        elif self.choices and value not in self.choices:
            raise ValueError(f"{self.name} is {brief(value)}; allowed: {', '.join(self.choices)}.")
        elif not isinstance(value, (str, Path)):
            raise TypeError(f"{self.name} must be a string, got {brief(value)}.")


# Smallest number, largest number, and the range in words. POSITIVE is for numbers not in RANGES.
POSITIVE = (1, INT64, "1 to 2**63 - 1")
BLOCKS = (1, INT32, "1 to 2**31 - 1")  # ids of blocks are 32-bit numbers
RANGES = {
    "block_size": BLOCKS,
    "gpu_memory_utilization": (ABOVE_ZERO, 1, "more than 0, up to 1"),
    "kv_offloading_size": (ABOVE_ZERO, 2**33, "more than 0, up to 2**33"),
    "long_prefill_token_threshold": (0, INT64, "0 to 2**63 - 1"),
    "max_logprobs": (-1, INT64, "-1 to 2**63 - 1"),
    "num_cpu_blocks": BLOCKS,
    "num_gpu_blocks_override": BLOCKS,
    "seed": (0, SEED_LIMIT, "0 to 2**63 - 1"),
    "swap_space": (0, 2**33, "0 to 2**33"),
}
# Other names of options: other name -> name.
ALIASES = {
    "num_kv_blocks": "num_gpu_blocks_override",
    "kv_cache_memory": "kv_cache_memory_bytes",
    "device_memory_utilization": "gpu_memory_utilization",
}
# Options that a chapter reads: name -> module in extras, class.
CHAPTER_CONFIGS = {
    "speculative_config": ("speculative.config", "SpeculativeConfig"),
    "pooler_config": ("pooling.config", "PoolerConfig"),
    "structured_outputs_config": ("structured_output.params", "StructuredOutputsConfig"),
    "kv_transfer_config": ("kv_offload.config", "KVTransferConfig"),
}
SHORT_FLAGS = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "speculative_config": "-sc",
    "quantization": "-q",
}  # as in vLLM
# Whose flags take 1k (1000), 1K (1024), ... as in vLLM.
WITH_SUFFIX = ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes")
DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# vLLM's names for values that have another name here.
VALUE_ALIASES = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {
        "fp8_e4m3": "fp8",
        "fp8_per_token_head": "fp8",
        "int8_per_token_head": "int8",
    },
    "load_format": {"safetensors": "auto"},
    "quantization": {
        "fp8_per_channel": "fp8",
        "int8_per_channel_weight_only": "int8",
        **dict.fromkeys(("auto_awq", "awq_marlin"), "awq"),
        **dict.fromkeys(("auto_gptq", "gptq_marlin"), "gptq"),
    },
    "model_impl": {"vllm": "nanoserve"},
    "attention_backend": {"TRITON_ATTN": "triton", "TORCH_SDPA": "torch", "CPU_ATTN": "torch"},
}


@dataclass(frozen=True)
class EngineConfig:
    """What the user can set: vLLM's EngineArgs. The fields are the options of LLM, too.

    The string below a field is its help text. Raises ValueError or TypeError at construction for a
    value that is not allowed.
    """

    model: str | Path | None = None
    """Folder in Hugging Face format, or Hugging Face id; None: the embedded demo model."""
    tokenizer: str | Path | None = None
    """Folder or Hugging Face id of the tokenizer; None: the model's own."""
    runner: Literal["auto", "generate", "pooling"] = "auto"
    """generate: the model writes text; pooling: it makes a vector of each prompt (LLM.embed); auto:
    pooling for a checkpoint of sentence-transformers and for an encoder such as BERT."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights and the KV cache; auto: float32 on a CPU, else the checkpoint's."""
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = "auto"
    """Type of the KV cache; auto: dtype; fp8, int8: a byte for a number, and a scale for each token
    and head, so that a block takes a quarter to a half of the memory."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto: a CUDA GPU if there is one."""
    max_model_len: int | None = None
    """Tokens of one request at most, prompt and output; None: what the model was made for."""
    max_num_seqs: int | None = None
    """Sequences in one step at most; None: 256, or the token budget if that is less."""
    max_num_waiting: int | None = None
    """Requests that may wait, beside the running ones, before add_request refuses another one with
    QueueOverflowError; None: no limit. A new request waits until the next step at least."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step; None: 8192 (2048 on a CPU), or more if max_num_seqs or a prompt
    that may not be split needs it."""
    tensor_parallel_size: int = 1
    """Ranks among which each layer is divided: GPUs, or processes on a CPU."""
    distributed_executor_backend: Literal["uni", "mp", "ray", "external_launcher"] | None = None
    """Where the ranks come from: uni: there is one; mp: processes of this machine; ray: actors in a
    Ray cluster; external_launcher: torchrun; None: torchrun if it has started us, else uni or
    mp."""
    pipeline_parallel_size: int = 1
    """Stages, each of tensor_parallel_size ranks with some of the layers; as many steps are in
    flight."""
    block_size: int = 16
    """Tokens in one KV block."""
    num_gpu_blocks_override: int | None = None
    """KV blocks, on a CPU too; None: as many as the memory holds, up to max_num_seqs sequences of
    full length."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for the KV cache of each rank; None: from free memory. On a CPU, decoding sequences
    have a second copy of their own part, outside this memory."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that the engine may fill."""
    enable_prefix_caching: bool = True
    """Requests share the KV blocks of equal prefixes."""
    enable_chunked_prefill: bool = True
    """A prompt may be computed over several steps."""
    long_prefill_token_threshold: int = 0
    """Tokens of one sequence in one step at most; 0: no limit."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """fcfs: first come, first served; priority: lower values of a request's priority first."""
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    """recompute: the KV cache of a preempted sequence is dropped and computed again; swap: its KV
    cache moves to CPU blocks and back."""
    num_cpu_blocks: int | None = None
    """CPU blocks for preemption_mode swap; None: as many as KV blocks. Other modes have none."""
    swap_space: float | None = None
    """GiB of CPU memory for preemption_mode swap, of each rank; None: see num_cpu_blocks."""
    kv_offloading_size: float | None = None
    """GiB of CPU memory, over all ranks, for blocks that the prefix cache would forget; None: it
    forgets them."""
    kv_offloading_backend: Literal["native"] = "native"
    """Whose code keeps them."""
    kv_transfer_config: Any = None
    """Where else keys and values go to and come from, such as a disk: a dict, or its JSON; None:
    nowhere. The keys are in extras/kv_offload/config.py."""
    seed: int = 0
    """Source of the seeds of requests that have none of their own."""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto: safetensors; dummy: random weights from config.json alone."""
    quantization: Literal["fp8", "int8", "int4", "awq", "gptq", "compressed-tensors"] | None = None
    """fp8, int8 or int4: weights in floating point are quantized while they are loaded; the name of
    a format: the checkpoint must have it; None: as config.json says."""
    model_impl: Literal["auto", "nanoserve", "transformers"] = "auto"
    """Whose code runs the model; auto: nanoserve's if there is any, else transformers'."""
    attention_backend: Any = field(default="auto", hash=False)  # one of your own may have no hash
    """reference, torch, native (a Linux CPU with a C++ compiler), triton (a GPU, or
    TRITON_INTERPRET=1), or in Python an AttentionBackend of your own; auto: triton on a GPU, native
    on a CPU if it can be compiled, else torch."""
    custom_ops: Literal["all", "none"] = "all"
    """all: with triton or native attention, fused kernels also for norms, rotary embedding and
    activation; none: plain PyTorch for these, to compare."""
    enforce_eager: bool = False
    """Never use CUDA graphs (a CPU never does)."""
    async_scheduling: bool = False
    """Launch a step before the tokens of the last one are read: the same tokens, known one step()
    later. With speculative_config, each step is read first."""
    speculative_config: Any = None
    """Guess tokens and verify several in a step, the same tokens in fewer steps: a dict, or its
    JSON, such as {"method": "ngram", "num_speculative_tokens": 3}; None: off. The keys are in
    extras/speculative/config.py."""
    structured_outputs_config: Any = None
    """Which backend makes grammars of structured_outputs: a dict, or its JSON, such as
    {"backend": "xgrammar"}; None: {"backend": "auto"}. The keys are in
    extras/structured_output/params.py."""
    pooler_config: Any = None
    """How a pooling model makes one vector of a prompt: a dict, or its JSON, such as
    {"seq_pooling_type": "MEAN"}; None: as the checkpoint says. The keys are in
    extras/pooling/config.py."""
    enable_lora: bool = False
    """Requests may have LoRA adapters (lora_request)."""
    max_loras: int = 1
    """Adapters in one step at most: slots on the device."""
    max_lora_rank: int = 16
    """Largest rank of an adapter; each slot has room for it."""
    max_cpu_loras: int | None = None
    """Adapters whose weights are kept in main memory, those in slots included; None: max_loras."""
    max_logprobs: int = 20
    """Most logprobs or prompt_logprobs that a request may ask for; -1: no limit."""

    def __post_init__(self) -> None:
        """Check each field on its own, then the pairs that must agree."""
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))  # torch.float16
        for name, names in VALUE_ALIASES.items():
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, names.get(value, value))
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", str(self.device)):
            raise ValueError(f"device is {brief(self.device)}; allowed: auto, cpu, cuda, cuda:N.")
        for each in OPTIONS:
            if each.kind is not Any:  # a number of NumPy or torch becomes Python's
                object.__setattr__(self, each.name, as_python(getattr(self, each.name)))
            each.check(getattr(self, each.name))
        for name, (chapter, cls) in CHAPTER_CONFIGS.items():
            if (value := getattr(self, name)) is not None:
                value = getattr(load_chapter(name, chapter), cls).read(value)
                object.__setattr__(self, name, value)
        if self.world_size > 1 and self.distributed_executor_backend == "uni":
            raise ValueError(
                "distributed_executor_backend is 'uni', which is one rank, and "
                f"tensor_parallel_size is {self.tensor_parallel_size}, pipeline_parallel_size "
                f"{self.pipeline_parallel_size}. Set both to 1, or the backend to 'mp' or 'ray'."
            )
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if (number := getattr(self, name)) > 1 and ":" in self.device:
                raise ValueError(
                    f"device {self.device!r} is one GPU, and {name} is {number}. Use 'cuda' "
                    "(CUDA_VISIBLE_DEVICES chooses which)."
                )
        if self.swap_space is not None and self.num_cpu_blocks is not None:
            raise ValueError(
                f"swap_space ({self.swap_space} GiB) and num_cpu_blocks ({self.num_cpu_blocks}) "
                "both set the size of the CPU pool. Give one of them."
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras is {self.max_cpu_loras}, less than max_loras {self.max_loras}: "
                "adapters on the device are kept on the CPU, too. Raise the first or lower the "
                "second."
            )
        if self.has_kv_connector:
            chapter = load_chapter("kv_offloading_size", "kv_offload.config")
            chapter.OffloadingConfig.from_config(self)
        if self.pipeline_parallel_size > 1:
            self._check_pipeline()
        budget, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if budget and seqs and budget < seqs:
            raise ValueError(
                f"max_num_batched_tokens is {budget}, less than max_num_seqs {seqs}: each running "
                "sequence needs a token a step. Raise the first or lower the second."
            )

    def _check_pipeline(self) -> None:
        """Raise ValueError for an option that needs the whole model on rank 0's stage."""
        refused = {
            "speculative_config": self.speculative_config is not None,
            "enable_lora": self.enable_lora,
            "kv_offloading_size and kv_transfer_config": self.has_kv_connector,
            "runner='pooling'": self.runner == "pooling",
        }
        for name in filter(refused.get, refused):
            raise ValueError(
                f"pipeline_parallel_size is {self.pipeline_parallel_size}, which does not go "
                f"together with {name}. Leave one of the two out; tensor_parallel_size divides the "
                "model, too."
            )

    @property
    def world_size(self) -> int:
        """Ranks in all: processes, one on each GPU."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def max_concurrent_batches(self) -> int:
        """Steps in flight at most: one in each stage, and one more with async_scheduling."""
        return self.pipeline_parallel_size + self.async_scheduling

    @property
    def has_kv_connector(self) -> bool:
        """Do blocks of the prefix cache go anywhere else than to the device?"""
        transfer = self.kv_transfer_config
        return self.kv_offloading_size is not None or bool(transfer and transfer.kv_connector)

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Tokens of a sequence in a decode step: 1, and with k drafts up to 1 + k."""
        speculation = self.speculative_config
        return (1,) if speculation is None else (1, 1 + speculation.num_speculative_tokens)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add one flag for each option: --max-num-seqs 8, --no-enable-prefix-caching, ..."""
        group = parser.add_argument_group("engine options")
        for each in OPTIONS:
            if each.kind is bool:
                how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
            else:
                kind = str if each.kind is Any else each.kind
                how = {"type": each.read, "choices": each.choices or None}
                how["metavar"] = None if each.choices else kind.__name__.upper()
            aliases = [to_flag(alias) for alias in ALIASES if ALIASES[alias] == each.name]
            taken = parser._option_string_actions  # the program's own -q stays its own
            short = [flag for flag in SHORT_FLAGS.get(each.name, "").split() if flag not in taken]
            flags = [each.flag, *aliases, *short]
            action = group.add_argument(*flags, default=each.default, **how)
            # Not given above: the action of a bool may add the default itself, or may not.
            action.help = each.cli_help
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineConfig:
        """The config that the flags of add_cli_args describe; other arguments are left alone."""
        names = [each.name for each in OPTIONS]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})

    def resolve(self, model: ModelConfig) -> EngineConfig:
        """A new config in which max_model_len, max_num_seqs and max_num_batched_tokens are numbers.

        The default budget depends on the device: LLMEngine replaces device "auto" by a real device
        before it calls resolve. A `device` that is still "auto" gets the budget of a GPU. Raises
        ValueError for numbers that the model was not made for, or that no memory holds.
        """
        max_model_len = self.max_model_len or model.max_model_len
        if max_model_len > model.max_model_len:
            raise ValueError(
                f"max_model_len is {max_model_len}, but {model.path.name} was made for at most "
                f"{model.max_model_len} tokens. Ask for that or less."
            )
        default = CPU_BUDGET if self.device == "cpu" else GPU_BUDGET
        budget = self.max_num_batched_tokens or max(default, self.max_num_seqs or 0)
        if not self.enable_chunked_prefill:
            if self.max_num_batched_tokens and budget < max_model_len:
                raise ValueError(
                    f"max_num_batched_tokens is {budget}, but without chunked prefill one step "
                    f"must hold a prompt of max_model_len ({max_model_len}) tokens. Raise it, "
                    "lower max_model_len or set enable_chunked_prefill=True."
                )
            budget = max(budget, max_model_len)
        resolved = replace(
            self,
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs or min(256, budget),
            max_num_batched_tokens=budget,
        )
        _check_tables(resolved, model.head_dim)
        return resolved


def load_chapter(option: str, name: str) -> Any:
    """The module `name` of extras/, which an option needs. Raises ValueError if it was deleted."""
    try:
        return import_module(f"nanoserve.extras.{name}")
    except ModuleNotFoundError as error:
        folder = f"nanoserve/extras/{name.partition('.')[0]}"
        raise ValueError(
            f"{option} needs {folder}, and it is not there: {error}. Leave {option} out."
        ) from error


def find_pooling(config: EngineConfig, model: ModelConfig) -> Any:
    """The chapter extras/pooling, if the model is to make vectors; None if it is to write text.
    auto: as in vLLM, sentence-transformers' files or the end of an architecture's name say so.
    Raises ValueError for a pooler_config that nothing would read."""
    name, has_files = model.architecture, os.path.lexists(model.path / "modules.json")
    is_body = name.endswith(POOLING_SUFFIXES) and not name.endswith("LMHeadModel")
    chapter = None
    if config.runner == "pooling" or (config.runner == "auto" and (has_files or is_body)):
        chapter = load_chapter("runner='pooling'", "pooling.engine")
        goes_by_name = config.runner == "auto" and not has_files
        chapter = None if goes_by_name and chapter.is_registered(model) else chapter
    if chapter is None and config.pooler_config is not None:
        raise ValueError(
            f"pooler_config says how vectors are made, and {model.path.name} would write text. "
            "Add runner='pooling', or leave it out."
        )
    return chapter


def _check_tables(config: EngineConfig, head_dim: int) -> None:
    """Raise ValueError for an option whose tables alone are larger than the machine's memory: the
    angles of all positions, the arrays of one step, and the token ids and block ids of all rows."""
    assert config.max_model_len and config.max_num_seqs and config.max_num_batched_tokens
    row = 4 * (config.max_model_len + -(-config.max_model_len // config.block_size)) + ROW_BYTES
    for name, bytes_each in (
        ("max_model_len", 14 * head_dim),
        ("max_num_seqs", row),
        ("max_num_batched_tokens", TOKEN_BYTES),  # last: it may follow from max_num_seqs
    ):
        value = getattr(config, name)
        others = f" (with max_model_len {config.max_model_len})" * (name == "max_num_seqs")
        what = f"{name} is {value}, whose tables take {{size}} of main memory"
        advice = f"Lower it: at most {{most}} would fit{others}."
        check_fits(what, value, bytes_each, total_memory(), advice)


def _read_options() -> tuple[Option, ...]:
    """Every field of EngineConfig, in the order of declaration."""
    hints, help_texts = get_type_hints(EngineConfig), _read_help_texts(EngineConfig)
    options = []
    for each in fields(EngineConfig):
        hint = hints[each.name]
        kind = hint if get_origin(hint) is Literal else (get_args(hint) or (hint,))[0]
        choices = get_args(kind)  # kind is int, say, of `int | None`, or a Literal
        kind = str if choices else kind
        options.append(
            Option(each.name, kind, each.default, help_texts.get(each.name, ""), choices)
        )
    return tuple(options)


def _read_help_texts(cls: type) -> dict[str, str]:
    """The string below each field of `cls`. Python drops these strings, so they are read from the
    source, as vLLM does; an installation without source files has no help texts."""
    try:
        [definition] = ast.parse(inspect.getsource(cls)).body
    except OSError:
        return {}
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for pair in pairwise(definition.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                texts[name] = " ".join(text.split())
    return texts


OPTIONS = _read_options()


@dataclass(frozen=True)
class ModelConfig:
    """What config.json and generation_config.json say, in one vocabulary.

    Settings of a single family of models (which biases, which layers have a window) stay in
    `hf_config`. The module of the family reads them there.
    """

    path: Path  # folder of the checkpoint
    architecture: str  # class name in transformers, such as "Qwen3ForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int  # key and value heads; divides num_heads
    head_dim: int
    max_position_embeddings: int  # tokens
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_parameters: Mapping[str, Any]  # rope_type, rope_theta, and the type's own keys
    dtype: str  # of the checkpoint, such as "bfloat16"
    eos_token_ids: frozenset[int]  # of config.json and of generation_config.json
    generation_defaults: Mapping[str, Any]  # generation_config.json
    hf_config: Mapping[str, Any] = field(repr=False)  # config.json itself

    @classmethod
    def from_folder(cls, folder: Path, hf: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read `folder`/config.json, or take `hf` for its content. Raises ValueError for a missing
        or unreadable file, a missing key, and a value that is not allowed (checkpoint.KEYS)."""
        file, defaults_file = folder / "config.json", folder / "generation_config.json"
        hf = read_json(file) if hf is None else hf
        hf = {**FAMILY_DEFAULTS.get(str(hf.get("model_type")), {}), **hf}
        defaults = read_json(defaults_file) if os.path.lexists(defaults_file) else {}
        vocab_size = read_required(hf, "vocab_size", file)
        heads = read_required(hf, "num_attention_heads", file)
        eos = read_token_ids(hf, "eos_token_id", file)
        eos |= read_token_ids(defaults, "eos_token_id", defaults_file)
        return cls(
            path=folder,
            architecture=read_architecture(hf, file),
            vocab_size=vocab_size,
            hidden_size=read_required(hf, "hidden_size", file),
            intermediate_size=read_intermediate_size(hf, file),
            num_layers=read_required(hf, "num_hidden_layers", file),
            num_heads=heads,
            num_kv_heads=read_key(hf, "num_key_value_heads", heads, file),
            head_dim=read_head_dim(hf, file),
            max_position_embeddings=read_required(hf, "max_position_embeddings", file),
            rms_norm_eps=read_key(hf, "rms_norm_eps", 1e-6, file),
            tie_word_embeddings=read_key(hf, "tie_word_embeddings", False, file),
            rope_parameters=read_rope_parameters(hf, file),
            dtype=read_dtype(hf, file),
            eos_token_ids=_drop_impossible(eos, vocab_size, folder),
            generation_defaults=defaults,
            hf_config=hf,
        )

    def get(self, key: str, default: Any = None) -> Any:
        """What config.json says about `key`, one of checkpoint.KEYS; `default` if it says nothing.
        Raises ValueError for a value that is not allowed."""
        return read_key(self.hf_config, key, default, self.path / "config.json")

    @property
    def max_model_len(self) -> int:
        """Tokens the model was made for; rope scaling stretches it by its factor, as in vLLM."""
        rope = self.rope_parameters
        length, factor = self.max_position_embeddings, rope.get("factor") or 1.0
        if rope["rope_type"] == "yarn":
            length = rope["original_max_position_embeddings"]
            factor = rope.get("factor") or self.max_position_embeddings / length
        if rope["rope_type"] in ("linear", "dynamic", "yarn"):
            return int(length * factor)
        return self.max_position_embeddings


def _drop_impossible(token_ids: frozenset[int], vocab_size: int, folder: Path) -> frozenset[int]:
    """The EOS ids that the model can sample. The others could end no sequence. They are no error,
    because checkpoints that work have some: -1 for none, or those of a larger vocabulary."""
    possible = frozenset(each for each in token_ids if 0 <= each < vocab_size)
    if possible != token_ids:
        logger.warning(
            "%s: eos_token_id %s is outside of the vocabulary of %d tokens, and ignored.%s",
            folder,
            brief(sorted(token_ids - possible)),
            vocab_size,
            "" if possible else " No other is left: sequences end at a stop string or max_tokens.",
        )
    return possible


def find_folder(model: str | Path) -> Path | None:
    """The folder `model` on this machine; None if it is none. "nanoserve/demo" is the embedded demo
    model in every working directory: a stranger could give a model on the hub this name."""
    folder = Path(os.path.expanduser(model))
    if os.path.isdir(folder):  # unlike Path's methods, these two fail for no name
        return folder
    if folder == DEMO_NAME or DEMO_NAME in folder.parents:  # its drafters are in it
        folder = DEMO_MODEL / folder.relative_to(DEMO_NAME)
        return folder if os.path.isdir(folder) else None
    return None


def resolve_folder(
    model: str | Path | None, what: str = "model", default: Path = DEMO_MODEL
) -> Path:
    """The folder that holds `model`: `default` (None), a local folder, or a download.

    what: the option: "model", "tokenizer" or "speculative_config". Raises ValueError if `model` is
    not a folder and the Hugging Face hub does not deliver it.
    """
    if model is None:
        return default
    without = f"leave {what} out: " + {
        "model": "the embedded demo model",
        "tokenizer": "the model's own",
    }.get(what, "no drafts")
    if not str(model):
        raise ValueError(f"{what} is an empty string. Give a folder, a Hugging Face id, or None.")
    if (folder := find_folder(model)) is not None:
        return folder
    if not re.fullmatch(HUB_ID, str(model)):
        files = "tokenizer.json" if what == "tokenizer" else "config.json and *.safetensors"
        raise ValueError(
            f"{what} {brief(str(model))} is not a folder, nor a Hugging Face id such as "
            f"Qwen/Qwen3-0.6B or gpt2. Give a folder with {files} or an id, or {without}."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), allow_patterns=HUB_FILES))
    except unless_signal(Exception) as error:  # one of the hub's many: no model
        logger.debug("%s %r: %s", what, str(model), error)
        raise ValueError(
            f"{what} {brief(str(model))} is not a local folder, and the Hugging Face hub did not "
            f"deliver it ({type(error).__name__}). Check the name and the connection, give a "
            f"folder, or {without}."
        ) from error
