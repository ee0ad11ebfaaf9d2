"""Ranks that are threads of the test's process: real groups and the real worker loop, without the
seconds that a process takes to start."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

from nanoserve.config import EngineConfig
from nanoserve.distributed.multiproc import MultiprocExecutor, worker_loop
from nanoserve.distributed.rendezvous import connect
from nanoserve.parallel import ParallelState


class ThreadRanks:
    """Has the methods of SpawnedRanks."""

    def __init__(self, config: EngineConfig) -> None:
        self.pids: dict[int, int] = {}
        self.processes: list[Any] = []
        self.world_size, self.pp_size = config.world_size, config.pipeline_parallel_size
        self.device = torch.device("cpu")
        self.store = dist.HashStore()
        self.threads = [
            threading.Thread(target=self._run_rank, args=(rank,), daemon=True)
            for rank in range(1, self.world_size)
        ]
        for thread in self.threads:
            thread.start()

    def _run_rank(self, rank: int) -> None:
        worker_loop(self.store, rank, lambda: self._connect(rank), "cpu")

    def _connect(self, rank: int) -> ParallelState:
        return connect(self.store, rank, self.world_size, self.device, pp_size=self.pp_size)

    def connect(self) -> ParallelState:
        self.parallel = self._connect(0)
        return self.parallel

    def find_failure(self, timeout: float) -> str | None:
        return None

    def close(self, is_step_over: bool = True) -> None:
        self.parallel.broadcast_object(None)
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()

    def release(self) -> None:
        """The groups end with their last reference."""


class ThreadExecutor(MultiprocExecutor):
    """LLM(executor_cls=ThreadExecutor, tensor_parallel_size=4): four ranks in one process."""

    @staticmethod
    def _make_ranks(config: EngineConfig) -> ThreadRanks:  # type: ignore[override]
        return ThreadRanks(config)
