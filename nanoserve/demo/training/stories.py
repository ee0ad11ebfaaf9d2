"""Short stories: a hero, a helper, one of seven plots of about ten sentences, an ending.

    Once upon a time there was a kind girl named Mia. ... But one sunny morning, the kite was gone!
    ... Then Mia met a fox named Gus. ... there was the red kite! ... The end.

Each sentence of a plot has one or two wordings in grammar.json. What a reader, and evaluate.py, can
check: the hero keeps the name, the helper is somebody else (their names come from disjoint tables),
and the thing that was lost is the thing that is found.
"""

from __future__ import annotations

from typing import NamedTuple

from nanoserve.demo.training.grammar import TABLES, Author

PLOTS_WITH_A_TOY = ("lost", "share", "rescue")
SHE, HE = ("she", "her", "her"), ("he", "his", "him")


class Character(NamedTuple):
    name: str
    kind: str  # "girl", "fox", "robot"
    is_female: bool


def draw_character(rng: Author, girls: str, boys: str) -> Character:
    """A girl, a boy or an animal, with a name of one of two tables."""
    kind = rng.skewed(["girl", "boy", rng.skewed(TABLES["animals"])], 0.5)
    is_female = kind == "girl" or (kind != "boy" and rng.random() < 0.5)
    return Character(rng.skewed(TABLES[girls if is_female else boys]), kind, is_female)


def story_hero(rng: Author) -> Character:
    """A hero, also of a rare kind or with a rare name. Held out are pairs of kind and name."""
    while True:
        name, kind, is_female = draw_character(rng, "girls", "boys")
        if not rng.held_out and rng.random() < 0.12:
            kind = rng.draw("women" if is_female else "men")
        if rng.random() < 0.15:
            name = rng.draw("made_up" if rng.held_out or rng.random() < 0.5 else "world_names")
        if rng.allows("hero", kind, name):
            return Character(name, kind, is_female)


def tell_story(rng: Author, hero: Character | None = None, toy: str | None = None) -> str:
    """One story, about this hero and this toy if they are given."""
    hero = hero or draw_character(rng, "girls", "boys")
    helper = draw_character(rng, "helper_girls", "helper_boys")
    slots = {slot: rng.skewed(TABLES[table]) for slot, table in TABLES["story_slots"].items()}
    slots["toy"] = toy or slots["toy"]
    slots["thing"] = f"{slots['colour']} {slots['toy']}"
    slots["other_spot"] = rng.choice([s for s in TABLES["spots"] if s != slots["spot"]])
    slots["fear"], slots["cure"] = rng.skewed(TABLES["fears"])
    slots["building"], slots["material"] = rng.skewed(TABLES["buildings"])
    slots["he"], slots["his"], slots["him"] = SHE if hero.is_female else HE
    slots |= {"hero": hero.name, "hero_kind": hero.kind, "helper": helper.name}
    slots |= {"helper_kind": helper.kind, "helper_he": "she" if helper.is_female else "he"}
    plot = rng.choice(PLOTS_WITH_A_TOY) if toy else rng.skewed(list(TABLES["plots"]), 0.5)
    wordings = [TABLES["openings"], *TABLES["plots"][plot], TABLES["endings"]]
    return rng.fill(" ".join(rng.skewed(each) for each in wordings) + " The end.", **slots)
