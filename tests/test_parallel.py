"""What ranks say to each other, and a model that is divided among them.

Ranks are threads here, with real gloo groups between them. tests/test_multiproc.py has processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.attention import StepMetadata
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.distributed import rendezvous
from nanoserve.distributed.rendezvous import address_towards, connect
from nanoserve.layers import LayerConfig
from nanoserve.models import loader
from nanoserve.models.base import Model
from nanoserve.models.loader import load_model
from nanoserve.models.registry import ModelRegistry
from nanoserve.parallel import FIRST_BYTES, ParallelState, RankError
from nanoserve.tools.parallel_demo import (
    run_ranks,
    show_toy_model,
    split_toy_model,
)

# What makes each native architecture hard to divide: biases, norms on heads, an untied head.
# Neither 2 nor 4 divides the vocabulary.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "attention_bias": True},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}
both_and_four = pytest.mark.parametrize("tp_size", [2, 4])
every_architecture = pytest.mark.parametrize("model_type", CHECKPOINTS)


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    def make(model_type: str) -> Path:
        return make_checkpoint(model_type, vocab_size=321, **CHECKPOINTS[model_type])

    return make


def load(folder: Path, parallel: ParallelState) -> Model:
    model_config = ModelConfig.from_folder(folder)
    config = EngineConfig(max_model_len=64).resolve(model_config)
    return load_model(config, model_config, LayerConfig(parallel=parallel), use_tqdm=False)


def test_every_native_architecture_is_here(checkpoint: Callable[[str], Path]) -> None:
    """A new architecture of the decoder needs an entry in CHECKPOINTS."""
    divided = {ModelConfig.from_folder(checkpoint(name)).architecture for name in CHECKPOINTS}
    ours = {name for name in ModelRegistry.architectures() if hasattr(transformers, name)}
    assert divided == ours


# -- shares --


def test_one_rank_has_no_groups() -> None:
    """Each operation returns its own argument, and no process group is created."""
    alone = ParallelState()
    x = torch.randn(3, 4)
    before = x.clone()
    assert alone.all_reduce(x) is x
    assert alone.gather(x) is x
    assert alone.broadcast(x) is x
    assert torch.equal(x, before)
    assert alone.all_reduce_min(7) == 7
    assert alone.shard_range(7, "anything") == (0, 7)
    assert not alone.comm_stats.num_calls
    assert not dist.is_initialized()


@pytest.mark.parametrize("tp_size", [1, 2, 3, 6])
def test_shares_cover_everything_once(tp_size: int) -> None:
    ranks = [ParallelState(rank, tp_size) for rank in range(tp_size)]
    shares = [rank.shard_range(12, "heads") for rank in ranks]
    covered = [i for start, size in shares for i in range(start, start + size)]
    assert covered == list(range(12))


@given(log_heads=st.integers(0, 4), log_ranks=st.integers(0, 4), head_dim=st.integers(1, 5))
def test_whole_heads_are_shared_or_repeated(log_heads: int, log_ranks: int, head_dim: int) -> None:
    """Each key head is on equally many neighbouring ranks (on one, if there are enough heads). A
    rank holds the key heads that its query heads read."""
    num_kv_heads, tp_size = 2**log_heads, 2**log_ranks
    num_heads = 16
    held: list[int] = []
    for rank in range(tp_size):
        parallel = ParallelState(rank, tp_size)
        start, size = parallel.shard_range(num_kv_heads * head_dim, "k_proj", head_dim)
        assert start % head_dim == 0
        assert size == max(num_kv_heads // tp_size, 1) * head_dim
        mine = range(start // head_dim, (start + size) // head_dim)
        held += mine
        first, number = parallel.shard_range(num_heads, "heads")
        needed = {head * num_kv_heads // num_heads for head in range(first, first + number)}
        assert needed == set(mine)
    assert held == sorted(held)
    repeats = max(tp_size // num_kv_heads, 1)
    assert [held.count(head) for head in range(num_kv_heads)] == [repeats] * num_kv_heads


def test_what_cannot_be_divided_is_named() -> None:
    with pytest.raises(ValueError, match=r"heads: 12 cannot be divided among 5 ranks\. Choose"):
        ParallelState(0, 5).shard_range(12, "heads")
    with pytest.raises(ValueError, match="key heads: 3 cannot be divided among 4 ranks"):
        ParallelState(0, 4).shard_range(3 * 16, "key heads", 16)


# -- operations --


def run_operations(parallel: ParallelState) -> dict[str, Any]:
    """The results on one of two ranks."""
    rank = parallel.rank
    mine = torch.arange(6.0).reshape(2, 3) + 100 * rank
    strided = torch.arange(12.0).reshape(2, 6)[:, ::2] + 100 * rank
    results = {
        "sum": parallel.all_reduce(mine.clone()),
        "bfloat16 sum": parallel.all_reduce(mine.bfloat16()),
        "gathered": parallel.gather(mine),
        "strided": parallel.gather(strided),
        "from rank 0": parallel.broadcast(mine.clone()),
        "mine": mine,
        "least": parallel.all_reduce_min(70 - rank),
    }
    assert not dist.is_initialized(), "the default process group belongs to the user"
    return {**results, "comm_stats": parallel.comm_stats}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, run_operations)


def test_all_reduce_sums_on_every_rank(results: list[dict[str, Any]]) -> None:
    expected = 2 * torch.arange(6.0).reshape(2, 3) + 100
    for rank in results:
        assert torch.equal(rank["sum"], expected)
        assert torch.equal(rank["bfloat16 sum"], expected.bfloat16())


def test_gather_concatenates_on_rank_0(results: list[dict[str, Any]]) -> None:
    """Along the last dimension, in the order of ranks. A rank's own tensor does not change."""
    first = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(results[0]["gathered"], torch.cat((first, first + 100), dim=-1))
    assert torch.equal(results[0]["strided"], torch.cat((2 * first, 2 * first + 100), dim=-1))
    assert results[1]["gathered"].shape == (2, 0)
    for number, rank in enumerate(results):
        assert torch.equal(rank["mine"], first + 100 * number)


