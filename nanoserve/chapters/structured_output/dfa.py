"""Which texts does a regular expression allow, byte by byte?

A finite automaton answers this with one look into a table per byte. The expression "ab*|é" takes
three ways, each a standard step of a compiler course:

    parse      a, then any number of b; or é          Python's own parser (module re)
    NFA        0 -a-> 1 -> 2 -b-> 3 -> 2 -> 6         one state for each place in the expression;
               0 -C3-> 5 -A9-> 4 -> 6                 several ways may be open at once
    DFA        START -a-> A -b-> A                    a state is the set of places where one can
               START -C3-> B -A9-> C                  be: START {0}, A {2, 6}, B {5}, C {6}
               accepting: A, C                        the text may end here: 6 is the end

The alphabet is bytes, not characters, because a token may be a part of a character: é is C3 A9 in
UTF-8. A set of characters, such as [^"], becomes a few sequences of byte ranges.

The language is that of re.fullmatch(pattern, text, re.ASCII): \\d is [0-9], as in JSON schemas.

Refused, as no finite automaton has them, or only a huge one: look-ahead and look-behind,
back-references, \\b, ^ and $ in the middle, atomic groups, flags; and what needs too large an
automaton: the DFA of [ab]*a[ab]{20} has 2 million states, the NFA of (a{9999}){9999} 100 million.

Left out: minimization. Equal states cost memory, but no time.

vLLM: vllm/v1/structured_output/backend_outlines.py (V1), with the package outlines_core.
Thompson, Regular expression search algorithm, 1968 (NFA); Rabin and Scott, 1959 (DFA).
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np

try:
    from re import _parser as re_parser
except ImportError:  # Python 3.10
    import sre_parse as re_parser

DEAD, START = 0, 1  # states of a DFA: nothing can be allowed any more; no byte yet
MAX_STATES = 50_000  # of the NFA
MAX_DFA_STATES = 30_000  # half a KiB each
MAX_SECONDS = 3.0  # to find them

Ranges = list[tuple[int, int]]  # of code points or bytes: (first, last)
CATEGORIES: dict[str, Ranges] = {
    "DIGIT": [(0x30, 0x39)],
    "SPACE": [(0x09, 0x0D), (0x20, 0x20)],
    "WORD": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
}
NOT_REGULAR = {"ASSERT": "look-around", "ASSERT_NOT": "look-around", "SUBPATTERN": "flags"}
NOT_REGULAR |= {"GROUPREF": "a back-reference", "AT": r"\b, or ^ or $ in the middle"}


class DFA:
    """A deterministic automaton over bytes.

    Invariant: from every state but DEAD, some bytes lead to an accepting state.
    """

    def __init__(self, next_state: np.ndarray, is_accepting: np.ndarray) -> None:
        self.next_state = next_state  # [num_states, 256] int16
        self.is_accepting = is_accepting  # [num_states] bool

    def walk(self, state: int, data: bytes) -> int:
        """The state after these bytes; DEAD if no allowed text has them here."""
        for byte in data:
            state = self.next_state[state, byte]
        return int(state)


# -- NFA: a state for each place in the expression --


def build_nfa(pattern: str) -> NFA:
    """The NFA of a regular expression. Raises ValueError if it has a mistake or something that is
    not supported, or is too large."""
    nfa = NFA()
    try:
        parsed = re_parser.parse(pattern, re.ASCII)
        nfa.end = nfa.add_all(parsed, nfa.add_state(), is_last=True)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"it is not valid: {error}") from error
    if parsed.state.flags & ~(re.ASCII | re.VERBOSE):
        raise ValueError("it has flags, which are not supported")
    return nfa


class NFA:
    """A nondeterministic automaton over bytes. States are numbers, state 0 is the start.

    Invariants: a state that was given to add() as `start` gets no way in afterwards, so that
    alternatives may share it. From every state some bytes lead to the end.
    """

    def __init__(self) -> None:
        self.end = 0  # the accepting state
        self.edges: list[list[tuple[int, int, int]]] = []  # (first byte, last byte, next state)
        self.jumps: list[list[int]] = []  # next states that take no byte

    def add_state(self, *before: int) -> int:
        """A new state, with jumps to it from the states `before`."""
        if (state := len(self.edges)) == MAX_STATES:
            raise ValueError(f"it has more than {MAX_STATES} states; repeat less")
        self.edges.append([])
        self.jumps.append([])
        for each in before:
            self.jumps[each].append(state)
        return state

    def add_all(self, items: Any, start: int, is_last: bool = False) -> int:
        """Add parsed items, one behind the other, from the state `start` on. Returns the state
        behind them. is_last: nothing comes behind them."""
        for number, (op, value) in enumerate(items, 1):
            start = self.add(op.name, value, start, is_last and number == len(items))
        return start

    def add(self, op: str, value: Any, start: int, is_last: bool) -> int:
        """Add one item; as add_all()."""
        match op, value:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN", _:
                return self.add_character(find_ranges(op, value), start)
            case "SUBPATTERN", (_, 0, 0, items):  # without flags
                return self.add_all(items, start, is_last)
            case "BRANCH", (_, branches):
                return self.add_state(*[self.add_all(each, start, is_last) for each in branches])
            case "MAX_REPEAT" | "MIN_REPEAT", (least, most, items):
                return self.add_repeated(items, least, most, start)
            case "AT", _ if "BEGINNING" in value.name and start == 0:
                return start
            case "AT", _ if "END" in value.name and is_last:
                return start
        raise ValueError(f"it has {NOT_REGULAR.get(op, op.lower())}, which is not supported")

    def add_character(self, ranges: Ranges, start: int) -> int:
        """Add one character of these code points."""
        end = self.add_state()

        @cache
        def find_tail(sequence: tuple[tuple[int, int], ...]) -> int:
            """The state before what is left of a character."""
            if not sequence:
                return end
            state = self.add_state()
            self.edges[state].append((*sequence[0], find_tail(sequence[1:])))
            return state

        sequences = [sequence for pair in ranges for sequence in utf8_sequences(*pair)]
        if not sequences:
            raise ValueError("it has a class of no character")
        for first, *tail in sequences:
            self.edges[start].append((*first, find_tail(tuple(tail))))
        return end

    def add_repeated(self, items: Any, least: int, most: int, start: int) -> int:
        """Add `items` from `least` to `most` times."""
        for _ in range(least):
            start = self.add_all(items, self.add_state(start))
        if most is re_parser.MAXREPEAT:
            loop = self.add_state(start)
            self.jumps[self.add_all(items, loop)].append(loop)
            return loop
        ends = [start]
        for _ in range(most - least):
            ends.append(self.add_all(items, self.add_state(ends[-1])))
        return self.add_state(*ends)

    def follow(self, states: Iterable[int]) -> frozenset[int]:
        """Where one can be without another byte: those of these states that have edges, or end."""
        found, todo = set(states), list(states)
        while todo:
            new = [state for state in self.jumps[todo.pop()] if state not in found]
            found.update(new)
            todo += new
        return frozenset(state for state in found if self.edges[state] or state == self.end)


def find_ranges(op: str, value: Any) -> Ranges:
    """The code points of an item that is one character."""
    match op:
        case "ANY":
            return complement([(0x0A, 0x0A)])
        case "LITERAL":
            return [(value, value)]
        case "NOT_LITERAL":
            return complement([(value, value)])
    found: Ranges = []
    for kind, what in value:
        match kind.name:
            case "LITERAL" | "RANGE":
                found.append(what if kind.name == "RANGE" else (what, what))
            case "CATEGORY":
                *negation, name = what.name.removeprefix("CATEGORY_").split("_")
                found += complement(CATEGORIES[name]) if negation else CATEGORIES[name]
    return complement(found) if value[0][0].name == "NEGATE" else found


def complement(ranges: Ranges) -> Ranges:
    """The code points of none of these ranges."""
    found, low = [], 0
    for first, last in sorted(ranges):
        found.append((low, first - 1))
        low = max(low, last + 1)
    return [(first, last) for first, last in (*found, (low, 0x10FFFF)) if first <= last]


def utf8_sequences(first: int, last: int) -> Iterator[Ranges]:
    """Sequences of byte ranges: together, the UTF-8 of all code points from `first` to `last`, but
    for the surrogates, which are no characters.

    (0x41, 0xFF) -> [(0x41, 0x7F)] and [(0xC2, 0xC3), (0x80, 0xBF)]
    """
    # A sequence of ranges is right if both ends have as many bytes, and if below the first byte in
    # which they differ all lower bits are 0 in the one and 1 in the other. Else: cut.
    cuts = [0x80, 0x800, 0xD800, 0xE000, 0x10000]
    for bits in (6, 12, 18):
        if first >> bits != last >> bits and last > 0x7F:
            cuts += [-(-first >> bits) << bits, (last + 1) >> bits << bits]
    if (cut := next((each for each in cuts if first < each <= last), None)) is not None:
        yield from utf8_sequences(first, cut - 1)
        yield from utf8_sequences(cut, last)
    elif not 0xD800 <= first <= 0xDFFF:
        yield list(zip(chr(first).encode(), chr(last).encode(), strict=True))


# -- DFA: a state for each set of places where one can be --


def determinize(nfa: NFA) -> DFA:
    """The DFA of an NFA. Raises ValueError if it is too large."""
    start, deadline = nfa.follow([0]), time.monotonic() + MAX_SECONDS
    numbers = {frozenset[int](): DEAD, start: START}
    todo, rows = [start], [np.zeros(256, np.int16)]
    # Bytes between two cuts lead to the same states, wherever one is.
    cuts = sorted({0, 256}.union(*({lo, hi + 1} for edges in nfa.edges for lo, hi, _ in edges)))
    spans = {low: span for span, low in enumerate(cuts)}

    @cache
    def number_of(reached: frozenset[int]) -> int:
        if (states := nfa.follow(reached)) not in numbers:
            numbers[states] = len(numbers)
            todo.append(states)
        return numbers[states]

    for states in todo:  # grows meanwhile
        targets: dict[int, set[int]] = defaultdict(set)
        for first, last, following in (edge for state in states for edge in nfa.edges[state]):
            for span in range(spans[first], spans[last + 1]):
                targets[span].add(following)
        row = np.zeros(256, np.int16)
        for span, reached in targets.items():
            row[cuts[span] : cuts[span + 1]] = number_of(frozenset(reached))
        rows.append(row)
        if len(numbers) > MAX_DFA_STATES or time.monotonic() > deadline:
            raise ValueError(
                f"it needs an automaton of {len(numbers)} states or more; make its alternatives "
                "differ earlier, or repeat less"
            )
    return DFA(np.stack(rows), np.array([nfa.end in states for states in numbers]))
