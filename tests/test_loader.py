"""Loading: every weight is in its place, and every damage is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoserve import LLM
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.layers import LayerConfig
from nanoserve.models.decoder import CausalLM, LlamaForCausalLM
from nanoserve.models.loader import load_model
from nanoserve.models.registry import ModelRegistry
from nanoserve.models.weight_files import INDEX_FILE
from nanoserve.parallel import ParallelState

MakeCheckpoint = Callable[..., Path]
WEIGHTS = "model.safetensors"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def load(folder: Path, load_format: str = "auto", seed: int = 0, **build: Any) -> CausalLM:
    model_config = ModelConfig.from_folder(folder)
    config = EngineConfig(max_model_len=64, load_format=load_format, seed=seed)
    return load_model(
        config.resolve(model_config), model_config, LayerConfig(**build), use_tqdm=False
    )


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by name."""
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


@pytest.fixture
def checkpoint(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    """A good single-file checkpoint, for a test to damage."""
    return Path(shutil.copytree(make_checkpoint("llama"), tmp_path / "llama"))


@pytest.fixture
def sharded(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    """A good checkpoint of several files and an index, for a test to damage."""
    return Path(shutil.copytree(make_checkpoint("llama", shards=3), tmp_path / "sharded"))


def rewrite(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    """Edit the tensors of a single-file checkpoint."""
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


# ------------------------------------------------------------------------------ in their places


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_loaded_bit_for_bit(
    make_checkpoint: MakeCheckpoint, dtype: str, shards: int
) -> None:
    """In the checkpoint's own dtype, and widened to float32, which loses nothing."""
    folder = make_checkpoint("qwen3", dtype=dtype, shards=shards, head_dim=16)
    tensors = tensors_of(folder)
    for build_dtype in {getattr(torch, dtype), torch.float32}:
        model = load(folder, dtype=build_dtype)
        layer, name = model.model.layers[1], "model.layers.1"
        qkv = [tensors[f"{name}.self_attn.{part}_proj.weight"] for part in "qkv"]
        gate_up = [tensors[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        for parameter, expected in (
            (model.model.embed_tokens.weight, tensors["model.embed_tokens.weight"]),
            (layer.self_attn.qkv_proj.weight, torch.cat(qkv)),
            (layer.self_attn.o_proj.weight, tensors[f"{name}.self_attn.o_proj.weight"]),
            (
                layer.self_attn.qk_norm.weight,
                torch.stack([tensors[f"{name}.self_attn.{part}_norm.weight"] for part in "qqqqkk"]),
            ),
            (layer.mlp.gate_up_proj.weight, torch.cat(gate_up)),
            (layer.mlp.down_proj.weight, tensors[f"{name}.mlp.down_proj.weight"]),
            (
                layer.post_attention_layernorm.weight,
                tensors[f"{name}.post_attention_layernorm.weight"],
            ),
            (model.model.norm.weight, tensors["model.norm.weight"]),
            (model.lm_head.weight, tensors["lm_head.weight"]),
        ):
            assert parameter.dtype == build_dtype
            assert torch.equal(parameter, expected.to(build_dtype))


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16}),
        ("mixtral", {"num_local_experts": 4}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    ],
)
def test_two_ranks_hold_the_checkpoint_between_them(
    make_checkpoint: MakeCheckpoint, model_type: str, overrides: dict[str, Any]
) -> None:
    """Each rank has its slice of every tensor; together, every element."""
    folder = make_checkpoint(model_type, **overrides)
    tensors = tensors_of(folder)
    together = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    for rank in range(2):
        model = load(folder, parallel=ParallelState(rank, 2))
        filled = 0
        for name, shard in model.shards():
            assert torch.equal(shard.target, tensors[name][shard.slices])
            together[name][shard.slices] = shard.target
            filled += shard.target.numel()
        assert filled == sum(parameter.numel() for parameter in model.parameters())
    for name, tensor in tensors.items():
        assert torch.equal(together[name], tensor), name


def test_a_tied_head_in_the_file_is_fine(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Some exporters write the head, although it is the embedding."""
    folder = Path(
        shutil.copytree(make_checkpoint("llama", tie_word_embeddings=True), tmp_path / "c")
    )

    def write_head(tensors: dict[str, Tensor]) -> None:
        assert "lm_head.weight" not in tensors
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(folder, write_head)
    model = load(folder)
    assert not hasattr(model, "lm_head")
    assert torch.equal(model.model.embed_tokens.weight, tensors_of(folder)["lm_head.weight"])


def test_computed_tensors_in_the_file_are_fine(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(checkpoint, lambda tensors: tensors.update({name: torch.ones(8)}))
    load(checkpoint)


def test_files_that_the_index_does_not_name_are_not_read(sharded: Path) -> None:
    """Some repositories hold the same weights twice, in their author's own format."""
    (sharded / "consolidated.safetensors").write_bytes(b"not even safetensors")
    load(sharded)


def test_a_single_file_under_its_usual_name_is_the_checkpoint(checkpoint: Path) -> None:
    (checkpoint / "consolidated.safetensors").write_bytes(b"not even safetensors")
    load(checkpoint)


def test_a_single_file_may_have_any_name(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).rename(checkpoint / "weights.safetensors")
    load(checkpoint)


# ------------------------------------------------------------------------------ damage, named


def test_missing_weights_are_named(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.pop(K_PROJ))
    with pytest.raises(ValueError, match=rf"llama .*missing: {K_PROJ}\."):
        load(checkpoint)


def test_unexpected_weights_are_named(checkpoint: Path) -> None:
    name = "model.layers.2.self_attn.k_proj.weight"
    rewrite(checkpoint, lambda tensors: tensors.update({name: torch.ones(32, 64)}))
    with pytest.raises(ValueError, match=rf"unexpected: {name}\."):
        load(checkpoint)


def test_missing_and_unexpected_at_once(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({"typo": tensors.pop(K_PROJ)}))
    with pytest.raises(ValueError, match=rf"missing: {K_PROJ}; unexpected: typo\."):
        load(checkpoint)


def test_many_missing_weights_are_counted(checkpoint: Path) -> None:
    """An error message is no place for hundreds of names."""
    rewrite(checkpoint, lambda tensors: [tensors.pop(n) for n in list(tensors) if "layers.1" in n])
    with pytest.raises(ValueError, match=r"missing: .*model\.layers\.1\..* and 4 more") as error:
        load(checkpoint)
    assert len(str(error.value)) < 800


@pytest.mark.parametrize("shape", [(64, 32), (16, 64), (32, 64, 1), (32,), ()])
def test_mismatched_weights_are_named(checkpoint: Path, shape: tuple[int, ...]) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({K_PROJ: torch.zeros(shape)}))
    with pytest.raises(
        ValueError, match=rf"{K_PROJ} in {WEIGHTS} has shape .*, expected \(32, 64\)"
    ):
        load(checkpoint)


def test_a_config_of_another_size_does_not_match(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(
        ValueError, match=r"do not match its config.json; missing: model\.layers\.2"
    ):
        load(checkpoint)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123456\n"


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1, LFS_POINTER], ids=str)
def test_a_damaged_file_is_named(checkpoint: Path, keep: float | bytes) -> None:
    """Cut in the header, in the tensors, by one byte; or what a clone without git-lfs leaves."""
    data = (checkpoint / WEIGHTS).read_bytes()
    if isinstance(keep, bytes):
        data = keep
    else:
        data = data[: int(keep * len(data)) if isinstance(keep, float) else keep]
    (checkpoint / WEIGHTS).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{WEIGHTS} is damaged or cut short .*Download it again"):
        load(checkpoint)


def test_a_shard_that_is_not_there_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=rf"lacks {shard.name}, which {INDEX_FILE} names"):
        load(sharded)


