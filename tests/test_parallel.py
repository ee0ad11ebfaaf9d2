"""What ranks say to each other: nothing on one rank; sums and rows side by side on several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nanoserve.attention import AttentionMetadata
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.layers import Build
from nanoserve.loader import load_model
from nanoserve.parallel import ParallelState

WORLD_SIZE = 2


def test_one_rank_has_nothing_to_say() -> None:
    """The same tensor comes back, and no process group is created."""
    alone = ParallelState()
    x = torch.randn(3, 4)
    before = x.clone()
    assert alone.all_reduce(x) is x
    assert alone.all_gather(x) is x
    assert torch.equal(x, before)
    assert alone.share_of(7, "anything") == (0, 7)
    assert not dist.is_initialized()


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_shares_cover_everything_once(world_size: int) -> None:
    shares = [ParallelState(rank, world_size).share_of(12, "heads") for rank in range(world_size)]
    covered = [i for start, size in shares for i in range(start, start + size)]
    assert covered == list(range(12))


def test_what_cannot_be_divided_is_named() -> None:
    with pytest.raises(ValueError, match=r"heads: 12 cannot be divided among 5 ranks\. Choose"):
        ParallelState(0, 5).share_of(12, "heads")


# ------------------------------------------------------------------------------ two processes


def forward(folder: Path, parallel: ParallelState) -> torch.Tensor:
    """Logits [9, vocab_size] of a prompt of 9 tokens, computed by this rank and its peers."""
    model_config = ModelConfig.from_folder(folder)
    config = EngineConfig(max_model_len=64).resolve(model_config)
    model = load_model(config, model_config, Build(parallel=parallel), use_tqdm=False)
    cpu = torch.device("cpu")
    caches = [spec.allocate(3, 4, torch.float32, cpu) for spec in model.kv_cache_specs()]
    metadata = AttentionMetadata(
        slot_mapping=torch.arange(9),
        block_table=torch.tensor([[0, 1, 2]], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 9], dtype=torch.int32),
        seq_lens=torch.tensor([9], dtype=torch.int32),
    )
    with torch.inference_mode():
        hidden = model(torch.arange(20, 29), torch.arange(9), caches, metadata)
        return model.compute_logits(hidden)


def speak(rank: int, folder: Path, meeting_point: Path) -> None:
    """One rank: say what the layers say, and leave what came of it in a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(meeting_point / "store"), WORLD_SIZE)
    group = dist.ProcessGroupGloo(store, rank, WORLD_SIZE)  # type: ignore[attr-defined]
    parallel = ParallelState(rank, WORLD_SIZE, group)
    mine = torch.arange(6.0).reshape(2, 3) + 100 * rank
    strided = torch.arange(12.0).reshape(2, 6)[:, ::2] + 100 * rank
    heard = {
        "sum": parallel.all_reduce(mine.clone()),
        "bfloat16 sum": parallel.all_reduce(mine.bfloat16()),
        "side by side": parallel.all_gather(mine),
        "strided": parallel.all_gather(strided),
        "mine": mine,
        "logits": forward(folder, parallel),
    }
    assert not dist.is_initialized(), "the default process group belongs to others"
    torch.save(heard, meeting_point / f"{rank}.pt")
    parallel.all_reduce(torch.zeros(1))  # nobody leaves while another still listens


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("qwen3", head_dim=16, attention_bias=True)


@pytest.fixture(scope="module")
def heard(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, torch.Tensor]]:
    """What each of two real processes heard over gloo; they meet in a file, not at a port."""
    meeting_point = tmp_path_factory.mktemp("ranks")
    mp.spawn(speak, (checkpoint, meeting_point), nprocs=WORLD_SIZE)
    return [torch.load(meeting_point / f"{rank}.pt") for rank in range(WORLD_SIZE)]


def test_all_reduce_sums_on_every_rank(heard: list[dict[str, torch.Tensor]]) -> None:
    expected = 2 * torch.arange(6.0).reshape(2, 3) + 100
    for rank in heard:
        assert torch.equal(rank["sum"], expected)
        assert torch.equal(rank["bfloat16 sum"], expected.bfloat16())


def test_all_gather_lays_side_by_side(heard: list[dict[str, torch.Tensor]]) -> None:
    """Along the last dimension, in the order of ranks; a rank's own tensor stays as it was."""
    first = torch.arange(6.0).reshape(2, 3)
    for number, rank in enumerate(heard):
        assert torch.equal(rank["side by side"], torch.cat((first, first + 100), dim=-1))
        assert torch.equal(rank["strided"], torch.cat((2 * first, 2 * first + 100), dim=-1))
        assert torch.equal(rank["mine"], first + 100 * number)


def test_two_ranks_compute_the_logits_of_one(
    heard: list[dict[str, torch.Tensor]], checkpoint: Path
) -> None:
    """A model cut in two, its checkpoint loaded in halves, is the same model."""
    expected = forward(checkpoint, ParallelState())
    for rank in heard:
        torch.testing.assert_close(
            rank["logits"], expected, rtol=0, atol=1e-4 * float(expected.std())
        )
    assert torch.equal(heard[0]["logits"], heard[1]["logits"])
