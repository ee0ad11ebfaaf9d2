"""What do pipeline stages change in the engine?

    engine      more steps in flight
    scheduler   a step takes an even share of the decodes; a sequence with a token in flight waits
    runner      builds its stage's share of the model, receives and sends hidden states, and
                samples when a step is read

vLLM: get_pp_indices in vllm/distributed/utils.py, and what __init__.py names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nanoserve import sampler
from nanoserve.chapters.pipeline.state import StageState, connect_stages
from nanoserve.config import EngineConfig
from nanoserve.distributed.parallel import ParallelState
from nanoserve.engine import LLMEngine
from nanoserve.input_batch import InputBatch
from nanoserve.kernels.staging import StagingBuffer
from nanoserve.layers import LayerConfig
from nanoserve.model import CausalLM
from nanoserve.model_runner import ModelRunner, PendingOutput
from nanoserve.models.base import Model
from nanoserve.models.config import ModelConfig
from nanoserve.output_processor import Request
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler, StepPlan
from nanoserve.sequence import (
    ModelOutput,
    RequestError,
    SampledToken,
    SchedulerOutput,
    Sequence,
)


class PipelineNote(NamedTuple):
    """From the scheduler to the runner, with each step: tokens that rank 0 alone has sampled."""

    tokens: dict[int, tuple[int, int]]  # seq_id -> (position, token id)


@dataclass(frozen=True)
class PipelineConfig(EngineConfig):
    pipeline_parallel_size: int = 1
    """Stages among which the layers are divided; each has tensor_parallel_size ranks."""

    @property
    def num_ranks(self) -> int:
        return super().num_ranks * self.pipeline_parallel_size

    @property
    def num_batches(self) -> int:
        """Steps in flight at most: one in each stage, and one more with async_scheduling."""
        return self.pipeline_parallel_size + self.async_scheduling


class PipelineEngine(LLMEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.max_in_flight = self.config.num_batches

    def make_request(
        self, request_id: str, prompt: Any, params: SamplingParams | None = None, **each: Any
    ) -> Request:
        request = super().make_request(request_id, prompt, params, **each)
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
        """Tell the other ranks of the first stage the token, which rank 0 has sampled."""
        note = step.notes.setdefault(PipelineNote, PipelineNote({}))
        if seq.num_uncomputed_tokens == 1:
            self.share -= 1
            note.tokens[seq.seq_id] = (seq.num_tokens - 1, seq.token_ids[-1])
        super().schedule_tokens(seq, num_tokens, step)

    def make_output(self, step: StepPlan) -> SchedulerOutput:
        """A sequence waits for its own token: no step waits for a whole other one."""
        return replace(super().make_output(step), needs_sync=False)


@dataclass(frozen=True)
class StageConfig(LayerConfig):
    """Layers of other stages are built without memory."""

    foreign: tuple[str, ...] = ()  # prefixes

    def at(self, name: str) -> LayerConfig:
        config = super().at(name)
        is_foreign = config.prefix in self.foreign
        return replace(config, device=torch.device("meta")) if is_foreign else config


class StageLayers(nn.ModuleList):
    """All layers under their own numbers; those of other stages are passed over."""

    def __iter__(self) -> Any:
        return (layer for layer in super().__iter__() if not isinstance(layer, nn.Identity))


@dataclass
class PendingStages(PendingOutput):
    """A step that was launched on all stages."""

    logits: Tensor | None = None  # on rank 0: of the last stage, when `receipt` has come
    receipt: Any = None
    # Of its launch: when it is read, its rows may belong to others.
    sampling: tuple[sampler.SamplingBatch, sampler.Choose] | None = None


class PipelineRunner(ModelRunner):
    parallel: StageState

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, parallel: ParallelState, **each: Any
    ) -> None:
        stage = connect_stages(parallel, config.pipeline_parallel_size, config.device)
        super().__init__(config, model_config, stage, **each)
        # A step is sampled after the next ones have begun: its parameters are its own.
        self.req_states.staging = StagingBuffer(0, self.device)

    def build_model(self, max_model_len: int, layer_config: LayerConfig) -> Model:
        """The first stage looks up the token ids, a later one begins with what it has received; the
        last one has the norm and the head."""
        stage, num_layers = self.parallel, self.model_config.num_layers
        shape = self.config.max_num_batched_tokens, self.model_config.hidden_size
        self.received = torch.empty(shape, dtype=self.dtype, device=layer_config.device)
        own = range(*stage.layer_range(num_layers))
        foreign = [f"model.layers.{i}" for i in range(num_layers) if i not in own]
        is_tied = self.model_config.tie_word_embeddings
        has_embedding = stage.is_first or (stage.is_last and is_tied)
        foreign += [] if has_embedding else ["model.embed_tokens"]
        foreign += [] if stage.is_last else ["lm_head"]
        stage_config = StageConfig(**vars(layer_config), foreign=tuple(foreign))
        model = super().build_model(max_model_len, stage_config)
        if not isinstance(model, CausalLM):
            raise ValueError(f"{type(model).__name__} cannot be divided into stages.")
        names, decoder = {name for name, _ in model.shards()}, model.model
        decoder.layers = StageLayers(
            layer if i in own else nn.Identity() for i, layer in enumerate(decoder.layers)
        )
        if not stage.is_first:
            decoder.embed_tokens = decoder.embed_tokens if has_embedding else nn.Identity()
            decoder.embed_tokens.forward = lambda input_ids: self.received[: len(input_ids)].clone()
        if not stage.is_last:
            decoder.norm = nn.Identity()
            decoder.norm.add_and_norm = lambda x, residual: (x + residual, None)
            model.lm_head = nn.Identity()
            model.compute_logits = lambda hidden: hidden.new_zeros(len(hidden), model.vocab_size)
        model.foreign_names = frozenset(names - {name for name, _ in model.shards()})
        return model

    def update_batch(self, step: SchedulerOutput) -> np.ndarray:
        rows = super().update_batch(step)
        for seq_id, (position, token_id) in step.notes[PipelineNote].tokens.items():
            self.req_states.token_ids[self.req_states.row_of[seq_id], position] = token_id
        return rows

    def forward(self, input_batch: InputBatch) -> Tensor:
        """Behind the stage before, and before the stage behind."""
        num_tokens = len(input_batch.arrays.positions)
        if self.parallel.previous is not None:
            self.parallel.previous.start_receive(self.received[:num_tokens]).wait()
        hidden = super().forward(input_batch)
        if self.parallel.next is not None:
            self.parallel.next.send(hidden[:num_tokens].clone())
        return hidden

    def draw(self, input_batch: InputBatch, hidden: Tensor) -> None:
        """Send the logits to rank 0, which reads them later. A step without any (a chunk) is
        answered, too, by one number: else rank 0 would run ahead with all chunks of a prompt."""
        rows = hidden.index_select(0, input_batch.tensors.logits_indices)
        if self.parallel.is_last:
            answer = self.model.compute_logits(rows) if len(rows) else hidden[:1, :1]
            if self.parallel.back is not None:
                self.parallel.back.send(answer.contiguous())

    def sample(self, input_batch: InputBatch, hidden: Tensor) -> PendingOutput:
        pending = PendingStages(**vars(super().sample(input_batch, hidden)))
        if self.parallel.is_rank_0:
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
        pending.receipt.wait()
        if pending.sampling is not None:
            batch, choose = pending.sampling
            pending.sampled = sampler.sample(pending.logits, batch, choose)
        return super().read(pending)

    def collect(
        self, pending: PendingOutput, tokens: list[SampledToken | RequestError], output: ModelOutput
    ) -> None:
        """Penalties count the tokens on the device."""
        super().collect(pending, tokens, output)
        row_of = self.req_states.row_of
        last = {row_of[i]: each[-1] for i, each in output.sampled.items() if i in row_of}
        rows, token_ids = list(last), [token.token_id for token in last.values()]
        self.req_states.last_sampled_token_ids[rows] = torch.tensor(token_ids, dtype=torch.long).to(
            self.device
        )


PARTS = {
    "config_cls": PipelineConfig,
    "engine_cls": PipelineEngine,
    "scheduler_cls": PipelineScheduler,
    "runner_cls": PipelineRunner,
}
