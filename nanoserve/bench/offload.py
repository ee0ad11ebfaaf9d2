"""What is it worth to keep evicted prefixes? The suite "offload": tiers for keys and values.

*Chats.* Several chats take turns. Each sends all that was said in it again, and a question more.
All of them together have four times as many blocks as the device, so that a chat's blocks are
evicted before its next turn. The same chats with:

    nanoserve                   no tier: evicted blocks are computed again
    nanoserve, main memory      kv_offloading_size for all blocks
    nanoserve, disk             main memory for two chats, a folder for all
    nanoserve, enough blocks    a device that has room for all: the best that a tier can be
    vllm, vllm, main memory     vLLM without a tier, and with the same option, where it runs

    found    share of the prompt tokens after the first turns that were not computed again
    TTFT     of the turns after the first, in ms; and nanoserve's without a tier divided by it

*Policies.* Chats that come back, between scans: documents that are read once, with more blocks than
the CPU tier has rows. LRU loses the chats to every scan, ARC keeps them (policies.py). This is
counted with the fake model: there is nothing to be timed.

*Tiers.* Bytes a second from and to each tier, blocks one after the other, and nothing else to do. A
disk's are mostly those of the system's cache of files. The peer is in this process, too: both ends
share its threads.

vLLM: benchmarks/ has multi-turn chats (multi_turn/); its CPU build refuses kv_offloading_size.
"""

from __future__ import annotations

import hashlib
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import numpy as np
import torch

from nanoserve import EngineArgs, LLMEngine, SamplingParams
from nanoserve.bench.process import EngineProcess
from nanoserve.bench.roofline import synchronize
from nanoserve.bench.suites import percentiles
from nanoserve.bench.turns import WARM_UP, EngineSpec, Settings, run_in_turns
from nanoserve.bench.workload import Request
from nanoserve.extras.kv_offload.base import (
    KVConnectorMetadata,
    SecondaryTierManager,
    TransferJob,
)
from nanoserve.extras.kv_offload.config import EVICTION_POLICIES
from nanoserve.extras.kv_offload.transport import Reading, Source, Transport
from nanoserve.tools.fake_executor import FakeExecutor, write_config

BLOCK_SIZE = 32  # vLLM's CPU build has no smaller one
TIMES_DEVICE = 4  # all chats have so many times as many blocks as the device
NUM_TURNS, QUESTION_LEN, ANSWER_LEN = 3, 32, 8
MOST_SECONDS = 120.0  # for the copies of a measurement
COPIED_BYTES = 2**26  # of a measurement of a tier, at most
Values = dict[str, Any]
Turn = dict[str, Any]  # of a chat: number, seconds to the first token, tokens and those found


def offload_suite(settings: Settings) -> Values:
    """The chats, then the policies, then the tiers."""
    with tempfile.TemporaryDirectory() as folder:
        chats = compare_chats(settings, Path(folder))
        return {
            **chats,
            "policies": [compare_policy(name, Path(folder)) for name in EVICTION_POLICIES],
            "tiers": list(time_tiers(settings, Path(folder))),
        }


# -- chats --


