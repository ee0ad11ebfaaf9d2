"""A CUDA device that is not there: real numbers, computed on the CPU, as late as CUDA may.

    with simulated_cuda() as device:
        LLM(device="cuda:0", attention_backend=device.backend)

*Late.* An operator on a "cuda" tensor goes into the queue of a stream, and runs only when the host
waits: for an event, a stream, .item(), a copy that is not asynchronous. Until then its result is
poison (NaN, or numbers far beyond any index). Pinned memory is read when a copy runs, not when it
is asked for. Streams run in any order that their events allow.

*Waits.* device.waits counts what made the host wait, and where. A copy from or to pageable memory
is one, and every operator whose result has a size that only its numbers tell.

*Graphs.* torch.cuda.graph records the queue. A replay runs it again on the addresses it was
recorded with, after everything that was allocated in a capture has been poisoned. A wait inside a
capture raises.

*Kernels.* Launches of Triton kernels are put into the queue, too, and Triton's interpreter runs
them, which takes a while. device.backend is the definition in their place.

Left out: several GPUs, memory that one stream frees and another gets, the time anything takes.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from traceback import extract_stack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map
from transformers import GenerationMixin  # noqa: F401 (now: its modules use torch.cuda's classes as types)
from triton.runtime.interpreter import InterpretedFunction

from nanoserve.attention import AttentionBackend, KVCache, StepMetadata
from nanoserve.kernels.quantized_cache import QuantizedReference

CUDA, META, CPU = torch.device("cuda", 0), torch.device("meta"), torch.device("cpu")
Task = Callable[[], object]


class CudaTensor(Tensor):
    """A tensor "on the GPU": `inner`, on the CPU, will have its numbers."""

    inner: Tensor
    device = CUDA
    is_cuda = True
    is_meta = False
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> CudaTensor:
        with torch.inference_mode(False):
            tensor = Tensor._make_wrapper_subclass(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=META,
            )
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of simulated_cuda()")

    def tolist(self) -> Any:
        return self.cpu().tolist()


def unwrap(value: Any) -> Any:
    return tree_map(lambda each: each.inner if isinstance(each, CudaTensor) else each, value)


def wrap(value: Any) -> Any:
    return tree_map(lambda each: CudaTensor(each) if isinstance(each, Tensor) else each, value)


def poison(tensor: Tensor) -> Tensor:
    """What nobody may read."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(torch.nan)
    return tensor.fill_(1 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max - 9)


class Stream:
    """Tasks, in their order."""

    def __init__(self, device: Simulator) -> None:
        self.device, self.tasks = device, deque[Task]()
        device.streams.append(self)

    def run_next(self) -> None:
        task = self.tasks.popleft()
        with torch.inference_mode(), _disable_current_modes():
            task()

    def wait_event(self, event: Event) -> None:
        self.tasks.append(event.reach())

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(Event(self.device).record(other))

    def synchronize(self) -> None:
        self.device.wait("stream", self)


class Event:
    """The end of a stream's queue, at the time of the record."""

    def __init__(self, device: Simulator) -> None:
        self.device, self.has_passed = device, [True]

    def record(self, stream: Stream | None = None) -> Event:
        self.stream, self.has_passed = stream or self.device.current[-1], [False]
        self.stream.tasks.append(partial(self.has_passed.__setitem__, 0, True))
        return self

    def reach(self) -> Task:
        """A task that ends when the stream has come here (and not to a later record)."""
        stream, has_passed = self.stream, self.has_passed

        def run() -> None:
            while not has_passed[0]:
                stream.run_next()

        return run

    def query(self) -> bool:
        return self.has_passed[0]

    def synchronize(self) -> None:
        if not self.query():
            self.device.note_wait("event")
            self.reach()()


class Graph:
    """What was put into the queue during a capture."""

    def __init__(self, device: Simulator) -> None:
        self.device, self.tasks, self.private = device, list[Task](), list[Tensor]()
        self.options: dict[str, Any] = {}  # of its capture

    def replay(self) -> None:
        self.device.launch(self.device.poison_pool)
        for task in self.tasks:
            self.device.launch(task)


