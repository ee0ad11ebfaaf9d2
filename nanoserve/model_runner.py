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

A sequence whose last known token is in the step gets a token sampled; a chunk that does not reach
the end of its prompt does not.

With overlapped steps (and on ranks, of which only rank 0 reads tokens), a step is launched before
its input tokens are known. input_ids then holds a placeholder (-1) for such a token, and the device
replaces the placeholder with the token that it sampled last for that row.

    launch(step 1), launch(step 2), result of step 1, launch(step 3), result of step 2, ...

On a GPU, a step in which every sequence brings one token (a *decode* step) is replayed as a CUDA
graph: kernels/cuda_graph.py.

vLLM: vllm/worker/worker.py, model_runner.py, cache_engine.py (V0); vllm/v1/worker/gpu_worker.py,
gpu_model_runner.py, AsyncModelRunnerOutput in vllm/v1/outputs.py (V1).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoserve import sampler
from nanoserve.attention import StepMetadata
from nanoserve.config import EngineConfig
from nanoserve.distributed.parallel import ParallelState
from nanoserve.input_batch import PLACEHOLDER, InputBatch, RequestState, StepArrays
from nanoserve.kernels.cuda_graph import DecodeGraphs, GraphShape, capture_graphs, pad_step
from nanoserve.kernels.kv_cache import KVCacheSpec, copy_blocks, make_kv_caches
from nanoserve.kernels.selector import choose_dtype, choose_kernels
from nanoserve.kernels.staging import StagingBuffer, copy_to_host
from nanoserve.layers import LayerConfig
from nanoserve.models import loader, registry
from nanoserve.models.base import Model
from nanoserve.models.config import ModelConfig
from nanoserve.sampler import LogprobsTensors, SampledTokens, gather_logprobs
from nanoserve.sequence import ModelOutput, RequestError, SampledToken, SchedulerOutput

LOGPROB_TILE = 64  # prompt positions whose logits are in memory at once


@dataclass
class PendingOutput:
    """A step that was launched: on a GPU it runs, or the copies of its tokens are under way."""

    input_batch: InputBatch
    hidden: Tensor  # [num_tokens, hidden]
    samples: list[tuple[int, int]]  # of each sampled token: (seq_id, position)
    sampled: SampledTokens | None  # None: the step samples nothing
    prompt_logprobs: dict[int, tuple[int, list[LogprobsTensors]]]
    event: Any = None  # of a GPU: passes when the copies are done