def compare_chats(settings: Settings, folder: Path) -> Values:
    """The same chats with every engine, in turns."""
    num_chats = max(TIMES_DEVICE, settings.num_requests // 8)
    longest = settings.prefix_len + NUM_TURNS * (QUESTION_LEN + ANSWER_LEN)
    chat_blocks = -(-max(longest, 2 * settings.max_len) // BLOCK_SIZE)  # a warm-up fits, too
    num_blocks = num_chats * chat_blocks
    block_bytes = settings.costs.kv_numbers * settings.costs.itemsize * BLOCK_SIZE
    common = {"max_model_len": chat_blocks * BLOCK_SIZE, "block_size": BLOCK_SIZE}
    # A block more, because engines keep one for themselves.
    none = {**common, "num_gpu_blocks_override": num_blocks // TIMES_DEVICE + 1}
    memory = {**none, "kv_offloading_size": num_blocks * block_bytes / 2**30}
    tier = {"type": "fs", "root_dir": str(folder / "chats"), "max_bytes": 2**36}
    disk = {
        **none,
        "kv_offloading_size": 2 * chat_blocks * block_bytes / 2**30,
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"secondary_tiers": [tier]},
        },
    }
    enough = {**common, "num_gpu_blocks_override": num_blocks + 1}
    engines = [("nanoserve", none), ("nanoserve, main memory", memory),
               ("nanoserve, disk", disk), ("nanoserve, enough blocks", enough)]  # fmt: skip
    if "vllm" in settings.compare:
        engines += [("vllm", none), ("vllm, main memory", memory)]
    specs = [
        EngineSpec(label, label.split(",")[0], {"llm_options": options})
        for label, options in engines
    ]

    def job(engine: EngineProcess, round_: int) -> list[Turn]:
        return chat(settings, engine, num_chats, round_)

    measured = run_in_turns(settings, specs, job, "offload")
    rows = []
    for label, rounds in measured.results.items():
        later = [turn for turns in rounds for turn in turns if turn["number"]]
        found = [turn["num_cached"] for turn in later]
        is_same = [turn["token_ids"] for turns in rounds for turn in turns] == [
            turn["token_ids"] for turns in measured.results["nanoserve"] for turn in turns
        ]
        rows.append(
            {
                **measured.engines[label],
                "found": sum(found) / sum(turn["num_prompt"] for turn in later),
                "ttft_ms": percentiles([1000 * turn["ttft"] for turn in later]),
                "none_is": measured.ratio(label, lambda turns: total_ttft(turns)),
                "same_tokens": is_same,
            }
        )
    return {
        "num_chats": num_chats,
        "num_turns": NUM_TURNS,
        "longest": longest,
        "num_blocks": num_blocks,
        "device_blocks": num_blocks // TIMES_DEVICE,
        "rows": rows,
        "skipped": measured.skipped,
    }


def chat(settings: Settings, engine: EngineProcess, num_chats: int, round_: int) -> list[Turn]:
    """All turns of all chats, one after the other."""
    rng = Random(f"chats {settings.seed} {round_}")
    last_id = min(10_000, settings.model_config.vocab_size - 1)
    chats = [
        [rng.randint(0, last_id) for _ in range(settings.prefix_len)] for _ in range(num_chats)
    ]
    turns = []
    for number in range(NUM_TURNS):
        for said in chats:
            said += [rng.randint(0, last_id) for _ in range(QUESTION_LEN)]
            answer = engine.stream(Request(said, ANSWER_LEN))
            turns.append(
                {
                    "number": number,
                    "ttft": answer["times"][0],
                    "num_prompt": len(said),
                    "num_cached": answer["num_cached_tokens"] or 0,
                    "token_ids": answer["token_ids"],
                }
            )
            said += answer["token_ids"]
    return turns


def total_ttft(turns: list[Turn]) -> float:
    """Seconds to the first token, of all turns after the first."""
    return sum(turn["ttft"] for turn in turns if turn["number"])


# -- policies --


def compare_policy(
    policy: str, folder: Path, num_chats: int = 6, num_documents: int = 16, num_scans: int = 4
) -> Values:
    """Chats that come back after each scan; the share of their tokens that was found. A prompt has
    8 blocks, the device has as many, and the CPU tier has rows for half of the documents."""
    size, prompt_blocks = 4, 8
    model = folder / f"fake-{policy}"
    write_config(model, 997, (0,), 2 * size * prompt_blocks)
    num_rows = num_documents * prompt_blocks // 2
    extra = {"cpu_bytes_to_use": 2 * size * num_rows, "eviction_policy": policy}
    engine_args = EngineArgs(
        model=str(model),
        block_size=size,
        num_gpu_blocks_override=prompt_blocks + 1,
        kv_transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        },
    )
    engine = LLMEngine.from_engine_args(engine_args, executor_cls=FakeExecutor)
    found: dict[str, list[int]] = {"chat": [], "document": []}

    def ask(kind: str, number: int) -> None:
        rng = Random(f"{kind} {number}")
        prompt = [rng.randrange(997) for _ in range(size * prompt_blocks)]
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        engine.add_request(f"{kind} {number}", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[kind].append(output.num_cached_tokens or 0)

    with closing(engine):
        for scan in range(num_scans):
            for number in [*range(num_chats)] * 2:  # two turns each
                ask("chat", number)
            for number in range(num_documents):
                ask("document", scan * num_documents + number)
    again = found["chat"][num_chats:]  # the first time there is nothing to be found
    return {
        "policy": policy,
        "num_rows": num_rows,
        "chat_blocks": num_chats * prompt_blocks,
        "scanned_blocks": num_documents * prompt_blocks,
        "found": sum(again) / (len(again) * size * (prompt_blocks - 1)),
    }


# -- tiers --


def time_tiers(settings: Settings, folder: Path) -> Iterator[Values]:
    """Bytes a second of each way."""
    block_bytes = settings.costs.kv_numbers * settings.costs.itemsize * BLOCK_SIZE
    number = max(2, min(64, COPIED_BYTES // block_bytes))
    tier = {"type": "fs", "root_dir": str(folder / "tiers"), "max_bytes": 2**36}
    options = {
        "block_size": BLOCK_SIZE,
        "max_model_len": min(settings.model_config.max_model_len, BLOCK_SIZE * number),
        "num_gpu_blocks_override": number + 1,
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": number * block_bytes,
                "secondary_tiers": [tier],
            },
        },
    }
    with settings.llm(**options) as llm:
        connector, device = llm.engine.kv_connector, torch.device(settings.device)
        worker, pairs = connector.worker, tuple((block, block) for block in range(number))
        num_bytes = number * worker.row_bytes

        def copy(metadata: KVConnectorMetadata) -> None:
            worker.start_load_kv(metadata)
            worker.wait_for_save()
            synchronize(device)

        stores, loads = (KVConnectorMetadata(0, **{way: pairs}) for way in ("stores", "loads"))
        repeat = max(3, settings.repeat)
        yield speed("main memory", "down", num_bytes, repeat, lambda _: copy(stores))
        yield speed("main memory", "up", num_bytes, repeat, lambda _: copy(loads))
        worker.rows[:] = np.random.default_rng(0).integers(256, size=worker.rows.shape)
        disk = connector.tiers.tiers[0]
        yield speed("disk", "down", num_bytes, repeat, lambda i: move(disk, i, number, False))
        yield speed("disk", "up", num_bytes, repeat, lambda i: move(disk, i, number, True))
        if hasattr(socket, "AF_UNIX"):  # else there are no peers
            yield speed("peer", "up", num_bytes, repeat, ask_peer(worker.rows, folder))


def speed(
    tier: str, way: str, num_bytes: int, repeat: int, move: Callable[[int], object]
) -> Values:
    """The median of `repeat` times, after one that does not count."""
    seconds = []
    for round_ in range(WARM_UP, repeat):
        start = time.perf_counter()
        move(round_)
        seconds.append(time.perf_counter() - start)
    return {
        "tier": tier,
        "way": way,
        "num_bytes": num_bytes,
        "mb_per_second": num_bytes / statistics.median(seconds[1:]) / 1e6,
    }


def name_blocks(round_: int, number: int) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(b"%d %d" % (round_, i)).digest() for i in range(number))


