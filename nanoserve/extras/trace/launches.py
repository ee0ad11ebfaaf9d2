"""How many kernels does a step launch, and what does a graph replay? Shown without a GPU.

    list_launches(config, num_seqs)   the kernels of one decode step, in their order. The model is
                                      built on torch's meta device (shapes without contents), the
                                      launches of Triton's kernels are noted instead of made.
    launch_strip(title, ...)          the launches of one layer as a picture
    GraphRunner                       a ModelRunner for LLM(runner_cls=...) that records and replays
                                      decode steps on a CPU, as cuda_graph.py does on a GPU
    record_calls(llm)                 in which order an engine schedules, launches and updates
    overlap_scheme(title, ...)        what CPU and GPU do at which time, with overlapped steps and
                                      without: a scheme with stated times, no measurement

    >>> list_launches(DUMMY_MODELS["qwen3-0.6b"], num_seqs=256).count("add_rms_norm_kernel")
    56

Left out: how long a kernel takes. That is measured on a GPU (nanoserve/bench).

vLLM: counts its compiled pieces and graphs in vllm/compilation/counter.py (V1).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanoserve import LLM
from nanoserve.attention import StepMetadata
from nanoserve.bench.roofline import ModelCosts
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.cuda_graph import Forward
from nanoserve.extras.trace.style import IDLE, LINE, box, label, panels, show, tint
from nanoserve.kernels.selector import make_layer_config
from nanoserve.model_runner import ModelRunner, StepInputs
from nanoserve.models.registry import build_model
from nanoserve.parallel import ParallelState

META = torch.device("meta")
BLOCK_SIZE = 16
H100 = (90, 132, 227 * 1024)  # capability, multiprocessors, bytes of shared memory of a program


class OperatorLog(TorchDispatchMode):
    """Notes PyTorch's operators that compute ("aten.linear.default"): all but views, and memory
    without contents."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        inputs = {_storage(tensor) for tensor in args if isinstance(tensor, Tensor)}
        outputs = output if isinstance(output, (list, tuple)) else [output]
        is_view = all(_storage(tensor) in inputs for tensor in outputs)
        is_written = any(
            given.alias_info is not None and given.alias_info.is_write
            for given in function._schema.arguments
        )
        if (is_written or not is_view) and "empty" not in str(function):
            self.names.append(str(function))
        return output


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _NotedKernel:
    """Takes the place of a Triton kernel: kernel[grid](...) notes its name."""

    def __init__(self, name: str, names: list[str]) -> None:
        self.name, self.names = name, names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.names.append(self.name)


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of what stands in a config.json."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(dict(config)), "utf-8")
        return ModelConfig.from_folder(Path(folder))


