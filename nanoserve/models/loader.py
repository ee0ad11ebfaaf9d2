"""How do checkpoint names become these weights?

The model yields pairs of a checkpoint name and a Shard: a view of a parameter, and the slice of the
checkpoint tensor that fills it. The loader goes through the safetensors files and copies each slice
to its place. A missing, unexpected or mismatched tensor is an error that names it, because a model
with one unfilled matrix still talks, only nonsense.

    model.layers.0.self_attn.k_proj.weight  ->  rows 64..95 of layers[0].self_attn.qkv_proj.weight

Only safetensors files are read: other formats can run code when loaded. Only the slice that this
rank needs is read from disk. The headers of all files are read first, and compared with a model
that has shapes and no memory, so that config.json cannot ask for memory that no weight fills.

vLLM: vllm/model_executor/model_loader/: loader.py, weight_utils.py (V0); default_loader.py,
weight_utils.py (V1).
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from nanoserve.config import EngineConfig
from nanoserve.kernels.kv_cache import memory_limit
from nanoserve.kernels.memory import check_fits
from nanoserve.layers import LayerConfig
from nanoserve.models import weight_files
from nanoserve.models.base import Model
from nanoserve.models.config import ModelConfig
from nanoserve.models.registry import ModelRegistry, build_model
from nanoserve.models.shards import Shard
from nanoserve.models.weight_files import TensorInfo, listing, read_slices

Build = Callable[[int, LayerConfig], Model]  # (max_model_len, layer_config) -> a model, unfilled
# Some exporters write these tensors, although they are computed, not learnt.
COMPUTED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")
KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".output_scale")  # of another KV cache


def load_model(
    config: EngineConfig,
    model_config: ModelConfig,
    layer_config: LayerConfig,
    build: Build | None = None,
) -> Model:
    """The model, its weights filled from the checkpoint (or at random: load_format "dummy").

    nanoserve's own model if ModelRegistry has its architecture, else that of transformers, unless
    `model_impl` says otherwise. Raises ValueError for an unknown architecture, a damaged or missing
    file, and weights that do not match the model or do not fit into memory.
    """
    is_own = ModelRegistry.get(model_config.architecture) is not None
    if config.model_impl == "transformers" or (config.model_impl == "auto" and not is_own):
        # Imported here, because it takes seconds, and native models do not need it.
        from nanoserve.models.transformers_fallback import load_with_transformers

        return load_with_transformers(config, model_config, layer_config)
    files = [] if config.load_format == "dummy" else weight_files.find_files(model_config.path)
    build = build or partial(build_model, model_config)
    tensors = weight_files.read_headers(files)
    return build_and_fill(build, config, model_config.path, tensors, layer_config)


def build_and_fill(
    build: Build,
    config: EngineConfig,
    folder: Path,
    tensors: dict[str, TensorInfo],
    layer_config: LayerConfig,
) -> Model:
    """What `build` makes, its weights filled from the files of `folder`, whose headers are
    `tensors`. Raises ValueError as load_model does."""
    assert config.max_model_len, "EngineConfig not resolved"
    is_dummy, plan = config.load_format == "dummy", plan_model(build, layer_config)
    if plan is not None:
        if not is_dummy:
            compare(plan, tensors, folder)
        what = f"what config.json describes, on {layer_config.device},"
        advice = "Use a smaller dtype or model, or divide it (tensor_parallel_size)."
        check_fits(what, plan.num_bytes(), memory_limit(layer_config.device), advice)
    model = build(config.max_model_len, layer_config)
    if is_dummy:
        fill_randomly(model, config.seed)
    else:
        if plan is None:
            compare(model, tensors, folder)
        fill_from_checkpoint(model, tensors)
    model.process_weights_after_loading()
    return model.eval()


def plan_model(build: Build, layer_config: LayerConfig) -> Model | None:
    """The model on torch's "meta" device, which has shapes and no memory. None for a model of the
    user's own whose constructor needs the contents of a tensor."""
    on_meta = replace(layer_config, device=torch.device("meta"))
    try:
        return build(1, on_meta)  # tables of positions are not loaded
    except (NotImplementedError, RuntimeError):
        return None


def compare(model: Model, tensors: dict[str, TensorInfo], folder: Path) -> None:
    """Raise ValueError, naming the tensors, unless the files have what the model wants: names,
    shapes, and types."""
    places = dict(model.shards())
    missing = [n for n, shard in places.items() if n not in tensors and not shard.is_optional]
    extra = [name for name in tensors if name not in places and not _is_ignorable(model, name)]
    if missing or extra:
        raise ValueError(
            f"the weights in {folder} do not match its config.json; missing: {listing(missing)}; "
            f"unexpected: {listing(extra)}. Is the download complete, and do the two belong "
            "together? (Codes of quantized weights need a quantization_config.)"
        )
    for name in tensors.keys() & places.keys():
        place, (file, _, shape) = places[name], tensors[name]
        if shape != place.full_shape and (shape, place.full_shape) != ((1,), ()):
            expected = f"expected {place.full_shape}"
            raise ValueError(f"{name} in {file.name} has shape {shape}, {expected}.")
        weight_files.check_dtype(name, tensors[name], place.dtypes)


def fill_from_checkpoint(model: Model, tensors: dict[str, TensorInfo]) -> None:
    """Copy every weight from its file. The tensors have been compared with the model."""
    shards = shards_by_name(model)
    # Faster than `delay` seconds, no bar is shown: it would only flash.
    with tqdm(total=len(shards), desc="Loading weights", unit="tensor", delay=1) as bar:
        for file in dict.fromkeys(tensor.file for tensor in tensors.values()):
            for name, source in read_slices(file):
                for shard in shards.get(name, ()):
                    shard.weight_loader(shard.target, source[shard.slices])
                bar.update(name in shards)


def shards_by_name(model: Model) -> dict[str, list[Shard]]:
    """All places that each checkpoint tensor fills."""
    shards: dict[str, list[Shard]] = defaultdict(list)
    for name, shard in model.shards():
        shards[name].append(shard)
    return shards


def fill_randomly(model: Model, seed: int) -> None:
    """Small normal weights, norms near 1: the right shapes and speeds without a checkpoint.

    Each rank draws whole tensors, each from a stream of its own, and keeps its slices, so that one
    seed gives one model on any number of ranks.
    """
    for name, shards in shards_by_name(model).items():
        if shards[0].is_optional or name.endswith(".g_idx"):  # (an order is no random numbers)
            continue
        generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
        noise = torch.randn(shards[0].full_shape, generator=generator) * 0.02  # codes: any bits
        for shard in shards:
            values = noise[shard.slices]
            shard.weight_loader(shard.target, values + 1 if "norm" in name else values)


def _is_ignorable(model: Model, name: str) -> bool:
    """True for tensors that a checkpoint may have and no model needs: computed tensors, and the
    head of a model that uses its embedding as head."""
    if name.endswith(COMPUTED + KV_SCALES) or name in model.foreign_names:
        return True
    return model.is_tied and name == "lm_head.weight"
