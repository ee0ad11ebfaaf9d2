"""What an engine has computed, the next one reads from the disk: the same tokens, and most of the
prompt is not computed again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nanoserve.extras.kv_offload")

from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import ThreadExecutor
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nanoserve import LLM, RequestOutput, SamplingParams
from nanoserve.extras.kv_offload.files import BlockFiles
from nanoserve.extras.lora import LoRARequest

BLOCK = 16  # tokens
PROMPT = [5 + i * i % 400 for i in range(150)]
NUM_BLOCKS = (len(PROMPT) - 1) // BLOCK  # of the prompt, without its last token
CACHED = NUM_BLOCKS * BLOCK
GREEDY = SamplingParams(temperature=0, max_tokens=4)
ROW = 40960  # bytes of a block of the demo model
WAIT = 60.0  # seconds, for what happens at once


def connector_options(root: Path, **options: Any) -> dict[str, Any]:
    extra = {"secondary_tiers": [{"type": "fs", "root_dir": str(root), **options}]}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


@contextmanager
def engine(root: Path, num_rows: int = 64, max_bytes: int = 2**30, **options: Any) -> Iterator[LLM]:
    """An engine above a disk tier; at its end, all transfers and all blocks are accounted for."""
    options = {"num_kv_blocks": 32, "max_num_batched_tokens": 256, **options}
    size = num_rows * (ROW * options.get("tensor_parallel_size", 1) + 1) / 2**30
    transfer = connector_options(root, max_bytes=max_bytes)
    with LLM(kv_offloading_size=size, kv_transfer_config=transfer, **options) as llm:
        yield llm
        llm.engine.block_manager.check()
        llm.engine.scheduler.connector.check()


def ask(llm: LLM, prompt: list[int] = PROMPT, **options: Any) -> RequestOutput:
    [output] = llm.generate([prompt], GREEDY, use_tqdm=False, **options)
    return output


def tokens_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def expected(demo_llm: LLM) -> list[int]:
    """The answer to PROMPT."""
    return tokens_of(ask(demo_llm))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the blocks of PROMPT; tests copy it."""
    root = tmp_path_factory.mktemp("stored")
    with engine(root) as llm:
        assert ask(llm).num_cached_tokens == 0
    assert len(list(root.glob("*/*/*.bin"))) >= NUM_BLOCKS
    return root


@pytest.fixture
def root(stored: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stored, tmp_path / "kv")


@pytest.mark.parametrize("num_rows", [64, 4, 1])
def test_a_restarted_engine_does_not_compute_a_known_prompt(
    root: Path, num_rows: int, expected: list[int]
) -> None:
    """As far as the rows of the CPU tier reach, through which the blocks come."""
    with engine(root, num_rows) as llm:
        output, num_loaded = ask(llm), min(num_rows, NUM_BLOCKS)
        assert output.num_cached_tokens == num_loaded * BLOCK
        assert tokens_of(output) == expected
        counters = llm.engine.scheduler.connector.stats.counters
        assert counters["vllm:kv_offload_tiering_read_bytes", "fs"] == num_loaded * ROW
        assert counters["vllm:prompt_tokens_cached_by_source", "disk"] == num_loaded * BLOCK
        assert counters["vllm:kv_offload_tiering_chunk_hits", "fs"] <= NUM_BLOCKS
        assert ask(llm, PROMPT[:70]).num_cached_tokens == 64
        assert ask(llm, [7, *PROMPT]).num_cached_tokens == 0


@pytest.mark.parametrize(
    "options",
    [{"async_scheduling": True}, {"num_kv_blocks": 12}, {"max_num_batched_tokens": 32}],
    ids=str,
)
def test_whatever_the_steps_are(root: Path, options: dict[str, Any], expected: list[int]) -> None:
    with engine(root, **options) as llm:
        outputs = llm.generate([PROMPT, PROMPT[:100], PROMPT], GREEDY, use_tqdm=False)
        assert [each.num_cached_tokens for each in outputs] == [CACHED, 96, CACHED]
        assert tokens_of(outputs[0]) == tokens_of(outputs[2]) == expected


def test_all_chunks_of_a_prompt_are_stored(tmp_path: Path) -> None:
    for num_cached in (0, CACHED):
        with engine(tmp_path, max_num_batched_tokens=32) as llm:
            assert ask(llm).num_cached_tokens == num_cached


