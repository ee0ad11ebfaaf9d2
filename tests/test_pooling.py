"""Vectors: LLM(runner="pooling").embed, encode and score, and AsyncLLM.encode.

The oracle is transformers' own model of the same checkpoint, which computes each prompt alone and
whole, and the definition of each pooling, below. Nothing of the engine may show in a vector: not
the chunks, not the cache, not the other prompts.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import merge, shapes_of, write_adapter
from engines import in_thread
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_async_llm import assert_idle_blocks
from test_families import FALLBACK, NATIVE, Family
from test_vllm_habits import as_nanoserve
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel

from nanoserve import (
    LLM,
    BeamSearchParams,
    EngineArgs,
    EngineConfig,
    LoRARequest,
    PoolingParams,
    PoolingRequestOutput,
    SamplingParams,
)
from nanoserve.config import DEMO_MODEL, ModelConfig
from nanoserve.extras.async_llm import AsyncLLM
from nanoserve.extras.pooling.config import (
    PoolerConfig,
    read_max_seq_length,
    read_modules,
    warn_of_prompt,
)
from nanoserve.extras.pooling.engine import configure
from nanoserve.extras.pooling.params import TASKS
from nanoserve.extras.pooling.processor import PoolingScheduler
from nanoserve.extras.pooling.runner import PoolingModelRunner
from nanoserve.model_runner import ModelRunner
from nanoserve.models.registry import ModelRegistry
from nanoserve.scheduler import Scheduler

MakeCheckpoint = Callable[..., Path]
PROMPTS = [[(7 * i + 13 * n) % 300 + 5 for i in range(n)] for n in (1, 2, 5, 17, 30)]
SMALL = {"num_kv_blocks": 64, "block_size": 4, "dtype": "float32"}
KINDS = {"LAST": "pooling_mode_lasttoken", "MEAN": "pooling_mode_mean_tokens"}
KINDS |= {"CLS": "pooling_mode_cls_token"}
MEAN = {"seq_pooling_type": "MEAN"}


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@cache
def load_reference(folder: Path) -> Any:
    """transformers' model of a checkpoint that no test changes."""
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def reference(
    folder: Path, kind: str, prompts: list[list[int]] = PROMPTS, normalise: bool = True
) -> list[Tensor]:
    """The definition: transformers' hidden states of each prompt alone, pooled."""
    model, vectors = load_reference(folder), []
    for prompt in prompts:
        with torch.no_grad():
            hidden = model(torch.tensor([prompt])).last_hidden_state[0]
        vector = {"LAST": hidden[-1], "MEAN": hidden.mean(dim=0), "CLS": hidden[0]}[kind]
        vectors.append(F.normalize(vector, dim=-1) if normalise else vector)
    return vectors


