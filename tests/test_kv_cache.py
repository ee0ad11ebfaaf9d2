"""How many KV blocks fit, and the profile run that measures the rest of the memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoserve import kv_cache
from nanoserve.attention import AttentionBackend
from nanoserve.config import DEMO_MODEL, EngineConfig, ModelConfig
from nanoserve.cuda_graph import MEMORY_RESERVE
from nanoserve.kernels.attention_cpu import TorchBackend
from nanoserve.kernels.seen_tokens import allocate_seen_tokens
from nanoserve.kv_cache import (
    MANAGER_BYTES,
    KVCacheSpec,
    allocate_kv_caches,
    check_num_blocks,
    copy_blocks,
    determine_num_kv_blocks,
    free_memory,
    index_on,
    memory_limit,
    num_blocks_that_fit,
    profile_run,
    size_cpu_pool,
    warm_up,
)
from nanoserve.layers import LayerConfig
from nanoserve.memory import available_memory, total_memory
from nanoserve.models.loader import load_model
from nanoserve.models.registry import build_model
from nanoserve.parallel import ParallelState
from nanoserve.sampler import Choose, SampledTokens, SamplingBatch, sample

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize(("budget", "lengths"), [(24, [24]), (64, [64]), (150, [64, 64, 22])])
def test_the_profile_run_is_the_largest_step(
    make_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    budget: int,
    lengths: list[int],
) -> None:
    """The whole budget, in sequences of full length, and max_num_seqs rows with all filters on, and
    with penalties for sequences of full length. Meanwhile the tokens that penalties count take
    their memory. It has a KV cache of one block, and stores nothing."""
    folder = make_checkpoint("llama")
    options = {"max_num_seqs": 3, "max_model_len": 64, "max_num_batched_tokens": budget}
    model_config = ModelConfig.from_folder(folder)
    config = EngineConfig(str(folder), block_size=4, **options).resolve(model_config)
    layer_config = LayerConfig(attention=TorchBackend())
    model = load_model(config, model_config, layer_config, use_tqdm=False)
    seen: list[Any] = []
    forward = model.forward

    counted: list[weakref.ref[Tensor]] = []

    def allocate(*arguments: Any) -> tuple[Tensor, Tensor]:
        assert arguments == (3, 64, model_config.vocab_size, CPU)
        tensors = allocate_seen_tokens(*arguments)
        counted.extend(map(weakref.ref, tensors))
        return tensors

    def record(*arguments: Any) -> Any:
        assert None not in [tensor() for tensor in counted]
        seen.append(arguments)
        return forward(*arguments)

    def record_and_sample(logits: Tensor, batch: SamplingBatch, choose: Choose) -> SampledTokens:
        assert None not in [tensor() for tensor in counted]
        seen.append((logits, batch))
        return sample(logits, batch, choose)

    monkeypatch.setattr(model, "forward", record)
    monkeypatch.setattr("nanoserve.kv_cache.sample", record_and_sample)
    monkeypatch.setattr("nanoserve.kv_cache.allocate_seen_tokens", allocate)
    profile_run(config, model, layer_config)
    _, (input_ids, positions, caches, metadata), (logits, batch) = seen
    assert [tensor() for tensor in counted] == [None] * 2
    assert len(input_ids) == len(positions) == len(metadata.slot_mapping) == budget
    assert metadata.query_start_loc.diff().tolist() == metadata.seq_lens.tolist() == lengths
    assert positions.tolist() == [i for length in lengths for i in range(length)]
    assert metadata.plan is not None
    assert set(metadata.slot_mapping.tolist()) == {-1}
    assert not metadata.block_table.any()
    assert {cache.shape[0] for pair in caches for cache in pair} == {1}
    assert all(not cache.any() for pair in caches for cache in pair)
    assert tuple(logits.shape) == (3, model_config.vocab_size)
    assert None not in (batch.top_k, batch.top_p, batch.min_p)
    assert not batch.is_greedy
    assert batch.penalties is not None
    assert batch.penalties.token_ids.shape == batch.penalties.output_counts.shape == (3, 64)


@pytest.mark.parametrize(("block_size", "max_model_len"), [(4, 300), (16, 40), (128, 1000)])
def test_the_steps_that_warm_up(
    make_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    block_size: int,
    max_model_len: int,
) -> None:
    """A decode and prompts beside block tables of all widths up to the longest, each with room for
    its tokens. Nothing is stored. (test_fused_triton.py looks at what they launch.)"""
    folder = make_checkpoint("llama")
    model_config = ModelConfig.from_folder(folder)
    config = EngineConfig(str(folder), block_size=block_size, max_model_len=max_model_len)
    layer_config = LayerConfig(attention=TorchBackend())
    model = load_model(config, model_config, layer_config, use_tqdm=False)
    steps: list[Any] = []
    forward = model.forward

    def record(*arguments: Any) -> Tensor:
        output = forward(*arguments)
        steps.append(arguments)
        return output

    monkeypatch.setattr(model, "forward", record)
    warm_up(config, model, layer_config)
    assert {len(input_ids) for input_ids, *_ in steps} == {1, 2, 32, min(64, max_model_len)}
    widths: dict[int, list[int]] = {}
    for input_ids, _, caches, metadata in steps:
        width = metadata.block_table.shape[1]
        widths.setdefault(len(input_ids), []).append(width)
        assert width * block_size >= int(metadata.seq_lens.max()) == len(input_ids)
        assert set(metadata.slot_mapping.tolist()) == {-1}
        assert all(not cache.any() for pair in caches for cache in pair)
        assert metadata.plan is not None
    for found in widths.values():
        assert found[-1] == -(-max_model_len // block_size)
        assert all(wider <= 2 * width for width, wider in pairwise(found))
    assert widths[1][0] == 1


@pytest.mark.parametrize(
    ("options", "has_graphs", "expected"),
    [
        ({}, True, 1000 + MEMORY_RESERVE),
        ({}, False, 1000),  # attention of which no graph can be made
        ({"enforce_eager": True}, True, 1000),
        ({"num_gpu_blocks_override": 9}, True, 0),
        ({"kv_cache_memory_bytes": 2**30}, True, 0),
    ],
)
def test_what_the_cache_leaves_free_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], has_graphs: bool, expected: int
) -> None:
    """The largest step, and CUDA graphs if there will be any; nothing if the user sets the size.
    Kernels are warmed up in any case, before anything is measured."""
    calls: list[Any] = []
    monkeypatch.setattr("nanoserve.kv_cache.warm_up", lambda *_: calls.append("warm up"))
    monkeypatch.setattr("nanoserve.kv_cache.profile_memory", lambda *_: calls.append("run") or 1000)
    monkeypatch.setattr("nanoserve.kv_cache.num_blocks_that_fit", lambda *a: calls.append(a[4]))
    monkeypatch.setattr(ParallelState, "all_reduce_min", lambda _, number: number)
    backend = AttentionBackend()
    monkeypatch.setattr(backend, "supports_cuda_graphs", has_graphs)
    layer_config = LayerConfig(device=torch.device("cuda"), attention=backend)
    model = build_model(ModelConfig.from_folder(DEMO_MODEL), 64, LayerConfig(device=META))
    determine_num_kv_blocks(EngineConfig(**options), model, layer_config)
    assert calls == ["warm up", *["run"] * (expected > 0), expected]


@pytest.mark.parametrize("num_layers", [1, 3])
def test_copied_blocks(monkeypatch: pytest.MonkeyPatch, num_layers: int) -> None:
    """Every layer's keys and values, between caches and within one; however many layers there are,
    the block ids are sent to each device once."""
    sent: list[Any] = []

    def record(numbers: list[int], device: torch.device) -> Tensor:
        sent.append(numbers)
        return index_on(numbers, device)

    monkeypatch.setattr("nanoserve.kv_cache.index_on", record)
    specs = [KVCacheSpec(2, 4, 3)] * num_layers
    source, target = (allocate_kv_caches(specs, 4, torch.float32, 6, CPU) for _ in range(2))
    for cache in [*sum(source, ()), *sum(target, ())]:
        cache.normal_()
    before = [cache.clone() for cache in sum(target, ())]
    with torch.device("meta"):  # whatever set_default_device says
        copy_blocks(source, target, ((0, 5), (3, 1)))
    assert sent == [[0, 3], [5, 1]]
    for old, new, was in zip(sum(source, ()), sum(target, ()), before, strict=True):
        assert torch.equal(new[[5, 1]], old[[0, 3]])
        assert torch.equal(new[[0, 2, 3, 4]], was[[0, 2, 3, 4]])
    copy_blocks(target, target, ((5, 2),))
    for cache in sum(target, ()):
        assert torch.equal(cache[2], cache[5])
    copy_blocks(target, target, ())
    assert len(sent) == 4


def test_cpu_blocks_are_for_swapping() -> None:
    """None without swapping; as many as KV blocks, or as the user sets."""
    assert cpu_blocks() == cpu_blocks(num_cpu_blocks=3) == cpu_blocks(swap_space=4) == 0
    assert cpu_blocks(preemption_mode="swap") == 7
    assert cpu_blocks(preemption_mode="swap", num_cpu_blocks=3) == 3


def test_swap_space_is_gib() -> None:
    """Whole blocks of 6144 bytes; less than one is refused."""
    assert cpu_blocks(preemption_mode="swap", swap_space=1) == 2**30 // 6144
    assert cpu_blocks(preemption_mode="swap", swap_space=10 * 6144 / 2**30) == 10
    for swap_space in (0, 6143 / 2**30):
        with pytest.raises(ValueError, match=r"swap_space is .* less than one block of 6144 bytes"):
            cpu_blocks(preemption_mode="swap", swap_space=swap_space)


def cpu_blocks(**options: Any) -> int:
    """CPU blocks beside 7 KV blocks of 6144 bytes."""
    specs = [KVCacheSpec(num_kv_heads=3, key_dim=8, value_dim=8)] * 2
    return size_cpu_pool(EngineConfig(**options), 7, specs, torch.float32)


def test_no_more_cpu_blocks_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block manager needs some bytes for each block, too."""
    each = 6144 + MANAGER_BYTES
    monkeypatch.setattr("nanoserve.kv_cache.total_memory", lambda: 10 * each)
    assert cpu_blocks(preemption_mode="swap", num_cpu_blocks=10) == 10
    with pytest.raises(ValueError, match=r"num_cpu_blocks asks for 11 .* at most 10 blocks"):
        cpu_blocks(preemption_mode="swap", num_cpu_blocks=11)
    with pytest.raises(ValueError, match=r"swap_space asks for .* at most 10 blocks"):
        cpu_blocks(preemption_mode="swap", swap_space=1)


