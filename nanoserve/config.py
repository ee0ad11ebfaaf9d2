"""What can be set?

Two frozen dataclasses. EngineConfig holds what the user chose; ModelConfig what the checkpoint's
config.json says. Nothing is changed in place: where "auto" or None is resolved, a new object is
made, so that whoever holds a config can trust it.

config.json is read as plain JSON, not through transformers' AutoConfig: that would import torch
into the control plane, and it hides which of the two layouts (rope_theta beside rope_scaling, or
both inside rope_parameters) a checkpoint uses.

Left out: hybrid and multimodal configs, trust_remote_code (on purpose: no checkpoint runs code).

vLLM: vllm/config.py, vllm/engine/arg_utils.py (V0); vllm/config/ (V1).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

DEMO_MODEL = Path(__file__).parent / "demo"
DTYPES = ("auto", "float32", "bfloat16", "float16")
# On a CPU a step of 8192 tokens has activations so large that each is new memory from the system,
# and making its pages took up to a quarter of the step's time.
GPU_BUDGET, CPU_BUDGET = 8192, 2048  # tokens
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class EngineConfig:
    """What the user can set. Raises ValueError at construction for a value out of range."""

    model: str | None = None  # folder or Hugging Face id; None: the embedded demo model
    tokenizer: str | None = None  # the same for the tokenizer; None: the model's own
    dtype: str = "auto"  # of weights and KV cache; auto: float32 on a CPU, else the checkpoint's
    device: str = "auto"  # "cpu", "cuda", "cuda:1"; auto: a GPU if there is one
    max_model_len: int | None = None  # tokens, prompt and output; None: what the model allows
    max_num_seqs: int | None = None  # sequences in one step at most; None: 256
    max_num_batched_tokens: int | None = None  # token budget of one step; None: see resolve
    tensor_parallel_size: int = 1  # ranks (processes, GPUs) among which each layer is divided
    block_size: int = 16  # tokens in one KV block
    num_kv_blocks: int | None = None  # KV blocks; None: as many as the memory below holds
    kv_cache_memory: int | None = None  # bytes for the KV cache of a rank; None: from free memory
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory the engine may fill
    enable_prefix_caching: bool = True  # let requests share the KV blocks of equal prefixes
    enable_chunked_prefill: bool = True  # let a prompt be computed over several steps
    preemption_mode: str = "recompute"  # or "swap": preempted KV moves to CPU blocks and back
    num_cpu_blocks: int | None = None  # CPU blocks to swap to; None: as many as KV blocks
    long_prefill_token_threshold: int = 0  # tokens of one sequence in one step at most; 0: no limit
    scheduling_policy: str = "fcfs"  # "fcfs", or "priority": lower priority values run first
    seed: int = 0  # of the seeds of requests that bring none
    load_format: str = "auto"  # "auto": safetensors; "dummy": random weights from config.json alone
    model_impl: str = "auto"  # "nanoserve": our model; "transformers": theirs; auto: ours if any
    enforce_eager: bool = False  # never use CUDA graphs (a CPU never does)
    async_scheduling: bool = False  # launch a step before the last one's tokens are read
    max_logprobs: int = 20  # most logprobs a request may ask for; -1: no limit

    def __post_init__(self) -> None:
        """Check each field on its own, then the pairs that must agree."""
        positive = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_kv_blocks")
        for name in (*positive, "num_cpu_blocks", "kv_cache_memory"):
            if getattr(self, name) is not None:
                _check_at_least(name, getattr(self, name), 1)
        _check_at_least("block_size", self.block_size, 1)
        _check_at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        _check_at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        _check_at_least("max_logprobs", self.max_logprobs, -1)
        _check_at_least("seed", self.seed, 0)
        if self.seed > 2**63 - 1:
            raise ValueError(f"seed is {self.seed}; allowed: 0 to 2**63 - 1.")
        switches = ("enable_prefix_caching", "enable_chunked_prefill")
        for name in (*switches, "enforce_eager", "async_scheduling"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        _check_choice("preemption_mode", self.preemption_mode, ("recompute", "swap"))
        _check_choice("load_format", self.load_format, ("auto", "dummy"))
        _check_choice("model_impl", self.model_impl, ("auto", "nanoserve", "transformers"))
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device)):
            raise ValueError(f"device is {self.device!r}; allowed: auto, cpu, cuda, cuda:N.")
        if self.tensor_parallel_size > 1 and ":" in str(self.device):
            raise ValueError(
                f"device {self.device!r} is one GPU, and tensor_parallel_size is "
                f"{self.tensor_parallel_size}. Use 'cuda' (CUDA_VISIBLE_DEVICES chooses which)."
            )
        if not isinstance(self.gpu_memory_utilization, int | float):
            given = self.gpu_memory_utilization
            raise TypeError(f"gpu_memory_utilization must be a number, got {given!r}.")
        if not 0 < self.gpu_memory_utilization <= 1:
            given = self.gpu_memory_utilization
            raise ValueError(f"gpu_memory_utilization is {given!r}; allowed: more than 0, up to 1.")
        budget, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if budget and seqs and budget < seqs:
            raise ValueError(
                f"max_num_batched_tokens is {budget}, less than max_num_seqs {seqs}: each running "
                "sequence needs a token a step. Raise the first or lower the second."
            )

    def resolve(self, model: ModelConfig) -> EngineConfig:
        """A new config in which max_model_len, max_num_seqs and the budget are numbers. A `device`
        of "auto" counts as a GPU: the engine asks when it knows."""
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
        return replace(
            self,
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs or min(256, budget),
            max_num_batched_tokens=budget,
        )


def _check_at_least(name: str, value: Any, low: int) -> None:
    """Raise unless `value` is an int of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}.")
    if value < low:
        raise ValueError(f"{name} is {value}; allowed: {low} or more.")


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}.")


