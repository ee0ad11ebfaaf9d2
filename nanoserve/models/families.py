"""Which architectures are members of the Llama family, and what does each choose?

A layer with experts is a DecoderLayer with another MLP: Mixtral has experts in every layer,
Qwen3-MoE in some.

vLLM: vllm/model_executor/models/: llama.py, mixtral.py, qwen2.py (V0 and V1), qwen3.py,
qwen3_moe.py (V1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from nanoserve.layers import LayerConfig
from nanoserve.model import CausalLM, DecoderLayer, Family
from nanoserve.models.config import ModelConfig
from nanoserve.models.moe import ExpertsConfig, MixtureOfExperts


def choose(config: ModelConfig, **choices: Any) -> Family:
    """A member of the family. Raises ValueError for an activation that none of them has."""
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported; supported: silu.")
    return Family(**choices)


def llama(config: ModelConfig) -> Family:
    bias = config.get("attention_bias", False)
    biases = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": config.get("mlp_bias", False)}
    return choose(config, **biases, windows=(None,) * config.num_layers)


def mistral(config: ModelConfig) -> Family:
    return choose(config, windows=_windows(config, config.get("sliding_window")))


def qwen2(config: ModelConfig) -> Family:
    return choose(config, qkv_bias=True, windows=_qwen_windows(config))


def qwen3(config: ModelConfig) -> Family:
    bias = config.get("attention_bias", False)
    return choose(config, qkv_bias=bias, o_bias=bias, qk_norm=True, windows=_qwen_windows(config))


def _qwen_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """Without layer_types, the first max_window_layers layers have full attention."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return _windows(config, window, config.get("max_window_layers", 28))


def _windows(config: ModelConfig, window: int | None, num_full: int = 0) -> tuple[int | None, ...]:
    """The list layer_types says which layers have the window. Older configs have no such list: all
    but the first num_full layers have it."""
    kinds = config.get("layer_types") or [
        "full_attention" if layer < num_full else "sliding_attention"
        for layer in range(config.num_layers)
    ]
    if len(kinds) != config.num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {config.num_layers} layers.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@dataclass(frozen=True)
class MoeFamily(Family):
    experts: tuple[ExpertsConfig | None, ...] = ()  # per layer; None: an MLP


class MoeLayer(DecoderLayer):
    """A DecoderLayer with experts in place of the MLP, where the family has them."""

    def make_mlp(
        self, config: ModelConfig, family: Family, layer: int, layer_config: LayerConfig
    ) -> nn.Module:
        assert isinstance(family, MoeFamily)
        if (experts := family.experts[layer]) is None:
            return super().make_mlp(config, family, layer, layer_config)
        at_block = layer_config.at(experts.block_name)
        return MixtureOfExperts(config.hidden_size, experts, at_block)


def mixtral(config: ModelConfig) -> MoeFamily:
    experts = ExpertsConfig(
        num_experts=_num_experts(config, 8),
        top_k=config.get("num_experts_per_tok", 2),
        intermediate_size=config.intermediate_size,
        normalize=True,
        block_name="block_sparse_moe",
        gate_name="w1",
        up_name="w3",
        down_name="w2",
    )
    return MoeFamily(**{**vars(mistral(config)), "experts": (experts,) * config.num_layers})


def qwen3_moe(config: ModelConfig) -> MoeFamily:
    """Experts in every decoder_sparse_step-th layer, except in those of mlp_only_layers."""
    experts = ExpertsConfig(
        num_experts=_num_experts(config, 128),
        top_k=config.get("num_experts_per_tok", 8),
        intermediate_size=config.get("moe_intermediate_size", 768),
        normalize=config.get("norm_topk_prob", False),
    )
    step, without = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return MoeFamily(
        **{**vars(qwen3(config)), "windows": (window,) * config.num_layers},
        experts=tuple(
            None if layer in without or (layer + 1) % step else experts
            for layer in range(config.num_layers)
        ),
    )


def _num_experts(config: ModelConfig, default: int) -> int:
    """The number of experts, under either of the names that transformers has given it."""
    return config.get("num_experts") or config.get("num_local_experts") or default


class LlamaForCausalLM(CausalLM):
    read_family = staticmethod(llama)


class MistralForCausalLM(CausalLM):
    read_family = staticmethod(mistral)


class Qwen2ForCausalLM(CausalLM):
    read_family = staticmethod(qwen2)


class Qwen3ForCausalLM(CausalLM):
    read_family = staticmethod(qwen3)


class MixtralForCausalLM(CausalLM):
    read_family, layer_cls = staticmethod(mixtral), MoeLayer


class Qwen3MoeForCausalLM(CausalLM):
    read_family, layer_cls = staticmethod(qwen3_moe), MoeLayer


DENSE = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
FAMILY = (*DENSE, MixtralForCausalLM, Qwen3MoeForCausalLM)
