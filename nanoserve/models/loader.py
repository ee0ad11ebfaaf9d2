"""How do checkpoint names become these weights?

The model yields pairs of a checkpoint name and a Shard: a view of a parameter, and the slice of the
checkpoint tensor that fills it. The loader goes through the safetensors files and copies each slice
to its place. A missing, unexpected or mismatched tensor is an error that names it, because a model
with one unfilled matrix still talks, only nonsense.

    model.layers.0.self_attn.k_proj.weight  ->  rows 64..95 of layers[0].self_attn.qkv_proj.weight

Only safetensors files are read: other formats can run code when loaded. Only the slice that this
rank needs is read from disk.

vLLM: vllm/model_executor/model_loader/: loader.py, weight_utils.py (V0); default_loader.py,
weight_utils.py (V1).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.layers import LayerConfig, Shard
from nanoserve.logger import output_stream
from nanoserve.models.base import Model
from nanoserve.models.registry import ModelRegistry, build_model

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Some exporters write these tensors, although they are computed, not learnt.
COMPUTED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")


def load_model(
    config: EngineConfig,
    model_config: ModelConfig,
    layer_config: LayerConfig,
    use_tqdm: bool = True,
) -> Model:
    """The model, its weights filled from the checkpoint (or at random: load_format "dummy").

    nanoserve's own model if ModelRegistry has its architecture, else that of transformers, unless
    `model_impl` says otherwise.

    Raises ValueError for an unknown architecture, a damaged or missing file, and weights that do
    not match the model.
    """
    assert config.max_model_len, "EngineConfig not resolved"
    is_native = ModelRegistry.get(model_config.architecture) is not None
    if config.model_impl == "transformers" or (config.model_impl == "auto" and not is_native):
        # Imported here, because it takes seconds, and native models do not need it.
        from nanoserve.models.transformers_fallback import load_with_transformers

        if config.load_format != "dummy":
            find_files(model_config.path)  # its errors are clearer
        return load_with_transformers(config, model_config, layer_config)
    model = build_model(model_config, config.max_model_len, layer_config)
    if config.load_format == "dummy":
        fill_randomly(model, config.seed)
    else:
        fill_from_checkpoint(model, model_config.path, use_tqdm)
    model.process_weights_after_loading()
    return model.eval()


def fill_from_checkpoint(model: Model, folder: Path, use_tqdm: bool = True) -> None:
    """Copy every weight from `folder`. Raises ValueError, naming the tensors, if any do not fit."""
    missing = shards_by_name(model)
    unexpected: list[str] = []
    files = find_files(folder)
    with tqdm(
        total=len(missing),
        desc="Loading weights",
        unit="tensor",
        disable=not use_tqdm,
        delay=1,  # seconds; below that, a bar would only flash
        file=output_stream(),
    ) as bar:
        for file in files:
            for name, source in _open(file):
                if name in missing:
                    for shard in missing.pop(name):
                        _copy(source, shard, name, file)
                    bar.update()
                elif not _is_ignorable(model, name):
                    unexpected.append(name)
    if missing or unexpected:
        problems = [f"missing: {_listing(list(missing))}"] * bool(missing)
        problems += [f"unexpected: {_listing(unexpected)}"] * bool(unexpected)
        raise ValueError(
            f"the weights in {folder} do not match its config.json; {'; '.join(problems)}. "
            "Is the download complete, and do the two belong together?"
        )


def shards_by_name(model: Model) -> dict[str, list[Shard]]:
    """All places that each checkpoint tensor fills."""
    shards: dict[str, list[Shard]] = defaultdict(list)
    for name, shard in model.shards():
        shards[name].append(shard)
    return shards


def fill_randomly(model: Model, seed: int) -> None:
    """Small normal weights, norms near 1: the right shapes and speeds without a checkpoint.

    Each rank draws whole tensors and keeps its slices, so that one seed gives one model on any
    number of ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, shards in shards_by_name(model).items():
        noise = torch.randn(shards[0].full_shape, generator=generator) * 0.02
        for shard in shards:
            shard.target.copy_(noise[shard.slices] + 1 if "norm" in name else noise[shard.slices])


def find_files(folder: Path) -> list[Path]:
    """The checkpoint's safetensors files: the single file of the usual name, or the files that the
    index names, or all in the folder. Other files are not read.

    Raises ValueError if there are none, or if the index names a file that does not exist.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists():
        return [single]
    if index.exists():
        names = _files_in_index(index)
        absent = [name for name in names if not (folder / name).exists()]
        if absent:
            raise ValueError(f"{folder} lacks {_listing(absent)}, which {INDEX_FILE} names.")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder} has no .safetensors file. Weights are read from safetensors only; convert "
            "others with transformers' save_pretrained, or use load_format='dummy'."
        )
    return files


def _files_in_index(index: Path) -> list[str]:
    """The file names in {"weight_map": {tensor name: file name}}, each once."""
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a readable index. Download it again.") from error


def _open(file: Path) -> Iterator[tuple[str, object]]:
    """(name, slice reader) of each tensor in a file, nothing read yet."""
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                yield name, tensors.get_slice(name)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or cut short ({error}). Download it again.") from error


def _copy(source: object, shard: Shard, name: str, file: Path) -> None:
    """Fill one shard, converting to its dtype and device."""
    shape = tuple(source.get_shape())  # type: ignore[attr-defined]
    if shape != shard.full_shape:
        raise ValueError(f"{name} in {file.name} has shape {shape}, expected {shard.full_shape}.")
    shard.target.copy_(source[shard.slices])  # type: ignore[index]


def _is_ignorable(model: Model, name: str) -> bool:
    """True for tensors that a checkpoint may have and no model needs: computed tensors, and the
    head of a model that uses its embedding as head."""
    return name.endswith(COMPUTED) or (model.is_tied and name == "lm_head.weight")


def _listing(names: list[str], most: int = 5) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
