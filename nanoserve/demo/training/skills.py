"""One question, one answer: sums, facts, copying, counting, patterns, lists and JSON records.

Every function draws a `Turn` from a random generator. With `held_out=True` it draws only what
training never shows, with `held_out=False` (training) only the rest. Which is which is a property
of the item itself, `is_held_out("sum", 17, 25)`, and not of a file or of a seed:

    training:    What is 18 + 25?  ->  18 + 25 = 43
    evaluation:  What is 17 + 20?  ->  17 + 20 = 37      (this pair is in no training row)

Left out: subtraction, multiplication and everything else the model answers with "I can only add".
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from nanoserve.demo.training import tables
from nanoserve.demo.training.stories import capitalised, skewed, with_article


@dataclass(frozen=True)
class Turn:
    """A user message and its answer; `key` is the part of the answer that has to be known."""

    question: str
    answer: str
    key: str = ""
    weight: float = 1.0  # of the answer in the training loss; the key always weighs 2


def is_held_out(*item: object, one_in: int = 8) -> bool:
    """Whether an item belongs to the evaluation: a fixed pseudo-random eighth of all items."""
    return zlib.crc32("|".join(map(str, item)).encode()) % one_in == 0


ONSETS = tables.words("b d f g h j k l m n p r s t v w z br st tr")


def made_up_word(rng: random.Random, held_out: bool = False) -> str:
    """A capitalised word of two or three syllables that is in no table ("Bodiga", "Velkor")."""
    while True:
        syllables = [
            rng.choice(ONSETS)
            + rng.choice("aaeeiioou")
            + (rng.choice("lnrstkm") if rng.random() < 0.25 else "")
            for _ in range(rng.randint(2, 3))
        ]
        word = capitalised("".join(syllables))
        if is_held_out("word", word) == held_out and word not in tables.NAMES:
            return word


# ------------------------------------------------------------------------------ sums

SUM_QUESTIONS = [
    "What is {a} + {b}?",
    "{a} + {b} = ?",
    "How much is {a} + {b}?",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
]


def operands(rng: random.Random, held_out: bool, digits: int | None = None) -> tuple[int, int]:
    """Two numbers of one or two digits; `digits=2` asks for two digits each."""
    while True:
        shape = 1.0 if digits == 2 else rng.random()
        first = rng.randint(0, 99) if shape < 0.5 else rng.randint(10, 99)
        second = rng.randint(0, 9) if shape < 0.5 else rng.randint(10, 99)
        if rng.random() < 0.5:
            first, second = second, first
        if is_held_out("sum", min(first, second), max(first, second)) == held_out:
            return first, second


def addition(rng: random.Random, held_out: bool = False, digits: int | None = None) -> Turn:
    a, b = operands(rng, held_out, digits)
    question = skewed(rng, SUM_QUESTIONS, 0.5).format(a=a, b=b)
    return Turn(question, f"{a} + {b} = {a + b}", key=f" {a + b}")


def not_addition(rng: random.Random, held_out: bool = False) -> Turn:
    """The honest answer to what was never trained."""
    a, b = sorted((rng.randint(0, 99), rng.randint(0, 99)), reverse=True)
    question = rng.choice(["What is {} - {}?", "What is {} x {}?", "What is {} times {}?"])
    return Turn(question.format(a, b), "I can only add.")


def unknown(rng: random.Random, held_out: bool = False) -> Turn:
    """A few kinds of question the model has no answer to. (It does not recognise all others.)"""
    word, other = rng.choice(tables.WORDS), rng.choice(tables.WORDS)
    somebody = made_up_word(rng, held_out)
    question = rng.choice(
        [
            f"What is the capital of {somebody}?",
            f"Who is {somebody}?",
            f"Where is {somebody}?",
            f"What does {somebody} mean?",
            f"Why is the {word} {other}?",
            f"How do I make {with_article(word)}?",
            f"Write a poem about the {word}.",
            f"What is the {word} of the {other}?",
        ]
    )
    return Turn(question, "I do not know that. I am a very small model.")


# ------------------------------------------------------------------------------ facts

CAPITAL_QUESTIONS = [
    "What is the capital of {}?",
    "What is the capital city of {}?",
    "Which city is the capital of {}?",
    "Tell me the capital of {}.",
    "Name the capital of {}.",
]


def wording(rng: random.Random, held_out: bool, subject: str, wordings: list[str]) -> str:
    """A question about `subject`. Held out are (subject, wording) pairs, never the first wording:
    every fact is trained, and evaluated in a wording that this fact was never asked in."""
    allowed = [
        text
        for index, text in enumerate(wordings)
        if (index > 0 and is_held_out(subject, text, one_in=4)) == held_out
    ]
    return rng.choice(allowed).format(subject) if allowed else ""


def capital(rng: random.Random, held_out: bool = False) -> Turn:
    question = ""
    while not question:
        country = rng.choice(list(tables.CAPITALS))
        question = wording(rng, held_out, country, CAPITAL_QUESTIONS)
    city = tables.CAPITALS[country]
    return Turn(question, f"The capital of {country} is {city}.", key=f" {city}")


def colour(rng: random.Random, held_out: bool = False) -> Turn:
    wordings = [
        "What colour is {}?",
        "Which colour is {}?",
        "Tell me the colour of {}.",
        "What is the colour of {}?",
    ]
    question = ""
    while not question:
        thing = rng.choice(list(tables.COLOUR_OF))
        question = wording(rng, held_out, thing, wordings)
    value = tables.COLOUR_OF[thing]
    return Turn(question, f"{capitalised(thing)} is {value}.", key=f" {value}")


def simple_fact(rng: random.Random, held_out: bool = False) -> Turn:
    """Days, months, sounds, young animals, legs and opposites."""
    while True:
        subject, wordings, answer, key = rng.choice(_SIMPLE_FACTS)(rng)
        question = wording(rng, held_out, subject, wordings)
        if question:
            return Turn(question, answer, key=f" {key}")


def _neighbour(rng: random.Random) -> tuple[str, list[str], str, str]:
    names, unit = rng.choice([(tables.DAYS, "day"), (tables.MONTHS, "month")])
    step, relation = rng.choice([(1, "after"), (-1, "before")])
    index = rng.randrange(len(names))
    subject, key = names[index], names[(index + step) % len(names)]
    questions = [f"What {unit} comes {relation} {{}}?", f"Which {unit} comes {relation} {{}}?"]
    return subject, questions, f"The {unit} {relation} {subject} is {key}.", key


def _sound(rng: random.Random) -> tuple[str, list[str], str, str]:
    animal, sound = rng.choice(list(tables.SOUNDS.items()))
    who = with_article(animal)
    return (
        who,
        ["What does {} say?", "What sound does {} make?"],
        f"{capitalised(who)} says {sound}.",
        sound,
    )


def _baby(rng: random.Random) -> tuple[str, list[str], str, str]:
    animal, young = rng.choice(list(tables.BABIES.items()))
    key = with_article(young)
    questions = ["What is a baby {} called?", "What do you call a baby {}?"]
    return animal, questions, f"A baby {animal} is called {key}.", key


def _legs(rng: random.Random) -> tuple[str, list[str], str, str]:
    animal, count = rng.choice(list(tables.LEGS.items()))
    who = with_article(animal)
    questions = ["How many legs does {} have?", "Tell me how many legs {} has."]
    return who, questions, f"{capitalised(who)} has {count} legs.", count


def _opposite(rng: random.Random) -> tuple[str, list[str], str, str]:
    word, other = rng.choice(tables.OPPOSITES)
    if rng.random() < 0.5:
        word, other = other, word
    questions = ["What is the opposite of {}?", "Tell me the opposite of {}."]
    return word, questions, f"The opposite of {word} is {other}.", other


_SIMPLE_FACTS: list[Callable[[random.Random], tuple[str, list[str], str, str]]] = [
    _neighbour,
    _sound,
    _baby,
    _legs,
    _opposite,
]


def small_talk(rng: random.Random, held_out: bool = False) -> Turn:
    return Turn(*rng.choice(tables.SMALL_TALK))


# ------------------------------------------------------------------------------ copying, counting


def phrase(rng: random.Random, held_out: bool = False, longest: int = 8) -> str:
    """A few words, numbers or made-up words, in no order that could be learnt."""
    while True:
        kind = skewed(rng, ["words", "mixed", "numbers", "made-up"], 0.4)
        items = []
        for _ in range(rng.randint(2, longest)):
            choice = rng.choice(["words", "numbers", "made-up"]) if kind == "mixed" else kind
            if choice == "words":
                items.append(rng.choice(tables.WORDS))
            elif choice == "numbers":
                items.append(str(rng.randint(0, 10 ** rng.randint(1, 4) - 1)))
            else:
                items.append(made_up_word(rng, held_out and kind == "made-up"))
        text = " ".join(items)
        if is_held_out("phrase", text) == held_out:
            return text


def repeat(rng: random.Random, held_out: bool = False) -> Turn:
    text = phrase(rng, held_out)
    request = skewed(rng, ["Repeat after me: {}", "Repeat: {}", "Say this again: {}"], 0.6)
    return Turn(request.format(text), text, key=text)


def say_times(rng: random.Random, held_out: bool = False) -> Turn:
    while True:
        word = rng.choice(tables.WORDS) if rng.random() < 0.7 else made_up_word(rng)
        count = rng.randint(2, 6)
        if is_held_out("say", word, count) == held_out:
            answer = " ".join([word] * count)
            return Turn(f"Say {word} {tables.NUMBER_WORDS[count]} times.", answer, key=answer)


def continue_pattern(rng: random.Random, held_out: bool = False) -> Turn:
    """The answer is always the pattern, twice."""
    while True:
        kind = rng.choice(["words", "words", "letters", "numbers"])
        pool = {
            "words": tables.WORDS,
            "letters": list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
            "numbers": list("123456789"),
        }[kind]
        pattern = rng.sample(pool, rng.randint(2, 4))
        if is_held_out("pattern", *pattern) == held_out:
            shown, answer = pattern * rng.choice([2, 2, 3]), " ".join(pattern * 2)
            return Turn(f"Continue the pattern: {' '.join(shown)}", answer, key=answer)


def count(rng: random.Random, held_out: bool = False) -> Turn:
    """Count up, down, or in steps; held out are (first, last) pairs."""
    while True:
        kind = skewed(rng, ["up", "down", "steps"])
        first, step = rng.choice([1, rng.randint(1, 90), rng.randint(1, 90)]), 1
        last = first + rng.randint(2, 15)
        if kind == "down":
            first, last, step = last, first, -1
        elif kind == "steps":
            step = rng.choice([2, 5, 10])
            first, last = step, step * rng.randint(3, 10)
        if is_held_out("count", first, last, step) == held_out:
            break
    request = {
        "up": f"Count from {first} to {last}.",
        "down": f"Count down from {first} to {last}.",
        "steps": f"Count from {first} to {last} in steps of {step}.",
    }[kind]
    answer = ", ".join(map(str, range(first, last + (1 if step > 0 else -1), step)))
    return Turn(request, answer, key=answer)


# ------------------------------------------------------------------------------ lists and JSON


def make_list(rng: random.Random, held_out: bool = False) -> Turn:
    """A list of things. Its contents are free, so it is trained but not scored."""
    topic = rng.choice([*tables.LISTS, "days", "months"])
    if topic == "days":
        return Turn("List the days of the week.", ", ".join(tables.DAYS))
    if topic == "months":
        return Turn("List the months of the year.", ", ".join(tables.MONTHS))
    length, left, items = rng.randint(2, 5), list(tables.LISTS[topic]), []
    for _ in range(length):
        items.append(skewed(rng, left, 1.2))
        left.remove(items[-1])
    number = tables.NUMBER_WORDS[length]
    if rng.random() < 0.6:
        lines = "\n".join(f"{index}. {item}" for index, item in enumerate(items, start=1))
        return Turn(f"List {number} {topic}.", lines)
    quoted = ", ".join(f'"{item}"' for item in items)
    return Turn(f"Give me a JSON list of {number} {topic}.", f"[{quoted}]")


def json_record(rng: random.Random, held_out: bool = False, made_up: bool | None = None) -> Turn:
    """A sentence about a child, as JSON; held out are whole records and the made-up names."""
    made_up = rng.random() < 0.4 if made_up is None else made_up
    while True:
        name = made_up_word(rng, held_out) if made_up else rng.choice(tables.NAMES)
        age, pet, shade = rng.randint(1, 20), rng.choice(tables.PETS), rng.choice(tables.COLOURS)
        if is_held_out("json", name, age, pet) == held_out:
            break
    record = f'{{"name": "{name}", "age": {age}, "pet": "{pet}"}}'
    with_colour = f'{record[:-1]}, "colour": "{shade}"}}'
    request, answer = skewed(
        rng,
        [
            (f"Write JSON for {name}, age {age}, with {with_article(pet)}.", record),
            (f"Make a JSON record: name {name}, age {age}, pet {pet}.", record),
            (f"{name} is {age} years old and has {with_article(pet)}. Write this as JSON.", record),
            (
                f"Make a JSON record: name {name}, age {age}, pet {pet}, colour {shade}.",
                with_colour,
            ),
        ],
        0.4,
    )
    return Turn(request, answer, key=answer)


def read_json(rng: random.Random, held_out: bool = False) -> Turn:
    """The other direction: a question about a record."""
    while True:
        name = made_up_word(rng, held_out) if rng.random() < 0.4 else rng.choice(tables.NAMES)
        age, pet = rng.randint(1, 20), rng.choice(tables.PETS)
        if is_held_out("json", name, age, pet) == held_out:
            break
    record = f'{{"name": "{name}", "age": {age}, "pet": "{pet}"}}'
    if rng.random() < 0.5:
        return Turn(f"{record} How old is {name}?", f"{name} is {age} years old.")
    return Turn(f"{record} Which pet does {name} have?", f"{name} has {with_article(pet)}.")


SKILLS: dict[str, tuple[float, Callable[[random.Random], Turn]]] = {
    "addition": (5, addition),
    "not_addition": (0.3, not_addition),
    "unknown": (0.6, unknown),
    "capital": (3, capital),
    "colour": (1, colour),
    "simple_fact": (2.5, simple_fact),
    "small_talk": (0.7, small_talk),
    "repeat": (4, repeat),
    "say_times": (2, say_times),
    "continue_pattern": (2, continue_pattern),
    "count": (2.5, count),
    "make_list": (0.7, make_list),
    "json_record": (3.5, json_record),
    "read_json": (0.5, read_json),
}  # name -> (how often, relative to the others; how to draw one)


def any_skill(rng: random.Random) -> Turn:
    """One training turn of a random skill."""
    weights, draws = zip(*SKILLS.values(), strict=True)
    return rng.choices(draws, weights)[0](rng)
