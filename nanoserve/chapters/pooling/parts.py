"""What does an engine for vectors change?

    llm          embed, encode, score
    config       what would give wrong vectors is switched off
    request      a vector in the place of text
    scheduler    a sequence ends with its vector
    runner       loads a model without a head, and pools hidden states where others sample

A sequence that waits for its vector is scheduled as one that waits for its first token: the step
with the last token of its prompt brings it. So chunks, preemption, priorities, aborts and
overlapped steps need nothing new. Of a step with the last 2 tokens of a prompt, and 3 of 5 tokens
of another one:

    hidden        [ h3 h4 | h0 h1 h2 ]      [num_tokens, hidden]
    LAST            h4                      the last token, which sees all others
    MEAN            (sum + h3 + h4) / 5     `sum` is what the chunk before has left: h0 + h1 + h2
    CLS             h0, of a prompt that is whole in the step

vLLM: vllm/model_executor/layers/pooler/seqwise/, _pool in vllm/v1/worker/gpu_model_runner.py,
vllm/entrypoints/pooling/offline.py (V1); vllm/worker/pooling_model_runner.py (V0).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nanoserve.chapters.pooling.config import PoolerConfig, read_max_seq_length
from nanoserve.chapters.pooling.models import is_encoder, load_pooling_model, most_positions
from nanoserve.chapters.pooling.outputs import (
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestFailure,
    ScoringOutput,
    ScoringRequestOutput,
)
from nanoserve.chapters.pooling.params import PoolingParams
from nanoserve.config import EngineConfig
from nanoserve.engine import LLMEngine
from nanoserve.input_batch import InputBatch
from nanoserve.input_processor import InputProcessor
from nanoserve.kernels.staging import copy_to_host
from nanoserve.llm import LLM
from nanoserve.model_runner import ModelRunner, PendingOutput
from nanoserve.models.base import Model
from nanoserve.models.config import ModelConfig
from nanoserve.output_processor import Request
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import (
    ModelOutput,
    RequestError,
    ScheduledSequence,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
)


class VectorsNote(NamedTuple):
    """From the runner to the scheduler, with each output."""

    vectors: dict[int, Tensor]  # seq_id -> [size]


MOST_SEQS = 256  # the default of max_num_seqs


@dataclass(frozen=True)
class PoolingConfig(EngineConfig):
    runner: Literal["generate", "pooling"] = "generate"
    """pooling: the model makes vectors (LLM.embed)."""
    pooler_config: Any = None
    """How: a dict such as {"seq_pooling_type": "MEAN"}; None: as the checkpoint says."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "pooler_config", PoolerConfig.read(self.pooler_config))

    def resolve(self, model: ModelConfig) -> EngineConfig:
        """pooler_config says what the checkpoint says, and what would give wrong vectors is off."""
        is_bidirectional = is_encoder(model)
        pooler = self.pooler_config.resolve(model.path, "CLS" if is_bidirectional else "LAST")
        kind = pooler.seq_pooling_type
        if kind == "CLS" and not is_bidirectional:
            raise ValueError(
                f"seq_pooling_type is CLS, and {model.path.name} ({model.architecture}) is a "
                "decoder: its first token sees no other one. Use LAST or MEAN."
            )
        length = min(read_max_seq_length(model.path) or model.max_model_len, model.max_model_len)
        changes: dict[str, Any] = {"pooler_config": pooler, "enforce_eager": True}
        if is_bidirectional:
            length = min(length, most_positions(model))
            # Blocks count tokens only: enough of them for all sequences that may run.
            blocks = -(-length // self.block_size) * (self.max_num_seqs or MOST_SEQS)
            changes |= {"enable_chunked_prefill": False, "num_gpu_blocks_override": blocks}
        if is_bidirectional or kind != "LAST":
            # Sums of hidden states are in no block that could be shared, kept or swapped out.
            changes |= {"enable_prefix_caching": False, "preemption_mode": "recompute"}
        changes["max_model_len"] = self.max_model_len or length
        return super(PoolingConfig, replace(self, **changes)).resolve(model)


@dataclass(eq=False)
class PoolingSequence(Sequence):
    pooling_params: PoolingParams = field(default_factory=PoolingParams)
    vector: Tensor | None = None  # when it has come


class PoolingInputProcessor(InputProcessor):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.capacity += 1  # the "token" behind the prompt is a vector


class PoolingRequest(Request):
    def build_output(self, changed: list[int]) -> list[Any]:
        seq, error = self.root, None
        data = torch.empty(0) if seq.vector is None else seq.pooling_params.apply(seq.vector)
        if seq.vector is None:
            error = RequestFailure(str(seq.status.finish_reason), str(seq.stop_reason))
        return [
            PoolingRequestOutput(
                request_id=self.request_id,
                outputs=PoolingOutput(data),
                prompt_token_ids=seq.prompt_token_ids,
                num_cached_tokens=seq.num_cached_tokens,
                finished=True,
                error=error,
            )
        ]


class PoolingEngine(LLMEngine):
    def make_request(
        self, request_id: str, prompt: Any, params: Any = None, **each: Any
    ) -> Request:
        """params: PoolingParams."""
        params = PoolingParams() if params is None else params
        if not isinstance(params, PoolingParams):
            raise TypeError(f"this model makes vectors: give PoolingParams, not {params!r}.")
        carrier = SamplingParams(
            temperature=0,
            max_tokens=1,  # the vector, while it is in flight
            detokenize=False,
            skip_reading_prefix_cache=params.skip_reading_prefix_cache,
        )
        request = super().make_request(request_id, prompt, carrier, **each)
        pooler = self.config.pooler_config
        request.root.pooling_params = params.resolve(self.model_config, pooler)
        return request


class PoolingScheduler(Scheduler):
    def update_sequence(
        self, seq: Sequence, item: ScheduledSequence, model_output: ModelOutput
    ) -> list[SequenceUpdate]:
        """The vector ends the sequence."""
        if (vector := model_output.notes[VectorsNote].vectors.get(seq.seq_id)) is None:
            return []
        seq.num_output_placeholders -= 1
        seq.vector, seq.status = vector, SequenceStatus.FINISHED_STOPPED
        return [SequenceUpdate(seq)]


@dataclass
class PendingVectors(PendingOutput):
    vectors: Tensor | None = None  # [len(samples), hidden], on their way to the CPU


class PoolingRunner(ModelRunner):
    sums: Tensor | None = None  # by row, [hidden]: of a prompt in chunks, the sum so far

    def load_model(self) -> Model:
        """Without a head."""
        return load_pooling_model(self.config, self.model_config, self.layer_config)

    def sample(self, input_batch: InputBatch, hidden: Tensor) -> PendingOutput:
        """A vector for each sequence whose last token was in the step."""
        vectors = copy_to_host(self.pool(input_batch, hidden).float())
        return PendingVectors(**vars(super().sample(input_batch, hidden)), vectors=vectors)

    def draw(self, input_batch: InputBatch, hidden: Tensor) -> None:
        """No token."""

    def pool(self, input_batch: InputBatch, hidden: Tensor) -> Tensor:
        """Hidden states [num_tokens, hidden] -> [number of prompts that end, hidden]."""
        step, kind = input_batch.tensors, self.config.pooler_config.seq_pooling_type
        if kind == "LAST":
            return hidden.index_select(0, step.logits_indices)
        if kind == "CLS":  # all prompts are whole
            return hidden.index_select(0, step.query_start_loc[:-1])
        if self.sums is None:
            sizes = len(self.req_states.num_tokens), hidden.shape[1]
            self.sums = hidden.new_zeros(sizes, dtype=torch.float32)
        first = input_batch.arrays.token_rows[input_batch.arrays.positions == 0]
        self.sums.index_fill_(0, self.staging.send(first=first)["first"], 0.0)
        self.sums.index_add_(0, step.token_rows, hidden.float())
        lengths = step.positions.index_select(0, step.logits_indices) + 1
        return self.sums.index_select(0, step.sampled_rows) / lengths[:, None]

    def read(self, pending: PendingOutput) -> ModelOutput:
        output = super().read(pending)
        vectors: dict[int, Tensor] = {}
        output.notes[VectorsNote] = VectorsNote(vectors)
        for (seq_id, _), vector in zip(pending.samples, pending.vectors, strict=True):
            if vector.isfinite().all():
                vectors[seq_id] = vector.clone()
            else:
                output.errors[seq_id] = RequestError("the model's hidden states are not finite")
        return output


class PoolingLLM(LLM):
    def encode(
        self, prompts: Any, pooling_params: Any = None, *, use_tqdm: bool = True, **each: Any
    ) -> list[PoolingRequestOutput]:
        """A vector of every prompt, as a tensor: outputs.data."""
        return self.generate(prompts, pooling_params, use_tqdm=use_tqdm, **each)

    def embed(self, prompts: Any, **each: Any) -> list[EmbeddingRequestOutput]:
        """A vector of every prompt, as a list: outputs.embedding. `each`: those of encode."""
        return [EmbeddingRequestOutput.from_base(one) for one in self.encode(prompts, **each)]

    def score(self, texts_1: Any, texts_2: Any, **each: Any) -> list[ScoringRequestOutput]:
        """The cosine of each pair; of the first of one text with each of the others."""
        lists = [[text] if isinstance(text, str) else list(text) for text in (texts_1, texts_2)]
        if not lists[1] or len(lists[0]) not in (1, len(lists[1])):
            raise ValueError(f"{len(lists[0])} and {len(lists[1])} texts make no pairs.")
        found = self.encode(lists[0] + lists[1], **each)
        ones, others = found[: len(lists[0])], found[len(lists[0]) :]
        ones = ones * (len(others) // len(ones))
        pad = getattr(self.engine.tokenizer, "pad_token_id", None)
        between = [] if pad is None else [pad]  # as vLLM writes it
        return [make_score(*pair, between) for pair in zip(ones, others, strict=True)]


def make_score(
    one: PoolingRequestOutput, other: PoolingRequestOutput, between: list[int]
) -> ScoringRequestOutput:
    error, value = one.error or other.error, 0.0
    if error is None:
        value = float(F.cosine_similarity(one.outputs.data, other.outputs.data, dim=0))
    return ScoringRequestOutput(
        request_id=f"{one.request_id}_{other.request_id}",
        outputs=ScoringOutput(value),
        prompt_token_ids=one.prompt_token_ids + between + other.prompt_token_ids,
        num_cached_tokens=one.num_cached_tokens + other.num_cached_tokens,
        finished=True,
        error=error,
    )


PARTS = {
    "llm_cls": PoolingLLM,
    "config_cls": PoolingConfig,
    "sequence_cls": PoolingSequence,
    "request_cls": PoolingRequest,
    "input_processor_cls": PoolingInputProcessor,
    "engine_cls": PoolingEngine,
    "scheduler_cls": PoolingScheduler,
    "runner_cls": PoolingRunner,
}
