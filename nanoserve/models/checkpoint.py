"""What may the JSON files of a checkpoint say?

A checkpoint comes from somebody else, and may be damaged or made to do harm. So nothing that it
says is used before it is checked. A file must be a regular file of bounded size, and every key that
is used has a type and a range (KEYS). A value that is not allowed is an error that names it:

    config.json   {"num_hidden_layers": 1000000000, ...}
    KEYS          "num_hidden_layers": an int from 1 to 1000
    ValueError    llama/config.json: num_hidden_layers is 1000000000; allowed: an int from 1 to 1000

A key is checked when it is read, so keys of other families of models may say what they like. (Where
the code of transformers reads them, COMMON_KEYS are checked before.) null counts as a missing key.
The ranges are wider than those of any known model; they keep the arithmetic of sizes within 64
bits. What the sizes mean for memory is checked where they are used: models/loader.py compares them
with the files, before a tensor is made.

Nothing in this module allocates a tensor, runs code of a checkpoint, or follows a name to another
folder. (A file may be a symbolic link to a regular file: in the cache of the Hugging Face hub all
files are.)

vLLM: vllm/transformers_utils/config.py (V0 and V1), which leaves the checks to transformers.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from reprlib import repr as brief
from typing import Any, NamedTuple

MAX_CONFIG_BYTES = 2**24
MAX_INDEX_BYTES = 2**26  # the largest known index, of a model of 10**12 weights, has about 2**24
MAX_NESTING = 64  # lists and objects in each other; what copies or sends them is recursive
INT32 = 2**31 - 1


# transformers imports its parts when they are used. Two threads must not do this at once: hold this
# lock around what imports and reads.
transformers_lock = threading.Lock()


class Rule(NamedTuple):
    """What one key may say."""

    allowed: str  # in words
    accepts: Callable[[Any], bool]


def whole(least: int, most: int) -> Rule:
    """An int in a range. (True and 4.0 are none.)"""
    return Rule(
        f"an int from {least} to {most}",
        lambda value: type(value) is int and least <= value <= most,
    )


def number(least: float, most: float, words: str) -> Rule:
    """A number in a range, which `words` say. NaN is in no range."""
    return Rule(words, lambda value: type(value) in (int, float) and least <= value <= most)


def one_of(*values: str) -> Rule:
    """One of a few strings."""
    return Rule(" or ".join(map(repr, values)), lambda value: value in values)


def list_of(rule: Rule, least: int = 0) -> Rule:
    """A list of `least` or more values, of which each follows `rule`."""
    words = f"a list{' of at least one' * bool(least)}, each {rule.allowed}"
    return Rule(
        words,
        lambda value: (
            isinstance(value, list) and len(value) >= least and all(map(rule.accepts, value))
        ),
    )


FLAG = Rule("true or false", lambda value: isinstance(value, bool))
TEXT = Rule("a string that is not empty", lambda value: isinstance(value, str) and value != "")
OBJECT = Rule("an object, {...}", lambda value: isinstance(value, dict))
SIZE, COUNT = whole(1, 2**22), whole(1, 2**16)
EXPERTS = whole(1, 2**16)
LENGTH = whole(1, INT32)  # in tokens
POSITIVE = number(sys.float_info.min, 1e9, "a number more than 0, up to 1e9")
FACTOR = number(1, 1e6, "a number from 1 to 1e6")
DTYPES = ("float32", "bfloat16", "float16", "float64")
DTYPE = one_of(*DTYPES, *(f"torch.{name}" for name in DTYPES))
_INT = Rule("an int", lambda value: type(value) is int)
TOKEN_IDS = Rule("an int or a list of ints", lambda v: _INT.accepts(v) or list_of(_INT).accepts(v))

# Every key of config.json that is used, by this package's own models at least.
KEYS = {
    "architectures": list_of(TEXT),
    "vocab_size": LENGTH,
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": whole(1, 1000),
    "num_attention_heads": COUNT,
    "num_key_value_heads": COUNT,
    "head_dim": COUNT,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": number(sys.float_info.min, 1, "a number more than 0, up to 1"),
    "tie_word_embeddings": FLAG,
    "dtype": DTYPE,
    "torch_dtype": DTYPE,
    "eos_token_id": TOKEN_IDS,
    "hidden_act": TEXT,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    # embeddings
    "is_matryoshka": FLAG,
    "matryoshka_dimensions": list_of(SIZE, least=1),
    "is_causal": FLAG,
    "pad_token_id": whole(-1, INT32),
    # sliding windows
    "use_sliding_window": FLAG,
    "sliding_window": LENGTH,
    "max_window_layers": whole(0, INT32),
    "layer_types": list_of(one_of("full_attention", "sliding_attention"), least=1),
    # mixtures of experts
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS,
    "moe_intermediate_size": SIZE,
    "norm_topk_prob": FLAG,
    "decoder_sparse_step": COUNT,
    "mlp_only_layers": list_of(whole(0, INT32)),
    # rotary embedding: beside each other, or in rope_parameters or rope_scaling
    "rope_parameters": OBJECT,
    "rope_scaling": OBJECT,
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": number(1.001, 1e15, "a number more than 1, up to 1e15"),
    "partial_rotary_factor": number(sys.float_info.min, 1, "a number more than 0, up to 1"),
    "original_max_position_embeddings": whole(2, INT32),
    "factor": FACTOR,
    "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "beta_fast": POSITIVE,
    "beta_slow": POSITIVE,
    "attention_factor": POSITIVE,
    "mscale": number(0, 1e6, "a number from 0 to 1e6"),
    "mscale_all_dim": number(0, 1e6, "a number from 0 to 1e6"),
    "truncate": FLAG,
    "short_factor": list_of(POSITIVE, least=1),
    "long_factor": list_of(POSITIVE, least=1),
}
# Names that older families use for the key at the left.
KEY_ALIASES = {
    "hidden_size": ("n_embd", "dim"),
    "intermediate_size": ("n_inner", "ffn_dim", "hidden_dim"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "max_position_embeddings": ("n_positions",),
}
# model_type -> what transformers takes for keys that config.json lacks, where it differs from what
# the other families have.
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen3": {"head_dim": 128},
}
# Keys that mean the same in every family of transformers that has them. Those that from_folder of
# ModelConfig reads are not among them, because they are checked for every family. Nor is
# layer_types: other families have layers of other types, and transformers checks their names.
COMMON_KEYS = (
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)
# Where other families write 0 for "none", or a list with a value for each layer.
MAY_BE_OFF = frozenset(
    {"sliding_window", "num_experts", "num_local_experts", "num_experts_per_tok"}
    | {"moe_intermediate_size"}
)
# Keys under which a checkpoint says that its weights are not numbers, but codes for numbers.
QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")


def read_key(
    config: Mapping[str, Any],
    key: str,
    default: Any,
    file: Path | str,
    rules: Mapping[str, Rule] = KEYS,
) -> Any:
    """config[key], or `default` if the key is missing or null. Raises ValueError, which names
    `file`, for a value that `rules` do not allow."""
    for name in (key, *KEY_ALIASES.get(key, ())):
        value = config.get(name)
        if value is None:
            continue
        if not rules[key].accepts(value):
            raise ValueError(
                f"{file}: {name} is {brief(value)}; allowed: {rules[key].allowed}. Correct the "
                "file, or copy it again."
            )
        return value
    return default


def read_required(
    config: Mapping[str, Any], key: str, file: Path | str, default: Any = None
) -> Any:
    """As read_key, for a key that every decoder-only model has. Raises ValueError if it is missing
    and there is no default."""
    value = read_key(config, key, default, file)
    if value is None:
        raise ValueError(
            f"{file} has no '{key}', which a decoder-only model ({read_architecture(config, file)})"
            " must name. Is this a causal language model, with positions that are learnt or "
            "rotary? Others (encoder-decoder, Mamba, ALiBi) can't run here; nanoserve/GUIDE.md, "
            "section Models, lists what can."
        )
    return value


def read_architecture(config: Mapping[str, Any], file: Path | str) -> str:
    """The class in transformers that config.json names first, or "(none)"."""
    names: list[str] = read_key(config, "architectures", [], file)
    return names[0] if names else "(none)"


def read_intermediate_size(config: Mapping[str, Any], file: Path | str) -> int:
    """The width of the MLP. GPT-2's family may leave it out: four times its n_embd."""
    four_times = 4 * read_required(config, "hidden_size", file) if "n_embd" in config else None
    size: int = read_required(config, "intermediate_size", file, four_times)
    return size


