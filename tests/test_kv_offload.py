"""Further levels of the prefix cache: the same tokens, hits that a hand count knows, ARC, files."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from fakes import FakeRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from workload import HISTORY, Player

from nanoserve import LLM, SamplingParams
from nanoserve.block_manager import BlockHash
from nanoserve.chapters.kv_offload.disk import BlockFiles
from nanoserve.chapters.kv_offload.parts import OffloadBlockManager, OffloadRunner
from nanoserve.chapters.kv_offload.policies import ARCPool, LRUPool
from nanoserve.sequence import RequestMetrics, Sequence
from nanoserve.tools.check_blocks import check_blocks

SMALL = {"block_size": 4, "num_gpu_blocks_override": 24, "max_model_len": 80}


def make_prompts() -> list[list[int]]:
    """Each beginning is that of three prompts, which come far from each other."""
    rng = random.Random(0)
    begins = [[rng.randrange(5, 900) for _ in range(rng.randint(20, 50))] for _ in range(5)]
    prompts = [begin + [rng.randrange(5, 900)] * 3 for begin in begins for _ in range(3)]
    rng.shuffle(prompts)
    return prompts


@cache
def generate_plainly() -> list[list[int]]:
    return generate(1)[0]


def generate(rounds: int, **options: Any) -> tuple[list[list[int]], int]:
    """Output tokens, and how many tokens were found on the CPU."""
    prompts = make_prompts()
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=9) for i in range(len(prompts))]
    with LLM(max_num_seqs=4, max_num_batched_tokens=32, **SMALL, **options) as llm:
        manager, tokens = llm.llm_engine.block_manager, []
        for _ in range(rounds):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens.append([output.outputs[0].token_ids for output in outputs])
            check_blocks(manager)
        assert all(each == tokens[0] for each in tokens)
        return tokens[0], getattr(manager, "num_external_hit_tokens", 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_offloading_policy": "arc", "async_scheduling": True},
        {"kv_offloading_policy": "arc", "preemption_mode": "swap"},
        {"preemption_mode": "swap", "kv_offloading_size": 0.0003},  # some 30 blocks, for both
    ],
)
def test_same_tokens(options: dict[str, Any]) -> None:
    tokens, num_hits = generate(2, **{"kv_offloading_size": 0.002, **options})
    assert num_hits > 0
    assert tokens == generate_plainly()


def test_hits_are_counted_by_hand() -> None:
    """A prompt of ten blocks: all but its last token's block are found again, here or there."""
    prompt, other = list(range(10, 50)), list(range(100, 170))
    one = SamplingParams(max_tokens=1)
    with LLM(kv_offloading_size=0.01, **SMALL) as llm:

        def num_cached() -> int:
            return llm.generate(prompt, one, use_tqdm=False)[0].num_cached_tokens

        manager = llm.llm_engine.block_manager
        assert (num_cached(), num_cached()) == (0, 36)
        assert manager.num_external_hit_tokens == 0
        llm.generate(other, one, use_tqdm=False)  # takes 18 of the 24 blocks
        assert num_cached() == 36
        on_cpu = manager.num_external_hit_tokens
        assert 36 - 6 * 4 <= on_cpu <= 36
        assert llm.reset_prefix_cache()  # both levels
        assert (num_cached(), manager.num_external_hit_tokens) == (0, on_cpu)


@pytest.mark.parametrize("more", [{"swap_space": 2.0}, {"enable_prefix_caching": False}])
def test_options_that_do_not_go_together(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="kv_offloading_size"):
        LLM(kv_offloading_size=1.0, **more)


def access(pool: LRUPool, block_hash: BlockHash) -> bool:
    """A request uses a block: is it there? If not, it comes, as in OffloadBlockManager."""
    if (block_id := pool.cached_blocks.get(block_hash)) is not None:
        pool.share(block_id)
        pool.free(block_id)
        return True
    block_id = pool.allocate_for(block_hash)
    pool.cache(block_id, block_hash)
    pool.free(block_id)
    return False


