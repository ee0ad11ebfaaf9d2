"""Where may keys and values go, and how many bytes of them?

Two options of the engine, as in vLLM. The short one is for main memory alone:

    LLM(kv_offloading_size=4)                                    4 GiB, over all ranks
    LLM(kv_transfer_config={"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
                            "kv_connector_extra_config": {
                                "cpu_bytes_to_use": 4 * 2**30,
                                "eviction_policy": "arc",
                                "secondary_tiers": [{"type": "fs", "root_dir": "/data/kv"}]}})

With both, kv_offloading_size is cpu_bytes_to_use. The keys of kv_connector_extra_config are vLLM's:

    cpu_bytes_to_use   bytes of the CPU tier, over all ranks
    eviction_policy    "lru" or "arc" (policies.py)
    secondary_tiers    tiers below it: dicts with "type" ("fs": disk.py, "p2p": peer.py), and the
                       options of this type; with "module_path" the type is a class of yours
                       (base.SecondaryTierManager)
    block_size         tokens of an offloaded block; here always the engine's
    spec_name          CPUOffloadingSpec, or TieringOffloadingSpec for tiers below; not needed

Left out: vLLM's other connectors, and its keys that tune or extend it (ACCEPTED).

vLLM: vllm/config/kv_transfer.py KVTransferConfig, vllm/config/cache.py, vllm/config/vllm.py
_post_init_kv_transfer_config, vllm/v1/kv_offload/cpu/spec.py, tiering/spec.py (V1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanoserve.config import INT64, check_number, load_chapter
from nanoserve.exceptions import brief
from nanoserve.inputs import check_is_dict, parse_option

if TYPE_CHECKING:
    from nanoserve.config import EngineConfig

CONNECTORS = ("OffloadingConnector",)
# type of a tier below the CPU tier -> module of this folder, class
TIERS = {"fs": ("disk", "FileSystemTierManager"), "p2p": ("peer", "P2PSecondaryTierManager")}
ROLES = ("kv_producer", "kv_consumer", "kv_both")
EVICTION_POLICIES = ("lru", "arc")
SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")
EXTRA_KEYS = ("cpu_bytes_to_use", "eviction_policy", "secondary_tiers", "block_size", "spec_name")
# vLLM's other keys, with the values that change nothing here.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "kv_buffer_device": ("cpu", "cuda"),
    "kv_connector_module_path": (None,),
    "enable_permute_local_kv": (False,),
    "kv_load_failure_policy": ("recompute",),  # what could not be loaded is computed
}
EXTRA_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "store_threshold": (0, 1),
    "max_tracker_size": (),  # any
    "cache_policy_module_path": (None,),
    "spec_module_path": (None,),
}


@dataclass(frozen=True)
class KVTransferConfig:
    """The keys of kv_transfer_config. Raises ValueError or TypeError for what is not allowed."""

    kv_connector: str | None = None  # see CONNECTORS; None: no connector
    kv_role: str | None = None  # see ROLES
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    engine_id: str | None = None  # changes nothing here: a peer is known by its port

    @classmethod
    def read(cls, value: Any) -> KVTransferConfig | None:
        """From a dict, its JSON text, or a KVTransferConfig. None, {} and "" are none."""
        if isinstance(value, cls) or value is None:
            return value
        if isinstance(value, str) and value:
            value = parse_option("kv_transfer_config", value)
        if not value:
            return None
        check_is_dict("kv_transfer_config", value)
        known = [each.name for each in fields(cls)]
        given = drop_accepted("kv_transfer_config", value, known, ACCEPTED)
        return cls(**given)

    def __post_init__(self) -> None:
        """Check each key, then those that belong together."""
        check_choice("kv_connector", self.kv_connector, CONNECTORS)
        check_choice("kv_role", self.kv_role, ROLES)
        if self.kv_connector is not None and self.kv_role is None:
            raise ValueError(
                "kv_transfer_config has a kv_connector and no kv_role: give one of "
                f"{', '.join(ROLES)}."
            )
        if self.engine_id is not None and not isinstance(self.engine_id, str):
            raise TypeError(f"engine_id must be a string, got {brief(self.engine_id)}.")
        if not isinstance(self.kv_connector_extra_config, Mapping):
            extra = brief(self.kv_connector_extra_config)
            raise TypeError(f"kv_connector_extra_config must be a dict, got {extra}.")


@dataclass(frozen=True)
class OffloadingConfig:
    """What the two options together say about the tiers."""

    cpu_bytes_to_use: int  # over all ranks
    eviction_policy: str = "lru"
    secondary_tiers: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    kv_role: str = "kv_both"

    @classmethod
    def from_config(cls, config: EngineConfig) -> OffloadingConfig:
        """Raises ValueError or TypeError for what is not allowed, alone or together."""
        transfer = config.kv_transfer_config or KVTransferConfig()
        extra = transfer.kv_connector_extra_config
        name = "kv_connector_extra_config"
        extra = drop_accepted(name, extra, EXTRA_KEYS, EXTRA_ACCEPTED)
        num_bytes = extra.get("cpu_bytes_to_use")
        if config.kv_offloading_size is not None:
            num_bytes = int(config.kv_offloading_size * 2**30)
        if num_bytes is None:
            raise ValueError(
                f"kv_transfer_config has no cpu_bytes_to_use in {name}. Give it there, or set "
                "kv_offloading_size (GiB)."
            )
        check_number("cpu_bytes_to_use", num_bytes, int, 1, INT64, "1 to 2**63 - 1")
        policy = extra.get("eviction_policy", "lru")
        check_choice("eviction_policy", policy, EVICTION_POLICIES)
        check_choice("spec_name", extra.get("spec_name"), SPECS)
        if (size := extra.get("block_size")) not in (None, config.block_size):
            raise ValueError(
                f"block_size of {name} is {brief(size)}, and the engine's is {config.block_size}. "
                "Blocks are offloaded one by one: leave the first one out."
            )
        if not config.enable_prefix_caching:
            raise ValueError(
                "kv_offloading_size and kv_transfer_config keep blocks of the prefix cache, and "
                "enable_prefix_caching is False. Set it to True, or leave them out."
            )
        tiers = read_tiers(extra.get("secondary_tiers", ()))
        role = transfer.kv_role or "kv_both"
        return cls(num_bytes, policy, tiers, role)


def read_tiers(given: Any) -> tuple[Mapping[str, Any], ...]:
    """The tiers below the CPU tier, the next one first."""
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"secondary_tiers must be a list of dicts, got {brief(given)}.")
    for tier in given:
        if not isinstance(tier, Mapping) or "type" not in tier:
            raise TypeError(f"secondary_tiers must have dicts with a 'type', got {brief(tier)}.")
        if "module_path" not in tier:
            check_choice("type of secondary_tiers", tier["type"], TIERS)
            options = {key: value for key, value in tier.items() if key != "type"}
            load_tier(tier["type"], None).read_options(options)
    return tuple(dict(tier) for tier in given)


def load_tier(kind: str, module_path: str | None) -> Any:
    """The class of a type of tier; with module_path, your own of this name there. Raises ValueError
    if there is none."""
    if module_path is None:
        module, cls = TIERS[kind]
        return getattr(load_chapter("secondary_tiers", f"kv_offload.{module}"), cls)
    try:
        return getattr(import_module(module_path), kind)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"secondary_tiers: {brief(module_path)} has no class {brief(kind)} that can be "
            f"imported ({error})."
        ) from error


def check_choice(name: str, value: Any, allowed: Any) -> None:
    """Raise ValueError unless `value` is None or one of `allowed`."""
    if value is not None and (not isinstance(value, str) or value not in allowed):
        raise ValueError(f"{name} is {brief(value)}; allowed: {', '.join(allowed)}.")


def drop_accepted(
    what: str, given: Mapping[str, Any], known: Any, accepted: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The `known` keys of a dict. Raises ValueError for a key of vLLM with a value that asks for
    what is not here, TypeError for one that nobody knows."""
    for key, value in given.items():
        if key in known:
            continue
        if key not in accepted:
            near = get_close_matches(str(key), [*known, *accepted], n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Allowed: {', '.join(known)}."
            raise TypeError(f"{what} has the unknown key {brief(key)}.{hint}")
        if accepted[key] and value not in accepted[key]:
            raise ValueError(
                f"{key} of {what} is {brief(value)}, which is not here; allowed: "
                f"{', '.join(map(repr, accepted[key]))}. Leave it out."
            )
    return {key: value for key, value in given.items() if key in known}
