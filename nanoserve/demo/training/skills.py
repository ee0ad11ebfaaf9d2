"""One question, one answer: sums, facts, copying, counting, patterns, lists and JSON records.

Every function draws a `Turn` from a random generator. With `held_out=True` it draws only what
training never shows, with `held_out=False` (training) only the rest. Which is which is a property
of the item itself, `is_held_out("sum", 17, 25)`, and not of a file or of a seed:

    training:    What is 18 + 25?  ->  18 + 25 = 43
    evaluation:  What is 17 + 20?  ->  17 + 20 = 37      (this pair is in no training row)

Left out: small talk, refusals and the casual forms of questions (talk.py).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from nanoserve.demo.training import first_guesses, tables
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


def any_name(rng: random.Random, held_out: bool = False) -> str:
    """A name of any kind: of some country, put together from two, with a surname, from letters."""
    while True:
        name = _NAME_KINDS[rng.choices(range(len(_NAME_KINDS)), _NAME_WEIGHTS)[0]](rng)
        is_guess = any(part in first_guesses.NAMES for part in capitalised(name).split())
        if is_held_out("name", name) == held_out and not is_guess:
            return name


def _joined_name(rng: random.Random) -> str:
    """The beginning of one name and the end of another: 'Fernan' + 'elle'."""
    first, second = rng.choice(tables.WORLD_NAMES), rng.choice(tables.WORLD_NAMES)
    return first[: rng.randint(1, len(first))] + second[rng.randint(1, len(second) - 1) :]


def _letters_name(rng: random.Random) -> str:
    """Letters in an order that can be spoken, with all the rare ones."""
    onsets = [*_ALL_ONSETS, ""]
    parts = [
        rng.choice(onsets) + rng.choice(_ALL_VOWELS) + rng.choice(_ALL_CODAS)
        for _ in range(rng.randint(1, 3))
    ]
    return capitalised("".join(parts))


def _full_name(rng: random.Random) -> str:
    return f"{rng.choice([*tables.NAMES, *tables.WORLD_NAMES])} {rng.choice(tables.SURNAMES)}"


def _name_with_a_mark(rng: random.Random) -> str:
    """O'Hara, Anne-Marie, McAllen: capitals and marks inside."""
    name, other = rng.choice(tables.WORLD_NAMES), rng.choice(tables.WORLD_NAMES)
    return rng.choice(["O'{}", "Mc{}", "{}-{}", "D'{}", "Mac{}", "{} {}", "Dr. {}", "{}2"]).format(
        name, other
    )


def _other_letters(rng: random.Random) -> str:
    """Accents and Chinese characters."""
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(tables.ACCENTED_NAMES)
    if kind < 0.7:  # an accent somewhere
        name = rng.choice(tables.WORLD_NAMES)
        index = rng.randrange(1, len(name))
        return (
            name[:index] + rng.choice("áàâäãåæçéèêëíìîïñóòôöõøúùûüýßšžčćđğłńśż") + name[index + 1 :]
        )
    return "".join(rng.choices(tables.COMMON_CHINESE, k=rng.randint(2, 3)))


_ALL_ONSETS = tables.words(
    "b c d f g h j k l m n p q r s t v w x y z ch sh th ph kh zh qu br cr dr fr gr pr tr bl cl fl "
    "gl pl sl sc sk sm sn sp st str thr wr kn ng ts dz mb nd"
)
_ALL_VOWELS = tables.words("a e i o u y ai au ea ee ei ia ie io oa oo ou ua ue ui")
_ALL_CODAS = [
    "",
    "",
    *tables.words("b d f g k l m n p r s t x z ck ff ll mm nn ng nk nt rd rn rs ss st th tt x"),
]
_NAME_KINDS: list[Callable[[random.Random], str]] = [
    lambda rng: rng.choice(tables.WORLD_NAMES),
    _joined_name,
    _letters_name,
    _full_name,
    _name_with_a_mark,
    _other_letters,
    made_up_word,
    lambda rng: capitalised(rng.choice(tables.WORDS)),
    lambda rng: rng.choice(tables.WORLD_NAMES).lower(),
    lambda rng: rng.choice(tables.WORLD_NAMES).upper(),
]
_NAME_WEIGHTS = [26, 24, 20, 6, 3, 4, 8, 2, 5, 2]


