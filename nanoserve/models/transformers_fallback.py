"""What runs a model that nobody has written for nanoserve?

transformers has, and most of its decoder-only models ask a function of our choice for attention.
So a model that is not in ModelRegistry is transformers' own, with paged attention in that place:

    model(input_ids [1, num_tokens], position_ids, ..., nanoserve_step=step)
      └─ layer 0 ─ ... ─ attend(module, query, key, value, ..., nanoserve_step=step)
                           key, value -> the layer's paged cache; attention over block tables

The step's tokens are one row, laid end to end: everything but attention works token by token and
needs no more than each token's position. Which caches and which metadata belong to a step goes down
with transformers' own keyword arguments: the function is registered once, and holds nothing. For a
family that does not hand them down (Nemotron), the step is, while it lasts, an attribute of the
model's own attention modules.

What a model's attention asks for is found out by asking it: `probe` runs two tokens through the
model and notes each call (heads, head sizes, window, scale, soft cap). What attention can't give
(a bias, a mask, a state beside the keys and values) shows there, and is refused with a sentence,
because a model that runs without it still talks, only nonsense.

Left out: tensor parallelism, CUDA graphs, code that comes with a checkpoint.

vLLM: vllm/model_executor/models/transformers/ (V1); 0.6.6 had none yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.modeling_outputs import MoEModelOutputWithPastAndCrossAttentions
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanoserve.attention import AttentionBackend, KVCache, KVCacheSpec, StepMetadata
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.layers import LayerConfig
from nanoserve.models.base import Model
from nanoserve.models.registry import ModelRegistry

ATTENTION_NAME = "nanoserve"  # under which transformers knows `attend`
# What families pass to attention beside the arguments of `attend`, and what changes nothing here:
# positions are in the keys already, and outputs are chosen elsewhere.
HARMLESS = frozenset(
    {
        "attention_mask",  # checked by itself, as is is_causal
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
UNDERSTOOD = frozenset({"scaling", "sliding_window", "softcap"})


@dataclass(frozen=True)
class AttentionCall:
    """What a layer asks of attention, the same in every step."""

    num_heads: int
    spec: KVCacheSpec
    scale: float
    logits_soft_cap: float | None


class StepLike(Protocol):
    """What goes down to `attend`: a Probe while the model is built, then a Step."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, asked: dict[str, Any]
    ) -> Tensor: ...


def attend(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, key_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, key_dim]
    value: Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: Tensor | None,
    nanoserve_step: StepLike | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer; returns [1, num_tokens, num_heads, value_dim]."""
    step = nanoserve_step or getattr(module, "nanoserve_step", None)
    if step is None:
        raise StepIsMissing
    asked["attention_mask"] = attention_mask
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return step.attend(module, q, k, v, asked)[None], None


class Unsupported(Exception):
    """Why a model can't run on paged attention, as the end of a sentence that begins with it."""


class StepIsMissing(Unsupported):
    """The family drops keyword arguments on the way down to attention."""


@dataclass(frozen=True)
class Step:
    """One step on its way down to the layers."""

    layer_of: dict[nn.Module, int]
    calls: list[AttentionCall]
    kv_caches: list[KVCache]
    metadata: StepMetadata
    backend: AttentionBackend

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, asked: dict[str, Any]
    ) -> Tensor:
        """Store and attend, as models.Attention does; tensors [num_tokens, heads, dim]."""
        layer = self.layer_of[module]
        call, cache, metadata = self.calls[layer], self.kv_caches[layer], self.metadata
        dtype = cache[0].dtype
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
    """Notes what each layer asks of attention; answers with zeros."""

    layer_of: dict[nn.Module, int] = field(default_factory=dict)
    calls: list[AttentionCall] = field(default_factory=list)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, asked: dict[str, Any]
    ) -> Tensor:
        if module in self.layer_of:
            raise Unsupported("uses one attention layer several times in a step")
        if asked.get("is_causal", getattr(module, "is_causal", True)) is False:
            raise Unsupported("lets tokens attend to later ones")
        if asked["attention_mask"] is not None:
            raise Unsupported("adds a mask or a bias (such as ALiBi) to attention")
        surplus = [
            name
            for name, wish in asked.items()
            if name not in HARMLESS | UNDERSTOOD and wish is not None and wish is not False
        ]
        if surplus:
            raise Unsupported(f"asks attention for {', '.join(surplus)}, which is not there")
        window, scale = asked.get("sliding_window"), asked.get("scaling")
        spec = KVCacheSpec(key.shape[1], key.shape[2], value.shape[2], window or None)
        self.layer_of[module] = len(self.calls)
        self.calls.append(
            AttentionCall(
                num_heads=query.shape[1],
                spec=spec,
                scale=key.shape[2] ** -0.5 if scale is None else float(scale),
                logits_soft_cap=asked.get("softcap"),
            )
        )
        return value.new_zeros(*query.shape[:2], value.shape[2])