def read_head_dim(config: Mapping[str, Any], file: Path | str) -> int:
    """Dimensions of a head: hidden_size divided among the query heads, unless a key says more."""
    hidden = read_required(config, "hidden_size", file)
    heads = read_required(config, "num_attention_heads", file)
    head_dim: int = read_key(config, "head_dim", hidden // heads, file)
    if not head_dim:
        raise ValueError(
            f"{file}: num_attention_heads is {heads}; allowed with hidden_size {hidden} and "
            f"without head_dim: 1 to {hidden}."
        )
    return head_dim


def read_dtype(config: Mapping[str, Any], file: Path | str) -> str:
    """The type of the weights, such as "bfloat16": `dtype` of transformers 5, or `torch_dtype`."""
    dtype = read_key(config, "torch_dtype", "float32", file)
    dtype = read_key(config, "dtype", dtype, file)
    return str(dtype).removeprefix("torch.")


def check_common_keys(config: Mapping[str, Any], file: Path | str) -> None:
    """Raise ValueError, as read_key does, for a bad value of a key that means the same in every
    family; for models whose own code is not here."""
    for key in COMMON_KEYS:
        values = config.get(key)
        if key not in MAY_BE_OFF or not isinstance(values, list):
            values = [values]
        for value in values:
            if not (key in MAY_BE_OFF and type(value) is int and value == 0):
                read_key({key: value}, key, None, file)
    for place in ("rope_parameters", "rope_scaling"):  # one for each type of layer, as in Gemma 3
        for kind, rope in read_key(config, place, {}, file).items():
            if isinstance(rope, dict):
                for key in KEYS.keys() & rope.keys():
                    read_key(rope, key, None, f"{file}, {place}.{kind}")


def read_token_ids(config: Mapping[str, Any], key: str, file: Path | str) -> frozenset[int]:
    """config[key], an id, a list of ids or nothing, as a set. Raises ValueError as read_key does.
    The ids may be outside of the vocabulary."""
    value = read_key(config, key, [], file)
    return frozenset(value if isinstance(value, list) else [value])


def read_rope_parameters(hf: Mapping[str, Any], file: Path | str = "config.json") -> dict[str, Any]:
    """The rope settings of a config.json in one layout; config.json has one of two.

    transformers 5 writes `rope_parameters: {rope_theta, rope_type, ...}`. Earlier versions write
    `rope_theta` beside `rope_scaling: {type or rope_type, ...}`. Both give
    {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, ...}. Raises ValueError for a
    value that is not allowed.
    """
    place = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    given = read_key(hf, place, {}, file)
    if isinstance(given.get("full_attention"), dict):  # one for each type of layer, as in Gemma 3
        place, given = f"{place}.full_attention", given["full_attention"]
    where = f"{file}, {place}"
    rope = {key: read_key(given, key, None, where) if key in KEYS else given[key] for key in given}
    rope = {key: value for key, value in rope.items() if value is not None}
    old_name = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or old_name or "default"
    rope.setdefault("rope_theta", read_key(hf, "rope_theta", 10000.0, file))
    rope.setdefault("partial_rotary_factor", read_key(hf, "partial_rotary_factor", 1.0, file))
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        key = "original_max_position_embeddings"
        original = read_key(hf, key, rope.get(key), file)  # Phi-3 writes it at the top
        rope[key] = original or read_key(hf, "max_position_embeddings", None, file)
    return rope


def find_quantization(hf: Mapping[str, Any]) -> str | None:
    """How config.json says that the weights are quantized, such as "quantization_config (fp8)";
    None if it does not."""
    for key in QUANTIZATION_KEYS:
        if value := hf.get(key):
            method = value.get("quant_method") if isinstance(value, dict) else value
            return f"{key} ({method if isinstance(method, str) else 'no method named'})"
    return None


def check_is_file(file: Path) -> None:
    """Raise ValueError unless `file` is a regular file, or a link to one.

    A device or a pipe could be read for ever; a folder or a link to nothing cannot be read.
    """
    if not os.path.isfile(file):  # unlike Path.is_file, False for a name that is too long
        raise ValueError(
            f"{brief(str(file))} is not a regular file, nor a link to one (but a folder, a device, "
            "a pipe, or a link to nothing). Copy it again."
        )


def read_bytes(file: Path, most: int) -> bytes:
    """The content of a checkpoint's file. Raises ValueError, which names the file, for one that is
    not regular, has more than `most` bytes, or cannot be read."""
    check_is_file(file)
    try:
        with open(file, "rb") as stream:
            content = stream.read(most + 1)  # not its size, which may change
    except OSError as error:
        raise ValueError(f"{file} is not readable ({error}). Copy it again.") from error
    if len(content) > most:
        raise ValueError(f"{file} is not readable (it has more than {most} bytes). Copy it again.")
    return content


def read_json(file: Path, most_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a checkpoint's file. Raises ValueError, which names the file, for a file
    that is missing, not regular, larger than `most_bytes`, nested too deeply, or no JSON object."""
    if not os.path.lexists(file):
        raise ValueError(f"{file.parent} has no {file.name}: not a Hugging Face checkpoint folder.")
    return parse_json(file, read_bytes(file, most_bytes))


def parse_json(file: Path, content: bytes) -> dict[str, Any]:
    """The JSON object that this content of a file is. Raises ValueError as read_json does."""
    try:
        values = json.loads(content.decode("utf-8"))
        check_nesting(values)
    except RecursionError:
        raise ValueError(
            f"{file} is not readable JSON (nested too deeply). Copy it again."
        ) from None
    except ValueError as error:
        raise ValueError(f"{file} is not readable JSON ({error}). Copy it again.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} is not a JSON object but {brief(values)}. Copy it again.")
    return values


def check_nesting(values: Any) -> None:
    """Raise ValueError if more than MAX_NESTING lists and objects are in each other."""
    level = [values]
    for _ in range(MAX_NESTING):
        level = [
            child
            for each in level
            if isinstance(each, (dict, list))
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    if any(isinstance(each, (dict, list)) for each in level):
        raise ValueError(f"more than {MAX_NESTING} lists and objects in each other")


def is_plain_name(name: object, ending: str) -> bool:
    """True for the name of a file of the same folder, on every system: no path, no drive."""
    return (
        isinstance(name, str)
        and name.endswith(ending)
        and name != ending
        and not set(name) & set("/\\:")
        and name.isprintable()
    )
