"""Short stories from templates: a hero, a helper, a plot of about ten sentences, an ending.

    Once upon a time there was a kind girl named Mia. ... But one sunny morning, the kite was gone!
    ... Then Mia met a fox named Gus. ... there was the red kite! ... The end.

What a reader (or evaluate.py) can check: the hero keeps the name, the helper is somebody else, and
the thing that was lost is the thing that is found. Left out: any story without exactly two persons.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TypeVar

from nanoserve.demo.training import tables

T = TypeVar("T")


@cache
def _zipf_weights(count: int, power: float) -> tuple[float, ...]:
    return tuple(accumulate((rank + 1) ** -power for rank in range(count)))


def skewed(rng: random.Random, options: Sequence[T], power: float = 0.8) -> T:
    """A Zipf draw: entry k has weight 1 / (k + 1)^power, so the first one is clearly likeliest."""
    return rng.choices(options, cum_weights=_zipf_weights(len(options), power))[0]


def with_article(noun: str) -> str:
    """'owl' -> 'an owl', 'fox' -> 'a fox'."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def capitalised(text: str) -> str:
    """'a fox' -> 'A fox'; unlike str.capitalize it leaves the other letters alone."""
    return text[0].upper() + text[1:]


@dataclass(frozen=True)
class Character:
    """One person or animal of a story, with the pronouns that belong to it."""

    name: str
    kind: str  # "girl", "boy" or an animal
    is_female: bool

    @property
    def he(self) -> str:
        return "she" if self.is_female else "he"

    @property
    def his(self) -> str:
        return "her" if self.is_female else "his"

    @property
    def him(self) -> str:
        return "her" if self.is_female else "him"


@dataclass(frozen=True)
class Story:
    """A finished story and what its words were drawn from."""

    text: str
    hero: Character
    helper: Character
    plot: str
    thing: str  # the toy of the "lost", "share" and "help" plots, without its colour


@dataclass(frozen=True)
class Cast:
    """Everything that is drawn before the plot is told."""

    rng: random.Random
    hero: Character
    helper: Character
    place: str
    colour: str
    thing: str

    def pick(self, *options: str) -> str:
        return skewed(self.rng, options)

    def spot(self) -> str:
        return skewed(self.rng, tables.SPOTS)

    def meeting(self) -> str:
        hero, helper = self.hero, self.helper
        return self.pick(
            f"Then {hero.name} met {with_article(helper.kind)} named {helper.name}.",
            f"Just then, {with_article(helper.kind)} named {helper.name} came along.",
        )


def lost(cast: Cast) -> list[str]:
    hero, helper, thing = cast.hero, cast.helper, f"{cast.colour} {cast.thing}"
    weather = skewed(cast.rng, tables.WEATHER)
    searched, found = cast.rng.sample(tables.SPOTS, 2)
    return [
        cast.pick(
            f"{hero.name} had {with_article(thing)} and loved it very much.",
            f"{capitalised(hero.his)} favourite thing was {with_article(thing)}.",
        ),
        cast.pick(
            f"But one {weather} morning, the {cast.thing} was gone!",
            f"One {weather} day {hero.he} could not find the {cast.thing}.",
        ),
        cast.pick(
            f"{hero.name} looked everywhere and began to cry.",
            f"{capitalised(hero.he)} looked {searched}, but it was not there.",
        ),
        cast.meeting(),
        cast.pick(
            f'"Why are you sad?" asked {helper.name}.', f'"Can I help you?" asked {helper.name}.'
        ),
        f'"I lost my {thing}," said {hero.name}.',
        f"They looked {found}, and there was the {thing}!",
        cast.pick(f"{hero.name} was so happy.", f"{hero.name} hugged {helper.name}."),
    ]


def afraid(cast: Cast) -> list[str]:
    hero, helper = cast.hero, cast.helper
    fear, cure = skewed(cast.rng, tables.FEARS)
    return [
        f"{hero.name} was afraid of {fear}.",
        cast.meeting(),
        cast.pick(f'"Come with me," said {helper.name}.', f'"What is wrong?" asked {helper.name}.'),
        f'"I am afraid of {fear}," said {hero.name}.',
        f'{helper.name} gave {hero.him} {cure}. "This will help you," said {helper.name}.',
        f"{hero.name} took {cure} and was not afraid of {fear} any more.",
    ]


def share(cast: Cast) -> list[str]:
    hero, helper, thing = cast.hero, cast.helper, cast.thing
    return [
        f"{hero.name} found {with_article(f'{cast.colour} {thing}')} {cast.spot()}.",
        f"{capitalised(hero.his)} friend {helper.name} wanted the {thing} too.",
        cast.pick(f'"It is mine!" said {hero.name}.', f'"I saw it first!" said {helper.name}.'),
        cast.pick(
            f"{helper.name} was sad and walked away.",
            f"They both pulled, and the {thing} fell down.",
        ),
        f'Then {hero.name} had an idea. "We can share the {thing}," {hero.he} said.',
        f"So {hero.name} and {helper.name} played with the {cast.colour} {thing} all day.",
    ]


