"""How does a model run that nanoserve has no code for?

Its code is in transformers, and most decoder-only models there call an attention function of our
choice. So a model that is not in ModelRegistry is that of transformers, with paged attention:

    model(input_ids [1, num_tokens], position_ids, ..., nanoserve_step=step)
      └─ layer 0 ─ ... ─ attend(module, query, key, value, ..., nanoserve_step=step)
                           key, value -> the layer's paged cache; attention over block tables

The tokens of the step are one batch row, laid end to end: everything but attention works token by
token and needs no more than each token's position. The caches and the metadata of the step travel
down as a keyword argument, which transformers hands on to attention: the function is registered
once, and keeps nothing. Some families do not hand on keyword arguments (Nemotron). There the step
is, while it lasts, an attribute of the model's attention modules.

A trial run shows what a model needs of attention: `run_probe` runs two tokens through the model and
records each call (heads, head sizes, window, scale, soft cap). A model that needs what paged
attention lacks (a bias, a mask, a state beside the keys and values) is refused with a sentence that
says so, because without it the model still talks, only nonsense.

Left out: tensor parallelism, CUDA graphs, code that comes with a checkpoint.

vLLM: vllm/model_executor/models/transformers/ (V1); 0.6.6 has none.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as brief
from typing import Any, NoReturn, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.modeling_outputs import MoEModelOutputWithPastAndCrossAttentions
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanoserve.attention import AttentionBackend, KVCache, StepMetadata
from nanoserve.config import EngineConfig
from nanoserve.kernels.kv_cache import KVCacheSpec
from nanoserve.layers import LayerConfig
from nanoserve.models.base import Model
from nanoserve.models.checkpoint import check_common_keys
from nanoserve.models.config import ModelConfig
from nanoserve.models.registry import ModelRegistry
from nanoserve.models.weight_files import TensorInfo, check_dtype, check_memory, read_slices

Build = Callable[..., Any]  # (a config of transformers, dtype=...) -> a model
ATTENTION_NAME = "nanoserve"  # under which transformers knows `attend`
# Keyword arguments of attention that change nothing here: positions are in the keys already, and
# outputs are chosen elsewhere.
IGNORED_KWARGS = frozenset(
    {
        "attention_mask",  # the probe checks this one and is_causal separately
        "cache_position",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
SUPPORTED_KWARGS = frozenset({"scaling", "sliding_window", "softcap"})
# What transformers logs before it fails, and an error here says in a sentence. Logger -> its words.
SAID_HERE = {
    "transformers.modeling_utils": " LOAD REPORT",
    "transformers.modeling_rope_utils": "Missing validation function",
}
NO_INTERFACE = "does not use transformers' attention interface"


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one layer's attention that are the same in every step."""

    num_heads: int
    spec: KVCacheSpec
    scale: float
    logits_soft_cap: float | None


class AttentionSink(Protocol):
    """What travels down to `attend`: a Probe while the model is built, then an AttentionStep."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> Tensor: ...


def attend(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, key_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, key_dim]
    value: Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: Tensor | None,
    nanoserve_step: AttentionSink | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers calls this in every layer. Returns [1, num_tokens, num_heads, value_dim]."""
    step = nanoserve_step or getattr(module, "nanoserve_step", None)
    if step is None:
        raise StepIsMissing
    kwargs["attention_mask"] = attention_mask
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return step.attend(module, q, k, v, kwargs)[None], None


class Unsupported(Exception):
    """A model can't run on paged attention. The text ends a sentence that begins with its name."""


class StepIsMissing(Unsupported):
    """The family does not hand on keyword arguments to attention."""


@dataclass(frozen=True)
class AttentionStep:
    """What the attention of all layers needs of one step."""

    layer_of: dict[nn.Module, int]
    calls: list[AttentionCall]
    kv_caches: list[KVCache]
    metadata: StepMetadata
    backend: AttentionBackend

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        """Store and attend, as decoder.Attention does; tensors [num_tokens, heads, dim]."""
        layer = self.layer_of[module]
        call, cache, metadata = self.calls[layer], self.kv_caches[layer], self.metadata
        dtype = cache[0].dtype if len(cache) == 2 else query.dtype  # of 8 bits: any goes in
        key, value = key.to(dtype), value.to(dtype)
        self.backend.store(key, value, cache, metadata)
        output = self.backend.attend(
            query.to(dtype).contiguous(),
            cache,
            metadata,
            scale=call.scale,
            sliding_window=call.spec.sliding_window,
            logits_soft_cap=call.logits_soft_cap,
        )
        return output.to(query.dtype)


