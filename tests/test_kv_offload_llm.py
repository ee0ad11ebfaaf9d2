"""The tiers under the demo model: the same tokens from rows, on one rank and on two; what the
options say, and what they refuse."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_invariants import assert_same, expected, make_requests

from nanoserve import LLM, EngineArgs, SamplingParams
from nanoserve.config import DEMO_MODEL, EngineConfig

config = pytest.importorskip("nanoserve.extras.kv_offload.config")
base = pytest.importorskip("nanoserve.extras.kv_offload.base")
digests = pytest.importorskip("nanoserve.extras.kv_offload.digests")

__all__ = ["expected"]  # a fixture of test_invariants
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


def offloading(**extra: Any) -> dict[str, Any]:
    """kv_transfer_config with these keys in kv_connector_extra_config."""
    return {**OFFLOADING, "kv_connector_extra_config": {"cpu_bytes_to_use": 10**7, **extra}}


class DictTier(base.SecondaryTierManager):  # type: ignore[name-defined, misc]
    """A tier in a dict. A transfer is made when it is submitted."""

    tier_type = "dict"

    def __init__(self, primary: Any, store: dict[bytes, bytes]) -> None:
        self.rows, self.store, self.done = primary.rows, store, []
        self.identity = primary.identity

    def lookup(self, key: bytes) -> Any:
        return base.LookupResult.HIT if key in self.store else base.LookupResult.MISS

    def submit_store(self, job: Any) -> None:
        for key, row in zip(job.keys, job.block_ids, strict=True):
            self.store[key] = self.rows[row].tobytes()
        self.done.append(base.JobResult(job.job_id, job.keys))

    def submit_load(self, job: Any) -> None:
        for key, row in zip(job.keys, job.block_ids, strict=True):
            self.rows[row] = np.frombuffer(self.store[key], np.uint8)
        self.done.append(base.JobResult(job.job_id, job.keys))

    def get_finished_jobs(self) -> list[Any]:
        done, self.done = self.done, []
        return done

    def drain_jobs(self, timeout: float) -> None:
        return

    def shutdown(self) -> None:
        return


# -- the same tokens --


def generate_twice(expected: Sequence[list[int]], **options: Any) -> int:
    """All requests of test_invariants, each alone, two times: the tokens are right. How many prompt
    tokens of the second round came from another tier."""
    requests = make_requests()
    engine_options = {"block_size": 4, "num_kv_blocks": 64, "max_num_seqs": 3, **options}
    with LLM(**engine_options) as llm:
        found = []
        for _ in range(2):
            before = llm.engine.kv_connector.stats.counters["vllm:external_prefix_cache_hits", ""]
            prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
            outputs = llm.generate(prompts, [each.params for each in requests], use_tqdm=False)
            for request, output, tokens in zip(requests, outputs, expected, strict=True):
                assert_same(request, output.outputs[0].token_ids, tokens)
            after = llm.engine.kv_connector.stats.counters["vllm:external_prefix_cache_hits", ""]
            found.append(after - before)
        llm.engine.kv_connector.poll()
        llm.engine.kv_connector.check()
        llm.engine.block_manager.check()
    return int(found[1])


SETTINGS: dict[str, dict[str, Any]] = {
    "LRU": {"kv_offloading_size": 0.01},
    "ARC, few rows": {"kv_transfer_config": offloading(cpu_bytes_to_use=800_000)},
    "overlap and swap": {
        "kv_offloading_size": 0.01,
        "async_scheduling": True,
        "preemption_mode": "swap",
    },
    "drafts": {
        "kv_offloading_size": 0.01,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    },
}


SLOW = ("LRU", "drafts")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in SETTINGS]
)
def test_tiers_change_no_token(name: str, expected: list[list[int]]) -> None:
    assert generate_twice(expected, **SETTINGS[name]) > 0


@pytest.mark.slow
def test_two_ranks_have_a_part_of_each_row(expected: list[list[int]]) -> None:
    """Rank 0 sees both parts: what it puts below is whole, and another engine can load it."""
    store: dict[bytes, bytes] = {}
    tier = {"type": "DictTier", "module_path": __name__, "store": store}
    options = {"tensor_parallel_size": 2, "kv_transfer_config": offloading(secondary_tiers=[tier])}
    assert generate_twice(expected, **options) > 0
    assert store and all(any(content) for content in store.values())
    with LLM(block_size=4, num_kv_blocks=64, **options) as llm:
        request = make_requests()[5]
        [output] = llm.generate(request.prompt_token_ids, request.params, use_tqdm=False)
        assert output.num_cached_tokens == 168  # of 170: all but the last block
        assert_same(request, output.outputs[0].token_ids, expected[5])


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_rows_hold_eight_bits_and_their_scales(dtype: str) -> None:
    """A prompt that comes back from rows has the logprobs that it had before."""
    prompts = [[i % 300 + 3 for i in range(start, start + 40)] for start in (0, 50, 100)]
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2)
    with LLM(num_kv_blocks=8, block_size=8, kv_cache_dtype=dtype, kv_offloading_size=0.01) as llm:
        first, *_, again = [
            llm.generate(tokens, params, use_tqdm=False)[0] for tokens in (*prompts, prompts[0])
        ]
    assert again.num_cached_tokens == 32
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.outputs[0].cumulative_logprob == pytest.approx(
        first.outputs[0].cumulative_logprob, abs=1e-4
    )


@pytest.mark.gpu
def test_rows_on_a_gpu(expected: list[list[int]]) -> None:
    """Pinned rows, and stores beside the step's computation."""
    assert generate_twice(expected, kv_offloading_size=0.01, dtype="float32") > 0


