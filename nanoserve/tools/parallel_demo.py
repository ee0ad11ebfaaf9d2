"""What does each rank hold, and what crosses the wire?

To look at tensor parallelism one needs neither GPUs nor processes: `run_ranks` makes a rank of each
of a few threads, with real groups between them. In a notebook:

    >>> print(show_toy_model(world_size=2))
    toy model of one layer    6 tokens          rank 0            rank 1
    embed_tokens              [10, 8]           rows 0:5          rows 5:10
    self_attn.q_proj          [8, 8]            rows 0:4          rows 4:8
    ...
    crosses the wire          all_reduce        3 x 192 bytes     3 x 192 bytes

`split_toy_model` has the same as plain dicts; `measure` times an engine's decode steps on real
ranks and counts their bytes: bench.py's suite "parallel".

Left out: what the wire itself adds (headers, acknowledgements).

vLLM: nothing of the kind; benchmarks/benchmark_latency.py (V0), vllm/benchmarks/latency.py (V1).
"""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nanoserve.attention import StepMetadata
from nanoserve.config import ModelConfig
from nanoserve.layers import LayerConfig, Shard
from nanoserve.llm import LLM
from nanoserve.models.loader import fill_randomly
from nanoserve.models.registry import build_model
from nanoserve.parallel import ParallelState, RankError, connect
from nanoserve.sampling_params import SamplingParams

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
    """work(state) on every rank at once, each a thread with gloo between them; the results in the
    order of ranks. What a rank raises is raised here."""
    store, cpu = dist.HashStore(), torch.device("cpu")
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def be_rank(rank: int) -> None:
        try:
            results[rank] = work(connect(store, rank, world_size, cpu))
        except BaseException as error:
            # Without its traceback, nothing keeps the groups: the others notice, and end too.
            errors.append(error.with_traceback(None))

    threads = [threading.Thread(target=be_rank, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:  # the others' RankErrors are its consequence
        raise next((error for error in errors if not isinstance(error, RankError)), errors[0])
    return [results[rank] for rank in range(world_size)]


def split_toy_model(world_size: int = 2, num_tokens: int = 6) -> dict[str, Any]:
    """Run a model of one layer on one rank, then on `world_size`; tell what each held and said.

    {"weights": {name: {"shape": ..., "parts": [a rank's slices, ...]}}, "bytes_held": [...],
    "num_calls": [{"all_reduce": 3, ...}, ...], "num_bytes": the same, "difference": of the logits
    from those of one rank, in their deviations}. Raises ValueError if 4 heads do not divide.
    """
    alone = _run_toy_model(ParallelState(), num_tokens)
    if world_size == 1:
        ranks = [alone]
    else:
        build_model(
            _toy_config(), 16, LayerConfig(parallel=ParallelState(0, world_size))
        )  # or refuse
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
    """One rank's part in the logits of a prompt's last token."""
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
        "num_calls": dict(parallel.traffic.num_calls),
        "num_bytes": dict(parallel.traffic.num_bytes),
    }


def _short(name: str) -> str:
    """ "model.layers.0.mlp.up_proj.weight" -> "mlp.up_proj"."""
    return name.removeprefix("model.").removeprefix("layers.0.").removesuffix(".weight")


def _describe(shard: Shard) -> str:
    """Which part of the whole tensor it is: "rows 4:8", "columns 0:4", or "all"."""
    size = shard.target.shape[shard.dim]
    if size == shard.full_shape[shard.dim]:
        return "all"
    return f"{('rows', 'columns')[shard.dim]} {shard.start}:{shard.start + size}"


def show_toy_model(world_size: int = 2, num_tokens: int = 6) -> str:
    """split_toy_model as a table, a column for each rank."""
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


def measure(
    tensor_parallel_size: int,
    model: str | None = None,
    num_requests: int = 32,
    prompt_len: int = 128,
    num_steps: int = 32,
    **options: Any,
) -> dict[str, Any]:
    """Decode steps of `num_requests` sequences: seconds each (median, least, most), and the bytes
    and calls of rank 0 in one of them, by name. `options` go to LLM."""
    rng = random.Random(0)
    with LLM(model, tensor_parallel_size=tensor_parallel_size, **options) as llm:
        vocab_size = llm.engine.model_config.vocab_size
        params = SamplingParams(temperature=0, max_tokens=num_steps + 2, ignore_eos=True)
        for number in range(num_requests):
            prompt = [rng.randrange(vocab_size) for _ in range(prompt_len)]
            llm.add_request(str(number), prompt, params)
        while llm.engine.scheduler.waiting:  # the prompts; then one step to warm up
            llm.step()
        llm.step()
        parallel = llm.engine.executor.runner.parallel
        calls, sent = parallel.traffic.num_calls.copy(), parallel.traffic.num_bytes.copy()
        seconds = []
        for _ in range(num_steps):
            start = time.perf_counter()
            llm.step()
            seconds.append(time.perf_counter() - start)
        return {
            "tensor_parallel_size": tensor_parallel_size,
            "what_runs": llm.engine.executor.describe(),
            "num_requests": num_requests,
            "seconds_per_step": statistics.median(seconds),
            "fastest": min(seconds),
            "slowest": max(seconds),
            "weight_bytes_per_rank": llm.engine.executor.runner.model.num_bytes(),
            "calls_per_step": _per_step(parallel.traffic.num_calls - calls, num_steps),
            "bytes_per_step": _per_step(parallel.traffic.num_bytes - sent, num_steps),
        }


def _per_step(total: dict[str, int], num_steps: int) -> dict[str, float]:
    return {name: number / num_steps for name, number in total.items()}


def show_measures(results: list[dict[str, Any]]) -> str:
    """What `measure` returned for several numbers of ranks, as a table, the first row the base."""
    header = ("ranks", "ms a step", "range", "beside it", "MiB of weights", "bytes a step, by name")
    rows: list[tuple[str, ...]] = [header]
    for result in results:
        sent = [f"{name} {number:.0f}" for name, number in result["bytes_per_step"].items()]
        rows.append(
            (
                str(result["tensor_parallel_size"]),
                f"{result['seconds_per_step'] * 1e3:.1f}",
                f"{result['fastest'] * 1e3:.1f} - {result['slowest'] * 1e3:.1f}",
                f"{results[0]['seconds_per_step'] / result['seconds_per_step']:.2f} x",
                f"{result['weight_bytes_per_rank'] / 2**20:.1f}",
                ", ".join(sent) or "none",
            )
        )
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(len(header))]
    lines = ["".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