@pytest.mark.parametrize("content", ['{"weight_map": {"a": ', "{}", "[]"])
def test_a_damaged_index_is_named(sharded: Path, content: str) -> None:
    (sharded / INDEX_FILE).write_text(content)
    with pytest.raises(ValueError, match=rf"{INDEX_FILE} .*again"):
        load(sharded)


def test_a_folder_without_weights(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"llama has no \.safetensors file.*load_format='dummy'"):
        LLM(checkpoint, num_kv_blocks=4)


class Bomb:
    """Unpickling it makes a folder: proof that code ran."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_no_pickle_is_ever_read(checkpoint: Path, tmp_path: Path, name: str) -> None:
    (checkpoint / WEIGHTS).unlink()
    torch.save({K_PROJ: Bomb(tmp_path / "exploded")}, checkpoint / name)
    with pytest.raises(ValueError, match="safetensors only"):
        load(checkpoint)
    assert not (tmp_path / "exploded").exists()


def test_pickles_beside_the_weights_do_no_harm(checkpoint: Path, tmp_path: Path) -> None:
    torch.save({K_PROJ: Bomb(tmp_path / "exploded")}, checkpoint / "pytorch_model.bin")
    load(checkpoint)
    assert not (tmp_path / "exploded").exists()


# ------------------------------------------------------------------------------ without weights


@pytest.fixture
def config_alone(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    """A folder that holds a config.json and nothing else."""
    folder = tmp_path / "config-alone"
    folder.mkdir()
    shutil.copy(make_checkpoint("qwen3", head_dim=16) / "config.json", folder)
    return folder


def test_dummy_weights_depend_on_the_seed_only(config_alone: Path) -> None:
    first, again, other = (load(config_alone, "dummy", seed) for seed in (3, 3, 4))
    for (name, ours), theirs in zip(first.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert ours.isfinite().all()
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load(config_alone, "dummy", 3)
    assert torch.equal(torch.rand(3), expected), "the global generator was used"


def test_dummy_weights_are_the_same_model_on_any_number_of_ranks(config_alone: Path) -> None:
    whole = dict(load(config_alone, "dummy").shards())
    for rank in range(2):
        for name, shard in load(config_alone, "dummy", parallel=ParallelState(rank, 2)).shards():
            assert torch.equal(shard.target, whole[name].target[shard.slices]), name


# ------------------------------------------------------------------------------ nothing is believed


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 2**31 - 1}, r"embed_tokens.weight .* \(320, 64\), expected \(2147483647"),
        ({"hidden_size": 2**22}, r"shape \(320, 64\), expected \(320, 4194304\)"),
        ({"intermediate_size": 2**22}, r"shape \(112, 64\), expected \(4194304, 64\)"),
        ({"num_attention_heads": 2**16, "head_dim": 2**16}, r"expected \(4294967296, 64\)"),
        ({"num_hidden_layers": 50}, r"missing: model\.layers\.2\..* and \d+ more"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_sizes_are_compared_before_memory_is_taken(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], words: str
) -> None:
    change_config(checkpoint, **changes)
    empty = LayerConfig.empty

    def on_meta(layer_config: LayerConfig, *shape: int) -> Any:
        assert layer_config.device.type == "meta", "memory was asked for"
        return empty(layer_config, *shape)

    monkeypatch.setattr(LayerConfig, "empty", on_meta)
    with pytest.raises(ValueError, match=words):
        load(checkpoint)


def test_weights_that_no_memory_holds(
    checkpoint: Path, config_alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both numbers; from files, and without any."""
    change_config(config_alone, vocab_size=2**31 - 1, hidden_size=2**20)
    with pytest.raises(ValueError, match=r"need \d+\.\d GiB as float32 on cpu, and \d+\.\d GiB"):
        load(config_alone, "dummy")
    size = load(checkpoint).num_bytes()
    monkeypatch.setattr("nanoserve.models.weight_files.memory_limit", lambda _: size)
    load(checkpoint)
    monkeypatch.setattr("nanoserve.models.weight_files.memory_limit", lambda _: size - 1)
    with pytest.raises(ValueError, match="smaller dtype or model"):
        load(checkpoint)
    monkeypatch.setattr("nanoserve.models.weight_files.memory_limit", lambda _: None)
    load(checkpoint)


