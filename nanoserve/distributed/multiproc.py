"""How do several ranks run one step?

Every rank is a process that holds its part of every layer. The engine's process is rank 0:

    rank 0 (the engine's process)                  ranks 1, 2, ... (`work`)
    broadcast_object(SchedulerOutput) ----------->  broadcast_object()    over gloo
    runner.launch(SchedulerOutput)    <---------->  runner.launch(...)    sums: gloo, on GPUs nccl
      sample, broadcast the token ids ----------->    (inside it)
    ModelOutput to the scheduler

All ranks run the same code on the same value, so they agree on batch, blocks and shapes without
further messages. Rank 0 runs its part in a thread of its own, always to the step's end: Ctrl-C must
not stop it in the middle of a step, because the other ranks would wait for the rest of it. If a
rank ends, its sockets close, and the others get an error at once.

vLLM: vllm/executor/multiproc_gpu_executor.py (V0); vllm/v1/executor/multiproc_executor.py (V1).
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nanoserve.config import EngineConfig
from nanoserve.distributed.parallel import ParallelState
from nanoserve.models.config import ModelConfig
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import SchedulerOutput

STEP_TIMEOUT, IDLE_TIMEOUT = timedelta(minutes=10), timedelta(days=20)


class MultiprocExecutor:
    """Runs the model on config.num_ranks ranks, of which this process is rank 0."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, runner_cls: Any) -> None:
        size = config.num_ranks
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(store.port), str(rank), str(size)],
                start_new_session=True,  # Ctrl-C is for rank 0
            )
            for rank in range(1, size)
        ]
        self.thread = ThreadPoolExecutor(1)
        try:
            self.runner = self.thread.submit(
                build_runner, store, 0, size, (config, model_config, runner_cls)
            ).result()
        except BaseException:
            self.kill()
            raise
        self.parallel = self.runner.parallel
        self.num_kv_blocks = self.runner.num_kv_blocks
        self.num_cpu_blocks = self.runner.num_cpu_blocks

    def launch(self, step: SchedulerOutput) -> Any:
        """Start one step on all ranks; only rank 0 reads its tokens."""
        return self.thread.submit(self._launch, step).result()

    def _launch(self, step: SchedulerOutput) -> Any:
        self.parallel.broadcast_object(for_other_ranks(step))
        return self.runner.launch(step)

    def close(self) -> None:
        """End the other ranks and release the memory."""
        self.thread.submit(self.parallel.broadcast_object, None)
        self.thread.shutdown()
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                pass
        self.kill()
        del self.runner

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def for_other_ranks(step: SchedulerOutput) -> SchedulerOutput:
    """The step without what rank 0 alone reads, such as the users' callables."""
    new = [
        each._replace(sampling_params=SamplingParams(prompt_logprobs=params.prompt_logprobs))
        for each in step.new_sequences
        for params in [each.sampling_params]
    ]
    return replace(step, new_sequences=tuple(new))


def connect(store: dist.Store, rank: int, size: int, device: str) -> ParallelState:
    """Make the process groups. They are the engine's own: torch's default group stays free."""
    if device.startswith("cuda"):
        torch.cuda.set_device(rank)
    device_group = make_group(store, "device", rank, size, device)
    cpu_group = dist.ProcessGroupGloo(dist.PrefixStore("cpu", store), rank, size, IDLE_TIMEOUT)
    return ParallelState(rank, size, device_group, cpu_group, store)


def make_group(store: dist.Store, name: str, rank: int, size: int, device: str) -> Any:
    """A process group for tensors on this device: nccl, or gloo on a CPU."""
    prefixed = dist.PrefixStore(name, store)
    if device.startswith("cuda"):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = STEP_TIMEOUT
        return dist.ProcessGroupNCCL(prefixed, rank, size, options)
    return dist.ProcessGroupGloo(prefixed, rank, size, STEP_TIMEOUT)


def build_runner(store: dist.Store, rank: int, size: int, setup: Any) -> Any:
    """This rank's ModelRunner. `setup`: rank 0's (config, model_config, runner_cls)."""
    if rank == 0:
        store.set("setup", pickle.dumps(setup))
    config, model_config, runner_cls = pickle.loads(store.get("setup"))
    parallel = connect(store, rank, size, config.device)
    if config.device.startswith("cuda"):
        config = replace(config, device=f"cuda:{rank}")
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    return runner_cls(config, model_config, parallel)


def work(port: int, rank: int, size: int) -> None:
    """What a rank above 0 does: run rank 0's steps until it sends None, or ends."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    runner = build_runner(store, rank, size, None)
    try:
        while (step := runner.parallel.broadcast_object()) is not None:
            runner.launch(step)
    except RuntimeError as error:
        if "Connection" not in str(error):  # rank 0 has ended
            raise


if __name__ == "__main__":
    work(*map(int, sys.argv[1:]))