@dataclass
class Probe:
    """Records how each layer calls attention, and returns zeros."""

    layer_of: dict[nn.Module, int] = field(default_factory=dict)
    calls: list[AttentionCall] = field(default_factory=list)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        if module in self.layer_of:
            raise Unsupported("uses one attention layer several times in a step")
        if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
            raise Unsupported("lets tokens attend to later ones")
        if kwargs["attention_mask"] is not None:
            raise Unsupported("adds a mask or a bias (such as ALiBi) to attention")
        unknown = [
            name
            for name, value in kwargs.items()
            if name not in IGNORED_KWARGS | SUPPORTED_KWARGS
            and value is not None
            and value is not False
        ]
        if unknown:
            raise Unsupported(f"passes {', '.join(unknown)} to attention, which it does not take")
        window, scale = kwargs.get("sliding_window"), kwargs.get("scaling")
        spec = KVCacheSpec(key.shape[1], key.shape[2], value.shape[2], window or None)
        self.layer_of[module] = len(self.calls)
        self.calls.append(
            AttentionCall(
                num_heads=query.shape[1],
                spec=spec,
                scale=key.shape[2] ** -0.5 if scale is None else float(scale),
                logits_soft_cap=kwargs.get("softcap"),
            )
        )
        return value.new_zeros(*query.shape[:2], value.shape[2])


class HiddenStates(nn.Module):
    """Replaces the body of a language model, and returns its input embeddings as they are.

    Given hidden states as embeddings, the forward pass of transformers then does what follows the
    body only: the head, a scale, a soft cap of the logits.
    """

    @property
    def decoder(self) -> nn.Module:
        """OPT calls its body's decoder itself."""
        return self

    def forward(
        self, *_: Any, inputs_embeds: Tensor, **__: Any
    ) -> MoEModelOutputWithPastAndCrossAttentions:
        """[1, num_rows, hidden], in the type that transformers expects."""
        return MoEModelOutputWithPastAndCrossAttentions(last_hidden_state=inputs_embeds)


class TransformersForCausalLM(Model):
    """A causal language model of transformers, with the interface of Model."""

    library = "transformers"
    supports_cuda_graphs = False  # some families do, but transformers does not guarantee it

    def __init__(self, causal_lm: Any, max_model_len: int, backend: AttentionBackend) -> None:
        """`causal_lm` was built with attn_implementation=ATTENTION_NAME. Raises Unsupported."""
        super().__init__()
        self.backend = backend
        self.body = causal_lm.base_model
        if self.body is causal_lm:
            raise Unsupported("has no body apart from its head")
        # Modules that get the step as an attribute, in a family that needs this.
        self.modules_with_step: tuple[nn.Module, ...] = ()
        try:
            probe = run_probe(self.body, causal_lm.config, max_model_len)
        except StepIsMissing:
            modules = tuple(self.body.modules())
            probe = run_probe(self.body, causal_lm.config, max_model_len, modules)
            self.modules_with_step = tuple(probe.layer_of)
        self.layer_of, self.calls = probe.layer_of, probe.calls
        fix_rope(self.body)
        setattr(causal_lm, causal_lm.base_model_prefix, HiddenStates())
        self.head = causal_lm

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: StepMetadata
    ) -> Tensor:
        """Token ids and positions [num_tokens] -> hidden states [num_tokens, hidden]."""
        step = AttentionStep(self.layer_of, self.calls, kv_caches, metadata, self.backend)
        return run_body(self.body, input_ids, positions, step, self.modules_with_step)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [num_rows, hidden] -> logits [num_rows, vocab_size]."""
        return self.head(inputs_embeds=hidden[None], use_cache=False).logits[0]

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One per layer, in the order in which forward expects kv_caches."""
        return [call.spec for call in self.calls]