def test_no_more_blocks_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that no memory holds is refused with the number that fits; what max_num_seqs limits
    is not. Ranks of one machine share its memory."""
    each = 6144 + MANAGER_BYTES
    monkeypatch.setattr("nanoserve.kv_cache.total_memory", lambda: 10 * each)
    assert blocks_that_fit(num_gpu_blocks_override=10) == 10
    match = r"num_gpu_blocks_override asks for 11 .* at most 10 blocks"
    with pytest.raises(ValueError, match=match):
        blocks_that_fit(num_gpu_blocks_override=11)
    with pytest.raises(ValueError, match=r"asks for 6 .* at most 5 blocks"):
        check_num_blocks("num_gpu_blocks_override", 6, 6144, CPU, num_local_ranks=2)
    huge = {"kv_cache_memory_bytes": 2**50, "max_model_len": 160}
    assert blocks_that_fit(**huge, max_num_seqs=1) == 10
    with pytest.raises(ValueError, match=r"kv_cache_memory_bytes asks for 20 .* at most 10 blocks"):
        blocks_that_fit(**huge, max_num_seqs=2)
    monkeypatch.setattr("nanoserve.kv_cache.total_memory", lambda: None)  # it does not say
    assert blocks_that_fit(num_gpu_blocks_override=2**31 - 1) == 2**31 - 1


def test_a_cache_larger_than_what_is_free_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes up memory only where it is written."""
    monkeypatch.setattr("nanoserve.kv_cache.available_memory", lambda: 0)
    assert blocks_that_fit(num_gpu_blocks_override=100) == 100