def list_launches(
    config: Mapping[str, Any], num_seqs: int = 1, context: int = 1024, custom_ops: str = "all"
) -> list[str]:
    """What the forward pass of one decode step launches on an H100: names of kernels, in order.

    `config`: a config.json, such as one of bench/workload.py's DUMMY_MODELS. `context`: tokens of
    each sequence. `custom_ops`: an option of LLM; "none" is plain PyTorch between the products.
    Sampling is left out. Raises ImportError where there is no Triton (it exists on Linux only).
    """
    from nanoserve.kernels import attention_triton, fused_triton

    layer_config = make_layer_config(
        META, torch.bfloat16, ParallelState(), attention_triton.TritonBackend(), custom_ops
    )
    model = build_model(read_config(config), context, layer_config)
    caches = [spec.allocate(1, BLOCK_SIZE, torch.bfloat16, META) for spec in model.kv_cache_specs()]
    ids = torch.zeros(num_seqs, dtype=torch.int64, device=META)
    shapes = ((num_seqs, -(-context // BLOCK_SIZE)), (num_seqs + 1,), (num_seqs,))
    tables = [torch.zeros(shape, dtype=torch.int32, device=META) for shape in shapes]
    metadata = StepMetadata(ids, *tables)
    metadata = layer_config.attention.plan(metadata, BLOCK_SIZE, torch.bfloat16)
    log = OperatorLog()
    gpu = attention_triton.GpuInfo(*H100)
    with ExitStack() as stack:
        patch = mock.patch.object(attention_triton, "get_gpu_info", return_value=gpu)
        stack.enter_context(patch)
        for module in (attention_triton, fused_triton):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                noted = _NotedKernel(name, log.names)
                stack.enter_context(mock.patch.object(module, name, noted))
        stack.enter_context(torch.inference_mode())
        stack.enter_context(log)
        model(ids, ids, caches, metadata)
    return [name.removeprefix("aten.").split(".")[0].strip("_") for name in log.names]


def decode_cost(config: Mapping[str, Any], num_seqs: int, context: int) -> dict[str, float]:
    """What one decode step of a model in bfloat16 must do: launches, megabytes (1e6) of weights and
    of KV cache to read, GFLOP to compute. The formulas are bench/roofline.py's."""
    costs = ModelCosts.of(read_config(config), itemsize=2)
    step = costs.step(num_seqs, num_seqs, num_seqs * context, num_seqs * context)
    kv_bytes = costs.itemsize * costs.kv_numbers * num_seqs * context
    return {
        "launches": len(list_launches(config, num_seqs, context)),
        "MB of weights": (step.num_bytes - kv_bytes) / 1e6,
        "MB of KV cache": kv_bytes / 1e6,
        "GFLOP": step.operations / 1e9,
    }


def one_layer(names: list[str]) -> list[str]:
    """The launches of the second layer among all of a model, from its first product on. A layer has
    four products."""
    products = [place for place, name in enumerate(names) if name == "linear"]
    return names[products[4] : products[8]]


PRODUCTS = ("qkv", "o", "gate, up", "down")
SHORT_NAMES = {
    "paged_attention_kernel": "attention",
    "merge_splits_kernel": "merge splits",
    "store_kv_kernel": "store K,V",
    "add_rms_norm_kernel": "add, norm",
    "rope_and_store_kernel": "norm, RoPE, store",
    "silu_and_mul_kernel": "silu, mul",
    "fused_rms_norm": "norm",
    "addcmul": "mul, add",
}
KINDS = {"matrix products": "#56B4E9", "attention": "#E69F00", "small work between them": "#EDEDED"}


def launch_strip(title: str, layers: Mapping[str, list[str]]) -> None:
    """A line of boxes for each entry: the launches of one layer, as one_layer gives them."""
    from matplotlib.patches import Patch

    axes = panels(len(layers), 1.1 * len(layers) + 0.75, title)
    width = max(len(names) for names in layers.values())
    for ax, (name, launches) in zip(axes, layers.items(), strict=True):
        products = iter(PRODUCTS)
        for place, launch in enumerate(launches):
            kind = "small work between them"
            if launch == "linear":
                launch, kind = next(products), "matrix products"
            elif launch in ("paged_attention_kernel", "merge_splits_kernel"):
                kind = "attention"
            text = SHORT_NAMES.get(launch, launch.replace("_", " "))
            box(ax, place + 0.03, 0, 0.94, 1, facecolor=KINDS[kind])
            label(ax, place + 0.5, 0.5, text.replace(" ", "\n"), 7)
        ax.set(xlim=(0, width), ylim=(-0.05, 1.05))
        ax.set_title(f"{name}: {len(launches)} launches", loc="left", fontsize=9.5, weight="bold")
        ax.axis("off")
    handles = [Patch(facecolor=shade, edgecolor=LINE, label=kind) for kind, shade in KINDS.items()]
    legend = {"handles": handles, "ncols": 3, "frameon": False, "fontsize": 8.5}
    axes[0].get_figure().legend(loc="outside lower left", **legend)
    show()


# -- graphs on a CPU --


class TapeGraph:
    """cuda_graph.Graph without a GPU: a replay runs the very callable that was recorded, on the
    tensors that it was recorded with. So it reads the addresses of the recording, as a CUDA graph
    does, and whatever stands there now."""

    def __init__(self, shared: object | None = None) -> None:
        self.shared = shared or object()

    def capture(self, forward: Forward) -> Tensor:
        self._forward = forward
        self._output = forward().clone()
        return self._output

    def replay(self) -> None:
        self._output.copy_(self._forward())


class GraphRunner(ModelRunner):
    """Runs decode steps as TapeGraphs: LLM(runner_cls=GraphRunner).

    `replays` has a line for each step: (sequences, size of the graph or None, address of the
    tokens).
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, backend: Any) -> None:
        super().__init__(config, model_config, backend, graph_cls=TapeGraph)
        self.replays: list[tuple[int, int | None, int]] = []

    def forward(self, inputs: StepInputs) -> Tensor:
        address = inputs.tensors.input_ids.data_ptr()
        size = inputs.graph_shape and inputs.graph_shape.num_seqs
        self.replays.append((len(inputs.arrays.seq_lens), size, address))
        return super().forward(inputs)


# -- overlapped steps --


def record_calls(llm: LLM) -> list[str]:
    """From now on, the engine's calls are appended to the list that this returns: "schedule 1",
    "launch 1", "update 1" and so on, in their order."""
    engine, calls = llm.engine, list[str]()

    def record(owner: Any, method: str, word: str) -> None:
        original, numbers = getattr(owner, method), iter(range(1, 1_000_000))

        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append(f"{word} {next(numbers)}")
            return original(*args, **kwargs)

        setattr(owner, method, run)

    record(engine.scheduler, "schedule", "schedule")
    record(engine.executor.runner, "launch", "launch")
    record(engine.scheduler, "update_from_output", "update")
    return calls


def overlap_times(
    cpu_before: float, gpu: float, cpu_after: float, num_steps: int, is_overlapped: bool
) -> list[tuple[str, int, float, float]]:
    """(lane, step, start, end) of each piece of work. Lanes: "schedule", "GPU", "update".

    A plain step n + 1 is scheduled after the update of step n. An overlapped one is scheduled as
    soon as the CPU is free and step n is launched; its update waits for its tokens.
    """
    pieces: list[tuple[str, int, float, float]] = []
    cpu = device = 0.0  # when each of the two is free

    def on_cpu(lane: str, step: int, not_before: float, seconds: float) -> float:
        start = max(cpu, not_before)
        pieces.append((lane, step, start, start + seconds))
        return start + seconds

    ends: list[float] = []  # of the GPU's steps
    for step in range(num_steps):
        cpu = on_cpu("schedule", step, 0.0, cpu_before)
        start = max(device, cpu)
        device = start + gpu
        ends.append(device)
        pieces.append(("GPU", step, start, device))
        if not is_overlapped:
            cpu = on_cpu("update", step, device, cpu_after)
        elif step:
            cpu = on_cpu("update", step - 1, ends[step - 1], cpu_after)
    if is_overlapped:
        on_cpu("update", num_steps - 1, ends[-1], cpu_after)
    return pieces


def overlap_scheme(
    title: str, cpu_before: float = 1, gpu: float = 4, cpu_after: float = 1, num_steps: int = 5
) -> None:
    """Steps without and with overlap, one above the other: a lane for the CPU and one for the GPU.
    The three times are milliseconds of a step. Hatched: the GPU waits."""
    runs = {
        name: overlap_times(cpu_before, gpu, cpu_after, num_steps, is_overlapped)
        for name, is_overlapped in (("plain", False), ("overlapped", True))
    }
    axes = panels(2, 3.5, title, sharex=True)
    axes[0].set_xlim(0, max(piece[3] for pieces in runs.values() for piece in pieces) + 0.1)
    for ax, (name, pieces) in zip(axes, runs.items(), strict=True):
        _draw_two_lanes(ax, pieces)
        busy = [piece for piece in pieces if piece[0] == "GPU"]
        whole = busy[-1][3] - busy[0][2]
        text = f"{name}: between its first and last step, the GPU waits for "
        ax.set_title(
            text + f"{max(0.0, 1 - num_steps * gpu / whole):.0%} of the time",
            loc="left",
            fontsize=9.5,
        )
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    text = "time in ms; s1: schedule and prepare step 1, u1: its update"
    axes[-1].set_xlabel(text, fontsize=9)
    show()


def _draw_two_lanes(ax: Any, pieces: list[tuple[str, int, float, float]]) -> None:
    """The CPU above, the GPU below; the pieces of a step have one colour."""
    free_since: float | None = None
    for lane, step, start, end in pieces:
        y, shade = (0.0 if lane == "GPU" else 1.0), tint(str(step), 0.55)
        box(ax, start, y - 0.36, end - start, 0.72, facecolor=shade, edgecolor="white")
        text = f"step {step + 1}" if lane == "GPU" else f"{lane[0]}{step + 1}"
        label(ax, (start + end) / 2, y, text, 8)
        if lane == "GPU":
            if free_since is not None and start > free_since:
                style = {"facecolor": IDLE, "edgecolor": "white", "hatch": "....."}
                box(ax, free_since, -0.36, start - free_since, 0.72, **style)
            free_since = end
    ax.set_yticks([0, 1], ["GPU", "CPU"], fontsize=9)
    ax.set_ylim(-0.5, 1.5)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
