"""Every family of the guide through the whole engine: the tokens are those of transformers.

One engine per family does everything at once: prompts in chunks beside sequences that decode,
prefixes from the cache, and preemption, because there are few blocks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from oracle import assert_same_greedy

from nanoserve import LLM, SamplingParams
from nanoserve.kv_cache import KVCacheSpec

MakeCheckpoint = Callable[..., Path]
MAX_TOKENS = 10


class Family(NamedTuple):
    """A small model, and what its layers keep: (key heads, key size, value size, window)."""

    model_type: str
    overrides: dict[str, Any]
    specs: list[tuple[int, int, int, int | None]]


PLAIN = (2, 16, 16, None)
QWEN3_MOE = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3}
GEMMA = {"head_dim": 24, "sliding_window": 11, "num_hidden_layers": 3}

NATIVE: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", {}, [PLAIN] * 2),
    "MistralForCausalLM": Family("mistral", {"sliding_window": 11}, [(2, 16, 16, 11)] * 2),
    "MixtralForCausalLM": Family("mixtral", {"num_local_experts": 4}, [PLAIN] * 2),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        [PLAIN, (2, 16, 16, 9)],
    ),
    "Qwen3ForCausalLM": Family("qwen3", {"head_dim": 32}, [(2, 32, 32, None)] * 2),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe", {**QWEN3_MOE, "moe_intermediate_size": 24}, [PLAIN] * 2
    ),
}
FALLBACK: dict[str, Family] = {
    # Learnt positions, one bias for q, k and v together.
    "GPT2LMHeadModel": Family("gpt2", {}, [(4, 16, 16, None)] * 2),
    # Learnt positions that begin at 2; embeddings narrower than the layers.
    "OPTForCausalLM": Family(
        "opt", {"ffn_dim": 112, "word_embed_proj_dim": 32}, [(4, 16, 16, None)] * 2
    ),
    "Phi3ForCausalLM": Family("phi3", {"sliding_window": 11}, [(2, 16, 16, 11)] * 2),
    # A quarter of each head is turned, attention and MLP side by side.
    "GPTNeoXForCausalLM": Family("gpt_neox", {}, [(4, 16, 16, None)] * 2),
    # Soft caps of scores and of logits, every second layer with a window, four norms.
    "Gemma2ForCausalLM": Family(
        "gemma2",
        {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0},
        [(2, 24, 24, 11), (2, 24, 24, None), (2, 24, 24, 11)],
    ),
    # Another rope for layers with a window, norms of q and k.
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 20,
        },
        [(2, 24, 24, 11), (2, 24, 24, None), (2, 24, 24, 11)],
    ),
    # Latent attention: keys of 16 + 8, values of 16, a scale that yarn changes; a dense layer,
    # then experts, some shared.
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
                "mscale": 0.7,
                "mscale_all_dim": 0.7,
            },
        },
        [(4, 24, 16, None)] * 2,
    ),
    # A scale of the logits, a norm that both attention and MLP read.
    "CohereForCausalLM": Family("cohere", {"logit_scale": 0.2}, [PLAIN] * 2),
}
ALL = {
    **{name: (family, "auto") for name, family in {**NATIVE, **FALLBACK}.items()},
    **{f"{name} in transformers": (family, "transformers") for name, family in NATIVE.items()},
}


def make_prompts() -> list[list[int]]:
    """Of 1 to 150 tokens; some begin alike, two are the same."""
    rng = random.Random(0)
    base = [rng.randrange(2, 320) for _ in range(150)]
    others = [[rng.randrange(2, 320) for _ in range(length)] for length in (1, 2, 7, 33, 60)]
    return [*others, base, base[:64], [*base[:100], 5, 6], base]


@pytest.mark.parametrize("name", ALL)
def test_greedy_tokens_are_those_of_transformers(
    make_checkpoint: MakeCheckpoint, name: str
) -> None:
    family, model_impl = ALL[name]
    folder = make_checkpoint(family.model_type, **family.overrides)
    prompts = make_prompts()
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with LLM(
        folder,
        dtype="float32",
        model_impl=model_impl,
        block_size=4,
        num_kv_blocks=45,  # the longest needs 40
        max_num_seqs=4,
        max_num_batched_tokens=50,
    ) as llm:
        assert llm.engine.model_config.architecture == name.split()[0]
        is_native = name in NATIVE
        assert llm.engine.executor.runner.model.library == (
            "nanoserve" if is_native else "transformers"
        )
        assert llm.engine.executor.runner.model.kv_cache_specs() == [
            KVCacheSpec(*spec) for spec in family.specs
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        outputs += llm.generate(prompts[-1:], params, use_tqdm=False)
        llm.engine.block_manager.check()
    for prompt, output in zip([*prompts, prompts[-1]], outputs, strict=True):
        assert_same_greedy(folder, prompt, output.outputs[0].token_ids, MAX_TOKENS)
    assert any(output.metrics.num_preemptions for output in outputs)
    assert outputs[-1].num_cached_tokens > 0


@pytest.mark.parametrize("name", ALL)
def test_a_dummy_needs_only_a_config(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str
) -> None:
    """Same seed, same model; another seed, another; torch's own generator is left alone."""
    family, model_impl = ALL[name]
    config = make_checkpoint(family.model_type, **family.overrides) / "config.json"
    (tmp_path / "config.json").write_bytes(config.read_bytes())
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0)
    state = torch.random.get_rng_state()
    answers = []
    for seed in (1, 1, 2):
        with LLM(
            tmp_path, load_format="dummy", model_impl=model_impl, seed=seed, num_kv_blocks=20
        ) as llm:
            [output] = llm.generate([[3, 4, 5]], params, use_tqdm=False)
            specs = llm.engine.executor.runner.model.kv_cache_specs()
            assert specs == [KVCacheSpec(*spec) for spec in family.specs]
        answers.append(output.outputs[0].cumulative_logprob)
    assert answers[0] == answers[1] != answers[2]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_gpt2_as_it_is_published(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Its config.json has names of its own, and no size of the MLP."""
    written = json.loads((make_checkpoint("gpt2") / "config.json").read_text())
    names = ("architectures", "model_type", "vocab_size", "n_embd", "n_head", "n_layer")
    config = {name: written[name] for name in (*names, "n_positions")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(tmp_path, load_format="dummy", num_kv_blocks=20) as llm:
        model_config = llm.engine.model_config
        assert model_config.max_model_len == 1024
        assert (model_config.num_layers, model_config.num_heads) == (2, 4)
        assert (model_config.hidden_size, model_config.intermediate_size) == (64, 256)
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        [output] = llm.generate([[3, 4, 5]], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
