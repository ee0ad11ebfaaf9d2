"""Which texts does a regular expression allow, byte by byte?

A finite automaton answers this with one look into a table per byte. The expression "ab*|é" takes
three ways, each a standard step of a compiler course:

    parse      a, then any number of b; or é          Python's own parser (module re)
    NFA        0 -a-> 1 -> 2 -b-> 3 -> 2 -> 5         one state for each place in the expression;
               0 -C3-> 4 -A9-> 5                      several ways may be open at once
    DFA        START -a-> A -b-> B -b-> B             a state is the set of places where one can
               START -C3-> C -A9-> D                  be: {1, 2}, {3, 2}, {4}, {5}
               accepting: A, B, D                     the text may end here

The alphabet is bytes, not characters, because a token may be a part of a character: é is C3 A9 in
UTF-8. A set of characters, such as [^"], becomes a few sequences of byte ranges.

The language is that of re.fullmatch(pattern, text, re.ASCII): \\d is [0-9], as in JSON schemas.
Other libraries have dialects of their own: `rewrite` tells each of them what is meant.

Refused, as no finite automaton has them, or only a huge one: look-ahead and look-behind,
back-references, \\b, ^ and $ in the middle, atomic groups, flags.

*Bombs.* The DFA of [ab]*a[ab]{20} has 2 million states, the NFA of (a{9999}){9999} 100 million.
Each ends with an error: at MAX_STATES, or after MAX_WORK elementary operations (about a second).

Left out: minimization. Equal states cost memory, but no time.

vLLM: vllm/v1/structured_output/backend_outlines.py (V1), with the package outlines_core.
Thompson, Regular expression search algorithm, 1968 (NFA); Rabin and Scott, 1959 (DFA).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from nanoserve.entrypoints.errors import VLLMValidationError, brief

try:
    from re import _parser as re_parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_parse as re_parser

DEAD, START = 0, 1  # states of a DFA: nothing can be allowed any more; no byte yet
MAX_STATES = 30_000  # of the NFA
MAX_DFA_STATES = 10_000  # half a KiB each
MAX_WORK = 3_000_000  # visits of a state of the NFA, or of one of its edges
MAX_CODE_POINT = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]  # of code points or bytes: (first, last)
CATEGORIES: dict[str, Ranges] = {
    "DIGIT": ((0x30, 0x39),),
    "SPACE": ((0x09, 0x0D), (0x20, 0x20)),
    "WORD": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
}
# In a schema, \S and the dot leave out what they do in ECMAScript and in Python without re.ASCII.
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
ALL_SPACES: Ranges = ((0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680))
ALL_SPACES += ((0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F))
ALL_SPACES += ((0x3000, 0x3000), (0xFEFF, 0xFEFF))
# Parts of all code points. In a schema, xgrammar takes E0 80 80 and other bytes that are none for a
# character of a class, unless the class has one length in UTF-8. (Elsewhere it does not, and
# several classes instead of one would cost seconds.)
ALL: Ranges = ((0, MAX_CODE_POINT),)
BY_LENGTH: Ranges = ((0, 0x7FF), (0x800, 0xFFFF), (0x10000, MAX_CODE_POINT))
CHARACTERS = ("LITERAL", "NOT_LITERAL", "ANY", "IN")  # items that are one character
QUANTIFIERS = {(0, 1): "?", (0, ""): "*", (1, ""): "+"}
NOT_REGULAR = {
    "ASSERT": "look-ahead and look-behind",
    "ASSERT_NOT": "look-ahead and look-behind",
    "ATOMIC_GROUP": "an atomic group",
    "GROUPREF": "a back-reference",
    "GROUPREF_EXISTS": "a condition on a group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
}


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

    def matches(self, text: str) -> bool:
        """Is this text allowed?"""
        return bool(self.is_accepting[self.walk(START, text.encode())])


def build_nfa(pattern: str, is_outline: bool = False) -> NFA:
    """The NFA of a regular expression. Raises VLLMValidationError if it has a mistake or something
    that is not supported, or is too large. is_outline: repeat nothing more than once, to check what
    does not depend on sizes."""
    if len(pattern) > MAX_STATES and not is_outline:
        raise _error(pattern, f"has {len(pattern)} characters; allowed: {MAX_STATES}")
    nfa = NFA(pattern, is_outline)
    try:
        nfa.end = nfa.add_all(_parse(pattern), nfa.add_state())
    except RecursionError:
        raise _too_deep(pattern) from None
    return nfa


def _parse(pattern: str) -> Any:
    if re.search(r"\[\[:\w+:]", pattern):  # Python's re takes it for a class of [, : and letters
        raise _refuse(pattern, "a class such as [[:alpha:]]")
    try:
        parsed = re_parser.parse(pattern, re.ASCII)
    except (re.error, OverflowError, ValueError) as error:
        raise _error(pattern, f"is not valid: {error}. Write it as for Python's re") from error
    if parsed.state.flags & ~(re.ASCII | re.VERBOSE):
        raise _refuse(pattern, "flags")
    return parsed


def _error(pattern: str, what: str) -> VLLMValidationError:
    message = f"the regular expression {brief(pattern)} {what}."
    return VLLMValidationError(message, parameter="regex", value=pattern)


def _too_deep(pattern: str) -> VLLMValidationError:
    return _error(pattern, "has too many groups inside each other. Write fewer")


def _refuse(pattern: str, feature: str) -> VLLMValidationError:
    return _error(
        pattern,
        f"has {feature}; allowed: characters, classes, groups, |, *, +, ?, {{m,n}}, ^ at the start "
        "and $ at the end",
    )


def rewrite(pattern: str, in_schema: bool = False) -> str:
    """The same expression in the few words that every library reads alike: r"\\A\\d{,2}" becomes
    "^(?:[0-9]){0,2}" in a schema, where anchors say something, and "(?:[0-9]){0,2}" elsewhere.
    Raises VLLMValidationError as build_nfa does, but not for a size."""
    build_nfa(pattern, is_outline=True)

    def write(items: Any) -> str:
        return "".join(write_item(op.name, value) for op, value in items)

    def write_item(op: str, value: Any) -> str:
        if op in CHARACTERS:
            if not (ranges := _ranges(op, value, in_schema)):
                raise _error(pattern, "has a class of no character")
            return _write_class(ranges, BY_LENGTH if in_schema else ALL)
        if op == "SUBPATTERN":
            return write(value[3])
        if op == "BRANCH":
            return f"(?:{'|'.join(map(write, value[1]))})"
        if op == "AT":
            return ("^" if "BEGINNING" in value.name else "$") * in_schema
        least, most, items = value
        most = "" if most is re_parser.MAXREPEAT else most
        return f"(?:{write(items)}){QUANTIFIERS.get((least, most), f'{{{least},{most}}}')}"

    try:
        return write(_parse(pattern))
    except RecursionError:
        raise _too_deep(pattern) from None


def _write_class(ranges: Ranges, parts: Ranges) -> str:
    """One class for each of these parts of all code points."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _write_character(ranges[0][0])
    written = []
    for low, high in parts:
        cut = [(max(first, low), min(last, high)) for first, last in ranges]
        pairs = [map(_write_character, pair) for pair in cut if pair[0] <= pair[1]]
        if pairs:
            written.append(f"[{''.join(map('-'.join, pairs))}]")
    return written[0] if len(written) == 1 else f"(?:{'|'.join(written)})"


