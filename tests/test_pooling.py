"""Vectors: the oracle is transformers' own model, which computes each prompt alone and whole.

Nothing of the engine may show in a vector: not the chunks, not the cache, not the other prompts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from nanoserve import LLM, SamplingParams
from nanoserve.chapters.pooling import PoolerConfig, PoolingParams
from nanoserve.chapters.pooling.models import most_positions
from nanoserve.models.config import ModelConfig
from nanoserve.tools.check_blocks import check_blocks

PROMPTS = [[(7 * i + 13 * n) % 300 + 5 for i in range(n)] for n in (1, 2, 5, 5, 17, 30)]
SIZES = {"vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 130}
QWEN = {"head_dim": 8, "num_key_value_heads": 2, "eos_token_id": 1}
SMALL = {"block_size": 4, "max_num_seqs": 4, "dtype": "float32", "runner": "pooling"}
MADE = {  # name -> (model type, class that writes the checkpoint, more keys of its config.json)
    "qwen3": ("qwen3", AutoModelForCausalLM, QWEN),
    "qwen3 body": ("qwen3", AutoModel, QWEN),
    "gpt2 body": ("gpt2", AutoModel, {"eos_token_id": 1, "bos_token_id": 1}),
    "bert": ("bert", AutoModel, {}),
    "roberta": ("roberta", AutoModelForMaskedLM, {"pad_token_id": 1}),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a name in MADE, with random weights."""
    root = tmp_path_factory.mktemp("pooling")

    def make(name: str) -> Path:
        kind, auto_cls, more = MADE[name]
        if not (root / name).exists():
            torch.manual_seed(0)
            model = auto_cls.from_config(AutoConfig.for_model(kind, **SIZES, **more))
            model.save_pretrained(root / name)
        return root / name

    return make


def copy_of(source: Path, folder: Path, files: dict[str, Any] | None = None, **keys: Any) -> Path:
    """A checkpoint with further files, and other keys in config.json."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    for name, content in {**(files or {}), "config.json": {**config, **keys}}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def reference(folder: Path, kind: str, normalise: bool = True) -> list[Tensor]:
    """The definition: transformers' hidden states of each prompt alone, pooled."""
    model, vectors = AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), []
    for prompt in PROMPTS:
        with torch.no_grad():
            hidden = model(torch.tensor([prompt])).last_hidden_state[0]
        vector = {"LAST": hidden[-1], "MEAN": hidden.mean(dim=0), "CLS": hidden[0]}[kind]
        vectors.append(F.normalize(vector, dim=-1) if normalise else vector)
    return vectors