def vectors_of(llm: LLM, prompts: list[list[int]] = PROMPTS, **fields: Any) -> list[Tensor]:
    params = PoolingParams(**fields)
    outputs = llm.encode(prompts, params, pooling_task="embed", use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert not any(output.error for output in outputs)
    return [output.outputs.data for output in outputs]


def assert_idle(llm: LLM) -> None:
    """No request, no sequence, no block in use."""
    engine = llm.engine
    engine.block_manager.check()
    assert not (engine.has_unfinished_requests() or engine.scheduler.sequences)
    assert engine.block_manager.num_free_blocks == engine.executor.num_kv_blocks


def embed(folder: Path, **options: Any) -> list[Tensor]:
    with LLM(folder, runner="pooling", **{**SMALL, **options}) as llm:
        found = vectors_of(llm)
        assert_idle(llm)
        return found


def as_sentence_transformer(
    source: Path, folder: Path, mode: str = "pooling_mode_mean_tokens", normalise: bool = True
) -> Path:
    """A copy with the files that sentence-transformers writes beside the weights."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    package = "sentence_transformers.models."
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": package + name}
        for i, (path, name) in enumerate(modules[: 2 + normalise])
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": 64, "pooling_mode_max_tokens": False, mode: True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def change_config(source: Path, folder: Path, **changes: Any) -> Path:
    """A copy with other keys in config.json."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """encoder("bert") -> folder of a small random checkpoint of an encoder."""
    made: dict[str, Path] = {}

    def make(model_type: str) -> Path:
        if model_type not in made:
            settings: dict[str, Any] = {
                "vocab_size": 320,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_position_embeddings": 64,
                "pad_token_id": 1,
                "bos_token_id": 0,
                "eos_token_id": 2,
            }
            config = AutoConfig.for_model(model_type, **settings)
            torch.manual_seed(0)
            model = AutoModel.from_config(config)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    noise = torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15)
                    parameter.copy_(noise + 1 if "norm" in name.lower() else noise)
            made[model_type] = tmp_path_factory.mktemp(model_type)
            model.save_pretrained(made[model_type])
        return made[model_type]

    return make


@pytest.fixture(scope="module")
def qwen3(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint("qwen3", head_dim=16)


@pytest.fixture(scope="module")
def pooling_llm() -> Iterator[LLM]:
    """The demo model, for vectors."""
    with LLM(runner="pooling", num_kv_blocks=128, disable_log_stats=False) as llm:
        yield llm
        assert_idle(llm)


# -- the same as transformers --


@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
@pytest.mark.parametrize("model_type", ["qwen3", "gpt2"])
def test_vectors_of_decoders(make_checkpoint: MakeCheckpoint, model_type: str, kind: str) -> None:
    """One of nanoserve's own, and one that runs through transformers; in chunks."""
    folder = make_checkpoint(model_type, **({"head_dim": 16} if model_type == "qwen3" else {}))
    config = {"seq_pooling_type": kind}
    found = embed(folder, pooler_config=config, max_num_batched_tokens=8, max_num_seqs=4)
    for vector, expected in zip(found, reference(folder, kind), strict=True):
        assert close(vector, expected)
        assert vector.dtype == torch.float32


@pytest.mark.parametrize("family", [*NATIVE.values(), *FALLBACK.values()], ids=lambda x: x[0])
def test_vectors_of_all_families(make_checkpoint: MakeCheckpoint, family: Family) -> None:
    """The mean, in which each hidden state counts, and also those of windows and experts."""
    folder = make_checkpoint(family.model_type, **family.overrides)
    found = embed(folder, pooler_config=MEAN, max_num_batched_tokens=8, max_num_seqs=4)
    for vector, expected in zip(found, reference(folder, "MEAN"), strict=True):
        assert close(vector, expected)


@pytest.mark.parametrize("kind", ["CLS", "MEAN", "LAST"])
@pytest.mark.parametrize(
    "model_type", ["bert", "roberta", "modernbert", "distilbert", "fnet", "convbert"]
)
def test_vectors_of_encoders(encoder: Callable[..., Path], model_type: str, kind: str) -> None:
    """Each prompt in one step, although the batch has others, and without a KV cache. In the last
    two families a mask does not hide the padding."""
    folder = encoder(model_type)
    with LLM(folder, pooler_config={"seq_pooling_type": kind}, dtype="float32") as llm:
        config = llm.engine.config
        assert config.runner == "pooling"
        assert not (config.enable_chunked_prefill or config.enable_prefix_caching)
        assert llm.engine.executor.runner.kv_caches == []
        found = [*vectors_of(llm), *vectors_of(llm, PROMPTS[::-1])]
        assert_idle(llm)
    expected = reference(folder, kind)
    for vector, other in zip(found, [*expected, *expected[::-1]], strict=True):
        assert close(vector, other)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 2, "max_num_seqs": 2},
        {"max_num_batched_tokens": 8, "max_num_seqs": 3, "async_scheduling": True},
        {"enable_prefix_caching": False},
        {"enable_chunked_prefill": False, "block_size": 16},
        {"num_kv_blocks": 9, "max_num_batched_tokens": 8, "long_prefill_token_threshold": 4},
        {
            "num_kv_blocks": 10,
            "max_num_batched_tokens": 8,
            "long_prefill_token_threshold": 4,
            "preemption_mode": "swap",
            "async_scheduling": True,
        },
        {"attention_backend": "reference", "model_impl": "transformers"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
def test_nothing_of_the_engine_shows_in_a_vector(
    qwen3: Path, kind: str, options: dict[str, Any]
) -> None:
    prompts = [*PROMPTS, *[[*PROMPTS[-1], n] for n in (5, 6, 7)]]  # with a prefix in common
    config = {"seq_pooling_type": kind}
    with LLM(qwen3, runner="pooling", pooler_config=config, **{**SMALL, **options}) as llm:
        preempted: list[int] = []
        tell = llm.engine.output_processor.finish_listeners
        tell.append(lambda request: preempted.append(request.root.metrics.num_preemptions))
        found = vectors_of(llm, prompts)
        again = vectors_of(llm, prompts)  # now the cache is full
        assert_idle(llm)
    assert bool(sum(preempted)) == ("num_kv_blocks" in options)
    for vector, other, expected in zip(found, again, reference(qwen3, kind, prompts), strict=True):
        assert close(vector, expected)
        assert close(other, expected)


@pytest.fixture(scope="module", params=["LAST", "MEAN"])
def crowded(qwen3: Path, request: pytest.FixtureRequest) -> Iterator[tuple[LLM, list[Tensor]]]:
    """An engine with too few blocks for its sequences, and the vectors of POOL."""
    options = {**SMALL, "num_kv_blocks": 10, "max_num_batched_tokens": 9, "max_num_seqs": 4}
    options |= {"long_prefill_token_threshold": 3, "scheduling_policy": "priority"}
    config = {"seq_pooling_type": request.param}
    with LLM(qwen3, runner="pooling", pooler_config=config, **options) as llm:
        yield llm, reference(qwen3, request.param, POOL)


POOL = [[*PROMPTS[3], *[n] * n] for n in range(10)] + PROMPTS  # most have a prefix in common
ASKED = st.tuples(
    st.integers(0, len(POOL) - 1),
    st.integers(0, 2),
    st.integers(0, 6),
    st.none() | st.integers(0, 9),
)


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(asked=st.lists(ASKED, min_size=1, max_size=8))
def test_any_requests_at_any_time(
    crowded: tuple[LLM, list[Tensor]], asked: list[tuple[int, int, int, int | None]]
) -> None:
    """Each has a prompt, a priority, the step before which it comes, and perhaps the one before
    which it is aborted. Who is not aborted gets the vector of its prompt."""
    llm, expected = crowded
    engine, found = llm.engine, dict[str, Any]()
    for step in range(300):
        for number, (prompt, priority, begin, end) in enumerate(asked):
            if begin == step:
                params = PoolingParams()
                engine.add_request(str(number), POOL[prompt], params, priority=priority)
            if end == step:
                engine.abort_request(str(number))
        found |= {output.request_id: output for output in engine.step()}
        engine.block_manager.check()
        if step > 10 and not engine.has_unfinished_requests():
            break
    assert_idle(llm)
    for number, (prompt, _, begin, end) in enumerate(asked):
        output = found.get(str(number))
        assert output is not None or (end is not None and end >= begin)
        if output is not None:
            assert output.error is None
            assert close(output.outputs.data, expected[prompt])


def test_prefixes_are_read_from_the_cache_where_that_is_sound(qwen3: Path) -> None:
    prompt = PROMPTS[-1]
    for kind, num_cached in (("LAST", 28), ("MEAN", 0)):
        config = {"seq_pooling_type": kind}
        with LLM(qwen3, runner="pooling", pooler_config=config, **SMALL) as llm:
            vectors_of(llm, [prompt])
            [again] = llm.encode(prompt, use_tqdm=False)
            assert again.num_cached_tokens == num_cached
            params = PoolingParams(skip_reading_prefix_cache=True)
            [last] = llm.encode(prompt, params, use_tqdm=False)
            assert last.num_cached_tokens == 0


def test_a_mean_is_never_swapped_out(qwen3: Path) -> None:
    """Its sum is in no block."""
    model = ModelConfig.from_folder(qwen3)
    config = EngineConfig(runner="pooling", preemption_mode="swap", swap_space=1.0)
    assert configure(config, model)[0].preemption_mode == "swap"
    mean = PoolerConfig("MEAN")
    config = EngineConfig(preemption_mode="swap", swap_space=1.0, pooler_config=mean)
    assert configure(config, model)[0].preemption_mode == "recompute"


@pytest.mark.slow
def test_vectors_of_two_ranks(qwen3: Path, tmp_path: Path) -> None:
    """A body without the head, too."""
    folder = change_config(qwen3, tmp_path / "body", architectures=["Qwen3Model"])
    options = {"tensor_parallel_size": 2, "max_num_batched_tokens": 8}
    found = embed(folder, pooler_config=MEAN, **options)
    for vector, expected in zip(found, reference(qwen3, "MEAN"), strict=True):
        assert close(vector, expected)


@pytest.mark.parametrize("is_of_body", [False, True])
def test_vectors_with_an_adapter(qwen3: Path, tmp_path: Path, is_of_body: bool) -> None:
    """In one step with others that have none; chunk by chunk. PEFT's names of an adapter that was
    trained on AutoModel lack a "model."."""
    adapter = write_adapter(tmp_path / "adapter", shapes_of(qwen3), task_type="FEATURE_EXTRACTION")
    merged = reference(merge(qwen3, adapter, tmp_path / "merged"), "MEAN")
    if is_of_body:
        tensors = load_file(adapter / "adapter_model.safetensors")
        tensors = {name.replace("model.model.", "model."): each for name, each in tensors.items()}
        save_file(tensors, adapter / "adapter_model.safetensors")
    plain, request = reference(qwen3, "MEAN"), LoRARequest("a", 1, str(adapter))
    options = {"enable_lora": True, "max_num_batched_tokens": 8, "pooler_config": MEAN, **SMALL}
    with LLM(qwen3, runner="pooling", **options) as llm:
        requests = [request, None] * len(PROMPTS)
        prompts = [prompt for prompt in PROMPTS for _ in range(2)]
        outputs = llm.encode(prompts, lora_request=requests, use_tqdm=False)
        expected = [vector for pair in zip(merged, plain, strict=True) for vector in pair]
        for output, vector in zip(outputs, expected, strict=True):
            assert close(output.outputs.data, vector)


# -- what the checkpoint says --


@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
@pytest.mark.parametrize("normalise", [True, False])
def test_the_checkpoint_says_how(qwen3: Path, tmp_path: Path, kind: str, normalise: bool) -> None:
    """modules.json makes a pooling model of it, without being asked."""
    folder = as_sentence_transformer(qwen3, tmp_path / "model", KINDS[kind], normalise)
    with LLM(folder, **SMALL) as llm:
        assert llm.engine.config.runner == "pooling"
        for vector, expected in zip(
            vectors_of(llm), reference(qwen3, kind, normalise=normalise), strict=True
        ):
            assert close(vector, expected)
        other = vectors_of(llm, PROMPTS[:1], use_activation=not normalise)
        expected = reference(qwen3, kind, PROMPTS[:1], not normalise)
        assert close(other[0], expected[0])
    with LLM(folder, runner="generate", **SMALL) as llm:
        assert llm.generate(PROMPTS[2], use_tqdm=False)[0].outputs[0].token_ids


def test_weights_without_the_head(qwen3: Path, tmp_path: Path) -> None:
    """As Qwen3-Embedding is saved: no head, no "model." before the names; and other forms."""
    expected = reference(qwen3, "LAST")
    whole = load_file(qwen3 / "model.safetensors")
    body = {name.removeprefix("model."): tensor for name, tensor in whole.items()}
    assert "lm_head.weight" in body  # not tied: a head of its own
    del body["lm_head.weight"]
    for number, (tensors, architecture) in enumerate(
        [
            (body, "Qwen3Model"),
            (body, "Qwen3ForCausalLM"),
            ({f"model.{name}": tensor for name, tensor in body.items()}, "Qwen3ForCausalLM"),
            (whole, "Qwen3Model"),
        ]
    ):
        folder = change_config(qwen3, tmp_path / str(number), architectures=[architecture])
        save_file(tensors, folder / "model.safetensors")
        for model_impl in ("auto", "transformers"):
            found = embed(folder, model_impl=model_impl)
            for vector, other in zip(found, expected, strict=True):
                assert close(vector, other)


def test_the_body_of_a_model_that_transformers_runs(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint("gpt2")
    folder = change_config(source, tmp_path / "body", architectures=["GPT2Model"])
    for vector, expected in zip(embed(folder), reference(source, "LAST"), strict=True):
        assert close(vector, expected)


def test_a_head_behind_an_encoder_is_left_out(encoder: Callable[..., Path], tmp_path: Path) -> None:
    folder = change_config(encoder("bert"), tmp_path / "m", architectures=["BertForMaskedLM"])
    body = load_file(folder / "model.safetensors")
    tensors = {f"bert.{name}": tensor for name, tensor in body.items() if "pooler" not in name}
    tensors["bert.embeddings.position_ids"] = torch.arange(64)[None]
    tensors["cls.predictions.bias"] = torch.zeros(320)
    save_file(tensors, folder / "model.safetensors")
    expected = reference(encoder("bert"), "CLS")
    with LLM(folder, dtype="float32") as llm:
        for vector, other in zip(vectors_of(llm), expected, strict=True):
            assert close(vector, other)
    del tensors["bert.encoder.layer.1.output.dense.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: encoder\.layer\.1\.output\.dense\.weight"):
        LLM(folder)


def test_random_weights(encoder: Callable[..., Path], qwen3: Path) -> None:
    for folder in (encoder("bert"), qwen3):
        with LLM(folder, runner="pooling", load_format="dummy", num_kv_blocks=32) as llm:
            assert all(vector.norm().isclose(torch.tensor(1.0)) for vector in vectors_of(llm))


@pytest.mark.parametrize(
    "model_type", ["roberta", *(pytest.param(m, marks=pytest.mark.slow) for m in ("esm", "luke"))]
)
def test_how_many_positions_an_encoder_has(encoder: Callable[..., Path], model_type: str) -> None:
    """Two fewer than RoBERTa's table has rows."""
    model = ModelConfig.from_folder(encoder(model_type))
    assert configure(EngineConfig(), model)[0].max_model_len == 64 - 2
    with LLM(model.path, dtype="float32", max_num_seqs=2) as llm:
        longest = [5] * 62
        assert close(*vectors_of(llm, [longest]), *reference(model.path, "CLS", [longest]))


def test_how_long_a_text_may_be(encoder: Callable[..., Path], tmp_path: Path) -> None:
    """As sentence-transformers says."""
    folder = change_config(encoder("roberta"), tmp_path / "short")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    model = ModelConfig.from_folder(folder)
    assert configure(EngineConfig(), model)[0].max_model_len == 20
    with pytest.raises(ValueError, match="max_model_len is 21, but short was made for at most 20"):
        configure(EngineConfig(max_model_len=21), model)
    with pytest.raises(ValueError, match="an encoder computes a prompt of up to max_model_len"):
        configure(EngineConfig(max_num_batched_tokens=19), model)
    with LLM(folder, max_num_seqs=2) as llm:
        longest = [5] * 20
        assert close(*vectors_of(llm, [longest]), *reference(folder, "CLS", [longest]))
        with pytest.raises(ValueError, match="has 21 tokens, which is more than max_model_len=20"):
            vectors_of(llm, [[5] * 21])
    for text in ('{"max_seq_length": "x"}', '{"max_seq_length": 0}', '{"do_lower_case": true}'):
        (folder / "sentence_bert_config.json").write_text(text)
        with pytest.raises(ValueError, match=r"sentence_bert_config\.json"):
            read_max_seq_length(folder)


def test_older_names_of_the_file_that_says_how_long(tmp_path: Path) -> None:
    (tmp_path / "sentence_distilbert_config.json").write_text('{"max_seq_length": 128}')
    assert read_max_seq_length(tmp_path) == 128


def test_a_prompt_that_sentence_transformers_would_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever moves from there is told."""
    for name in ("query", "document", None, "no", 5):
        config = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": name}
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
        caplog.clear()
        warn_of_prompt(tmp_path)
        assert ("writes 'query: ' before each text" in caplog.text) == (name == "query")


TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "CLS"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "MEAN"),
        ({"pooling_mode_lasttoken": True}, "LAST"),
        ({"pooling_mode": "lasttoken"}, "LAST"),
        ({"pooling_mode": ["mean"]}, "MEAN"),
        ({"pooling_mode_max_tokens": True}, None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, None),
        ({}, None),
    ],
)
def test_pooling_modes(tmp_path: Path, pooling: dict[str, Any], expected: str | None) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([TRANSFORMER, POOLING]))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if expected is None:
        with pytest.raises(
            ValueError,
            match=r"the pooling mode is .*; supported: one of cls_token.* cannot run here",
        ):
            read_modules(tmp_path)
    else:
        assert read_modules(tmp_path) == PoolerConfig(expected, False)


@pytest.mark.parametrize(
    "module",
    [
        {"type": "sentence_transformers.models.Dense", "path": "2_Dense"},
        {"type": "custom_st.Transformer", "path": ""},
        {**POOLING, "path": ".."},
        {**POOLING, "path": "../other"},
        {**POOLING, "path": "/etc"},
        {**POOLING, "path": None},
        {**TRANSFORMER, "path": "0_Transformer"},
        7,
    ],
)
def test_modules_that_are_not_known(tmp_path: Path, module: Any) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([TRANSFORMER, module]))
    with pytest.raises(ValueError, match=r"modules\.json has a module"):
        read_modules(tmp_path)


def test_damaged_files(tmp_path: Path) -> None:
    for content in ("", "[", "}", '{"a": 1}', "[[[" * 1000):
        (tmp_path / "modules.json").write_text(content)
        with pytest.raises(ValueError, match=r"modules\.json"):
            read_modules(tmp_path)


# -- what a request may ask for --


def test_matryoshka(qwen3: Path, tmp_path: Path) -> None:
    """The first numbers, then normalised; only of models that are made for it."""
    any_number = change_config(qwen3, tmp_path / "any", is_matryoshka=True)
    with LLM(any_number, runner="pooling", **SMALL) as llm:
        whole = reference(qwen3, "LAST", normalise=False)
        for dimensions in (1, 8, 64):
            for vector, full in zip(vectors_of(llm, dimensions=dimensions), whole, strict=True):
                assert close(vector, F.normalize(full[:dimensions], dim=-1))
        [raw] = vectors_of(llm, PROMPTS[-1:], dimensions=8, use_activation=False)
        assert close(raw, whole[-1][:8])
        several = [PoolingParams(dimensions=n) for n in (8, 16)]
        outputs = llm.embed(PROMPTS[:2], pooling_params=several, use_tqdm=False)
        assert [output.outputs.hidden_size for output in outputs] == [8, 16]
        for dimensions in (0, -1, 65):
            with pytest.raises(ValueError, match="allowed: 1 to 64"):
                vectors_of(llm, dimensions=dimensions)
    some = change_config(qwen3, tmp_path / "some", matryoshka_dimensions=[16, 32])
    config = {"dimensions": 16}
    with LLM(some, runner="pooling", pooler_config=config, **SMALL) as llm:
        assert [len(vector) for vector in vectors_of(llm)] == [16] * len(PROMPTS)
        assert len(vectors_of(llm, PROMPTS[:1], dimensions=32)[0]) == 32
        with pytest.raises(ValueError, match="dimensions is 8; allowed for some: 16, 32"):
            vectors_of(llm, dimensions=8)
    message = "not made for Matryoshka embeddings, says its config.json. If it is, write"
    with pytest.raises(ValueError, match=re.escape(message)):
        LLM(qwen3, runner="pooling", pooler_config=config, **SMALL)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"dimensions": 1.5}, TypeError, "dimensions must be None or an int"),
        ({"dimensions": True}, TypeError, "dimensions must be None or an int"),
        ({"use_activation": 1}, TypeError, "use_activation must be True or False"),
        ({"task": "classify"}, ValueError, "task is 'classify'; allowed: None or 'embed'"),
        ({"step_tag_id": 5}, ValueError, "step_tag_id is 5; allowed: None"),
        ({"output_kind": None}, ValueError, "FINAL_ONLY"),
        ({"dimension": 8}, TypeError, "'dimension'. Did you mean 'dimensions'?"),
        ({"normalize": True}, TypeError, "use_activation says"),
    ],
)
def test_bad_params(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PoolingParams(**fields)


def test_params_are_checked_again_when_a_request_is_made(pooling_llm: LLM) -> None:
    params = PoolingParams()
    params.dimensions = 8
    with pytest.raises(ValueError, match="not made for Matryoshka"):
        pooling_llm.embed("A dog", pooling_params=params, use_tqdm=False)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("{", ValueError, "not JSON"),
        (5, TypeError, "must be a dict"),
        ({"seq_pooling_type": "MAX"}, ValueError, "is 'MAX'; allowed: LAST, MEAN, CLS"),
        ({"use_activation": "x"}, TypeError, "use_activation must be True or False"),
        ({"dimensions": 0}, ValueError, "dimensions is 0; allowed: 1 or more"),
        ({"task": "classify"}, ValueError, "has 'task': 'classify'"),
        ({"colour": 1}, ValueError, "has 'colour': 1"),
        ({"pooling_type": "MEAN", "seq_pooling_type": "LAST"}, ValueError, "not both"),
        ({"normalize": False}, ValueError, "has replaced normalize by use_activation"),
    ],
)
def test_bad_pooler_config(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EngineConfig(pooler_config=value)


def test_spellings_of_pooler_config() -> None:
    for value in ('{"pooling_type": "MEAN"}', {"seq_pooling_type": "MEAN", "task": "embed"}):
        assert EngineArgs(pooler_config=value).pooler_config == PoolerConfig("MEAN")
    assert PoolerConfig(pooling_type="MEAN") == PoolerConfig("MEAN")
    assert EngineConfig(pooler_config={}).pooler_config is None


def test_vllms_other_names_of_a_pooling_runner() -> None:
    """convert, and task of older versions, unless the runner is given."""
    for options in ({"convert": "embed"}, {"task": "embed"}, {"task": "embed", "runner": "auto"}):
        assert EngineArgs(**options).runner == "pooling"
    assert EngineArgs(convert="embed", runner="generate").runner == "generate"
    assert EngineArgs(convert="none", task="generate").runner == "auto"
    with LLM(task="embed", num_kv_blocks=16) as llm:
        assert llm.engine.config.runner == "pooling"


# -- scores --


def test_scores_are_cosines(pooling_llm: LLM) -> None:
    texts = ["A dog", "A cat", "The sea"]
    vectors = [
        torch.tensor(each.outputs.embedding) for each in pooling_llm.embed(texts, use_tqdm=False)
    ]
    scores = pooling_llm.score(texts[0], texts, use_tqdm=False)
    for output, vector in zip(scores, vectors, strict=True):
        assert output.outputs.score == pytest.approx(float(vectors[0] @ vector), abs=1e-6)
    pairs = pooling_llm.score(texts, texts[::-1], use_tqdm=False)
    assert pairs[1].outputs.score == pytest.approx(1)
    assert pairs[0].outputs.score == pytest.approx(scores[2].outputs.score, abs=1e-6)
    ids = [pooling_llm.get_tokenizer().encode(text) for text in texts]
    assert pairs[0].prompt_token_ids == [*ids[0], 0, *ids[2]]
    for one, other in ((texts, texts[:2]), (texts, "A dog"), ("A dog", [])):
        with pytest.raises(ValueError, match="make no pairs"):
            pooling_llm.score(one, other, use_tqdm=False)


def test_a_program_for_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    """With other import lines, as coming_from_vllm.md says."""
    program = f"""
from vllm import LLM, PoolingParams
from vllm.config import PoolerConfig
from vllm.outputs import EmbeddingRequestOutput, PoolingRequestOutput, ScoringRequestOutput

llm = LLM(
    model={str(DEMO_MODEL)!r},
    runner="pooling",
    convert="embed",
    pooler_config=PoolerConfig(pooling_type="MEAN", use_activation=False),
    enforce_eager=True,
    trust_remote_code=True,
)
with llm:
    [output] = llm.embed("A dog", pooling_params=PoolingParams(use_activation=True))
    assert isinstance(output, EmbeddingRequestOutput)
    embeds = output.outputs.embedding
    print(f"Embeddings: {{embeds[:2]}} (size={{len(embeds)}})")
    (output,) = llm.encode({{"prompt_token_ids": [5, 6]}}, pooling_task="embed")
    assert isinstance(output, PoolingRequestOutput) and output.outputs.data.shape == (128,)
    (output,) = llm.score("A dog", "A cat")
    assert isinstance(output, ScoringRequestOutput) and -1 <= output.outputs.score <= 1
"""
    exec(compile(as_nanoserve(program), "program", "exec"), {})
    assert "(size=128)" in capsys.readouterr().out


# -- wrong uses --


def test_a_pooling_engine_writes_no_text(pooling_llm: LLM) -> None:
    message = "demo runs as a pooling model, which makes vectors and writes no text"
    calls: list[Callable[[], Any]] = [
        lambda: pooling_llm.generate("A dog", use_tqdm=False),
        lambda: pooling_llm.chat([{"role": "user", "content": "Hi"}], use_tqdm=False),
        lambda: pooling_llm.beam_search(["A dog"], BeamSearchParams(2, 4)),
        lambda: pooling_llm.add_request("a", "A dog", SamplingParams()),
        lambda: list(pooling_llm.stream("A dog")),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="pooling_params must be PoolingParams, got 5"):
        pooling_llm.encode("A dog", 5, use_tqdm=False)  # type: ignore[arg-type]


def test_a_generating_engine_makes_no_vectors(demo_llm: LLM) -> None:
    for name, call in {
        "encode": lambda: demo_llm.encode("A dog"),
        "embed": lambda: demo_llm.embed("A dog"),
        "score": lambda: demo_llm.score("A dog", "A cat"),
    }.items():
        with pytest.raises(ValueError, match=f"LLM.{name} is for pooling models, and this engine"):
            call()


def test_tasks_that_are_not_here(pooling_llm: LLM) -> None:
    assert TASKS == ("embed",)
    for task in ("classify", "token_embed", "score", 5):
        with pytest.raises(ValueError, match="allowed: 'embed'"):
            pooling_llm.encode("A dog", pooling_task=task, use_tqdm=False)  # type: ignore[arg-type]


def test_models_that_make_no_vectors(
    qwen3: Path, encoder: Callable[..., Path], tmp_path: Path
) -> None:
    bert = encoder("bert")
    for number, (source, changes, message) in enumerate(
        [
            (bert, {"architectures": ["BertForSequenceClassification"]}, "no classifiers"),
            (qwen3, {"architectures": ["Qwen3ForSequenceClassification"]}, "no classifiers"),
            (qwen3, {"is_causal": False}, "is_causal false"),
            (bert, {"is_decoder": True}, "a decoder beside an encoder"),
            (qwen3, {"architectures": ["Qwen3ForRewardModel"]}, "no classifiers"),
            (qwen3, {"architectures": ["Qwen3BidirectionalModel"]}, "knows no encoder"),
            (bert, {"architectures": ["BertSpladeSparseEmbeddingModel"]}, "knows no encoder"),
            (bert, {"architectures": ["NoSuchModel"], "model_type": "x"}, "knows no encoder"),
        ]
    ):
        folder = change_config(source, tmp_path / str(number), **changes)
        with pytest.raises(ValueError, match=f"cannot make vectors: .*{message}"):
            LLM(folder, runner="pooling")
    with pytest.raises(ValueError, match=r"seq_pooling_type is CLS, and .* is a decoder"):
        LLM(qwen3, runner="pooling", pooler_config={"seq_pooling_type": "CLS"})
    with pytest.raises(ValueError, match="speculative_config guesses tokens"):
        LLM(runner="pooling", speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    with pytest.raises(ValueError, match="keep cached prefixes, and pooling MEAN uses none"):
        LLM(runner="pooling", pooler_config=MEAN, kv_offloading_size=0.1)
    with pytest.raises(
        ValueError, match="BertModel runs through transformers here, which cannot be divided"
    ):
        LLM(bert, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="nanoserve has no encoders of its own"):
        LLM(bert, model_impl="nanoserve")
    with pytest.raises(ValueError, match="keep cached prefixes, and an encoder uses none"):
        LLM(bert, kv_offloading_size=0.01)
    with pytest.raises(ValueError, match=r"demo would write text\. Add runner='pooling'"):
        LLM(pooler_config=MEAN)


def test_classes_of_the_users_own(qwen3: Path) -> None:
    """Who replaces the scheduler or the runner is told which class to derive from."""

    class MyScheduler(PoolingScheduler):
        pass

    with LLM(qwen3, runner="pooling", scheduler_cls=MyScheduler, **SMALL) as llm:
        assert len(vectors_of(llm)) == len(PROMPTS)
    with pytest.raises(TypeError, match="a pooling engine needs a subclass of PoolingScheduler"):
        LLM(qwen3, runner="pooling", scheduler_cls=Scheduler, **SMALL)
    with (
        LLM(qwen3, runner="pooling", runner_cls=ModelRunner, **SMALL) as llm,
        pytest.raises(RuntimeError, match="is a subclass of PoolingModelRunner"),
    ):
        vectors_of(llm)


def test_an_architecture_of_the_users_own_writes_text(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the end of its name."""
    cls = ModelRegistry.CLASSES["Qwen3ForCausalLM"]
    monkeypatch.setitem(ModelRegistry.CLASSES, "MyModel", cls)
    folder = change_config(qwen3, tmp_path / "mine", architectures=["MyModel"])
    with LLM(folder, **SMALL) as llm:
        assert llm.generate(PROMPTS[2], use_tqdm=False)[0].outputs[0].token_ids
    for vector, expected in zip(embed(folder), reference(qwen3, "LAST"), strict=True):
        assert close(vector, expected)


def test_a_class_of_the_users_own_runs_whole(qwen3: Path, monkeypatch: Any) -> None:
    """A registered model is used with its head, if it is none of nanoserve's own."""
    cls = ModelRegistry.CLASSES["Qwen3ForCausalLM"]
    monkeypatch.setitem(ModelRegistry.CLASSES, "Qwen3ForCausalLM", type("Mine", (cls,), {}))
    for vector, expected in zip(embed(qwen3), reference(qwen3, "LAST"), strict=True):
        assert close(vector, expected)


# -- errors of one request --


def test_a_vector_that_is_none(pooling_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PoolingModelRunner.pool

    def spoil(self: Any, inputs: Any, hidden: Tensor) -> Tensor:
        vectors = pool(self, inputs, hidden).clone()
        vectors[1] = torch.nan
        return vectors

    monkeypatch.setattr(PoolingModelRunner, "pool", spoil)
    first, second = pooling_llm.embed(["A dog", "A cat"], use_tqdm=False)
    assert first.error is None
    assert second.outputs.embedding == []
    assert "NaN or infinite" in second.error.message
    assert second.error.code == "error"


def test_the_request_that_makes_steps_fail_is_found(
    pooling_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PoolingModelRunner.pool

    def fail(self: Any, inputs: Any, hidden: Tensor) -> Tensor:
        if (inputs.arrays.input_ids == 9).any():
            raise ZeroDivisionError("nine")
        return pool(self, inputs, hidden)

    prompts = [[5, 6], [7, 9], [8, 8]]
    expected = [output.outputs.data for output in pooling_llm.encode(prompts, use_tqdm=False)]
    monkeypatch.setattr(PoolingModelRunner, "pool", fail)
    outputs = pooling_llm.encode(prompts, use_tqdm=False)
    assert outputs[1].error.message == "ZeroDivisionError: nine"
    for index in (0, 2):
        assert close(outputs[index].outputs.data, expected[index])


# -- step by step, and in other threads and tasks --


def test_requests_step_by_step(pooling_llm: LLM) -> None:
    engine = pooling_llm.engine
    engine.add_request("a", "A dog", PoolingParams())
    engine.add_request("b", "A cat", PoolingParams())
    assert engine.abort_request("b")
    [output] = engine.step()
    assert (output.request_id, output.finished, output.error) == ("a", True, None)
    assert not engine.has_unfinished_requests()
    in_thread(lambda: engine.add_request("c", "A dog", PoolingParams()))
    [again] = engine.step()
    assert close(again.outputs.data, output.outputs.data)
    again.outputs.data.add_(1)  # an ordinary tensor of the user's own


def test_the_progress_bar_counts_the_tokens_of_prompts(
    pooling_llm: LLM, capfd: pytest.CaptureFixture[str]
) -> None:
    pooling_llm.embed([[5, 6, 7], [8]])
    text = capfd.readouterr().err
    assert "2/2" in text
    assert "tok/s" in text
    assert ", 0 tok/s" not in text.split("2/2")[-1]


def test_metrics_count_requests_for_vectors(pooling_llm: LLM) -> None:
    def read() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for metric in pooling_llm.get_metrics():
            if metric.labels.get("finished_reason") in (None, "stop"):
                found[metric.name] = getattr(metric, "value", getattr(metric, "count", None))
        return found

    before = read()
    prompts = [[200, 201, 202, 203], [204, 205]]
    pooling_llm.encode(prompts, use_tqdm=False)
    after = read()
    for name, number in {
        "vllm:request_success": 2,
        "vllm:prompt_tokens": 6,
        "vllm:generation_tokens": 0,
        "vllm:time_to_first_token_seconds": 2,
        "vllm:e2e_request_latency_seconds": 2,
        "vllm:request_prompt_tokens": 2,
        "vllm:request_params_max_tokens": 0,
    }.items():
        assert after[name] - before[name] == number, name


def test_fields_have_vllms_names_and_order() -> None:
    """Of vLLM 0.32.0's PoolingParams, and of its outputs."""
    order = """use_activation dimensions step_tag_id returned_token_ids task requires_token_ids
    skip_reading_prefix_cache late_interaction_params extra_kwargs output_kind"""
    assert [each.name for each in fields(PoolingParams)] == order.split()
    order = "request_id outputs prompt_token_ids num_cached_tokens finished error"
    assert [each.name for each in fields(PoolingRequestOutput)] == order.split()


def test_async_encode() -> None:
    async def ask(llm: AsyncLLM) -> None:
        async def one(prompt: Any, **options: Any) -> Any:
            return [output async for output in llm.encode(prompt, **options)]

        answers = await asyncio.gather(*(one(text) for text in ("A dog", "A cat", [35, 801])))
        assert [len(each) for each in answers] == [1, 1, 1]
        assert close(answers[0][0].outputs.data, answers[2][0].outputs.data)
        assert await llm.get_supported_tasks() == ("embed",)
        with pytest.raises(ValueError, match="makes vectors and writes no text"):
            [output async for output in llm.generate("A dog")]
        await llm.pause_generation(mode="keep")
        waiting = asyncio.ensure_future(one("A dog", request_id="late"))
        while not llm.get_num_unfinished_requests():
            await asyncio.sleep(0)
        await llm.abort("late")
        [aborted] = await asyncio.wait_for(waiting, 20)
        assert aborted.error.code == "abort"
        await llm.resume_generation()

    with AsyncLLM(EngineArgs(runner="pooling", num_kv_blocks=64)) as llm:
        asyncio.run(ask(llm))
        assert_idle_blocks(llm)


def test_async_encode_on_a_generating_engine() -> None:
    async def ask(llm: AsyncLLM) -> None:
        with pytest.raises(ValueError, match=r"AsyncLLM\.encode is for pooling models"):
            [output async for output in llm.encode("A dog")]

    with AsyncLLM(EngineArgs(num_kv_blocks=16)) as llm:
        asyncio.run(ask(llm))


def test_the_demo_model_is_a_generating_one_by_default() -> None:
    assert not (DEMO_MODEL / "modules.json").exists()
