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

Left out: CUDA graphs and overlapped steps, which will find their place in `forward`.

vLLM: vllm/worker/worker.py, model_runner.py, cache_engine.py (V0); vllm/v1/worker/gpu_worker.py,
gpu_model_runner.py (V1).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoserve.attention import (
    AttentionBackend,
    AttentionMetadata,
    KVCache,
    KVCacheSpec,
    choose_backend,
)
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.input_batch import InputBatch
from nanoserve.layers import Build
from nanoserve.loader import load_model
from nanoserve.parallel import ParallelState
from nanoserve.sampler import RowError, SamplerOutput, gather_logprobs, sample
from nanoserve.sequence import (
    BlockPair,
    ForkSample,
    ModelOutput,
    PromptLogprobs,
    RequestError,
    ScheduledSequence,
    SchedulerOutput,
    TokenLogprobs,
)

LOGPROB_TILE = 64  # prompt positions whose logits are in memory at once
CPU_CACHE_SHARE = 0.25  # of the memory that is free: a laptop has other things to do


class StepInputs(NamedTuple):
    """One step as tensors."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    metadata: AttentionMetadata
    rows: np.ndarray  # [num_seqs]: the scheduled sequences' rows in the InputBatch
    sampled_rows: np.ndarray  # those of them that sample a token in this step
    last_tokens: Tensor  # [len(sampled_rows)] int64: where in the step their last tokens are
    query_start_loc: np.ndarray  # [num_seqs + 1]: metadata's, on the host


class ModelRunner:
    """The model, its KV cache, and the way from a SchedulerOutput to sampled tokens."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        attention_backend: str | AttentionBackend = "auto",
        parallel: ParallelState | None = None,
    ) -> None:
        """Load the model and allocate the KV cache. `config` must be resolved.

        With `parallel`, this is one of several ranks: it holds its share of each layer, and as many
        KV blocks as the poorest rank has room for.

        Raises ValueError if the weights do not fit the model, or the cache the memory.
        """
        assert config.max_model_len and config.max_num_seqs, "EngineConfig not resolved"
        self.block_size = config.block_size
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, model_config.dtype, self.device)
        self.backend = choose_backend(attention_backend)
        self.parallel = parallel or ParallelState()
        build = Build(self.dtype, self.device, self.parallel, self.backend)
        self.model = load_model(config, model_config, build, use_tqdm=self.parallel.rank == 0)
        specs = self.model.kv_cache_specs()
        num_blocks = num_blocks_that_fit(
            config, specs, self.dtype, self.device, self.parallel.num_local_ranks
        )
        self.num_kv_blocks = self.parallel.minimum(num_blocks)
        self.kv_caches = [
            spec.allocate(self.num_kv_blocks, self.block_size, self.dtype, self.device)
            for spec in specs
        ]
        self.num_cpu_blocks = num_cpu_blocks_to_allocate(config, self.num_kv_blocks)
        cpu = torch.device("cpu")
        self.cpu_kv_caches = [
            spec.allocate(self.num_cpu_blocks, self.block_size, self.dtype, cpu) for spec in specs
        ]
        self.batch = InputBatch(
            config.max_num_seqs,
            config.max_model_len,
            config.block_size,
            model_config.vocab_size,
            self.device,
        )

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Run one step."""
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
            rows=rows,
            sampled_rows=rows[is_sampled],
            last_tokens=self._to_device(query_start_loc[1:][is_sampled].astype(np.int64) - 1),
            query_start_loc=query_start_loc,
        )

    def forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states [num_tokens, hidden]; the step's keys and values are stored on the way."""
        return self.model(inputs.input_ids, inputs.positions, self.kv_caches, inputs.metadata)

    def sample(
        self,
        scheduled: tuple[ScheduledSequence, ...],
        inputs: StepInputs,
        hidden: Tensor,
    ) -> ModelOutput:
        """Sample a token for each sequence whose last known token was in the step.

        A sequence that is about to fork has a token sampled for each branch, from one logits row.
        """
        prompt_logprobs = self._compute_prompt_logprobs(scheduled, inputs, hidden)
        if not len(inputs.sampled_rows):
            return ModelOutput({}, {}, prompt_logprobs=prompt_logprobs)
        num_samples = self.batch.num_samples[inputs.sampled_rows]
        sample_rows = inputs.sampled_rows.repeat(num_samples)
        firsts = num_samples.cumsum() - num_samples  # where each sequence's samples begin
        forks = np.arange(len(sample_rows)) - firsts.repeat(num_samples)
        logits = self.model.compute_logits(hidden[inputs.last_tokens])
        if len(sample_rows) > len(inputs.sampled_rows):
            logits = logits.repeat_interleave(self._to_device(num_samples), dim=0)
        seq_of = {self.batch.row_of[item.seq_id]: item.seq_id for item in scheduled}
        try:
            output = self._sample_on_rank_0(logits, sample_rows, forks)
        except RowError as error:
            raise RequestError(seq_of[sample_rows[error.row]], str(error)) from error.__cause__

        result = ModelOutput({}, {}, prompt_logprobs=prompt_logprobs)
        samples = zip(
            sample_rows.tolist(), forks.tolist(), output.token_ids, output.logprobs, strict=True
        )
        for row, fork, token_id, token_logprobs in samples:
            seq_id = seq_of[row]
            logprobs = () if token_logprobs is None else (token_logprobs,)
            if fork:
                result.forks[seq_id] = (
                    *result.forks.get(seq_id, ()),
                    ForkSample(token_id, logprobs),
                )
                continue
            self.batch.append_token(row, token_id)
            result.sampled_token_ids[seq_id] = (token_id,)
            if logprobs:
                result.logprobs[seq_id] = logprobs
        return result

    def _sample_on_rank_0(
        self, logits: Tensor, sample_rows: np.ndarray, forks: np.ndarray
    ) -> SamplerOutput:
        """Sample where the logits are; the other ranks are told the tokens, and nothing else.

        If it fails, they are told something all the same: nobody waits in vain, and a failed step
        is made again.
        """
        token_ids = torch.zeros(len(sample_rows), dtype=torch.int64, device=self.device)
        if self.parallel.rank:
            token_list = self.parallel.broadcast(token_ids).tolist()
            return SamplerOutput(token_list, [None] * len(token_list))
        try:
            output = sample(logits, self.batch.make_sampling_batch(sample_rows, forks))
            token_ids.copy_(torch.tensor(output.token_ids))
            return output
        finally:
            self.parallel.broadcast(token_ids)

    def _compute_prompt_logprobs(
        self,
        scheduled: tuple[ScheduledSequence, ...],
        inputs: StepInputs,
        hidden: Tensor,
    ) -> dict[int, PromptLogprobs]:
        """For sequences that ask: how likely the prompt's tokens in this step were.

        The logits of position p speak about token p + 1, so a chunk [a, b) tells of the prompt
        tokens a + 1 .. b.
        """
        result = {}
        starts = inputs.query_start_loc[:-1]
        for item, row, start in zip(scheduled, inputs.rows.tolist(), starts, strict=True):
            number = self.batch.num_prompt_logprobs[row]
            first = item.num_computed_tokens + 1
            end = item.num_computed_tokens + item.num_scheduled_tokens + 1
            end = min(end, int(self.batch.num_prompt_tokens[row]))
            if number is None or end <= first:
                continue
            targets = self._to_device(self.batch.token_ids[row, first:end].astype(np.int64))
            entries: list[TokenLogprobs] = []
            for tile in range(0, end - first, LOGPROB_TILE):
                part = targets[tile : tile + LOGPROB_TILE]
                at = int(start) + tile
                logits = self.model.compute_logits(hidden[at : at + len(part)]).float()
                if self.parallel.rank == 0:  # the others have lent a hand with the logits
                    found = gather_logprobs(logits, part, (number,) * len(part))
                    entries += [entry for entry in found if entry is not None]
            result[item.seq_id] = PromptLogprobs(first, tuple(entries))
        return result

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def copy_blocks(
    source: list[KVCache], destination: list[KVCache], pairs: tuple[BlockPair, ...]
) -> None:
    """Copy whole blocks, in every layer, between caches or within one."""
    if not pairs:
        return
    sources, destinations = torch.tensor(pairs).unbind(dim=1)
    for source_pair, destination_pair in zip(source, destination, strict=True):
        for from_cache, to_cache in zip(source_pair, destination_pair, strict=True):
            blocks = from_cache.index_select(0, sources.to(from_cache.device))
            to_cache.index_copy_(0, destinations.to(to_cache.device), blocks.to(to_cache.device))


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
    config: EngineConfig,
    specs: list[KVCacheSpec],
    dtype: torch.dtype,
    device: torch.device,
    num_local_ranks: int = 1,
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
        memory = free_memory(device, config.gpu_memory_utilization, num_local_ranks)
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


def num_cpu_blocks_to_allocate(config: EngineConfig, num_kv_blocks: int) -> int:
    """Blocks of the CPU pool: none unless preemption swaps; by default as many as KV blocks."""
    if config.preemption_mode != "swap":
        return 0
    return num_kv_blocks if config.num_cpu_blocks is None else config.num_cpu_blocks


def free_memory(
    device: torch.device, gpu_memory_utilization: float, num_local_ranks: int = 1
) -> int:
    """Bytes the KV cache may take on `device` by default. Main memory is shared by the ranks of a
    machine; a GPU is one rank's own."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - total * (1 - gpu_memory_utilization)))
    return int(available_memory() * CPU_CACHE_SHARE / num_local_ranks)


def available_memory() -> int:
    """Bytes of main memory that a new process could use; 4 GiB where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # Linux: free pages, and those that caches would give up
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max")  # of a container
        text = limit.read_text().strip() if limit.exists() else "max"
        return available if text == "max" else min(available, int(text))
    return 2**32