def _write_character(point: int) -> str:
    return chr(point) if chr(point).isascii() and chr(point).isalnum() else f"\\u{{{point:x}}}"


# -- NFA: a state for each place in the expression --


class NFA:
    """A non-deterministic automaton over bytes. States are numbers, state 0 is the start.

    Invariant: a state that was given to add() as `start` gets no way in afterwards, so that
    alternatives may share it.
    """

    def __init__(self, pattern: str, is_outline: bool) -> None:
        self.pattern, self.is_outline = pattern, is_outline
        self.end = 0  # the accepting state
        self.edges: list[list[tuple[int, int, int]]] = []  # (first byte, last byte, next state)
        self.jumps: list[list[int]] = []  # next states that take no byte

    def add_state(self, before: int | None = None) -> int:
        """A new state, with a jump to it from the state `before`."""
        if len(self.edges) == MAX_STATES:
            raise _error(self.pattern, f"is too large: more than {MAX_STATES} states. Repeat less")
        self.edges.append([])
        self.jumps.append([])
        if before is not None:
            self.jumps[before].append(len(self.jumps) - 1)
        return len(self.jumps) - 1

    def add_all(self, items: Any, start: int, is_first: bool = True, is_last: bool = True) -> int:
        """Add parsed items, one behind the other, from the state `start` on. Returns the state
        behind them. is_first, is_last: can no other item of the expression be before, or behind?"""
        state, items = start, list(items)
        for i, (op, value) in enumerate(items):
            first = is_first and _are_anchors(items[:i])
            last = is_last and _are_anchors(items[i + 1 :])
            state = self.add(op.name, value, state, first, last)
        return state

    def add(self, op: str, value: Any, start: int, is_first: bool, is_last: bool) -> int:
        """Add one item; as add_all()."""
        if op in CHARACTERS:
            return self.add_characters(_ranges(op, value), start)
        if op == "SUBPATTERN":
            _, add_flags, del_flags, items = value
            if add_flags or del_flags:
                raise _refuse(self.pattern, "flags")
            return self.add_all(items, start, is_first, is_last)
        if op == "BRANCH":
            ends = [self.add_all(items, start, is_first, is_last) for items in value[1]]
            return self.join(ends)
        if op in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, items = value
            if most != 1:
                is_first = is_last = False
            return self.add_repeated(items, least, most, start, is_first, is_last)
        if op == "AT":
            if is_first if "BEGINNING" in value.name else is_last and "END" in value.name:
                return start
            raise _refuse(self.pattern, r"^ or $ in the middle, or \b or \B")
        raise _refuse(self.pattern, NOT_REGULAR.get(op, op.lower()))

    def add_characters(self, ranges: Ranges, start: int) -> int:
        """Add one character of these code points."""
        end = self.add_state()
        tails: dict[Ranges, int] = {(): end}  # what is left of a character -> its state

        def find_tail(sequence: Ranges) -> int:
            if sequence not in tails:
                tails[sequence] = state = self.add_state()
                self.edges[state].append((*sequence[0], find_tail(sequence[1:])))
            return tails[sequence]

        for sequence in (found for pair in ranges for found in utf8_sequences(*pair)):
            self.edges[start].append((*sequence[0], find_tail(sequence[1:])))
        return end

    def add_repeated(
        self, items: Any, least: int, most: Any, start: int, is_first: bool, is_last: bool
    ) -> int:
        """Add `items` from `least` to `most` times."""
        if self.is_outline:
            least, most = min(least, 1), 1
        state = start
        for _ in range(least):
            state = self.add_all(items, self.add_state(state), is_first, is_last)
        if most is re_parser.MAXREPEAT:
            loop = self.add_state(state)
            self.jumps[self.add_all(items, loop, is_first, is_last)].append(loop)
            return loop
        ends = [state]
        for _ in range(most - least):
            state = self.add_all(items, self.add_state(state), is_first, is_last)
            ends.append(state)
        return self.join(ends)

    def join(self, ends: list[int]) -> int:
        """A new state to which all of these jump."""
        end = self.add_state()
        for state in ends:
            self.jumps[state].append(end)
        return end


