"""What do pipeline stages change in the engine?

    engine      more steps in flight
    scheduler   a step takes an even share of the decodes; a sequence with a token in flight waits
    runner      builds its stage's share of the model, receives and sends hidden states, and
                samples when a step is read

The sampling parameters of a step are gathered at its launch. When it is read, its sequences may
have been aborted or preempted, and their rows may belong to others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoserve import sampler
from nanoserve.chapters.pipeline.model import build_stage
from nanoserve.chapters.pipeline.state import Inbox, StageState, connect_stages
from nanoserve.config import EngineConfig
from nanoserve.engine import LLMEngine
from nanoserve.input_batch import InputBatch
from nanoserve.layers import LayerConfig
from nanoserve.model import CausalLM
from nanoserve.model_runner import ModelRunner, PendingOutput
from nanoserve.models.base import Model
from nanoserve.models.config import ModelConfig
from nanoserve.models.registry import ModelRegistry
from nanoserve.output_processor import Request
from nanoserve.scheduler import Scheduler, StepPlan
from nanoserve.sequence import ModelOutput, SchedulerOutput, Sequence


class PipelineNote(NamedTuple):
    """From the scheduler to the runner, with each step: tokens that rank 0 alone has sampled."""

    tokens: dict[int, tuple[int, int]]  # seq_id -> (position, token id)


@dataclass(frozen=True)
class PipelineConfig(EngineConfig):
    # Stages among which the layers are divided; each has tensor_parallel_size ranks.
    pipeline_parallel_size: int = 1

    @property
    def num_ranks(self) -> int:
        return super().num_ranks * self.pipeline_parallel_size

    @property
    def num_batches(self) -> int:
        """Steps in flight at most: one in each stage, and one more with async_scheduling."""
        return self.pipeline_parallel_size + bool(self.async_scheduling)

    def resolve(self, model: ModelConfig) -> EngineConfig:
        cls, size = ModelRegistry.get(model.architecture), self.pipeline_parallel_size
        is_own = cls is not None and issubclass(cls, CausalLM) and self.model_impl != "transformers"
        if not is_own or model.num_layers < size:
            what = f"{model.architecture} ({model.num_layers} layers) cannot be divided into {size}"
            raise ValueError(f"{what} stages. Models of nanoserve's own with more layers can.")
        return super().resolve(model)


class PipelineEngine(LLMEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.max_in_flight = self.config.num_batches

    def make_request(self, *args: Any, **each: Any) -> Request:
        request = super().make_request(*args, **each)
        if request.root.sampling_params.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs needs the whole model on one stage.")
        return request


class PipelineScheduler(Scheduler):
    share = 0  # decodes that the step may still take

    def schedule(self) -> SchedulerOutput:
        """Of the decodes, in flight or not, a step takes an even share: a step for each stage."""
        num_decodes = sum(seq.num_uncomputed_tokens == 1 for seq in self.running)
        self.share = -(-num_decodes // self.config.num_batches)
        return super().schedule()

    def is_blocked(self, seq: Sequence) -> bool:
        is_over = seq.num_uncomputed_tokens == 1 and self.share <= 0
        return seq.num_output_placeholders > 0 or is_over or super().is_blocked(seq)

    def schedule_tokens(self, seq: Sequence, num_tokens: int, step: StepPlan) -> None:
        """Tell the other ranks the token that rank 0 has sampled."""
        note = step.notes.setdefault(PipelineNote, PipelineNote({}))
        if seq.num_uncomputed_tokens == 1:
            self.share -= 1
            note.tokens[seq.seq_id] = (seq.num_tokens - 1, seq.token_ids[-1])
        super().schedule_tokens(seq, num_tokens, step)

    def make_output(self, step: StepPlan) -> SchedulerOutput:
        """A sequence waits for its own token: no step waits for a whole other one."""
        return replace(super().make_output(step), needs_sync=False)


@dataclass
class PendingStages(PendingOutput):
    """A step that was launched on all stages."""

    logits: Tensor | None = None  # on rank 0: of the last stage, when `receipt` has come
    receipt: Any = None
    # Of its launch: when it is read, its rows may belong to others.
    sampling: tuple[sampler.SamplingBatch, sampler.Choose] | None = None


class PipelineRunner(ModelRunner):
    parallel: StageState

    def __init__(self, config: EngineConfig, model_config: ModelConfig, parallel: Any) -> None:
        """parallel: the place of this process among all ranks."""
        stage = connect_stages(parallel, config.pipeline_parallel_size, config.device)
        super().__init__(config, model_config, stage)
        if parallel.tp_rank > 0:
            self.parallel = replace(self.parallel, inbox=Inbox(parallel))

    def build_model(self, max_model_len: int, layer_config: LayerConfig) -> Model:
        """The stage's share."""
        build: Any = partial(super().build_model, max_model_len)
        max_tokens = self.config.max_num_batched_tokens
        return build_stage(build, self.model_config, layer_config, self.parallel, max_tokens)

    def send(self, **arrays: np.ndarray) -> dict[str, Tensor]:
        """What the sampler reads is read when later steps have been sent: on a GPU it has memory of
        its own. (Pinned, or the CPU would wait for the GPU.)"""
        if self.staging is None or "input_ids" in arrays:
            return super().send(**arrays)
        pinned = {name: torch.from_numpy(each).pin_memory() for name, each in arrays.items()}
        return {name: each.to(self.device, non_blocking=True) for name, each in pinned.items()}

    def update_batch(self, step: SchedulerOutput) -> np.ndarray:
        """Write the tokens, and wait for the hidden states of the stage before."""
        rows = super().update_batch(step)
        for seq_id, (position, token_id) in step.notes[PipelineNote].tokens.items():
            self.req_states.token_ids[self.req_states.row_of[seq_id], position] = token_id
        if self.parallel.previous is not None:
            num_tokens = sum(item.num_scheduled_tokens for item in step.scheduled)
            received = self.model.model.received[:num_tokens]
            self.parallel.previous.start_receive(received).wait()
        return rows

    def draw(self, input_batch: InputBatch, hidden: Tensor) -> None:
        """Send the hidden states to the next stage, or the logits to rank 0, which reads them
        later. A step without any (a chunk) is answered, too, by one number: else rank 0 would run
        ahead with all chunks of a prompt."""
        if self.parallel.next is not None:
            self.parallel.next.send(hidden[: len(input_batch.arrays.positions)].clone())
        if self.parallel.is_last:
            rows = hidden.index_select(0, input_batch.tensors.logits_indices)
            answer = self.model.compute_logits(rows) if len(rows) else hidden[:1, :1]
            if self.parallel.back is not None:
                self.parallel.back.send(answer.contiguous())

    def sample(self, input_batch: InputBatch, hidden: Tensor) -> PendingOutput:
        pending = PendingStages(**vars(super().sample(input_batch, hidden)))
        if self.parallel.world.tp_rank == 0:
            num_samples = len(input_batch.arrays.sampled_rows)
            shape = (num_samples, self.model_config.vocab_size) if num_samples else (1, 1)
            pending.logits = torch.empty(shape, dtype=self.dtype, device=self.device)
            pending.receipt = self.parallel.back.start_receive(pending.logits)
            if num_samples:
                pending.sampling = self.make_sampling_batch(input_batch), self.choose
        self.req_states.append_placeholders(input_batch.arrays.sampled_rows)
        return pending

    @torch.inference_mode()
    def read(self, pending: PendingOutput) -> ModelOutput:
        with self.no_autocast, self.current_gpu:
            pending.receipt.wait()
            if pending.sampling is not None:
                pending.sampled = sampler.sample(pending.logits, *pending.sampling)
        return super().read(pending)
