"""Which class runs which architecture?

ModelRegistry maps the architecture that config.json names to a class; `register` adds your own
(nanoserve/GUIDE.md has an example). Other architectures run through transformers_fallback.py, where
possible.

vLLM: vllm/model_executor/models/registry.py (V0 and V1).
"""

from __future__ import annotations

from typing import ClassVar

import torch

from nanoserve.layers import LayerConfig
from nanoserve.models.base import Model
from nanoserve.models.config import ModelConfig
from nanoserve.models.families import FAMILY


class ModelRegistry:
    """Which class runs which architecture. Holds classes only, nothing of an engine."""

    CLASSES: ClassVar[dict[str, type[Model]]] = {cls.__name__: cls for cls in FAMILY}

    @classmethod
    def register(cls, architecture: str, model_cls: type[Model]) -> None:
        """Let `model_cls` run checkpoints whose config.json names `architecture`.

        A registered architecture gets the new class, in engines built from now on. Ranks in other
        processes use the class too, and must be able to import it: it may not be defined in the
        script itself. Raises TypeError for anything but a subclass of Model.
        """
        if not isinstance(model_cls, type) or not issubclass(model_cls, Model):
            raise TypeError(f"{model_cls!r} is no subclass of nanoserve.models.base.Model.")
        cls.CLASSES[architecture] = model_cls

    @classmethod
    def get(cls, architecture: str) -> type[Model] | None:
        """The class for an architecture; None if the architecture is not registered."""
        return cls.CLASSES.get(architecture)

    @classmethod
    def architectures(cls) -> list[str]:
        """All registered architectures, in order of registration."""
        return list(cls.CLASSES)


def build_model(config: ModelConfig, max_model_len: int, layer_config: LayerConfig) -> Model:
    """The model that config.json describes, its weights unfilled. Raises ValueError if the
    architecture is not registered."""
    model_cls = ModelRegistry.get(config.architecture)
    if model_cls is None:
        raise ValueError(
            f"architecture {config.architecture} is not supported; supported: "
            f"{', '.join(ModelRegistry.architectures())}."
        )
    with torch.device("cpu"):  # whatever set_default_device says
        return model_cls(config, max_model_len, layer_config)