def test_a_scan_drives_out_what_lru_keeps() -> None:
    """The example of policies.py: two hits against three."""
    hashes = {name: BlockHash(None, name) for name in "abcde"}
    lru, arc = LRUPool(3), ARCPool(3)
    assert sum(access(lru, hashes[name]) for name in "ababcdea") == 2
    assert sum(access(arc, hashes[name]) for name in "ababcdea") == 3


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 5))
def test_the_lists_of_arc_agree(accesses: list[int], size: int) -> None:
    pool, hashes = ARCPool(size), [BlockHash(None, number) for number in range(10)]
    for number in accesses:
        access(pool, hashes[number])
        assert {**pool.t1, **pool.t2} == pool.cached_blocks
        assert len(pool.t1) + len(pool.b1) <= size
        lists = [*pool.t1, *pool.t2, *pool.b1, *pool.b2]
        assert len(lists) == len(set(lists)) <= 2 * size
        assert 0 <= pool.target <= size
        assert len(pool.free_queue) == size


# -- files --

PROMPT, ONE = list(range(10, 50)), SamplingParams(temperature=0, max_tokens=9)  # ten blocks


def folder(root: Path, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    extra = {"shared_storage_path": str(root), **extra}
    config = {"kv_connector": "ExampleConnector", "kv_role": role}
    return {"kv_transfer_config": {**config, "kv_connector_extra_config": extra}}


def tiers(root: Path, cpu_bytes: int, **extra: Any) -> dict[str, Any]:
    tier = {"type": "fs", "root_dir": str(root), "max_bytes": 10**8}
    extra = {"cpu_bytes_to_use": cpu_bytes, "secondary_tiers": [tier], **extra}
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return {"kv_transfer_config": {**config, "kv_connector_extra_config": extra}}


def ask(**options: Any) -> tuple[list[int], int, LLM]:
    """Tokens, how many of the prompt were found outside of the device, and the engine, closed."""
    with LLM(**{**SMALL, **options}) as llm:
        tokens = llm.generate(PROMPT, ONE, use_tqdm=False)[0].outputs[0].token_ids
        check_blocks(llm.llm_engine.block_manager)
        return tokens, getattr(llm.llm_engine.block_manager, "num_external_hit_tokens", 0), llm


def files_of(root: Path) -> list[Path]:
    return sorted(root.glob("*/??/*.bin"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True, "preemption_mode": "swap"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"kernels": "fast", "kv_cache_dtype": "auto", "enable_lora": True},
    ],
)
def test_same_tokens_with_files(options: dict[str, Any], tmp_path: Path) -> None:
    """On the CPU there is room for few blocks; and a second engine finds the files of the first."""
    with_files = {**options, **tiers(tmp_path, 200_000, eviction_policy="arc")}
    tokens, num_hits = generate(2, **with_files)
    assert tokens == generate_plainly() and num_hits > 0
    tokens, num_hits = generate(1, **with_files)
    assert tokens == generate_plainly()
    assert num_hits > 15 * 16  # of each of fifteen prompts at least four blocks


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_scales_are_in_the_files(dtype: str, tmp_path: Path) -> None:
    options = {"kv_cache_dtype": dtype, "kernels": "fast"}
    wanted = ask(**options)[0]
    found = [ask(**options, **folder(tmp_path))[:2] for _ in range(2)]
    assert found == [(wanted, 0), (wanted, 36)]


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_each_rank_has_files_of_its_own(ranks: dict[str, Any], tmp_path: Path) -> None:
    wanted = ask()[0]
    found = [ask(**ranks, **folder(tmp_path))[:2] for _ in range(2)]
    assert found == [(wanted, 0), (wanted, 36)]
    assert {path.suffixes[0] for path in files_of(tmp_path)} == {".0", ".1"}


