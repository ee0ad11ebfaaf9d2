"""What a user says about himself, and how he asks for it later.

    user       I live in Oslo.
    assistant  I will remember.
    user       Where do I live?
    assistant  You live in Oslo.

corpus.py makes conversations of it. Favourite things are spelt the British or the American way, and
the answer keeps the spelling. Left out: two names, or two homes, in one conversation.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from nanoserve.demo.training import tables
from nanoserve.demo.training.skills import any_name, made_up_word, secret

INTRODUCTIONS = [
    "My name is {}.",
    "I am {}.",
    "Hi, I'm {}.",
    "Hello, my name is {}.",
    "Call me {}.",
    "Hi! My name is {}.",
    "You can call me {}.",
    "{} is my name.",
    "Hello, I am {}.",
    "Good morning, my name is {}.",
    "My name is {}, nice to meet you.",
    "Hi Nano, I am {}!",
    "Please call me {}.",
    "They call me {}.",
]
NAME_QUESTIONS = [
    "What is my name?",
    "Do you know my name?",
    "Who am I?",
    "Do you remember my name?",
    "Tell me my name.",
    "What was my name?",
    "What am I called?",
]


def somebody(rng: random.Random) -> str:
    """A name: of the tables, made up, or of any kind."""
    draw = rng.random()
    if draw < 0.2:
        return rng.choice(tables.NAMES)
    return made_up_word(rng) if draw < 0.45 else any_name(rng)


class Saying(NamedTuple):
    """'I live in Oslo.', 'Where do I live?', 'You live in Oslo.', 'Oslo'."""

    statement: str
    question: str
    answer: str
    value: str  # what the answer has to find in the statement


def sayings(rng: random.Random) -> dict[str, Saying]:
    """One saying for every topic."""
    favourite = rng.choice(["favourite", "favorite"])
    pet = rng.choice(tables.PETS)
    wide = rng.random() < 0.5
    food = rng.choice(tables.FOODS_LIKED if wide else tables.FOODS)
    liked = rng.choice(tables.TOPICS if wide else tables.FOODS)
    shade = rng.choice(tables.SHADES if wide else tables.COLOURS)
    city = rng.choice(tables.HOMES) if wide else rng.choice(tables.CITIES)
    city = any_name(rng) if rng.random() < 0.15 else city
    origin, age = rng.choice([*tables.HOMES, *tables.CAPITALS]), str(rng.randint(3, 99))
    called = rng.choice(tables.PET_NAMES) if rng.random() < 0.3 else somebody(rng)
    colour = "colour" if favourite == "favourite" else "color"
    animal = f"the {rng.choice(tables.ANIMALS)}"
    own = {
        f"{favourite} food": food,
        f"{favourite} {colour}": shade,
        f"{favourite} animal": animal,
        "home town": city,
        f"{favourite} {rng.choice(tables.THINGS)}": rng.choice([liked, any_name(rng)]),
    }
    facts = {
        topic: Saying(
            f"My {topic} is {value}.",
            f"What is my {topic}?",
            f"Your {topic} is {value}.",
            value,
        )
        for topic, value in own.items()
    }
    facts["home"] = Saying(f"I live in {city}.", "Where do I live?", f"You live in {city}.", city)
    facts["origin"] = Saying(
        f"I am from {origin}.", "Where am I from?", f"You are from {origin}.", origin
    )  # fmt: skip
    facts["age"] = Saying(
        f"I am {age} years old.", "How old am I?", f"You are {age} years old.", age
    )
    facts["liking"] = Saying(f"I like {liked}.", "What do I like?", f"You like {liked}.", liked)
    what, value = secret(rng)
    facts["secret"] = Saying(
        f"The {what} is {value}.", f"What is the {what}?", f"The {what} is {value}.", value
    )  # fmt: skip
    facts["pet"] = Saying(
        f"My {pet} is called {called}.",
        f"What is my {pet} called?",
        f"Your {pet} is called {called}.",
        called,
    )
    return facts
