"""What is in a checkpoint's weight files?

Only safetensors files are read: other formats can run code when loaded. Each has a header, which
names its tensors, their types and shapes; the numbers follow. Headers are read first, because they
are small whatever they say, and are compared with the model before memory is taken for it:

    model-00001-of-00002.safetensors   {"model.norm.weight": BF16 [4096], ...}, numbers
    model.safetensors.index.json       {"weight_map": {"model.norm.weight": "model-00001-...", ...}}

vLLM: vllm/model_executor/model_loader/weight_utils.py (V0 and V1).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from reprlib import repr as brief
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from nanoserve.kernels.kv_cache import memory_limit
from nanoserve.kernels.memory import check_fits
from nanoserve.layers import LayerConfig
from nanoserve.models.checkpoint import MAX_INDEX_BYTES, check_is_file, is_plain_name, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Types of numbers, as safetensors calls them. Others are codes that need a scale, or no weights.
FLOATS = ("F64", "F32", "F16", "BF16")


class TensorInfo(NamedTuple):
    """What the header of a file says about one tensor."""

    file: Path
    dtype: str  # such as "BF16"
    shape: tuple[int, ...]


def find_files(folder: Path) -> list[Path]:
    """The checkpoint's safetensors files: the single file of the usual name, or the files that the
    index names, or all in the folder. Other files are not read.

    Raises ValueError if there are none, if the index names a file that does not exist or that is
    not in the folder, and if one is not a regular file (or a link to one).
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if os.path.lexists(single):
        files = [single]
    elif os.path.lexists(index):
        names = _files_in_index(index)
        absent = [name for name in names if not os.path.lexists(folder / name)]
        if absent:
            raise ValueError(f"{folder} lacks {listing(absent)}, which {INDEX_FILE} names.")
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder} has no .safetensors file. Weights are read from safetensors only; convert "
            "others with transformers' save_pretrained, or use load_format='dummy'."
        )
    for file in files:
        check_is_file(file)
    return files


def _files_in_index(index: Path) -> list[str]:
    """The file names in {"weight_map": {tensor name: file name}}, each once. They are names of
    files of the same folder: a checkpoint does not read what is elsewhere."""
    weight_map = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} is not a readable index: no weight_map. Download it again.")
    for name in weight_map.values():
        if not is_plain_name(name, ".safetensors"):
            raise ValueError(
                f"{index} names {brief(name)}; allowed: the name of a .safetensors file of the "
                "same folder. Download it again, from where you trust."
            )
    return sorted(set(weight_map.values()))


def read_headers(files: list[Path]) -> dict[str, TensorInfo]:
    """What the files say about their tensors, no tensor read. Raises ValueError for a damaged file,
    and for a tensor that is in two files."""
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, source in read_slices(file):
            if name in tensors:
                raise ValueError(
                    f"{brief(name)} is in two files, {tensors[name].file.name} and {file.name}. "
                    "Remove the file that does not belong to the checkpoint."
                )
            tensors[name] = TensorInfo(file, source.get_dtype(), tuple(source.get_shape()))
    return tensors


def read_slices(file: Path) -> Iterator[tuple[str, Any]]:
    """(name, slice reader) of each tensor in a file, nothing read yet. Raises ValueError for a
    damaged file."""
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                yield name, tensors.get_slice(name)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged or cut short ({error}). Download it again.") from error


def check_dtype(name: str, tensor: TensorInfo, allowed: tuple[str, ...] | None = None) -> None:
    """Raise ValueError unless the tensor has one of the types; None: floating-point numbers."""
    if tensor.dtype not in (allowed or FLOATS):
        advice = "" if allowed else " Codes need a quantization_config in config.json."
        raise ValueError(
            f"{name} in {tensor.file.name} has type {tensor.dtype}; allowed: "
            f"{', '.join(allowed or FLOATS)}.{advice}"
        )


def check_memory(num_bytes: int, layer_config: LayerConfig) -> None:
    """Raise ValueError if weights of so many bytes do not fit on this rank's device."""
    dtype, device = str(layer_config.dtype).removeprefix("torch."), layer_config.device
    what = f"the weights that config.json describes need {{size}} as {dtype} on {device}"
    advice = (
        "Free some, use a smaller dtype or model, or divide it among more GPUs or machines "
        "(tensor_parallel_size)."
    )
    check_fits(what, num_bytes, 1, memory_limit(device), advice)


def listing(names: list[str], most: int = 5) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    shown = [
        name if name.isprintable() and len(name) < 200 else brief(name) for name in names[:most]
    ]
    return ", ".join(shown) + more