def run_body(
    body: nn.Module,
    input_ids: Tensor,
    positions: Tensor,
    step: AttentionSink,
    modules_with_step: tuple[nn.Module, ...] = (),
) -> Tensor:
    """[num_tokens] each -> hidden states [num_tokens, hidden]. transformers caches nothing, and
    builds no mask, because ATTENTION_NAME has no mask function."""
    for module in modules_with_step:
        vars(module)["nanoserve_step"] = step
    try:
        output = body(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            nanoserve_step=step,
        )
    finally:
        for module in modules_with_step:
            del vars(module)["nanoserve_step"]
    return output.last_hidden_state[0]


@torch.inference_mode()
def run_probe(
    body: nn.Module,
    config: Any,
    max_model_len: int,
    modules_with_step: tuple[nn.Module, ...] = (),
) -> Probe:
    """Run tokens at the first and the last possible position; record every call of attention.

    Raises Unsupported for a model that needs more than paged attention.
    """
    probe = Probe()
    device = next(body.parameters()).device
    positions = torch.tensor([0, max_model_len - 1], device=device)
    try:
        run_body(body, torch.zeros_like(positions), positions, probe, modules_with_step)
    except Unsupported:
        raise
    except Exception as error:  # any model's code: anything
        raise Unsupported(f"fails on two tokens ({type(error).__name__}: {error})") from error
    if not probe.calls:
        raise Unsupported(NO_INTERFACE)
    num_layers = config.num_hidden_layers
    if len(probe.calls) != num_layers:
        raise Unsupported(f"attends in {len(probe.calls)} of its {num_layers} layers only")
    check_windows(config, [call.spec.sliding_window for call in probe.calls])
    return probe


def check_windows(config: Any, windows: list[int | None]) -> None:
    """Each layer must have passed to attention the sliding window that the config gives it. (In
    transformers the masks would apply the window, and they are not built here.)"""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        expected = {"full_attention": False, "sliding_attention": True}
        for kind, window in zip(kinds, windows, strict=True):
            if expected.get(kind) != (window is not None):
                raise Unsupported(
                    f"has layers of type {kind}, and passes window={window} to attention"
                )
        return
    has_window = getattr(config, "use_sliding_window", True)
    if has_window and getattr(config, "sliding_window", None) and not any(windows):
        raise Unsupported("has a sliding window that it does not pass to attention")


def fix_rope(body: nn.Module) -> None:
    """Stop rope types that follow the length of the text (dynamic, longrope) in the state that the
    probe, with the last possible position, has brought about: the output of a request must not
    depend on the lengths of others. rope.rope_frequencies does the same."""
    for module in body.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            setattr(module, "rope_type", "fixed")  # noqa: B010 (nn.Module hides it from mypy)
        elif isinstance(kind, dict):
            setattr(module, "rope_type", dict.fromkeys(kind, "fixed"))  # noqa: B010


def load_with_transformers(
    config: EngineConfig,
    model_config: ModelConfig,
    layer_config: LayerConfig,
    tensors: dict[str, TensorInfo],
) -> TransformersForCausalLM:
    """The model in `model_config.path`, built and filled (or dummy) by transformers.

    `tensors` is what the safetensors files hold. transformers itself reads no file of the folder,
    because it would also follow keys and files that nobody has checked (transformers_weights,
    configuration_files, adapter_config.json, parts of distributed checkpoints).

    Raises ValueError if the model can't run here, or if the weights do not match.
    """
    architecture = model_config.architecture
    if layer_config.parallel.tp_size > 1:
        refuse(architecture, "through transformers it can't be cut among ranks")
    if architecture not in set(_causal_lm_names()):
        refuse(architecture, "transformers knows no causal language model of that name")
    model_cls = getattr(transformers, architecture)
    AttentionInterface.register(ATTENTION_NAME, attend)
    try:
        with without_logs(SAID_HERE):
            return make_model(config, model_config, layer_config, model_cls, tensors)
    except Unsupported as error:
        refuse(architecture, f"it {error}")


