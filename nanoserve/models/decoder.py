"""How does a transformer get from token ids to logits?

One decoder runs the whole Llama family: Llama, Mistral, Qwen2, Qwen3 and their mixtures of experts
differ in a handful of choices (which projections have a bias, whether queries and keys are
normalised, which layers have a sliding window, which have experts). A `Family` holds these choices,
read from config.json. The module tree has the checkpoint's own names, so loading needs no table of
renamings.

    token ids -> embed_tokens -> [ norm -> attention -> + -> norm -> MLP -> + ] x layers -> norm
                                                                                              |
                                             logits of the chosen tokens <- lm_head <---------+

The forward pass is explicit: hidden = model(input_ids, positions, kv_caches, metadata), then
model.compute_logits(hidden[tokens]), because drafts, several completions and prompt logprobs need
the logits of other tokens than each sequence's last.

With pipeline parallelism a stage has some of the layers. The first stage looks up the token ids, a
later one begins with what the stage before has sent; the last one has the norm and the head.

vLLM: vllm/model_executor/models/: llama.py, mixtral.py, qwen2.py, registry.py (V0 and V1),
qwen3.py, qwen3_moe.py (V1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

from torch import Tensor, nn

from nanoserve.attention import KVCache, StepMetadata
from nanoserve.config import ModelConfig
from nanoserve.kv_cache import KVCacheSpec
from nanoserve.layers import (
    ColumnParallelLinear,
    LayerConfig,
    QKNorm,
    RMSNorm,
    Rope,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from nanoserve.models.base import Model
from nanoserve.models.moe import ExpertsConfig, MixtureOfExperts
from nanoserve.models.rope import rope_frequencies

# The residual stream as two parts still to be added: the last layer's output, and what was before.
Stream = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Family:
    """The choices in which the members of the Llama family differ."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on each head of queries and keys, before rope
    windows: tuple[int | None, ...] = ()  # per layer: sliding window, or None for full attention
    experts: tuple[ExpertsConfig | None, ...] = ()  # per layer, or empty; None: an MLP


def llama(config: ModelConfig) -> Family:
    bias = config.get("attention_bias", False)
    return Family(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.get("mlp_bias", False),
        windows=(None,) * config.num_layers,
    )


def mistral(config: ModelConfig) -> Family:
    return Family(windows=_windows(config, config.get("sliding_window")))


def qwen2(config: ModelConfig) -> Family:
    return Family(qkv_bias=True, windows=_qwen_windows(config))


def qwen3(config: ModelConfig) -> Family:
    bias = config.get("attention_bias", False)
    return Family(qkv_bias=bias, o_bias=bias, qk_norm=True, windows=_qwen_windows(config))


def mixtral(config: ModelConfig) -> Family:
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
    return replace(mistral(config), experts=(experts,) * config.num_layers)


def qwen3_moe(config: ModelConfig) -> Family:
    """Experts in every decoder_sparse_step-th layer, except in those of mlp_only_layers."""
    experts = ExpertsConfig(
        num_experts=_num_experts(config, 128),
        top_k=config.get("num_experts_per_tok", 8),
        intermediate_size=config.get("moe_intermediate_size", 768),
        normalize=config.get("norm_topk_prob", False),
    )
    step, without = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return replace(
        qwen3(config),
        windows=(window,) * config.num_layers,
        experts=tuple(
            None if layer in without or (layer + 1) % step else experts
            for layer in range(config.num_layers)
        ),
    )


def _num_experts(config: ModelConfig, default: int) -> int:
    """The number of experts, under either of the names that transformers has given it."""
    return config.get("num_experts") or config.get("num_local_experts") or default


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


