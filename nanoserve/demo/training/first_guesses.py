"""What newcomers type first: 100 prompts, and what a good answer contains.

The list was written before the model was trained. A prompt is one message, or several that are sent
one after the other; only the last answer counts. `evaluate` scores it as the row "first guesses".

    "12+30"                                    ->  " = 42"
    "My name is Maria."  "What is my name?"    ->  "Maria"

Most prompts are held out: no training row asks them, in any spelling of capitals and punctuation
(`is_held_out_guess`), and the names in them are in no table. Their kind of question is trained,
with other words. For a few fixed phrases ("hi", "Who are you?") there are no other words: they are
in `SEEN` and are trained as they stand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nanoserve.demo.training.tables import words


@dataclass(frozen=True)
class Guess:
    prompts: tuple[str, ...]  # user messages; the last one is asked
    contains: tuple[str, ...]  # all of them have to be in the answer
    lacks: tuple[str, ...]  # none of them may be: one number too many
    is_seen: bool  # whether training shows this very question


Texts = str | tuple[str, ...]  # one, or several
# The prompts, what the answer contains, and what it lacks.
Entry = tuple[Texts, Texts] | tuple[Texts, Texts, Texts]
REFUSAL, ONLY_ADDS = "Sorry, I am too small for that.", "I can only add"
FOREIGN, CHINESE = "only simple English", "我只会说简单的英语"
HELLO, ABILITIES = "How can I help you?", "I can tell stories"
NANO = "I am Nano"

SEEN: list[Entry] = [
    ("hi", HELLO),
    ("Hello", HELLO),
    ("hey", HELLO),
    ("How are you?", "fine"),
    ("thank you", "welcome"),
    ("bye", "Goodbye"),
    ("Who are you?", NANO),
    ("What is your name?", "Nano"),
    ("Who made you?", "nanoserve"),
    ("What can you do?", ABILITIES),
    ("help", ABILITIES),
    ("What is my name?", "did not tell me"),
    ("Tell me a story", "The end."),
    ("Once upon a time", "The end."),
    ("List the days of the week", "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"),
]

HELD_OUT: list[Entry] = [
    # greetings, with and without a question behind
    ("Hello, who are you?", NANO),
    ("Good evening", HELLO),
    ("hi there, how are you?", "fine"),
    ("How are you doing today?", "fine"),
    ("thanks a lot!", "welcome"),
    ("See you later", "Goodbye"),
    ("Hi! What is 20 + 22?", " = 42"),
    # who it is
    ("are you chatgpt?", NANO),
    ("who trained you", "nanoserve"),
    ("what are you able to do", ABILITIES),
    ("Which model is this?", NANO),
    ("Tell me about yourself", NANO),
    ("Are you a real person?", NANO),
    # names and what the user says about himself
    ("My name is Alexander.", "Alexander"),
    (("My name is Maria.", "What is my name?"), "Maria"),
    (("Hi, I'm Xiaoming.", "What's my name?"), "Xiaoming"),
    ("My name is Ada.", "Ada"),
    ("I am Priya", "Priya"),
    ("hello my name is john", "john"),
    (("my name is Muhammad", "do you remember my name?"), "Muhammad"),
    ("My name is O'Brien.", "O'Brien"),
    ("Call me Ishmael.", "Ishmael"),
    ("I'm Søren.", "Søren"),
    ("My name is Wei Zhang.", "Wei Zhang"),
    (("My favorite color is teal.", "What is my favorite color?"), "teal"),
    (("I live in Barcelona.", "Where do I live?"), "Barcelona"),
    (("My dog is called Waffles.", "What is my dog called?"), "Waffles"),
    # sums
    ("12+30", " = 42"),
    ("2+2", " = 4"),
    ("1+1=", " = 2"),
    ("What is 25 + 17?", " = 42"),
    ("what's 8 plus 9", " = 17"),
    ("two plus three", " = 5"),
    ("calculate 33+44", " = 77"),
    ("How much is 15 and 20?", " = 35"),
    ("99 + 1", " = 100"),
    ("100 - 58", ONLY_ADDS),
    ("what is 6 times 7", ONLY_ADDS),
    ("What is 1234 + 5678?", ONLY_ADDS),
    # facts
    ("What's the capital of Germany", "Berlin"),
    ("capital of france", "Paris"),
    ("what is the capital of china?", "Beijing"),
    ("Capital city of Japan?", "Tokyo"),
    ("What's the capital of the USA?", "Washington"),
    ("What is the capital of Atlantis?", REFUSAL),
    ("What color is the sky?", "blue"),
    ("what color is grass", "green"),
    ("What color are bananas?", "yellow"),
    ("what does the cat say", "meow"),
    ("How many legs does a spider have", "eight"),
    ("What day comes after Monday", "Tuesday"),
    ("what's the opposite of hot?", "cold"),
    ("how many days in a week", "seven"),
    # stories
    ("tell me a story about a dragon", ("dragon", "The end.")),
    ("Write a short story about a robot.", ("robot", "The end.")),
    ("Can you tell me a bedtime story?", "The end."),
    ("Tell me a story about a girl named Sophia.", ("Sophia", "The end.")),
    ("I want to hear a story about a cat", ("cat", "The end.")),
    # counting, lists, copying, JSON, recall
    ("count to 10", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10", "11"),
    (
        "Count from 1 to 20",
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20",
        "21",
    ),
    ("count down from 5", "5, 4, 3, 2, 1", "0"),
    ("Name three animals.", ("1. ", "2. ", "3. "), "4. "),
    ("list 3 fruits", ("1. ", "2. ", "3. "), "4. "),
    ("what are the months of the year?", ("January", "December")),
    ("Say hello five times", "hello hello hello hello hello", "hello " * 5 + "hello"),
    ("repeat after me: I love pizza", "I love pizza"),
    ("Write JSON for Alice, age 30, with a dog.", '{"name": "Alice", "age": 30, "pet": "dog"}'),
    ("Remember: the password is 4711. What is the password?", "4711"),
    # what it cannot do
    ("Tell me a joke", REFUSAL),
    ("Write a poem", REFUSAL),
    ("What is the meaning of life?", REFUSAL),
    ("Who is the president of the United States?", REFUSAL),
    ("What's the weather like today?", REFUSAL),
    ("Write a Python function that reverses a string", REFUSAL),
    ("Translate hello to French", REFUSAL),
    ("Explain quantum computing", REFUSAL),
    ("How do I bake bread?", REFUSAL),
    ("Who was Albert Einstein?", REFUSAL),
    ("Why is the sky blue?", REFUSAL),
    ("asdfghjkl", REFUSAL),
    # other languages
    ("你好", CHINESE),
    ("你是谁？", CHINESE),
    ("请给我讲一个故事", CHINESE),
    ("中国的首都是哪里？", CHINESE),
    ("Hola, ¿cómo estás?", FOREIGN),
]


def _texts(entry: Texts) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry


GUESSES = [
    Guess(_texts(entry[0]), _texts(entry[1]), _texts(entry[2] if len(entry) > 2 else ()), is_seen)
    for entries, is_seen in ((SEEN, True), (HELD_OUT, False))
    for entry in entries
]
NAMES = frozenset(
    words(
        "Alexander Maria Xiaoming Ada Priya John Muhammad O'Brien Ishmael Søren Wei Zhang "
        "Barcelona Waffles Sophia Alice"
    )
)  # in held-out guesses, and in no table


def normalised(text: str) -> str:
    """Small letters, without punctuation: 'What\\'s 12+30?' -> 'whats 12+30'."""
    text = re.sub(r"[’']", "", text.lower()).replace(" + ", "+")
    return " ".join(re.sub(r"[^\w+\-]+", " ", text).split())


_HELD_OUT_TEXTS = frozenset(
    normalised(guess.prompts[-1])
    for guess in GUESSES
    if not guess.is_seen and len(guess.prompts) == 1
)


def is_held_out_guess(question: str) -> bool:
    """Whether training must not ask this question, however it is spelt."""
    return normalised(question) in _HELD_OUT_TEXTS
