"""What may the folder of an adapter say?

PEFT writes two files. They come from somebody else, so nothing that they say is used before it is
checked, as with a model's files (checkpoint.py):

    adapter_config.json         {"peft_type": "LORA", "r": 8, "lora_alpha": 16,
                                 "target_modules": ["q_proj", "v_proj"], ...}
    adapter_model.safetensors   base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
                                [8, in], and ...lora_B.weight [out, 8]; and so on

`read_adapter` compares the header of the weights with the shapes of the model, before any weight is
read; `Adapter.load` reads them later. A missing, unexpected or mismatched tensor is an error that
names it: a model with half of an adapter still talks, only nonsense.

PEFT's file may ask for more than A and B: for other arithmetic (DoRA, aLoRA), for further weights
(modules_to_save, bias), or for a base model that was changed when the training began (PiSSA). Each
is refused by its name, and so is a key that is not known here, unless its value switches it off.

target_modules may be a regular expression. It is not run (some run for ever); which layers have an
adapter is said by the tensors themselves. A list of names is compared with them.

Left out: adapters of embeddings, heads and experts, weights in other formats than safetensors.

vLLM: vllm/lora/peft_helper.py, lora_model.py (V1); vllm/lora/peft_helper.py, models.py (V0).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as brief
from typing import Any, NamedTuple

from torch import Tensor

from nanoserve.models.checkpoint import (
    FLAG,
    INT32,
    OBJECT,
    TEXT,
    Rule,
    check_is_file,
    list_of,
    number,
    read_json,
    read_key,
    whole,
)
from nanoserve.models.weight_files import (
    TensorInfo,
    check_dtype,
    listing,
    read_headers,
    read_slices,
)

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor: PEFT's own two modules around the model
Shape = tuple[int, int]  # outputs, inputs

_NAMES = list_of(TEXT)
_INTS = list_of(whole(0, INT32))
NAMES = Rule("a string or a list of strings", lambda v: TEXT.accepts(v) or _NAMES.accepts(v))
LAYERS = Rule("an int or a list of ints", lambda v: whole(0, INT32).accepts(v) or _INTS.accepts(v))
ALPHA = number(-1e6, 1e6, "a number from -1e6 to 1e6")
# The keys of adapter_config.json that are used.
KEYS = {
    "r": whole(1, 2**16),
    "lora_alpha": ALPHA,
    "use_rslora": FLAG,
    "target_modules": NAMES,
    "exclude_modules": NAMES,
    "layers_to_transform": LAYERS,
    "rank_pattern": OBJECT,  # its ranks are those of the tensors
    "alpha_pattern": OBJECT,
    "init_lora_weights": Rule("true, false or a string", lambda v: isinstance(v, (bool, str))),
}
# Keys that change nothing when the adapter is used.
IGNORED = frozenset(
    {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version"}
    | {"revision", "task_type", "lora_dropout", "bias", "qalora_group_size", "runtime_config"}
    | {"loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core"}
    | {"layers_pattern", "velora_config", "ensure_weight_tying"}
)
# What else a key asks for, if it has a value.
REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "a bias of lora_B",
    "modules_to_save": "whole modules beside A and B",
    "trainable_token_indices": "embeddings of its own",
    "target_parameters": "adapters of parameters, as those of experts",
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "layer_replication": "layers that are used several times",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "a router of adapters (Arrow)",
    "fan_in_fan_out": "transposed weights (GPT-2's Conv1D)",
    "megatron_config": "Megatron's layers",
}
TASKS = (None, "CAUSAL_LM", "FEATURE_EXTRACTION")
# Of init_lora_weights: these change the base model when the training begins.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class LoRAWeights(NamedTuple):
    """The adapter of one matrix W [out, in]: W + scaling * B A, as it stands in the file."""

    lora_a: Tensor  # [rank, in]
    lora_b: Tensor  # [out, rank]
    scaling: float


LoRAModel = dict[str, LoRAWeights]  # name of the matrix, "model.layers.0.mlp.up_proj" -> adapter


class AdapterFiles(NamedTuple):
    """A checked adapter, no weight read yet."""

    file: Path
    scalings: dict[str, float]  # of each matrix that it adapts
    stat: tuple[int, ...]  # of the file, to notice that it has changed

    def load(self) -> LoRAModel:
        """Read the weights. Raises ValueError if the file is damaged, or another one by now, or if
        a number is none."""
        if self.stat != _stat(self.file):
            raise ValueError(
                f"{self.file} has changed since it was checked. Load the adapter again, under a "
                "new lora_int_id."
            )
        tensors = with_prefix({name: source[:] for name, source in read_slices(self.file)})
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise ValueError(
                    f"{name} in {self.file} holds a number that is NaN or infinite. Save the "
                    "adapter again, and load it under a new lora_int_id."
                )
        return {
            name: LoRAWeights(
                tensors[f"{PREFIX}{name}.lora_A.weight"],
                tensors[f"{PREFIX}{name}.lora_B.weight"],
                scaling,
            )
            for name, scaling in self.scalings.items()
        }


def read_adapter(lora_path: str, shapes: Mapping[str, Shape], max_lora_rank: int) -> AdapterFiles:
    """Check the adapter in a folder, for a model with linear layers of these shapes. Raises
    ValueError, which names the file, for what is missing, damaged, not supported or too large."""
    folder = Path(lora_path).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"lora_path {brief(lora_path)} is not a folder on this machine. Give one with "
            f"{CONFIG_FILE} and {WEIGHTS_FILE} (huggingface_hub.snapshot_download makes one of an "
            "adapter on the hub)."
        )
    folder = folder.absolute()  # it is read again later, perhaps from another working directory
    file = folder / WEIGHTS_FILE
    for each in (folder / CONFIG_FILE, file):
        if not os.path.lexists(each):
            raise ValueError(
                f"{folder} has no {each.name}: not the folder of a PEFT adapter. (Weights are read "
                "from safetensors only; PEFT's save_pretrained writes them.)"
            )
    check_is_file(file)
    stat = _stat(file)
    config = read_config(folder / CONFIG_FILE)
    headers = with_prefix(read_headers([file]))
    names = check_tensors(headers, shapes, max_lora_rank, file)
    check_targets(names, config, shapes, file)
    ranks = {name: headers[f"{PREFIX}{name}.lora_A.weight"].shape[0] for name in names}
    if not config["rank_pattern"] and (others := set(ranks.values()) - {config["r"]}):
        raise ValueError(
            f"{file} has matrices of rank {min(others)}, and r is {config['r']} in {CONFIG_FILE}. "
            "Do the two files belong together?"
        )
    return AdapterFiles(file, {name: _scaling(config, name, ranks[name]) for name in names}, stat)


def _stat(file: Path) -> tuple[int, ...]:
    """What changes when a file is written or replaced; all zeros if there is none."""
    try:
        found = os.stat(file)
    except OSError:
        return (0, 0, 0)
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_config(file: Path) -> dict[str, Any]:
    """The keys of adapter_config.json that are used, checked. Raises ValueError, which names the
    key, for a value that is not allowed, and for what is not supported."""
    given = read_json(file)
    if (kind := given.get("peft_type")) != "LORA":
        raise ValueError(f"{file}: peft_type is {brief(kind)}; allowed: 'LORA'.")
    if (task := given.get("task_type")) not in TASKS:
        allowed = "CAUSAL_LM, FEATURE_EXTRACTION (vectors) or null"
        raise ValueError(f"{file}: task_type is {brief(task)}; allowed: {allowed}.")
    if (bias := given.get("bias", "none")) not in (None, "none"):
        raise ValueError(f"{file}: bias is {brief(bias)}; allowed: 'none'. {ADVICE}")
    for key, value in given.items():
        if key in KEYS or key in IGNORED or value in (None, False, [], {}):
            continue
        what = REFUSED.get(key, "something that is not known here")
        raise ValueError(f"{file}: {key} asks for {what}, which is not supported. {ADVICE}")
    config = {key: read_key(given, key, None, file, KEYS) for key in KEYS}
    for key in ("r", "lora_alpha", "target_modules"):
        if config[key] is None:
            raise ValueError(f"{file} has no '{key}', which a LoRA adapter must name.")
    init = config["init_lora_weights"]
    if isinstance(init, str) and init.lower().startswith(CHANGES_BASE):
        raise ValueError(
            f"{file}: init_lora_weights is {brief(init)}, which changed the base model when the "
            "training began. Convert the adapter with PEFT's "
            "path_initial_model_for_weight_conversion."
        )
    for pattern, rule in (("rank_pattern", KEYS["r"]), ("alpha_pattern", ALPHA)):
        for key, value in (config[pattern] or {}).items():
            if not key.replace(".", "").isidentifier():
                allowed = "the name of a module, or its last parts"
                raise ValueError(f"{file}: {pattern} has {brief(key)}; allowed: {allowed}.")
            read_key({key: value}, key, None, f"{file}, {pattern}", {key: rule})
    return config


ADVICE = "Merge the adapter into the checkpoint (peft: merge_and_unload) and give that as model."


def _is_part(name: str, end: str) -> bool:
    """Is `end` all of a module's name, or its last parts? PEFT's rule."""
    return name == end or name.endswith(f".{end}")


def _scaling(config: Mapping[str, Any], name: str, rank: int) -> float:
    """What B A is multiplied by: alpha / r; with rank-stabilized LoRA (arXiv 2312.03732)
    alpha / sqrt(r)."""
    patterns: Mapping[str, float] = config["alpha_pattern"] or {}
    own = [value for end, value in patterns.items() if _is_part(name, end)]
    alpha = (own or [config["lora_alpha"]])[0]
    return float(alpha / math.sqrt(rank) if config["use_rslora"] else alpha / rank)


def with_prefix(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the names of a whole model: an adapter that was trained on a body (AutoModel),
    as those of embeddings are, has "layers.0" where the whole model has "model.layers.0"."""
    body = f"{PREFIX}layers."
    return {name.replace(body, f"{PREFIX}model.layers."): each for name, each in tensors.items()}


