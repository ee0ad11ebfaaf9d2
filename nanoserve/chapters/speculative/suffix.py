"""What came after these words, here and in earlier answers?

SuffixDecodingProposer drafts without a model. It finds the last tokens of a request at earlier
places, in the request's own prompt and output and in the outputs of other requests, and drafts what
followed there most often. The more it finds, the more it drafts: nothing, or a dozen tokens.

    own text   a b c d x a b c d y a b c e b c         drafts follow the last tokens: ... b c

    context    followed by          draft, probabilities         score (expected accepted tokens)
    c          d d e                d, 2/3                       0.67
    b c        d d e                d y, 2/3, then 2/3 * 1/2     1.00   <- the best
    e b c      nothing              -                            0

A context of m tokens brings at most m * suffix_decoding_max_spec_factor drafts, and context and
drafts together are at most suffix_decoding_max_tree_depth tokens. A draft ends where its
probability, the product of the shares, falls below suffix_decoding_min_token_prob. Of all contexts
the one with the highest score is taken, of equals the longest; of equally frequent tokens the one
that came last.

*The suffix tree.* A tree of all substrings of up to 24 tokens has up to 24 nodes for each token. A
suffix automaton (Blumer and others, 1985) counts the same substrings in at most 2 states for each
token: strings that end at the same places share a state. The links from a state to its longest
suffix that ends elsewhere too are the suffix tree of the reversed text. So the contexts of a
request, from the longest to the shortest, are one walk along links. A new token costs amortised
O(1) for its states, and O(depth) for the counts. (Measured on one core with 32,768 tokens: 0.1 to
0.35 s for all of them, when the first draft is wanted; then 10 to 30 microseconds for a token and
its draft. 25 to 320 bytes for a token, more for texts of few different tokens.)

*Memory.* An automaton cannot forget a text, so earlier outputs are kept in two generations, each of
half of suffix_decoding_max_cached_requests requests. When the newer one is full it becomes the
older one, and the older one is dropped. (With 1, there is one generation of one request.)

*Privacy.* Drafts change no token, but a request that finds its text in another one's output ends
sooner, and this can be timed. (With the RejectionSampler they do change drawn tokens, if not their
distribution.) So requests find only outputs with their own cache_salt (and adapter, which speaks
differently).

Left out: drafts as trees; probabilities for the RejectionSampler (a draft counts as certain).

Paper: SuffixDecoding, Oliaro and others, arXiv 2411.04975.
vLLM: vllm/v1/spec_decode/suffix_decoding.py (V1; the trees are in the package arctic_inference).
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from nanoserve.chapters.speculative.proposer import Proposer
from nanoserve.sequence import ModelOutput, SchedulerOutput

if TYPE_CHECKING:
    from nanoserve.chapters.speculative.config import SpeculativeConfig
    from nanoserve.input_batch import InputBatch
from nanoserve.model_runner import ModelRunner

ROOT = 0  # the state of the empty string
NONE = -1  # no state, no token


class Draft(NamedTuple):
    """Tokens that may come next, and how many of them are expected to be accepted."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0


@dataclass
class Text:
    """Where in an automaton a text ends that still grows."""

    state: int = ROOT  # of the whole text
    context: int = ROOT  # of its last max_depth tokens
    num_tokens: int = 0


