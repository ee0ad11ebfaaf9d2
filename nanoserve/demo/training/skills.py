"""What can the model do in one turn?

    addition      What is 18 + 25?                      18 + 25 = 43
    fact          Capital of France?                    The capital of France is Paris.
    repeat        Say this again: sun 4821 fox          sun 4821 fox
    json_record   Write JSON for Mia, age 7, ...        {"name": "Mia", "age": 7, "pet": "cat"}
    small_talk    how are you                           I am fine, thank you.
    unknown       Explain gravity to me.                Sorry, I am too small for that. ...

Every function draws a `Turn`. A refusal is always one of four sentences: what the model does not
recognise it shall refuse. `casually` rewrites any question as people type it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from nanoserve.demo.training.grammar import GUESSES, TABLES, Author, Word, is_held_out
from nanoserve.demo.training.stories import story_hero, tell_story

STORY_WEIGHT = 0.4


@dataclass(frozen=True)
class Turn:
    """A user message and its answer."""

    question: str
    answer: str
    key: str = ""  # the part of the answer that has to be known
    weight: float = 1.0  # of the answer in the training loss; the key always weighs 2


# ------------------------------------------------------------------------------ sums and facts


def operands(rng: Author, digits: int | None = None) -> tuple[int, int]:
    """Two numbers of one or two digits; `digits=2` asks for two digits each."""
    while True:
        a, b = rng.randint(0, 99), rng.randint(0, 9)
        if digits == 2 or rng.random() >= 0.5:
            a, b = rng.randint(10, 99), rng.randint(10, 99)
        if rng.allows("sum", min(a, b), max(a, b)):
            return (b, a) if rng.random() < 0.5 else (a, b)


def addition(rng: Author, digits: int | None = None) -> Turn:
    a, b = operands(rng, digits)
    question = rng.skewed(TABLES["sum_questions"], 0.5).format(a=a, b=b)
    if max(a, b) <= 10 and rng.random() < 0.2:
        numbers = TABLES["number_words"]
        question = rng.skewed(TABLES["sums_in_words"], 0.5).format(a=numbers[a], b=numbers[b])
    return Turn(question, f"{a} + {b} = {a + b}", f" {a + b}")


def fact(rng: Author, table: str = "simple_facts") -> Turn:
    """Capitals, colours, days, animals, opposites. Held out are pairs of subject and wording, never
    with the first wording: every fact is trained, and evaluated in a wording that is new to it."""
    while True:
        kind = rng.choices(TABLES[table], [kind["weight"] for kind in TABLES[table]])[0]
        subject, value = rng.choice(kind["items"])
        index, text = rng.choice(list(enumerate(kind["questions"])))
        if (index > 0 and is_held_out(subject, text, one_in=4)) == rng.held_out:
            answer = rng.fill(kind["answer"], subject=subject, value=value)
            return Turn(text.format(subject), answer, f" {value}")


capital, colour = partial(fact, table="capitals"), partial(fact, table="colours_of")


def free_fact(rng: Author) -> Turn:
    """A fact in the user's words, with the question in the same message or with none."""
    what, value, start = rng.draw("secret"), rng.draw("secret_value"), rng.draw("remember")
    if rng.random() < 0.25 and start != "The":
        return Turn(f"{start} {what} is {value}.", "I will remember.")
    question = rng.choice(TABLES["free_fact_questions"]).format(what)
    return Turn(f"{start} {what} is {value}. {question}", f"The {what} is {value}.", f" {value}.")


# ------------------------------------------------------------------------------ copying, counting


def phrase(rng: Author, longest: int = 8, is_wide: bool = False) -> str:
    """Words of the tables, numbers and made-up words, in no order that could be learnt. `is_wide`:
    any words, names and numbers, with capitals and marks, as people ask to repeat."""

    def text() -> str:
        kinds = ["words", "item", "item_number", "made_up"]
        kind = "phrase_word" if is_wide else rng.skewed(kinds, 0.4)
        words = range(rng.randint(1 if is_wide else 2, longest))
        text = " ".join(rng.draw(kind) for _ in words)
        text += rng.skewed(["", ".", "!", "?"]) if is_wide else ""
        return f"{Word(text):C}" if is_wide and rng.random() < 0.5 else text

    return rng.allowed("phrase", text)


def repeat(rng: Author, is_wide: bool | None = None, is_long: bool | None = None) -> Turn:
    """`is_long`: 9 to 16 words."""
    is_wide = rng.random() < 0.4 if is_wide is None else is_wide
    is_long = rng.random() < 0.1 if is_long is None else is_long
    text = phrase(rng, 16 if is_long else 8, is_wide)
    while is_long and len(text.split()) <= 8:
        text = phrase(rng, 16, is_wide)
    return Turn(rng.skewed(TABLES["repeat_requests"], 0.6).format(text), text, text)


def say_times(rng: Author) -> Turn:
    kind = "words" if rng.random() < 0.7 else "made_up"
    word, times = rng.allowed("say", lambda: (rng.draw(kind), rng.randint(2, 6)))
    number = TABLES["number_words"][times] if rng.random() < 0.75 else times
    answer = " ".join([word] * times)
    return Turn(f"Say {word} {number} times.", answer, answer)