def check_tensors(
    headers: Mapping[str, TensorInfo], shapes: Mapping[str, Shape], max_lora_rank: int, file: Path
) -> list[str]:
    """The matrices that the tensors adapt. Raises ValueError unless each has an A and a B of the
    right shapes, of floating-point numbers."""
    names: dict[str, None] = {}
    for tensor in headers:
        name, _, part = tensor.removeprefix(PREFIX).partition(".lora_")
        if not tensor.startswith(PREFIX) or part not in ("A.weight", "B.weight"):
            raise ValueError(
                f"{file} has {brief(tensor)}, which is no tensor of a LoRA adapter. {ADVICE}"
            )
        if name not in shapes:
            raise ValueError(f"{file} adapts {brief(name)}: {_why_not(name, shapes)}. {ADVICE}")
        names[name] = None
    if not names:
        raise ValueError(f"{file} is an adapter without tensors. Save it again.")
    for name in names:
        a, b = (f"{PREFIX}{name}.lora_{part}.weight" for part in "AB")
        if a not in headers or b not in headers:
            raise ValueError(f"{file} lacks {b if a in headers else a}. Save it again.")
        (num_outputs, num_inputs), rank = shapes[name], (*headers[a].shape, 0)[0]
        for tensor, expected in ((a, (rank, num_inputs)), (b, (num_outputs, rank))):
            if headers[tensor].shape != expected:
                raise ValueError(
                    f"{tensor} in {file} has shape {headers[tensor].shape}, expected {expected}. "
                    "Is the adapter one of this model?"
                )
            check_dtype(tensor, headers[tensor])
        if not 1 <= rank <= max_lora_rank:
            raise ValueError(
                f"{file}: {name} has rank {rank}; allowed by max_lora_rank: 1 to {max_lora_rank}."
            )
    return list(names)


