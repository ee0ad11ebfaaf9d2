"""What does the process of one replica do?

It is a complete server of nanoserve, which only the front asks:

    front  -- standard input:  the task, one line;  one byte: end, as after SIGTERM ---->  replica
           <- standard output: {"port": 40123, "name": "demo", ...}, or {"error": "..."}  --
           -- HTTP on 127.0.0.1, with a secret key -------------------------------------->

The pipe tells the end of the front, too, however it ends: then the replica ends at once, and with
it the ranks of its engine. The engine's death ends the replica before anybody reads of it, so that
the front may ask another one.

Cores and GPUs are divided. With tensor_parallel_size=2, replica 1 has the third and the fourth of
the GPUs that CUDA_VISIBLE_DEVICES names. On a CPU each has an equal part of the cores, and of the
memory that a KV cache may take. Requests without a seed get other ones from each replica.

vLLM: vllm/v1/engine/core.py run_engine_core, vllm/v1/engine/utils.py CoreEngineProcManager (V1).
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import sys
import threading
from base64 import b64decode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanoserve.arg_utils import EngineArgs
from nanoserve.config import SEED_LIMIT
from nanoserve.exceptions import EngineDeadError
from nanoserve.extras.server import launcher
from nanoserve.extras.server.options import FrontendArgs
from nanoserve.kernels.threads import load_torch
from nanoserve.logger import configure_logging

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from nanoserve.extras.async_llm import AsyncLLM


@dataclass
class Task:
    """What a replica is told."""

    index: int
    size: int  # replicas on this machine
    memory: int  # its part of the free main memory, in bytes
    config: EngineArgs
    frontend: FrontendArgs
    log_stats: bool


class Server(launcher.Server):
    """Ends the process when the engine is dead."""

    async def on_tick(self, counter: int) -> bool:
        try:
            await self.state.async_llm.check_health()
        except EngineDeadError:
            exit_if_dead(self.state.async_llm)
        return await super().on_tick(counter)


class LastWordMiddleware:
    """Nothing is said for an engine that has died: who asked it is answered by another one."""

    def __init__(self, app: ASGIApp, async_llm: AsyncLLM) -> None:
        self.app = app
        self.async_llm = async_llm

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_alive(message: Message) -> None:
            exit_if_dead(self.async_llm)
            await send(message)

        await self.app(scope, receive, send_alive)


def exit_if_dead(async_llm: AsyncLLM) -> None:
    """End this process if the engine has failed. One that was shut down has not."""
    if async_llm.errored and async_llm.dead_error.__cause__ is not None:
        os._exit(1)


def take_gpus(task: Task) -> None:
    """Let this process see its own GPUs only. Raises ValueError if there are too few."""
    import torch

    ranks = task.config.world_size
    num_gpus, num_needed = torch.cuda.device_count(), task.size * ranks
    if task.config.device == "cpu" or (task.config.device == "auto" and not num_gpus):
        return
    if num_gpus < num_needed:
        raise ValueError(
            f"{task.size} replicas of {ranks} GPU(s) need {num_needed} GPUs, and torch sees "
            f"{num_gpus}. Lower data_parallel_size or tensor_parallel_size, or set device to cpu."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
    mine = visible.split(",")[task.index * ranks : (task.index + 1) * ranks]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)  # torch reads it when CUDA begins


def limit_memory(task: Task) -> None:
    """On a CPU, let this replica's KV cache take by default what is its part."""
    from nanoserve.device import choose_device
    from nanoserve.kv_cache import CPU_CACHE_SHARE

    config: Any = task.config  # mypy: a field of EngineArgs can be set
    if choose_device(config.device).type == "cpu" and config.kv_cache_memory_bytes is None:
        ranks = config.world_size
        config.kv_cache_memory_bytes = int(task.memory * CPU_CACHE_SHARE / ranks)


class Pipes:
    """The pipes to the front."""

    def __init__(self) -> None:
        self.server: Server | None = None
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is for the log

    def read_task(self) -> Task:
        with open(0, "rb", buffering=0, closefd=False) as pipe:
            line = pipe.readline()  # not a byte more
        if not line.endswith(b"\n"):
            os._exit(1)  # the front has ended
        threading.Thread(target=self._obey, daemon=True).start()
        return pickle.loads(b64decode(line))

    def tell(self, **answer: Any) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)

    def _obey(self) -> None:
        while os.read(0, 1):
            if self.server is None:
                break
            self.server.handle_exit(signal.SIGTERM, None)
        os._exit(1)  # the front has ended, or there is nothing to end well


def main() -> int:
    """The main function of a replica's process."""
    front = Pipes()
    task = front.read_task()
    configure_logging()
    for handler in logging.getLogger("nanoserve").handlers:
        handler.setFormatter(logging.Formatter(f"replica {task.index}: %(message)s"))
    launcher.raise_file_limit()
    try:
        config: Any = task.config
        config.seed = (config.seed + task.index) % SEED_LIMIT
        load_torch()
        take_gpus(task)
        limit_memory(task)
        with (
            launcher.bind(task.frontend) as sock,
            launcher.serve_engine(config, task.frontend, task.log_stats) as (app, served),
        ):
            app.add_middleware(LastWordMiddleware, async_llm=app.state.server.async_llm)
            front.server = Server(app)
            front.tell(port=sock.getsockname()[1], **served._asdict())
            front.server.run(sockets=[sock])
    except (ValueError, OSError, RuntimeError, ImportError, MemoryError) as error:
        front.tell(error=str(error) or type(error).__name__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