def test_blocks_hold_what_a_draft_model_has_computed(tmp_path: Path, expected: list[int]) -> None:
    """It reads a step's tokens after the model. Otherwise its drafts were bad after a restart."""
    spec = {"method": "draft_model", "model": "nanoserve/demo", "num_speculative_tokens": 3}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for num_cached in (0, CACHED):
        with engine(tmp_path, speculative_config=spec, num_rows=128) as llm:
            [output] = llm.generate([PROMPT], params, use_tqdm=False)
            assert output.num_cached_tokens == num_cached
            assert tokens_of(output)[: len(expected)] == expected
            assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens > 20


def test_running_engines_share_a_folder(tmp_path: Path, expected: list[int]) -> None:
    with engine(tmp_path) as one, engine(tmp_path) as other:
        assert ask(one).num_cached_tokens == 0
        one.engine.scheduler.connector.tiers.tiers[0].drain_jobs(WAIT)
        output = ask(other)
        assert output.num_cached_tokens == CACHED
        assert tokens_of(output) == expected


def test_ranks_share_a_file_and_no_other_number_of_ranks_reads_it(
    root: Path, expected: list[int]
) -> None:
    """A row, and so a file, has the parts of all ranks."""
    for num_cached in (0, CACHED):
        with engine(root, tensor_parallel_size=2, executor_cls=ThreadExecutor) as llm:
            output = ask(llm)
            assert output.num_cached_tokens == num_cached
            assert tokens_of(output) == expected


