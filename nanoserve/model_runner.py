"""How does a step become tensors, and a forward pass?

ModelRunner.launch runs one step in four stages; a subclass may replace any of them:

    update_batch      a SchedulerOutput holds only changes; apply them to the rows of input_batch.py
    prepare_inputs    lay the step's tokens end to end, and send the arrays to the device
    forward           run the model, eagerly or as a CUDA graph
    sample            choose a token for each sequence whose last known token is in the step

Before the first stage, blocks are copied where the scheduler swaps or copies some. All kinds of
steps have the same inputs. Two sequences, block_size 4, one decoding its 6th token, one starting a
prompt of 3:

    scheduled         (seq 0: computed 5, scheduled 1)   (seq 1: computed 0, scheduled 3)
    input_ids         [ t5           | p0 p1 p2 ]
    positions         [ 5            | 0  1  2  ]
    slot_mapping      [ bt0[1]*4 + 1 | bt1[0]*4 + 0, 1, 2 ]
    query_start_loc   [ 0, 1, 4 ]
    seq_lens          [ 6, 3 ]

A sequence whose last known token is in the step gets a token sampled, and one more behind each of
its drafts; a chunk that does not reach the end of its prompt does not.

With overlapped steps, a step is launched before the CPU knows the tokens of the step before it.
input_ids then holds a placeholder (-1) for such a token, and the device replaces the placeholder
with the token that it sampled last for that row.

    launch(step 1), launch(step 2), result of step 1, launch(step 3), result of step 2, ...

A step in which every sequence brings one token is a *decode* step; cuda_graph.py runs decode steps.

vLLM: vllm/worker/worker.py, model_runner.py, cache_engine.py (V0); vllm/v1/worker/gpu_worker.py,
gpu_model_runner.py, AsyncModelRunnerOutput in vllm/v1/outputs.py (V1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from nanoserve import sampler
from nanoserve.attention import AttentionBackend, StepMetadata
from nanoserve.config import EngineConfig, ModelConfig, load_chapter
from nanoserve.cuda_graph import CudaGraph, DecodeGraphs, Forward, Graph, GraphShape, pad_step
from nanoserve.device import choose_device, current_device
from nanoserve.distributed.pipeline import sample_later
from nanoserve.input_batch import PLACEHOLDER, InputBatch
from nanoserve.kernels.sampling import choose_tokens
from nanoserve.kernels.selector import choose_dtype, make_layer_config
from nanoserve.kv_cache import (
    allocate_kv_caches,
    choose_kv_cache_dtype,
    copy_blocks,
    determine_num_kv_blocks,
    size_cpu_pool,
)
from nanoserve.layers import LayerConfig
from nanoserve.models.loader import load_model
from nanoserve.parallel import ParallelState
from nanoserve.prompt_logprobs import PromptLogprobsTensors, gather_prompt_logprobs
from nanoserve.sampler import SampledTokens
from nanoserve.sequence import ForkSample, ModelOutput, ScheduledSequence, SchedulerOutput
from nanoserve.staging import StagingBuffer, copy_to_host, record_event, staging_bytes

NO_DRAFT = -1

Array = TypeVar("Array", np.ndarray, Tensor)


@dataclass(frozen=True)
class StepArrays(Generic[Array]):
    """What one step sends to the device: NumPy arrays before, tensors after.

    The order of the fields is the order of their addresses. The fields before block_table have the
    same sizes, and so the same addresses, in all steps of one CUDA graph.
    """

    input_ids: Array  # [num_tokens] int64; PLACEHOLDER for a token that only the device knows
    positions: Array  # [num_tokens] int64
    token_rows: Array  # [num_tokens] int64: each token's row in the InputBatch
    slot_mapping: Array  # [num_tokens] int64: where to store each token's key and value
    lora_ids: Array  # [num_tokens] int64: the slot of each token's adapter; -1: none
    query_start_loc: Array  # [num_seqs + 1] int32
    seq_lens: Array  # [num_seqs] int32
    block_table: Array  # [num_seqs, max_blocks] int32
    # For each token to sample: one of a sequence; behind k drafts 1 + k; of n forks n.
    sampled_rows: Array  # [num_samples] int64: its row in the InputBatch
    logits_indices: Array  # [num_samples] int64: where in the step the token before it is

    def to_device(self, staging: StagingBuffer) -> StepArrays[Tensor]:
        """The same fields as tensors, in one copy."""
        return StepArrays(**staging.send(**vars(self)))


class StepInputs(NamedTuple):
    """One step, on the CPU and on the device. Only `tensors` and `metadata` are padded, in a decode
    step that runs as a graph."""

    arrays: StepArrays[np.ndarray]
    tensors: StepArrays[Tensor]
    metadata: StepMetadata
    graph_shape: GraphShape | None = None  # run as the graph of this shape


class ModelRunner:
    """The model, its KV cache, and the way from a SchedulerOutput to sampled tokens."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        attention_backend: str | AttentionBackend = "auto",
        parallel: ParallelState | None = None,
        graph_cls: Callable[[Any], Graph] | None = None,
    ) -> None:
        """Load the model, allocate the KV caches, and capture CUDA graphs.

        `config` must be resolved. With `parallel`, this runner is one of several ranks: it holds
        its share of each layer, and as many KV blocks as the rank with the least memory.
        `graph_cls` replaces CudaGraph (the tests have one that runs on a CPU).

        Raises ValueError if the weights do not fit the model, or the cache the memory.
        """
        assert config.max_model_len and config.max_num_seqs, "EngineConfig not resolved"
        self.block_size = config.block_size
        self.device = choose_device(config.device)
        with current_device(self.device), torch.device("cpu"):  # whatever set_default_device says
            self.dtype = choose_dtype(config.dtype, model_config.dtype, self.device)
            self.parallel = parallel or ParallelState()
            is_rank_0 = self.parallel.rank == 0
            layer_config = make_layer_config(
                self.device, self.dtype, self.parallel, attention_backend, config.custom_ops
            )
            self.config, self.model_config, self.layer_config = config, model_config, layer_config
            self.backend = layer_config.attention
            self.model = load_model(config, model_config, layer_config, use_tqdm=is_rank_0)
            self.new_token_ids: list[tuple[int, int, int]] = []  # see SchedulerOutput
            self.intermediate_tensors: Tensor | None = None  # from the stage before
            if not self.parallel.is_first_stage:
                shape = (config.max_num_batched_tokens or 0, model_config.hidden_size)
                self.intermediate_tensors = torch.empty(shape, dtype=self.dtype, device=self.device)
            self.lora_slots: Any = None  # adapters
            if config.enable_lora:
                self.lora_slots = load_chapter("enable_lora", "lora.layers").LoRASlots(self)
            self.proposer: Any = None  # of drafts, on rank 0
            if config.speculative_config is not None and is_rank_0:
                self.proposer = config.speculative_config.make_proposer(self)
            self._allocate_kv_caches(config, layer_config)
            self.staging = StagingBuffer(staging_bytes(config), self.device)
            # With stages, a step is sampled after the next ones have begun: its arrays are its own.
            self.batch = InputBatch(
                config.max_num_seqs,
                config.max_model_len,
                config.block_size,
                model_config.vocab_size,
                self.staging if self.parallel.pp_size == 1 else StagingBuffer(0, self.device),
            )
            self.graphs: DecodeGraphs | None = None
            is_cuda = self.device.type == "cuda"
            if graph_cls is None and is_cuda and self.backend.supports_cuda_graphs:
                graph_cls = CudaGraph
            can_capture = not config.enforce_eager and self.model.supports_cuda_graphs
            if graph_cls is not None and can_capture:
                self.graph_block_table = torch.zeros(
                    self.batch.block_tables.shape, dtype=torch.int32, device=self.device
                )
                most = config.max_num_batched_tokens
                self.graphs = DecodeGraphs(config.max_num_seqs, graph_cls, config.query_lens, most)
                self.graphs.capture(self.make_decode_forward, use_tqdm=is_rank_0)

    def _allocate_kv_caches(self, config: EngineConfig, layer_config: LayerConfig) -> None:
        """As many blocks as fit on the device, and the blocks to swap to on the CPU. The caches of
        the model's layers come first, then those of the proposer's."""
        specs = self.model.kv_cache_specs()
        self.num_model_layers = len(specs)
        specs += self.proposer.kv_cache_specs() if self.proposer else []
        self.num_kv_blocks = determine_num_kv_blocks(config, self.model, layer_config, specs)
        dtype = self.kv_cache_dtype = choose_kv_cache_dtype(config.kv_cache_dtype, self.dtype)
        num_cpu_blocks = size_cpu_pool(config, self.num_kv_blocks, specs, dtype)
        self.num_cpu_blocks = self.parallel.all_reduce_min(num_cpu_blocks)
        allocate = functools.partial(allocate_kv_caches, specs, config.block_size, dtype)
        self.kv_caches = allocate(self.num_kv_blocks, self.device)
        self.cpu_kv_caches = allocate(self.num_cpu_blocks, torch.device("cpu"))
        self.kv_connector: Any = None  # copies blocks from and to another tier
        if config.has_kv_connector:
            load_chapter("kv_offloading_size", "kv_offload.worker").connect(self)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Run one step and wait for its tokens."""
        return self.launch(scheduler_output).result()

    @torch.inference_mode()
    def launch(self, scheduler_output: SchedulerOutput) -> PendingOutput:
        """Start one step. On a GPU this returns while the step runs; the next step may be launched
        at once."""
        with current_device(self.device):
            self.staging.begin_step()
            metadata = scheduler_output.kv_connector_metadata
            copy_blocks(self.kv_caches, self.cpu_kv_caches, scheduler_output.blocks_to_swap_out)
            if metadata is not None:
                self.kv_connector.start_load_kv(metadata)
            copy_blocks(self.cpu_kv_caches, self.kv_caches, scheduler_output.blocks_to_swap_in)
            copy_blocks(self.kv_caches, self.kv_caches, scheduler_output.blocks_to_copy)
            for slot, weights in scheduler_output.loras_to_load:
                self.lora_slots.load(slot, weights)
            rows = self.update_batch(scheduler_output)
            inputs = self.prepare_inputs(scheduler_output.scheduled, rows)
            hidden = self.forward(inputs)
            follow = self.proposer and self.proposer.follow
            if metadata is not None and not follow:  # else when the drafter has read the tokens
                self.kv_connector.wait_for_save()
            pending = self.sample(scheduler_output.scheduled, inputs, hidden)
            return follow(pending, scheduler_output, inputs, hidden) if follow else pending

    def update_batch(self, scheduler_output: SchedulerOutput) -> np.ndarray:
        """Apply the differences to the rows; return the scheduled sequences' rows."""
        for seq_id, position, token_id in scheduler_output.new_token_ids:
            if (known := self.batch.row_of.get(seq_id)) is not None:
                self.batch.fill_placeholder(known, position, token_id)
        if scheduler_output.is_restart:
            self.batch.clear()
        for seq_id in scheduler_output.finished_seq_ids:
            self.batch.remove(seq_id)
        for new in scheduler_output.new_sequences:
            self.batch.add(new)
        rows = [self.batch.row_of[item.seq_id] for item in scheduler_output.scheduled]
        for row, item in zip(rows, scheduler_output.scheduled, strict=True):
            if item.new_block_ids or item.draft_token_ids:
                self.batch.write_blocks(row, item)
        return np.array(rows, np.int64)

    def prepare_inputs(
        self, scheduled: tuple[ScheduledSequence, ...], rows: np.ndarray
    ) -> StepInputs:
        """Send the step to the device. `rows` are the scheduled sequences' rows."""
        arrays = self.gather_arrays(scheduled, rows)
        shape = self.graphs.choose_shape(arrays.query_start_loc) if self.graphs else None
        return self.send_step(arrays, shape)

    def gather_arrays(
        self, scheduled: tuple[ScheduledSequence, ...], rows: np.ndarray
    ) -> StepArrays[np.ndarray]:
        """Lay the tokens of the step end to end."""
        batch = self.batch
        num_computed = np.array([item.num_computed_tokens for item in scheduled], np.int64)
        num_scheduled = np.array([item.num_scheduled_tokens for item in scheduled], np.int64)
        seq_lens = num_computed + num_scheduled
        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        query_start_loc[1:] = num_scheduled.cumsum()

        token_rows = rows.repeat(num_scheduled)
        offsets = (num_computed - query_start_loc[:-1]).repeat(num_scheduled)
        positions = np.arange(query_start_loc[-1]) + offsets
        blocks = batch.block_tables[token_rows, positions // self.block_size]
        slot_mapping = blocks.astype(np.int64) * self.block_size + positions % self.block_size
        max_blocks = -(-int(seq_lens.max(initial=0)) // self.block_size)
        is_last = positions >= batch.num_tokens[token_rows] - 1  # the last known one, and drafts
        logits_indices = is_last.nonzero()[0]
        logits_indices = logits_indices.repeat(batch.num_samples[token_rows[logits_indices]])
        return StepArrays(
            input_ids=batch.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            token_rows=token_rows,
            slot_mapping=slot_mapping,
            lora_ids=batch.lora_slots[token_rows],
            query_start_loc=query_start_loc,
            seq_lens=seq_lens.astype(np.int32),
            block_table=batch.block_tables[rows, :max_blocks],
            sampled_rows=token_rows[logits_indices],
            logits_indices=logits_indices,
        )

    def send_step(
        self, step: StepArrays[np.ndarray], shape: GraphShape | None = None
    ) -> StepInputs:
        """Send a step, padded to the `shape` of its graph if it runs as one."""
        if shape is None:
            tensors = step.to_device(self.staging)
            block_table = tensors.block_table
        else:
            tensors = pad_step(step, shape).to_device(self.staging)
            num_seqs, max_blocks = tensors.block_table.shape
            self.graph_block_table[:num_seqs, :max_blocks] = tensors.block_table
            block_table = self.graph_block_table[: shape.num_seqs]
        metadata = StepMetadata(
            slot_mapping=tensors.slot_mapping,
            block_table=block_table,
            query_start_loc=tensors.query_start_loc,
            seq_lens=tensors.seq_lens,
            lora=self.lora_slots and self.lora_slots.plan(step, tensors, shape),
        )
        if shape is None or self.backend.supports_cuda_graphs:
            metadata = self.backend.plan(metadata, self.block_size, self.kv_cache_dtype)
        return StepInputs(step, tensors, metadata, shape)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states [num_tokens, hidden]. Each layer stores the step's keys and values."""
        parallel, num_tokens = self.parallel, len(inputs.arrays.input_ids)
        if self.intermediate_tensors is not None:
            parallel.start_receive(self.intermediate_tensors[:num_tokens], parallel.previous)()
        if self.graphs and inputs.graph_shape is not None:
            hidden = self.graphs.replay(inputs.graph_shape)
        else:
            has_placeholders = bool((inputs.arrays.input_ids == PLACEHOLDER).any())
            hidden = self.run_model(inputs, has_placeholders)
        parallel.send(hidden[:num_tokens], parallel.next)
        return hidden

    def run_model(self, inputs: StepInputs, has_placeholders: bool) -> Tensor:
        """The forward pass that a graph captures, or that runs eagerly."""
        tensors, input_ids = inputs.tensors, inputs.tensors.input_ids
        if self.intermediate_tensors is not None:
            input_ids = self.intermediate_tensors[: len(input_ids)]
        elif has_placeholders:
            last_sampled = self.batch.last_sampled_token_ids.index_select(0, tensors.token_rows)
            input_ids = torch.where(input_ids == PLACEHOLDER, last_sampled, input_ids)
        kv_caches = self.kv_caches[: self.num_model_layers]
        return self.model(input_ids, tensors.positions, kv_caches, inputs.metadata)

    @torch.inference_mode()
    def make_decode_forward(self, shape: GraphShape) -> Forward:
        """The forward pass of a decode step of this shape, for a graph to capture.

        It is captured on a step without sequences: all of its rows are padding.
        """
        self.staging.begin_step()
        arrays = self.gather_arrays((), np.empty(0, np.int64))
        inputs = self.send_step(arrays, shape)
        return torch.inference_mode()(functools.partial(self.run_model, inputs, True))

    def sample(
        self, scheduled: tuple[ScheduledSequence, ...], inputs: StepInputs, hidden: Tensor
    ) -> PendingOutput:
        """Sample a token for each sequence whose last known token was in the step.

        A sequence that is about to fork has a token sampled for each branch. A sequence with drafts
        has one sampled behind each of them, too.
        """
        arrays, rows = inputs.arrays, inputs.arrays.sampled_rows
        compute_logits, prompt_logprobs = self.model.compute_logits, []
        if self.batch.num_prompt_logprobs:
            args = arrays.query_start_loc, hidden, compute_logits, self.parallel.tp_rank
            prompt_logprobs = gather_prompt_logprobs(self.batch, scheduled, *args)
        if not len(rows) and self.parallel.pp_size == 1:
            return PendingOutput(self.batch, [], None, prompt_logprobs)
        indices = arrays.logits_indices
        branch_offsets = np.arange(len(rows)) - np.searchsorted(indices, indices)
        branches = self.batch.branches[rows] + branch_offsets
        positions = arrays.positions[indices] + 1
        is_behind_draft = np.append(False, rows[1:] == rows[:-1]) & (branch_offsets == 0)
        drafts = np.where(is_behind_draft, arrays.input_ids[indices], NO_DRAFT)
        columns = (self.batch.seq_ids[rows], positions, drafts)
        samples = list(zip(*(column.tolist() for column in columns), strict=True))
        make_output = functools.partial(PendingOutput, self.batch, samples)
        if self.parallel.pp_size > 1:
            return sample_later(self, inputs, hidden, branches, positions, make_output)
        logits = compute_logits(hidden.index_select(0, inputs.tensors.logits_indices))
        sampled = self._sample_on_rank_0(logits, rows, branches, positions)
        # Below 0: no token is possible. Any will do. (Of a row with drafts, too: what is accepted
        # comes from the CPU.)
        token_ids, its_rows = sampled.token_ids.clamp(min=0), inputs.tensors.sampled_rows
        if branch_offsets.any():  # of the samples of a row that forks, its own
            own = self.staging.send(own=(branch_offsets == 0).nonzero()[0])["own"]
            token_ids, its_rows = token_ids[own], its_rows[own]
        self.batch.last_sampled_token_ids.index_copy_(0, its_rows, token_ids)
        self.batch.append_placeholders(rows)
        return make_output(sampled, prompt_logprobs)

    def _sample_on_rank_0(
        self, logits: Tensor, rows: np.ndarray, branches: np.ndarray, positions: np.ndarray
    ) -> SampledTokens:
        """Sample on rank 0, which has the logits, and broadcast the token ids.

        If sampling fails, rank 0 broadcasts zeros before it raises: the other ranks wait for a
        broadcast in every step.
        """
        size = 0 if self.parallel.device_group is None else len(rows)  # alone: nothing to send
        token_ids = torch.zeros(size, dtype=torch.int64, device=self.device)
        if self.parallel.tp_rank:
            return SampledTokens(self.parallel.broadcast(token_ids), None, {}, {})
        try:
            batch = self.batch.make_sampling_batch(rows, branches, positions)
            choose = self.proposer and self.proposer.make_choose(rows, branches, positions)
            sampled = sampler.sample(logits, batch, choose or choose_tokens)
            token_ids = sampled.token_ids
            return sampled
        finally:
            self.parallel.broadcast(token_ids)


class PendingOutput:
    """A step that was launched. `result()` waits for its tokens: the only wait for the GPU."""

    def __init__(
        self,
        batch: InputBatch,
        # Of each sampled token: (seq_id, position, the draft before it, or NO_DRAFT).
        samples: list[tuple[int, int, int]],
        sampled: SampledTokens | None,
        prompt_logprobs: list[PromptLogprobsTensors],
    ) -> None:
        """Start the copies to the CPU: after the step's own work, before that of any later step."""
        self._batch = batch
        self._samples = samples
        self._sampled = sampled.map(copy_to_host) if sampled else None
        self._prompt_logprobs = [found.map(copy_to_host) for found in prompt_logprobs]
        self._event = record_event(batch.staging.device)

    @torch.inference_mode()
    def result(self) -> ModelOutput:
        """The sampled tokens, and the errors of what cannot be sampled."""
        if self._event is not None:
            self._event.synchronize()
        result = ModelOutput({}, {})
        for found in self._prompt_logprobs:
            result.prompt_logprobs[found.seq_id] = found.to_host()
        if self._sampled is None:
            return result
        output = self._sampled.to_host()
        last: dict[int, int] = {}  # seq_id -> its last token, until one of its drafts is rejected
        for i, error in output.errors.items():
            seq_id, _, draft = self._samples[i]
            if draft == NO_DRAFT:  # else the next step finds it, if it gets there
                result.errors[seq_id] = error
        samples = zip(self._samples, output.token_ids, output.logprobs, strict=True)
        for i, ((seq_id, position, draft), token_id, token_logprobs) in enumerate(samples):
            if seq_id in result.errors:
                continue
            if draft != NO_DRAFT and (last.pop(seq_id, None) != draft or i in output.errors):
                continue  # and all behind it
            before = result.sampled_token_ids.get(seq_id, ())
            logprobs = () if token_logprobs is None else (token_logprobs,)
            if before and draft == NO_DRAFT:  # a branch that forks off
                others = result.forks.get(seq_id, ())
                result.forks[seq_id] = (*others, ForkSample(token_id, logprobs))
                continue
            row = self._batch.row_of.get(seq_id)
            if row is not None:  # else the sequence has finished, or was preempted, meanwhile
                self._batch.fill_placeholder(row, position, token_id)
                if draft != NO_DRAFT:
                    self._batch.num_tokens[row] += 1
            last[seq_id] = token_id
            result.sampled_token_ids[seq_id] = (*before, token_id)
            if logprobs:
                result.logprobs[seq_id] = (*result.logprobs.get(seq_id, ()), *logprobs)
        return result
