"""What do groups of layers change in the engine?

    engine          tells the block manager the groups, and knows how long a request may be
    block manager   a block table for each group: managers.py
    scheduler       frees what lies behind the windows, and sends the further tables
    runner          one tensor for a layer of each group; gives each layer the table of its group

*In the runner.* The block tables of all groups go to the device together; that of a group is a part
of the tensor, which the kernels read where it lies. An entry behind the window is the null block,
the last one of the pool: it is never written, so its zeros are read and masked. The model itself
does not know of groups. When it is loaded, each of its modules that attend gets a hook, torch's own
word for a function that is called before forward and may change its arguments.

*CUDA graphs* read fixed addresses, so in a step that runs as a graph the further tables and slots
are copied to tensors of fixed size, as the core does with its table.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanoserve.attention import KVCache, StepMetadata
from nanoserve.chapters.hybrid_kv.groups import KVCacheGroup, make_groups
from nanoserve.chapters.hybrid_kv.managers import HybridBlockManager  # noqa: F401 (a part)
from nanoserve.config import EngineConfig
from nanoserve.engine import LLMEngine
from nanoserve.input_batch import InputBatch, StepArrays
from nanoserve.kernels.cuda_graph import GraphShape
from nanoserve.kernels.kv_cache import KVCacheSpec
from nanoserve.model_runner import ModelRunner
from nanoserve.models.base import Model
from nanoserve.scheduler import Scheduler, StepPlan
from nanoserve.sequence import SchedulerOutput, Sequence


class HybridNote(dict[int, list[tuple[int, list[int]]]]):
    """From the scheduler to the runner, with each step. By seq_id, for each group behind the first:
    the index in the block table from which on block ids are written, and these ids."""


@dataclass(frozen=True)
class HybridConfig(EngineConfig):
    # False: layers with a sliding window have block tables of their own, and give back the blocks
    # behind the window.
    disable_hybrid_kv_cache_manager: bool = True

    @property
    def max_chunk(self) -> int:
        """Tokens of one sequence in one step at most: the scheduler's."""
        limit = self.enable_chunked_prefill and self.long_prefill_token_threshold
        return limit or self.max_num_batched_tokens or 0