def _are_anchors(items: Any) -> bool:
    return all(op.name == "AT" for op, _ in items)


def _ranges(op: str, value: Any, in_schema: bool = False) -> Ranges:
    """The code points of an item that is one character."""
    if op == "ANY":
        return complement(LINE_ENDS if in_schema else ((0x0A, 0x0A),))
    if op == "LITERAL":
        return valid(((value, value),))
    if op == "NOT_LITERAL":
        return complement(((value, value),))
    is_negated = value[0][0].name == "NEGATE"
    found: list[tuple[int, int]] = []
    for kind, what in value:
        if kind.name == "CATEGORY":
            category = what.name.removeprefix("CATEGORY_")
            name = category.removeprefix("NOT_")
            is_not, ranges = category != name, CATEGORIES[name]
            if in_schema and name == "SPACE" and is_not != is_negated:
                ranges = ALL_SPACES
            found += complement(ranges) if is_not else ranges
        elif kind.name != "NEGATE":
            found.append(what if kind.name == "RANGE" else (what, what))
    return (complement if is_negated else valid)(tuple(found))


def complement(ranges: Ranges) -> Ranges:
    """The code points of none of these ranges."""
    found, low = [], 0
    for first, last in sorted(ranges):
        found.append((low, first - 1))
        low = max(low, last + 1)
    return valid((*found, (low, MAX_CODE_POINT)))


def valid(ranges: Ranges) -> Ranges:
    """The same code points without the surrogates, which are no characters."""
    cut = [(first, min(last, 0xD7FF)) for first, last in ranges]
    cut += [(max(first, 0xE000), last) for first, last in ranges]
    return tuple((first, last) for first, last in cut if first <= last)


