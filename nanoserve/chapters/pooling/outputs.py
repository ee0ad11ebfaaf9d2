"""What does a user get from a pooling model?

    encode   PoolingRequestOutput      outputs.data        tensor [dimensions], float32
    embed    EmbeddingRequestOutput    outputs.embedding   list of floats
    score    ScoringRequestOutput      outputs.score       a number from -1 to 1, a cosine

A request that fails has an `error`, and an empty vector or a score of 0.

vLLM: vllm/outputs.py (V0 and V1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F


@dataclass
class PoolingOutput:
    """What the pooler made of one prompt."""

    data: Tensor  # [dimensions] float32, on the CPU; [0] after an error


@dataclass
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]


@dataclass
class ScoringOutput:
    """How near two texts are."""

    score: float


@dataclass
class PoolingRequestOutput:
    """The result of one request. The fields and their order are vLLM's."""

    request_id: str
    outputs: Any  # PoolingOutput, EmbeddingOutput or ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int  # prompt tokens whose KV came from the prefix cache
    finished: bool
    error: str | None = None  # why there is no result


class EmbeddingRequestOutput(PoolingRequestOutput):
    """The result of LLM.embed for one prompt."""

    @staticmethod
    def from_base(base: PoolingRequestOutput) -> EmbeddingRequestOutput:
        """The same with a list in place of the tensor."""
        outputs = EmbeddingOutput(base.outputs.data.tolist())
        return EmbeddingRequestOutput(**{**vars(base), "outputs": outputs})


class ScoringRequestOutput(PoolingRequestOutput):
    """The result of LLM.score for one pair."""

    @staticmethod
    def from_pair(
        one: PoolingRequestOutput, other: PoolingRequestOutput, between: list[int]
    ) -> ScoringRequestOutput:
        """The cosine. `between`: what vLLM writes between the token ids of a pair."""
        error, score = one.error or other.error, 0.0
        if error is None:
            score = float(F.cosine_similarity(one.outputs.data, other.outputs.data, dim=0))
        request_id = f"{one.request_id}_{other.request_id}"
        token_ids = one.prompt_token_ids + between + other.prompt_token_ids
        num_cached = one.num_cached_tokens + other.num_cached_tokens
        outputs = ScoringOutput(score)
        return ScoringRequestOutput(request_id, outputs, token_ids, num_cached, True, error)