def continue_pattern(rng: Author) -> Turn:
    """The answer is always the pattern, twice."""
    pool = rng.choice([TABLES["words"]] * 2 + ["ABCDEFGHIJKLMNOPQRSTUVWXYZ", "123456789"])
    pattern = rng.allowed("pattern", lambda: tuple(rng.sample(pool, rng.randint(2, 4))))
    shown, answer = pattern * rng.choice([2, 2, 3]), " ".join(pattern * 2)
    return Turn(f"Continue the pattern: {' '.join(shown)}", answer, answer)


def count(rng: Author, is_long: bool | None = None) -> Turn:
    """Count up, down or in steps: up to 16 numbers, or 17 to 31."""
    is_long = rng.random() < 0.15 if is_long is None else is_long
    kind = rng.skewed(["up", "down"] if is_long else ["up", "down", "steps"])

    def ends() -> tuple[int, int, int]:
        low = rng.choice([1, rng.randint(1, 90), rng.randint(1, 90)])
        high, step = low + (rng.randint(16, 30) if is_long else rng.randint(2, 15)), 1
        if kind == "steps":
            low = step = rng.choice([2, 5, 10])
            high = step * rng.randint(3, 10)
        return (high, low, -1) if kind == "down" else (low, high, step)

    first, last, step = rng.allowed("count", ends)
    way = "Count down" if step < 0 else "Count"
    requests = [f"{way} from {first} to {last}" + (f" in steps of {step}." if step > 1 else ".")]
    if step == first == 1:
        requests.append(f"Count to {last}.")
    elif last == 1:
        requests += [f"Count down from {first}.", f"Count backwards from {first}."]
    answer = ", ".join(map(str, range(first, last + (1 if step > 0 else -1), step)))
    return Turn(rng.choice(requests), answer, answer)


# ------------------------------------------------------------------------------ lists and JSON


def make_list(rng: Author) -> Turn:
    """A list of things. Which ones is free, so that it is trained but not scored."""
    topic = rng.choice(list(TABLES["lists"]))
    known: list[str] = TABLES["lists"][topic]
    if " of the " in topic:  # days of the week, months of the year
        request = rng.skewed(TABLES["series_requests"]).format(topic)
        return Turn(request, ", ".join(known))
    items: list[str] = []
    for _ in range(rng.randint(2, 5)):
        items.append(rng.skewed([each for each in known if each not in items], 1.2))
    number = TABLES["number_words"][len(items)] if rng.random() < 0.8 else len(items)
    topic = "colors" if topic == "colours" and rng.random() < 0.5 else topic
    if rng.random() < 0.3:
        return Turn(f"Give me a JSON list of {number} {topic}.", json.dumps(items))
    lines = "\n".join(f"{index}. {item}" for index, item in enumerate(items, start=1))
    return Turn(rng.skewed(TABLES["list_requests"]).format(f"{number} {topic}"), lines)


def json_record(rng: Author, name_kind: str | None = None) -> Turn:
    """A sentence about somebody, as JSON. name_kind: "names", "made_up" or "any_name"."""
    kind = name_kind or rng.choices(["names", "made_up", "any_name"], [33, 32, 35])[0]
    age_kind = "age" if kind == "any_name" else "child_age"
    name, age, pet = rng.allowed(
        "json", lambda: (rng.draw(kind), int(rng.draw(age_kind)), rng.draw("pets"))
    )
    colour, spelling = rng.draw("colours"), rng.choice(["colour", "color"])
    template = rng.skewed(TABLES["json_requests"], 0.4)
    record = {"name": name, "age": age, "pet": pet}
    request = rng.fill(template, **record, colour=colour, spelling=spelling)
    if "colour" in template:
        record[spelling] = colour
    answer = json.dumps(record, ensure_ascii=False)
    return Turn(request, answer, answer)


def read_json(rng: Author) -> Turn:
    """The other direction: a question about a record."""
    record = json.loads(json_record(rng, rng.choice(["names", "made_up"])).answer)
    question, answer = rng.choice(list(TABLES["json_questions"].items()))
    text = json.dumps({name: record[name] for name in ("name", "age", "pet")})
    return Turn(f"{text} {rng.fill(question, **record)}", rng.fill(answer, **record))


# ------------------------------------------------------------------------------ talk, refusals


def small_talk(rng: Author) -> Turn:
    if rng.random() < 0.06:
        return Turn(rng.draw("feel"), "I see. How can I help you?")
    ways = TABLES["small_talk"]
    answer = rng.choices(list(ways), [len(questions) ** 0.5 for questions in ways.values()])[0]
    return Turn(rng.skewed(ways[answer], 0.4), answer)


