"""What does quantization change in the engine?

    config   one option
    runner   builds the model with the linear method that the checkpoint, or the option, asks for

The chapter is always part of the stack, because a checkpoint may switch it on: its config.json has
a quantization_config. Without one, and without the option, the runner changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nanoserve.chapters.quantization.base_config import get_quantization_config
from nanoserve.config import EngineConfig
from nanoserve.model_runner import ModelRunner
from nanoserve.models.base import Model
from nanoserve.models.registry import ModelRegistry


@dataclass(frozen=True)
class QuantizationOptions(EngineConfig):
    # fp8, int8 or int4: weights are quantized while they are read; None: as config.json says.
    quantization: str | None = None


class QuantizedRunner(ModelRunner):
    config: QuantizationOptions

    def load_model(self) -> Model:
        """Raises ValueError for weights that cannot be quantized here."""
        config = get_quantization_config(self.config.quantization, self.model_config)
        if config is None:
            return super().load_model()
        is_own = ModelRegistry.get(self.model_config.architecture) is not None
        if not is_own or self.config.model_impl == "transformers":
            raise ValueError(
                f"{self.model_config.architecture} would run through transformers, where weights "
                "cannot be quantized. Use a checkpoint in floating point, without quantization."
            )
        plain = self.layer_config.linear_method
        self.layer_config = replace(self.layer_config, linear_method=config.get_linear_method)
        model = super().load_model()
        # The weights of another model, such as a drafter, are another matter.
        self.layer_config = replace(self.layer_config, linear_method=plain)
        return model