def build(cast: Cast) -> list[str]:
    hero, helper = cast.hero, cast.helper
    what, material = skewed(cast.rng, tables.BUILDINGS)
    return [
        f"{capitalised(hero.he)} wanted to build {what}.",
        f"{hero.name} looked for {material}, but could not find enough {material}.",
        cast.meeting(),
        f'"I have a lot of {material}," said {helper.name}.',
        f"They worked all day, and at last {what} was ready.",
        cast.pick(f'"It is beautiful!" said {hero.name}.', f'"We did it!" said {helper.name}.'),
    ]


def rescue(cast: Cast) -> list[str]:
    hero, helper, thing = cast.hero, cast.helper, f"{cast.colour} {cast.thing}"
    weather = skewed(cast.rng, tables.WEATHER)
    return [
        f'One {weather} day {hero.he} heard a small voice. "Help! Help!"',
        f"It was {with_article(helper.kind)} named {helper.name}.",
        f"{capitalised(helper.he)} was stuck {cast.spot()}.",
        cast.pick(
            f'"Do not worry, {helper.name}," said {hero.name}.',
            f'"I will help you," said {hero.name}.',
        ),
        cast.pick(
            f"{capitalised(hero.he)} pulled and pulled until {helper.name} was free.",
            f"{capitalised(hero.he)} came back with a rope. Soon {helper.name} was free.",
        ),
        f"{helper.name} gave {hero.name} {with_article(thing)} to say thank you.",
    ]


def bake(cast: Cast) -> list[str]:
    hero, helper = cast.hero, cast.helper
    food, missing = skewed(cast.rng, tables.FOODS), skewed(cast.rng, tables.INGREDIENTS)
    family = skewed(cast.rng, tables.FAMILY)
    return [
        f"{capitalised(hero.he)} wanted to make {food} for {hero.his} {family}.",
        f"But {hero.he} had no {missing}.",
        cast.meeting(),
        f'"I have {missing}," said {helper.name}. "You can have it."',
        f"Together they made the {food}. It smelled so good.",
        f"{hero.name} and {helper.name} ate {food} until the sun went down.",
    ]


def storm(cast: Cast) -> list[str]:
    hero, helper = cast.hero, cast.helper
    weather = cast.pick("rain", "snow", "wind", "storm")
    return [
        f"One day {hero.name} went for a walk.",
        f"Soon the {weather} came, and {hero.he} could not see the way home.",
        cast.meeting(),
        f'"Follow me," said {helper.name}. "I know a place {cast.spot()}."',
        f"They sat there and talked until the {weather} was over.",
        f"Then {helper.name} showed {hero.name} the way home.",
    ]


PLOTS: dict[str, Callable[[Cast], list[str]]] = {
    "lost": lost, "afraid": afraid, "share": share, "build": build, "rescue": rescue,
    "bake": bake, "storm": storm,
}  # fmt: skip
PLOTS_WITH_A_THING = ("lost", "share", "rescue")


def ending(cast: Cast) -> str:
    hero, helper = cast.hero, cast.helper
    last = cast.pick(
        f"{hero.name} and {helper.name} were best friends from that day on.",
        f"{hero.name} went home with a big smile.",
        f"That night {hero.name} slept very well.",
        f'{hero.name} said, "Thank you, {helper.name}." {helper.name} smiled.',
    )
    return f"{last} The end."


def opening(rng: random.Random, hero: Character, place: str) -> str:
    """The first one or two sentences; they name the hero."""
    who = f"{with_article(skewed(rng, tables.TRAITS))} {hero.kind} named {hero.name}"
    start = skewed(rng, ["Once upon a time", "One day", "Long ago"])
    if start == "One day":
        return f"One day {who} went to the {place}."
    return f"{start} there was {who}. {capitalised(hero.he)} lived near the {place}."


def draw_character(
    rng: random.Random, girls: Sequence[str], boys: Sequence[str], kind: str | None = None
) -> Character:
    kind = kind or skewed(rng, ["girl", "boy", skewed(rng, tables.ANIMALS)], 0.5)
    is_female = kind == "girl" or (kind != "boy" and rng.random() < 0.5)
    return Character(skewed(rng, girls if is_female else boys), kind, is_female)


def tell_story(
    rng: random.Random,
    *,
    hero: Character | None = None,
    kind: str | None = None,
    thing: str | None = None,
) -> Story:
    """One random story, on request about a given hero, kind of hero ("fox") or thing ("kite")."""
    hero = hero or draw_character(rng, tables.GIRLS, tables.BOYS, kind)
    helper = draw_character(rng, tables.HELPER_GIRLS, tables.HELPER_BOYS)
    place, colour = skewed(rng, tables.PLACES), skewed(rng, tables.COLOURS)
    plot = rng.choice(PLOTS_WITH_A_THING) if thing else skewed(rng, list(PLOTS), 0.5)
    cast = Cast(rng, hero, helper, place, colour, thing or skewed(rng, tables.TOYS))
    sentences = [opening(rng, hero, place), *PLOTS[plot](cast), ending(cast)]
    return Story(" ".join(sentences), hero, helper, plot, cast.thing)