def encode(folder: Path, params: PoolingParams | None = None, **options: Any) -> list[Tensor]:
    with LLM(folder, **SMALL, **options) as llm:
        outputs = llm.encode(PROMPTS, params, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == PROMPTS
        check_blocks(llm.llm_engine.block_manager)
        assert not llm.llm_engine.scheduler.sequences
        return [output.outputs.data for output in outputs]


CHUNKS = {"max_num_batched_tokens": 8, "max_model_len": 32, "num_gpu_blocks_override": 9}


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("qwen3", "LAST", {}),
        ("qwen3", "LAST", {**CHUNKS, "preemption_mode": "swap", "kernels": "fast"}),
        ("qwen3", "MEAN", {**CHUNKS, "async_scheduling": True}),
        ("qwen3 body", "MEAN", {"kernels": "fast"}),
        ("qwen3 body", "LAST", {"tensor_parallel_size": 2}),
        ("gpt2 body", "LAST", CHUNKS),
        ("gpt2 body", "MEAN", {}),
        ("bert", "CLS", {}),
        ("roberta", "MEAN", {"async_scheduling": True}),
        ("roberta", "LAST", {}),
    ],
)
def test_vectors(
    folder_of: Callable[[str], Path], name: str, kind: str, options: dict[str, Any]
) -> None:
    pooler = {"seq_pooling_type": kind}
    found = encode(folder_of(name), pooler_config=pooler, **options)
    for one, other in zip(found, reference(folder_of(name), kind), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_prefixes_are_found_where_that_is_sound(folder_of: Callable[[str], Path]) -> None:
    for kind, expected in (("LAST", 28), ("MEAN", 0)):
        with LLM(folder_of("qwen3"), **SMALL, pooler_config={"pooling_type": kind}) as llm:
            first, second = (llm.encode(PROMPTS[-1], use_tqdm=False)[0] for _ in range(2))
            assert (first.num_cached_tokens, second.num_cached_tokens) == (0, expected)
            assert torch.allclose(first.outputs.data, second.outputs.data, atol=1e-6)


@pytest.mark.parametrize("normalise", [True, False])
def test_the_checkpoint_says_how(
    folder_of: Callable[[str], Path], tmp_path: Path, normalise: bool
) -> None:
    names = ["Transformer", "Pooling", "Normalize"][: 2 + normalise]
    modules = [{"path": f"{i}_{name}", "type": f"a.b.{name}"} for i, name in enumerate(names)]
    pooling = {"pooling_mode_mean_tokens": True, "include_prompt": True, "other": 7}
    files = {"modules.json": modules, "1_Pooling/config.json": pooling}
    folder = copy_of(folder_of("bert"), tmp_path / "a", files)
    for one, other in zip(encode(folder), reference(folder, "MEAN", normalise), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    files["modules.json"] = [*modules, {"path": "3_Dense", "type": "a.b.Dense"}]
    with pytest.raises(ValueError, match="Dense"):
        encode(copy_of(folder_of("bert"), tmp_path / "b", files))
    joined = {**pooling, "pooling_mode_max_tokens": True}  # two vectors, end to end
    files = {"modules.json": modules, "1_Pooling/config.json": joined}
    with pytest.raises(ValueError, match="max_tokens"):
        encode(copy_of(folder_of("bert"), tmp_path / "c", files))


def test_matryoshka(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    params = PoolingParams(dimensions=8)
    folder = copy_of(folder_of("qwen3"), tmp_path / "a", matryoshka_dimensions=[8, 16])
    whole = reference(folder, "LAST", normalise=False)
    for one, other in zip(encode(folder, params), whole, strict=True):
        torch.testing.assert_close(one, F.normalize(other[:8], dim=-1), rtol=1e-5, atol=1e-5)
    for source, dimensions in ((folder, 9), (folder_of("qwen3"), 8)):
        with pytest.raises(ValueError, match="dimensions"):
            encode(source, PoolingParams(dimensions=dimensions))


def test_scores_are_cosines(folder_of: Callable[[str], Path]) -> None:
    with LLM(runner="pooling") as llm:  # the demo model: texts
        texts = ["The dog ran.", "A cat sat.", "The dog ran."]
        vectors = [torch.tensor(each.outputs.embedding) for each in llm.embed(texts)]
        one_to_all = [each.outputs.score for each in llm.score(texts[0], texts, use_tqdm=False)]
        assert one_to_all == pytest.approx([float(vectors[0] @ each) for each in vectors], abs=1e-5)
        pairs = llm.score(texts, texts, use_tqdm=False)
        assert [each.outputs.score for each in pairs] == pytest.approx([1, 1, 1], abs=1e-5)
        with pytest.raises(ValueError, match="pairs"):
            llm.score(texts[:2], texts)


def test_a_vector_that_is_none_ends_its_request(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy_of(folder_of("qwen3"), tmp_path / "a")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with LLM(folder, **SMALL) as llm:
        bad, good = llm.encode([[5, 7, 6], [5, 6]], use_tqdm=False)
    assert bad.error is not None
    assert good.error is None
    assert len(bad.outputs.data) == 0
    assert len(good.outputs.data) == SIZES["hidden_size"]


def test_an_encoder_has_fewer_positions_than_rows(folder_of: Callable[[str], Path]) -> None:
    lengths = [most_positions(ModelConfig.from_folder(folder_of(n))) for n in ("bert", "roberta")]
    assert lengths == [130, 128]
    with LLM(folder_of("roberta"), **SMALL) as llm:  # no token comes behind the prompt
        [output] = llm.embed([[9] * 128], use_tqdm=False)
        assert len(output.outputs.embedding) == SIZES["hidden_size"]
        with pytest.raises(ValueError, match="129"):
            llm.embed([[9] * 129])
    with pytest.raises(ValueError, match="at most 128"):
        LLM(folder_of("roberta"), **SMALL, max_model_len=130)


def test_what_makes_no_vectors_and_what_writes_no_text(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="BertModel"):
        LLM(folder_of("bert"))
    with LLM(runner="pooling") as llm:
        with pytest.raises(ValueError, match="embed"):
            llm.generate("Hi")
        with pytest.raises(TypeError, match="PoolingParams"):
            llm.encode("Hi", SamplingParams())
    name = "BertForSequenceClassification"
    with pytest.raises(ValueError, match=name):
        LLM(copy_of(folder_of("bert"), tmp_path / "a", architectures=[name]), **SMALL)
    with pytest.raises(ValueError, match="CLS"):
        LLM(folder_of("qwen3"), **SMALL, pooler_config={"seq_pooling_type": "CLS"})
    for wrong in ({"seq_pooling_type": "MAX"}, {"kind": "LAST"}, ["LAST"]):
        with pytest.raises((ValueError, TypeError), match="pool"):
            PoolerConfig.read(wrong)
