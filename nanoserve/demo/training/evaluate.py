"""python -m nanoserve.demo.training.evaluate: what the demo model can do.

Measured with plain transformers.

Every question is held out (skills.is_held_out): no training row asks it. An answer counts only if
all its tokens are right, <|im_end|> included. No answer is generated. Instead, one forward pass
scores a batch of right answers: if every token of an answer is the argmax after the tokens before
it, then greedy decoding gives exactly this answer. Stories have no right answer: the model
generates them greedily, and `story_faults` checks them for faults that a reader would notice.
"First guesses" are the 100 prompts of first_guesses.py; the greedy answer has to contain what
stands there, and to end by itself.

    task                         score    n   promise
    sums of two-digit numbers     1.00  200      0.95

The promise is what the model card guarantees; tests/test_demo.py checks it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from nanoserve.demo import MODEL_DIR
from nanoserve.demo.training import skills, tables, talk
from nanoserve.demo.training.corpus import END_OF_TEXT, IM_END, story_hero
from nanoserve.demo.training.first_guesses import GUESSES, Guess
from nanoserve.demo.training.recall import CODES, WORDS, Facts
from nanoserve.demo.training.skills import Turn
from nanoserve.demo.training.stories import Character, skewed, tell_story, with_article

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Item:
    """A conversation that waits for an answer, and the answer."""

    messages: Messages
    answer: str


@dataclass(frozen=True)
class Task:
    """A named ability; `draw` makes one held-out item."""

    name: str
    promise: float
    draw: Callable[[random.Random, DemoModel], Item]
    size: int = 200


@dataclass(frozen=True)
class Score:
    task: str
    score: float  # share of the items that are right
    n: int
    promise: float


class DemoModel:
    """Tokenizer and model of a folder, by transformers alone, computing in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def prompt(self, messages: Messages) -> str:
        template = self.tokenizer.apply_chat_template
        return str(template(messages, tokenize=False, add_generation_prompt=True))

    @torch.inference_mode()
    def is_right(self, items: list[tuple[str, str]]) -> list[bool]:
        """For each (prompt, answer): is the answer what greedy decoding gives?"""
        pairs = [(self.encode(prompt), self.encode(answer)) for prompt, answer in items]
        rows = [torch.tensor(prompt + answer) for prompt, answer in pairs]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        hidden = self.model.model(ids).last_hidden_state  # right padding: causal, harmless
        verdicts = []
        for row, (prompt, answer) in enumerate(pairs):
            span = hidden[row, len(prompt) - 1 : len(prompt) + len(answer) - 1]
            guess: Tensor = self.model.lm_head(span).argmax(-1)
            verdicts.append(guess.tolist() == answer)
        return verdicts

    @torch.inference_mode()
    def generate(self, prompt: str, max_new_tokens: int = 220) -> str:
        """Greedy text, with the end token if it came to one."""
        ids = torch.tensor([self.encode(prompt)])
        output: Any = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        return str(self.tokenizer.decode(output[0, ids.shape[1] :]))


# ------------------------------------------------------------------------------ what is asked


def ask(turn: Turn) -> Item:
    return Item([{"role": "user", "content": turn.question}], turn.answer)


def skill(draw: Callable[..., Turn], **options: Any) -> Callable[[random.Random, DemoModel], Item]:
    """A held-out question of one of the skills."""
    return lambda rng, model: ask(draw(rng, held_out=True, **options))


def recall_item(
    rng: random.Random, model: DemoModel, kinds: tuple[str, ...], tokens: int, num_facts: int
) -> Item:
    """Facts, stories up to almost `tokens` prompt tokens, a question about one of the facts.

    Half of the items put everything into one message, the other half into a conversation."""
    supply = Facts(rng, held_out=True)
    facts = [supply.draw(rng.choice(kinds)) for _ in range(num_facts)]
    asked, remember = rng.choice(facts), "Remember: " + " ".join(f.sentence for f in facts)
    is_one_message, stories = rng.random() < 0.5, list[str]()

    def messages() -> Messages:
        if is_one_message:
            text = "\n".join([remember, *stories, asked.question])
            return [{"role": "user", "content": text}]
        said = [remember, "I will remember."]
        for story in stories:
            said += ["Tell me a story.", story]
        roles = ["user", "assistant"] * len(said)
        said.append(asked.question)
        return [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]

    longest = messages()
    while len(model.encode(model.prompt(longest))) <= tokens:
        fitting = longest
        stories.append(tell_story(rng).text)
        longest = messages()
    return Item(fitting, asked.sentence)


