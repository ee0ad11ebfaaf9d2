"""What does a user get from a pooling model?

    encode   PoolingRequestOutput      outputs.data        tensor [dimensions], float32
    embed    EmbeddingRequestOutput    outputs.embedding   list of floats
    score    ScoringRequestOutput      outputs.score       a number from -1 to 1, a cosine

A request that fails has an `error`, and an empty embedding or a score of 0, as in vLLM.

vLLM: vllm/outputs.py (V0 and V1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RequestFailure:
    """Why one request has no result. The engine goes on. (vLLM: RequestError.)"""

    code: str  # "error" or "abort"
    message: str
    retryable: bool = False


@dataclass
class PoolingOutput:
    """What the pooler made of one prompt."""

    data: Tensor  # [dimensions] float32, on the CPU; [0] after an error


@dataclass
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


@dataclass
class ScoringOutput:
    """How near two texts are."""

    score: float


Output = TypeVar("Output")


@dataclass
class PoolingRequestOutput(Generic[Output]):
    """The result of one request. The fields and their order are vLLM's."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int  # prompt tokens whose KV came from the prefix cache
    finished: bool
    error: RequestFailure | None = None


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The result of LLM.embed for one prompt."""

    @staticmethod
    def from_base(base: PoolingRequestOutput[PoolingOutput]) -> EmbeddingRequestOutput:
        """The same with a list in place of the tensor."""
        given = {**vars(base), "outputs": EmbeddingOutput(base.outputs.data.tolist())}
        return EmbeddingRequestOutput(**given)


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The result of LLM.score for one pair."""