def test_prefill_here_and_decode_there(tmp_path: Path) -> None:
    """One engine computes the prompt; the other computes the rest: 4 of 40 tokens."""
    wanted = ask()[0]
    consumer, producer = folder(tmp_path, "kv_consumer"), folder(tmp_path, "kv_producer")
    assert ask(**consumer)[:2] == (wanted, 0)
    assert files_of(tmp_path) == []
    assert [ask(**producer)[:2] for _ in range(2)] == [(wanted, 0)] * 2  # it reads none
    before = [path.read_bytes() for path in files_of(tmp_path)]
    assert ask(**consumer)[:2] == (wanted, 36)
    assert [path.read_bytes() for path in files_of(tmp_path)] == before


def test_another_engine_shares_no_files(tmp_path: Path) -> None:
    """Each of these would read other bytes, or make other ones of the same tokens."""
    ask(**folder(tmp_path))
    others: list[dict[str, Any]] = [
        {"block_size": 5},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8", "kernels": "fast"},
        {"quantization": "int8"},
        {"max_model_len": 76},
        {"load_format": "dummy"},
        {"model": str(copy_of_the_demo(tmp_path / "demo"))},
    ]
    for options in others:
        num_hits = [ask(**options, **folder(tmp_path))[1] for _ in range(2)]
        assert num_hits[0] == 0 < num_hits[1], options


def copy_of_the_demo(target: Path) -> Path:
    """The same, but for one byte in the middle of its weights."""
    with LLM(**SMALL) as llm:
        shutil.copytree(llm.llm_engine.model_config.path, target)
    weights = target / "model.safetensors"
    info, content = weights.stat(), bytearray(weights.read_bytes())
    start = len(content) // 512 * 256  # the middle sample
    content[start : start + 4096] = bytes(4096)
    weights.write_bytes(content)
    os.utime(weights, ns=(info.st_atime_ns, info.st_mtime_ns))
    return target


def test_a_salt_and_an_adapter_are_a_part_of_the_name(tmp_path: Path) -> None:
    prompts = [{"prompt_token_ids": PROMPT, "cache_salt": salt} for salt in (None, "a", "b", "a")]
    found = []
    for prompt in prompts:
        with LLM(**SMALL, **folder(tmp_path)) as llm:
            found.append(llm.generate(prompt, ONE, use_tqdm=False)[0].num_cached_tokens)
    assert found == [0, 0, 0, 36]


def break_file(path: Path, how: str, other: bytes = b"") -> None:
    content = bytearray(path.read_bytes())
    if how == "a byte":
        content[len(content) // 2] ^= 1
    elif how == "its header":
        content[20] ^= 1
    elif how == "foreign":  # whole, and not what its name says
        content = bytearray(other)
    else:
        content = content[: {"empty": 0, "short": 50, "cut": -1}[how]]
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["a byte", "its header", "foreign", "empty", "short", "cut"])
def test_a_damaged_file_is_computed(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = ask(**folder(tmp_path))[0]
    files = files_of(tmp_path)
    contents = [path.read_bytes() for path in files]
    for number, path in enumerate(files):
        break_file(path, how, contents[number - 1])
    with LLM(**SMALL, **folder(tmp_path)) as llm:
        output = llm.generate(PROMPT, ONE, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == wanted
    assert (output.num_cached_tokens, output.outputs[0].finish_reason) == (0, "length")
    assert "damaged" in caplog.text
    for _ in files:  # one request finds one of them
        ask(**folder(tmp_path))
    assert ask(**folder(tmp_path))[:2] == (wanted, 36)


def test_what_is_behind_a_damaged_file_is_computed(tmp_path: Path) -> None:
    """Whichever of the files it is. What stands before it is found."""
    wanted, found = ask(**folder(tmp_path))[0], set()
    for path in files_of(tmp_path):
        break_file(path, "a byte")
        tokens, num_hits, _ = ask(**folder(tmp_path))
        assert tokens == wanted
        found.add(num_hits)
    assert set(range(0, 36, 4)) <= found


def make_files(root: Path, max_bytes: int, fingerprint: bytes = b"f" * 32) -> BlockFiles:
    return BlockFiles(root, max_bytes, fingerprint)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 12), st.booleans()), max_size=40))
