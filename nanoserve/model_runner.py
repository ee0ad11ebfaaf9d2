"""How does a step become tensors, and a forward pass?

A SchedulerOutput says what changed since the last step; the runner applies it to its rows
(input_batch.py), moves the blocks that are to be swapped or copied, and lays the step's tokens end
to end, in a handful of vectorised lines. Two sequences, block_size 4, one decoding its 6th token,
one starting a prompt of 3:

    scheduled         (seq 0: computed 5, scheduled 1)   (seq 1: computed 0, scheduled 3)
    input_ids         [ t5           | p0 p1 p2 ]
    positions         [ 5            | 0  1  2  ]
    slot_mapping      [ bt0[1]*4 + 1 | bt1[0]*4 + 0, 1, 2 ]
    query_start_loc   [ 0, 1, 4 ]
    seq_lens          [ 6, 3 ]

A sequence whose last known token is in the step gets a token sampled; a chunk of a prompt that is
not its end does not.

With overlapped steps the token that a sequence continues with may not have reached the CPU. Then
input_ids holds a placeholder (-1) there, and the GPU puts in what it sampled for that row itself.

    launch(step 1), launch(step 2), result of step 1, launch(step 3), result of step 2, ...

A step in which every sequence brings one token is a *decode* step; cuda_graph.py runs those.

vLLM: vllm/worker/worker.py, model_runner.py, cache_engine.py (V0); vllm/v1/worker/gpu_worker.py,
gpu_model_runner.py, AsyncModelRunnerOutput in vllm/v1/outputs.py (V1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoserve.attention import AttentionBackend, StepMetadata
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.cuda_graph import CudaGraph, DecodeGraphs, Forward, Graph
from nanoserve.input_batch import PLACEHOLDER, InputBatch
from nanoserve.kernels.selector import make_layer_config
from nanoserve.kv_cache import (
    KVCacheSpec,
    copy_blocks,
    num_blocks_that_fit,
    num_cpu_blocks_to_allocate,
)
from nanoserve.models.loader import load_model
from nanoserve.parallel import ParallelState, choose_device, current_device
from nanoserve.sampler import (
    LogprobsTensors,
    RowError,
    SampledTokens,
    SamplingBatch,
    choose_tokens,
    find_logprobs,
)
from nanoserve.sequence import (
    ForkSample,
    ModelOutput,
    PromptLogprobs,
    RequestError,
    ScheduledSequence,
    SchedulerOutput,
)
from nanoserve.staging import StagingBuffer, copy_to_host, record_event

LOGPROB_TILE = 64  # prompt positions whose logits are in memory at once
MAX_STAGED_TABLES = 2**24  # bytes of pinned memory for block tables; larger ones go unpinned


class StepInputs(NamedTuple):
    """One step as tensors. A decode step that runs as a graph is padded to the graph's size."""

    input_ids: Tensor  # [num_tokens] int64; PLACEHOLDER for what only the device knows
    positions: Tensor  # [num_tokens] int64
    token_rows: Tensor  # [num_tokens] int64: in the InputBatch
    metadata: StepMetadata
    sampled_rows: Tensor  # [num_sampled] int64: rows that sample a token in this step
    last_tokens: Tensor  # [num_sampled] int64: where in the step their last tokens are
    host: HostInputs
    graph_size: int | None = None  # run as the graph of this size


class HostInputs(NamedTuple):
    """The same step, as far as the CPU goes on asking about it."""

    rows: np.ndarray  # [num_seqs]: the scheduled sequences' rows in the InputBatch
    sampled_rows: np.ndarray
    query_start_loc: np.ndarray  # [num_seqs + 1]
    has_placeholders: bool