class ModelRunner:
    """The model, its KV cache, and the way from a SchedulerOutput to sampled tokens."""

    query_lens: tuple[int, ...] = (1,)  # tokens of a sequence in a decode step, in ascending order

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, parallel: ParallelState | None = None
    ) -> None:
        """Load the model, allocate the KV caches, and capture CUDA graphs. `config` must be
        resolved. With `parallel`, this runner is one of several ranks: it holds its share of each
        layer, and as many KV blocks as the rank with the least memory."""
        self.config, self.model_config = config, model_config
        self.parallel, self.device = parallel or ParallelState(), torch.device(config.device)
        self.block_size, is_gpu = config.block_size, self.device.type == "cuda"
        # Some tokens are the input of a step before the CPU of this rank knows them.
        self.has_placeholders = config.async_scheduling or self.parallel.tp_size > 1
        # Whatever the application around the engine has set: see `launch`.
        self.no_autocast = torch.autocast(self.device.type, enabled=False)
        self.current_gpu = torch.cuda.device(self.device) if is_gpu else nullcontext()
        with self.no_autocast, self.current_gpu, torch.device("cpu"):
            self.dtype = choose_dtype(config.dtype, model_config, self.device)
            self.layer_config = LayerConfig(self.dtype, self.device, self.parallel)
            self.model = self.load_model()
            num_rows = config.max_num_seqs * self.query_lens[-1]  # of logits, in a step
            self.kv_caches, self.cpu_kv_caches = make_kv_caches(self, num_rows)
            self.num_kv_blocks = len(self.kv_caches[0][0])
            self.num_cpu_blocks = len(self.cpu_kv_caches[0][0])
            self.staging = StagingBuffer(config, num_rows, self.device) if is_gpu else None
            self.req_states = RequestState(config, model_config.vocab_size, self.device, self.send)
            self.graphs: DecodeGraphs | None = capture_graphs(self)

    def load_model(self) -> Model:
        """The model, its weights filled, with the kernels that suit it."""
        config, model_config = self.config, self.model_config
        model = loader.load_model(config, model_config, self.layer_config, self.build_model)
        self.backend, self.choose = choose_kernels(model, self.config, self.device, self.dtype)
        self.layer_config = replace(self.layer_config, attention=self.backend)
        return model

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """What a KV block holds. The model's own layers come first."""
        return self.model.kv_cache_specs()

    def blocks_per_sequence(self) -> int:
        """KV blocks that a sequence of max_model_len tokens fills."""
        return -(-self.config.max_model_len // self.block_size)

    def build_model(self, max_model_len: int, layer_config: LayerConfig) -> Model:
        """The model, or this rank's share of it, its weights unfilled."""
        return registry.build_model(self.model_config, max_model_len, layer_config)

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> Callable[[], ModelOutput]:
        """Start one step; what is returned waits for its tokens. On a GPU this returns while the
        step runs, and the next step may be launched at once."""
        with self.no_autocast, self.current_gpu:
            kv, cpu = self.kv_caches, self.cpu_kv_caches
            out, back, copies = step.blocks_to_swap_out, step.blocks_to_swap_in, step.blocks_to_copy
            for source, target, blocks in ((kv, cpu, out), (cpu, kv, back), (kv, kv, copies)):
                if blocks:
                    copy_blocks(source, target, blocks)
            if self.staging is not None:
                self.staging.begin_step()
            rows = self.update_batch(step)
            input_batch = self.prepare_inputs(step, rows)
            if self.graphs is not None and input_batch.graph_shape is not None:
                hidden = self.graphs.replay(input_batch.graph_shape)
            else:
                hidden = self.forward(input_batch)
            return partial(self.read, self.sample(input_batch, hidden))

    # -- 1: what the runner knows --

    def update_batch(self, step: SchedulerOutput) -> np.ndarray:
        """Apply the differences to the rows; return the scheduled sequences' rows."""
        if step.is_restart:
            self.req_states.clear()
        for seq_id in step.dropped_seq_ids:
            self.req_states.remove(seq_id)
        for new in step.new_sequences:
            self.req_states.add(new)
        rows = [self.req_states.row_of[item.seq_id] for item in step.scheduled]
        for row, (*_, first, new_block_ids) in zip(rows, step.scheduled, strict=True):
            if new_block_ids:
                end = first + len(new_block_ids)
                self.req_states.block_tables[row, first:end] = new_block_ids
        return np.array(rows, np.int64)

    # -- 2: tensors --

    def gather_arrays(self, step: SchedulerOutput, rows: np.ndarray) -> StepArrays:
        """Lay the tokens of the step end to end."""
        states = self.req_states
        num_computed = np.array([item.num_computed_tokens for item in step.scheduled], np.int64)
        num_scheduled = np.array([item.num_scheduled_tokens for item in step.scheduled], np.int64)
        seq_lens = num_computed + num_scheduled
        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        query_start_loc[1:] = num_scheduled.cumsum()

        token_rows = rows.repeat(num_scheduled)
        offsets = (num_computed - query_start_loc[:-1]).repeat(num_scheduled)
        positions = np.arange(query_start_loc[-1]) + offsets
        blocks = states.block_tables[token_rows, positions // self.block_size]
        slot_mapping = blocks.astype(np.int64) * self.block_size + positions % self.block_size
        max_blocks = -(-int(seq_lens.max(initial=0)) // self.block_size)
        # A token is sampled behind the last known one (and behind all that stands after it).
        logits_indices = (positions >= states.num_tokens[token_rows] - 1).nonzero()[0]
        logits_indices = logits_indices.repeat(states.num_samples[token_rows[logits_indices]])
        return StepArrays(
            input_ids=states.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            token_rows=token_rows,
            slot_mapping=slot_mapping,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens.astype(np.int32),
            block_table=states.block_tables[rows, :max_blocks],
            sampled_rows=token_rows[logits_indices],
            logits_indices=logits_indices,
        )

    def prepare_inputs(
        self, step: SchedulerOutput, rows: np.ndarray, shape: GraphShape | None = None
    ) -> InputBatch:
        """Send the step to the device. `rows` are the scheduled sequences' rows. If it runs as a
        graph it is padded to the graph's shape (which may be given)."""
        arrays = self.gather_arrays(step, rows)
        if self.graphs is not None and shape is None:
            shape = self.graphs.choose_shape(arrays.query_start_loc)
        return self.send_inputs(step, arrays, shape)

    def send_inputs(
        self, step: SchedulerOutput, arrays: StepArrays, shape: GraphShape | None
    ) -> InputBatch:
        """The step on the device, padded to `shape`, with what attention needs to know of it."""
        padded = arrays if shape is None else pad_step(arrays, shape)
        tensors = StepArrays(**self.send(**vars(padded)))
        block_table = tensors.block_table
        if shape is not None and self.graphs is not None:
            block_table = self.graphs.keep_block_table(block_table, shape)
        # A graph holds its launches: they suit the most tokens that its sequences may bring.
        query_lens = np.full(*shape) if shape else np.diff(arrays.query_start_loc)
        metadata = StepMetadata(
            tensors.slot_mapping, block_table, tensors.query_start_loc, tensors.seq_lens, query_lens
        )
        if shape is None or self.backend.supports_cuda_graphs:
            metadata = self.backend.plan(metadata, self.block_size, self.kv_caches[0][0].dtype)
        return InputBatch(step, arrays, tensors, metadata, shape)

    def send(self, **arrays: np.ndarray) -> dict[str, Tensor]:
        """The arrays as tensors on the device; on a CPU, without a copy."""
        if self.staging is not None:
            return self.staging.send(**arrays)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    # -- 3: the forward pass --

    def forward(self, input_batch: InputBatch) -> Tensor:
        """Hidden states [num_tokens, hidden]. Each layer stores the step's keys and values."""
        tensors, input_ids = input_batch.tensors, input_batch.tensors.input_ids
        if self.has_placeholders:
            known = self.req_states.last_sampled_token_ids.index_select(0, tensors.token_rows)
            input_ids = torch.where(input_ids == PLACEHOLDER, known, input_ids)
        return self.model(input_ids, tensors.positions, self.kv_caches, input_batch.metadata)

    # -- 4: tokens --

    def sample(self, input_batch: InputBatch, hidden: Tensor) -> PendingOutput:
        """Sample a token for each sequence whose last known token was in the step, and one for each
        branch that is about to fork off."""
        sampled, rows = self.draw(input_batch, hidden), input_batch.arrays.sampled_rows
        positions = input_batch.arrays.positions[input_batch.arrays.logits_indices] + 1
        samples = list(zip(self.req_states.seq_ids[rows].tolist(), positions.tolist(), strict=True))
        pending = PendingOutput(input_batch, hidden, samples, sampled, {})
        if self.req_states.num_prompt_logprobs:
            pending.prompt_logprobs = self.gather_prompt_logprobs(input_batch, hidden)
        if self.staging is not None:
            copied, pending.event = copy_to_host((sampled, pending.prompt_logprobs))
            pending.sampled, pending.prompt_logprobs = copied
        return pending

    def draw(self, input_batch: InputBatch, hidden: Tensor) -> SampledTokens | None:
        """The tokens; None if the step brings none, or on another rank."""
        sampled, indices = None, input_batch.tensors.logits_indices
        if len(indices):
            logits = self.model.compute_logits(hidden.index_select(0, indices))
            if self.parallel.tp_rank == 0:
                batch = self.make_sampling_batch(input_batch)
                sampled = sampler.sample(logits, batch, self.choose)
            if self.has_placeholders:
                self.keep_sampled(input_batch, sampled)
        return sampled

    def make_sampling_batch(self, input_batch: InputBatch) -> sampler.SamplingBatch:
        """The sampling parameters of the step. Of a row that forks, each sample is of a branch."""
        rows, indices = input_batch.arrays.sampled_rows, input_batch.arrays.logits_indices
        branches = self.req_states.branches[rows] + np.arange(len(rows))
        branches -= np.searchsorted(indices, indices)
        return self.req_states.make_sampling_batch(
            rows, branches, input_batch.arrays.positions[indices] + 1
        )

    def keep_sampled(self, input_batch: InputBatch, sampled: SampledTokens | None) -> None:
        """Tell all ranks the tokens, and keep them on the device: the input of the next step."""
        rows = input_batch.tensors.sampled_rows
        token_ids = torch.zeros_like(rows) if sampled is None else sampled.token_ids
        token_ids = self.parallel.broadcast(token_ids)
        own = np.diff(input_batch.arrays.logits_indices, prepend=-1).nonzero()[0]
        if len(own) < len(rows):  # of the samples of a row that forks, its own
            sent = self.send(own=own)["own"]
            token_ids, rows = token_ids[sent], rows[sent]
        self.req_states.last_sampled_token_ids.index_copy_(0, rows, token_ids)
        self.req_states.append_placeholders(input_batch.arrays.sampled_rows)

    def gather_prompt_logprobs(
        self, input_batch: InputBatch, hidden: Tensor
    ) -> dict[int, tuple[int, list[LogprobsTensors]]]:
        """For each sequence that asks: log-probabilities of its prompt tokens in this step, in
        tiles, because the logits of a whole prompt may take gigabytes. seq_id -> (position of the
        first token, tiles)."""
        result: dict[int, tuple[int, list[LogprobsTensors]]] = {}
        states, wanted = self.req_states, self.req_states.num_prompt_logprobs
        starts = input_batch.arrays.query_start_loc.tolist()
        for item, start in zip(input_batch.step.scheduled, starts, strict=False):
            row, first = states.row_of[item.seq_id], item.num_computed_tokens + 1
            end = min(first + item.num_scheduled_tokens, int(states.num_prompt_tokens[row]))
            for place in range(first, end, LOGPROB_TILE) if row in wanted else ():
                token_ids = states.token_ids[row, place : min(place + LOGPROB_TILE, end)]
                tile = self.send(tile=token_ids.astype(np.int64))["tile"]
                logits = self.model.compute_logits(hidden[start:][place - first :][: len(tile)])
                if self.parallel.tp_rank == 0:  # which has the logits of all ranks
                    entries = gather_logprobs(logits.float(), tile, (wanted[row],) * len(tile))
                    result.setdefault(item.seq_id, (first, []))[1].append(entries)
        return result

    # -- 5: back to the CPU --

    @torch.inference_mode()
    def read(self, pending: PendingOutput) -> ModelOutput:
        """The tokens of a step that was launched: the only wait for the GPU."""
        if pending.event is not None:
            pending.event.synchronize()
        output = ModelOutput()
        for seq_id, (first, tiles) in pending.prompt_logprobs.items():
            entries = [entry for tile in tiles for entry in tile.to_host()]
            output.prompt_logprobs[seq_id] = (first, entries)
        if pending.sampled is not None:
            self.collect(pending, pending.sampled.to_host(), output)
        return output

    def collect(
        self, pending: PendingOutput, tokens: list[SampledToken | RequestError], output: ModelOutput
    ) -> None:
        """Give sampled tokens to their sequences. A second one for the same position is that of a
        branch."""
        last = None
        for sample, token in zip(pending.samples, tokens, strict=True):
            seq_id, position = sample
            if isinstance(token, RequestError):
                output.errors[seq_id] = token
                continue
            tokens_of = output.forks if sample == last else output.sampled
            tokens_of[seq_id] = [*tokens_of.get(seq_id, ()), token]
            if sample != last:
                self.req_states.write_token(seq_id, position, token.token_id)
            last = sample
