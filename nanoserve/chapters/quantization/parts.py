"""What does quantization change in the engine?

    config   one option
    runner   builds the model with the linear method that the checkpoint, or the option, asks for

The chapter is always part of the stack, because a checkpoint may switch it on: its config.json has
a quantization_config. Without one, and without the option, the runner changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from nanoserve.chapters.quantization.base_config import (
    QuantizationConfig,
    get_quantization_config,
)
from nanoserve.config import EngineConfig
from nanoserve.layers import LayerConfig
from nanoserve.model_runner import ModelRunner
from nanoserve.models.base import Model
from nanoserve.models.registry import ModelRegistry


@dataclass(frozen=True)
class QuantizationOptions(EngineConfig):
    # fp8, int8 or int4: weights are quantized while they are read; None: as config.json says.
    quantization: str | None = None


class QuantizedRunner(ModelRunner):
    config: QuantizationOptions

    @cached_property
    def quantization(self) -> QuantizationConfig | None:
        """How the weights are stored; None: in floating point."""
        return get_quantization_config(self.config.quantization, self.model_config)

    def load_model(self) -> Model:
        """Raises ValueError for weights that cannot be quantized here."""
        is_own = ModelRegistry.get(self.model_config.architecture) is not None
        if self.quantization and (not is_own or self.config.model_impl == "transformers"):
            raise ValueError(
                f"{self.model_config.architecture} would run through transformers, where weights "
                "cannot be quantized. Use a checkpoint in floating point, without quantization."
            )
        return super().load_model()

    def build_model(self, max_model_len: int, layer_config: LayerConfig) -> Model:
        if self.quantization is not None:
            method = self.quantization.get_linear_method
            layer_config = replace(layer_config, linear_method=method)
        return super().build_model(max_model_len, layer_config)


PARTS = {"config_cls": QuantizationOptions, "runner_cls": QuantizedRunner}