class ModelRunner:
    """The model, its KV cache, and the way from a SchedulerOutput to sampled tokens."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        attention_backend: str | AttentionBackend = "auto",
        parallel: ParallelState | None = None,
        graph_cls: Callable[[object | None], Graph] | None = None,
    ) -> None:
        """Load the model, measure what a step needs, give the KV cache the rest of the memory, and
        record CUDA graphs. `config` must be resolved; tests pass a `graph_cls` that runs on a CPU.

        With `parallel`, this is one of several ranks: it holds its share of each layer, and as many
        KV blocks as the poorest rank has room for.

        Raises ValueError if the weights do not fit the model, or the cache the memory.
        """
        assert config.max_model_len and config.max_num_seqs, "EngineConfig not resolved"
        self.block_size = config.block_size
        self.device = choose_device(config.device)
        with current_device(self.device):
            self.dtype = choose_dtype(config.dtype, model_config.dtype, self.device)
            self.parallel = parallel or ParallelState()
            layer_config = make_layer_config(
                self.device, self.dtype, self.parallel, attention_backend
            )
            self.backend = layer_config.attention
            self.model = load_model(
                config, model_config, layer_config, use_tqdm=self.parallel.rank == 0
            )
            self.vocab_size = model_config.vocab_size
            self._allocate_kv_caches(config)
            self.staging = StagingBuffer(staging_bytes(config), self.device)
            self.batch = InputBatch(
                config.max_num_seqs,
                config.max_model_len,
                config.block_size,
                model_config.vocab_size,
                self.staging,
            )
            # What was sampled last, by row: the next step's input, before the CPU knows it.
            self.last_sampled_token_ids = torch.zeros(
                config.max_num_seqs, dtype=torch.long, device=self.device
            )
            self.graphs: DecodeGraphs | None = None
            if (
                graph_cls is None
                and self.device.type == "cuda"
                and self.backend.supports_cuda_graphs
            ):
                graph_cls = CudaGraph
            may_record = not config.enforce_eager and self.model.supports_cuda_graphs
            if graph_cls is not None and may_record:
                self.graph_block_table = torch.zeros(
                    self.batch.block_tables.shape, dtype=torch.int32, device=self.device
                )
                self.graphs = DecodeGraphs(config.max_num_seqs, graph_cls)
                self.graphs.capture(self.make_decode_forward, use_tqdm=self.parallel.rank == 0)

    def _allocate_kv_caches(self, config: EngineConfig) -> None:
        """On the device as many blocks as fit, on the CPU those to swap to."""
        specs = self.model.kv_cache_specs()
        step_bytes = 0
        is_told = config.num_kv_blocks is not None or config.kv_cache_memory is not None
        if self.device.type == "cuda" and not is_told:
            step_bytes = self.profile_memory(config, specs)
        num_blocks = num_blocks_that_fit(
            config, specs, self.dtype, self.device, step_bytes, self.parallel.num_local_ranks
        )
        self.num_kv_blocks = self.parallel.all_reduce_min(num_blocks)
        self.num_cpu_blocks = num_cpu_blocks_to_allocate(config, self.num_kv_blocks)
        self.kv_caches, self.cpu_kv_caches = (
            [spec.allocate(num_blocks, self.block_size, self.dtype, device) for spec in specs]
            for num_blocks, device in (
                (self.num_kv_blocks, self.device),
                (self.num_cpu_blocks, torch.device("cpu")),
            )
        )

    def describe(self) -> str:
        """What really runs, for the engine's first log line."""
        text = f"device={self.device}, dtype={self.dtype}, attention={self.backend.name}"
        if self.model.library != "nanoserve":
            text += f", model={self.model.library}"
        if self.graphs is not None:
            mib = self.graphs.num_bytes / 2**20
            text += f", CUDA graphs for {len(self.graphs.sizes)} batch sizes ({mib:.0f} MiB)"
        return text

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Run one step and wait for its tokens."""
        return self.launch(scheduler_output).result()

    @torch.inference_mode()
    def launch(self, scheduler_output: SchedulerOutput) -> PendingOutput:
        """Start one step. On a GPU this returns while it runs; the next may be launched at once."""
        with current_device(self.device):
            self.staging.begin_step()
            copy_blocks(self.kv_caches, self.cpu_kv_caches, scheduler_output.blocks_to_swap_out)
            copy_blocks(self.cpu_kv_caches, self.kv_caches, scheduler_output.blocks_to_swap_in)
            copy_blocks(self.kv_caches, self.kv_caches, scheduler_output.blocks_to_copy)
            rows = self.update_batch(scheduler_output)
            inputs = self.prepare_inputs(scheduler_output.scheduled, rows)
            hidden = self.forward(inputs)
            return self.sample(scheduler_output.scheduled, inputs, hidden)

    def update_batch(self, scheduler_output: SchedulerOutput) -> np.ndarray:
        """Apply the differences to the rows; return the scheduled sequences' rows."""
        forgotten = scheduler_output.finished_seq_ids
        if scheduler_output.is_restart:
            forgotten = tuple(self.batch.row_of)
        for seq_id in forgotten:
            self.batch.forget(seq_id)
        for new in scheduler_output.new_sequences:
            self.batch.add(new)
        rows = [self.batch.row_of[item.seq_id] for item in scheduler_output.scheduled]
        for row, item in zip(rows, scheduler_output.scheduled, strict=True):
            if item.new_block_ids:
                self.batch.write_blocks(row, item)
        return np.array(rows)

    def prepare_inputs(
        self, scheduled: tuple[ScheduledSequence, ...], rows: np.ndarray
    ) -> StepInputs:
        """Lay the tokens of the step end to end. `rows` are the scheduled sequences' rows."""
        batch = self.batch
        num_computed = np.array([item.num_computed_tokens for item in scheduled])
        num_scheduled = np.array([item.num_scheduled_tokens for item in scheduled])
        seq_lens = num_computed + num_scheduled
        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        query_start_loc[1:] = num_scheduled.cumsum()

        token_rows = rows.repeat(num_scheduled)  # [num_tokens]: each token's row
        offsets = (num_computed - query_start_loc[:-1]).repeat(num_scheduled)
        positions = np.arange(query_start_loc[-1]) + offsets
        blocks = batch.block_tables[token_rows, positions // self.block_size]
        slot_mapping = blocks.astype(np.int64) * self.block_size + positions % self.block_size
        input_ids = batch.token_ids[token_rows, positions].astype(np.int64)
        is_sampled = seq_lens >= batch.num_tokens[rows]
        max_blocks = -(-int(seq_lens.max()) // self.block_size)

        graph_size = None
        if self.graphs and query_start_loc[-1] == len(rows):  # one token each
            graph_size = self.graphs.choose_size(len(rows))
        padding = 0 if graph_size is None else graph_size - len(rows)
        # The first seven lie at the same addresses in every step of the same graph.
        tensors = self.staging.send(
            pad(input_ids, padding),
            pad(positions, padding),
            pad(token_rows, padding),
            pad(slot_mapping, padding, -1),
            pad(query_start_loc, padding, int(query_start_loc[-1])),
            pad(seq_lens.astype(np.int32), padding),
            batch.block_tables[rows, :max_blocks],
            rows[is_sampled],
            query_start_loc[1:][is_sampled].astype(np.int64) - 1,
        )
        block_table = tensors[6]
        if graph_size is not None:
            self.graph_block_table[: len(rows), :max_blocks] = block_table
            block_table = self.graph_block_table[:graph_size]
        metadata = StepMetadata(
            slot_mapping=tensors[3],
            block_table=block_table,
            query_start_loc=tensors[4],
            seq_lens=tensors[5],
        )
        if graph_size is None:
            metadata = self.backend.plan(metadata, self.block_size, self.dtype)
        return StepInputs(
            input_ids=tensors[0],
            positions=tensors[1],
            token_rows=tensors[2],
            metadata=metadata,
            sampled_rows=tensors[7],
            last_tokens=tensors[8],
            host=HostInputs(
                rows, rows[is_sampled], query_start_loc, bool((input_ids == PLACEHOLDER).any())
            ),
            graph_size=graph_size,
        )

    def forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states [num_tokens, hidden]; the step's keys and values are stored on the way."""
        if self.graphs and inputs.graph_size is not None:
            return self.graphs.replay(inputs.graph_size)
        return self.run_model(inputs, inputs.host.has_placeholders)

    def run_model(self, inputs: StepInputs, has_placeholders: bool) -> Tensor:
        """The same, kernel by kernel: what a graph records."""
        input_ids = inputs.input_ids
        if has_placeholders:
            latest = self.last_sampled_token_ids.index_select(0, inputs.token_rows)
            input_ids = torch.where(input_ids == PLACEHOLDER, latest, input_ids)
        return self.model(input_ids, inputs.positions, self.kv_caches, inputs.metadata)

    @torch.inference_mode()
    def make_decode_forward(self, size: int) -> Forward:
        """The forward pass of a decode step of `size` sequences, for a graph to record.

        It computes nothing of interest yet: its rows are padding, all of them.
        """
        self.staging.begin_step()
        long, short = np.zeros(size, np.int64), np.zeros(size, np.int32)
        tensors = self.staging.send(long, long, long, long - 1, np.zeros(size + 1, np.int32), short)
        inputs = StepInputs(
            input_ids=tensors[0],
            positions=tensors[1],
            token_rows=tensors[2],
            metadata=StepMetadata(
                slot_mapping=tensors[3],
                block_table=self.graph_block_table[:size],
                query_start_loc=tensors[4],
                seq_lens=tensors[5],
            ),
            sampled_rows=tensors[0],
            last_tokens=tensors[0],
            host=HostInputs(long, long, short, True),
            graph_size=size,
        )
        return torch.inference_mode()(functools.partial(self.run_model, inputs, True))

    @torch.inference_mode()
    def profile_memory(self, config: EngineConfig, specs: list[KVCacheSpec]) -> int:
        """Bytes of GPU memory that the largest step needs beside weights and KV cache.

        It is run, on one block of cache, and the allocator says what its peak was.
        """
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.profile_run(config, specs)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.empty_cache()
        return peak - before

    def profile_run(self, config: EngineConfig, specs: list[KVCacheSpec]) -> None:
        """As many tokens as the budget allows, and as many rows to sample, with every filter on."""
        assert config.max_num_batched_tokens and config.max_model_len and config.max_num_seqs
        budget, length = config.max_num_batched_tokens, config.max_model_len
        lengths = [min(length, budget - start) for start in range(0, budget, length)]
        caches = [spec.allocate(1, self.block_size, self.dtype, self.device) for spec in specs]
        ends = torch.tensor([0, *lengths], device=self.device).cumsum(0)
        metadata = StepMetadata(
            slot_mapping=torch.full((budget,), -1, device=self.device),  # nothing is stored
            block_table=torch.zeros(
                len(lengths), -(-length // self.block_size), dtype=torch.int32, device=self.device
            ),
            query_start_loc=ends.int(),
            seq_lens=ends.diff().int(),
        )
        positions = torch.cat([torch.arange(n, device=self.device) for n in lengths])
        hidden = self.model(torch.zeros_like(positions), positions, caches, metadata)
        num_rows = min(config.max_num_seqs, budget)
        ones = torch.ones(num_rows, device=self.device)
        filters = SamplingBatch(
            temperature=ones,
            top_k=torch.full_like(ones, self.vocab_size, dtype=torch.long),
            top_p=ones * 0.9,
            min_p=ones * 0.01,
            uniform=ones.double() * 0.5,
            num_logprobs=(None,) * num_rows,
        )
        logits = self.model.compute_logits(hidden[:num_rows])
        if self.parallel.rank == 0:
            choose_tokens(logits, filters)

    def sample(
        self,
        scheduled: tuple[ScheduledSequence, ...],
        inputs: StepInputs,
        hidden: Tensor,
    ) -> PendingOutput:
        """Sample a token for each sequence whose last known token was in the step.

        A sequence that is about to fork has a token sampled for each branch, from one logits row.
        """
        prompt_logprobs = self._find_prompt_logprobs(scheduled, inputs, hidden)
        rows = inputs.host.sampled_rows
        if not len(rows):
            return PendingOutput(self.batch, [], None, prompt_logprobs)
        num_samples = self.batch.num_samples[rows]
        sample_rows = rows.repeat(num_samples)
        firsts = num_samples.cumsum() - num_samples  # where each sequence's samples begin
        forks = np.arange(len(sample_rows)) - firsts.repeat(num_samples)
        logits = self.model.compute_logits(hidden.index_select(0, inputs.last_tokens))
        first_samples: Tensor | slice = slice(None)
        if len(sample_rows) > len(rows):
            repeats, first_samples = self.staging.send(num_samples, firsts)
            logits = logits.repeat_interleave(repeats, dim=0, output_size=len(sample_rows))
        seq_of = {self.batch.row_of[item.seq_id]: item.seq_id for item in scheduled}
        seq_ids = [seq_of[row] for row in sample_rows.tolist()]
        with blaming(seq_ids):
            sampled = self._choose_on_rank_0(logits, sample_rows, forks)
        self.last_sampled_token_ids.index_copy_(
            0, inputs.sampled_rows, sampled.token_ids[first_samples]
        )
        positions = self.batch.append_placeholders(rows).repeat(num_samples)
        samples = list(zip(seq_ids, forks.tolist(), positions.tolist(), strict=True))
        return PendingOutput(self.batch, samples, sampled, prompt_logprobs)

    def _choose_on_rank_0(
        self, logits: Tensor, sample_rows: np.ndarray, forks: np.ndarray
    ) -> SampledTokens:
        """Sample where the logits are; the other ranks are told the tokens, and nothing else.

        If it fails, they are told something all the same: nobody waits in vain, and a failed step
        is made again.
        """
        token_ids = torch.zeros(len(sample_rows), dtype=torch.int64, device=self.device)
        if self.parallel.rank:
            return SampledTokens(self.parallel.broadcast(token_ids), None, None)
        try:
            sampled = choose_tokens(logits, self.batch.make_sampling_batch(sample_rows, forks))
            token_ids = sampled.token_ids
            return sampled
        finally:
            self.parallel.broadcast(token_ids)

    def _find_prompt_logprobs(
        self,
        scheduled: tuple[ScheduledSequence, ...],
        inputs: StepInputs,
        hidden: Tensor,
    ) -> list[tuple[int, int, list[LogprobsTensors]]]:
        """For sequences that ask: how likely the prompt's tokens in this step were, as (seq_id,
        position of the first, findings).

        The logits of position p speak about token p + 1, so a chunk [a, b) tells of the prompt
        tokens a + 1 .. b.
        """
        result = []
        starts = inputs.host.query_start_loc[:-1]
        for item, row, start in zip(scheduled, inputs.host.rows.tolist(), starts, strict=True):
            number = self.batch.num_prompt_logprobs[row]
            first = item.num_computed_tokens + 1
            end = item.num_computed_tokens + item.num_scheduled_tokens + 1
            end = min(end, int(self.batch.num_prompt_tokens[row]))
            if number is None or end <= first:
                continue
            targets = self.batch.token_ids[row, first:end].astype(np.int64)
            [targets_on_device] = self.staging.send(targets)
            found: list[LogprobsTensors] = []
            for tile in range(0, end - first, LOGPROB_TILE):
                part = targets_on_device[tile : tile + LOGPROB_TILE]
                at = int(start) + tile
                logits = self.model.compute_logits(hidden[at : at + len(part)]).float()
                if self.parallel.rank == 0:  # the others have lent a hand with the logits
                    tensors = find_logprobs(logits, part, (number,) * len(part))
                    assert tensors is not None, "they were asked for"
                    found.append(tensors)
            result.append((item.seq_id, first, found))
        return result


class PendingOutput:
    """A step that was launched. `result()` waits for its tokens, the one wait for the GPU."""

    def __init__(
        self,
        batch: InputBatch,
        samples: list[tuple[int, int, int]],  # (seq_id, fork, position) of each sampled token
        sampled: SampledTokens | None,
        prompt_logprobs: list[tuple[int, int, list[LogprobsTensors]]],
    ) -> None:
        """Starts the copies to the CPU, behind the step itself and before any later one."""
        self._batch = batch
        self._samples = samples
        self._sampled = sampled.map(copy_to_host) if sampled else None
        self._prompt_logprobs = [
            (seq_id, first, [tensors.map(copy_to_host) for tensors in found])
            for seq_id, first, found in prompt_logprobs
        ]
        self._event = record_event(batch.device)

    @torch.inference_mode()
    def result(self) -> ModelOutput:
        """What came of the step. Raises RequestError if a request cannot be sampled."""
        if self._event is not None:
            self._event.synchronize()
        result = ModelOutput({}, {})
        for seq_id, first, found in self._prompt_logprobs:
            entries = [entry for tensors in found for entry in tensors.read(len(tensors.rows))]
            known = tuple(entry for entry in entries if entry is not None)
            result.prompt_logprobs[seq_id] = PromptLogprobs(first, known)
        if self._sampled is None:
            return result
        with blaming([seq_id for seq_id, _, _ in self._samples]):
            output = self._sampled.read()
        samples = zip(self._samples, output.token_ids, output.logprobs, strict=True)
        for (seq_id, fork, position), token_id, token_logprobs in samples:
            logprobs = () if token_logprobs is None else (token_logprobs,)
            if fork:
                others = result.forks.get(seq_id, ())
                result.forks[seq_id] = (*others, ForkSample(token_id, logprobs))
                continue
            row = self._batch.row_of.get(seq_id)
            if row is not None:  # else: finished or preempted meanwhile
                self._batch.fill_placeholder(row, position, token_id)
            result.sampled_token_ids[seq_id] = (token_id,)
            if logprobs:
                result.logprobs[seq_id] = logprobs
        return result


@contextmanager
def blaming(seq_ids: list[int]) -> Iterator[None]:
    """Turn the sampler's complaint about a row into one about the sequence of that row."""
    try:
        yield
    except RowError as error:
        raise RequestError(seq_ids[error.row], str(error)) from error.__cause__


def pad(array: np.ndarray, number: int, value: int = 0) -> np.ndarray:
    """`array` with `number` times `value` behind it."""
    return np.append(array, np.full(number, value, array.dtype)) if number else array


def staging_bytes(config: EngineConfig) -> int:
    """Room for what the largest step sends: per token four numbers of 8 bytes, per sequence its
    block table and some sampling parameters."""
    assert config.max_num_batched_tokens and config.max_model_len and config.max_num_seqs
    tables = config.max_num_seqs * -(-config.max_model_len // config.block_size) * 4
    tokens = config.max_num_batched_tokens * (4 * 8 + 8)
    return tokens + config.max_num_seqs * 128 + min(tables, MAX_STAGED_TABLES) + 1024


def choose_dtype(wanted: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """ "auto" is float32 on a CPU (its fastest and most exact), else the checkpoint's own."""
    if wanted == "auto":
        wanted = "float32" if device.type == "cpu" else checkpoint
    dtype = getattr(torch, wanted, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype {wanted!r} is not supported; use float32, bfloat16 or float16.")
    return dtype