def test_memory_of_the_machine_and_of_its_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's share is less than the machine's memory; it may swap all the same."""
    files = {"meminfo": "MemTotal: 8 kB\nMemAvailable: 5 kB\nSwapTotal: 7 kB\nSwapFree: 3 kB\n"}
    monkeypatch.setattr(Path, "exists", lambda self: self.name in files)
    monkeypatch.setattr(Path, "read_text", lambda self: files[self.name])
    assert (total_memory(), available_memory(), memory_limit(CPU)) == (15 * 1024, 5120, 8192)
    files["memory.max"] = "max"
    assert (total_memory(), available_memory(), memory_limit(CPU)) == (15 * 1024, 5120, 8192)
    files["memory.max"] = "4096"
    assert (total_memory(), available_memory(), memory_limit(CPU)) == (11 * 1024, 4096, 7168)
    monkeypatch.setattr(kv_cache, "read_meminfo", dict)
    assert memory_limit(CPU) is None
    assert memory_limit(torch.device("meta")) is None


def blocks_that_fit(peak_activation_bytes: int = 0, **options: Any) -> int:
    """For 2 layers of 3 heads of 8 in float32: 16 tokens * 3 * (8 + 8) * 4 * 2 = 6144 bytes."""
    settings = {"max_model_len": 100, "max_num_seqs": 5, "block_size": 16, **options}
    specs = [KVCacheSpec(num_kv_heads=3, key_dim=8, value_dim=8)] * 2
    config = EngineConfig(**settings)
    return num_blocks_that_fit(config, specs, torch.float32, CPU, peak_activation_bytes)


def test_blocks_that_fit() -> None:
    assert blocks_that_fit(num_gpu_blocks_override=2) == 2  # set by the user
    assert blocks_that_fit(num_gpu_blocks_override=1000) == 1000
    assert blocks_that_fit(kv_cache_memory_bytes=10 * 6144) == 10
    assert blocks_that_fit(kv_cache_memory_bytes=11 * 6144 - 1) == 10
    assert blocks_that_fit(kv_cache_memory_bytes=2**40) == 5 * 7  # 7 blocks hold 100 tokens
    assert 7 <= blocks_that_fit() <= 5 * 7  # from what is free
    assert blocks_that_fit(kv_cache_memory_bytes=7 * 6144) == 7
    with pytest.raises(ValueError, match=r"max_model_len=100 tokens needs.*Lower max_model_len"):
        blocks_that_fit(kv_cache_memory_bytes=7 * 6144 - 1)


def test_the_memory_of_a_step_is_not_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is subtracted from free memory, but not from a size that the user sets."""
    monkeypatch.setattr("nanoserve.kv_cache.free_memory", lambda *_: 20 * 6144)
    assert blocks_that_fit() == 20
    assert blocks_that_fit(peak_activation_bytes=6144) == 19
    assert blocks_that_fit(peak_activation_bytes=6144 + 1) == 18
    assert blocks_that_fit(peak_activation_bytes=13 * 6144) == 7
    assert blocks_that_fit(peak_activation_bytes=6144, kv_cache_memory_bytes=20 * 6144) == 20
    assert blocks_that_fit(peak_activation_bytes=6144, num_gpu_blocks_override=3) == 3
    for peak_activation_bytes in (13 * 6144 + 1, 2**40):  # the last is more than free memory
        message = r"needs 42\.0 KiB of KV cache, and there are \d+(\.\d KiB| bytes) for.*gpu_memory"
        with pytest.raises(ValueError, match=message):
            blocks_that_fit(peak_activation_bytes=peak_activation_bytes)


def test_free_memory_is_some() -> None:
    assert free_memory(CPU, 0.9) > 0


@pytest.mark.parametrize("num_blocks", [2**40, 2**60])
def test_a_cache_that_no_memory_holds(num_blocks: int) -> None:
    specs = [KVCacheSpec(num_kv_heads=2, key_dim=8, value_dim=8)]
    with pytest.raises(ValueError, match=r"GiB on cpu, .* Lower num_gpu_blocks_override or"):
        allocate_kv_caches(specs, 16, torch.float32, num_blocks, CPU)