class Backend(AttentionBackend):
    """The definition of attention, as one kernel: nothing of it is read before it runs."""

    name = "simulated"
    supports_cuda_graphs = True

    def __init__(self, device: Simulator) -> None:
        self.device = device

    def plan(self, metadata: StepMetadata, block_size: int, dtype: torch.dtype) -> StepMetadata:
        return metadata

    def store(self, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: StepMetadata) -> None:
        self.launch(store, key, value, kv_cache, metadata)

    def attend(
        self, query: Tensor, kv_cache: KVCache, metadata: StepMetadata, **options: Any
    ) -> Tensor:
        output = query.new_empty(*query.shape[:2], kv_cache[1].shape[-1])
        self.launch(partial(attend, **options), output, query, kv_cache, metadata)
        return output

    def launch(
        self, kernel: Any, x: Tensor, y: Tensor, caches: KVCache, meta: StepMetadata
    ) -> None:
        inner = {name: unwrap(tensor) for name, tensor in vars(meta).items()}
        self.device.launch(partial(kernel, *unwrap((x, y, caches)), replace(meta, **inner)))


def definition(kv_cache: KVCache) -> AttentionBackend:
    return QuantizedReference() if len(kv_cache) > 2 else AttentionBackend()


def store(key: Tensor, value: Tensor, kv_cache: KVCache, metadata: StepMetadata) -> None:
    kept = metadata.slot_mapping >= 0
    metadata = replace(metadata, slot_mapping=metadata.slot_mapping[kept])
    definition(kv_cache).store(key[kept], value[kept], kv_cache, metadata)


def attend(
    output: Tensor, query: Tensor, kv_cache: KVCache, metadata: StepMetadata, **options: Any
) -> None:
    """Of padding, nothing is written."""
    backend = definition(kv_cache)
    planned = backend.plan(metadata, kv_cache[0].shape[1], query.dtype)
    parts = [part for part in planned.plan if part[0] < part[1]]
    for _, end, *_ in parts[-1:]:
        planned = replace(planned, plan=parts)
        output[:end] = backend.attend(query[:end], kv_cache, planned, **options)


