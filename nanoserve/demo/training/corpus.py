"""Documents of the demo corpus: weighted text, drawn without end from a random generator.

A document is a list of segments; the weight says how much the training loss cares about the text:

    0  what cannot be predicted or need not be: user messages, the values of new facts, operands
    0.4  stories, most of whose loss is free choice
    1  answers
    2  the part of an answer that had to be known or found (`Turn.key`)

Drills are dense forms of one ability without the chat around it: a page of sums, or notes that are
read out a second time in another order. They teach the same circuit in fewer tokens.
How often each kind comes is in `SHORT_MIX` and its kin; data.py packs documents into rows.
Nothing is copied from anywhere: tables.py, stories.py, skills.py and recall.py make every word.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nanoserve.demo.training import tables
from nanoserve.demo.training.recall import Fact, Facts, pairs
from nanoserve.demo.training.skills import (
    Turn,
    any_skill,
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
        if rng.random() < 0.15:
            hero = Character(made_up_word(rng, held_out), hero.kind, hero.is_female)
        if is_held_out("hero", hero.kind, hero.name) == held_out:
            return hero


def story_turn(rng: random.Random) -> Turn:
    """A request for a story: any, about a kind of hero, about a named hero, or about a thing."""
    form = skewed(rng, ["kind", "hero", "thing", "any"], 0.5)
    hero = story_hero(rng)
    if form == "kind":
        subject = f" about {with_article(hero.kind)}"
    elif form == "hero":
        subject = f" about {with_article(hero.kind)} named {hero.name}"
    elif form == "thing":
        thing = rng.choice(tables.TOYS)
        story = tell_story(rng, hero=hero, thing=thing)
        request = f"Tell me a story about {with_article(thing)}."
        return Turn(request, story.text, weight=STORY_WEIGHT)
    else:
        subject = ""
    opening = skewed(rng, ["Tell me a story", "Write a short story", "Tell me a short story"])
    story = tell_story(rng, hero=hero)
    return Turn(f"{opening}{subject}.", story.text, weight=STORY_WEIGHT)


def story_chat(rng: random.Random, supply: Facts, room: int) -> Document:
    return chat(rng, [story_turn(rng)])


def memory_chat(rng: random.Random, supply: Facts, room: int) -> Document:
    """What the user says about himself, asked for a few turns later."""
    name = made_up_word(rng) if rng.random() < 0.4 else rng.choice(tables.NAMES)
    facts = {
        "favourite food": rng.choice(tables.FOODS),
        "favourite colour": rng.choice(tables.COLOURS),
        "favourite animal": f"the {rng.choice(tables.ANIMALS)}",
        "home town": rng.choice(tables.CITIES),
    }
    told = [Turn(f"My name is {name}.", f"Hello {name}! How can I help you?", key=name)]
    asked = [Turn("What is my name?", f"Your name is {name}.", key=name)]
    for topic in rng.sample(list(facts), rng.randint(0, 2)):
        told.append(Turn(f"My {topic} is {facts[topic]}.", "I will remember."))
        answer = f"Your {topic} is {facts[topic]}."
        asked.append(Turn(f"What is my {topic}?", answer, key=facts[topic]))
    rng.shuffle(told)
    rng.shuffle(asked)
    between = [any_skill(rng) for _ in range(rng.randint(0, 3))]
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
    text = phrase(rng, longest=max(4, min(24, room // 8)))
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
    skill_chat: 3.0,
    recall_chat: 1.0,
    sum_drill: 0.7,
    copy_drill: 3.0,
    pair_drill: 2.0,
    fact_drill: 2.0,
}  # for the first rows, of 128 tokens: learn to copy; documents, not tokens
SHORT_MIX: dict[Maker, float] = {
    plain_story: 1.6,
    story_chat: 1.6,
    skill_chat: 5.0,
    memory_chat: 0.4,
    recall_chat: 1.6,
    sum_drill: 0.9,
    copy_drill: 1.4,
    pair_drill: 1.2,
    fact_drill: 1.2,
}  # for rows of 256 tokens
LONG_MIX: dict[Maker, float] = {
    plain_story: 0.4,
    story_chat: 0.8,
    skill_chat: 2.0,
    memory_chat: 0.2,
    recall_chat: 3.5,
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
