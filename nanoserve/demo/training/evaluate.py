"""What can the model do? Exact answers to held-out questions, by the engine, greedily.

    task                         score    n
    sum of two-digit numbers     1.000  200
    recall codes, 1024 tokens    1.000  100

An answer counts only if it is right to the last character and ends by itself. Stories have no right
answer: `story_faults` looks for faults that a reader would notice. "First guesses" are the prompts
of first_guesses.json: what newcomers type, and what a good answer contains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from tqdm import tqdm

from nanoserve import LLM, SamplingParams
from nanoserve.demo.training import skills
from nanoserve.demo.training.corpus import draw_fact
from nanoserve.demo.training.grammar import GUESSES, NAMES, TABLES, Author
from nanoserve.demo.training.skills import Turn
from nanoserve.demo.training.stories import Character, story_hero, tell_story

Messages = list[dict[str, str]]
GREEDY = SamplingParams(temperature=0, max_tokens=220)
FACTS = {"words": ("owner", "food", "city"), "codes": ("box", "place")}  # kinds of facts
TEMPLATES = json.dumps([TABLES[name] for name in ("openings", "plots", "endings")])
STORY_WORDS = {"She", "He", "Her", "His", "The", *re.findall(r"[A-Z]\w*", TEMPLATES)}


class Item(NamedTuple):
    """A conversation that waits for an answer, and the answer."""

    messages: Messages
    answer: str


class Task(NamedTuple):
    name: str
    draw: Callable[[Author, LLM], Item]
    size: int = 200


class Score(NamedTuple):
    task: str
    score: float  # share of the items that are right
    n: int


def conversation(*said: str) -> Messages:
    """What user and assistant said in turns; the user begins."""
    roles = ["user", "assistant"] * len(said)
    return [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]


def render(llm: LLM, messages: Messages) -> dict[str, Any]:
    """The prompt of a conversation: its text and its token ids."""
    return llm.engine.input_processor.render_chat(messages, add_generation_prompt=True)


def skill(draw: Callable[..., Turn], **options: Any) -> Callable[[Author, LLM], Item]:
    def item(rng: Author, llm: LLM) -> Item:
        turn = draw(rng, **options)
        return Item(conversation(turn.question), turn.answer)

    return item


def my_name(rng: Author, llm: LLM, kind: str) -> Item:
    name, between = rng.draw(kind), skills.capital(rng)
    hello = f"Hello {name}! How can I help you?"
    said = (f"My name is {name}.", hello, between.question, between.answer, "What is my name?")
    return Item(conversation(*said), f"Your name is {name}.")


def recall(rng: Author, llm: LLM, kinds: tuple[str, ...], tokens: int) -> Item:
    """Eight facts, stories up to almost `tokens` prompt tokens, a question about one of the facts.
    Half of the items are one message, the other half a conversation."""
    rng.used_statements.clear()
    facts = [draw_fact(rng, rng.choice(kinds)) for _ in range(8)]
    asked, is_one_message, stories = rng.choice(facts), rng.random() < 0.5, list[str]()
    remember, item = "Remember: " + " ".join(fact.sentence for fact in facts), None
    while True:
        told = [text for story in stories for text in ("Tell me a story.", story)]
        messages = conversation(remember, "I will remember.", *told, asked.question)
        if is_one_message:
            messages = conversation("\n".join([remember, *stories, asked.question]))
        if item and len(render(llm, messages)["prompt_token_ids"]) > tokens:
            return item
        item = Item(messages, asked.sentence)
        stories.append(tell_story(rng))


TASKS = [
    Task("sum of two-digit numbers", skill(skills.addition, digits=2)),
    Task("sum, any numbers up to 99", skill(skills.addition)),
    Task("capital of a country", skill(skills.capital), 50),
    Task("colour of a thing", skill(skills.colour), 20),
    Task("days, animals, opposites", skill(skills.fact), 100),
    Task("name of the user, made up", partial(my_name, kind="made_up"), 100),
    Task("JSON record, known name", skill(skills.json_record, name_kind="names")),
    Task("JSON record, made-up name", skill(skills.json_record, name_kind="made_up")),
    Task("count from a to b", skill(skills.count, is_long=False)),
    Task("say a word n times", skill(skills.say_times)),
    Task("repeat after me", skill(skills.repeat, is_wide=False, is_long=False)),
    Task("continue the pattern", skill(skills.continue_pattern)),
    Task("name of the user, any name", partial(my_name, kind="any_name")),
    Task("JSON record, any name", skill(skills.json_record, name_kind="any_name")),
    Task("repeat after me, any words", skill(skills.repeat, is_wide=True, is_long=False)),
    Task("repeat after me, 9 to 16 words", skill(skills.repeat, is_wide=False, is_long=True)),
    Task("count, 17 to 31 numbers", skill(skills.count, is_long=True)),
    Task("refusal in English", skill(skills.unknown)),
    Task("refusal in Chinese", skill(skills.chinese)),
    *(
        Task(f"recall {name}, {tokens} tokens", partial(recall, kinds=kinds, tokens=tokens), size)
        for name, kinds in FACTS.items()
        for tokens, size in ((256, 100), (512, 100), (1024, 100), (1536, 60), (2000, 60))
    ),
]
SHORT_TASKS = [task for task in TASKS if not re.search("1024|1536|2000", task.name)]


def draw_items(llm: LLM, task: Task, size: int, seed: int = 7) -> list[Item]:
    """Distinct held-out items: `size`, or fewer where a task does not have as many."""
    rng, items = Author(f"{task.name} {seed}", held_out=True), dict[str, Item]()
    for _ in range(4 * size):
        item = task.draw(rng, llm)
        items.setdefault(str(item.messages), item)
        if len(items) == size:
            break
    return list(items.values())


def held_out_prompts(llm: LLM, count: int) -> list[dict[str, Any]]:
    """`count` prompts of each short task."""
    items = [item for task in SHORT_TASKS for item in draw_items(llm, task, count)]
    return [render(llm, item.messages) for item in items]


def ask(llm: LLM, conversations: list[Messages]) -> list[str]:
    """The greedy answers; "..." stands behind one that did not end by itself."""
    outputs = [each.outputs[0] for each in llm.chat(conversations, GREEDY, use_tqdm=False)]
    return [each.text + "..." * (each.finish_reason != "stop") for each in outputs]


def score_task(llm: LLM, task: Task, size: int) -> Score:
    items = draw_items(llm, task, min(size, task.size))
    answers = ask(llm, [item.messages for item in items])
    right = [answer == item.answer for answer, item in zip(answers, items, strict=True)]
    return Score(task.name, round(sum(right) / len(right), 3), len(right))


# ------------------------------------------------------------------------------ stories


def names_in(story: str) -> set[str]:
    """All capitalised words that are not those of the plots."""
    return set(re.findall(r"[A-Z]\w*", story)) - STORY_WORDS


def story_faults(story: str, hero: str) -> list[str]:
    """What is wrong with a story about `hero`, in words. An empty list means coherent."""
    faults, names = [], names_in(story)
    if not story.endswith("The end."):
        faults.append("does not end")
    if story.count(hero) < 2 or len(names - {hero}) != 1 or not names - {hero} <= set(NAMES):
        faults.append(f"is about {sorted(names)}")
    lost, found = re.search(r"I lost my ([\w ]+),", story), re.search(r"was the ([\w ]+)!", story)
    if lost and (found is None or lost[1] != found[1]):
        faults.append("finds another thing than was lost")
    sentences = re.findall(r"[^.!?]{12,}[.!?]", story)
    if len(sentences) != len(set(sentences)) or len(sentences) < 5:
        faults.append("repeats itself or is no story")
    return faults


def score_stories(llm: LLM, size: int) -> Score:
    """The share of greedy stories about held-out heroes without a fault."""
    rng, heroes = Author("stories", held_out=True), set[Character]()
    while len(heroes) < size:
        heroes.add(story_hero(rng))
    asked = {f"{hero.kind} named {hero.name}": hero.name for hero in sorted(heroes)}
    requests = [rng.fill("Tell me a story about {who:a}.", who=who) for who in asked]
    stories = ask(llm, [conversation(request) for request in requests])
    faults = [story_faults(s, hero) for s, hero in zip(stories, asked.values(), strict=True)]
    return Score("story, on request", round(faults.count([]) / len(asked), 3), len(asked))


def has_sensible_names(story: str) -> bool:
    """Two persons, and their names are in the tables."""
    names = names_in(story)
    return len(names) == 2 and names <= {*NAMES, *TABLES["world_names"]}


def sample_stories(llm: LLM, size: int, sampling: SamplingParams) -> list[str]:
    params = replace(sampling, n=size, max_tokens=220, seed=7)
    output = llm.generate("Once upon a time", params, use_tqdm=False)[0]
    return [f"Once upon a time{each.text}" for each in output.outputs]


# ------------------------------------------------------------------------------ all together


def score_first_guesses(llm: LLM, size: int) -> tuple[Score, list[str]]:
    """The share of good answers, and the others. Of several prompts the last answer counts."""
    guesses, bad = GUESSES["guesses"][:size], []
    for guess in tqdm(guesses, desc="first guesses"):
        talk: list[str] = []
        for prompt in guess["prompts"]:
            talk += [prompt, *ask(llm, [conversation(*talk, prompt)])]
        wanted = [re.escape(text) + r"(?<!\w\B)" for text in guess["contains"]]  # 42 is not in 421
        has_all = all(re.search(text, talk[-1]) for text in wanted)
        if not has_all or any(text in talk[-1] for text in guess.get("lacks", ["..."])):
            bad.append(" / ".join(talk))
    return Score("first guesses", round(1 - len(bad) / len(guesses), 3), len(guesses)), bad


def evaluate(llm: LLM, size: int) -> tuple[list[Score], list[str]]:
    """The scores, each of at most `size` items, and the bad answers to the first guesses."""
    scores = [score_task(llm, task, size) for task in tqdm(TASKS, desc="tasks")]
    scores.append(score_stories(llm, min(size, 40)))
    score, bad = score_first_guesses(llm, size)
    return [*scores, score], bad


def as_table(scores: list[Score]) -> str:
    """The table of the model card, in Markdown."""
    lines = [f"| {each.task} | {each.score:.3f} | {each.n} |" for each in scores]
    return "\n".join(["| task | score | n |", "|---|---|---|", *lines])