def test_a_rows_bytes_are_those_of_the_block() -> None:
    """Layer by layer, keys then values, as the KV cache has them."""
    with LLM(num_kv_blocks=4, block_size=4, kv_offloading_size=0.001) as llm:
        worker, runner = llm.engine.executor.kv_connector, llm.engine.executor.runner
        for caches in runner.kv_caches:
            for cache in caches:
                cache.normal_()
        metadata = base.KVConnectorMetadata(1, stores=((2, 5), (0, 1)), saves=((3, 7),))
        worker.start_load_kv(metadata)
        assert worker.num_done() == 0
        worker.wait_for_save()
        assert worker.num_done() == 1
        for block, row in ((2, 5), (0, 1), (3, 7)):
            parts = [
                cache[block].transpose(0, 1) for caches in runner.kv_caches for cache in caches
            ]
            whole = b"".join(part.contiguous().numpy().tobytes() for part in parts)
            assert worker.rows[row].tobytes() == whole
        worker.start_load_kv(base.KVConnectorMetadata(2, loads=((5, 1),)))
        for caches in runner.kv_caches:
            assert all((cache[1] == cache[2]).all() for cache in caches)


# -- adapters --


@pytest.mark.slow
def test_an_adapter_finds_its_own_rows() -> None:
    """The same prompt with an adapter and without, by turns, while others take the KV blocks."""
    from nanoserve import LoRARequest

    pirate = LoRARequest("pirate", 1, str(DEMO_MODEL / "lora"))
    prompts = [[i % 300 + 3 for i in range(start, start + 40)] for start in (0, 50, 100)]
    params = SamplingParams(temperature=0, max_tokens=4)
    results = []
    for size in (None, 0.01):
        store: dict[bytes, bytes] = {}
        tiers = [{"type": "DictTier", "module_path": __name__, "store": store}]
        transfer = offloading(secondary_tiers=tiers) if size else None
        for _ in range(2):
            with LLM(
                num_kv_blocks=8, block_size=8, enable_lora=True, kv_transfer_config=transfer
            ) as llm:
                results.append([])
                for tokens in (*prompts, *prompts):
                    for lora in (pirate, None):
                        [output] = llm.generate(tokens, params, lora_request=lora, use_tqdm=False)
                        results[-1].append((output.outputs[0].token_ids, output.num_cached_tokens))
    first, second = results[2:]
    tokens_of = [[tokens for tokens, _ in result] for result in results]
    assert tokens_of[0] == tokens_of[1] == tokens_of[2] == tokens_of[3]
    assert [found for _, found in first] == [0] * 6 + [32] * 6
    assert [found for _, found in second] == [32] * 12


def test_a_digest_is_that_of_the_whole_prefix() -> None:
    """Equal for equal prefixes and salts in two engines, different for all else."""
    found: list[dict[Any, bytes]] = []
    for _ in range(2):
        with LLM(num_kv_blocks=16, block_size=4) as llm:
            names = digests.BlockDigests()
            digest_of = {}
            for tokens in ([5] * 12, [5] * 8 + [6] * 4, [6] * 4 + [5] * 8):
                for salt in (None, "a"):
                    prompt = {"prompt_token_ids": tokens, "cache_salt": salt} if salt else tokens
                    [seq] = [
                        llm.engine.make_request("x", prompt, SamplingParams(max_tokens=1)).root
                    ]
                    llm.engine.block_manager.get_cached_blocks(seq)
                    for i, block_hash in enumerate(seq.block_hashes):
                        digest_of[salt, tuple(tokens[: 4 * i + 4])] = names.get(block_hash)
            found.append(digest_of)
    assert found[0] == found[1]
    assert len(set(found[0].values())) == len(found[0]) == 2 * 4


