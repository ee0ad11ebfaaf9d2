"""What may a request for a vector ask for?

    PoolingParams()                       the model's own way
    PoolingParams(dimensions=256)         the first 256 numbers, then normalised
    PoolingParams(use_activation=False)   not normalised

*Matryoshka.* Some models are trained so that the beginning of a vector is a good vector, too, like
the smaller doll inside the larger one (arXiv 2205.13147). Of any other model the first 256 numbers
are arbitrary, so `dimensions` is refused there, unless config.json says

    {"is_matryoshka": true}                          any number up to hidden_size
    {"matryoshka_dimensions": [128, 256, 512]}       these

vLLM: vllm/pooling_params.py (V0 and V1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional as F

from nanoserve.chapters.pooling.config import PoolerConfig
from nanoserve.config import check_option
from nanoserve.models.config import ModelConfig


@dataclass(frozen=True)
class PoolingParams:
    """How the vector of one request is made. Raises ValueError or TypeError."""

    use_activation: bool | None = None  # normalise the vector; None: as the model's PoolerConfig
    dimensions: int | None = None  # keep this many of its numbers, the first ones; None: all
    skip_reading_prefix_cache: bool | None = None  # compute all of the prompt

    def __post_init__(self) -> None:
        check_option("use_activation", self.use_activation, bool | None)
        check_option("dimensions", self.dimensions, int | None)

    def resolve(self, model: ModelConfig, pooler: PoolerConfig) -> PoolingParams:
        """The model's own way in the place of None. Raises ValueError for dimensions that the model
        was not trained for."""
        use = pooler.use_activation if self.use_activation is None else self.use_activation
        size = self.dimensions or pooler.dimensions
        several = model.get("matryoshka_dimensions")
        if size and not several and not model.get("is_matryoshka", False):
            raise ValueError(
                f"dimensions is {size}; allowed: None: {model.path.name} is not made for Matryoshka "
                'embeddings, says its config.json. If it is, write "is_matryoshka": true there.'
            )
        if size and (size > model.hidden_size or (several and size not in several)):
            raise ValueError(f"dimensions is {size}; allowed: {several or model.hidden_size}.")
        return replace(self, use_activation=use, dimensions=size)

    def apply(self, vector: Tensor) -> Tensor:
        """[hidden] -> [dimensions]: what is asked for, divided by its length (vLLM:
        EmbeddingPoolerHead)."""
        part = vector[: self.dimensions].clone()  # not a view: that would keep the whole step's
        return F.normalize(part, dim=-1) if self.use_activation else part