def test_broadcast_and_minimum_bring_the_same_to_all(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert torch.equal(rank["from rank 0"], results[0]["mine"])
        assert rank["least"] == 69


def test_calls_and_bytes_are_counted(results: list[dict[str, Any]]) -> None:
    """Bytes of the tensors: 6 numbers of 4 bytes, 6 of 2; one integer of 8 for the minimum."""
    for rank in results:
        stats = rank["comm_stats"]
        assert stats.num_calls == {"all_reduce": 2, "gather": 2, "broadcast": 1, "control": 1}
        assert stats.num_bytes == {"all_reduce": 36, "gather": 48, "broadcast": 24, "control": 8}


def test_objects_of_any_size_arrive() -> None:
    """Small ones in one broadcast. Pickling adds some bytes, so the test tries all sizes near the
    limit."""
    values: list[object] = [b"", b"x" * (10 * FIRST_BYTES), {"a": (1, 2.5)}]
    values += [bytes(size) for size in range(FIRST_BYTES - 40, FIRST_BYTES + 3)]

    def pass_on(parallel: ParallelState) -> list[object]:
        if parallel.rank:
            return [parallel.receive_object() for _ in values]
        num_calls = []
        for value in values:
            before = parallel.comm_stats.num_calls["control"]
            parallel.broadcast_object(value)
            num_calls.append(parallel.comm_stats.num_calls["control"] - before)
        return num_calls

    num_calls, *received = run_ranks(3, pass_on)
    assert received == [values] * 2
    assert num_calls[:4] == [1, 2, 1, 1]
    assert num_calls[-1] == 2


def test_a_rank_that_ends_is_noticed_at_once() -> None:
    """By a rank that waits for it, and by a rank that waits for that rank."""
    errors = {}
    all_connected = threading.Barrier(3)  # a rank that ends earlier fails in `connect` of others

    def wait_for_rank_1(parallel: ParallelState) -> None:
        all_connected.wait(60)
        if parallel.rank == 1:
            raise KeyError("rank 1 was here")
        try:
            parallel.all_reduce(torch.zeros(1))
        except RankError as error:
            errors[parallel.rank] = str(error)
            raise

    with pytest.raises(KeyError, match="rank 1 was here"):
        run_ranks(3, wait_for_rank_1)
    assert set(errors) == {0, 2}
    assert "rank 2 lost another rank in all_reduce" in errors[2]


def test_a_rank_that_does_not_connect_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "STEP_TIMEOUT", timedelta(seconds=0.2))
    with pytest.raises(RankError, match="rank 0 could not connect to the other ranks"):
        connect(dist.HashStore(), 0, 2, torch.device("cpu"))