class Impatient(LlamaForCausalLM):
    """A model of the user's own whose constructor reads a tensor: it cannot be built on meta."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert self.model.norm.weight.sum().item() is not None


def test_a_model_that_cannot_be_planned_is_compared_afterwards(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ModelRegistry.CLASSES, "LlamaForCausalLM", Impatient)
    assert isinstance(load(checkpoint), Impatient)
    rewrite(checkpoint, lambda tensors: tensors.pop(K_PROJ))
    with pytest.raises(ValueError, match=f"missing: {K_PROJ}"):
        load(checkpoint)


FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
NO_FLOATS = [torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, *FLOAT8]


@pytest.mark.parametrize("dtype", NO_FLOATS, ids=str)
def test_weights_that_are_no_floats_are_named(checkpoint: Path, dtype: torch.dtype) -> None:
    """They would be copied without their scales, and the model would talk nonsense."""
    rewrite(checkpoint, lambda tensors: tensors.update({K_PROJ: tensors[K_PROJ].to(dtype)}))
    with pytest.raises(ValueError, match=rf"{K_PROJ} in {WEIGHTS} has type [A-Z]+.*allowed: F64"):
        load(checkpoint)


def test_weights_of_float64_are_narrowed(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({K_PROJ: tensors[K_PROJ].double()}))
    load(checkpoint)


def test_a_computed_tensor_may_have_any_type(checkpoint: Path) -> None:
    """GPT-2's causal mask is one."""
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    rewrite(checkpoint, lambda tensors: tensors.update({"model.layers.0.attn.bias": mask}))
    load(checkpoint)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config", "quantization"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_unknown_quantization_is_refused_by_name(
    checkpoint: Path, key: str, load_format: str
) -> None:
    for value in ({}, None):
        change_config(checkpoint, **{key: value})
        load(checkpoint, load_format)
    change_config(checkpoint, **{key: {"quant_method": "exl2", "bits": 4}})
    with pytest.raises(ValueError, match=rf"config\.json has {key} \(exl2\).* Use a checkpoint"):
        load(checkpoint, load_format)
    change_config(checkpoint, **{key: {"bits": 4}})
    with pytest.raises(ValueError, match=rf"{key} \(no method named\)"):
        load(checkpoint, load_format)


