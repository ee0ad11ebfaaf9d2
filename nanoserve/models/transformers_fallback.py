"""How does a model run that nanoserve has no code for?

Its code is in transformers, and most decoder-only models there call an attention function of our
choice. So a model that is not in ModelRegistry is that of transformers, with paged attention:

    model(input_ids [1, num_tokens], position_ids, ..., nanoserve_step=step)
      └─ layer 0 ─ ... ─ attend(module, query, key, value, ..., nanoserve_step=step)
                           key, value -> the layer's paged cache; attention over block tables

The tokens of the step are one batch row, laid end to end: everything but attention works token by
token and needs no more than each token's position. The caches and the metadata of the step travel
down as a keyword argument, which transformers hands on to attention: the function is registered
once, and keeps nothing.

A trial run shows what a model needs of attention: `run_probe` runs two tokens through the model and
records each call (heads, head sizes, window, scale, soft cap). A model that needs what paged
attention lacks (a bias, a mask, a state beside the keys and values) is refused with a sentence that
says so, because without it the model still talks, only nonsense.

Left out: tensor parallelism, CUDA graphs, code that comes with a checkpoint, families that do not
hand on keyword arguments to attention (Nemotron).

vLLM: vllm/model_executor/models/transformers/ (V1); 0.6.6 has none.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import MoEModelOutputWithPastAndCrossAttentions as BodyOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanoserve.attention import AttentionBackend, KVCache, StepMetadata
from nanoserve.config import EngineConfig
from nanoserve.kernels.kv_cache import KVCacheSpec
from nanoserve.layers import LayerConfig
from nanoserve.models import weight_files
from nanoserve.models.base import Model
from nanoserve.models.config import ModelConfig
from nanoserve.models.registry import ModelRegistry

ATTENTION_NAME = "nanoserve"  # under which transformers knows `attend`
# Keyword arguments of attention: those that are used, and those that change nothing here (positions
# are in the keys already; the probe checks attention_mask and is_causal separately).
KNOWN_KWARGS = {
    *("scaling", "sliding_window", "softcap", "attention_mask", "is_causal", "cache_position"),
    *("dropout", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("position_embeddings", "position_ids", "return_dict", "use_cache"),
}


class Unsupported(Exception):
    """A model can't run on paged attention. The text ends a sentence that begins with its name."""


def attend(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, key_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, key_dim]
    value: Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: Tensor | None,
    nanoserve_step: Any = None,  # a Probe while the model is built, then an AttentionStep
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers calls this in every layer. Returns [1, num_tokens, num_heads, value_dim]."""
    if nanoserve_step is None:
        raise Unsupported("does not hand on keyword arguments to attention")
    kwargs["attention_mask"] = attention_mask
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return nanoserve_step.attend(module, q, k, v, kwargs)[None], None


class AttentionCall(NamedTuple):
    """What is the same in every step about one layer's attention."""

    layer: int
    spec: KVCacheSpec
    options: dict[str, Any]  # AttentionBackend.attend's: scale, sliding_window, logits_soft_cap


Calls = dict[nn.Module, AttentionCall]  # of all layers, in their order


@dataclass(frozen=True)
class AttentionStep:
    """What the attention of all layers needs of one step."""

    calls: Calls
    kv_caches: list[KVCache]
    metadata: StepMetadata
    backend: AttentionBackend

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        """Store and attend, as model.Attention does; tensors [num_tokens, heads, dim]."""
        call = self.calls[module]
        cache, metadata = self.kv_caches[call.layer], self.metadata
        dtype = cache[0].dtype if len(cache) == 2 else query.dtype  # of 8 bits: any goes in
        self.backend.store(key.to(dtype), value.to(dtype), cache, metadata)
        q = query.to(dtype).contiguous()
        return self.backend.attend(q, cache, metadata, **call.options).to(query.dtype)