@dataclass(frozen=True)
class ModelConfig:
    """What config.json and generation_config.json say, in one vocabulary.

    What only one family of models knows (which biases, which layers have a window) stays in
    `hf_config`, for the models to read.
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
    rope_parameters: Mapping[str, Any]  # rope_type, rope_theta, and what the type needs
    dtype: str  # of the checkpoint, such as "bfloat16"
    eos_token_ids: frozenset[int]  # all of them: config.json's and generation_config.json's
    generation_defaults: Mapping[str, Any]  # generation_config.json
    hf_config: Mapping[str, Any] = field(repr=False)  # config.json itself

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read `folder`/config.json. Raises ValueError for a missing or unreadable file or key."""
        hf = _read_json(folder / "config.json")
        defaults_file = folder / "generation_config.json"
        defaults = _read_json(defaults_file) if defaults_file.exists() else {}
        architectures = hf.get("architectures") or ["(none)"]
        try:
            heads, hidden = int(_get(hf, "num_attention_heads")), int(_get(hf, "hidden_size"))
            return cls(
                path=folder,
                architecture=architectures[0],
                vocab_size=hf["vocab_size"],
                hidden_size=hidden,
                intermediate_size=_get(hf, "intermediate_size"),
                num_layers=_get(hf, "num_hidden_layers"),
                num_heads=heads,
                num_kv_heads=hf.get("num_key_value_heads") or heads,
                head_dim=hf.get("head_dim") or hidden // heads,
                max_position_embeddings=_get(hf, "max_position_embeddings"),
                rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
                tie_word_embeddings=hf.get("tie_word_embeddings", False),
                rope_parameters=read_rope_parameters(hf),
                dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
                eos_token_ids=_token_ids(hf, "eos_token_id") | _token_ids(defaults, "eos_token_id"),
                generation_defaults=defaults,
                hf_config=hf,
            )
        except KeyError as error:
            raise ValueError(
                f"{folder / 'config.json'} has no {error}, which a decoder-only model "
                f"({architectures[0]}) must name. Is this a causal language model, with positions "
                "that are learnt or rotary? Others (encoder-decoder, Mamba, ALiBi) can't run here; "
                "the README's section Models lists what can."
            ) from None

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


# Names that older families have for what most call by the first one.
OTHER_NAMES = {
    "hidden_size": ("n_embd",),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions",),
}


def _get(hf: Mapping[str, Any], key: str) -> Any:
    """hf[key], under whichever name. GPT-2 and its kin may leave the size of the MLP out."""
    for name in (key, *OTHER_NAMES[key]):
        if hf.get(name) is not None:
            return hf[name]
    if key == "intermediate_size" and "n_embd" in hf:
        return 4 * hf["n_embd"]
    raise KeyError(key)


def read_rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The rope settings of a config.json in one layout, whichever it is written in.

    transformers 5 writes `rope_parameters: {rope_theta, rope_type, ...}`; before, `rope_theta`
    stood beside `rope_scaling: {type or rope_type, ...}`. Both give
    {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, ...}.
    """
    rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    if isinstance(rope.get("full_attention"), dict):  # one for each type of layer, as in Gemma 3
        rope = dict(rope["full_attention"])
    rope["rope_type"] = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.setdefault("rope_theta", hf.get("rope_theta") or 10000.0)
    rope.setdefault("partial_rotary_factor", hf.get("partial_rotary_factor") or 1.0)
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        top_level = hf.get("original_max_position_embeddings")  # Phi-3 writes it there
        given = top_level or rope.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = given or _get(hf, "max_position_embeddings")
    return rope


def _token_ids(config: Mapping[str, Any], key: str) -> frozenset[int]:
    """config[key], an id, a list of ids or nothing, as a set."""
    value = config.get(key)
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise ValueError(f"{file.parent} has no {file.name}: not a Hugging Face checkpoint folder.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not readable JSON ({error}). Copy it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object but {content!r:.60}. Copy it again.")
    return content


def resolve_folder(model: str | Path | None) -> Path:
    """The folder that holds `model`: the demo model (None), a local folder, or a download.

    Raises ValueError if it is neither a folder nor something the Hugging Face hub delivers.
    """
    if model is None:
        return DEMO_MODEL
    if not str(model):
        raise ValueError("model is an empty string. Give a folder, a Hugging Face id, or None.")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)) or str(model).startswith("."):
        raise ValueError(
            f"model {str(model)!r} is not a folder, nor a Hugging Face id such as Qwen/Qwen3-0.6B. "
            "Give one of the two, or None for the embedded demo model."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), allow_patterns=HUB_FILES))
    except Exception as error:  # the hub's own errors are many; all mean: not to be had
        raise ValueError(
            f"model {str(model)!r} is not a local folder, and the Hugging Face hub did not deliver "
            f"it ({type(error).__name__}: {error}). Check the name and the connection, or give a "
            "folder."
        ) from error