def make_model(
    config: EngineConfig,
    model_config: ModelConfig,
    layer_config: LayerConfig,
    model_cls: Any,
    tensors: dict[str, TensorInfo],
) -> TransformersForCausalLM:
    """The model as `model_cls` of transformers. Raises Unsupported, and ValueError for a bad value
    in config.json and for weights that do not match."""
    assert config.max_model_len, "EngineConfig not resolved"
    hf_config = read_hf_config(model_cls, model_config)
    check_config(model_cls, hf_config)
    is_dummy = config.load_format == "dummy"
    check_sizes(hf_config, model_config, layer_config, None if is_dummy else tensors)
    if is_dummy:
        causal_lm = build_dummy(hf_config, layer_config.dtype, config.seed)
    else:
        causal_lm = fill_checkpoint(
            model_cls,
            hf_config,
            model_config.path,
            tensors,
            layer_config.dtype,
            attn_implementation=ATTENTION_NAME,
        )
    causal_lm = causal_lm.eval().to(layer_config.device)
    return TransformersForCausalLM(causal_lm, config.max_model_len, layer_config.attention)


def read_hf_config(model_cls: Any, model_config: ModelConfig) -> Any:
    """config.json as transformers' own class. Raises ValueError, which names the file, for values
    that KEYS of checkpoint.py or the class does not allow."""
    file = model_config.path / "config.json"
    check_common_keys(model_config.hf_config, file)
    try:
        return model_cls.config_class.from_dict(deepcopy(dict(model_config.hf_config)))
    except Exception as error:  # each family has its own checks
        raise ValueError(f"{file}: {reason_of(error)}.") from None


def reason_of(error: Exception) -> str:
    """What an error of transformers says about config.json, in one line.

    ValueError("Class validation error for validator 'x':\n    ValueError: `a` (3) must be 2")
    -> "a (3) must be 2"; KeyError("swiglu"), of one of its tables, -> "unknown 'swiglu'".
    """
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if isinstance(error, KeyError) and " " not in text:
        return f"unknown {brief(text)}"
    text = text.partition(" Errors: ")[0]  # one for each type that it might have
    text = re.sub(r"^.*[vV]alidation error for .*:\n\s*\w+: ", "", text)
    text = " ".join(text.replace("`", "").split()).rstrip(".")
    return text or type(error).__name__


@contextmanager
def without_logs(said: dict[str, str]) -> Iterator[None]:
    """While the block lasts, and in this thread only: loggers of these names drop what contains
    their words."""
    thread = threading.get_ident()
    with ExitStack() as stack:
        for name, words in said.items():
            logger = logging.getLogger(name)

            def keeps(record: logging.LogRecord, words: str = words) -> bool:
                return threading.get_ident() != thread or words not in record.getMessage()

            logger.addFilter(keeps)
            stack.callback(logger.removeFilter, keeps)
        yield


def _causal_lm_names() -> Iterator[str]:
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        yield from [names] if isinstance(names, str) else names


def refuse(architecture: str, reason: str) -> NoReturn:
    """Raise a ValueError that gives the reason, and says what can run."""
    raise ValueError(
        f"architecture {architecture} is not supported: {reason}. Supported natively: "
        f"{', '.join(ModelRegistry.architectures())}; and, through transformers on one rank, "
        "decoder-only models whose every layer attends through transformers' attention interface "
        "with no more than causality, a sliding window and a soft cap."
    )


def check_config(model_cls: Any, hf_config: Any) -> None:
    """Refuse, before any weight is read, models whose trouble the probe would not show."""
    if getattr(hf_config, "is_encoder_decoder", False):
        raise Unsupported("has an encoder")
    if getattr(model_cls, "_is_stateful", False):
        raise Unsupported("keeps a state beside keys and values (as Mamba does)")
    if getattr(hf_config, "num_kv_shared_layers", 0):
        raise Unsupported("shares keys and values between layers")
    if getattr(hf_config, "alibi", False) is True:
        raise Unsupported("adds a bias (ALiBi) to attention")
    if not hasattr(hf_config, "num_hidden_layers"):
        raise Unsupported("is more than one stack of layers")