def utf8_sequences(first: int, last: int) -> Iterator[Ranges]:
    """Sequences of byte ranges: together, the UTF-8 of all code points from `first` to `last`.

    (0x41, 0xFF) -> ((0x41, 0x7F),) and ((0xC2, 0xC3), (0x80, 0xBF))
    """
    for limit in (0x7F, 0x7FF, 0xFFFF):  # where the number of bytes changes
        if first <= limit < last:
            yield from utf8_sequences(first, limit)
            yield from utf8_sequences(limit + 1, last)
            return
    for bits in (6, 12, 18):  # the lower bytes have to be free if a higher one is
        low = (1 << bits) - 1
        if first | low < last and first > 0x7F:
            cut = None
            if first & low:
                cut = first | low
            elif last & low != low:
                cut = (last & ~low) - 1
            if cut is not None:
                yield from utf8_sequences(first, cut)
                yield from utf8_sequences(cut + 1, last)
                return
    yield tuple(zip(chr(first).encode(), chr(last).encode(), strict=True))


# -- DFA: a state for each set of places where one can be --


def determinize(nfa: NFA) -> DFA:
    """The DFA of an NFA. Raises VLLMValidationError if it is too large, or allows no text."""
    borders = sorted({0, *(b for edges in nfa.edges for lo, hi, _ in edges for b in (lo, hi + 1))})
    work = 0

    def count(number: int) -> None:
        nonlocal work
        work += number
        if work > MAX_WORK or len(numbers) > MAX_DFA_STATES:
            raise _error(
                nfa.pattern,
                f"needs an automaton that is too large: more than {MAX_DFA_STATES} states, or too "
                "much work to find them. Make its alternatives differ earlier, or repeat less",
            )

    def follow_jumps(states: Iterable[int]) -> frozenset[int]:
        """Where one can be without another byte: those of these states that have edges, or end."""
        found, todo = set(states), list(states)
        while todo:
            new = set(nfa.jumps[todo.pop()]) - found
            found |= new
            todo += new
        count(len(found))
        return frozenset(state for state in found if nfa.edges[state] or state == nfa.end)

    numbers: dict[frozenset[int], int] = {frozenset(): DEAD}
    start = follow_jumps([0]) or frozenset([0])  # even if nothing is allowed, it is not DEAD
    numbers[start] = START
    closed: dict[frozenset[int], int] = {frozenset(): DEAD}
    rows: list[dict[int, int]] = [{}]  # by state: where the bytes from a border on lead
    todo = [start]
    for states in todo:  # grows meanwhile
        moves: dict[int, set[int]] = defaultdict(set)
        for first, last, following in (edge for state in states for edge in nfa.edges[state]):
            low, high = bisect_right(borders, first) - 1, bisect_right(borders, last)
            count(high - low)
            for k in range(low, high):
                moves[k].add(following)
        row = {}
        for k, targets in moves.items():
            key = frozenset(targets)
            if key not in closed:
                reached = follow_jumps(key)
                if reached not in numbers:
                    numbers[reached] = len(numbers)
                    todo.append(reached)
                closed[key] = numbers[reached]
            row[k] = closed[key]
        rows.append(row)
    is_accepting = np.array([nfa.end in states for states in numbers])
    return _trim(nfa.pattern, rows, borders, is_accepting)


def _trim(
    pattern: str, rows: list[dict[int, int]], borders: list[int], is_accepting: np.ndarray
) -> DFA:
    """The table, with DEAD for each state from which no accepting state is reached."""
    edges = [(state, after) for state, row in enumerate(rows) for after in set(row.values())]
    is_alive = can_reach(edges, is_accepting)
    if not is_alive[START]:
        raise _error(pattern, "allows no text at all. Check its classes and anchors")
    next_state = np.zeros((len(rows), 256), np.int16)
    for state, row in enumerate(rows):
        for k, following in row.items():
            if is_alive[following]:
                last = borders[k + 1] if k + 1 < len(borders) else 256
                next_state[state, borders[k] : last] = following
    return DFA(next_state, is_accepting)


def can_reach(edges: Iterable[tuple[int, int]], targets: np.ndarray) -> np.ndarray:
    """From which states do edges (from, to) lead to one of `targets` [num_states] bool? These
    themselves included."""
    before = defaultdict(list)
    for state, following in edges:
        before[following].append(state)
    found, todo = targets.copy(), np.flatnonzero(targets).tolist()
    while todo:
        for state in before[todo.pop()]:
            if not found[state]:
                found[state] = True
                todo.append(state)
    return found
