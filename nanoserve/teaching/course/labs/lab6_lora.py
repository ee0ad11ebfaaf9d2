"""Lab 6: many voices, one model.

LoRA leaves a matrix W as it is and adds two thin ones: y = x W^T + scaling * (x A^T) B^T. You write
it for a batch in which each token has its own adapter, put it into the engine as a subclass of
LinearMethod, and the demo model speaks like a pirate. Read the header of
nanoserve/chapters/lora/layers.py, and LinearMethod in nanoserve/layers.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

import nanoserve.demo
from nanoserve.chapters.lora.peft_helper import LoRAWeights, read_adapter
from nanoserve.layers import ColumnParallelLinear, LinearBase, LinearMethod, RowParallelLinear
from nanoserve.model_runner import ModelRunner


def add_adapter(y: Tensor, x: Tensor, adapter: LoRAWeights) -> Tensor:
    """y [num_tokens, out], which is x W^T, plus the adapter's part, for every token.

    x [num_tokens, in]; adapter.lora_a [rank, in], adapter.lora_b [out, rank], adapter.scaling.
    Never make a matrix [out, in] of A and B: two thin products are the point. Return a new tensor.
    """
    raise NotImplementedError("Task 6.1")


def add_adapters(y: Tensor, x: Tensor, adapters: Sequence[LoRAWeights], ids: Tensor) -> Tensor:
    """The same, for tokens with different adapters: ids [num_tokens] int64 is the index of each
    token's adapter, or -1: none. A loop over adapters is fine, one over tokens is not. An adapter
    that no token has is not multiplied by.
    """
    raise NotImplementedError("Task 6.2")


def merge(weight: Tensor, adapter: LoRAWeights) -> Tensor:
    """One matrix [out, in] that does what W [out, in] and the adapter do."""
    raise NotImplementedError("Task 6.3")


class MyLoRAMethod(LinearMethod):
    def __init__(self, base: LinearMethod) -> None:  # this one is written
        self.base = base

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        """self.base.apply, and the adapters of the layer, for every token.

        A layer may hold several matrices of the checkpoint (q, k and v), one below the other.
        layer.adapters is a list of (rows, adapter): `rows` is the slice of the outputs to which the
        adapter's matrix belongs.
        """
        raise NotImplementedError("Task 6.4")


def as_floats(adapter: LoRAWeights) -> LoRAWeights:  # this one, too: the file has 16 bits a number
    return LoRAWeights(adapter.lora_a.float(), adapter.lora_b.float(), adapter.scaling)


class MyRunner(ModelRunner):  # this one is written: every layer of the model with your method
    def load_model(self) -> Any:
        model: Any = super().load_model()
        kinds = (ColumnParallelLinear, RowParallelLinear)
        layers: Any = [
            (name, each) for name, each in model.named_modules() if isinstance(each, kinds)
        ]
        matrices = [matrix for name, layer in layers for matrix in layer.matrices(name)]
        shapes: Any = {matrix.name: matrix.shape for matrix in matrices}
        pirate = read_adapter(Path(nanoserve.demo.__file__).parent / "lora", shapes, 64)
        for name, layer in layers:
            own = [each for each in layer.matrices(name) if each.name in pirate]
            layer.adapters = [(each.rows, as_floats(pirate[each.name])) for each in own]
            layer.linear_method = MyLoRAMethod(layer.linear_method)
        return model
