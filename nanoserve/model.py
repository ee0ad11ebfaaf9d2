"""How does a transformer get from token ids to logits?

One decoder runs the whole Llama family: Llama, Mistral, Qwen2, Qwen3 and their mixtures of experts
differ in a handful of choices (which projections have a bias, whether queries and keys are
normalised, which layers have a sliding window). A `Family` holds these choices, read from
config.json; `MoeFamily` (models/families.py) adds which have experts. The module tree has the
checkpoint's own names, so loading needs no table of renamings.

    token ids -> embed_tokens -> [ norm -> attention -> + -> norm -> MLP -> + ] x layers -> norm
                                                                                              |
                                             logits of the chosen tokens <- lm_head <---------+

The forward pass is explicit: hidden = model(input_ids, positions, kv_caches, metadata), then
model.compute_logits(hidden[tokens]), because drafts, several completions and prompt logprobs need
the logits of other tokens than each sequence's last.

Mixtures of experts are in models/moe.py.

vLLM: vllm/model_executor/models/: llama.py, mixtral.py, qwen2.py, registry.py (V0 and V1),
qwen3.py, qwen3_moe.py (V1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from nanoserve.attention import KVCache, StepMetadata
from nanoserve.kernels.kv_cache import KVCacheSpec
from nanoserve.layers import (
    ColumnParallelLinear,
    LayerConfig,
    RMSNorm,
    Rope,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    apply_rope,
    silu_and_mul,
)
from nanoserve.models.base import Model
from nanoserve.models.config import ModelConfig
from nanoserve.models.rope import rope_frequencies


@dataclass(frozen=True)
class Family:
    """The choices in which the members of the Llama family differ."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on each head of queries and keys, before rope
    windows: tuple[int | None, ...] = ()  # per layer: sliding window, or None for full attention


class Attention(nn.Module):
    """Grouped-query attention over the paged KV cache."""

    def __init__(
        self, config: ModelConfig, family: Family, window: int | None, layer_config: LayerConfig
    ) -> None:
        super().__init__()
        head_dim, hidden = config.head_dim, config.hidden_size
        shard_range, at = layer_config.parallel.shard_range, layer_config.at
        _, self.num_heads = shard_range(config.num_heads, "attention heads")
        _, self.num_kv_heads = shard_range(config.num_kv_heads, "key and value heads", 1)
        self.kv_cache_spec = KVCacheSpec(self.num_kv_heads, head_dim, head_dim, window)
        self.backend, self.window = layer_config.attention, window
        self.head_dim, self.scale = head_dim, head_dim**-0.5
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.qkv_proj = ColumnParallelLinear(
            hidden,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=family.qkv_bias,
            layer_config=at("qkv_proj"),
            unit=head_dim,
        )
        o_config = at("o_proj")
        self.o_proj = RowParallelLinear(q_size, hidden, bias=family.o_bias, layer_config=o_config)
        self.has_qk_norm = family.qk_norm
        if family.qk_norm:
            self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, layer_config)
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, layer_config)

    def forward(self, x: Tensor, rope: Rope, kv_cache: KVCache, metadata: StepMetadata) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]. The keys and values of this step are stored
        first, because its queries see them too."""
        heads = self.qkv_proj(x).unflatten(1, (-1, self.head_dim))
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.has_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        self.backend.store(k, v, kv_cache, metadata)
        output = self.backend.attend(
            q, kv_cache, metadata, scale=self.scale, sliding_window=self.window
        )
        return self.o_proj(output.flatten(1))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up as one product (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, family: Family, layer_config: LayerConfig) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.intermediate_size, family.mlp_bias
        outputs = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = ColumnParallelLinear(
            hidden, outputs, bias=bias, layer_config=layer_config.at("gate_up_proj")
        )
        down_config = layer_config.at("down_proj")
        self.down_proj = RowParallelLinear(size, hidden, bias=bias, layer_config=down_config)

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    """Attention and MLP (or experts), each behind a norm and beside a residual connection."""

    def __init__(
        self, config: ModelConfig, family: Family, layer: int, layer_config: LayerConfig
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        attn_config = layer_config.at("self_attn")
        self.input_layernorm = RMSNorm(hidden, eps, layer_config)
        self.self_attn = Attention(config, family, family.windows[layer], attn_config)
        self.post_attention_layernorm = RMSNorm(hidden, eps, layer_config)
        self.mlp = self.make_mlp(config, family, layer, layer_config)

    def make_mlp(
        self, config: ModelConfig, family: Family, layer: int, layer_config: LayerConfig
    ) -> nn.Module:
        return MLP(config, family, layer_config.at("mlp"))

    def forward(self, x: Tensor, rope: Rope, kv_cache: KVCache, metadata: StepMetadata) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), rope, kv_cache, metadata)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Everything between token ids and the last hidden states."""

    def __init__(
        self,
        config: ModelConfig,
        family: Family,
        max_model_len: int,
        layer_config: LayerConfig,
        layer_cls: type[DecoderLayer] = DecoderLayer,
    ) -> None:
        super().__init__()
        vocab_size, hidden = config.vocab_size, config.hidden_size
        embed_config, layers_config = layer_config.at("embed_tokens"), layer_config.at("layers")
        self.embed_tokens = VocabParallelEmbedding(vocab_size, hidden, embed_config)
        self.embed_tokens.is_lm_head = config.tie_word_embeddings
        self.layers = nn.ModuleList(
            layer_cls(config, family, layer, layers_config.at(str(layer)))
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps, layer_config)
        head_dim, rope = config.head_dim, config.rope_parameters
        frequencies, scaling = rope_frequencies(head_dim, rope, max_model_len)
        self.rotary_emb = RotaryEmbedding(frequencies, scaling, max_model_len, layer_config)

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: StepMetadata
    ) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden]."""
        x, rope = self.embed_tokens(input_ids), self.rotary_emb(positions)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=False):
            x = layer(x, rope, kv_cache, metadata)
        return self.norm(x)


class CausalLM(Model):
    """A decoder of the Llama family and its language-model head."""

    read_family: Callable[[ModelConfig], Family]  # of each architecture: models/families.py
    layer_cls = DecoderLayer

    def __init__(self, config: ModelConfig, max_model_len: int, layer_config: LayerConfig) -> None:
        super().__init__()
        family = type(self).read_family(config)
        at_model = layer_config.at("model")
        self.model = Decoder(config, family, max_model_len, at_model, self.layer_cls)
        self.is_tied = config.tie_word_embeddings
        self.hidden_size, self.vocab_size = config.hidden_size, config.vocab_size
        if not self.is_tied:
            sizes = (config.vocab_size, config.hidden_size)
            self.lm_head = VocabParallelEmbedding(*sizes, layer_config.at("lm_head"))
            self.lm_head.is_embedding = False

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: StepMetadata
    ) -> Tensor:
        """Token ids and positions [num_tokens] -> hidden states [num_tokens, hidden]."""
        return self.model(input_ids, positions, kv_caches, metadata)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [num_rows, hidden] -> logits [num_rows, vocab_size]."""
        head = self.model.embed_tokens if self.is_tied else self.lm_head
        return head.compute_logits(hidden)