class SuffixAutomaton:
    """How often each substring of up to `max_depth` tokens occurs in some texts, and what follows.

    Invariants. The strings of a state are suffixes of its longest one, and each is one token longer
    than the next; they end at the same places of the texts. `next_token` is the most frequent token
    after them, of equals the latest one.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        # By state. Arrays, because millions of small objects would keep the garbage collector busy.
        self.length = array("i", [0])  # of its longest string
        self.link = array("i", [NONE])  # the state of the longest suffix that ends elsewhere too
        self.count = array("i", [0])  # how often its strings occur
        self.num_followed = array("i", [0])  # how often a token follows
        self.next_token = array("i", [NONE])
        self.next_state = array("i", [NONE])  # of the strings with next_token behind them
        self.others: dict[int, dict[int, int]] = {}  # state -> its other next tokens -> states

    def follow(self, state: int, token: int) -> int:
        """The state of the strings of `state` with `token` behind them, or NONE."""
        if self.next_token[state] == token:
            return self.next_state[state]
        return self.others[state].get(token, NONE) if state in self.others else NONE

    def append(self, text: Text, token: int) -> None:
        """Let `text` grow by a token."""
        text.state = self._extend(text.state, token)
        before = self.find(text)
        text.context = self._shorten(self.follow(before, token), self.max_depth)
        text.num_tokens = min(text.num_tokens + 1, self.max_depth)
        link, count = self.link, self.count
        state = text.context
        while state != NONE:
            count[state] += 1
            state = link[state]
        while before != NONE:
            self.num_followed[before] += 1
            if self.next_token[before] != token:
                self._compare(before, token)
            before = link[before]

    def find(self, text: Text) -> int:
        """The state of the last max_depth tokens of `text`. (Other texts may have split it.)"""
        return self._shorten(text.context, text.num_tokens)

    def match(self, token_ids: Iterable[int]) -> tuple[int, int]:
        """The longest suffix of `token_ids` that occurs: its state and its number of tokens."""
        state = num_matched = 0
        for token in token_ids:
            while (found := self.follow(state, token)) == NONE and state != ROOT:
                state = self.link[state]
                num_matched = self.length[state]
            if found != NONE:
                state, num_matched = found, num_matched + 1
        return state, num_matched

    def speculate(
        self, state: int, num_matched: int, limits: Sequence[int], min_token_prob: float
    ) -> Draft:
        """The best draft after the longest string of `num_matched` tokens of `state`, or after one
        of its suffixes. limits[m]: at most so many tokens after a context of m tokens."""
        best = Draft()
        while state > ROOT:
            shorter = self.link[state]
            # The contexts of one state have the same drafts, but for the limit.
            limit = max(limits[self.length[shorter] + 1 : num_matched + 1])
            if limit > best.score:
                draft = self._walk(state, limit, min_token_prob)
                best = max(best, draft, key=lambda draft: draft.score)
            state, num_matched = shorter, self.length[shorter]
        return best

    def _walk(self, state: int, limit: int, min_token_prob: float) -> Draft:
        """The likeliest token, and then the likeliest after it, ..."""
        token_ids: list[int] = []
        prob, score = 1.0, 0.0
        while len(token_ids) < limit and (token := self.next_token[state]) != NONE:
            target = self.next_state[state]
            prob *= self.count[target] / self.num_followed[state]
            if prob < min_token_prob:
                break
            token_ids.append(token)
            score += prob
            state = target
        return Draft(tuple(token_ids), score)

    # -- how it grows --

    def _extend(self, last: int, token: int) -> int:
        """The state of the text that was at `last`, with `token` behind it."""
        found = self.follow(last, token)
        if found != NONE:  # another text has it already
            return self._state_of_suffix(last, token, found)
        new = self._add_state(self.length[last] + 1)
        state = last
        while state != NONE and (found := self.follow(state, token)) == NONE:
            if self.next_token[state] == NONE:
                self.next_token[state], self.next_state[state] = token, new
            else:
                self.others.setdefault(state, {})[token] = new
            state = self.link[state]
        self.link[new] = ROOT if state == NONE else self._state_of_suffix(state, token, found)
        return new

    def _state_of_suffix(self, state: int, token: int, found: int) -> int:
        """The state whose longest string is that of `state` with `token` behind it. `found` has
        this string; if it has longer ones too, they no longer end at the same places, and it is
        split: the shorter ones go to a new state."""
        length = self.length[state] + 1
        if self.length[found] == length:
            return found
        new = self._add_state(length)
        for values in (self.link, self.count, self.num_followed, self.next_token, self.next_state):
            values[new] = values[found]
        if found in self.others:
            self.others[new] = dict(self.others[found])
        self.link[found] = new
        while state != NONE and self.follow(state, token) == found:
            if self.next_token[state] == token:
                self.next_state[state] = new
            else:
                self.others[state][token] = new
            state = self.link[state]
        return new

    def _add_state(self, length: int) -> int:
        self.length.append(length)
        self.count.append(0)
        self.num_followed.append(0)
        for values in (self.link, self.next_token, self.next_state):
            values.append(NONE)
        return len(self.length) - 1

    def _shorten(self, state: int, num_tokens: int) -> int:
        """The state of the suffix of `num_tokens` tokens, or of the longest string of `state`, if
        that is shorter."""
        while state != ROOT and self.length[self.link[state]] >= num_tokens:
            state = self.link[state]
        return state

    def _compare(self, state: int, token: int) -> None:
        """Make `token` the next token of `state`, if it is as frequent as the one that is."""
        target, best = self.others[state][token], self.next_state[state]
        if self.count[target] >= self.count[best]:
            del self.others[state][token]
            self.others[state][self.next_token[state]] = best
            self.next_token[state], self.next_state[state] = token, target


Salt = Hashable  # the request's cache_salt and adapter
Outputs = dict[Salt, SuffixAutomaton]


class OutputCache:
    """The outputs of the latest requests, those that still run included; by cache_salt."""

    def __init__(self, max_requests: int, max_depth: int) -> None:
        self.max_depth = max_depth
        self.num_generations = min(2, max_requests)
        self.generation_size = max_requests // max(1, self.num_generations)
        self.generations: list[Outputs] = []  # the newest one first
        self.num_newest = 0  # requests in the newest one

    def add_request(self, salt: Salt) -> SuffixAutomaton | None:
        """Where the output of a new request is to be kept; None if nothing is."""
        if not self.num_generations:
            return None
        if not self.generations or self.num_newest == self.generation_size:
            self.generations = [{}, *self.generations[: self.num_generations - 1]]
            self.num_newest = 0
        self.num_newest += 1
        return self.generations[0].setdefault(salt, SuffixAutomaton(self.max_depth))

    def get(self, salt: Salt) -> list[SuffixAutomaton]:
        """Those that a request with this salt may look into."""
        return [outputs[salt] for outputs in self.generations if salt in outputs]


class Request:
    """A running request: its tokens in an automaton of its own, its output in one of the cache."""

    def __init__(self, cache: OutputCache, salt: Salt, first_output: int) -> None:
        """The output begins with token number `first_output`."""
        self.own, self.text = SuffixAutomaton(cache.max_depth), Text()
        self.cache, self.salt = cache, salt
        self.outputs: SuffixAutomaton | None = None  # from the first token of output on
        self.output = Text()
        self.num_tokens = 0  # seen so far
        self.first_output = first_output

    def append(self, token_ids: list[int]) -> None:
        """More tokens, of the prompt or of the output."""
        for token in token_ids:
            self.own.append(self.text, token)
        output = token_ids[max(0, self.first_output - self.num_tokens) :]
        self.num_tokens += len(token_ids)
        if output and self.outputs is None:
            self.outputs = self.cache.add_request(self.salt)
        if self.outputs is not None:
            for token in output:
                self.outputs.append(self.output, token)


class SuffixDecodingProposer(Proposer):
    """Drafts what followed the last tokens of a request before."""

    def __init__(self, runner: ModelRunner, config: SpeculativeConfig) -> None:
        super().__init__(runner, config)
        depth = self.max_depth = config.suffix_decoding_max_tree_depth
        factor = config.suffix_decoding_max_spec_factor
        self.limits = [min(int(factor * m), depth - m) for m in range(depth + 1)]
        self.cache = OutputCache(config.suffix_decoding_max_cached_requests, depth)
        self.requests: dict[int, Request] = {}  # by seq_id

    def propose(
        self,
        scheduler_output: SchedulerOutput,
        input_batch: InputBatch,
        hidden: Tensor,
        output: ModelOutput,
    ) -> dict[int, tuple[int, ...]]:
        self.update_requests(scheduler_output)
        batch, drafts = self.runner.req_states, {}
        for item in scheduler_output.scheduled:
            if item.seq_id in output.sampled_token_ids:
                row = batch.row_of[item.seq_id]
                token_ids = batch.token_ids[row, : batch.num_tokens[row]]
                if found := self.draft(item.seq_id, token_ids, self.limit(item)):
                    drafts[item.seq_id] = found
        return drafts

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Forget who is gone, and note who is new. A sequence that was preempted comes back as a
        new one; what it has said by then is in the cache already, and so is what a branch has said
        before it forked off."""
        if scheduler_output.is_restart:
            self.requests.clear()
        for seq_id in scheduler_output.dropped_seq_ids:
            self.requests.pop(seq_id, None)
        for new in scheduler_output.new_sequences:
            self.requests[new.seq_id] = Request(self.cache, new.extra_keys, len(new.token_ids))

    def draft(self, seq_id: int, token_ids: np.ndarray, most: int) -> tuple[int, ...]:
        """At most `most` drafts behind `token_ids` [num_tokens], the prompt and the output of a
        sequence. The first call that asks for drafts reads all of them, a later one the new ones.
        """
        request = self.requests[seq_id]
        if not (most or request.num_tokens):
            return ()
        request.append(token_ids[request.num_tokens :].tolist())
        limits = [min(limit, most) for limit in self.limits]
        places = [(request.own, (request.own.find(request.text), request.text.num_tokens))]
        last = token_ids[-self.max_depth :].tolist()
        places += [(outputs, outputs.match(last)) for outputs in self.cache.get(request.salt)]
        drafts = [
            automaton.speculate(*place, limits, self.config.suffix_decoding_min_token_prob)
            for automaton, place in places
        ]
        return max(drafts, key=lambda draft: draft.score).token_ids
