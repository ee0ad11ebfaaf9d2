"""What came after these words, here and in earlier answers?

SuffixDecodingProposer drafts without a model. It finds the last tokens of a request at earlier
places, in the request's own prompt and output and in the outputs of other requests, and drafts what
followed there most often. The more it finds, the more it drafts: nothing, or a dozen tokens.

    own text   a b c d x a b c d y a b c e b c         drafts follow the last tokens: ... b c

    context    followed by          draft, probabilities         score (expected accepted tokens)
    c          d d e                d, 2/3                       0.67
    b c        d d e                d y, 2/3, then 2/3 * 1/2     1.00   <- the best
    e b c      nothing              -                            0

A context of m tokens may be followed by max_spec_factor * m drafts, and both have at most
max_tree_depth tokens. The paper, and vLLM's package, keep a tree of all suffixes, in which a lookup
takes as long as the context. Here the texts are arrays, and a lookup goes through them, which takes
about a millisecond for KEPT_TOKENS: there is no tree to build, to trim and to explain.

Left out: what a request with a cache_salt or an adapter has said is not told to others, and it
looks into its own text only.

Paper: SuffixDecoding, Oliaro and others, arXiv 2411.04975.
vLLM: vllm/v1/spec_decode/suffix_decoding.py (0.32; the trees are in the package arctic_inference).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from nanoserve.chapters.speculative.parts import SpeculativeNote
from nanoserve.chapters.speculative.proposer import Drafts, Limits, Proposer
from nanoserve.model_runner import PendingOutput
from nanoserve.sequence import ModelOutput

KEPT_TOKENS = 2**18  # of ended requests' outputs at most
MOST_PLACES = 256
END = -1  # behind each text
Draft = tuple[float, list[int]]  # its score, and the tokens


def speculate(text: np.ndarray, last: np.ndarray, limits: list[int], least: float) -> Draft:
    """The best draft behind the tokens `last`, by what followed them in `text`: at most limits[m]
    tokens after a context of m tokens, each with a probability of `least` or more. Of equals that
    of the longest context."""
    best: Draft = (0.0, [])
    length, places = 1, (text[:-2] == last[-1]).nonzero()[0]  # where contexts of this length end
    limit = 0  # the largest of the contexts that end in these places
    while len(places):
        limit, longer = max(limit, limits[length]), places[:0]
        if length < min(len(last), len(limits) - 1):
            longer = places[places >= length]
            longer = longer[text[longer - length] == last[-1 - length]]
        if len(longer) < len(places):
            best = max(follow(text, places, limit, least), best, key=lambda each: each[0])
            limit = 0
        places, length = longer, length + 1
    return best


def follow(text: np.ndarray, places: np.ndarray, limit: int, least: float) -> Draft:
    """The most frequent token behind these places (of equals the latest), then the most frequent
    one behind those where it stands, ... Of many places the latest MOST_PLACES are counted."""
    token_ids: list[int] = []
    probability, score, places = 1.0, 0.0, places[-MOST_PLACES:] + 1
    while len(token_ids) < limit:
        places = places[text[places] != END]
        if len(places) == 1:  # all that stands there
            rest = text[places[0] : places[0] + limit - len(token_ids)]
            rest = rest[: (np.append(rest, END) == END).argmax()].tolist()
            return score + probability * len(rest), token_ids + rest
        found = text[places][::-1].tolist()
        token, count = Counter(found).most_common(1)[0] if found else (END, 0)
        probability *= count / max(1, len(found))
        if probability < least or not found:
            break
        places = places[text[places] == token] + 1
        token_ids.append(token)
        score += probability
    return score, token_ids


class SuffixDecodingProposer(Proposer):
    """Invariant: `running` has the outputs of the sequences that the runner knows and that are not
    private; `ended` those of earlier ones, the latest last, each with END behind it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.running: dict[int, np.ndarray] = {}
        self.ended = self.shared = np.zeros(0, np.int32)
        self.private: set[int] = set()

    def propose(self, pending: PendingOutput, output: ModelOutput, limits: Limits) -> Drafts:
        """Learn what the step has brought; then draft."""
        states, most = self.runner.req_states, self.config.suffix_decoding_max_cached_requests
        self.private |= pending.input_batch.step.notes[SpeculativeNote].private
        self.private &= states.row_of.keys()
        for seq_id in self.running.keys() - states.row_of.keys():
            self.ended = np.append(self.ended, self.running.pop(seq_id))
        too_old = (self.ended == END).nonzero()[0][:-most]
        self.ended = self.ended[max([0, *too_old[-1:] + 1]) :][-KEPT_TOKENS:]
        for seq_id in output.sampled.keys() - self.private:
            row = states.row_of[seq_id]
            text = states.token_ids[row, states.num_prompt_tokens[row] : states.num_tokens[row]]
            self.running[seq_id] = np.append(text, END)
        self.shared = np.concatenate([self.ended, *self.running.values()])
        return super().propose(pending, output, limits)

    def propose_one(self, seq_id: int, token_ids: np.ndarray, most: int) -> list[int]:
        """From the request's own text, or from what all have said: the higher score."""
        config, depth = self.config, self.config.suffix_decoding_max_tree_depth
        factor = config.suffix_decoding_max_spec_factor
        limits = [min(most, int(factor * length), depth - length) for length in range(depth)]
        own, last = np.append(token_ids, END), token_ids[-depth:]
        texts = [own] if seq_id in self.private else [own, self.shared]
        least = config.suffix_decoding_min_token_prob
        drafts = [speculate(text, last, limits, least) for text in texts]
        return max(drafts, key=lambda draft: draft[0])[1]
