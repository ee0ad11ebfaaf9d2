"""Which adapters are in memory, and who waits for one?

The LoRAManager is to adapters what the BlockManager is to blocks: it decides and touches no device.
The device has `max_loras` slots, so that many adapters can be in one step; the CPU keeps the
weights of `max_cpu_loras`, those in slots included. With max_loras=2 and adapters A, B, C:

    waiting (by urgency)      slots             what happens
    A1                        A: 0              A gets a free slot; its weights are read
    B1  A2                    A: 0  B: 1        A2 joins at once
    C1  A3  B2  (no adapter)  A: 0  B: 1        no slot for C: the slot held longest, A's, is to be
                                                drained. So A3 waits; B2 and the last one run
    C1  A3                    C: 0  B: 1        A1 and A2 have ended: C takes the slot, B is next
                                                to be drained, for A3

So an adapter that does not fit waits and keeps nobody waiting but the requests of one other
adapter, less urgent ones; it gets the slot when the running requests of that adapter have ended.
(vLLM drains nothing: there, two busy adapters can keep a third one waiting for ever.)

*Where is this asked?* An Adapter is the gate (sequence.Gate) of each sequence that wants it.
`schedule` opens and closes the gates before the scheduler looks at the waiting sequences, and puts
adapters that are new in their slots into the step. A sequence holds its slot while it runs or is
swapped out. Weights are read by a thread, and nobody else waits for that. If they cannot be read,
the requests that wait for them end with an error.

*Prefix cache.* What an adapter has computed is of use to this adapter only. Its `key` is part of
the root of its sequences' block hashes (Sequence.extra_keys). Another adapter never finds the
blocks, also not one that later gets the same lora_int_id: keys are never used twice.

vLLM: vllm/lora/worker_manager.py, model_manager.py; vllm/v1/core/sched/scheduler.py (V1).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING

from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.exceptions import RequestError, VLLMValidationError, brief, describe_error
from nanoserve.extras.lora.peft_helper import AdapterFiles, LoRAModel, Shape, read_adapter
from nanoserve.extras.lora.request import LoRARequest
from nanoserve.layers import ColumnParallelLinear, LayerConfig, RowParallelLinear
from nanoserve.models.loader import plan_model
from nanoserve.models.registry import ModelRegistry, build_model
from nanoserve.sequence import SchedulerOutput, Sequence

if TYPE_CHECKING:
    from nanoserve.engine import LLMEngine


def adaptable_shapes(config: EngineConfig, model_config: ModelConfig) -> dict[str, Shape]:
    """(outputs, inputs) of each matrix that can have an adapter, by its name in the checkpoint.
    Raises ValueError for a model that transformers runs."""
    architecture = model_config.architecture
    if config.model_impl == "transformers" or ModelRegistry.get(architecture) is None:
        raise ValueError(
            f"enable_lora is True, but {architecture} runs through transformers here, whose layers "
            "take no adapters. Merge the adapter into the checkpoint (peft: merge_and_unload)."
        )
    plan = plan_model(partial(build_model, model_config), LayerConfig())
    shapes = {
        matrix.name: matrix.shape
        for name, layer in (plan.named_modules() if plan else ())
        if isinstance(layer, (ColumnParallelLinear, RowParallelLinear))
        for matrix in layer.matrices(name)
    }
    if not shapes:
        raise ValueError(
            f"enable_lora is True, but {architecture} has no linear layers of nanoserve.layers, "
            "which alone take adapters."
        )
    return shapes


class Adapter:
    """An adapter that the engine knows, and the gate of the sequences that want it."""

    def __init__(self, request: LoRARequest, files: AdapterFiles, key: int) -> None:
        self.request = request
        self.files = files
        self.key = key  # no other adapter of this engine has it, or has had it
        self.slot = -1  # on the device; -1: none
        self.may_run = False  # in the step that is being decided

    def __repr__(self) -> str:
        return f"Adapter({self.request.lora_name!r}, slot {self.slot})"

    def start(self, fail: Callable[[BaseException], object]) -> None:
        """See Gate. Nothing: the manager looks at all requests together."""

    def is_open(self) -> bool:
        return self.may_run

    def load(self) -> Future[LoRAModel]:
        """Read the weights in a thread."""
        future: Future[LoRAModel] = Future()

        def run() -> None:
            try:
                future.set_result(self.files.load())
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, name="nanoserve-lora").start()
        return future


class LoRAManager:
    """The adapters of one engine. `get_adapter` and the next three methods are for any thread, the
    others for the one that runs steps.

    Invariant: an adapter that a running or swapped sequence wants has a slot and its weights; no
    two adapters have one slot; `loaded` has at most max_cpu_loras entries.
    """

    def __init__(self, engine: LLMEngine) -> None:
        """Raises ValueError if the model cannot have adapters."""
        config = engine.config
        self.engine = engine
        self.shapes = adaptable_shapes(config, engine.model_config)
        self.max_lora_rank, self.max_loras = config.max_lora_rank, config.max_loras
        self.max_cpu_loras = config.max_cpu_loras or config.max_loras
        self.adapters: dict[int, Adapter] = {}  # lora_int_id -> what requests may ask for
        self._keys = count(1)
        self._lock = threading.Lock()  # guards the last two
        # The adapters that have a slot: idle ones first, the least recently used at the front;
        # then those in use, the first to get its slot at the front.
        self.slots: OrderedDict[Adapter, None] = OrderedDict()
        # Weights on the CPU, or on their way; the least recently loaded first.
        self.loaded: OrderedDict[Adapter, Future[LoRAModel]] = OrderedDict()
        self.sent: dict[int, Adapter] = {}  # slot -> what the runners have there

    # -- requests --

    def attach(self, root: Sequence, lora_request: LoRARequest) -> None:
        """Let a request that is not queued yet run with this adapter. Raises as get_adapter."""
        root.lora = self.get_adapter(lora_request)
        root.gates += (root.lora,)

    def get_adapter(self, lora_request: LoRARequest) -> Adapter:
        """The adapter, which is checked if it is new. Raises TypeError for what is no LoRARequest,
        ValueError for an adapter that cannot be used, or whose number another one has."""
        if not isinstance(lora_request, LoRARequest):
            raise TypeError(
                f"lora_request must be a LoRARequest, got {brief(lora_request)}. Give for example "
                "LoRARequest('pirate', 1, 'path/to/adapter')."
            )
        try:
            lora_request.__post_init__()  # once more: a field may have been changed by force
        except AttributeError as error:
            raise TypeError(f"lora_request is not a whole LoRARequest: {error}.") from error
        adapter = self.adapters.get(lora_request.lora_int_id)
        if adapter is None:
            files = read_adapter(lora_request.path, self.shapes, self.max_lora_rank)
            with self._lock:
                new = Adapter(lora_request, files, next(self._keys))
                adapter = self.adapters.setdefault(lora_request.lora_int_id, new)
        known = adapter.request
        if (known.name, known.path) != (lora_request.name, lora_request.path):
            raise VLLMValidationError(
                f"lora_int_id {lora_request.lora_int_id} is that of {brief(known.name)} in "
                f"{brief(known.path)}, not of {brief(lora_request.name)} in "
                f"{brief(lora_request.path)}. Give each adapter a number of its own.",
                parameter="lora_int_id",
                value=lora_request.lora_int_id,
            )
        return adapter

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Check an adapter, and know it from now on. False if it is known already."""
        is_known = getattr(lora_request, "lora_int_id", None) in self.adapters
        self.get_adapter(lora_request)
        return not is_known

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; requests that have it go on. False if there is none of this number."""
        with self._lock:
            return self.adapters.pop(lora_id, None) is not None

    def list_loras(self) -> set[int]:
        """The numbers of all known adapters."""
        return set(self.adapters)

    # -- the step --

    def schedule(self) -> SchedulerOutput:
        """Scheduler.schedule, with gates that are right for this step, and with the adapters that
        the runners do not have in their slots yet."""
        scheduler = self.engine.scheduler
        self.set_gates(scheduler.running, scheduler.swapped, scheduler.waiting)
        step = scheduler.schedule()
        if step.is_restart:  # whether the last step has loaded anything is not known
            self.sent.clear()
        wanted = {scheduler.sequences[new.seq_id].lora for new in step.new_sequences} - {None}
        new = [adapter for adapter in wanted if self.sent.get(adapter.slot) is not adapter]
        if not new:
            return step
        self.sent |= {adapter.slot: adapter for adapter in new}
        loads = tuple((adapter.slot, self.loaded[adapter].result()) for adapter in new)
        return replace(step, loras_to_load=loads)

    def set_gates(
        self, running: list[Sequence], swapped: list[Sequence], waiting: list[Sequence]
    ) -> None:
        """Give slots to the adapters of `waiting`, which is sorted by urgency, and open the gates
        of those that can be in the coming step. What runs or is swapped out keeps its slot."""
        taken = {seq.lora for seq in swapped if seq.lora is not None}  # not to be drained now
        in_use = {seq.lora for seq in running if seq.lora is not None} | taken
        wanted = dict.fromkeys(
            seq.lora for seq in waiting if seq.lora is not None and not seq.is_held
        )
        for adapter in [each for each in self.slots if each in in_use]:
            self.slots.move_to_end(adapter)
        for adapter in taken:
            adapter.may_run = True
        drained: set[Adapter] = set()
        for adapter in wanted:
            if adapter in taken:
                continue
            adapter.may_run = False
            if adapter in drained:
                continue
            if adapter in self.slots or self._take_slot(adapter, in_use | taken):
                taken.add(adapter)
                adapter.may_run = self._is_loaded(adapter, waiting)
            else:
                rest = (each for each in self.slots if each not in taken and each not in drained)
                drained.update(islice(rest, 1))

    def _take_slot(self, adapter: Adapter, busy: set[Adapter]) -> bool:
        """Give the adapter a free slot, or that of one that is not busy, and begin to read its
        weights if they are not there. False if all slots are busy."""
        if len(self.slots) == self.max_loras:
            idle = next((each for each in self.slots if each not in busy), None)
            if idle is None:
                return False
            self._take_away(idle)
        taken = {each.slot for each in self.slots}
        adapter.slot = next(slot for slot in range(self.max_loras) if slot not in taken)
        self.slots[adapter] = None
        if adapter in self.loaded:
            self.loaded.move_to_end(adapter)
            return True
        if len(self.loaded) >= self.max_cpu_loras:
            del self.loaded[next(each for each in self.loaded if each not in self.slots)]
        self.loaded[adapter] = adapter.load()
        return True

    def _take_away(self, adapter: Adapter) -> None:
        """Free its slot."""
        del self.slots[adapter]
        adapter.slot, adapter.may_run = -1, False

    def _is_loaded(self, adapter: Adapter, waiting: list[Sequence]) -> bool:
        """Are its weights on the CPU? If they cannot be read, the requests that wait for it end:
        all that have it."""
        future = self.loaded[adapter]
        if not future.done():
            return False
        error = future.exception()
        if error is None:
            return True
        self._take_away(adapter)
        del self.loaded[adapter]
        requests = self.engine.output_processor.requests
        for request_id in dict.fromkeys(seq.request_id for seq in waiting if seq.lora is adapter):
            if (request := requests.get(request_id)) is not None:
                self.engine.fail_request(request, RequestError(describe_error(error)))
        return False