def test_what_cannot_be_read_is_computed_and_stored_again(
    root: Path, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    for name in root.glob("*/*/*.bin"):
        content = bytearray(name.read_bytes())
        content[-1] ^= 1
        name.write_bytes(content)
    with engine(root) as llm:
        output = ask(llm)
        assert output.num_cached_tokens == 0
        assert tokens_of(output) == expected
    assert "CRC-32" in caplog.text
    with engine(root) as llm:
        assert ask(llm).num_cached_tokens == CACHED


def test_a_prefix_is_good_up_to_its_first_bad_block(root: Path, expected: list[int]) -> None:
    load, num_left = BlockFiles.load, 3

    def load_some(self: BlockFiles, key: bytes, buffer: memoryview) -> bool:
        nonlocal num_left
        num_left -= 1
        return num_left >= 0 and load(self, key, buffer)

    with engine(root) as llm:
        [tier] = llm.engine.scheduler.connector.tiers.tiers
        tier.files.load = load_some.__get__(tier.files)
        output = ask(llm)
        assert 0 <= (output.num_cached_tokens or 0) <= 3 * BLOCK
        assert tokens_of(output) == expected


def test_no_step_waits_for_a_disk_that_hangs(root: Path, expected: list[int]) -> None:
    """Who waits holds no KV blocks, and others run; when the disk goes on, the blocks are there."""
    hang = threading.Event()
    with engine(root) as llm:
        [tier] = llm.engine.scheduler.connector.tiers.tiers
        load = tier.files.load
        tier.files.load = lambda *block: hang.wait(WAIT) and load(*block)
        scheduler, outputs = llm.engine.scheduler, {}
        llm.engine.add_request("waits", PROMPT, GREEDY)
        llm.engine.add_request("runs", PROMPT[::-1], GREEDY)
        while "runs" not in outputs:
            outputs |= {each.request_id: each for each in llm.engine.step() if each.finished}
        [waiting] = scheduler.waiting
        assert waiting.request_id == "waits"
        assert waiting.seq_id not in llm.engine.block_manager.block_tables
        scheduler.connector.check()
        hang.set()
        while "waits" not in outputs:
            outputs |= {each.request_id: each for each in llm.engine.step() if each.finished}
        assert outputs["waits"].num_cached_tokens == CACHED
        assert tokens_of(outputs["waits"]) == expected


@pytest.mark.parametrize("how", ["abort", "timeout", "close"])
def test_a_request_may_stop_waiting(
    root: Path, how: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborted; or computed after LOAD_TIMEOUT; or the engine is closed. Nothing is lost."""
    hang = threading.Event()
    if how == "timeout":
        monkeypatch.setattr("nanoserve.extras.kv_offload.tiering.LOAD_TIMEOUT", 0.02)
    with engine(root) as llm:
        connector = llm.engine.scheduler.connector
        [tier] = connector.tiers.tiers
        load = tier.files.load
        tier.files.load = lambda *block: hang.wait(WAIT) and load(*block)
        if how == "timeout":
            output = ask(llm)
            assert output.num_cached_tokens == 0
            assert tokens_of(output) == expected
        else:
            llm.engine.add_request("waits", PROMPT, GREEDY)
            while not connector.tiers.jobs:
                llm.engine.step()
        if how == "abort":
            llm.engine.abort_request("waits")
            connector.check()
            assert connector.tiers.jobs
        if how == "close":
            threading.Timer(0.05, hang.set).start()  # close() waits for the threads
            return
        hang.set()
        tier.drain_jobs(WAIT)
        connector.poll()
        connector.check()
        assert not connector.tiers.jobs
        assert tokens_of(ask(llm)) == expected


def test_salts_keep_apart_what_is_on_the_disk(root: Path) -> None:
    def ask_with(llm: LLM, salt: str) -> int | None:
        prompt: Any = {"prompt_token_ids": PROMPT, "cache_salt": salt}
        return ask(llm, prompt).num_cached_tokens

    with engine(root) as llm:
        assert ask_with(llm, "a") == 0
    with engine(root) as llm:
        assert ask_with(llm, "b") == 0
        assert ask_with(llm, "a") == CACHED
        assert ask(llm).num_cached_tokens == CACHED


def test_an_adapter_is_known_by_its_files(tmp_path: Path) -> None:
    """Not by its name or number, which mean nothing to the next engine."""
    folder = shutil.copytree(Path("nanoserve/demo/lora"), tmp_path / "adapter")

    def ask_twice(number: int) -> list[int | None]:
        with engine(tmp_path / "kv", enable_lora=True, max_lora_rank=64) as llm:
            adapter = LoRARequest(f"adapter {number}", number, folder)
            return [ask(llm, lora_request=each).num_cached_tokens for each in (adapter, None)]

    assert ask_twice(1) == [0, 0]
    assert ask_twice(2) == [CACHED, CACHED]
    os.utime(folder / "adapter_model.safetensors")
    assert ask_twice(2) == [0, CACHED]
    change_content(folder / "adapter_model.safetensors")
    assert ask_twice(2) == [0, CACHED]


def test_an_adapter_is_what_it_was_when_it_was_checked(tmp_path: Path) -> None:
    """Its config.json is another one by its first request: what that computes is not found under
    the new one."""
    folder = shutil.copytree(Path("nanoserve/demo/lora"), tmp_path / "adapter")
    file = folder / "adapter_config.json"
    answers = []
    for change in (True, False):
        with engine(tmp_path / "kv", enable_lora=True, max_lora_rank=64) as llm:
            adapter = LoRARequest("adapter", 1, folder)
            llm.engine.lora_manager.add_lora(adapter)
            if change:
                settings = json.loads(file.read_text())
                file.write_text(json.dumps({**settings, "lora_alpha": -settings["lora_alpha"]}))
            answers.append(ask(llm, lora_request=adapter))
    assert [each.num_cached_tokens for each in answers] == [0, 0]
    assert tokens_of(answers[0]) != tokens_of(answers[1])


def test_an_adapter_that_was_deleted_is_an_error_of_its_request(tmp_path: Path) -> None:
    folder = shutil.copytree(Path("nanoserve/demo/lora"), tmp_path / "adapter")
    with engine(tmp_path / "kv", enable_lora=True, max_lora_rank=64) as llm:
        adapter = LoRARequest("adapter", 1, folder)
        llm.engine.lora_manager.add_lora(adapter)
        shutil.rmtree(folder)
        llm.engine.add_request("gone", PROMPT, GREEDY, lora_request=adapter)
        llm.engine.add_request("there", PROMPT, GREEDY)
        outputs = {}
        while llm.engine.has_unfinished_requests():
            outputs |= {each.request_id: each for each in llm.engine.step()}
        assert outputs["gone"].outputs[0].finish_reason == "error"
        assert outputs["there"].outputs[0].finish_reason == "length"


def test_new_weights_under_an_old_name_meet_no_old_blocks(tmp_path: Path) -> None:
    model = shutil.copytree(Path("nanoserve/demo"), tmp_path / "model")
    for num_cached in (0, CACHED):
        with engine(tmp_path / "kv", model=model) as llm:
            assert ask(llm).num_cached_tokens == num_cached
    for change in (os.utime, change_content):
        change(model / "model.safetensors")
        with engine(tmp_path / "kv", model=model) as llm:
            assert ask(llm).num_cached_tokens == 0


def change_content(file: Path) -> None:
    """Other weights of the same size and time, as in an image all of whose files have one time."""
    found = file.stat()
    header, tensors = load_metadata(file), load_file(file)
    save_file({name: tensor * 0.9 for name, tensor in tensors.items()}, file, header)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert file.stat().st_size == found.st_size


def load_metadata(file: Path) -> dict[str, str] | None:
    with safe_open(file, framework="pt") as tensors:
        return tensors.metadata()


def test_other_settings_meet_no_old_blocks(root: Path) -> None:
    for options in ({"kv_cache_dtype": "int8"}, {"block_size": 8}, {"dtype": "bfloat16"}):
        with engine(root, **options) as llm:
            assert ask(llm).num_cached_tokens == 0


@given(data=st.data())
@settings(max_examples=8)
def test_the_tokens_are_those_of_an_engine_without_tiers(
    demo_llm: LLM, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """With three tiers that are all too small, over restarts, with a disk that fails at times."""
    root = tmp_path_factory.mktemp("property")
    num_rows = data.draw(st.integers(1, 12), label="rows")
    num_files = data.draw(st.integers(1, 30), label="files")
    options = {
        "num_kv_blocks": data.draw(st.integers(8, 14), label="KV blocks"),
        "async_scheduling": data.draw(st.booleans(), label="async"),
        "max_num_batched_tokens": data.draw(st.sampled_from([24, 300]), label="budget"),
    }
    tokens = st.lists(st.integers(5, 8), min_size=17, max_size=90)
    stems = data.draw(st.lists(tokens, min_size=1, max_size=3), label="stems")
    for _ in range(2):
        with engine(root, num_rows, num_files * (ROW + 200), **options) as llm:
            [tier] = llm.engine.scheduler.connector.tiers.tiers
            fail_sometimes(tier.files, data.draw(st.integers(1, 9), label="each nth fails"))
            for _ in range(2):
                ends = st.tuples(st.sampled_from(stems), st.lists(st.integers(5, 8), max_size=20))
                prompts = [a + b for a, b in data.draw(st.lists(ends, min_size=1, max_size=4))]
                found = llm.generate(prompts, GREEDY, use_tqdm=False)
                wanted = demo_llm.generate(prompts, GREEDY, use_tqdm=False)
                assert list(map(tokens_of, found)) == list(map(tokens_of, wanted))
                llm.engine.scheduler.connector.check()
                llm.engine.block_manager.check()
        assert sum(name.stat().st_size for name in root.glob("*/*/*")) <= num_files * (ROW + 200)


def fail_sometimes(files: BlockFiles, each: int) -> None:
    """Let each nth load and store fail; a load that fails leaves rubbish."""
    calls = iter(range(10**9))

    def wrap(move: Callable[[bytes, memoryview], bool]) -> Callable[[bytes, memoryview], bool]:
        def wrapped(key: bytes, buffer: memoryview) -> bool:
            if next(calls) % each:
                return move(key, buffer)
            if move.__name__ == "load":
                buffer[:] = b"\x7f" * len(buffer)
            return False

        return wrapped

    files.load, files.store = wrap(files.load), wrap(files.store)  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_server_that_was_killed_answers_a_known_prompt_without_computing_it(
    tmp_path: Path,
) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("openai")
    from servers import Command, until

    transfer = json.dumps(connector_options(tmp_path))
    options = ["--kv-offloading-size", "0.01", "--kv-transfer-config", transfer]
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    answers = []
    for number in range(2):
        with Command(*options) as server:
            answers.append(server.ask("POST", "/v1/completions", body).json)
            if number == 0:
                until(lambda: len(list(tmp_path.glob("*/*/*.bin"))) == NUM_BLOCKS)
                server.send(signal.SIGKILL)
                server.wait()
    assert answers[1]["choices"][0]["text"] == answers[0]["choices"][0]["text"]
    details = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
    assert details == [0, CACHED]
