"""Which tokens may come next, if the text has to match a regular expression?

The DFA of the expression (dfa.py) knows which bytes may come next; a token is a few bytes. To try
every token in a state would be 150,000 walks, so the tokens are a trie, in which those with the
same beginning share it, and one walk goes down all branches at once:

    root -a-> 1 -b-> 3 -c-> 4       tokens "a", "ab", "abc", "b". For "ab*", in the state after "a":
    root -b-> 2                     "b" is allowed; "a" is not, and so nothing below node 1 is tried

The trie is a few arrays. Its nodes are ordered by depth and parent: the children of a node stand
side by side, and numpy takes all nodes of one depth in a few operations. The mask of a state is
computed when a sequence first comes there, and is kept: every request with this expression has the
same states.

*No dead ends.* A state from which the tokens cannot write an end of the text is forbidden, too. (It
exists only if some byte is no token.)

Left out: JSON schemas and grammars, whose nesting needs a stack beside the state (backend_xgrammar,
backend_guidance have one); tokens that are certain are sampled all the same.

Willard and Louf, Efficient Guided Generation for Large Language Models, arXiv 2307.09702.
vLLM: vllm/v1/structured_output/backend_outlines.py (V1).
"""

from __future__ import annotations

import functools
import json
import re

import numpy as np
from torch import Tensor

