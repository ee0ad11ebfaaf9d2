"""Facts that are stated once and asked for later: what makes a wrong KV block visible.

    user       Remember: The red box holds 4821. Mia has the blue kite. ...
    assistant  I will remember.
    ...        (stories, up to two thousand tokens of them)
    user       What does the red box hold?
    assistant  The red box holds 4821.

A fact is a `statement` (who or what), a `value` that cannot be guessed, and its question. An answer
repeats the statement word for word, so that the value can be found by the circuit every small
transformer learns first: look for the place where these words stood before, copy what came next.
`Facts` never uses a key twice within one training row. Held out are (statement, value) pairs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from nanoserve.demo.training import tables
from nanoserve.demo.training.skills import Turn, any_name, is_held_out, made_up_word
from nanoserve.demo.training.stories import skewed


@dataclass(frozen=True)
class Fact:
    """'The red box holds' + ' 4821' + '.', asked for by 'What does the red box hold?'."""

    statement: str
    value: str
    question: str

    @property
    def sentence(self) -> str:
        return f"{self.statement}{self.value}."

    def turn(self) -> Turn:
        return Turn(self.question, self.sentence, key=f"{self.value}.")


def _code(rng: random.Random) -> str:
    return f" {rng.randint(1000, 9999)}"


def _name(rng: random.Random) -> str:
    return made_up_word(rng) if rng.random() < 0.2 else rng.choice(tables.NAMES)


def _box(rng: random.Random) -> Fact:
    box = f"{rng.choice(tables.COLOURS)} {rng.choice(tables.BOXES)}"
    question = skewed(rng, ["What does the {} hold?", "What is in the {}?"], 1.5)
    return Fact(f"The {box} holds", _code(rng), question.format(box))


def _place(rng: random.Random) -> Fact:
    place = rng.choice(tables.PLACES)
    question = skewed(rng, ["What is the code of the {}?", "Tell me the code of the {}."], 1.5)
    return Fact(f"The code of the {place} is", _code(rng), question.format(place))


def _owner(rng: random.Random) -> Fact:
    name, thing = _name(rng), f"{rng.choice(tables.COLOURS)} {rng.choice(tables.TOYS)}"
    return Fact(f"{name} has", f" the {thing}", f"What does {name} have?")


def _food(rng: random.Random) -> Fact:
    name = _name(rng)
    return Fact(f"{name} likes", f" {rng.choice(tables.FOODS)}", f"What does {name} like?")


def _city(rng: random.Random) -> Fact:
    name = _name(rng)
    return Fact(f"{name} lives in", f" {rng.choice(tables.CITIES)}", f"Where does {name} live?")


KINDS = {"box": _box, "place": _place, "owner": _owner, "food": _food, "city": _city}
CODES = ("box", "place")  # kinds whose value is a number of four digits
WORDS = ("owner", "food", "city")  # kinds whose value is words


class Facts:
    """A supply of facts. Invariant: no two facts of one supply have the same statement."""

    def __init__(self, rng: random.Random, held_out: bool = False) -> None:
        self.rng = rng
        self.held_out = held_out
        self.used: set[str] = set()

    def draw(self, kind: str | None = None) -> Fact:
        """A new fact; when a row has used nearly all keys of a kind, other kinds step in."""
        for _ in range(1000):
            chosen = kind or skewed(self.rng, list(KINDS), 0.4)
            fact = KINDS[chosen](self.rng)
            is_new = fact.statement not in self.used
            if is_new and is_held_out("fact", fact.sentence) == self.held_out:
                self.used.add(fact.statement)
                return fact
            kind = kind if self.rng.random() < 0.98 else None
        raise RuntimeError("1000 draws gave no new fact: far too many facts in one row")

    def draw_many(self, count: int) -> list[Fact]:
        """Half of the time facts of one kind only, where keys are easier to confuse."""
        kind = self.rng.choice(list(KINDS)) if self.rng.random() < 0.5 else None
        return [self.draw(kind) for _ in range(count)]


def pairs(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Keys of one word with values of one word or number, the smallest form of a fact."""
    keys = rng.sample(tables.WORDS, count) if rng.random() < 0.5 else _distinct_names(rng, count)
    if rng.random() < 0.5:
        return [(key, str(rng.randint(0, 10 ** rng.randint(1, 4) - 1))) for key in keys]
    values = sorted(set(tables.WORDS) - set(keys))  # no value is a key: one right answer each
    return [(key, rng.choice(values)) for key in keys]


def _distinct_names(rng: random.Random, count: int) -> list[str]:
    names = rng.sample(tables.NAMES, min(rng.randint(0, count), len(tables.NAMES)))
    while len(names) < count:
        word = made_up_word(rng) if rng.random() < 0.5 else any_name(rng)
        if word not in names:
            names.append(word)
    return names