class Attention(nn.Module):
    """Grouped-query attention over the paged KV cache."""

    def __init__(
        self, config: ModelConfig, family: Family, window: int | None, layer_config: LayerConfig
    ) -> None:
        super().__init__()
        head_dim, hidden = config.head_dim, config.hidden_size
        shard_range = layer_config.parallel.shard_range
        _, self.num_heads = shard_range(config.num_heads, "attention heads")
        _, num_kv_heads = shard_range(config.num_kv_heads, "key and value heads", 1)
        self.kv_cache_spec = KVCacheSpec(num_kv_heads, head_dim, head_dim, window)
        self.backend, self.rope_and_store = layer_config.attention, layer_config.rope_and_store
        self.scale = head_dim**-0.5
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.qkv_proj = ColumnParallelLinear(
            hidden,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=family.qkv_bias,
            layer_config=layer_config.at("qkv_proj"),
            unit=head_dim,
        )
        self.o_proj = RowParallelLinear(
            q_size, hidden, bias=family.o_bias, layer_config=layer_config.at("o_proj")
        )
        self.qk_norm: QKNorm | None = None
        if family.qk_norm:
            sizes = (self.num_heads, self.num_heads + num_kv_heads, head_dim)
            self.qk_norm = QKNorm(*sizes, config.rms_norm_eps, layer_config)

    def forward(self, x: Tensor, rope: Rope, kv_cache: KVCache, metadata: StepMetadata) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]. The keys and values of this step are stored
        first, because its queries see them too."""
        qkv = self.qkv_proj(x, metadata)
        q = self.rope_and_store(qkv, self.qk_norm, rope, self.backend, kv_cache, metadata)
        window = self.kv_cache_spec.sliding_window
        output = self.backend.attend(q, kv_cache, metadata, scale=self.scale, sliding_window=window)
        return self.o_proj(output.flatten(1), metadata)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up as one product (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, family: Family, layer_config: LayerConfig) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.intermediate_size, family.mlp_bias
        outputs = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = ColumnParallelLinear(
            hidden, outputs, bias=bias, layer_config=layer_config.at("gate_up_proj")
        )
        self.down_proj = RowParallelLinear(
            size, hidden, bias=bias, layer_config=layer_config.at("down_proj")
        )
        self.silu_and_mul = layer_config.silu_and_mul

    def forward(self, x: Tensor, metadata: StepMetadata) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        return self.down_proj(self.silu_and_mul(self.gate_up_proj(x, metadata)), metadata)


class DecoderLayer(nn.Module):
    """Attention and MLP (or experts), each behind a norm and beside a residual connection."""

    def __init__(
        self, config: ModelConfig, family: Family, layer: int, layer_config: LayerConfig
    ) -> None:
        super().__init__()
        window = family.windows[layer]
        experts = family.experts[layer] if family.experts else None
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, layer_config)
        self.self_attn = Attention(config, family, window, layer_config.at("self_attn"))
        self.post_attention_layernorm = RMSNorm(hidden, eps, layer_config)
        self.mlp: MLP | MixtureOfExperts
        if experts is None:
            self.mlp = MLP(config, family, layer_config.at("mlp"))
        else:
            self.mlp = MixtureOfExperts(hidden, experts, layer_config.at(experts.block_name))

    def forward(self, x: Stream, rope: Rope, kv_cache: KVCache, metadata: StepMetadata) -> Stream:
        """[num_tokens, hidden] each."""
        y, residual = self.input_layernorm.add_and_norm(*x)
        y = self.self_attn(y, rope, kv_cache, metadata)
        y, residual = self.post_attention_layernorm.add_and_norm(y, residual)
        return self.mlp(y, metadata), residual


class Decoder(nn.Module):
    """Everything between token ids and the last hidden states."""

    def __init__(
        self, config: ModelConfig, family: Family, max_model_len: int, layer_config: LayerConfig
    ) -> None:
        super().__init__()
        vocab_size, hidden = config.vocab_size, config.hidden_size
        embed_config, layers_config = layer_config.at("embed_tokens"), layer_config.at("layers")
        self.parallel = parallel = layer_config.parallel
        is_lm_head = parallel.is_last_stage and config.tie_word_embeddings
        if parallel.is_first_stage or is_lm_head:
            self.embed_tokens = VocabParallelEmbedding(vocab_size, hidden, embed_config)
            self.embed_tokens.is_lm_head = is_lm_head
        self.layer_range = parallel.layer_range(config.num_layers)
        self.layers = nn.ModuleList(
            DecoderLayer(config, family, layer, layers_config.at(str(layer)))
            if layer in range(*self.layer_range)
            else nn.Identity()  # of another stage
            for layer in range(config.num_layers)
        )
        if parallel.is_last_stage:
            self.norm = RMSNorm(hidden, config.rms_norm_eps, layer_config)
        rope = dict(config.rope_parameters, max_position_embeddings=config.max_position_embeddings)
        rotary_dim = int(config.head_dim * rope["partial_rotary_factor"])
        frequencies, scaling = rope_frequencies(rotary_dim, rope, max_model_len)
        self.rotary_emb = RotaryEmbedding(frequencies, scaling, max_model_len, layer_config)

    def forward(
        self, inputs: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: StepMetadata
    ) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden]. A later stage begins with the hidden states."""
        x: Stream = (self.embed_tokens(inputs) if self.parallel.is_first_stage else inputs, None)
        rope = self.rotary_emb(positions)
        for layer, kv_cache in zip(islice(self.layers, *self.layer_range), kv_caches, strict=True):
            x = layer(x, rope, kv_cache, metadata)
        if self.parallel.is_last_stage:
            return self.norm.add_and_norm(*x)[0]
        assert x[1] is not None, "a stage has at least one layer"
        return x[0] + x[1]