class HybridEngine(LLMEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        manager, longest = self.block_manager, self.config.max_model_len
        manager.set_groups(self.executor.runner.kv_cache_groups)
        lengths, num_blocks = range(1, 1 + longest), manager.pool.num_blocks
        most = bisect_right(lengths, num_blocks, key=manager.most_blocks)
        limits = (longest, "max_model_len"), (most, "the size of the KV cache")
        self.input_processor.capacity, self.input_processor.limit = min(limits)


class HybridScheduler(Scheduler):
    def schedule(self) -> SchedulerOutput:
        """First of all, blocks behind the windows become free."""
        for seq in self.running:
            self.block_manager.free_skipped_blocks(seq)
        return super().schedule()

    def schedule_tokens(self, seq: Sequence, num_tokens: int, step: StepPlan) -> None:
        """Tell the runner the further tables: all of a sequence that it does not know, else from
        the last block on, which may be replaced by a copy."""
        is_new = seq.seq_id not in self.known_seq_ids
        tables = [group.block_tables[seq.seq_id] for group in self.block_manager.groups[1:]]
        starts = [0 if is_new else max(0, len(table) - 1) for table in tables]
        super().schedule_tokens(seq, num_tokens, step)
        new_blocks = [(start, table[start:]) for start, table in zip(starts, tables, strict=True)]
        step.notes.setdefault(HybridNote, HybridNote())[seq.seq_id] = new_blocks


@dataclass(frozen=True)
class SharedSpec(KVCacheSpec):
    """A tensor for one layer of each group: in the place of a block it has one for each group. So
    all numbers outside this chapter stay those of blocks of all layers."""

    num_groups: int = 1

    def allocate(self, num_blocks: int, *shape: Any) -> KVCache:
        return super().allocate(self.num_groups * num_blocks, *shape)


@dataclass(frozen=True)
class HybridMetadata(StepMetadata):
    """The metadata of group 0, and that of each group."""

    groups: tuple[StepMetadata, ...] = ()


def choose_caches(index_of: list[int], model: nn.Module, args: Any) -> Any:
    """A hook of the model: the tensors that each layer shares, and not each tensor once."""
    is_dummy = not isinstance(args[3], HybridMetadata)  # to measure memory
    return args if is_dummy else (*args[:2], [args[2][index] for index in index_of], args[3])


def choose_group(number: int, layer: nn.Module, args: Any, kwargs: Any) -> Any:
    """A hook of a module that attends: the metadata of its group."""

    def choose(each: Any) -> Any:
        if isinstance(each, HybridMetadata):
            return each.groups[number]
        if isinstance(getattr(each, "metadata", None), HybridMetadata):  # for transformers' models
            return replace(each, metadata=each.metadata.groups[number])
        return each

    return tuple(map(choose, args)), {name: choose(each) for name, each in kwargs.items()}


class HybridRunner(ModelRunner):
    # Of graphs, for the groups behind the first: [groups, max tokens], [groups, max_num_seqs, ..].
    fixed_slots: Tensor
    fixed_tables: Tensor

    def load_model(self) -> Model:
        """The model; each module that attends knows its group."""
        self.model, config = super().load_model(), self.config
        specs = self.model.kv_cache_specs()
        if len(super().kv_cache_specs()) > len(specs):
            raise ValueError("a drafter with layers of its own fits no group. Use method 'ngram'.")
        self.kv_cache_groups = make_groups(specs, self.block_size, config.max_chunk)
        width, num_others = super().blocks_per_sequence(), len(self.kv_cache_groups) - 1
        shape, on_device = (config.max_num_seqs, width), {"device": self.device}
        self.tables = [np.zeros(shape, np.int32) for _ in range(num_others)]
        if self.device.type == "cuda":
            most = config.max_num_batched_tokens
            self.fixed_slots = torch.zeros(num_others, most, dtype=torch.int64, **on_device)
            self.fixed_tables = torch.zeros(num_others, *shape, dtype=torch.int32, **on_device)
        modules = [each for each in self.model.modules() if hasattr(each, "kv_cache_spec")]
        modules, index_of = [*getattr(self.model, "calls", modules)], [0] * len(specs)
        for number, group in enumerate(self.kv_cache_groups):
            for index, layer in enumerate(group.layers):
                index_of[layer], hook = index, partial(choose_group, number)
                modules[layer].register_forward_pre_hook(hook, with_kwargs=True)
        self.model.register_forward_pre_hook(partial(choose_caches, index_of))
        return self.model

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Of the tensors, which the groups share."""
        spec, num_groups = self.model.kv_cache_specs()[0], len(self.kv_cache_groups)
        shared = SharedSpec(spec.num_kv_heads, spec.key_dim, spec.value_dim, None, num_groups)
        return [shared] * max(len(group.layers) for group in self.kv_cache_groups)

    def blocks_per_sequence(self) -> int:
        """In units of a block for all layers, and the null block."""
        most = sum(group.most_blocks(self.config.max_model_len) for group in self.kv_cache_groups)
        return -(-(most + 1) // len(self.kv_cache_groups))

    def update_batch(self, step: SchedulerOutput) -> np.ndarray:
        rows, note = super().update_batch(step), step.notes[HybridNote]
        for row, item in zip(rows, step.scheduled, strict=True):
            for table, (start, blocks) in zip(self.tables, note[item.seq_id], strict=True):
                table[row, start : start + len(blocks)] = blocks
        return rows

    def gather_arrays(self, step: SchedulerOutput, rows: np.ndarray) -> StepArrays:
        arrays = super().gather_arrays(step, rows)
        self.hide(arrays.block_table, self.kv_cache_groups[0], step)
        return arrays

    def hide(self, table: np.ndarray, group: KVCacheGroup, step: SchedulerOutput) -> None:
        """Put the null block in the place of blocks behind the window; table [num_seqs, ..]."""
        num = [group.num_skipped_blocks(item.num_computed_tokens) for item in step.scheduled]
        if any(num):
            is_behind = np.arange(table.shape[1]) < np.array(num)[:, None]
            table[is_behind] = len(self.kv_caches[0][0]) - 1

    def send_inputs(
        self, step: SchedulerOutput, arrays: StepArrays, shape: GraphShape | None
    ) -> InputBatch:
        """With the metadata of all groups."""
        batch = super().send_inputs(step, arrays, shape)
        groups = [batch.metadata]
        if self.tables:
            slots, tables = self.send_tables(step, arrays, shape)
            for mapping, table in zip(slots, tables, strict=True):
                metadata = replace(batch.metadata, slot_mapping=mapping, block_table=table)
                dtype = self.kv_caches[0][0].dtype
                groups.append(self.backend.plan(metadata, self.block_size, dtype))
        metadata = HybridMetadata(**vars(batch.metadata), groups=tuple(groups))
        return batch._replace(metadata=metadata)

    def send_tables(
        self, step: SchedulerOutput, arrays: StepArrays, shape: GraphShape | None
    ) -> tuple[Tensor, Tensor]:
        """Of the groups behind the first: slots [groups, num_tokens] and block tables [groups,
        num_seqs, max_blocks], on the device."""
        index, offset = np.divmod(arrays.positions, self.block_size)
        blocks = np.stack([table[arrays.token_rows, index] for table in self.tables])
        slots = blocks.astype(np.int64) * self.block_size + offset
        rows = arrays.token_rows[arrays.query_start_loc[:-1]]
        width = arrays.block_table.shape[1]
        tables = np.stack([table[rows, :width] for table in self.tables])
        for table, group in zip(tables, self.kv_cache_groups[1:], strict=True):
            self.hide(table, group, step)
        if shape is None:
            return tuple(self.send(slots=slots, tables=tables).values())
        num_tokens = shape.num_seqs * shape.query_len
        slots = np.pad(slots, ((0, 0), (0, num_tokens - slots.shape[1])), constant_values=-1)
        sent = self.send(slots=slots, tables=tables)
        fixed = self.fixed_slots[:, :num_tokens], self.fixed_tables[:, : shape.num_seqs]
        fixed[0].copy_(sent["slots"])
        fixed[1][:, : len(rows), :width].copy_(sent["tables"])
        return fixed
