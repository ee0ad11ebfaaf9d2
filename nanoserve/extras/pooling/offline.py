"""How does a user ask for vectors, in Python?

    llm = LLM("Qwen/Qwen3-Embedding-0.6B", runner="pooling")
    [output] = llm.embed("How do I sleep well?")
    output.outputs.embedding                              [0.31, -0.02, ...]
    llm.score("How do I sleep well?", ["Tips for a good night", "Cats"])     0.83, 0.12

Scores are cosines: each text has a vector of its own (a *bi-encoder*), so that the vectors of a
collection can be kept. A cross-encoder reads both texts at once; there is none here.

vLLM: vllm/entrypoints/pooling/offline.py, scoring/io_processor.py (V1); vllm/entrypoints/llm.py,
score_utils.py (V0).
"""

from __future__ import annotations

from typing import Any

from torch.nn import functional as F

from nanoserve.config import EngineConfig
from nanoserve.exceptions import VLLMValidationError, brief
from nanoserve.extras.pooling.outputs import (
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from nanoserve.extras.pooling.params import TASKS, PoolingParams, check_pools

__all__ = [  # what LLM and the server take from this chapter
    "PoolingParams",
    "check_encode",
    "check_pairs",
    "check_pools",
    "make_embeddings",
    "make_scores",
    "separator_of",
]


def check_encode(config: EngineConfig, pooling_params: Any, task: Any) -> Any:
    """The PoolingParams of LLM.encode: those given, or the default. Raises ValueError for another
    task than "embed", and for an engine that makes no vectors."""
    check_pools("LLM.encode", config)
    if task not in (None, *TASKS):
        raise VLLMValidationError(
            f"pooling_task is {brief(task)}; allowed: 'embed', a vector of each prompt. Classes, "
            "scores of a cross-encoder and a vector of each token are not here.",
            parameter="pooling_task",
            value=task,
        )
    return PoolingParams() if pooling_params is None else pooling_params


def make_embeddings(outputs: list[PoolingRequestOutput]) -> list[EmbeddingRequestOutput]:
    """With a list of floats in the place of each tensor."""
    return [EmbeddingRequestOutput.from_base(output) for output in outputs]


def check_pairs(number_1: int, number_2: int) -> None:
    """Raise ValueError for lists of texts that make no pairs."""
    if not number_2 or number_1 not in (1, number_2):
        raise VLLMValidationError(
            f"{number_1} and {number_2} texts make no pairs; allowed: one text and any number of "
            "others, or two lists of the same length."
        )


def separator_of(engine: Any) -> list[int]:
    """What vLLM writes between the token ids of a pair: the padding token, if there is one."""
    token_id = getattr(engine.tokenizer, "pad_token_id", None)
    return [] if token_id is None else [token_id]


def make_scores(
    outputs_1: list[PoolingRequestOutput], outputs_2: list[PoolingRequestOutput], between: list[int]
) -> list[ScoringRequestOutput]:
    """The cosine of each pair; of the first of one text with each of the others."""
    if len(outputs_1) == 1:
        outputs_1 = outputs_1 * len(outputs_2)
    scores = []
    for one, other in zip(outputs_1, outputs_2, strict=True):
        error, value = one.error or other.error, 0.0
        if error is None:
            value = float(F.cosine_similarity(one.outputs.data, other.outputs.data, dim=0))
        scores.append(
            ScoringRequestOutput(
                request_id=f"{one.request_id}_{other.request_id}",
                outputs=ScoringOutput(value),
                prompt_token_ids=one.prompt_token_ids + between + other.prompt_token_ids,
                num_cached_tokens=one.num_cached_tokens + other.num_cached_tokens,
                finished=True,
                error=error,
            )
        )
    return scores
