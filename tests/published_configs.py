"""What config.json says in families that run through transformers: the keys as their checkpoints
write them, with nulls, zeros, and values for each layer."""

from __future__ import annotations

from typing import Any


def config(
    architecture: str, vocab: int, hidden: int, mlp: int, layers: int, heads: int, **others: Any
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        **others,
    }


PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_inner": None,
        "n_layer": 12,
        "n_positions": 1024,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
    "opt-125m": {
        "_remove_final_layer_norm": False,
        "activation_function": "relu",
        "architectures": ["OPTForCausalLM"],
        "do_layer_norm_before": True,
        "eos_token_id": 2,
        "ffn_dim": 3072,
        "hidden_size": 768,
        "max_position_embeddings": 2048,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "torch_dtype": "float16",
        "vocab_size": 50272,
        "word_embed_proj_dim": 768,
    },
    "gemma-2b": config(
        *("GemmaForCausalLM", 256000, 2048, 16384, 18, 8),
        attention_bias=False,
        head_dim=256,
        hidden_act="gelu",
        hidden_activation=None,
        num_key_value_heads=1,
        rope_scaling=None,
        rope_theta=10000.0,
    ),
    "gemma-2-2b": config(
        *("Gemma2ForCausalLM", 256000, 2304, 9216, 26, 8),
        attn_logit_softcapping=50.0,
        cache_implementation="hybrid",
        eos_token_id=[1, 107],
        head_dim=256,
        hidden_act="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        sliding_window=4096,
    ),
    "gemma-3-1b": config(
        *("Gemma3ForCausalLM", 262144, 1152, 6912, 26, 4),
        attn_logit_softcapping=None,
        head_dim=256,
        rope_local_base_freq=10000,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=512,
        sliding_window_pattern=6,
    ),
    "gemma-3, transformers 5": config(
        *("Gemma3ForCausalLM", 262144, 1152, 6912, 26, 4),
        layer_types=["sliding_attention"] * 25 + ["full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
        },
        sliding_window=512,
    ),
    "phi-3-mini-128k": config(
        *("Phi3ForCausalLM", 32064, 3072, 8192, 32, 32),
        attention_bias=False,
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_scaling={"long_factor": [1.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
        sliding_window=262144,
    ),
    "phi-3.5-moe": config(
        *("PhimoeForCausalLM", 32064, 4096, 6400, 32, 32),
        attention_bias=True,
        num_experts_per_tok=2,
        num_local_experts=16,
        router_jitter_noise=0.01,
        sliding_window=131072,
    ),
    "mixtral-8x7b": config(
        *("MixtralForCausalLM", 32000, 4096, 14336, 32, 32),
        num_experts_per_tok=2,
        num_local_experts=8,
        sliding_window=None,
    ),
    "deepseek-v2-lite": config(
        *("DeepseekV2ForCausalLM", 102400, 2048, 10944, 27, 16),
        first_k_dense_replace=1,
        kv_lora_rank=512,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        norm_topk_prob=False,
        num_experts_per_tok=6,
        q_lora_rank=None,
        rope_scaling={
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
    ),
    "qwen1.5-moe": config(
        *("Qwen2MoeForCausalLM", 151936, 2048, 5632, 24, 16),
        decoder_sparse_step=1,
        max_window_layers=21,
        mlp_only_layers=[],
        moe_intermediate_size=1408,
        norm_topk_prob=False,
        num_experts=60,
        num_experts_per_tok=4,
        sliding_window=32768,
        use_sliding_window=False,
    ),
    "olmoe": config(
        *("OlmoeForCausalLM", 50304, 2048, 1024, 16, 16),
        attention_bias=False,
        clip_qkv=None,
        norm_topk_prob=False,
        num_experts=64,
        num_experts_per_tok=8,
    ),
    "granite 4, dense": config(
        *("GraniteMoeHybridForCausalLM", 100352, 2560, 8192, 40, 40),
        attention_bias=False,
        layer_types=["attention"] * 40,
        num_experts_per_tok=0,
        num_local_experts=0,
    ),
    "hunyuan, for each layer": config(
        *("HunYuanMoEV1ForCausalLM", 128167, 4096, 3072, 32, 32),
        moe_intermediate_size=[3072] * 32,
        num_experts=64,
    ),
    "doge": config(*("DogeForCausalLM", 32768, 1024, 2048, 32, 8), num_experts=16384),
    "pythia": config(
        *("GPTNeoXForCausalLM", 50304, 512, 2048, 6, 8), hidden_act="gelu", rotary_pct=0.25
    ),
    "starcoder2": config(
        *("Starcoder2ForCausalLM", 49152, 3072, 12288, 30, 24),
        hidden_act="gelu_pytorch_tanh",
        sliding_window=4096,
    ),
    "cohere2": config(
        *("Cohere2ForCausalLM", 256000, 4096, 14336, 32, 32),
        attention_bias=False,
        layer_switch=4,
        sliding_window=4096,
    ),
    "lfm2": config(
        *("Lfm2ForCausalLM", 65536, 1024, 6656, 16, 16),
        layer_types=["conv"] * 10 + ["full_attention"] * 6,
    ),
}