def test_a_folder_is_bounded(accesses: list[tuple[int, int, bool]]) -> None:
    """By all who share it; and what is read is what was written, or nothing."""
    with TemporaryDirectory() as root:
        engines = [make_files(Path(root), 1000, bytes([i]) * 32) for i in range(2)]
        hashes = [BlockHash(None, number) for number in range(13)]
        for which, number, is_write in accesses:
            files, block = engines[which], hashes[number]
            if is_write:
                data = np.full(100, number + 13 * which, np.uint8)
                files.write(0, {files.get_digest(block): data})
                assert files.contains(block)
            found = files.read(block)
            assert (found is not None) is files.contains(block)
            assert found is None or set(found[0]) == {number + 13 * which}
            sizes = [path.stat().st_size for path in files_of(Path(root))]
            assert sum(sizes) <= 1000 and not [*Path(root).glob("*/??/*.tmp")]


def test_the_file_that_was_used_last_stays(tmp_path: Path) -> None:
    files, hashes = make_files(tmp_path, 1000), [BlockHash(None, i) for i in range(6)]
    digests = [files.get_digest(each) for each in hashes]
    for number, digest in enumerate(digests[:5]):  # 176 bytes each: a sixth has no room
        files.write(0, {digest: np.zeros(100, np.uint8)})
        os.utime(files.get_path(digest, 0), (number, number))
    assert files.read(hashes[0]) is not None
    files.write(0, {digests[5]: np.zeros(100, np.uint8)})
    assert [files.contains(each) for each in hashes] == [True, False, True, True, True, True]
    make_files(tmp_path, 100).write(0, {b"d" * 32: np.zeros(100, np.uint8)})  # never fits
    assert sum(map(files.contains, hashes)) == 5


KILLED = """if True:
    import sys
    import numpy as np
    from nanoserve.chapters.kv_offload.disk import BlockFiles
    files = BlockFiles(sys.argv[1], 10**7, b"f" * 32)
    print("begun", flush=True)
    for number in range(10**6):
        files.write(0, {number.to_bytes(32, "big"): np.full(300_000, number % 256, np.uint8)})
"""


