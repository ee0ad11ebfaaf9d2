"""How does a step become tensors, and a forward pass?

The runner keeps one row per sequence it knows (token ids, block table, sampling parameters) in
NumPy arrays, and changes only what a SchedulerOutput says changed: what a step costs does not grow
with the length of the contexts. Then a handful of vectorised lines lay the step's tokens end to
end. Two sequences, block_size 4, one decoding its 6th token, one starting a prompt of 3:

    scheduled         (seq 0: computed 5, scheduled 1)   (seq 1: computed 0, scheduled 3)
    input_ids         [ t5           | p0 p1 p2 ]
    positions         [ 5            | 0  1  2  ]
    slot_mapping      [ bt0[1]*4 + 1 | bt1[0]*4 + 0, 1, 2 ]
    query_start_loc   [ 0, 1, 4 ]
    seq_lens          [ 6, 3 ]

A sequence whose last known token is in the step gets a token sampled; a chunk of a prompt that is
not its end does not.

Left out: CUDA graphs and overlapped steps, which will find their place in `forward`.

vLLM: vllm/worker/worker.py, model_runner.py, cache_engine.py (V0); vllm/v1/worker/gpu_worker.py,
gpu_model_runner.py, gpu_input_batch.py (V1).
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoserve.attention import AttentionBackend, AttentionMetadata, KVCacheSpec, choose_backend
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.layers import Build
from nanoserve.loader import load_model
from nanoserve.sampler import SamplingBatch, sample, uniform_noise
from nanoserve.sequence import (
    ModelOutput,
    NewSequence,
    ScheduledSequence,
    SchedulerOutput,
    TokenLogprobs,
)

CPU_CACHE_SHARE = 0.25  # of the memory that is free: a laptop has other things to do


class StepInputs(NamedTuple):
    """One step as tensors."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    metadata: AttentionMetadata
    sampled_rows: np.ndarray  # rows (of the InputBatch) that sample a token in this step
    last_tokens: Tensor  # [len(sampled_rows)] int64: where in the step their last tokens are


class InputBatch:
    """One row per known sequence.

    Invariant: row `row_of[seq_id]` holds all that a step may ask about the sequence; rows not in
    use are in `free_rows`, and what they hold is never read.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int):
        max_blocks = -(-max_model_len // block_size)
        self.vocab_size = vocab_size
        self.row_of: dict[int, int] = {}
        self.free_rows = list(range(max_num_seqs))[::-1]
        # np.zeros maps memory only when it is written: long-context tables cost nothing up front.
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.block_tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.seeds = np.zeros(max_num_seqs, np.int64)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.zeros(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.num_logprobs: list[int | None] = [None] * max_num_seqs

    def add(self, new: NewSequence) -> None:
        """Give a new sequence a row."""
        row = self.row_of[new.seq_id] = self.free_rows.pop()
        params = new.sampling_params
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self.num_tokens[row] = len(new.token_ids)
        self.num_blocks[row] = 0
        self.append_blocks(row, new.block_ids)
        self.seeds[row] = new.seed
        self.temperature[row] = params.temperature
        self.top_k[row] = min(params.top_k or self.vocab_size, self.vocab_size)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.num_logprobs[row] = params.logprobs

    def forget(self, seq_id: int) -> None:
        """Free a sequence's row, if it has one."""
        row = self.row_of.pop(seq_id, None)
        if row is not None:
            self.free_rows.append(row)

    def append_blocks(self, row: int, block_ids: list[int] | tuple[int, ...]) -> None:
        start = self.num_blocks[row]
        self.block_tables[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] = start + len(block_ids)

    def append_token(self, row: int, token_id: int) -> None:
        """Remember a sampled token (unless the row is full: then the sequence ends here)."""
        if self.num_tokens[row] < self.token_ids.shape[1]:
            self.token_ids[row, self.num_tokens[row]] = token_id
            self.num_tokens[row] += 1


