"""Lab 4: how do logits become a token?

logits [num_rows, vocab_size]: a row for each sequence, and each row has parameters of its own.
Write functions of whole batches, without a loop over rows. Read nanoserve/sampler.py: the header,
and class SamplingBatch.
"""

from typing import Any

import numpy as np
from torch import Tensor

from nanoserve.model_runner import ModelRunner
from nanoserve.sampler import ChosenTokens, SamplingBatch


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """-inf for each token whose probability is less than min_p [num_rows] times that of the
    likeliest token of its row. The other logits stay.
    """
    raise NotImplementedError("Task 4.1")


def apply_top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """-inf for every token but the top_k [num_rows] likeliest, and of those the fewest whose
    probabilities (made to sum to 1 among those) reach top_p [num_rows].

    The token that crosses top_p stays, so at least one token stays. top_k = vocab_size and top_p =
    1 are off. Tokens of equal logits: any choice is fine.
    """
    raise NotImplementedError("Task 4.2")


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """One token for each row: the first one whose cumulative probability exceeds the row's random
    number. probs [num_rows, vocab_size], uniform [num_rows] float64 in [0, 1) -> [num_rows] int64.

    Sum in float64. A token of probability 0 is never drawn.
    """
    raise NotImplementedError("Task 4.3")


def noise(seed: int, branch: int, position: int) -> float:
    """A random number in [0, 1) for the token at this position: always the same one for the same
    three numbers, and for others it looks unrelated. No generator and no state: what else runs in
    the batch must not matter. Hint: mix the three integers (masked to 64 bits), then scale.
    """
    raise NotImplementedError("Task 4.4")


def choose(logits: Tensor, batch: SamplingBatch) -> ChosenTokens:
    """A token for each row, from your functions above.

    In this order: temperature, min_p, top_k and top_p, softmax, draw. batch.temperature [num_rows]
    may be 0: that row takes its likeliest token, and mind the division. A parameter of the batch
    (temperature, min_p, top_k, top_p, uniform) is None if no row uses it; if batch.is_greedy,
    every row takes its likeliest token. The second field of the result, is_possible [num_rows], is
    False where no logit of the row is finite, or one is NaN.
    """
    raise NotImplementedError("Task 4.5")


class MyRunner(ModelRunner):  # this one is written: the engine samples with your functions
    def load_model(self) -> Any:
        model = super().load_model()
        self.choose = choose
        return model


def noise_of(seeds: Any, branches: Any, positions: Any) -> np.ndarray:  # this one, too
    """Your noise for many tokens at once."""
    rows = zip(seeds, branches, positions, strict=True)
    return np.array([noise(int(seed), int(branch), int(place)) for seed, branch, place in rows])