def test_two_engines_in_one_process() -> None:
    """Each has groups of its own: operations at the same time do not mix."""
    sums: dict[int, list[torch.Tensor]] = {}

    def run_engine(number: int) -> None:
        def work(parallel: ParallelState) -> list[torch.Tensor]:
            return [parallel.all_reduce(torch.full((2,), 10.0**number)) for _ in range(20)]

        sums[number] = [x for rank in run_ranks(2, work) for x in rank]

    engines = [threading.Thread(target=run_engine, args=(number,)) for number in range(2)]
    for thread in engines:
        thread.start()
    for thread in engines:
        thread.join()
    for number in range(2):
        assert [x.tolist() for x in sums[number]] == [[2 * 10.0**number] * 2] * 40


def test_the_way_to_this_machine_is_its_loopback() -> None:
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"


# -- a model on several ranks --


def divided_dim(name: str) -> int:
    """The dimension along which a checkpoint matrix is divided; -1: every rank holds all of it."""
    if name.endswith(("o_proj.weight", "down_proj.weight", ".w2.weight")):
        return 1
    divided = ("q_proj", "k_proj", "v_proj", "embed_tokens", "lm_head")
    divided += ("gate_proj", "up_proj", ".w1.", ".w3.")
    return 0 if any(part in name for part in divided) else -1


@both_and_four
@every_architecture
def test_the_shards_put_together_are_the_whole(
    model_type: str, tp_size: int, checkpoint: Callable[[str], Path]
) -> None:
    """Every element of a divided matrix is on one rank (of keys and values: on equally many ranks).
    The rows that no checkpoint fills are zeros."""
    folder = checkpoint(model_type)
    whole = {name: shard.target for name, shard in load(folder, ParallelState()).shards()}
    ranks = [load(folder, ParallelState(rank, tp_size)) for rank in range(tp_size)]
    held = {name: torch.zeros(tensor.shape) for name, tensor in whole.items()}
    for model in ranks:
        for name, shard in dict(model.shards()).items():
            assert torch.equal(shard.target, whole[name][shard.slices]), name
            held[name][shard.slices] += 1
        embedding = model.model.embed_tokens
        assert not embedding.weight[embedding.num_tokens :].any()
    for name, count in held.items():
        repeats = tp_size if divided_dim(name) == -1 else 1
        if "k_proj" in name or "v_proj" in name:  # two heads
            repeats = tp_size // 2
        assert torch.equal(count, torch.full(count.shape, float(repeats))), name
        parts = [dict(model.shards())[name] for model in ranks]
        if repeats == 1:
            together = torch.cat([shard.target for shard in parts], dim=divided_dim(name))
            assert torch.equal(together, whole[name]), name


class CountingSlice:
    """A safetensors slice that counts what is read of it."""

    def __init__(self, source: Any, counts: dict[str, int], name: str) -> None:
        self.source, self.counts, self.name = source, counts, name

    def get_shape(self) -> list[int]:
        return self.source.get_shape()

    def get_dtype(self) -> str:
        return self.source.get_dtype()

    def __getitem__(self, slices: tuple[slice, ...]) -> torch.Tensor:
        part = self.source[slices]
        self.counts[self.name] = part.numel()
        return part


