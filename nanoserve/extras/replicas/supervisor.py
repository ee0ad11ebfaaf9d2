"""Who starts the replicas, knows which of them are there, and ends them?

A thread for each replica does this, as long as the front runs:

    start the process -> it tells its port -> it serves -> it ends
       ^                                                    |   its requests: see front.py
       +-------- a pause of 1 s, 2 s, 4 s ... 60 s <--------+   the router forgets it

The pause doubles with each life that was shorter than a minute, so a replica that cannot live costs
little, and one that was killed is back soon. One that fails when the command starts ends the
command: nobody waits for an option that is wrong. A further thread asks each replica every few
seconds whether it is there, and kills one that has not answered for a minute.

A replica's Ctrl-C does not come from the terminal (it has a session of its own, as ranks have), but
from `shutdown`: all get the same time. Nothing is left behind: a replica that has not ended when
its time is over is killed, and each ends when its pipe from the front does.

Left out: a step that never ends, in a process that still answers (between ranks there is a limit),
and a process that says nothing when it starts.

vLLM: vllm/v1/engine/utils.py CoreEngineProcManager, vllm/v1/engine/coordinator.py (V1). There a
dead engine ends the server.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from http.client import HTTPConnection, HTTPException
from typing import Any

from nanoserve.arg_utils import EngineArgs
from nanoserve.exceptions import EngineDeadError, brief
from nanoserve.extras.replicas.replica import Task
from nanoserve.extras.replicas.router import PrefixRouter, RoundRobin, Router
from nanoserve.extras.server.launcher import Served
from nanoserve.extras.server.options import FrontendArgs
from nanoserve.kernels.threads import num_cores, rank_environment
from nanoserve.logger import init_logger
from nanoserve.memory import available_memory

logger = init_logger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a replica is started again
PING_PAUSE = 5.0  # seconds between two questions whether a replica is there
SILENCE = 60.0  # seconds after which one that has not answered is killed
GRACE = 15.0  # seconds to end, after what requests get: a server's own limits are a little less
COMMAND = [sys.executable, "-m", "nanoserve.extras.replicas.replica"]
ROUTERS: dict[str, type[Router[int]]] = {"cache_aware": PrefixRouter, "round_robin": RoundRobin}


class NoReplicaError(RuntimeError):
    """No replica is there to be asked."""


class Replica:
    """One place of a replica, and the process that fills it.

    Invariant: port is the one of a process that serves, or None.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.port: int | None = None
        self.served: Served | None = None  # once it has served
        self.frontend: FrontendArgs | None = None  # the options of that process
        self.failure: str | None = None  # why it could not start at all
        self.num_requests = 0  # that it is answering
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it is asked. Nobody listens at port 0: it may have ended since it was chosen."""
        return f"http://127.0.0.1:{self.port or 0}"

    @contextmanager
    def counted(self, counts: bool) -> Iterator[None]:
        """A request that it answers; not counts: one that is no work, as to look at the engine."""
        self.num_requests += counts
        try:
            yield
        finally:
            self.num_requests -= counts

    def send_signal(self) -> None:
        """Ask its process to end; a second time: at once."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError, ValueError):  # it has ended
                self.process.stdin.write(b"\n")
                self.process.stdin.flush()