class HiddenStates(nn.Module):
    """In the place of a language model's body: takes what the body has computed as its embeddings.

    What transformers' forward does after the body (the head, a scale, a soft cap of the logits) is
    then a function of hidden states, of whatever rows we want.
    """

    @property
    def decoder(self) -> nn.Module:
        """OPT calls its body's decoder itself."""
        return self

    def forward(
        self, *_: Any, inputs_embeds: Tensor, **__: Any
    ) -> MoEModelOutputWithPastAndCrossAttentions:
        """[1, num_rows, hidden], wrapped."""
        return MoEModelOutputWithPastAndCrossAttentions(last_hidden_state=inputs_embeds)


class TransformersForCausalLM(Model):
    """A causal language model of transformers, as the model runner wants it."""

    library = "transformers"
    supports_cuda_graphs = False  # some families do, but nobody promises it

    def __init__(self, causal_lm: Any, max_model_len: int, backend: AttentionBackend) -> None:
        """`causal_lm` was built with attn_implementation=ATTENTION_NAME. Raises Unsupported."""
        super().__init__()
        self.backend = backend
        self.body = causal_lm.base_model
        if self.body is causal_lm:
            raise Unsupported("has no body apart from its head")
        self.marked: tuple[nn.Module, ...] = ()  # given the step as an attribute, if any need it
        try:
            found = probe(self.body, causal_lm.config, max_model_len)
        except StepIsMissing:
            found = probe(self.body, causal_lm.config, max_model_len, tuple(self.body.modules()))
            self.marked = tuple(found.layer_of)
        self.layer_of, self.calls = found.layer_of, found.calls
        fix_rope(self.body)
        setattr(causal_lm, causal_lm.base_model_prefix, HiddenStates())
        self.head = causal_lm

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        metadata: StepMetadata,
    ) -> Tensor:
        """Token ids and positions [num_tokens] -> hidden states [num_tokens, hidden]."""
        step = Step(self.layer_of, self.calls, kv_caches, metadata, self.backend)
        return run_body(self.body, input_ids, positions, step, self.marked)

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
    step: StepLike,
    marked: tuple[nn.Module, ...] = (),
) -> Tensor:
    """[num_tokens] each -> hidden states [num_tokens, hidden]. transformers caches nothing, and
    builds no mask, as it knows none for our name."""
    for module in marked:
        vars(module)["nanoserve_step"] = step
    try:
        output = body(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            nanoserve_step=step,
        )
    finally:
        for module in marked:
            del vars(module)["nanoserve_step"]
    return output.last_hidden_state[0]


@torch.inference_mode()
def probe(
    body: nn.Module,
    config: Any,
    max_model_len: int,
    marked: tuple[nn.Module, ...] = (),
) -> Probe:
    """Run two tokens, the first and the last there may be, and note every call of attention.

    Raises Unsupported for a model that paged attention would not be all of.
    """
    found = Probe()
    device = next(body.parameters()).device
    positions = torch.tensor([0, max_model_len - 1], device=device)
    try:
        run_body(body, torch.zeros_like(positions), positions, found, marked)
    except Unsupported:
        raise
    except Exception as error:  # transformers' own code, of any model: whatever it may be
        raise Unsupported(f"fails on two tokens ({type(error).__name__}: {error})") from error
    if not found.calls:
        raise Unsupported("does not use transformers' attention interface")
    num_layers = config.num_hidden_layers
    if len(found.calls) != num_layers:
        raise Unsupported(f"attends in {len(found.calls)} of its {num_layers} layers only")
    check_windows(config, [call.spec.sliding_window for call in found.calls])
    return found


