"""What is in a checkpoint's weight files?

Only safetensors files are read: other formats can run code when loaded. Each has a header, which
names its tensors, their types and shapes; the numbers follow. Headers are read first, because they
are small whatever they say, and are compared with the model before memory is taken for it:

    model-00001-of-00002.safetensors   {"model.norm.weight": BF16 [4096], ...}, numbers
    model.safetensors.index.json       {"weight_map": {"model.norm.weight": "model-00001-...", ...}}

vLLM: vllm/model_executor/model_loader/weight_utils.py (V0 and V1).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from nanoserve.models.config import read_json

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
    index names, or all in the folder. Raises ValueError if there are none, or if the index names
    files of other folders."""
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    if (folder / INDEX_FILE).exists():
        names = sorted(set(read_json(folder / INDEX_FILE).get("weight_map", {}).values()))
        if not names or any(Path(name).name != name for name in names):
            raise ValueError(f"{folder / INDEX_FILE} has no weight_map with files of its folder.")
        return [folder / name for name in names]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    raise ValueError(
        f"{folder} has no .safetensors file. Weights are read from safetensors only; convert "
        "others with transformers' save_pretrained, or use load_format='dummy'."
    )


def read_headers(files: list[Path]) -> dict[str, TensorInfo]:
    """What the files say about their tensors, no tensor read. Raises ValueError for a damaged file,
    and for a tensor that is in two files."""
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, source in read_slices(file):
            if name in tensors:
                raise ValueError(f"{name} is in two files, {tensors[name].file} and {file}.")
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
        raise ValueError(
            f"{name} in {tensor.file.name} has type {tensor.dtype}; allowed: "
            f"{', '.join(allowed or FLOATS)}."
        )


def listing(names: list[str], most: int = 5) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" * (len(names) > most))