class Replicas:
    """N replicas. Has what the server asks of an engine: shutdown, errored, dead_error.

    Invariant: after shutdown() none of the processes exists.
    """

    def __init__(self, config: EngineArgs, frontend: FrontendArgs, log_stats: bool = False) -> None:
        """Start all, and wait until they serve. Raises ValueError if one cannot."""
        self.key = secrets.token_hex(16)
        self.config, self.log_stats = config, log_stats
        self.memory = available_memory() // frontend.data_parallel_size
        self.frontend = replace(  # what replicas get; the rest is the front's
            frontend,
            host="127.0.0.1",
            port=0,
            uds=None,
            ssl_keyfile=None,
            ssl_certfile=None,
            api_key=(self.key,),
            allowed_origins=(),
            limit_concurrency=None,
            disable_uvicorn_access_log=True,
        )
        self.router = ROUTERS[frontend.router_policy]()
        self.reads_prompts = (  # else the router needs none, or there is no cache to be found
            frontend.router_policy == "cache_aware" and config.enable_prefix_caching is not False
        )
        self.lock = threading.Lock()  # of the router, of ports, and of self.frontend
        self.closing = threading.Event()
        self._has_started = threading.Semaphore(0)  # or failed to
        self.replicas = [Replica(index) for index in range(frontend.data_parallel_size)]
        self._threads = [
            threading.Thread(target=self._supervise, args=(each,), daemon=True)
            for each in self.replicas
        ]
        try:
            for thread in self._threads:
                thread.start()
            threading.Thread(target=self._watch, daemon=True).start()
            for _ in self.replicas:
                self._has_started.acquire()
                if failures := [each.failure for each in self.replicas if each.failure]:
                    raise ValueError(failures[0])
            self.reads_prompts &= not self.served.pools
        except BaseException:
            self.shutdown()
            raise

    # -- requests --

    def choose(self, prefix: str | None, without: Sequence[Replica] = ()) -> Replica:
        """The replica for a prompt; the router learns that it goes there. None: a request that is
        no work, which takes nobody's turn. Raises NoReplicaError."""
        with self.lock:
            there = [each for each in self.alive if each not in without]
            if not there:
                raise NoReplicaError
            if prefix is None:
                return there[0]
            index = self.router.choose(prefix, {each.index: each.num_requests for each in there})
            self.router.add(prefix, index)
        return self.replicas[index]

    def get(self, index: str, without: Sequence[Replica] = ()) -> Replica:
        """The replica of this number. Raises ValueError, NoReplicaError if it is not there."""
        if not index.isdecimal() or int(index[:9]) >= len(self.replicas):
            raise ValueError(f"replica is {brief(index)}; allowed: 0 to {len(self.replicas) - 1}.")
        if (replica := self.replicas[int(index)]).port is None or replica in without:
            raise NoReplicaError
        return replica

    def change(self, frontend: FrontendArgs) -> tuple[list[str], FrontendArgs]:
        """Replicas that start from now on get these options. Where those are asked that serve
        already, and the options that they have."""
        with self.lock:
            before, self.frontend = self.frontend, frontend
            return [each.url for each in self.alive], before

    def change_back(self, before: FrontendArgs) -> None:
        """The last change is not made. A replica that has started with it starts again."""
        with self.lock:
            changed, self.frontend = self.frontend, before
            for each in self.alive if changed != before else ():
                if each.frontend is changed and each.process is not None:
                    each.process.kill()

    @property
    def alive(self) -> list[Replica]:
        """Those that serve."""
        return [each for each in self.replicas if each.port is not None]

    @property
    def served(self) -> Served:
        """What the first one serves; the others serve the same."""
        served = self.replicas[0].served
        assert served is not None, "all have started"
        return served

    # -- what the server asks of an engine --

    @property
    def errored(self) -> bool:
        return self.closing.is_set()

    @property
    def dead_error(self) -> EngineDeadError:
        return EngineDeadError("the replicas are shut down.")

    def shutdown(self, timeout: float = 0.0) -> None:
        """End all: each gives its requests `timeout` seconds, if this is the first call; another
        call ends them at once. Returns when they have ended. Any thread may call this."""
        self.closing.set()
        for each in self.replicas:
            each.send_signal()
            if timeout <= 0:
                each.send_signal()
        deadline = time.monotonic() + timeout + GRACE
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        for each in self.replicas:
            if each.process is not None:
                each.process.kill()  # does nothing to one whose end is known
                each.process.wait()

    # -- the thread of a replica --

    def _supervise(self, replica: Replica) -> None:
        pause = FIRST_PAUSE
        while not self.closing.is_set():
            began = time.monotonic()
            try:
                status: int | None = self._run(replica)
            except Exception as error:  # no process, or one that talks nonsense
                status, replica.failure = None, str(error)
            is_first, lived = replica.served is None, time.monotonic() - began
            if is_first:
                what = f"replica {replica.index} ended with status {status} before it served."
                replica.failure = replica.failure or what
                self._has_started.release()
                return
            if self.closing.is_set():
                return
            pause = FIRST_PAUSE if lived > LONGEST_PAUSE else pause
            why = f" ({replica.failure})" if replica.failure else ""
            logger.error(
                f"replica {replica.index} has ended with status {status}{why}; it is started again "
                f"in {pause:g} s."
            )
            replica.failure = None
            self.closing.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _run(self, replica: Replica) -> int:
        """One life of a replica; its exit status."""
        process, frontend = self._start(replica)
        replica.process = process
        try:
            return self._follow(replica, process, frontend)
        finally:
            process.kill()  # does nothing to one whose end is known
            process.wait()
            with self.lock:
                replica.port = None
                self.router.remove(replica.index)
            with suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]

    def _follow(
        self, replica: Replica, process: subprocess.Popen[bytes], frontend: FrontendArgs
    ) -> int:
        """From its first word to its end; its exit status. Raises ValueError for a first word that
        is none."""
        if self.closing.is_set():  # shutdown() may not have seen this process
            replica.send_signal()
        assert process.stdout is not None
        with process.stdout as answers:
            answer: dict[str, Any] = json.loads(answers.readline() or "{}")
        replica.failure = answer.get("error")
        if "port" in answer:
            with self.lock:
                is_stale = self.frontend != frontend  # adapters have come or gone meanwhile
                replica.port = None if is_stale else answer.pop("port")
                replica.frontend = frontend
            if is_stale:
                process.kill()
            else:
                is_first, replica.served = replica.served is None, Served(**answer)
                logger.info(f"replica {replica.index} serves (process {process.pid}).")
                if is_first:
                    self._has_started.release()
        return process.wait()

    def _start(self, replica: Replica) -> tuple[subprocess.Popen[bytes], FrontendArgs]:
        """A new process, which has its task; and the options that it was given."""
        frontend, size = self.frontend, len(self.replicas)
        cores = num_cores()
        reserved = cores - max(1, cores // size) + _num_reserved()
        search = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = {"PYTHONPATH": search, "PYTHONSAFEPATH": "1"}
        environment["VLLM_CPU_NUM_OF_RESERVED_CPU"] = str(reserved)
        process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**rank_environment(), **environment},
            start_new_session=True,
        )
        task = Task(replica.index, size, self.memory, self.config, frontend, self.log_stats)
        assert process.stdin is not None
        with suppress(OSError):  # it has ended already
            process.stdin.write(b64encode(pickle.dumps(task)) + b"\n")
            process.stdin.flush()
        return process, frontend

    # -- the thread of all --

    def _watch(self) -> None:
        """Kill a replica that is there and says nothing: its own thread starts it again."""
        while not self.closing.wait(PING_PAUSE):
            for replica in self.alive:
                process, port = replica.process, replica.port  # in this order: see _run
                if port is None or process is None or not is_silent(port):
                    continue
                if not self.closing.is_set():
                    logger.error(f"replica {replica.index} has not answered for {SILENCE:g} s.")
                    process.kill()


def is_silent(port: int) -> bool:
    """Does somebody listen there who does not answer in time?"""
    with closing(HTTPConnection("127.0.0.1", port, timeout=SILENCE)) as connection:
        try:
            connection.request("GET", "/ping")
            connection.getresponse().read()
        except TimeoutError:
            return True
        except (OSError, HTTPException):
            pass  # it has ended, which its own thread notices
    return False


def _num_reserved() -> int:
    """Cores that the user keeps for other programs."""
    given = os.environ.get("VLLM_CPU_NUM_OF_RESERVED_CPU", "")
    return int(given) if given.isdecimal() else 0
