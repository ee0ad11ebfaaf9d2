"""How does a program write a text that nobody has written before?

grammar.json has tables of words and of templates. A name in braces is a draw from another table:

    "marked_name": ["O'{world_names}", "Dr. {world_names}", ...]
    Author("seed 7").fill("What does {marked_name:U} like?")      "What does O'RAVI like?"

A table that is a dict has weights. Some names are in no table: numbers, made-up words. After the
colon stands an inflection: a ("an owl"), C ("Owl"), l ("owl"), U ("OWL").

An author of the training text never writes an eighth of everything, and an author of questions for
the evaluation writes only that eighth. Which eighth is a property of the item itself, and not of a
file or of a seed: 17 + 20 is in no training row of any run.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
FOLDER = Path(__file__).parent
TABLES: dict[str, Any] = json.loads((FOLDER / "grammar.json").read_text("utf-8"))
GUESSES: dict[str, Any] = json.loads((FOLDER / "first_guesses.json").read_text("utf-8"))
NAMES = [*TABLES["girls"], *TABLES["boys"], *TABLES["helper_girls"], *TABLES["helper_boys"]]
TABLES["names"] = NAMES
ACCENTS = "áàâäãåæçéèêëíìîïñóòôöõøúùûüýßšžčćđğłńśż"
HANZI = "".join(TABLES["hanzi"])
RARE_HANZI = [chr(code) for code in range(0x4E00, 0x9FA6)]


def is_held_out(*item: object, one_in: int = 8) -> bool:
    """Does an item belong to the evaluation? A fixed pseudo-random eighth of all items does."""
    return zlib.crc32("|".join(map(str, item)).encode()) % one_in == 0


@cache
def _zipf(count: int, power: float) -> list[float]:
    return [(rank + 1) ** -power for rank in range(count)]


class Word(str):
    """A str with inflections: f"{Word('owl'):a}" is 'an owl'."""

    def __format__(self, how: str) -> str:
        if how == "a":
            return ("an " if self[0] in "aeiou" else "a ") + self
        if how == "C":  # unlike str.capitalize it leaves the other letters alone
            return self[:1].upper() + self[1:]
        return {"l": self.lower(), "U": self.upper()}.get(how, str(self))


class Author(random.Random):
    """A random generator that writes. held_out: only what no training text shows, or only the rest.
    Invariant: no two facts (corpus.py) of one author, between two resets, have the same statement.
    """

    def __init__(self, seed: str, held_out: bool = False) -> None:
        super().__init__(seed)
        self.held_out, self.used_statements = held_out, set[str]()

    def skewed(self, options: Sequence[T], power: float = 0.8) -> T:
        """A Zipf draw: entry k has weight 1 / (k + 1) ** power. So greedy text has favourites."""
        return self.choices(options, _zipf(len(options), power))[0]

    def allows(self, *item: object) -> bool:
        return is_held_out(*item) == self.held_out

    def allowed(self, kind: str, make: Callable[[], T]) -> T:
        """What `make` returns, a value or a tuple of values, as soon as it is on the right side."""
        while True:
            item = make()
            if self.allows(kind, *(item if isinstance(item, tuple) else (item,))):
                return item

    def fill(self, template: str, **given: object) -> str:
        """The template with its slots filled: by what is given, else by `draw`."""
        return template.format_map(_Slots(self, given))

    def draw(self, name: str, **given: object) -> str:
        """One word, name, number or phrase of this kind. `given`: see fill."""
        if name in TABLES["ranges"]:
            return str(self.randint(*TABLES["ranges"][name]))
        if name in TABLES["digits"]:
            return str(self.randint(0, 10 ** self.randint(*TABLES["digits"][name]) - 1))
        if name not in TABLES:
            return getattr(self, name)()
        table = TABLES[name]
        weights = list(table.values()) if isinstance(table, dict) else None
        return self.fill(self.choices(list(table), weights)[0], **given)

    def some(self, letters: Sequence[str], least: int, most: int, between: str = "") -> str:
        return between.join(self.choices(letters, k=self.randint(least, most)))

    # -- what is in no table --

    def made_up(self) -> str:
        """A word of two or three syllables that is in no table ("Bodiga", "Velkor")."""

        def word() -> str:
            syllables = range(self.randint(2, 3))
            return f"{Word(''.join(self.draw('syllable') for _ in syllables)):C}"

        return self.allowed("word", word)

    def any_name(self) -> str:
        """A name of any kind: of some country, put together from two, with a surname, from letters.
        None of the first guesses' names."""
        while True:
            name = self.allowed("name", lambda: self.draw("name_kinds"))
            if not any(part in GUESSES["names"] for part in f"{Word(name):C}".split()):
                return name

    def joined_name(self) -> str:
        """The beginning of one name and the end of another: 'Fernan' + 'elle'."""
        first, second = self.draw("world_names"), self.draw("world_names")
        return first[: self.randint(1, len(first))] + second[self.randint(1, len(second) - 1) :]

    def letters_name(self) -> str:
        parts = ["all_onsets", "all_vowels", "all_codas"] * self.randint(1, 3)
        return f"{Word(''.join(self.draw(part) for part in parts)):C}"

    def accent(self) -> str:
        name = self.draw("world_names")
        index = self.randrange(1, len(name))
        return name[:index] + self.choice(ACCENTS) + name[index + 1 :]

    def chinese_name(self) -> str:
        return self.some(HANZI, 2, 3)

    def common_hanzi(self) -> str:
        return self.some(HANZI, 1, 10)

    def rare_hanzi(self) -> str:
        return self.some(RARE_HANZI, 1, 4)

    def foreign_phrase(self) -> str:
        return self.some(TABLES["foreign_words"], 1, 6, " ")

    def other_script(self) -> str:
        letters = self.draw("other_scripts")
        return " ".join(self.some(letters, 1, 8) for _ in range(self.randint(1, 3)))

    def gibberish(self) -> str:
        return self.some(self.draw("keyboard"), 2, 12)

    def salad(self) -> str:
        return " ".join(self.draw("salad_word") for _ in range(self.randint(2, 9)))


class _Slots(dict[str, Word]):
    def __init__(self, author: Author, given: dict[str, object]) -> None:
        super().__init__({name: Word(value) for name, value in given.items()})
        self.author = author

    def __missing__(self, name: str) -> Word:
        return Word(self.author.draw(name, **self))