from nanoserve.chapters.structured_output.backend import (
    GrammarSpec,
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from nanoserve.chapters.structured_output.dfa import (
    DEAD,
    DFA,
    START,
    build_nfa,
    can_reach,
    determinize,
)
from nanoserve.chapters.structured_output.vocabulary import Vocabulary
from nanoserve.entrypoints.errors import VLLMValidationError

TERMINATED = -1  # the state after a stop token
MASK_BYTES = 16 * 2**20  # of the masks that one expression keeps
MAX_TRIES = 500_000_000  # states of a DFA times tokens, where all have to be tried (some seconds)


class TokenTrie:
    """The tokens of a vocabulary, by their beginnings. Node 0 is the root."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = [token or b"" for token in vocabulary.tokens]
        data = np.frombuffer(b"".join(tokens), np.uint8)
        length = np.array([len(token) for token in tokens])
        start = length.cumsum() - length
        # By token id, up to a multiple of 32: its node. The root is that of tokens that are None.
        self.node_of_token = np.zeros(-(-len(tokens) // 32) * 32, np.int64)
        levels, depth, num_nodes = [np.zeros(1, np.int64)], 0, 1
        while len(longer := np.flatnonzero(length > depth)):
            keys = self.node_of_token[longer] * 256 + data[start[longer] + depth]
            level, place = np.unique(keys, return_inverse=True)  # by parent, then by byte
            self.node_of_token[longer] = num_nodes + place
            levels.append(level)
            depth, num_nodes = depth + 1, num_nodes + len(level)
        nodes = np.concatenate(levels)
        self.byte = nodes & 255  # [num_nodes]: the last byte of each
        self.num_children = np.bincount(nodes[1:] >> 8, minlength=num_nodes)
        self.first_child = 1 + self.num_children.cumsum() - self.num_children
        # Is every byte a token? Then tokens can write every text.
        self.is_complete = len({token for token in tokens if len(token) == 1}) == 256

    def states_behind(self, dfa: DFA, state: int) -> np.ndarray:
        """By token id, up to a multiple of 32: the DFA's state behind this token, if it comes in
        `state`; DEAD if it is forbidden there."""
        found = np.full(len(self.byte), DEAD, np.int16)  # by node
        nodes, states = np.zeros(1, np.int64), np.array([state])
        while len(nodes):
            number = self.num_children[nodes]
            shift = self.first_child[nodes] - (number.cumsum() - number)
            children = np.repeat(shift, number) + np.arange(number.sum())
            states = dfa.next_state[np.repeat(states, number), self.byte[children]]
            is_alive = states != DEAD
            nodes, states = children[is_alive], states[is_alive]
            found[nodes] = states
        return found[self.node_of_token]


class TokenAutomaton:
    """A DFA whose alphabet is tokens: what all sequences with one expression share."""

    def __init__(
        self, dfa: DFA, trie: TokenTrie, vocabulary: Vocabulary, stop_token_ids: frozenset[int]
    ) -> None:
        """Raises VLLMValidationError if these tokens cannot write any text that the DFA allows."""
        self.dfa, self.trie, self.tokens = dfa, trie, vocabulary.tokens
        self.stop_token_ids = stop_token_ids
        self.is_stop = np.zeros(len(trie.node_of_token), bool)  # by token id
        self.is_stop[[token_id for token_id in stop_token_ids if token_id < len(self.tokens)]] = (
            True
        )
        self.has_end = self._find_ends()
        row_bytes = len(self.is_stop) // 8
        max_masks = max(1, MASK_BYTES // row_bytes)
        self.mask = functools.lru_cache(max_masks)(self._compute_mask)
        num_states = len(dfa.is_accepting)
        self.num_bytes = dfa.next_state.nbytes + min(max_masks, num_states) * row_bytes

    def advance(self, state: int, token_id: int) -> int:
        """The state behind a token that comes in `state`; DEAD if it is forbidden there."""
        if state == TERMINATED:
            return DEAD
        if token_id in self.stop_token_ids:
            return TERMINATED if self.dfa.is_accepting[state] else DEAD
        token = self.tokens[token_id] if 0 <= token_id < len(self.tokens) else None
        following = self.dfa.walk(state, token) if token else DEAD
        return following if self.has_end[following] else DEAD

    def _compute_mask(self, state: int) -> np.ndarray:
        """int32 [ceil(vocab_size / 32)]: a bit for each token that is allowed in `state`."""
        is_allowed = np.zeros_like(self.is_stop)
        if state != TERMINATED:
            is_allowed = self.has_end[self.trie.states_behind(self.dfa, state)] & ~self.is_stop
            is_allowed |= self.is_stop & self.dfa.is_accepting[state]
        return np.packbits(is_allowed, bitorder="little").view("<i4")

    def _find_ends(self) -> np.ndarray:
        """From which states [num_states] bool can tokens, and not only bytes, write an end?"""
        num_states = len(self.dfa.is_accepting)
        if self.trie.is_complete:
            return np.arange(num_states) != DEAD
        if num_states * len(self.tokens) > MAX_TRIES:
            raise VLLMValidationError(
                f"an automaton of {num_states} states is too large for a vocabulary of "
                f"{len(self.tokens)} tokens that has no token for some bytes. Repeat less."
            )
        edges = []
        for state in range(START, num_states):
            behind = self.trie.states_behind(self.dfa, state)[~self.is_stop]
            edges += [(state, following) for following in set(behind.tolist())]
        has_end = can_reach(edges, self.dfa.is_accepting)
        if not has_end[START]:
            raise VLLMValidationError("the tokens of this model can write no text that is allowed.")
        return has_end


class NanoBackend(StructuredOutputBackend):
    """Regular expressions and choices, in Python."""

    name = "nano"

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.trie = TokenTrie(vocabulary)

    @classmethod
    def check(cls, spec: GrammarSpec) -> None:
        build_nfa(_get_regex(spec))

    def compile_grammar(self, spec: GrammarSpec) -> NanoGrammar:
        dfa = determinize(build_nfa(_get_regex(spec)))
        return NanoGrammar(TokenAutomaton(dfa, self.trie, self.vocabulary, spec.stop_token_ids))


def _get_regex(spec: GrammarSpec) -> str:
    match spec.request_type:
        case StructuredOutputOptions.REGEX:
            return spec.grammar_spec
        case StructuredOutputOptions.CHOICE:
            return "|".join(re.escape(choice) for choice in json.loads(spec.grammar_spec))
    raise VLLMValidationError(
        f"the backend 'nano' takes regex and choice; given: {spec.request_type.name.lower()}. "
        'Install xgrammar or llguidance (pip install -e ".[structured]"), and use the backend '
        "'auto'.",
        parameter="structured_outputs",
    )


class NanoGrammar(StructuredOutputGrammar):
    """Where one sequence is in a TokenAutomaton: the state behind each of its tokens."""

    def __init__(self, automaton: TokenAutomaton) -> None:
        self.automaton = automaton
        self.num_bytes = automaton.num_bytes
        self.states = [START]

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        accepted = self._walk(tokens)
        self.states += accepted
        return self.is_terminated() or len(accepted) == len(tokens)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens[: len(self._walk(tokens))]

    def rollback(self, num_tokens: int) -> None:
        del self.states[len(self.states) - num_tokens :]

    def fill_bitmask(self, bitmask: Tensor, batch_index: int) -> None:
        bitmask.numpy()[batch_index] = self.automaton.mask(self.states[-1])

    def is_terminated(self) -> bool:
        return self.states[-1] == TERMINATED

    def fork(self) -> NanoGrammar:
        return NanoGrammar(self.automaton)

    def _walk(self, tokens: list[int]) -> list[int]:
        """The states behind these tokens, up to the first one that is forbidden."""
        state, found = self.states[-1], []
        for token_id in tokens:
            state = self.automaton.advance(state, token_id)
            if state == DEAD:
                break
            found.append(state)
        return found