def my_name(
    rng: random.Random, model: DemoModel, draw: Callable[..., str] = skills.made_up_word
) -> Item:
    name = draw(rng, held_out=True)
    between = skills.capital(rng)
    said = [
        f"My name is {name}.",
        f"Hello {name}! How can I help you?",
        between.question,
        between.answer,
        "What is my name?",
    ]
    roles = ["user", "assistant"] * 3
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return Item(messages, f"Your name is {name}.")


def recall(kinds: tuple[str, ...], tokens: int) -> Callable[[random.Random, DemoModel], Item]:
    return partial(recall_item, kinds=kinds, tokens=tokens, num_facts=8)


TASKS = [
    Task("sum of two-digit numbers", 0.95, skill(skills.addition, digits=2)),
    Task("sum, any numbers up to 99", 0.95, skill(skills.addition)),
    Task("capital of a country", 0.95, skill(skills.capital), 50),
    Task("colour of a thing", 0.9, skill(skills.colour), 20),
    Task("days, animals, opposites", 0.9, skill(skills.simple_fact), 100),
    Task("name of the user, made up", 0.9, my_name, 100),
    Task("JSON record, known name", 0.95, skill(skills.json_record, made_up=False)),
    Task("JSON record, made-up name", 0.9, skill(skills.json_record, made_up=True)),
    Task("count from a to b", 0.9, skill(skills.count)),
    Task("say a word n times", 0.9, skill(skills.say_times)),
    Task("repeat after me", 0.9, skill(skills.repeat)),
    Task("continue the pattern", 0.9, skill(skills.continue_pattern)),
    Task("name of the user, any name", 0.85, partial(my_name, draw=skills.any_name), 200),
    Task("JSON record, any name", 0.85, skill(skills.json_record, any_kind=True)),
    Task("repeat after me, any words", 0.8, skill(skills.repeat, is_wide=True)),
    Task("repeat after me, 9 to 16 words", 0.8, skill(skills.repeat, longest=16)),
    Task("count, 17 to 31 numbers", 0.8, skill(skills.count, is_long=True)),
    Task("refusal in English", 0.9, skill(talk.unknown)),
    Task("refusal in Chinese", 0.95, skill(talk.chinese)),
    Task("recall words, 256 tokens", 0.95, recall(WORDS, 256), 100),
    Task("recall words, 512 tokens", 0.95, recall(WORDS, 512), 100),
    Task("recall words, 1024 tokens", 0.9, recall(WORDS, 1024), 100),
    Task("recall words, 1536 tokens", 0.9, recall(WORDS, 1536), 60),
    Task("recall words, 2000 tokens", 0.75, recall(WORDS, 2000), 60),
    Task("recall codes, 256 tokens", 0.95, recall(CODES, 256), 100),
    Task("recall codes, 512 tokens", 0.95, recall(CODES, 512), 100),
    Task("recall codes, 1024 tokens", 0.9, recall(CODES, 1024), 100),
    Task("recall codes, 1536 tokens", 0.85, recall(CODES, 1536), 60),
    Task("recall codes, 2000 tokens", 0.75, recall(CODES, 2000), 60),
]
STORY_PROMISES = {"story, continued": 0.95, "story, on request": 0.95}
STORIES_PER_TASK = 40
FIRST_GUESSES, FIRST_GUESSES_PROMISE = "first guesses", 0.9


def score_task(model: DemoModel, task: Task, size: int | None = None, seed: int = 7) -> Score:
    """Exact match on `size` distinct held-out items (fewer where a task does not have as many)."""
    rng, size = random.Random(f"{task.name} {seed}"), size or task.size
    drawn: dict[str, str] = {}
    for _ in range(4 * size):
        item = task.draw(rng, model)
        drawn[model.prompt(item.messages)] = item.answer + IM_END
        if len(drawn) == size:
            break
    verdicts: list[bool] = []
    for batch in batches_of_like_length(list(drawn.items())):
        verdicts += model.is_right(batch)
    return Score(task.name, round(sum(verdicts) / len(verdicts), 3), len(verdicts), task.promise)


def batches_of_like_length(
    items: list[tuple[str, str]], characters: int = 30_000
) -> Iterator[list[tuple[str, str]]]:
    batch: list[tuple[str, str]] = []
    for item in sorted(items, key=lambda item: len(item[0])):
        if batch and (len(batch) + 1) * len(item[0]) > characters:
            yield batch
            batch = []
        batch.append(item)
    yield batch


# ------------------------------------------------------------------------------ stories


