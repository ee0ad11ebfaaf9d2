"""Lab 5: guess, and be exact.

Somebody guesses the next tokens; one step of the model reads all guesses; what is wrong is thrown
away. The text must be the same as without guesses, or have the same distribution. Read the headers
of nanoserve/chapters/speculative/: proposer.py and rejection.py.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from nanoserve.chapters.speculative.proposer import Proposer


def find_ngram(token_ids: np.ndarray, least: int, longest: int) -> int | None:
    """Where the text goes on behind an earlier match of its own last tokens.

    Of the matches with the last n tokens, least <= n <= longest, the longest one wins, and of
    equally long ones the earliest. None if there is none. A match ends before the last token, and
    may overlap the end: [4, 4, 4] with n = 2 matches at the beginning, and goes on at 2.

    find_ngram(np.array([1, 2, 3, 9, 2, 3]), 1, 3) is 3: behind the first "2 3" stands the 9.
    """
    raise NotImplementedError("Task 5.1")


class MyProposer(Proposer):
    def propose_one(self, seq_id: int, token_ids: np.ndarray, most: int) -> Sequence[int]:
        """At most `most` guesses: the tokens behind the match. [] without a match. The limits of
        find_ngram are self.config.prompt_lookup_min and prompt_lookup_max.
        """
        raise NotImplementedError("Task 5.2")


def verify(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """What the sequence gets from a step that sampled a token behind the last known one and behind
    each of the k drafts: k + 1 tokens, up to the first one that is not the draft there. This one
    counts, too; behind it, the model has read a wrong token. All drafts right: one token more.

    verify([5, 6, 7], [5, 6, 9, 1]) is [5, 6, 9].
    """
    raise NotImplementedError("Task 5.3")


def rejection_sample(
    p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, recover: Tensor
) -> Tensor:
    """The draft of each row, or another token in its place, so that every token comes out with the
    probability that p gives it.

    p (the model) and q (what the draft was drawn from) [num_rows, vocab_size]; drafts [num_rows]
    int64; accept and recover [num_rows] float64 in [0, 1): random numbers. -> [num_rows] int64.

    A draft stays if accept < p(draft) / q(draft). In its place comes a token drawn with `recover`
    from max(p - q, 0), made to sum to 1 (your draw of lab 4). If nothing is left there, from p.
    """
    raise NotImplementedError("Task 5.4")
