"""What may a request for a vector ask for?

    PoolingParams()                       the model's own way
    PoolingParams(dimensions=256)         the first 256 numbers, then normalised
    PoolingParams(use_activation=False)   not normalised

*Matryoshka.* Some models are trained so that the beginning of a vector is a good vector, too, like
the smaller doll inside the larger one (arXiv 2205.13147). Of any other model the first 256 numbers
are arbitrary, so `dimensions` is refused there. As in vLLM, config.json has to say it (add it where
it is missing, as vLLM's users do with hf_overrides):

    {"is_matryoshka": true}                          any number up to hidden_size
    {"matryoshka_dimensions": [128, 256, 512]}       these

The fields have vLLM's names and order. In the engine, a request carries its PoolingParams in the
extra_args of a SamplingParams (`as_sampling_params`), as every chapter does that needs more than
the core knows.

vLLM: vllm/pooling_params.py (V0 and V1).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any

from nanoserve.config import EngineConfig, ModelConfig, check_bool
from nanoserve.exceptions import VLLMValidationError, brief, explain_unknown
from nanoserve.inputs import as_python
from nanoserve.sampling_params import RequestOutputKind, SamplingParams

TASKS = ("embed",)
# vLLM's fields that nanoserve does not have: the values that change nothing, and why.
ONLY_VECTORS = "a pooling model makes one vector of a prompt here"
MISSING: dict[str, tuple[tuple[Any, ...], str]] = {
    "task": ((None, *TASKS), f"None or 'embed': {ONLY_VECTORS}"),
    "step_tag_id": ((None,), f"None: {ONLY_VECTORS}"),
    "returned_token_ids": ((None,), f"None: {ONLY_VECTORS}"),
    "requires_token_ids": ((False,), "False"),
    "late_interaction_params": ((None,), f"None: {ONLY_VECTORS}"),
    "extra_kwargs": ((None, {}), "None"),
    "output_kind": ((RequestOutputKind.FINAL_ONLY,), "FINAL_ONLY: there is one output"),
}
REMOVED = {
    "normalize": "use_activation says whether the vector is normalised.",
    "truncate_prompt_tokens": "prompts are never cut. Give the last token ids as the prompt.",
}
KEY = "pooling_params"  # in extra_args


@explain_unknown(REMOVED)
@dataclass
class PoolingParams:
    """How the vector of one request is made. Raises VLLMValidationError, a ValueError, for a value
    out of range and TypeError for a wrong type."""

    use_activation: bool | None = None  # normalise the vector; None: as the model's PoolerConfig
    dimensions: int | None = None  # keep this many of its numbers, the first ones; None: all
    step_tag_id: int | None = None  # see MISSING
    returned_token_ids: list[int] | None = None  # see MISSING
    task: str | None = None  # "embed"; None: the only one there is
    requires_token_ids: bool = False  # see MISSING
    skip_reading_prefix_cache: bool | None = None  # compute all of the prompt
    late_interaction_params: Any = None  # see MISSING
    extra_kwargs: dict[str, Any] | None = None  # see MISSING
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    def __post_init__(self) -> None:
        for each in fields(self):
            setattr(self, each.name, as_python(getattr(self, each.name)))
        for name, (neutral, advice) in MISSING.items():
            if (value := getattr(self, name)) not in neutral:
                message = f"{name} is {brief(value)}; allowed: {advice}."
                raise VLLMValidationError(message, parameter=name, value=value)
        for name in ("use_activation", "skip_reading_prefix_cache"):
            if (value := getattr(self, name)) is not None:
                check_bool(name, value)
        if isinstance(self.dimensions, bool) or not isinstance(self.dimensions, int | None):
            raise TypeError(f"dimensions must be None or an int, got {brief(self.dimensions)}.")

    def clone(self) -> PoolingParams:
        """A copy, checked again: a field may have been assigned since."""
        params = copy.copy(self)
        params.__post_init__()
        return params

    def verify(self, model: ModelConfig, config: EngineConfig) -> PoolingParams:
        """A clone in which the model's own way stands in the place of None. Raises ValueError for
        dimensions that the model was not trained for."""
        params, pooler = self.clone(), config.pooler_config
        if params.use_activation is None:
            params.use_activation = pooler.use_activation
        if params.dimensions is None:
            params.dimensions = pooler.dimensions
        if params.dimensions is not None:
            check_dimensions(params.dimensions, model)
        return params


def check_dimensions(dimensions: int, model: ModelConfig) -> None:
    """Raise ValueError for dimensions that the model was not trained for."""
    several, what = model.get("matryoshka_dimensions"), f"dimensions is {brief(dimensions)}"
    if not several and not model.get("is_matryoshka", False):
        what += f"; allowed: None, because {model.path.name} is not made for Matryoshka embeddings"
        what += ', says its config.json. If it is, write "is_matryoshka": true there'
    elif not 1 <= dimensions <= model.hidden_size:
        what += f"; allowed: 1 to {model.hidden_size}"
    elif several and dimensions not in several:
        what += f"; allowed for {model.path.name}: {', '.join(map(str, several))}"
    else:
        return
    raise VLLMValidationError(f"{what}.", parameter="dimensions", value=dimensions)


def check_pools(call: str, config: EngineConfig) -> None:
    """Raise ValueError unless the engine was built to make vectors."""
    if config.runner != "pooling":
        raise VLLMValidationError(
            f"{call} is for pooling models, and this engine writes text. Build it with "
            "runner='pooling' (on the command line --runner pooling)."
        )


def as_sampling_params(params: PoolingParams) -> SamplingParams:
    """What carries `params` through the engine."""
    return SamplingParams(
        temperature=0,
        max_tokens=None,
        detokenize=False,
        output_kind=params.output_kind,
        skip_reading_prefix_cache=params.skip_reading_prefix_cache,
        extra_args={KEY: params},
    )


def get_pooling_params(params: SamplingParams) -> PoolingParams:
    """What `params` carry. (The engine's own probe carries nothing.)"""
    return (params.extra_args or {}).get(KEY) or PoolingParams(use_activation=False)