def build_causal_lm(hf_config: Any, **options: Any) -> Any:
    """The model with transformers' own random weights."""
    return AutoModelForCausalLM.from_config(
        hf_config, attn_implementation=ATTENTION_NAME, **options
    )


def build_dummy(
    hf_config: Any, dtype: torch.dtype, seed: int, build: Build = build_causal_lm
) -> Any:
    """Small normal weights, norms near 1, as in loader.fill_randomly."""
    with torch.random.fork_rng(devices=[]):  # transformers draws its own weights first
        model = build(hf_config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.02
            is_scale = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(noise + 1 if is_scale else noise)
    return model


def check_sizes(
    hf_config: Any,
    model_config: ModelConfig,
    layer_config: LayerConfig,
    tensors: dict[str, TensorInfo] | None,
    build: Build = build_causal_lm,
) -> None:
    """Compare what config.json describes with the files (None: there are none) and the memory,
    before memory is taken. Raises ValueError, with the numbers or the name of a tensor.

    transformers may rename, split and stack tensors, so only their total size is compared here;
    the names and shapes are, when they are filled.
    """
    mismatch = f"the weights in {model_config.path} do not match its config.json"
    if tensors is not None and model_config.num_layers > len(tensors):
        raise ValueError(
            f"{mismatch}: num_hidden_layers is {model_config.num_layers}, and there are "
            f"{len(tensors)} tensors in all."
        )
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):  # shapes, no memory
            plan = build(hf_config)
    except (ImportError, NotImplementedError) as error:  # config.json is right
        raise Unsupported(f"can't be built here ({error})") from error
    except Exception as error:  # each family has its own checks
        if isinstance(error, KeyError) and ATTENTION_NAME in error.args:  # it has its own table
            raise Unsupported(NO_INTERFACE) from error
        file, reason = model_config.path / "config.json", reason_of(error)
        raise ValueError(f"{file}: the model cannot be built from it ({reason}).") from error
    parameters = dict(plan.named_parameters())
    wanted = sum(parameter.numel() for parameter in parameters.values())
    if tensors is not None:
        stored = sum(math.prod(tensor.shape) for tensor in tensors.values())
        if wanted > 2 * stored:  # not 1: a family may tie weights later
            raise ValueError(
                f"{mismatch}, which describes {wanted} numbers; the files have {stored}."
            )
        for name, tensor in tensors.items():  # others are buffers, such as GPT-NeoX's mask
            full_name = f"{plan.base_model_prefix}.{name}"
            if name.endswith("weight") or name in parameters or full_name in parameters:
                check_dtype(name, tensor)
    check_memory(wanted * layer_config.dtype.itemsize, layer_config)


def fill_checkpoint(
    model_cls: Any,
    hf_config: Any,
    folder: Path,
    tensors: dict[str, TensorInfo],
    dtype: torch.dtype,
    may_ignore: Callable[[str], bool] = lambda name: False,
    **options: Any,
) -> Any:
    """Weights from safetensors files; `options` are from_pretrained's. Raises ValueError, naming
    the tensors, if some do not fit, or if there are more, unless may_ignore(name)."""
    files = dict.fromkeys(tensor.file for tensor in tensors.values())
    slices = {name: source for file in files for name, source in read_slices(file)}
    try:
        model, loading = model_cls.from_pretrained(
            None,
            config=hf_config,
            state_dict=slices,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # named below instead
            **options,
        )
    except Exception as error:  # any model's code: anything
        raise ValueError(
            f"transformers can't load the weights in {folder} ({type(error).__name__}: {error}). "
            "Is the download complete, and do the weights belong to config.json?"
        ) from error
    problems = [
        f"{kind}: {', '.join([str(name) for name in names][:5])}"
        for kind in ("missing", "unexpected", "mismatched")
        if (names := [each for each in loading[f"{kind}_keys"] if not may_ignore(str(each))])
    ]
    if problems:
        raise ValueError(
            f"the weights in {folder} do not match its config.json; {'; '.join(problems)}. Is the "
            "download complete, and do the two belong together?"
        )
    return model