class ModelRunner:
    """The model, its KV cache, and the way from a SchedulerOutput to sampled tokens."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        attention_backend: str | AttentionBackend = "auto",
    ) -> None:
        """Load the model and allocate the KV cache. `config` must be resolved.

        Raises ValueError if the weights do not fit the model, or the cache the memory.
        """
        assert config.max_model_len and config.max_num_seqs, "EngineConfig not resolved"
        self.block_size = config.block_size
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, model_config.dtype, self.device)
        self.backend = choose_backend(attention_backend)
        build = Build(dtype=self.dtype, device=self.device, attention=self.backend)
        self.model = load_model(config, model_config, build)
        specs = self.model.kv_cache_specs()
        self.num_kv_blocks = num_blocks_that_fit(config, specs, self.dtype, self.device)
        self.kv_caches = [
            spec.allocate(self.num_kv_blocks, self.block_size, self.dtype, self.device)
            for spec in specs
        ]
        self.batch = InputBatch(
            config.max_num_seqs, config.max_model_len, config.block_size, model_config.vocab_size
        )

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Run one step."""
        rows = self.update_batch(scheduler_output)
        inputs = self.prepare_inputs(scheduler_output.scheduled, rows)
        hidden = self.forward(inputs)
        return self.sample(scheduler_output.scheduled, inputs, hidden)

    def update_batch(self, scheduler_output: SchedulerOutput) -> np.ndarray:
        """Apply the differences to the rows; return the scheduled sequences' rows."""
        for seq_id in scheduler_output.finished_seq_ids:
            self.batch.forget(seq_id)
        for new in scheduler_output.new_sequences:
            self.batch.add(new)
        rows = [self.batch.row_of[item.seq_id] for item in scheduler_output.scheduled]
        for row, item in zip(rows, scheduler_output.scheduled, strict=True):
            if item.new_block_ids:
                self.batch.append_blocks(row, item.new_block_ids)
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

        max_blocks = -(-int(seq_lens.max()) // self.block_size)
        is_sampled = seq_lens >= batch.num_tokens[rows]
        metadata = AttentionMetadata(
            slot_mapping=self._to_device(slot_mapping),
            block_table=self._to_device(batch.block_tables[rows, :max_blocks]),
            query_start_loc=self._to_device(query_start_loc),
            seq_lens=self._to_device(seq_lens.astype(np.int32)),
        )
        return StepInputs(
            input_ids=self._to_device(batch.token_ids[token_rows, positions].astype(np.int64)),
            positions=self._to_device(positions),
            metadata=metadata,
            sampled_rows=rows[is_sampled],
            last_tokens=self._to_device(query_start_loc[1:][is_sampled].astype(np.int64) - 1),
        )

    def forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states [num_tokens, hidden]; the step's keys and values are stored on the way."""
        return self.model(inputs.input_ids, inputs.positions, self.kv_caches, inputs.metadata)

    def sample(
        self, scheduled: tuple[ScheduledSequence, ...], inputs: StepInputs, hidden: Tensor
    ) -> ModelOutput:
        """Sample a token for each sequence whose last known token was in the step."""
        rows = inputs.sampled_rows
        if not len(rows):
            return ModelOutput({}, {})
        logits = self.model.compute_logits(hidden[inputs.last_tokens])
        output = sample(logits, self._sampling_batch(rows))
        seq_of = {self.batch.row_of[item.seq_id]: item.seq_id for item in scheduled}
        sampled: dict[int, tuple[int, ...]] = {}
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        for row, token_id, token_logprobs in zip(
            rows.tolist(), output.token_ids, output.logprobs, strict=True
        ):
            self.batch.append_token(row, token_id)
            sampled[seq_of[row]] = (token_id,)
            if token_logprobs is not None:
                logprobs[seq_of[row]] = (token_logprobs,)
        return ModelOutput(sampled, logprobs)

    def _sampling_batch(self, rows: np.ndarray) -> SamplingBatch:
        """The sampling parameters of these rows; filters that no row uses are None."""
        batch = self.batch
        top_k, top_p, min_p = batch.top_k[rows], batch.top_p[rows], batch.min_p[rows]
        uniform = uniform_noise(batch.seeds[rows], batch.num_tokens[rows])
        return SamplingBatch(
            temperature=self._to_device(batch.temperature[rows]),
            top_k=self._to_device(top_k) if (top_k < batch.vocab_size).any() else None,
            top_p=self._to_device(top_p) if (top_p < 1).any() else None,
            min_p=self._to_device(min_p) if (min_p > 0).any() else None,
            uniform=self._to_device(uniform),
            num_logprobs=tuple(batch.num_logprobs[row] for row in rows.tolist()),
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def choose_device(wanted: str) -> torch.device:
    """ "auto" is a CUDA GPU if there is one, else the CPU. Raises ValueError if there is none."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device is {wanted!r}, but torch sees {torch.cuda.device_count()} CUDA devices. "
            "Use device='cpu' or 'auto', or install a torch built for your driver."
        )
    return device


def choose_dtype(wanted: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """ "auto" is float32 on a CPU (its fastest and most exact), else the checkpoint's own."""
    if wanted == "auto":
        wanted = "float32" if device.type == "cpu" else checkpoint
    dtype = getattr(torch, wanted, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype {wanted!r} is not supported; use float32, bfloat16 or float16.")
    return dtype


def num_blocks_that_fit(
    config: EngineConfig, specs: list[KVCacheSpec], dtype: torch.dtype, device: torch.device
) -> int:
    """How many KV blocks to allocate, over all layers.

    What the user asked for; else what kv_cache_memory (or, by default, free memory) holds, but no
    more than max_num_seqs sequences of max_model_len tokens could fill. Raises ValueError if that
    is less than one such sequence.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    assert config.max_model_len and config.max_num_seqs, "EngineConfig not resolved"
    block_bytes = sum(spec.num_bytes(config.block_size, dtype) for spec in specs)
    memory = config.kv_cache_memory
    if memory is None:
        memory = free_memory(device, config.gpu_memory_utilization)
    per_sequence = -(-config.max_model_len // config.block_size)
    num_blocks = memory // block_bytes
    if num_blocks < per_sequence:
        raise ValueError(
            f"one sequence of max_model_len={config.max_model_len} tokens needs "
            f"{per_sequence * block_bytes / 2**20:.0f} MiB of KV cache, and there are "
            f"{memory / 2**20:.0f} MiB for it. Lower max_model_len, raise kv_cache_memory (or "
            "gpu_memory_utilization), or set num_kv_blocks."
        )
    return min(num_blocks, per_sequence * config.max_num_seqs)


def free_memory(device: torch.device, gpu_memory_utilization: float) -> int:
    """Bytes the KV cache may take on `device` by default."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - total * (1 - gpu_memory_utilization)))
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * CPU_CACHE_SHARE)
    return 2**30  # macOS and Windows do not say; kv_cache_memory does
