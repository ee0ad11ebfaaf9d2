"""What does the model read?

Documents without end, drawn from a random generator. A document is a list of (text, weight): how
much the training loss cares about the text.

    0    what nobody can predict: user messages, the values of new facts, operands
    0.4  stories, most of whose loss is free choice
    1    answers
    2    the part of an answer that had to be known or found (Turn.key)

    skill_chat    one to six turns of any skill, in the chat template
    memory_chat   what the user says about himself, asked for a few turns later
    recall_chat   facts, stories up to two thousand tokens, questions about the facts: a wrong KV
                  block gives a wrong answer
    story_chat, plain_story
    drills        one ability without the chat around it: sums; phrases, pairs and facts that are
                  read out twice. They teach the same circuit in fewer tokens.

MIXES says how often each kind comes in rows of which length; data.py packs documents into rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from nanoserve.demo.training import skills
from nanoserve.demo.training.grammar import TABLES, Author
from nanoserve.demo.training.skills import STORY, STORY_WEIGHT, Turn, any_turn, casually
from nanoserve.demo.training.stories import story_hero, tell_story

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
KEY_WEIGHT, CHARACTERS_PER_TOKEN = 2.0, 3.2  # of a typical document


class Segment(NamedTuple):
    text: str
    weight: float


Document = list[Segment]


class Fact(NamedTuple):
    """'The red box holds', ' 4821' and the question 'What does the red box hold?'."""

    statement: str
    value: str
    question: str

    @property
    def sentence(self) -> str:
        return f"{self.statement}{self.value}."


def draw_fact(rng: Author, kind: str | None = None) -> Fact:
    """A fact whose statement is new to this author. When nearly all statements of a kind are used,
    other kinds step in."""
    while True:
        template = TABLES["facts"][kind or rng.skewed(list(TABLES["facts"]), 0.4)]
        key = rng.fill(template["key"])
        statement = rng.fill(template["statement"], key=key)
        value = f" {rng.fill(template['value'])}"
        if statement not in rng.used_statements and rng.allows("fact", f"{statement}{value}."):
            rng.used_statements.add(statement)
            return Fact(statement, value, rng.skewed(template["questions"], 1.5).format(key=key))
        kind = kind if rng.random() < 0.98 else None


def draw_facts(rng: Author, count: int) -> list[Fact]:
    """Half of the time facts of one kind, where keys are easier to confuse."""
    kind = rng.choice(list(TABLES["facts"])) if rng.random() < 0.5 else None
    return [draw_fact(rng, kind) for _ in range(count)]


# ------------------------------------------------------------------------------ chats


def chat(rng: Author, turns: Sequence[Turn]) -> Document:
    """Turns in the chat template of tokenizer_config.json, sometimes after a system message."""
    document = []
    if rng.random() < 0.1:
        system = rng.draw("system_prompts")
        document.append(Segment(f"{IM_START}system\n{system}{IM_END}\n", 0.0))
    for turn in turns:
        before, key, after = turn.answer, "", ""
        if turn.key:
            before, key, after = turn.answer.rpartition(turn.key)
        prompt = f"{IM_START}user\n{turn.question}{IM_END}\n{IM_START}assistant\n"
        document += [Segment(prompt, 0.0), Segment(before, turn.weight), Segment(key, KEY_WEIGHT)]
        document += [Segment(after + IM_END, turn.weight), Segment("\n", 0.0)]
    return [*document, Segment(END_OF_TEXT, 0.0)]


def skill_chat(rng: Author, room: int) -> Document:
    return chat(rng, [any_turn(rng) for _ in range(rng.skewed(range(1, 7)))])


def story_chat(rng: Author, room: int) -> Document:
    return chat(rng, [any_turn(rng, STORY)])


def memory_chat(rng: Author, room: int) -> Document:
    """What the user says about himself, other turns in between, and questions about it."""
    between = [any_turn(rng) for _ in range(rng.skewed(range(4), 0.6))]
    if rng.random() < 0.08:
        unasked = Turn(rng.draw("name_questions"), "You did not tell me your name.")
        return chat(rng, [*between, unasked])
    topics = rng.sample(list(TABLES["sayings"])[1:], rng.skewed(range(3)))
    if not topics or rng.random() < 0.7:
        topics.append("name")
    told, asked = [], []
    for topic in topics:
        statement, reply, question, answer, value = saying(rng, topic)
        if rng.random() < 0.3:
            statement = casually(rng, statement, True, is_request=False)
            question = casually(rng, question)
        told.append(Turn(statement, reply, value if value in reply else ""))
        asked.append(Turn(question, answer, value))
    rng.shuffle(told)
    rng.shuffle(asked)
    return chat(rng, [*told, *between, *asked])


def saying(rng: Author, topic: str) -> list[str]:
    """['I live in Oslo.', 'I will remember.', 'Where do I live?', 'You live in Oslo.', 'Oslo']."""
    favourite, colour = rng.choice([("favourite", "colour"), ("favorite", "color")])
    slots = {"favourite": favourite, "colour": colour, "pet": rng.draw("pets")}
    slots |= {name: rng.draw(name) for name in ("secret", "things")}
    *sentences, value = TABLES["sayings"][topic]
    slots["value"] = rng.fill(value)
    return [*(rng.fill(text, **slots) for text in sentences), slots["value"]]


def recall_chat(rng: Author, room: int) -> Document:
    """Facts, a filler that takes a random share of the room, and most of the facts asked for. The
    facts stand in a turn of their own, or before the filler, or scattered in it."""
    budget = room * rng.skewed([0.9, 0.5, 0.25], 0.5)
    most = max(1, min(16, int(budget / 45)))
    facts = draw_facts(rng, rng.randint(max(1, most // 4), most))
    asked = rng.sample(facts, min(len(facts), rng.randint(2, 12)))
    questions = [Turn(fact.question, fact.sentence, f"{fact.value}.") for fact in asked]
    size = (budget - 12 * len(facts) - 26 * len(asked) - 30) * CHARACTERS_PER_TOKEN
    parts = [fact.sentence for fact in facts]
    layout = rng.skewed(["turns", "together", "scattered"], 0.5)
    if layout == "turns":
        turns = [Turn(f"Remember: {' '.join(parts)}", "I will remember.")]
        while (left := size - 200 - sum(len(t.question + t.answer) + 50 for t in turns[1:])) > 0:
            turns.append(any_turn(rng, STORY if left > 400 and rng.random() < 0.7 else None))
        return chat(rng, [*turns, *questions])
    stories: list[str] = []
    while sum(map(len, stories)) < size:
        stories.append(tell_story(rng))
    if layout == "together":
        text = "\n".join([" ".join(parts), *stories, ""])
    else:
        rng.shuffle(parts := parts + stories)
        text = " ".join(parts) + " "
    first = replace(questions[0], question=f"Remember: {text}{questions[0].question}")
    return chat(rng, [first, *questions[1:]])


# ------------------------------------------------------------------------------ drills


def plain_story(rng: Author, room: int) -> Document:
    return [Segment(tell_story(rng, story_hero(rng)) + END_OF_TEXT, STORY_WEIGHT)]


def sum_drill(rng: Author, room: int) -> Document:
    document = []
    for _ in range(rng.randint(6, 20)):
        a, b = skills.operands(rng)
        document += [Segment(f"{a} + {b} =", 0.0), Segment(f" {a + b}\n", KEY_WEIGHT)]
    return [*document, Segment(END_OF_TEXT, 0.0)]


def copy_drill(rng: Author, room: int) -> Document:
    text = skills.phrase(rng, max(4, min(24, room // 8)), is_wide=rng.random() < 0.4)
    return [Segment(f"{text}\n", 0.0), Segment(text, KEY_WEIGHT), Segment(f"\n{END_OF_TEXT}", 0.0)]


def read_out_twice(rng: Author, items: list[tuple[str, str]], between: str) -> Document:
    """(key, value) items without loss, then in another order with loss on the values."""
    document = [Segment(key + value + between, 0.0) for key, value in items]
    document.append(Segment("\n", 0.0))
    rng.shuffle(items)
    for key, value in items:
        document += [Segment(key, 0.0), Segment(value, KEY_WEIGHT), Segment(between, 1.0)]
    return [*document, Segment(END_OF_TEXT, 0.0)]


def pair_drill(rng: Author, room: int) -> Document:
    """'sun: 48,Mia: 7,': the smallest form of a fact."""
    count, keys = rng.randint(2, max(3, min(40, room // 16))), dict[str, str]()
    key_kind, value_kind = rng.choice(["words", "pair_key"]), rng.choice(["words", "item_number"])
    while len(keys) < count:
        keys[f"{rng.draw(key_kind)}:"] = f" {rng.draw(value_kind)}"
    return read_out_twice(rng, list(keys.items()), ",")


def fact_drill(rng: Author, room: int) -> Document:
    facts = draw_facts(rng, rng.randint(2, max(3, min(32, room // 28))))
    return read_out_twice(rng, [(f" {fact.statement}", fact.value) for fact in facts], ".")


# ------------------------------------------------------------------------------ mixtures

Maker = Callable[[Author, int], Document]  # the room in a row, in tokens -> a document
MIXES: dict[Maker, tuple[float, float, float]] = {  # rows up to 128 tokens, up to 256, and longer
    plain_story: (0.7, 1.6, 0.4),
    story_chat: (0, 1.6, 0.8),
    skill_chat: (3.5, 6.5, 2.4),
    memory_chat: (0.8, 1.5, 0.4),
    recall_chat: (1.0, 1.6, 3.8),
    sum_drill: (0.7, 0.9, 0.2),
    copy_drill: (3.0, 1.4, 0.4),
    pair_drill: (2.0, 1.2, 0.8),
    fact_drill: (2.0, 1.2, 0.8),
}
CHATS = [maker for maker in MIXES if not maker.__name__.endswith("drill")]


def draw_document(
    rng: Author, room: int, length: int = 256, only: Sequence[Maker] = ()
) -> Document:
    """A document that fits `room` tokens, more or less, of a row of `length` tokens."""
    makers = list(only or MIXES)
    column = 0 if length <= 128 else 1 if length <= 256 else 2
    maker = rng.choices(makers, [MIXES[each][column] for each in makers])[0]
    return maker(rng, room)