def move(tier: SecondaryTierManager, round_: int, number: int, is_load: bool) -> None:
    """All rows to a tier, or back. Raises ValueError if one does not arrive."""
    job = TransferJob(round_, name_blocks(round_, number), tuple(range(number)))
    (tier.submit_load if is_load else tier.submit_store)(job)
    tier.drain_jobs(MOST_SECONDS)
    arrived = [key for result in tier.get_finished_jobs() for key in result.successful_keys]
    if len(arrived) < number:
        raise ValueError("the disk does not keep what is written to it")


class Held:
    """What a peer holds: the same rows under any name."""

    def __init__(self, rows: dict[bytes, int]) -> None:
        self.rows = rows

    @contextmanager
    def reading(self, name: str) -> Iterator[Reading]:
        yield Reading(self.rows)


def ask_peer(rows: np.ndarray, folder: Path) -> Callable[[int], None]:
    """A function that asks a peer, which has these rows, for all of them."""
    number = len(rows)
    here = np.empty_like(rows)

    def ask(round_: int) -> None:
        name, path = str(round_), folder / f"peer{round_}.sock"
        keys, good, is_done = name_blocks(round_, number), list[bytes](), Event()
        targets = {key: row for row, key in enumerate(keys)}

        async def fetch(asker: Transport) -> None:
            try:
                await asker.fetch(Source(path, name), targets, good)
            finally:
                is_done.set()

        with closing(Transport(rows, {})) as sender, closing(Transport(here, {})) as asker:
            sender.listen(path, Held(targets))
            asker.submit(fetch(asker))
            is_done.wait(MOST_SECONDS)
        if len(good) < number:
            raise ValueError("the peer does not answer")

    return ask