class CausalLM(Model):
    """A decoder of the Llama family and its language-model head."""

    supports_pp = True
    read_family: Callable[[ModelConfig], Family]  # of each architecture below

    def __init__(self, config: ModelConfig, max_model_len: int, layer_config: LayerConfig) -> None:
        """Raises ValueError for an activation that is not supported, and for a number of attention
        heads that its key and value heads do not divide."""
        super().__init__()
        if (activation := config.get("hidden_act", "silu")) != "silu":
            raise ValueError(f"hidden_act {activation!r} is not supported; supported: silu.")
        if config.num_heads % config.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {config.num_heads} is not a multiple of num_key_value_heads "
                f"{config.num_kv_heads}."
            )
        family = type(self).read_family(config)
        self.model = Decoder(config, family, max_model_len, layer_config.at("model"))
        self.is_tied = config.tie_word_embeddings
        self.hidden_size, self.vocab_size = config.hidden_size, config.vocab_size
        if layer_config.parallel.is_last_stage and not self.is_tied:
            sizes = (config.vocab_size, config.hidden_size)
            self.lm_head = VocabParallelEmbedding(*sizes, layer_config.at("lm_head"))
            self.lm_head.is_embedding = False

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: StepMetadata
    ) -> Tensor:
        """Token ids and positions [num_tokens] -> hidden states [num_tokens, hidden]. In place of
        the token ids a later stage gets what the stage before it returned."""
        return self.model(input_ids, positions, kv_caches, metadata)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """On the last stage: hidden states [num_rows, hidden] -> logits [num_rows, vocab_size]."""
        head = self.model.embed_tokens if self.is_tied else self.lm_head
        return head.compute_logits(hidden)


class LlamaForCausalLM(CausalLM):
    read_family = staticmethod(llama)


class MistralForCausalLM(CausalLM):
    read_family = staticmethod(mistral)


class MixtralForCausalLM(CausalLM):
    read_family = staticmethod(mixtral)


class Qwen2ForCausalLM(CausalLM):
    read_family = staticmethod(qwen2)


class Qwen3ForCausalLM(CausalLM):
    read_family = staticmethod(qwen3)


class Qwen3MoeForCausalLM(CausalLM):
    read_family = staticmethod(qwen3_moe)