def test_a_writer_is_killed(tmp_path: Path) -> None:
    """Every file with a name is whole, the bound holds, and the next writer is not kept waiting."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        while len(files_of(tmp_path)) < 5:
            pass
        process.send_signal(signal.SIGKILL)
    files = make_files(tmp_path, 10**7)
    for path in files_of(tmp_path):
        header, data = path.read_bytes()[:76], np.fromfile(path, np.uint8)[76:]
        digest = bytes.fromhex(path.name.split(".")[0])
        assert header == files.make_header(digest, data) and len(set(data)) == 1
    for number in range(40):
        files.write(0, {bytes([number]) * 32: np.zeros(300_000, np.uint8)})
    assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 10**7
    assert not [*tmp_path.glob("*/??/*.tmp")]


def test_a_disk_that_refuses_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "kv"
    with LLM(**SMALL, **folder(root)) as llm:
        shutil.rmtree(root)
        root.write_text("a file where the folder was")
        output = llm.generate(PROMPT, ONE, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == ask()[0]
    assert "cannot be written" in caplog.text
    with pytest.raises(ValueError, match="kv"):
        LLM(**SMALL, **folder(root))


@pytest.mark.parametrize("meanwhile", ["nothing", "reset", "taken"])
def test_a_block_that_was_lost_is_neither_read_nor_written(meanwhile: str, tmp_path: Path) -> None:
    """A step that failed, or another sequence, stood between the decision and the step."""
    manager = OffloadBlockManager(num_blocks=2, block_size=2)
    manager.saved_to = manager.loaded_from = files = make_files(tmp_path, 10**6)
    seq = Sequence(
        0, "a", [1, 2, 3, 4, 5], SamplingParams(), 1, frozenset(), 0, RequestMetrics(0.0)
    )
    files.write(0, {files.get_digest(manager.hashes_of(seq, 1)[0]): np.zeros(4, np.uint8)})
    manager.allocate(seq, manager.get_computed_blocks(seq))  # reads block 0
    manager.append_slots(seq, 2)  # fills block 1
    second = files.get_digest(seq.block_hashes[1])
    if meanwhile == "reset":
        manager.reset()
    elif meanwhile == "taken":
        manager.free(seq)
        manager.take_block()
    note = manager.take_transfers()
    assert ([*note.loads], note.saves) == {
        "nothing": ([0], {second: 1}),
        "reset": ([], {}),
        "taken": ([0], {}),
    }[meanwhile]
    assert manager.take_transfers() == ({}, {})


class DiskRunner(OffloadRunner, FakeRunner):
    """The fake one, whose KV blocks are numbers."""

    def read_blocks(self, block_ids: list[int]) -> list[np.ndarray]:
        size, found = self.size, []
        for block in block_ids:
            slots = range(block * size, (block + 1) * size)
            values = [[layer[slot] for slot in slots] for layer in self.kv]
            found.append(np.frombuffer(pickle.dumps(values), np.uint8))
        return found

    def write_blocks(self, blocks: dict[int, np.ndarray]) -> None:
        for block, data in blocks.items():
            for layer, values in zip(self.kv, pickle.loads(data.tobytes()), strict=True):
                layer.update({block * self.size + i: value for i, value in enumerate(values)})


@settings(max_examples=60)
@given(**HISTORY, cpu=st.booleans())
def test_any_history_with_files(
    options: Mapping[str, Any], requests: list[Any], troubles: list[Any], cpu: bool
) -> None:
    """Two engines, one after the other, on one folder; files are damaged between."""
    with TemporaryDirectory() as root:
        more = {**folder(Path(root), max_bytes=10**5), "runner_cls": DiskRunner}
        options = {**options, "enable_prefix_caching": True}
        if cpu:
            options |= {"num_cpu_blocks": None, "kv_offloading_size": 1.0}
        Player(options, **more).play(requests, troubles)
        for path in files_of(Path(root))[::5] if options["enable_chunked_prefill"] else ():
            break_file(path, "a byte")
        Player(options, **more).play(requests, troubles)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"kv_connector": "NixlConnector", "kv_role": "kv_both"}, ValueError),
        ({"kv_connector": "ExampleConnector"}, ValueError),
        ({"kv_connector": "ExampleConnector", "kv_role": "both"}, ValueError),
        ({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}, ValueError),
        ({"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_rolle": 1}, TypeError),
        ("ExampleConnector", ValueError),
        (3, TypeError),
        (tiers(Path("x"), 0)["kv_transfer_config"], ValueError),
        (tiers(Path("x"), 10**6, eviction_policy="fifo")["kv_transfer_config"], ValueError),
        (tiers(Path("x"), 10**6, secondary_tiers=[{"type": "p2p"}])["kv_transfer_config"],) * 2,
        (folder(Path("x"), max_bytes="1")["kv_transfer_config"], TypeError),
    ],
)
def test_a_config_that_is_refused(config: Any, error: Any) -> None:
    with pytest.raises(error if isinstance(error, type) else ValueError):
        LLM(**SMALL, kv_transfer_config=config)


def test_vllms_keys(tmp_path: Path) -> None:
    """JSON text; main memory by kv_transfer_config alone; keys that change nothing; off."""
    text = '{"kv_connector": "SharedStorageConnector", "kv_role": "kv_both", "engine_id": "a", '
    text += f'"kv_connector_extra_config": {{"shared_storage_path": "{tmp_path}"}}}}'
    assert [ask(kv_transfer_config=text)[1] for _ in range(2)] == [0, 36]
    extra = {"cpu_bytes_to_use": 2**20, "eviction_policy": "arc", "spec_name": "CPUOffloadingSpec"}
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    config["kv_connector_extra_config"] = extra  # type: ignore[assignment]
    engine = ask(kv_transfer_config=config)[2].llm_engine
    assert engine.config.kv_offloading_size * 2**30 == 2**20
    assert isinstance(engine.block_manager.cpu_pool, ARCPool)
    assert ask(kv_transfer_config=None)[1] == ask(kv_transfer_config={})[1] == 0