def test_a_rank_reads_its_own_slices_only(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of four ranks reads a quarter of each divided matrix, half of the key heads, and the
    rest of the vocabulary."""
    counts: dict[str, int] = {}
    original = loader.read_slices

    def open_counting(file: Path) -> Any:
        return ((name, CountingSlice(s, counts, name)) for name, s in original(file))

    monkeypatch.setattr(loader, "read_slices", open_counting)
    load(checkpoint("qwen3"), ParallelState(3, 4))
    layer = "model.layers.0."
    assert counts[layer + "self_attn.q_proj.weight"] == 4 * 32 * 64 // 4
    assert counts[layer + "self_attn.k_proj.weight"] == 2 * 32 * 64 // 2
    assert counts[layer + "self_attn.o_proj.weight"] == 64 * 4 * 32 // 4
    assert counts[layer + "mlp.down_proj.weight"] == 64 * 112 // 4
    assert counts["model.embed_tokens.weight"] == (321 - 3 * 81) * 64
    assert counts["model.norm.weight"] == 64


def forward(folder: Path, parallel: ParallelState) -> torch.Tensor:
    """Logits [9, vocab_size] of a prompt of 9 tokens, computed by this rank and the other ranks."""
    model = load(folder, parallel)
    cpu = torch.device("cpu")
    caches = [spec.allocate(3, 4, torch.float32, cpu) for spec in model.kv_cache_specs()]
    metadata = StepMetadata(
        slot_mapping=torch.arange(9),
        block_table=torch.tensor([[0, 1, 2]], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 9], dtype=torch.int32),
        seq_lens=torch.tensor([9], dtype=torch.int32),
    )
    with torch.inference_mode():
        hidden = model(torch.arange(312, 321), torch.arange(9), caches, metadata)
        return model.compute_logits(hidden)


@both_and_four
@every_architecture
def test_many_ranks_compute_the_logits_of_one(
    model_type: str, tp_size: int, checkpoint: Callable[[str], Path]
) -> None:
    """The prompt has the highest token ids, which are on the rank whose vocabulary is padded."""
    folder = checkpoint(model_type)
    expected = forward(folder, ParallelState())
    logits, *others = run_ranks(tp_size, partial(forward, folder))
    assert logits.shape == (9, 321)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * float(expected.std()))
    assert [other.shape for other in others] == [(9, 0)] * (tp_size - 1)


# -- the demonstration --


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_toy_model_tells_what_ranks_hold_and_send(tp_size: int) -> None:
    split = split_toy_model(tp_size, num_tokens=5)
    assert split["difference"] < 1e-5
    assert split["weights"]["self_attn.q_proj"]["shape"] == [8, 8]
    if tp_size == 1:
        assert split["weights"]["self_attn.q_proj"]["parts"] == ["all"]
        assert split["num_bytes"] == [{}]
        return
    per_rank = 8 // tp_size
    rows = [f"rows {start}:{start + per_rank}" for start in range(0, 8, per_rank)]
    assert split["weights"]["self_attn.q_proj"]["parts"] == rows
    # After the embedding, attention and the MLP: 5 tokens of 8 numbers of 4 bytes. The logits of
    # one row, and one token id of 8 bytes.
    padded = -(-10 // tp_size)
    expected = {"all_reduce": 3 * 5 * 8 * 4, "gather": padded * 4, "broadcast": 8}
    assert split["num_bytes"] == [expected] * tp_size
    norms = 3 * 8 * 4
    # q and o, gate, up and down; of k and v two rows of four, whatever the number of ranks.
    matrices = (padded * 8 + (8 + 8 + 3 * 16) * 8 // tp_size + 2 * 2 * 8) * 4
    assert split["bytes_held"] == [norms + matrices] * tp_size


def test_the_toy_model_as_a_table() -> None:
    lines = show_toy_model(world_size=4).splitlines()
    assert "rank 3" in lines[0]
    assert any("k_proj" in line and line.count("rows 2:4") == 2 for line in lines)
    assert any("all_reduce" in line and line.count("3 x 192 bytes") == 4 for line in lines)


def test_the_toy_model_refuses_what_does_not_divide() -> None:
    with pytest.raises(ValueError, match="attention heads: 4 cannot be divided among 3 ranks"):
        split_toy_model(3)


class LateWork:
    """An operation of gloo that ends, well or badly, at the n-th wait; before that, waits time
    out."""

    def __init__(self, num_waits: int, error: str | None = None) -> None:
        self.num_waits, self.error = num_waits, error

    def is_completed(self) -> bool:
        return self.num_waits <= 0

    def wait(self, timeout: timedelta | None = None) -> None:
        self.num_waits -= 1
        if not self.is_completed():
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)


def call(work: LateWork, has_lost_rank: Callable[[], bool]) -> None:
    """All-reduce one number over a group whose operation is `work`."""
    group = SimpleNamespace(allreduce=lambda tensors: work)
    ParallelState(0, 2, group, group, has_lost_rank=has_lost_rank).all_reduce(torch.zeros(1))


def test_an_operation_that_never_ends_is_given_up_when_a_rank_has_ended() -> None:
    """Gloo may miss the end of a rank. While all ranks live, an operation may take any time."""
    call(LateWork(num_waits=50), has_lost_rank=lambda: False)
    call(LateWork(num_waits=2), has_lost_rank=lambda: True)  # gloo's own answer comes first
    with pytest.raises(RankError, match="lost another rank in all_reduce: Connection reset"):
        call(LateWork(num_waits=2, error="Connection reset"), has_lost_rank=lambda: True)
    with pytest.raises(RankError, match="lost another rank in all_reduce"):
        call(LateWork(num_waits=1000), has_lost_rank=lambda: True)
