"""Shared by all tests: tiny real checkpoints, made by transformers, and the demo model."""

from __future__ import annotations

import os
import re

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads anything
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads leave the cores alone
if "PYTEST_XDIST_WORKER" in os.environ:  # several processes share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from nanoserve import LLM

# The same examples in every run, so that a change and not chance decides whether tests pass.
# `pytest --hypothesis-profile explore` looks for new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile("repeatable")


def wants_gpu(config: pytest.Config) -> bool:
    """Does the command say `-m gpu`? (`-m "not gpu"` does not.)"""
    return bool(re.search(r"(?<!not )\bgpu\b", config.option.markexpr))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes `-n auto` (setup.cfg) starts: one a core, up to four. On a GPU none: its
    memory is for one engine at a time."""
    return 0 if wants_gpu(config) else min(4, os.cpu_count() or 1)


def pytest_configure(config: pytest.Config) -> None:
    """Ordinary tests run on the CPU, in float32, on every machine; `-m gpu` runs the others.

    On a CPU, Triton's interpreter runs the kernels; it must be told before Triton is imported.
    """
    if not wants_gpu(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests run only if `-m` names them. A test that needs a GPU and has none is skipped, and
    the skip says why."""
    if not re.search(r"\bslow\b", config.option.markexpr):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    reason = ""
    if not wants_gpu(config):
        reason = "needs a GPU: pytest -m gpu"
    elif os.environ.get("TRITON_INTERPRET", "0") != "0":
        reason = "TRITON_INTERPRET is set, so that no kernel would run on the GPU: unset it"
    elif any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            reason = f"no CUDA device: torch {torch.__version__} sees none on this machine"
    for item in items:
        if reason and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def demo_llm() -> Iterator[LLM]:
    """One engine on the demo model, for tests that leave it as they found it."""
    with LLM(num_kv_blocks=512, max_num_batched_tokens=2048) as llm:
        yield llm
        llm.engine.block_manager.check()


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_checkpoint("llama", num_hidden_layers=3, ...) -> folder of a small random checkpoint.

    The same arguments give the same folder. Weights are large enough that ties of logits are rare.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made: dict[str, Path] = {}

    def make(model_type: str, dtype: str = "float32", shards: int = 1, **overrides: object) -> Path:
        key = repr((model_type, dtype, shards, sorted(overrides.items(), key=str)))
        if key in made:
            return made[key]
        settings: dict[str, object] = {
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 112,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "eos_token_id": 1,
            "pad_token_id": 0,
            "bos_token_id": None,
        }
        config = AutoConfig.for_model(model_type, **{**settings, **overrides})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                std = 0.3 if parameter.dim() == 1 else 0.15
                noise = torch.randn_like(parameter) * std
                parameter.copy_(noise + 1 if "norm" in name else noise)
        folder = tmp_path_factory.mktemp(model_type)
        size = sum(p.numel() * 4 for p in model.parameters())
        limit = "5GB" if shards == 1 else f"{size // shards // 1000 + 40}KB"
        model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=limit)
        made[key] = folder
        return folder

    return make
