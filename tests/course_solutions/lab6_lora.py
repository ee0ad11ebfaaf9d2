from pathlib import Path

import nanoserve.demo
from nanoserve.chapters.lora.peft_helper import LoRAWeights, read_adapter
from nanoserve.layers import ColumnParallelLinear, LinearMethod, RowParallelLinear
from nanoserve.model_runner import ModelRunner


def add_adapter(y, x, adapter):
    return y + x @ adapter.lora_a.T @ adapter.lora_b.T * adapter.scaling


def add_adapters(y, x, adapters, ids):
    y = y.clone()
    for number in set(ids.tolist()) - {-1}:
        rows = ids == number
        y[rows] = add_adapter(y[rows], x[rows], adapters[number])
    return y


def merge(weight, adapter):
    return weight + adapter.lora_b @ adapter.lora_a * adapter.scaling


class MyLoRAMethod(LinearMethod):
    def __init__(self, base):
        self.base = base

    def apply(self, layer, x, bias):
        y = self.base.apply(layer, x, bias)
        for rows, adapter in layer.adapters:
            y[:, rows] = add_adapter(y[:, rows], x, adapter)
        return y


def as_floats(adapter):
    return LoRAWeights(adapter.lora_a.float(), adapter.lora_b.float(), adapter.scaling)


class MyRunner(ModelRunner):
    def load_model(self):
        model = super().load_model()
        kinds = (ColumnParallelLinear, RowParallelLinear)
        layers = [(name, each) for name, each in model.named_modules() if isinstance(each, kinds)]
        matrices = [matrix for name, layer in layers for matrix in layer.matrices(name)]
        shapes = {matrix.name: matrix.shape for matrix in matrices}
        pirate = read_adapter(Path(nanoserve.demo.__file__).parent / "lora", shapes, 64)
        for name, layer in layers:
            own = [each for each in layer.matrices(name) if each.name in pirate]
            layer.adapters = [(each.rows, as_floats(pirate[each.name])) for each in own]
            layer.linear_method = MyLoRAMethod(layer.linear_method)
        return model