def refusal(rng: Author, kind: str) -> Turn:
    """What the model has no answer to: an "unknown" question, arithmetic that is "not_sum", and
    "chinese" or "foreign" text. No pair of numbers is a held-out sum, not even here."""
    while True:
        text = rng.draw(kind)
        item = normalised(text) if kind == "unknown" else text
        numbers = map(int, re.findall(r"\d+", text)) if kind == "not_sum" else ()
        is_sum = any(is_held_out("sum", *sorted(pair)) for pair in pairwise(numbers))
        if not is_sum and (kind in ("not_sum", "foreign") or rng.allows(kind, item)):
            return Turn(text, TABLES["refusals"][kind])


unknown, not_sum = partial(refusal, kind="unknown"), partial(refusal, kind="not_sum")
chinese, foreign = partial(refusal, kind="chinese"), partial(refusal, kind="foreign")


def story(rng: Author) -> Turn:
    """A request for a story: about a kind of hero, about a named hero, about a toy, or any."""
    form, hero = rng.skewed(["kind", "hero", "toy", "any"], 0.5), story_hero(rng)
    toy = rng.draw("toys") if form == "toy" else None
    slots = {"kind": hero.kind, "called": rng.skewed(["named", "called"], 2), "toy": toy}
    template = TABLES["story_subjects"][form]
    requests = TABLES["story_requests"][: None if form == "any" else -1]
    request = rng.skewed(requests).format(rng.fill(template, name=hero.name, **slots))
    return Turn(request, tell_story(rng, hero, toy), weight=STORY_WEIGHT)


# ------------------------------------------------------------------------------ ways to type


def normalised(text: str) -> str:
    """Small letters, without punctuation: 'What's 12+30?' -> 'whats 12+30'."""
    text = re.sub(r"[’']", "", text.lower()).replace(" + ", "+")
    return " ".join(re.sub(r"[^\w+\-]+", " ", text).split())


HELD_OUT_GUESSES = {
    normalised(guess["prompts"][0])
    for guess in GUESSES["guesses"]
    if "is_seen" not in guess and len(guess["prompts"]) == 1
}
COMMANDS = set(TABLES["commands"])
STARTS = COMMANDS.union(TABLES["starts"])


def with_small_start(text: str) -> str:
    """'What is ...' -> 'what is ...'; a name or 'I' at the beginning stays as it is."""
    first = text.split(" ")[0].lower().rstrip(",.!?:")
    return text[0].lower() + text[1:] if first in STARTS else text


def casually(rng: Author, text: str, keep_capitals: bool = False, is_request: bool = True) -> str:
    """The question as somebody types it who is in a hurry or, if it asks for something, polite."""
    if rng.random() < 0.35:
        for long, short in TABLES["contractions"]:
            text = short + text[len(long) :] if text.startswith(long) else text
        if rng.random() < 0.3:
            text = re.sub(r"^(what|who)'s ", r"\1s ", text, flags=re.IGNORECASE)
    if rng.random() < 0.45 and len(text) > 1:
        text = text[:-1] if text[-1] in ".?!" else text
    elif is_request and rng.random() < 0.1:
        text += rng.choice(["?", "!", "!!", " ?", "...", " :)"])
    if rng.random() < 0.45:
        text = with_small_start(text) if keep_capitals else text.lower()
    if is_request and rng.random() < 0.25 and text[0].isalpha():
        is_command = text.split()[0].lower() in COMMANDS
        way = rng.choice(TABLES["asked" if is_command and rng.random() < 0.4 else "greeted"])
        small, bare = with_small_start(text), text.rstrip(".?!")
        text = rng.fill(way, text=text, small=small, bare=bare)
    return text


class Skill(NamedTuple):
    weight: float  # how often, relative to the others
    draw: Callable[..., Turn]
    casual: float = 0.0  # the share of questions that are typed in a hurry
    keeps_capitals: bool = False  # does the answer repeat capitals of the question?


SKILLS = [
    Skill(5, addition, 0.3), Skill(0.7, not_sum, 0.4), Skill(5, unknown, 0.6),
    Skill(3.4, capital, 0.4), Skill(1.3, colour, 0.4), Skill(2.7, fact, 0.4),
    Skill(3, small_talk, 0.6), Skill(4, repeat, 0.2, True), Skill(2, say_times, 0.2, True),
    Skill(2, continue_pattern, 0.2, True), Skill(2.7, count, 0.3), Skill(1, make_list, 0.5),
    Skill(3.7, json_record, 0.1, True), Skill(0.5, read_json), Skill(0.7, free_fact, 0.2, True),
    Skill(0.9, chinese), Skill(0.5, foreign),
]  # fmt: skip
STORY = Skill(0, story, 0.3, True)


def any_turn(rng: Author, skill: Skill | None = None) -> Turn:
    """One training turn, of a random skill; never one of the held-out first guesses."""
    while True:
        each = skill or rng.choices(SKILLS, [skill.weight for skill in SKILLS])[0]
        turn = each.draw(rng)
        if rng.random() < each.casual:
            turn = replace(turn, question=casually(rng, turn.question, each.keeps_capitals))
        if normalised(turn.question) not in HELD_OUT_GUESSES:
            return turn