def check_windows(config: Any, windows: list[int | None]) -> None:
    """What the config says of each layer's reach, the layer must have told attention; transformers'
    own masks, which would have seen to it, are not built."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        expected = {"full_attention": False, "sliding_attention": True}
        for kind, window in zip(kinds, windows, strict=True):
            if expected.get(kind) != (window is not None):
                raise Unsupported(f"has layers of type {kind}, and tells attention window={window}")
        return
    has_window = getattr(config, "use_sliding_window", True)
    if has_window and getattr(config, "sliding_window", None) and not any(windows):
        raise Unsupported("has a sliding window that it does not tell attention")


def fix_rope(body: nn.Module) -> None:
    """Stop rope types that follow the length of the text (dynamic, longrope) where the probe, at
    the last position there may be, has brought them: a request must not see its neighbours'
    lengths. rope.rope_frequencies does the same."""
    for module in body.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            setattr(module, "rope_type", "fixed")  # noqa: B010 (nn.Module hides it from mypy)
        elif isinstance(kind, dict):
            setattr(module, "rope_type", dict.fromkeys(kind, "fixed"))  # noqa: B010


def load_with_transformers(
    config: EngineConfig, model_config: ModelConfig, layer_config: LayerConfig
) -> TransformersForCausalLM:
    """The model in `model_config.path`, built and loaded (or dummy) by transformers.

    Raises ValueError if it can't run here, or if the weights do not match.
    """
    assert config.max_model_len, "EngineConfig not resolved"
    architecture = model_config.architecture
    if layer_config.parallel.world_size > 1:
        refuse(architecture, "through transformers it can't be cut among ranks")
    if architecture not in set(_causal_lm_names()):
        refuse(architecture, "transformers knows no causal language model of that name")
    model_cls = getattr(transformers, architecture)
    try:
        hf_config = model_cls.config_class.from_pretrained(model_config.path)
    except Exception as error:  # each family checks its own
        refuse(architecture, f"transformers can't read its config.json ({error})")
    AttentionInterface.register(ATTENTION_NAME, attend)
    try:
        check_config(model_cls, hf_config)
        if config.load_format == "dummy":
            causal_lm = build_dummy(hf_config, layer_config.dtype, config.seed)
        else:
            causal_lm = load_checkpoint(model_cls, hf_config, model_config.path, layer_config.dtype)
        causal_lm = causal_lm.eval().to(layer_config.device)
        return TransformersForCausalLM(causal_lm, config.max_model_len, layer_config.attention)
    except Unsupported as error:
        refuse(architecture, f"it {error}")
    except KeyError as error:  # a family with a table of its own: none of our name in it
        if ATTENTION_NAME not in error.args:
            raise
        refuse(architecture, "it does not use transformers' attention interface")


def _causal_lm_names() -> Iterator[str]:
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        yield from [names] if isinstance(names, str) else names


def refuse(architecture: str, reason: str) -> NoReturn:
    """Raise the ValueError that says what can run instead."""
    raise ValueError(
        f"architecture {architecture} is not supported: {reason}. Supported natively: "
        f"{', '.join(ModelRegistry.architectures())}; and, through transformers on one rank, "
        "decoder-only models whose every layer attends through transformers' attention interface "
        "with no more than causality, a sliding window and a soft cap."
    )


def check_config(model_cls: Any, hf_config: Any) -> None:
    """Refuse, before any weight is read, what the probe would not see."""
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


def build_dummy(hf_config: Any, dtype: torch.dtype, seed: int) -> Any:
    """Small normal weights, those of norms near 1, as loader.fill_randomly has them."""
    with torch.random.fork_rng(devices=[]):  # transformers draws weights of its own first
        causal_lm = AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in causal_lm.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.02
            is_scale = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(noise + 1 if is_scale else noise)
    return causal_lm


def load_checkpoint(model_cls: Any, hf_config: Any, folder: Path, dtype: torch.dtype) -> Any:
    """Weights from safetensors files. Raises ValueError, naming the tensors, if any do not fit."""
    try:
        causal_lm, loading = model_cls.from_pretrained(
            folder,
            config=hf_config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
        )
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"transformers can't load the weights in {folder} ({error}). Weights are read from "
            "safetensors only, in one file model.safetensors or several with an index."
        ) from error
    problems = [
        f"{kind}: {', '.join([str(name) for name in loading[key]][:5])}"
        for kind, key in (
            ("missing", "missing_keys"),
            ("surplus", "unexpected_keys"),
            ("misshapen", "mismatched_keys"),
        )
        if loading[key]
    ]
    if problems:
        raise ValueError(
            f"the weights in {folder} do not match its config.json; {'; '.join(problems)}. Is the "
            "download complete, and do the two belong together?"
        )
    return causal_lm