@dataclass
class Probe:
    """Records how each layer calls attention, and returns zeros."""

    calls: Calls = field(default_factory=dict)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        if module in self.calls:
            raise Unsupported("uses one attention layer several times in a step")
        if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
            raise Unsupported("lets tokens attend to later ones")
        if kwargs["attention_mask"] is not None:
            raise Unsupported("adds a mask or a bias (such as ALiBi) to attention")
        given = {name for name, each in kwargs.items() if each is not None and each is not False}
        if unknown := given - KNOWN_KWARGS:
            raise Unsupported(f"passes {unknown} to attention, which it does not take")
        window, scale = kwargs.get("sliding_window") or None, kwargs.get("scaling")
        spec = KVCacheSpec(key.shape[1], key.shape[2], value.shape[2], window)
        scale = key.shape[2] ** -0.5 if scale is None else float(scale)
        options = {"scale": scale, "sliding_window": window}
        options["logits_soft_cap"] = kwargs.get("softcap")
        self.calls[module] = AttentionCall(len(self.calls), spec, options)
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

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> BodyOutput:
        """[1, num_rows, hidden], in the type that transformers expects."""
        return BodyOutput(last_hidden_state=inputs_embeds)


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
        self.calls = run_probe(self.body, causal_lm.config, max_model_len)
        fix_rope(self.body)
        setattr(causal_lm, causal_lm.base_model_prefix, HiddenStates())
        self.head = causal_lm

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: StepMetadata
    ) -> Tensor:
        """Token ids and positions [num_tokens] -> hidden states [num_tokens, hidden]."""
        step = AttentionStep(self.calls, kv_caches, metadata, self.backend)
        return run_body(self.body, input_ids, positions, step)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [num_rows, hidden] -> logits [num_rows, vocab_size]."""
        return self.head(inputs_embeds=hidden[None], use_cache=False).logits[0]

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One per layer, in the order in which forward expects kv_caches."""
        return [call.spec for call in self.calls.values()]


def run_body(body: nn.Module, input_ids: Tensor, positions: Tensor, step: Any) -> Tensor:
    """[num_tokens] each -> hidden states [num_tokens, hidden]. transformers caches nothing, and
    builds no mask, because ATTENTION_NAME has no mask function."""
    ids, places = input_ids[None], positions[None]
    output = body(input_ids=ids, position_ids=places, use_cache=False, nanoserve_step=step)
    return output.last_hidden_state[0]


@torch.inference_mode()
def run_probe(body: nn.Module, config: Any, max_model_len: int) -> Calls:
    """Run tokens at the first and the last possible position; how each layer calls attention.

    Raises Unsupported for a model that needs more than paged attention.
    """
    probe = Probe()
    positions = torch.tensor([0, max_model_len - 1], device=next(body.parameters()).device)
    try:
        run_body(body, torch.zeros_like(positions), positions, probe)
    except Unsupported:
        raise
    except Exception as error:  # any model's code: anything
        raise Unsupported(f"fails on two tokens ({type(error).__name__}: {error})") from error
    if len(probe.calls) != config.num_hidden_layers:
        raise Unsupported(
            f"attends through transformers' attention interface in {len(probe.calls)} of its "
            f"{config.num_hidden_layers} layers"
        )
    check_windows(config, [call.spec.sliding_window for call in probe.calls.values()])
    return probe.calls