def _why_not(name: str, shapes: Mapping[str, Shape]) -> str:
    """Why the model has no adapter for this matrix: the end of a sentence."""
    if ".experts" in name:
        return "adapters of experts are not supported"
    if _is_part(name, "embed_tokens") or _is_part(name, "lm_head"):
        return "adapters of embeddings and heads are not supported"
    kinds = dict.fromkeys(each.rpartition(".")[2] for each in shapes)
    return f"the model has no such linear layer (it has {', '.join(kinds)} in its layers)"


def check_targets(
    names: list[str], config: Mapping[str, Any], shapes: Mapping[str, Shape], file: Path
) -> None:
    """Raise ValueError if the config names layers that have no adapter in the file."""
    targets, excluded = config["target_modules"], config["exclude_modules"] or []
    if isinstance(targets, str) or isinstance(excluded, str):  # regular expressions
        return
    chosen = config["layers_to_transform"]
    chosen = [chosen] if isinstance(chosen, int) else chosen
    expected = [
        name
        for name in shapes
        if any(_is_part(name, end) for end in targets)
        and not any(_is_part(name, end) for end in excluded)
        and (not chosen or any(f".{layer}." in name for layer in chosen))
    ]
    if missing := [name for name in expected if name not in set(names)]:
        raise ValueError(
            f"{file} lacks adapters of {listing(missing)}, which {CONFIG_FILE} names. Is the "
            "download complete?"
        )