def story_faults(story: str, hero: Character, end: str) -> list[str]:
    """What is wrong with a story about `hero`, in words; an empty list means coherent."""
    faults = []
    body = story.removesuffix(end)
    if not body.rstrip().endswith("The end.") or not story.endswith(end):
        faults.append("does not end")
    names = {w for w in re.findall(r"[A-Z][a-z]+", body) if w == hero.name or w in tables.NAMES}
    if hero.name not in names or body.count(hero.name) < 2:
        faults.append("loses its hero")
    if len(names - {hero.name}) != 1:
        faults.append(f"has helpers {sorted(names - {hero.name})}")
    met = re.search(r"(\w+) met an? \w+ named (\w+)", body)
    if met and met[1] == met[2]:
        faults.append("hero meets hero")
    lost, found = re.search(r"I lost my ([\w ]+),", body), re.search(r"was the ([\w ]+)!", body)
    if lost and (found is None or lost[1] != found[1]):
        faults.append("finds another thing than was lost")
    sentences = re.findall(r"[^.!?]{12,}[.!?]", body)
    if len(sentences) != len(set(sentences)) or len(sentences) < 5:
        faults.append("repeats itself or is no story")
    return faults


def story_prompts(kind: str, count: int) -> Iterator[tuple[str, str, Character, str]]:
    """(request, or text to continue; start of the story; hero; end token) of held-out heroes."""
    rng, seen = random.Random(kind), set[str]()
    while len(seen) < count:
        hero = story_hero(rng, held_out=True)
        who = f"{with_article(hero.kind)} named {hero.name}"
        if who in seen:
            continue
        seen.add(who)
        if kind == "story, on request":
            yield f"Tell me a story about {who}.", "", hero, IM_END
        else:
            start = f"Once upon a time there was {with_article(skewed(rng, tables.TRAITS))}"
            start += f" {hero.kind} named {hero.name}."
            yield start, start, hero, END_OF_TEXT


def score_stories(model: DemoModel, kind: str, count: int = STORIES_PER_TASK) -> Score:
    """The share of greedy stories without a fault."""
    good = 0
    for request, start, hero, end in story_prompts(kind, count):
        prompt = start or model.prompt([{"role": "user", "content": request}])
        good += not story_faults(start + model.generate(prompt), hero, end)
    return Score(kind, round(good / count, 3), count, STORY_PROMISES[kind])


# ------------------------------------------------------------------------------ first guesses


def answer_to(model: DemoModel, guess: Guess) -> str:
    """The greedy answer to the last prompt, after the model's own answers to those before."""
    messages: Messages = []
    answer = ""
    for prompt in guess.prompts:
        messages.append({"role": "user", "content": prompt})
        answer = model.generate(model.prompt(messages))
        messages.append({"role": "assistant", "content": answer.removesuffix(IM_END)})
    return answer


def is_good(guess: Guess, answer: str) -> bool:
    """Whether the answer ends and contains what it should, as whole words: 42 is not in 421."""
    return (
        answer.endswith(IM_END)
        and all(re.search(re.escape(text) + r"(?<!\w\B)", answer) for text in guess.contains)
        and not any(text in answer for text in guess.lacks)
    )


def score_first_guesses(model: DemoModel) -> tuple[Score, list[str]]:
    """The share of good answers, and the other answers."""
    bad = []
    for guess in tqdm(GUESSES, desc="first guesses"):
        answer = answer_to(model, guess)
        if not is_good(guess, answer):
            bad.append(f"{' / '.join(guess.prompts)}  ->  {answer}")
    share = round(1 - len(bad) / len(GUESSES), 3)
    return Score(FIRST_GUESSES, share, len(GUESSES), FIRST_GUESSES_PROMISE), bad


def evaluate(folder: Path) -> tuple[list[Score], list[str]]:
    """All scores of the model in `folder`, and the first guesses it has no good answer to.

    About three minutes on two CPU cores."""
    model = DemoModel(folder)
    scores = [score_task(model, task) for task in tqdm(TASKS, desc="tasks")]
    scores += [score_stories(model, kind) for kind in tqdm(STORY_PROMISES, desc="stories")]
    first_guesses, bad = score_first_guesses(model)
    return [*scores, first_guesses], bad


def as_table(scores: list[Score]) -> str:
    """The table of the model card, in Markdown."""
    lines = ["| task | score | n | promise |", "|---|---|---|---|"]
    lines += [f"| {s.task} | {s.score:.3f} | {s.n} | {s.promise:.2f} |" for s in scores]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Score the demo model on held-out questions.")
    parser.add_argument("folder", type=Path, nargs="?", default=MODEL_DIR)
    parser.add_argument("--json", type=Path, help="also write the scores to this file")
    arguments = parser.parse_args()
    scores, bad = evaluate(arguments.folder)
    print(as_table(scores))
    print("\nFirst guesses without a good answer:", *bad, sep="\n  ")
    if arguments.json:
        content = [asdict(score) for score in scores]
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