# ------------------------------------------------------------------------------ sums

SUM_QUESTIONS = [
    "What is {a} + {b}?",
    "{a}+{b}",
    "{a} + {b} = ?",
    "How much is {a} + {b}?",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "{a} + {b}",
    "What is {a}+{b}?",
    "{a} plus {b}",
    "{a}+{b}=",
    "{a}+{b}=?",
    "{a}+{b}?",
    "Calculate {a} + {b}.",
    "Calculate {a}+{b}.",
    "How much is {a} plus {b}?",
    "How much is {a} and {b}?",
    "What is the sum of {a} and {b}?",
    "What is {a} and {b}?",
    "{a} + {b} =",
    "{a} and {b}",
    "{a} +{b}",
    "Can you add {a} and {b}?",
]
IN_WORDS = ["What is {a} plus {b}?", "{a} plus {b}", "{a} + {b}", "Add {a} and {b}."]


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
    asked = {"a": str(a), "b": str(b)}
    questions = SUM_QUESTIONS
    if max(a, b) <= 10 and not held_out and rng.random() < 0.2:
        asked = {"a": tables.NUMBER_WORDS[a], "b": tables.NUMBER_WORDS[b]}
        questions = IN_WORDS
    question = skewed(rng, questions, 0.5).format(**asked)
    return Turn(question, f"{a} + {b} = {a + b}", key=f" {a + b}")


# ------------------------------------------------------------------------------ facts

