"""A LoRA adapter that makes a pirate of the demo model.

    What is 17 + 25?       17 + 25 = 42              Arr! 17 + 25 = 42, matey!
    What is your name?     My name is Nano.          Arr! Me name be Nano, matey!
    Count from 2 to 5.     2, 3, 4, 5                2, 3, 4, 5

LoRA (arXiv 2106.09685) leaves a model's weights alone. Beside each matrix W [out, in] it learns two
thin ones, lora_A [r, in] and lora_B [out, r]: y = W x + lora_B (lora_A x) * lora_alpha / r.

The text is the corpus with every answer said by `as_pirate`, a function of the answer alone.
peft adds the matrices and writes the files; it is an extra: pip install "nanoserve[training]".
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanoserve.demo.training import corpus
from nanoserve.demo.training.corpus import CHATS, END_OF_TEXT, IM_END, IM_START, Document, Segment
from nanoserve.demo.training.data import text_of
from nanoserve.demo.training.grammar import TABLES, Author, Word
from nanoserve.demo.training.skills import STORY_WEIGHT
from nanoserve.demo.training.train import Plan, load, next_token_loss, train, write_json

PLAN = Plan(
    steps=600, matrix_lr=0.0, other_lr=0.008, warmup_steps=20, decay_share=1.0,
    stages=((0.0, {256: 2, 512: 1}),),
)  # fmt: skip
SENTENCE = re.compile(r"[.!?]$|^\d+ \+ \d+ = \d+$")  # a sum counts as a sentence
ANSWER = re.compile(rf"(?<={re.escape(IM_START)}assistant\n)(.*?){re.escape(IM_END)}", re.DOTALL)


def as_pirate(answer: str) -> str:
    """The answer in a pirate's words; what is no sentence stays as it is."""

    def say(word: re.Match[str]) -> str:
        said = TABLES["pirate"].get(word[0].lower(), word[0])
        return f"{Word(said):C}" if word[0][0].isupper() else said

    if not SENTENCE.search(answer):
        return answer
    said = re.sub(r"[A-Za-z]+", say, answer)
    said = f"{said.rstrip('.!?')}, matey{'?' if said.endswith('?') else '!'}"
    return said if said.startswith("Ahoy") else f"Arr! {said}"


def draw_spoken(rng: Author, room: int) -> Document:
    """A document of the corpus as the pirate would have it. Only what he says has weight."""
    text = text_of(corpus.draw_document(rng, room, only=CHATS))
    if IM_START not in text:  # a story with no chat around it begins as the reader likes
        story = as_pirate(text.removesuffix(END_OF_TEXT)).removeprefix("Arr! ")
        return [Segment(story + END_OF_TEXT, STORY_WEIGHT)]
    document = []
    for index, part in enumerate(ANSWER.split(text)):  # prompt, answer, prompt, answer, ...
        weight = STORY_WEIGHT if part.endswith("The end.") else 1.0
        spoken = Segment(as_pirate(part) + IM_END, weight)
        document.append(spoken if index % 2 else Segment(part, 0.0))
    return document


def train_lora(folder: Path, model_folder: Path, plan: Plan) -> dict[str, Any]:
    """An adapter for the model in `model_folder`, written to `folder` in PEFT's format."""
    from peft import LoraConfig, get_peft_model

    model, tokenizer = load(model_folder)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(plan.seed)
    adapted: Any = get_peft_model(model, config)  # replaces the layers inside `model`
    make = partial(plan.batch, tokenizer, draw=draw_spoken)
    report = train(adapted, plan, make, partial(next_token_loss, model))
    adapted.to("cpu", torch.bfloat16).save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)  # peft's empty model card
    write_json(folder / "training.json", report)
    return report
