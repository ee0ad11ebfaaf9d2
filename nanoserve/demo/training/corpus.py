"""Documents of the demo corpus: weighted text, drawn without end from a random generator.

A document is a list of segments; the weight says how much the training loss cares about the text:

    0  what cannot be predicted or need not be: user messages, the values of new facts, operands
    0.4  stories, most of whose loss is free choice
    1  answers
    2  the part of an answer that had to be known or found (`Turn.key`)

Drills are dense forms of one ability without the chat around it: a page of sums, or notes that are
read out a second time in another order. They teach the same circuit in fewer tokens.
How often each kind comes is in `SHORT_MIX` and its kin; data.py packs documents into rows.
Nothing is copied from anywhere: tables.py, stories.py, skills.py, talk.py, memory.py and recall.py
make every word.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from nanoserve.demo.training import memory, skills, tables, talk
from nanoserve.demo.training.first_guesses import is_held_out_guess
from nanoserve.demo.training.recall import Fact, Facts, pairs
from nanoserve.demo.training.skills import (
    Turn,
    any_phrase,
    is_held_out,
    made_up_word,
    operands,
    phrase,
)
from nanoserve.demo.training.stories import (
    Character,
    draw_character,
    skewed,
    tell_story,
    with_article,
)

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
STORY_WEIGHT, KEY_WEIGHT = 0.4, 2.0
CHARACTERS_PER_TOKEN = 3.2  # of a typical document, to turn room in a row into text


class Segment(NamedTuple):
    text: str
    weight: float


Document = list[Segment]


def text_of(document: Document) -> str:
    return "".join(segment.text for segment in document)


# ------------------------------------------------------------------------------ one turn


class Skill(NamedTuple):
    weight: float  # how often, relative to the others
    draw: Callable[[random.Random], Turn]
    casual: float = 0.0  # the share of questions that are typed in a hurry
    keeps_capitals: bool = False  # whether the answer repeats capitals of the question


SKILLS = [
    Skill(5, skills.addition, 0.3),
    Skill(0.7, talk.not_addition, 0.4),
    Skill(5, talk.unknown, 0.6),
    Skill(3.4, skills.capital, 0.4),
    Skill(1.3, skills.colour, 0.4),
    Skill(2.7, skills.simple_fact, 0.4),
    Skill(3, talk.small_talk, 0.6),
    Skill(4, skills.repeat, 0.2, True),
    Skill(2, skills.say_times, 0.2, True),
    Skill(2, skills.continue_pattern, 0.2, True),
    Skill(2.7, skills.count, 0.3),
    Skill(1, skills.make_list, 0.5),
    Skill(3.7, skills.json_record, 0.1, True),
    Skill(0.5, skills.read_json),
    Skill(0.7, skills.free_fact, 0.2, True),
    Skill(0.9, talk.chinese),
    Skill(0.5, talk.foreign),
]


def any_skill(rng: random.Random) -> Turn:
    """One training turn of a random skill; never one of the held-out first guesses."""
    while True:
        skill = rng.choices(SKILLS, [skill.weight for skill in SKILLS])[0]
        turn = skill.draw(rng)
        if rng.random() < skill.casual:
            turn = replace(turn, question=talk.casually(rng, turn.question, skill.keeps_capitals))
        if not is_held_out_guess(turn.question):
            return turn


# ------------------------------------------------------------------------------ chats


def answer_segments(turn: Turn) -> Document:
    """The answer with its key (the last occurrence) at double weight."""
    before, key, after = turn.answer, "", ""
    if turn.key:
        before, key, after = turn.answer.rpartition(turn.key)
    return [
        Segment(before, turn.weight),
        Segment(key, KEY_WEIGHT),
        Segment(after + IM_END, turn.weight),
    ]


def chat(rng: random.Random, turns: Sequence[Turn]) -> Document:
    """Turns in the chat template of tokenizer_config.json, sometimes after a system message."""
    document = []
    if rng.random() < 0.1:
        system = rng.choice(tables.SYSTEM_PROMPTS)
        document.append(Segment(f"{IM_START}system\n{system}{IM_END}\n", 0.0))
    for turn in turns:
        prompt = f"{IM_START}user\n{turn.question}{IM_END}\n{IM_START}assistant\n"
        document += [Segment(prompt, 0.0), *answer_segments(turn), Segment("\n", 0.0)]
    return [*document, Segment(END_OF_TEXT, 0.0)]


def skill_chat(rng: random.Random, supply: Facts, room: int) -> Document:
    return chat(rng, [any_skill(rng) for _ in range(skewed(rng, [1, 2, 3, 4, 5, 6]))])


def story_hero(rng: random.Random, held_out: bool = False) -> Character:
    """A hero for a request by name; held out are (kind, name) pairs."""
    while True:
        hero = draw_character(rng, tables.GIRLS, tables.BOYS)
        if not held_out and rng.random() < 0.12:
            kind, is_female = rng.choice(tables.MORE_HEROES)
            hero = Character(hero.name, kind, is_female)
        if rng.random() < 0.15:
            name = made_up_word(rng, held_out)
            if not held_out and rng.random() < 0.5:
                name = rng.choice(tables.WORLD_NAMES)
            hero = Character(name, hero.kind, hero.is_female)
        if is_held_out("hero", hero.kind, hero.name) == held_out:
            return hero


STORY_REQUESTS = [
    "Tell me a story{}.",
    "Write a short story{}.",
    "Tell me a short story{}.",
    "Write a story{}.",
    "A story{}, please.",
    "I want a story{}.",
    "Make up a story{}.",
    "Tell a story{}.",
    "Tell us a story{}.",
    "Give me a story{}.",
    "Can you tell me a story{}?",
    "Do you know a story{}?",
    "Tell me another story{}.",
    "I would like to hear a story{}.",
    "Tell me a nice story{}.",
    "Tell me a bedtime story{}.",
    "Story{}",
    "Once upon a time",
]


def story_turn(rng: random.Random) -> Turn:
    """A request for a story: any, about a kind of hero, about a named hero, or about a thing."""
    form = skewed(rng, ["kind", "hero", "thing", "any"], 0.5)
    hero = story_hero(rng)
    story = tell_story(rng, hero=hero)
    if form == "kind":
        subject = f" about {with_article(hero.kind)}"
    elif form == "hero":
        subject = (
            f" about {with_article(hero.kind)} {skewed(rng, ['named', 'called'], 2)} {hero.name}"
        )
    elif form == "thing":
        thing = rng.choice(tables.TOYS)
        story = tell_story(rng, hero=hero, thing=thing)
        subject = f" about {with_article(thing)}"
    else:
        subject = ""
    requests = STORY_REQUESTS if form == "any" else STORY_REQUESTS[:-1]
    while True:
        request = skewed(rng, requests).format(subject)
        if rng.random() < 0.3:
            request = talk.casually(rng, request, keep_capitals=form == "hero")
        if not is_held_out_guess(request):
            return Turn(request, story.text, weight=STORY_WEIGHT)


def story_chat(rng: random.Random, supply: Facts, room: int) -> Document:
    return chat(rng, [story_turn(rng)])


def memory_chat(rng: random.Random, supply: Facts, room: int) -> Document:
    """What the user says about himself, asked for a few turns later (or not at all)."""
    between = [any_skill(rng) for _ in range(skewed(rng, [0, 1, 2, 3], 0.6))]
    question = skewed(rng, memory.NAME_QUESTIONS)
    if rng.random() < 0.3:
        question = talk.casually(rng, question)
    if rng.random() < 0.08:
        return chat(rng, [*between, Turn(question, "You did not tell me your name.")])
    name = memory.somebody(rng)
    introduction = skewed(rng, memory.INTRODUCTIONS).format(name)
    if rng.random() < 0.35:
        introduction = talk.casually(rng, introduction, True, is_request=False)
    told = [Turn(introduction, f"Hello {name}! How can I help you?", key=name)]
    asked = [Turn(question, f"Your name is {name}.", key=name)]
    facts = memory.sayings(rng)
    topics = rng.sample(list(facts), skewed(rng, [0, 1, 2]))
    if topics and rng.random() < 0.3:
        told, asked = [], []  # no name at all
    for topic in topics:
        statement, topic_question, answer, value = facts[topic]
        if rng.random() < 0.3:
            statement = talk.casually(rng, statement, keep_capitals=True, is_request=False)
            topic_question = talk.casually(rng, topic_question)
        told.append(Turn(statement, "I will remember."))
        asked.append(Turn(topic_question, answer, key=value))
    rng.shuffle(told)
    rng.shuffle(asked)
    return chat(rng, [*told, *between, *asked])


# ------------------------------------------------------------------------------ recall


def filler_turns(rng: random.Random, size: int) -> list[Turn]:
    """Turns that have nothing to do with the facts, about `size` characters of them."""
    turns: list[Turn] = []
    while (left := size - sum(len(t.question + t.answer) + 50 for t in turns)) > 0:
        turns.append(story_turn(rng) if left > 400 and rng.random() < 0.7 else any_skill(rng))
    return turns


def filler_text(rng: random.Random, size: int) -> list[str]:
    stories: list[str] = []
    while sum(map(len, stories)) < size:
        stories.append(tell_story(rng).text)
    return stories


def remember(
    rng: random.Random, facts: Sequence[Fact], filler_size: int, questions: list[Turn], layout: str
) -> list[Turn]:
    """Facts, filler, questions, in one of three layouts ("turns", "together", "scattered")."""
    sentences = [fact.sentence for fact in facts]
    if layout == "turns":
        stated = Turn(f"Remember: {' '.join(sentences)}", "I will remember.")
        return [stated, *filler_turns(rng, filler_size), *questions]
    stories = filler_text(rng, filler_size)
    if layout == "together":
        text = "\n".join(["Remember: " + " ".join(sentences), *stories, ""])
    else:
        parts = sentences + stories
        rng.shuffle(parts)
        text = "Remember: " + " ".join(parts) + " "
    first = questions[0]
    return [Turn(text + first.question, first.answer, first.key), *questions[1:]]


def recall_chat(rng: random.Random, supply: Facts, room: int) -> Document:
    """Facts, a filler that nearly fills a random share of the room, then most facts asked for."""
    budget = room * skewed(rng, [0.9, 0.5, 0.25], 0.5)
    most = max(1, min(16, int(budget / 45)))
    facts = supply.draw_many(rng.randint(max(1, most // 4), most))
    asked = rng.sample(facts, min(len(facts), rng.randint(2, 12)))
    filler_size = (budget - 12 * len(facts) - 26 * len(asked) - 30) * CHARACTERS_PER_TOKEN
    layout = skewed(rng, ["turns", "together", "scattered"], 0.5)
    filler_size = max(0, int(filler_size) - (200 if layout == "turns" else 0))
    return chat(rng, remember(rng, facts, filler_size, [f.turn() for f in asked], layout))


# ------------------------------------------------------------------------------ drills


def plain_story(rng: random.Random, supply: Facts, room: int) -> Document:
    story = tell_story(rng, hero=story_hero(rng))
    return [Segment(story.text + END_OF_TEXT, STORY_WEIGHT)]


def sum_drill(rng: random.Random, supply: Facts, room: int) -> Document:
    document = []
    for _ in range(rng.randint(6, 20)):
        a, b = operands(rng, held_out=False)
        document += [Segment(f"{a} + {b} =", 0.0), Segment(f" {a + b}\n", KEY_WEIGHT)]
    return [*document, Segment(END_OF_TEXT, 0.0)]


def copy_drill(rng: random.Random, supply: Facts, room: int) -> Document:
    """A phrase, and the phrase again."""
    draw = phrase if rng.random() < 0.6 else any_phrase
    text = draw(rng, longest=max(4, min(24, room // 8)))
    return [Segment(f"{text}\n", 0.0), Segment(text, KEY_WEIGHT), Segment(f"\n{END_OF_TEXT}", 0.0)]


def read_out_twice(rng: random.Random, items: list[tuple[str, str]], between: str) -> Document:
    """(key, value) items without loss, then in another order with loss on the values."""
    document = [Segment(key + value + between, 0.0) for key, value in items]
    document.append(Segment("\n", 0.0))
    rng.shuffle(items)
    for key, value in items:
        document += [Segment(key, 0.0), Segment(value, KEY_WEIGHT), Segment(between, 1.0)]
    return [*document, Segment(END_OF_TEXT, 0.0)]


def pair_drill(rng: random.Random, supply: Facts, room: int) -> Document:
    items = pairs(rng, rng.randint(2, max(3, min(40, room // 16))))
    return read_out_twice(rng, [(f"{key}:", f" {value}") for key, value in items], ",")


def fact_drill(rng: random.Random, supply: Facts, room: int) -> Document:
    facts = supply.draw_many(rng.randint(2, max(3, min(32, room // 28))))
    return read_out_twice(rng, [(f" {fact.statement}", fact.value) for fact in facts], ".")


# ------------------------------------------------------------------------------ mixtures

Maker = Callable[[random.Random, Facts, int], Document]
DRILL_MIX: dict[Maker, float] = {
    plain_story: 0.7,
    skill_chat: 3.5,
    memory_chat: 0.8,
    recall_chat: 1.0,
    sum_drill: 0.7,
    copy_drill: 3.0,
    pair_drill: 2.0,
    fact_drill: 2.0,
}  # for the first rows, of 128 tokens: learn to copy; documents, not tokens
SHORT_MIX: dict[Maker, float] = {
    plain_story: 1.6,
    story_chat: 1.6,
    skill_chat: 6.5,
    memory_chat: 1.5,
    recall_chat: 1.6,
    sum_drill: 0.9,
    copy_drill: 1.4,
    pair_drill: 1.2,
    fact_drill: 1.2,
}  # for rows of 256 tokens
LONG_MIX: dict[Maker, float] = {
    plain_story: 0.4,
    story_chat: 0.8,
    skill_chat: 2.4,
    memory_chat: 0.4,
    recall_chat: 3.8,
    sum_drill: 0.2,
    copy_drill: 0.4,
    pair_drill: 0.8,
    fact_drill: 0.8,
}  # for longer rows


def mix_for(length: int) -> dict[Maker, float]:
    """The mixture for rows of `length` tokens."""
    return DRILL_MIX if length <= 128 else SHORT_MIX if length <= 256 else LONG_MIX


def draw_document(
    rng: random.Random, supply: Facts, room: int, mix: dict[Maker, float]
) -> Document:
    """One document that fits `room` tokens, more or less."""
    maker = rng.choices(list(mix), list(mix.values()))[0]
    return maker(rng, supply, room)