def check_windows(config: Any, windows: list[int | None]) -> None:
    """Each layer must have passed to attention the sliding window that the config gives it. (In
    transformers the masks would apply the window, and they are not built here.)"""
    expected = {"full_attention": False, "sliding_attention": True}
    kinds = getattr(config, "layer_types", None)
    for kind, window in zip(kinds or (), windows, strict=bool(kinds)):
        if expected.get(kind) != (window is not None):
            raise Unsupported(f"has layers of type {kind}, and passes window={window} to attention")
    has_window = getattr(config, "use_sliding_window", True) and not kinds
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
    config: EngineConfig, model_config: ModelConfig, layer_config: LayerConfig
) -> TransformersForCausalLM:
    """The model in `model_config.path`, built and filled (or dummy) by transformers. Raises
    ValueError if it can't run here, or if the weights do not match."""
    assert config.max_model_len, "EngineConfig not resolved"
    try:
        model_cls = find_class(model_config, layer_config)
        transformers.AttentionInterface.register(ATTENTION_NAME, attend)
        causal_lm = make_model(model_cls, config, model_config, layer_config)
        return TransformersForCausalLM(causal_lm, config.max_model_len, layer_config.attention)
    except Unsupported as error:
        raise ValueError(
            f"architecture {model_config.architecture} is not supported: it {error}. Supported: "
            f"{', '.join(ModelRegistry.architectures())}; and, through transformers on one rank, "
            "decoder-only models whose every layer attends through transformers' attention "
            "interface with no more than causality, a sliding window and a soft cap."
        ) from error


def find_class(model_config: ModelConfig, layer_config: LayerConfig) -> Any:
    """The class of transformers itself, whatever code the checkpoint brings along."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    known = {name for each in names for name in ([each] if isinstance(each, str) else each)}
    if model_config.architecture not in known:
        raise Unsupported("is no causal language model that transformers knows")
    if layer_config.parallel.tp_size > 1:
        raise Unsupported("can't be cut among ranks through transformers")
    if model_config.get("quantization_config"):
        raise Unsupported("has quantized weights, which run in nanoserve's own models only")
    return getattr(transformers, model_config.architecture)


def make_model(
    model_cls: Any,
    config: EngineConfig,
    model_config: ModelConfig,
    layer_config: LayerConfig,
) -> Any:
    """`model_cls` of transformers, its weights filled, or dummy."""
    file = model_config.path / "config.json"
    options = {"attn_implementation": ATTENTION_NAME, "dtype": layer_config.dtype}
    try:
        hf_config = model_cls.config_class.from_dict(deepcopy(dict(model_config.hf_config)))
        if config.load_format == "dummy":
            with torch.random.fork_rng(devices=[]):  # transformers draws the weights
                torch.manual_seed(config.seed)
                model = model_cls._from_config(hf_config, **options)
        else:
            model = fill_checkpoint(model_cls, hf_config, file.parent, options)
    except Exception as error:  # any model's code: anything
        if ATTENTION_NAME in error.args:  # a key that its own table of attentions lacks
            raise Unsupported("does not use transformers' attention interface") from error
        raise ValueError(f"transformers can't build the model of {file}: {error}") from error
    if getattr(model_cls, "_is_stateful", False):
        raise Unsupported("keeps a state beside keys and values (as Mamba does)")
    for key in ("is_encoder_decoder", "num_kv_shared_layers", "alibi"):  # the probe shows none
        if getattr(model.config, key, False):
            raise Unsupported(f"has {key} {getattr(model.config, key)} in its config")
    if not hasattr(model.config, "num_hidden_layers"):
        raise Unsupported("is more than one stack of layers")
    return model.eval().to(layer_config.device)


def fill_checkpoint(model_cls: Any, hf_config: Any, folder: Path, options: dict[str, Any]) -> Any:
    """Weights from the safetensors files: transformers itself reads no file of the folder. Raises
    ValueError, naming the tensors, if some do not fit."""
    files = weight_files.find_files(folder)
    for name, tensor in weight_files.read_headers(files).items():
        if name.endswith("weight"):  # others may be buffers, such as GPT-NeoX's mask
            weight_files.check_dtype(name, tensor)
    slices = [pair for file in files for pair in weight_files.read_slices(file)]
    model, loading = model_cls.from_pretrained(
        None,
        config=hf_config,
        state_dict=dict(slices),
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # named below instead
        **options,
    )
    for kind in ("missing", "unexpected", "mismatched"):
        if names := weight_files.listing([str(each) for each in loading[f"{kind}_keys"]]):
            raise ValueError(f"the weights do not match config.json; {kind}: {names}")
    return model