BAD_NAMES = ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "", ".", "..", "config.json"]


@pytest.mark.parametrize("name", [*BAD_NAMES, None, 5, ["a.safetensors"], "\0.safetensors"])
def test_an_index_names_files_of_its_folder_only(sharded: Path, name: Any) -> None:
    (sharded.parent / "other.safetensors").write_bytes(b"secret")
    (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match=rf"{INDEX_FILE} names .*allowed: the name of a .safe"):
        load(sharded)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"weight_map": [1]}', '{"weight_map": null}'])
def test_an_index_that_is_none(sharded: Path, text: str) -> None:
    (sharded / INDEX_FILE).write_text(text)
    with pytest.raises(ValueError, match=f"{INDEX_FILE} is not .*again"):
        load(sharded)


def test_an_index_may_name_a_file_with_a_long_name(sharded: Path) -> None:
    name = "x" * 5000 + ".safetensors"
    (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match="lacks") as raised:
        load(sharded)
    assert len(str(raised.value)) < 1000


def test_a_tensor_in_two_files_is_named(sharded: Path) -> None:
    first, *_, last = sorted(sharded.glob("*.safetensors"))
    tensors = load_file(last)
    name = next(iter(load_file(first)))
    save_file({**tensors, name: load_file(first)[name]}, last)
    with pytest.raises(ValueError, match=f"'{name}' is in two files, {first.name} and {last.name}"):
        load(sharded)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to nothing"])
def test_weights_in_a_special_file(checkpoint: Path, sharded: Path, kind: str) -> None:
    """Neither the single file nor one that the index names."""
    for folder, file in (
        (checkpoint, checkpoint / WEIGHTS),
        (sharded, sorted(sharded.glob("*.safetensors"))[0]),
    ):
        file.unlink()
        if kind == "folder":
            file.mkdir()
        elif kind == "pipe":
            os.mkfifo(file)
        else:
            file.symlink_to("no-such-file")
        with pytest.raises(ValueError, match=f"{file.name}' is not a regular file"):
            load(folder)


def test_a_checkpoint_in_the_hubs_cache(sharded: Path, tmp_path: Path) -> None:
    """Every file is a link to a blob of another name."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0" / "c"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(sharded.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../../blobs/{number}")
    load(snapshot)