# -- options --


def test_the_short_option_and_the_long_one() -> None:
    short = config.OffloadingConfig.from_config(EngineConfig(kv_offloading_size=0.5))
    assert short.cpu_bytes_to_use == 2**29 and short.eviction_policy == "lru"
    extra = {"eviction_policy": "arc", "spec_name": "TieringOffloadingSpec", "block_size": 16}
    options = EngineArgs(kv_transfer_config=offloading(**extra), kv_offloading_size=0.5)
    both = config.OffloadingConfig.from_config(options.create_engine_config())
    assert both.cpu_bytes_to_use == 2**29 and both.eviction_policy == "arc"
    assert not EngineConfig(kv_transfer_config={}).has_kv_connector
    assert not EngineConfig(kv_transfer_config={"kv_role": "kv_both"}).has_kv_connector


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        ("{", "not JSON"),
        ([1], "must be a dict"),
        ({"kv_conector": "x"}, "Did you mean 'kv_connector'?"),
        ({"kv_connector": "NixlConnector", "kv_role": "kv_both"}, "allowed: OffloadingConnector"),
        ({"kv_connector": "OffloadingConnector"}, "no kv_role"),
        ({**OFFLOADING, "kv_role": "both"}, "allowed: kv_producer, kv_consumer, kv_both"),
        ({**OFFLOADING, "kv_load_failure_policy": "fail"}, "allowed: 'recompute'"),
        ({**OFFLOADING, "engine_id": 5}, "engine_id must be a string"),
        (OFFLOADING, "no cpu_bytes_to_use"),
        (offloading(cpu_bytes_to_use=0), "allowed: 1 to 2**63 - 1"),
        (offloading(cpu_bytes_to_use=1.5), "must be an int"),
        (offloading(eviction_policy="fifo"), "allowed: lru, arc"),
        (offloading(eviction_polcy="lru"), "Did you mean 'eviction_policy'?"),
        (offloading(store_threshold=3), "store_threshold"),
        (offloading(block_size=32), "the engine's is 16"),
        (offloading(secondary_tiers={"type": "fs"}), "must be a list of dicts"),
        (offloading(secondary_tiers=[{"root_dir": "/"}]), "with a 'type'"),
        (offloading(secondary_tiers=[{"type": "tape"}]), "allowed: fs, p2p"),
        (offloading(secondary_tiers=[{"type": "fs", "rootdir": "x"}]), "mean 'root_dir'?"),
        (offloading(secondary_tiers=[{"type": "fs", "root_dir": 3}]), "must be a folder"),
    ],
)
def test_bad_options_say_what_is_allowed(transfer: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        EngineConfig(kv_transfer_config=transfer)
    assert message in str(caught.value)


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="enable_prefix_caching is False"):
        EngineConfig(kv_offloading_size=1, enable_prefix_caching=False)
    with pytest.raises(ValueError, match="less than one block of"):
        LLM(kv_transfer_config=offloading(cpu_bytes_to_use=10))
    with pytest.raises(ValueError, match="no class 'Nobody'"):
        LLM(
            num_kv_blocks=8,
            kv_transfer_config=offloading(
                secondary_tiers=[{"type": "Nobody", "module_path": __name__}]
            ),
        )


def test_a_scheduler_or_executor_without_the_seam_is_refused() -> None:
    from fakes import FakeExecutor

    class Blind(FakeExecutor):
        kv_connector = property(lambda self: None, lambda self, value: None)

    with pytest.raises(ValueError, match="executor_cls is a class of yours"):
        LLM(kv_offloading_size=0.01, executor_cls=Blind)


@pytest.mark.parametrize("size", [0, 1, 4096, 9000, 2**20, 2**20 + 1, 3 * 2**20 + 7])
def test_a_file_is_known_by_its_size_time_and_content(tmp_path: Path, size: int) -> None:
    file = tmp_path / "model.safetensors"

    def describe(content: bytes, time: int = 0) -> Any:
        file.write_bytes(content)
        os.utime(file, (time, time))
        return digests.describe_files(tmp_path)

    zeros = bytes(size)
    before = describe(zeros)
    (tmp_path / "folder.json").mkdir()  # is nobody's
    assert before == describe(zeros)
    others = [describe(zeros, time=1), describe(zeros + b"0")]
    piece = max(1, size // 255)  # somewhere: no more is skipped
    for start in {0, max(0, size - 1), *range(0, size, max(1, size // 50))}:
        end = min(size, start + (1 if size <= 2**20 else piece))
        others.append(describe(zeros[:start] + b"1" * (end - start) + zeros[end:]))
    assert before not in (others if size else others[:2])
