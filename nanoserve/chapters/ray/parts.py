"""What does Ray change in the engine? Who starts the ranks: the executor."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from nanoserve.config import EngineConfig


@dataclass(frozen=True)
class RayConfig(EngineConfig):
    # Who starts the ranks. mp: this process; ray: a Ray cluster, as actors.
    distributed_executor_backend: Literal["mp", "ray"] = "mp"

    @property
    def executor_cls(self) -> Any:
        """For distributed.make_executor. Raises ModuleNotFoundError without Ray."""
        return import_ray("executor").RayDistributedExecutor


def import_ray(name: str) -> Any:
    """A module of this chapter that imports Ray. Raises ModuleNotFoundError, which says what to
    install."""
    try:
        return import_module(f"nanoserve.chapters.ray.{name}")
    except ModuleNotFoundError as error:
        message = f'Ray is not installed ({error}): pip install "nanoserve[ray]".'
        raise ModuleNotFoundError(message, name=error.name) from error
