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
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from nanoserve.chapters.pooling.models import as_decoder, cut_head, load_encoder, most_positions
from nanoserve.chapters.pooling.outputs import (
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from nanoserve.chapters.pooling.params import PoolerConfig, PoolingParams, read_max_seq_length
from nanoserve.config import EngineConfig
from nanoserve.engine import LLMEngine
from nanoserve.input_batch import InputBatch
from nanoserve.input_processor import InputProcessor
from nanoserve.kernels.selector import choose_kernels
from nanoserve.layers import LayerConfig
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

    vectors: dict[int, Tensor]  # seq_id -> [hidden]


@dataclass(frozen=True)
class PoolingConfig(EngineConfig):
    # pooling: the model makes vectors (LLM.embed).
    runner: Literal["generate", "pooling"] = "generate"
    # How: a dict such as {"seq_pooling_type": "MEAN"}; None: as the checkpoint says.
    pooler_config: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "pooler_config", PoolerConfig.read(self.pooler_config or {}))

    def resolve(self, model: ModelConfig) -> EngineConfig:
        """pooler_config says what the checkpoint says, and what would give wrong vectors is off."""
        if is_encoder := as_decoder(model) is None:
            model = replace(model, max_position_embeddings=most_positions(model))
        pooler = self.pooler_config.resolve(model.path, "CLS" if is_encoder else "LAST")
        kind = pooler.seq_pooling_type
        if kind == "CLS" and not is_encoder:
            raise ValueError(f"the first token (CLS) of {model.architecture} sees no other one.")
        length = min(read_max_seq_length(model.path) or model.max_model_len, model.max_model_len)
        changes: dict[str, Any] = {"pooler_config": pooler, "enforce_eager": True}
        if is_encoder:
            # Blocks count tokens only: enough of them for all sequences that may run.
            blocks = -(-length // self.block_size) * (self.max_num_seqs or 256)
            changes |= {"enable_chunked_prefill": False, "num_gpu_blocks_override": blocks}
        if is_encoder or kind != "LAST":
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
        if not super().build_output(changed):
            return []
        seq, data, error = self.root, torch.empty(0), str(self.root.stop_reason)
        if seq.vector is not None:
            data, error = seq.pooling_params.apply(seq.vector), None
        about = (seq.prompt_token_ids, seq.num_cached_tokens, True, error)
        return [PoolingRequestOutput(self.request_id, PoolingOutput(data), *about)]


class PoolingEngine(LLMEngine):
    def make_request(
        self, request_id: str, prompt: Any, params: Any = None, **each: Any
    ) -> Request:
        """params: PoolingParams."""
        params = PoolingParams() if params is None else params
        if not isinstance(params, PoolingParams):
            raise TypeError(f"this model makes vectors: give PoolingParams, not {params!r}.")
        params = params.resolve(self.model_config, self.config.pooler_config)
        skip = params.skip_reading_prefix_cache
        one = SamplingParams(max_tokens=1, detokenize=False, skip_reading_prefix_cache=skip)
        request = super().make_request(request_id, prompt, one, **each)  # one vector
        request.root.pooling_params = params
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


class Vectors(NamedTuple):
    """What a step brings, in the place of SampledTokens."""

    vectors: Tensor  # [number of prompts that end, hidden] float32

    def to_host(self) -> list[Tensor]:
        return list(self.vectors)


class PoolingRunner(ModelRunner):
    sums: Tensor | None = None  # by row, [hidden]: of a prompt in chunks, the sum so far

    def __init__(self, config: EngineConfig, model_config: ModelConfig, *args: Any) -> None:
        decoder = as_decoder(model_config)
        self.is_encoder = decoder is None
        super().__init__(config, decoder or model_config, *args)

    def build_model(self, max_model_len: int, layer_config: LayerConfig) -> Model:
        return cut_head(super().build_model(max_model_len, layer_config), self.model_config.path)

    def load_model(self) -> Model:
        if not self.is_encoder:
            return super().load_model()
        model = load_encoder(self.config, self.model_config, self.layer_config)
        self.backend, self.choose = choose_kernels(model, self.config, self.device, self.dtype)
        return model

    def draw(self, input_batch: InputBatch, hidden: Tensor) -> Any:
        """A vector, and no token, for each sequence whose last token was in the step."""
        return Vectors(self.pool(input_batch, hidden).float())

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
        self.sums.index_fill_(0, self.send(first=first)["first"], 0.0)
        self.sums.index_add_(0, step.token_rows, hidden.float())
        lengths = step.positions.index_select(0, step.logits_indices) + 1
        return self.sums.index_select(0, step.sampled_rows) / lengths[:, None]

    def collect(self, pending: PendingOutput, tokens: list[Any], output: ModelOutput) -> None:
        """Give the vectors to their sequences."""
        note = output.notes[VectorsNote] = VectorsNote({})
        for (seq_id, _), vector in zip(pending.samples, tokens, strict=True):
            if vector.isfinite().all():
                note.vectors[seq_id] = vector
            else:
                output.errors[seq_id] = RequestError("the model's hidden states are not finite")


class PoolingLLM(LLM):
    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError("runner='pooling' makes vectors: use embed, encode or score.")

    def encode(
        self, prompts: Any, pooling_params: Any = None, *, pooling_task: str = "embed", **each: Any
    ) -> list[PoolingRequestOutput]:
        """A vector of every prompt, as a tensor: outputs.data. `each`: as in generate."""
        if pooling_task != "embed":
            raise ValueError(f"pooling_task is {pooling_task!r}; allowed: 'embed'.")
        outputs: Any = super().generate(prompts, pooling_params, **each)
        return outputs

    def embed(self, prompts: Any, **each: Any) -> list[EmbeddingRequestOutput]:
        """A vector of every prompt, as a list: outputs.embedding. `each`: as in encode."""
        return [EmbeddingRequestOutput.from_base(one) for one in self.encode(prompts, **each)]

    def score(self, data_1: Any, data_2: Any, **each: Any) -> list[ScoringRequestOutput]:
        """The cosine of each pair; of the first of one text with each of the others."""
        lists = [[text] if isinstance(text, str) else list(text) for text in (data_1, data_2)]
        if not lists[1] or len(lists[0]) not in (1, len(lists[1])):
            raise ValueError(f"{len(lists[0])} and {len(lists[1])} texts make no pairs.")
        found = self.encode(lists[0] + lists[1], **each)
        ones, others = found[: len(lists[0])], found[len(lists[0]) :]
        ones = ones * (len(others) // len(ones))
        pad = getattr(self.llm_engine.tokenizer, "pad_token_id", None)
        between = [] if pad is None else [pad]  # as vLLM writes it
        pairs = zip(ones, others, strict=True)
        return [ScoringRequestOutput.from_pair(*pair, between) for pair in pairs]
