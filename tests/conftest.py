"""Shared by all tests. Ordinary ones run on the CPU, in float32, on every machine."""

from __future__ import annotations

import os
import re
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads anything
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads leave the cores alone
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

# The same examples in every run, so that a change and not chance decides whether tests pass.
# `pytest --hypothesis-profile explore` looks for new ones, `shrink` makes a failing one small.
PLAIN = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
PHASES = (Phase.explicit, Phase.generate)
settings.register_profile("plain", derandomize=True, phases=PHASES, **PLAIN)
settings.register_profile("shrink", derandomize=True, **PLAIN)
settings.register_profile("explore", **PLAIN)
settings.load_profile("plain")


def wants(config: pytest.Config, mark: str) -> bool:
    """Does the command say `-m mark`? (`-m "not mark"` does not.)"""
    return bool(re.search(rf"(?<!not )\b{mark}\b", config.option.markexpr))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes `-n auto` (setup.cfg) starts. On a GPU none: its memory is for one."""
    return 0 if wants(config, "gpu") else min(4, os.cpu_count() or 1)


def pytest_configure(config: pytest.Config) -> None:
    """On a CPU, Triton's interpreter runs the kernels, if it is told before Triton is imported."""
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # a job in the background; Ctrl-C is tested
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not wants(config, "gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests, and those that need a GPU, run only if `-m` names them."""
    left_out = [mark for mark in ("slow", "gpu") if not wants(config, mark)]
    skipped = [item for item in items if any(map(item.get_closest_marker, left_out))]
    config.hook.pytest_deselected(items=skipped)
    items[:] = [item for item in items if item not in skipped]


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_checkpoint("llama", num_hidden_layers=3, ...) -> folder of a small random checkpoint,
    made by transformers. The same arguments give the same folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made: dict[str, Path] = {}
    usual = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 112}
    usual |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    usual |= {"max_position_embeddings": 1024, "eos_token_id": 1, "pad_token_id": 0}
    usual |= {"bos_token_id": None}

    def make(model_type: str, dtype: str = "float32", shards: int = 1, **more: object) -> Path:
        key = repr((model_type, dtype, shards, sorted(more.items(), key=str)))
        if key in made:
            return made[key]
        config = AutoConfig.for_model(model_type, **{**usual, **more})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():  # large weights: ties of logits are rare
            for name, parameter in model.named_parameters():
                noise = torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15)
                parameter.copy_(noise + 1 if "norm" in name else noise)
        folder = tmp_path_factory.mktemp(model_type)
        size = sum(p.numel() * 4 for p in model.parameters())
        limit = "5GB" if shards == 1 else f"{size // shards // 1000 + 40}KB"
        model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=limit)
        made[key] = folder
        return folder

    return make