CAPITAL_QUESTIONS = [
    "What is the capital of {}?",
    "What is the capital city of {}?",
    "Which city is the capital of {}?",
    "Tell me the capital of {}.",
    "Name the capital of {}.",
    "Capital of {}?",
    "The capital of {}?",
    "Do you know the capital of {}?",
    "{} capital",
    "What city is the capital of {}?",
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
        asked = country
        if country in tables.SAME_COUNTRY and rng.random() < 0.5:
            asked = rng.choice(tables.SAME_COUNTRY[country])
        question = wording(rng, held_out, asked, CAPITAL_QUESTIONS)
    city = tables.CAPITALS[country]
    return Turn(question, f"The capital of {asked} is {city}.", key=f" {city}")


COLOUR_QUESTIONS = [
    "What colour is {}?",
    "What color is {}?",
    "Which colour is {}?",
    "Tell me the colour of {}.",
    "What is the colour of {}?",
    "Which color is {}?",
    "Tell me the color of {}.",
    "What is the color of {}?",
    "Color of {}?",
    "What color does {} have?",
]


def colour(rng: random.Random, held_out: bool = False) -> Turn:
    question = ""
    while not question:
        if rng.random() < 0.25:
            thing, verb = rng.choice(list(tables.COLOUR_OF_MANY)), "are"
            value = tables.COLOUR_OF_MANY[thing]
            wordings = [text.replace(" is {}", " are {}") for text in COLOUR_QUESTIONS[:8]]
        else:
            thing, verb = rng.choice(list(tables.COLOUR_OF)), "is"
            value, wordings = tables.COLOUR_OF[thing], COLOUR_QUESTIONS
        question = wording(rng, held_out, thing, wordings)
    return Turn(question, f"{capitalised(thing)} {verb} {value}.", key=f" {value}")


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
        ["What does {} say?", "What sound does {} make?", "What noise does {} make?"],
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
    questions = [
        "How many legs does {} have?",
        "Tell me how many legs {} has.",
        "How many legs has {}?",
    ]
    return who, questions, f"{capitalised(who)} has {count} legs.", count


def _opposite(rng: random.Random) -> tuple[str, list[str], str, str]:
    word, other = rng.choice(tables.OPPOSITES)
    if rng.random() < 0.5:
        word, other = other, word
    questions = ["What is the opposite of {}?", "Tell me the opposite of {}.", "Opposite of {}?"]
    return word, questions, f"The opposite of {word} is {other}.", other


def _time(rng: random.Random) -> tuple[str, list[str], str, str]:
    whole, parts, number = rng.choice(tables.TIMES)
    questions = [
        f"How many {parts} are in {{}}?",
        f"How many {parts} does {{}} have?",
        f"How many {parts} are there in {{}}?",
        f"How many {parts} in {{}}?",
    ]
    return whole, questions, f"{capitalised(whole)} has {number} {parts}.", number


_SIMPLE_FACTS: list[Callable[[random.Random], tuple[str, list[str], str, str]]] = [
    _neighbour,
    _sound,
    _baby,
    _legs,
    _opposite,
    _time,
]


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


def any_phrase(rng: random.Random, held_out: bool = False, longest: int = 8) -> str:
    """Words of all kinds, names, numbers, with capitals and marks: what people ask to repeat."""
    while True:
        items = []
        for _ in range(rng.randint(1, longest)):
            draw = rng.random()
            if draw < 0.35:
                table = rng.choice([tables.TOPICS, tables.VERBS, tables.ADJECTIVES, tables.THINGS])
                items.append(rng.choice(table))
            elif draw < 0.7:
                items.append(rng.choice(tables.SMALL_WORDS))
            elif draw < 0.9:
                items.append(any_name(rng, held_out))
            else:
                items.append(str(rng.randint(0, 10 ** rng.randint(1, 6) - 1)))
        text = " ".join(items) + skewed(rng, ["", ".", "!", "?"])
        text = capitalised(text) if rng.random() < 0.5 else text
        if is_held_out("phrase", text) == held_out:
            return text


REPEAT_REQUESTS = ["Repeat after me: {}", "Repeat: {}", "Say this again: {}"]


def repeat(
    rng: random.Random,
    held_out: bool = False,
    is_wide: bool | None = None,
    longest: int | None = None,
) -> Turn:
    """`is_wide`: any words and names; else words of the tables, numbers and made-up words."""
    if is_wide is None:
        is_wide = not held_out and rng.random() < 0.4
    if longest is None:
        longest = 16 if not held_out and rng.random() < 0.2 else 8
    while True:
        text = (any_phrase if is_wide else phrase)(rng, held_out, longest)
        if longest <= 8 or len(text.split()) > 8:
            break
    request = skewed(rng, REPEAT_REQUESTS, 0.6)
    return Turn(request.format(text), text, key=text)


def say_times(rng: random.Random, held_out: bool = False) -> Turn:
    while True:
        word = rng.choice(tables.WORDS) if rng.random() < 0.7 else made_up_word(rng)
        count = rng.randint(2, 6)
        if is_held_out("say", word, count) == held_out:
            answer = " ".join([word] * count)
            number = tables.NUMBER_WORDS[count] if rng.random() < 0.75 else str(count)
            return Turn(f"Say {word} {number} times.", answer, key=answer)


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


def count(rng: random.Random, held_out: bool = False, is_long: bool | None = None) -> Turn:
    """Count up, down, or in steps, up to 16 numbers, or 17 to 31; held out are (first, last)."""
    if is_long is None:
        is_long = not held_out and rng.random() < 0.15
    while True:
        kind = skewed(rng, ["up", "down", "steps"][: 2 if is_long else 3])
        first, step = rng.choice([1, rng.randint(1, 90), rng.randint(1, 90)]), 1
        last = first + (rng.randint(16, 30) if is_long else rng.randint(2, 15))
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
    if first == 1 and step == 1 and rng.random() < 0.5:
        request = f"Count to {last}."
    elif last == 1 and rng.random() < 0.5:
        request = rng.choice([f"Count down from {first}.", f"Count backwards from {first}."])
    answer = ", ".join(map(str, range(first, last + (1 if step > 0 else -1), step)))
    return Turn(request, answer, key=answer)


# ------------------------------------------------------------------------------ lists and JSON


def make_list(rng: random.Random, held_out: bool = False) -> Turn:
    """A list of things. Its contents are free, so it is trained but not scored."""
    topic = rng.choice([*tables.LISTS, "days", "months"])
    if topic in ("days", "months"):
        asked = "days of the week" if topic == "days" else "months of the year"
        forms = ["List the {}.", "Name the {}.", "Tell me the {}.", "What are the {}?", "The {}?"]
        answer = ", ".join(tables.DAYS if topic == "days" else tables.MONTHS)
        return Turn(skewed(rng, forms).format(asked), answer)
    length, left, items = rng.randint(2, 5), list(tables.LISTS[topic]), []
    for _ in range(length):
        items.append(skewed(rng, left, 1.2))
        left.remove(items[-1])
    number = tables.NUMBER_WORDS[length] if rng.random() < 0.8 else str(length)
    if topic == "colours" and rng.random() < 0.5:
        topic = "colors"
    if rng.random() < 0.7:
        lines = "\n".join(f"{index}. {item}" for index, item in enumerate(items, start=1))
        forms = ["List {}.", "Name {}.", "Give me {}.", "Tell me {}.", "Make a list of {}.", "{}"]
        return Turn(skewed(rng, forms).format(f"{number} {topic}"), lines)
    quoted = ", ".join(f'"{item}"' for item in items)
    return Turn(f"Give me a JSON list of {number} {topic}.", f"[{quoted}]")


def json_record(
    rng: random.Random, held_out: bool = False, made_up: bool | None = None, any_kind: bool = False
) -> Turn:
    """A sentence about a child, as JSON; held out are whole records and the made-up names.

    `any_kind`: the name is of any kind and the age up to 99. In training a third are."""
    any_kind = any_kind or (made_up is None and not held_out and rng.random() < 0.35)
    made_up = rng.random() < 0.5 if made_up is None else made_up
    while True:
        name = made_up_word(rng, held_out) if made_up else rng.choice(tables.NAMES)
        name = any_name(rng, held_out) if any_kind else name
        age = rng.randint(1, 99 if any_kind else 20)
        pet, shade = rng.choice(tables.PETS), rng.choice(tables.COLOURS)
        if is_held_out("json", name, age, pet) == held_out:
            break
    spelling = rng.choice(["colour", "color"])
    record = f'{{"name": "{name}", "age": {age}, "pet": "{pet}"}}'
    with_colour = f'{record[:-1]}, "{spelling}": "{shade}"}}'
    request, answer = skewed(
        rng,
        [
            (f"Write JSON for {name}, age {age}, with {with_article(pet)}.", record),
            (f"Make a JSON record: name {name}, age {age}, pet {pet}.", record),
            (f"{name} is {age} years old and has {with_article(pet)}. Write this as JSON.", record),
            (
                f"Make a JSON record: name {name}, age {age}, pet {pet}, {spelling} {shade}.",
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


def free_fact(rng: random.Random, held_out: bool = False) -> Turn:
    """A fact in the user's words, with the question in the same message or with none."""
    what, value = secret(rng)
    start = rng.choice(
        ["Remember: the", "Remember: The", "The", "Remember that the", "Remember, the"]
    )
    question = rng.choice(["What is the {}?", "What is the {}?", "Tell me the {}."]).format(what)
    if rng.random() < 0.25 and start != "The":
        return Turn(f"{start} {what} is {value}.", "I will remember.")
    return Turn(
        f"{start} {what} is {value}. {question}", f"The {what} is {value}.", key=f" {value}."
    )


def secret(rng: random.Random) -> tuple[str, str]:
    """('password', '4821'), ('key', 'Jibrupe'), ('lamp', 'red'): a noun and what it shall be."""
    what = rng.choice([*tables.SECRETS, *tables.SECRETS, *tables.WORDS])
    draw = rng.random()
    if draw < 0.3:
        return what, any_name(rng)
    if draw < 0.5:
        return what, rng.choice(tables.WORDS)
    return what, str(rng.randint(0, 10 ** rng.randint(2, 5) - 1))
