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

Left out: JSON schemas and grammars, whose nesting needs a stack beside the state (backend_xgrammar
has one); vocabularies in which some byte is no token, so that a text may come to a place where
nothing can follow (such a request ends with an error).

Willard and Louf, Efficient Guided Generation for Large Language Models, arXiv 2307.09702.
vLLM: vllm/v1/structured_output/backend_outlines.py (V1).
"""

from __future__ import annotations

import json
import re
from functools import lru_cache

import numpy as np

from nanoserve.chapters.structured_output.backend import (
    GrammarSpec,
    StructuredOutputBackend,
    StructuredOutputGrammar,
    pack_bits,
)
from nanoserve.chapters.structured_output.dfa import DEAD, DFA, START, build_nfa, determinize
from nanoserve.chapters.structured_output.vocabulary import Vocabulary

TERMINATED = -1  # the state after a stop token
MASK_BYTES = 8 * 2**20  # of the masks that one expression keeps


class TokenTrie:
    """The tokens of a vocabulary, by their beginnings. Node 0 is the root."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = [token or b"" for token in vocabulary.tokens]
        data = np.frombuffer(b"".join(tokens), np.uint8)
        length = np.array([len(token) for token in tokens])
        start = length.cumsum() - length
        self.node_of_token = np.zeros(len(tokens), np.int64)  # the root, of tokens that are None
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

    def states_behind(self, dfa: DFA, state: int) -> np.ndarray:
        """By token id: the DFA's state behind this token, if it comes in `state`; DEAD if it is
        forbidden there."""
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
        self.dfa, self.trie, self.tokens = dfa, trie, vocabulary.tokens
        self.stop_token_ids = stop_token_ids
        max_masks = max(1, MASK_BYTES // (len(self.tokens) // 8 + 1))
        self.mask = lru_cache(max_masks)(self.compute_mask)

    def advance(self, state: int, token_id: int) -> int:
        """The state behind a token that comes in `state`; DEAD if it is forbidden there. A stop
        token is no text."""
        if token_id in self.stop_token_ids:
            return TERMINATED if self.dfa.is_accepting[state] else DEAD
        token = self.tokens[token_id]
        return self.dfa.walk(state, token) if token else DEAD

    def compute_mask(self, state: int) -> np.ndarray:
        """int32 [ceil(vocab_size / 32)]: a bit for each token that is allowed in `state`."""
        is_allowed = self.trie.states_behind(self.dfa, state) != DEAD
        is_allowed[list(self.stop_token_ids)] = self.dfa.is_accepting[state]
        return pack_bits(np.flatnonzero(is_allowed), len(self.tokens))


class NanoBackend(StructuredOutputBackend):
    """Regular expressions and choices, in Python."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.trie = TokenTrie(vocabulary)

    def compile_grammar(self, spec: GrammarSpec) -> NanoGrammar:
        regex = spec.text
        if spec.kind == "choice":
            regex = "|".join(map(re.escape, json.loads(spec.text)))
        elif spec.kind != "regex":
            raise ValueError(f"it takes regex and choice, and no {spec.kind}.")
        dfa = determinize(build_nfa(regex))
        return NanoGrammar(TokenAutomaton(dfa, self.trie, self.vocabulary, spec.stop_token_ids))


class NanoGrammar(StructuredOutputGrammar):
    """Where one sequence is in a TokenAutomaton: the state behind each of its tokens."""

    def __init__(self, automaton: TokenAutomaton) -> None:
        self.automaton = automaton
        self.states = [START]

    def accept_token(self, token: int) -> bool:
        if (following := self.automaton.advance(self.states[-1], token)) != DEAD:
            self.states.append(following)
        return following != DEAD

    def take_back(self, num_tokens: int) -> None:
        del self.states[-num_tokens:]

    def fill_bitmask(self, mask: np.ndarray) -> None:
        mask[:] = self.automaton.mask(self.states[-1])

    def is_terminated(self) -> bool:
        return self.states[-1] == TERMINATED

    def fork(self) -> NanoGrammar:
        return NanoGrammar(self.automaton)