class Simulator(TorchDispatchMode):
    """The device, and what sees all operators."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.chance = random.Random(seed)
        self.waits: Counter[tuple[str, str]] = Counter()  # (what, where)
        self.streams: list[Stream] = []
        self.current = [Stream(self)]
        self.pinned: dict[int, Tensor] = {}  # kept, so that no other memory gets its address
        self.graphs: list[Graph] = []
        self.capturing: Graph | None = None
        self.backend = Backend(self)

    # -- the queue --

    def launch(self, task: Task) -> None:
        tasks = self.current[-1].tasks if self.capturing is None else self.capturing.tasks
        tasks.append(task)

    def note_wait(self, what: str) -> None:
        """What an engine waits for while it starts is not counted."""
        frames = [frame for frame in extract_stack() if "/nanoserve/" in frame.filename]
        last = frames[-1] if frames else None
        where = f"{last.filename.rpartition('/nanoserve/')[2]} {last.name}" if last else ""
        if self.capturing is not None:
            raise RuntimeError(f"not permitted when stream is capturing: {what} in {where}")
        if all(frame.name != "make_engine" for frame in frames):
            self.waits[what, where] += 1

    def wait(self, what: str, stream: Stream | None = None) -> None:
        """The host waits for all tasks of a stream."""
        self.note_wait(what)
        Event(self).record(stream).reach()()

    def synchronize(self, *_: Any) -> None:
        while waiting := [stream for stream in self.streams if stream.tasks]:
            self.chance.choice(waiting).run_next()

    def allocate(self, like: Tensor) -> Tensor:
        """On the GPU; like this tensor, on any device."""
        inner = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=CPU)
        if self.capturing is not None:
            self.capturing.private.append(inner)
        return poison(inner)

    def poison_pool(self) -> None:
        for graph in self.graphs:
            for tensor in graph.private:
                poison(tensor)

    @contextmanager
    def capture(self, graph: Graph, **options: Any) -> Iterator[None]:
        self.synchronize()
        self.graphs.append(graph)
        graph.options = options
        self.capturing = graph
        try:
            yield
        finally:
            self.capturing = None

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    # -- operators --

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        is_made_here = getattr(kwargs.get("device"), "type", "cpu") in ("cuda", "meta")
        if kwargs.pop("pin_memory", False):
            return self.pin(func(*args, **kwargs))
        if not is_made_here and not any(isinstance(each, CudaTensor) for each in tensors):
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name == "copy_":
            return self.copy(*args, **kwargs)
        if name == "_to_copy":
            return self.to_copy(*args, **kwargs)
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:
                return func.decompose(*args, **kwargs)
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        inner, options = unwrap((args, kwargs))
        if "device" in options:
            options["device"] = CPU
        if is_view or name in ("detach", "lift_fresh"):
            return wrap(func(*inner, **options))
        if any(each.dim() for each in tensors if not isinstance(each, CudaTensor)):
            raise RuntimeError(f"{func} of tensors on the CPU and on the GPU")
        return self.queue(func, args, kwargs, partial(func, *inner, **options))

    def queue(self, func: Any, args: Any, kwargs: Any, compute: Task) -> Any:
        """Launch an operator. What it will return has a size at once."""
        names = [each.name for each in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        written = [
            given[each.name]
            for each in func._schema.arguments
            if each.alias_info and each.alias_info.is_write
        ]
        try:
            shapes = func(*tree_map(as_meta, args), **tree_map(as_meta, kwargs))
        except (RuntimeError, NotImplementedError):  # its size depends on numbers
            self.wait(f"{func}")
            return wrap(compute())
        if written:
            self.launch(compute)
            return written[0] if len(written) == 1 else tuple(written)
        outputs = tree_map(lambda x: self.allocate(x) if isinstance(x, Tensor) else x, shapes)
        if "empty" not in func._schema.name:

            def run() -> None:
                found = tree_flatten(compute())[0]
                for output, x in zip(tree_flatten(outputs)[0], found, strict=True):
                    if isinstance(x, Tensor):
                        output.copy_(x)

            self.launch(run)
        return wrap(outputs)

    def to_copy(self, source: Tensor, non_blocking: bool = False, **options: Any) -> Tensor:
        device, dtype = options.get("device", source.device), options.get("dtype", source.dtype)
        memory_format = options.get("memory_format") or torch.preserve_format
        inner = torch.empty_like(unwrap(source), dtype=dtype, memory_format=memory_format)
        inner = poison(inner) if device.type == "cpu" else self.allocate(inner)
        target = inner if device.type == "cpu" else CudaTensor(inner)
        return self.copy(target, source, non_blocking)

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        to, of = unwrap((target, source))
        to_gpu, of_gpu = isinstance(target, CudaTensor), isinstance(source, CudaTensor)
        is_pinned = self.is_pinned(to if of_gpu else of)
        if not of_gpu and not is_pinned:
            of = of.clone()
        self.launch(partial(to.copy_, of))
        if to_gpu is not of_gpu and not (non_blocking and is_pinned):
            self.wait("copy" if is_pinned else "pageable copy")
        return target

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned

    def pin(self, tensor: Tensor) -> Tensor:
        self.pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor


def as_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)
    return META if isinstance(value, torch.device) else value


@contextmanager
def simulated_cuda(
    capability: tuple[int, int] = (9, 0), free: int = 9 << 30
) -> Iterator[Simulator]:
    """A GPU with `free` bytes, for as long as this lasts."""
    device = Simulator()
    properties = SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        multi_processor_count=4,
        shared_memory_per_block_optin=227 * 1024,
    )
    make_tensor, run_kernel = torch.tensor, InterpretedFunction.run

    def tensor(data: Any, *, pin_memory: bool = False, **options: Any) -> Any:
        where, made = options.pop("device", None), make_tensor(data, **options)
        made = device.pin(made) if pin_memory else made
        return made if where is None else made.to(where)

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        device.launch(partial(run_kernel, self, *unwrap(args), **unwrap(kwargs)))

    replaced = {
        "Event": partial(Event, device),
        "Stream": partial(Stream, device),
        "CUDAGraph": partial(Graph, device),
        "graph": device.capture,
        "stream": device.use,
        "synchronize": device.synchronize,
        "current_stream": lambda *_: device.current[-1],
        "device": nullcontext,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (free, free),
        "graph_pool_handle": object,
        "_lazy_init": lambda: None,
    }
    zeros = ("memory_allocated", "max_memory_allocated", "memory_reserved", "empty_cache")
    replaced |= dict.fromkeys((*zeros, "reset_peak_memory_stats"), lambda *_: 0)
    torch._C._ensureCUDADeviceGuardSet()
    with CPU:
        torch.tensor(0)  # a device remembers all constructors, at its first use
    with pytest.MonkeyPatch.context() as patch, device:
        for name, value in replaced.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(Tensor, "is_pinned", lambda self: device.is_pinned(self))
        patch.setattr(Tensor, "pin_memory", lambda self: device.pin(self.clone()))
        patch.setattr(InterpretedFunction, "run", run)
        yield device
        device.synchronize()
