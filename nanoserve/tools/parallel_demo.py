"""What does each rank hold, and what crosses the wire?

This demonstration of tensor parallelism needs no GPU and no other process: `run_ranks` runs each
rank in a thread, with real process groups between the threads. In a notebook:

    >>> print(show_toy_model(world_size=2))
    toy model of one layer    6 tokens          rank 0            rank 1
    embed_tokens              [10, 8]           rows 0:5          rows 5:10
    self_attn.q_proj          [8, 8]            rows 0:4          rows 4:8
    ...
    crosses the wire          all_reduce        3 x 192 bytes     3 x 192 bytes

`split_toy_model` returns the same numbers as plain dicts. The suite "parallel" of bench.py
measures the time and the bytes of an engine's decode steps on real ranks.

Left out: what the network adds to the bytes (headers, acknowledgements).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nanoserve.attention import StepMetadata
from nanoserve.config import ModelConfig
from nanoserve.distributed.rendezvous import connect
from nanoserve.layers import LayerConfig
from nanoserve.models.loader import fill_randomly
from nanoserve.models.registry import build_model
from nanoserve.models.shards import Shard
from nanoserve.parallel import ParallelState, RankError

Result = TypeVar("Result")

TOY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
}


def run_ranks(world_size: int, work: Callable[[ParallelState], Result]) -> list[Result]:
    """Call work(parallel) on every rank at once: each rank is a thread, with gloo groups between
    the threads. Returns the results in the order of ranks, or raises the error of a rank."""
    store, cpu = dist.HashStore(), torch.device("cpu")
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run_rank(rank: int) -> None:
        parallel = ParallelState()
        try:
            parallel = connect(store, rank, world_size, cpu)
            results[rank] = work(parallel)
        except BaseException as error:
            errors.append(error)
            parallel.close()  # otherwise the other ranks wait for this one

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:  # the error of one rank makes other ranks raise RankError: raise the cause
        raise next((error for error in errors if not isinstance(error, RankError)), errors[0])
    return [results[rank] for rank in range(world_size)]


def split_toy_model(world_size: int = 2, num_tokens: int = 6) -> dict[str, Any]:
    """Run a model of one layer on one rank, then on `world_size` ranks, and compare.

        {"num_tokens": 6,
         "weights": {"self_attn.q_proj": {"shape": [8, 8], "parts": ["rows 0:4", "rows 4:8"]}, ...},
         "bytes_held": [1216, 1216],                        # a number for each rank
         "num_calls": [{"all_reduce": 3, ...}, ...],        # a dict for each rank
         "num_bytes": [{"all_reduce": 576, ...}, ...],
         "difference": 1e-7}                                # of the logits, in standard deviations

    Raises ValueError if the model's 4 heads cannot be divided.
    """
    alone = _run_toy_model(ParallelState(), num_tokens)
    ranks = [alone]
    if world_size > 1:
        ranks = run_ranks(world_size, lambda parallel: _run_toy_model(parallel, num_tokens))
    deviation = alone["logits"].std()
    return {
        "num_tokens": num_tokens,
        "weights": {
            name: {"shape": shape, "parts": [rank["parts"][name] for rank in ranks]}
            for name, shape in alone["shapes"].items()
        },
        "bytes_held": [rank["bytes_held"] for rank in ranks],
        "num_calls": [rank["num_calls"] for rank in ranks],
        "num_bytes": [rank["num_bytes"] for rank in ranks],
        "difference": float((ranks[0]["logits"] - alone["logits"]).abs().max() / deviation),
    }


def _toy_config() -> ModelConfig:
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TOY))
        return ModelConfig.from_folder(Path(folder))


@torch.inference_mode()
def _run_toy_model(parallel: ParallelState, num_tokens: int) -> dict[str, Any]:
    """One rank's share of the model, and the logits of a prompt's last token (on rank 0)."""
    cpu = torch.device("cpu")
    model = build_model(_toy_config(), 16, LayerConfig(parallel=parallel))
    fill_randomly(model, seed=0)
    caches = [spec.allocate(1, 16, torch.float32, cpu) for spec in model.kv_cache_specs()]
    positions = torch.arange(num_tokens)
    metadata = StepMetadata(
        slot_mapping=positions,
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
    )
    hidden = model(positions, positions, caches, metadata)
    logits = model.compute_logits(hidden[-1:])
    parallel.broadcast(logits[:1].argmax(-1) if parallel.rank == 0 else torch.zeros(1).long())
    shards = {_short(name): shard for name, shard in model.shards()}
    return {
        "logits": logits,
        "shapes": {name: list(shard.full_shape) for name, shard in shards.items()},
        "parts": {name: _describe(shard) for name, shard in shards.items()},
        "bytes_held": sum(parameter.nbytes for parameter in model.parameters()),
        "num_calls": dict(parallel.comm_stats.num_calls),
        "num_bytes": dict(parallel.comm_stats.num_bytes),
    }


def _short(name: str) -> str:
    """ "model.layers.0.mlp.up_proj.weight" -> "mlp.up_proj"."""
    return name.removeprefix("model.").removeprefix("layers.0.").removesuffix(".weight")


def _describe(shard: Shard) -> str:
    """The rank's part of the whole tensor: "rows 4:8", "columns 0:4", or "all"."""
    size = shard.target.shape[shard.dim]
    if size == shard.full_shape[shard.dim]:
        return "all"
    return f"{('rows', 'columns')[shard.dim]} {shard.start}:{shard.start + size}"


def show_toy_model(world_size: int = 2, num_tokens: int = 6) -> str:
    """The result of split_toy_model as a table with a column for each rank."""
    split = split_toy_model(world_size, num_tokens)
    rows = [["toy model of one layer", f"{num_tokens} tokens"]]
    rows[0] += [f"rank {rank}" for rank in range(world_size)]
    rows += [[name, str(w["shape"]), *w["parts"]] for name, w in split["weights"].items()]
    rows.append(["held", "", *(f"{number} bytes" for number in split["bytes_held"])])
    for name in split["num_calls"][0]:
        row = ["crosses the wire", name]
        for calls, total in zip(split["num_calls"], split["num_bytes"], strict=True):
            row.append(f"{calls[name]} x {total[name] // calls[name]} bytes")
        rows.append(row)
    rows.append(["difference", "of logits", f"{split['difference']:.0e} deviations"])
    return "\n".join(
        f"{row[0]:<26}" + "".join(f"{cell:<18}" for cell in row[1:]).rstrip() for row in rows
    )
