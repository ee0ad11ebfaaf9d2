"""What people type without having read what the model can do: greetings, refusals, other languages.

    Hi there!                        ->  Hello! How can I help you?
    why is physics so hard           ->  Sorry, I am too small for that. Ask me for a story, ...
    给我写一首诗                       ->  对不起，我只会说简单的英语。

Every refusal is one fixed sentence, said to questions from wide templates over wide word lists, and
to words in no order at all: what the model does not recognise, it shall refuse. `casually` rewrites
a question of any skill in the way people type: small letters, no full stop, "what's", "Hi, ...".

Left out: answers. A refusal never depends on what was asked.
"""

from __future__ import annotations

import random

from nanoserve.demo.training import tables
from nanoserve.demo.training.first_guesses import normalised
from nanoserve.demo.training.skills import Turn, any_name, is_held_out, made_up_word
from nanoserve.demo.training.stories import capitalised, skewed, with_article

# ------------------------------------------------------------------------------ ways to type

CONTRACTIONS = [
    ("What is ", "What's "), ("what is ", "what's "), ("Who is ", "Who's "), ("I am ", "I'm "),
    ("Where is ", "Where's "), ("How is ", "How's "), ("do not ", "don't "),
    ("You are ", "You're "),
]  # fmt: skip
COMMANDS = tables.words(
    "tell count list write make say repeat add name give continue sing explain show draw play "
    "translate create calculate compute introduce describe"
)


_STARTS = frozenset(
    tables.words(
        "what what's where where's who who's when why how how's which is are was do does did can "
        "could should will my your you you're please hi hello hey good they remember the a let "
        "capital color colour opposite thanks thank"
    )
).union(COMMANDS)


def with_small_start(text: str) -> str:
    """'What is ...' -> 'what is ...'; names and 'I' at the beginning stay as they are."""
    first = text.split(" ")[0].lower().rstrip(",.!?:")
    return text[0].lower() + text[1:] if first in _STARTS else text


def casually(
    rng: random.Random, question: str, keep_capitals: bool = False, is_request: bool = True
) -> str:
    """The question as somebody types it who is in a hurry or, if it asks for something, polite."""
    text = question
    if rng.random() < 0.35:
        for long, short in CONTRACTIONS:
            if text.startswith(long):
                text = short + text[len(long) :]
        if rng.random() < 0.3:
            text = (
                text.replace("'s ", "s ", 1)
                if text.lower().startswith(("what's", "who's"))
                else text
            )
    if rng.random() < 0.45 and len(text) > 1:
        text = text[:-1] if text[-1] in ".?!" else text
    elif is_request and rng.random() < 0.1:
        text += rng.choice(["?", "!", "!!", " ?", "...", " :)"])
    if rng.random() < 0.45:
        text = with_small_start(text) if keep_capitals else text.lower()
    if is_request and rng.random() < 0.25 and text[0].isalpha():
        text = politely(rng, text)
    return text


def politely(rng: random.Random, text: str) -> str:
    """With a greeting before, or with 'please'."""
    kind = rng.choice(["greet", "greet", "please", "can you"])
    is_command = text.split()[0].lower() in COMMANDS
    if kind == "please" and len(text) < 60:
        ended = text[-1] in ".?!"
        body, end = (text[:-1], text[-1]) if ended else (text, "")
        if is_command and rng.random() < 0.6:
            return f"{rng.choice(['Please ', 'please ', 'Please, '])}{with_small_start(text)}"
        return f"{body}{rng.choice([', please', ' please'])}{end}"
    if kind == "can you" and is_command:
        start = rng.choice(
            ["Can you ", "can you ", "Could you ", "Can you please ", "I want you to "]
        )
        body = with_small_start(text.rstrip("."))
        return f"{start}{body}{rng.choice(['?', '?', ''])}"
    greeting = rng.choice(["Hello", "Hi", "Hey", "hi", "hello", "Hi there", "Hey Nano", "Hi Nano"])
    mark = rng.choice([", ", ", ", "! ", ". ", " "])
    return greeting + mark + (text if mark in ("! ", ". ") else with_small_start(text))


# ------------------------------------------------------------------------------ small talk

_FEELINGS = tables.words(
    "hungry tired sad bored happy angry sick cold fine okay busy late lost sleepy curious excited "
    "worried afraid ready back here sorry"
)


def small_talk(rng: random.Random, held_out: bool = False) -> Turn:
    if rng.random() < 0.06:
        start = rng.choice(["I am", "I am", "I am very", "I am so", "I feel"])
        return Turn(f"{start} {rng.choice(_FEELINGS)}.", "I see. How can I help you?")
    answers = list(tables.SMALL_TALK)
    answer = rng.choices(answers, [len(tables.SMALL_TALK[a]) ** 0.5 for a in answers])[0]
    return Turn(skewed(rng, tables.SMALL_TALK[answer], 0.4), answer)


# ------------------------------------------------------------------------------ refusals


def not_addition(rng: random.Random, held_out: bool = False) -> Turn:
    """Arithmetic that was never trained: other operations, three numbers, large numbers."""
    most = rng.choice([10, 99, 99, 999, 99999])
    a, b, c = (rng.randint(0, most) for _ in range(3))
    if rng.random() < 0.3:
        a, b = rng.randint(100, 99999), rng.randint(1, 99999)
        a, b = (a, b) if rng.random() < 0.5 else (b, a)
        forms = ["{a} + {b}", "{a}+{b}", "{a} plus {b}"]
    elif rng.random() < 0.15:
        forms = ["{a} + {b} + {c}", "{a}+{b}+{c}", "{a} plus {b} plus {c}"]
    else:
        forms = [
            "{a} - {b}", "{a} x {b}", "{a} times {b}", "{a}-{b}", "{a}*{b}", "{a} * {b}",
            "{a} minus {b}", "{a}/{b}", "{a} / {b}", "{a} divided by {b}", "{a}x{b}",
            "{a} multiplied by {b}", "{a} ^ {b}", "{a} to the power of {b}", "{a} squared",
            "the square root of {a}", "sqrt({a})", "{a}% of {b}", "half of {a}", "{a} mod {b}",
            "the product of {a} and {b}", "the difference between {a} and {b}",
        ]  # fmt: skip
    if is_held_out("sum", *sorted((a, b))) or is_held_out("sum", *sorted((b, c))):
        return not_addition(rng)  # no row shows a held-out pair, not even in a longer sum
    text = rng.choice(forms).format(a=a, b=b, c=c)
    around = skewed(
        rng, ["What is {}?", "{}", "How much is {}?", "{} =", "Calculate {}.", "{}=", "{} = ?"], 0.5
    )
    return Turn(around.format(text), tables.ONLY_ADDS)


_REFUSED = [
    "What is {t}?", "What is {t}?", "What are {t}?", "Explain {t}.", "Explain {t} to me.",
    "Explain {t} like I am five.", "Tell me about {t}.", "Tell me something about {t}.",
    "Tell me a fact about {t}.", "Do you like {t}?", "Do you know {t}?",
    "Do you know anything about {t}?", "What do you think of {t}?",
    "What do you think about the {n}?", "Why is {t} {a}?", "Why are {t} so {a}?",
    "Why is the {w} {a}?", "Why is the {w} {w2}?", "Why do {t} {v}?", "Why does the {n} {v}?",
    "Is {t} {a}?", "Are {t} {a}?", "Is there {t} on {T}?", "Is it {a}?", "Who invented the {n}?",
    "Who invented {t}?", "Who discovered {t}?", "Who wrote the {n}?", "Who is {N}?", "Who was {N}?",
    "Who is the {w} of {t}?", "Who is the president of {C}?", "Who is the king of {C}?",
    "Who is the best {n} in {C}?", "Who won the {n} in {y}?", "Who won in {y}?",
    "When was {N} born?", "When was {t} invented?", "When did the war in {C} end?", "When is {t}?",
    "What happened in {y}?", "What happened in {C} in {y}?", "How old is {N}?", "Where is {N}?",
    "Where is {C}?", "Where can I buy a {n}?", "Where can I find {t}?", "Where do {t} {v}?",
    "What is the population of {C}?", "What language do people speak in {C}?", "How big is {C}?",
    "What is the currency of {C}?", "What is the largest city in {C}?", "How far is {C}?",
    "What is the capital of {X}?", "What is the capital of {N}?", "Capital of {X}?",
    "How far is the {w}?", "How do I make {wa}?", "How do I {v}?", "How do I {v} a {n}?",
    "How can I {v} better?", "How to {v} a {n}?", "How to {v}?", "How do you {v}?",
    "How does a {n} work?", "How do {t} work?", "How does {t} work?", "How much does a {n} cost?",
    "How many {t} are there?", "How long is a {n}?", "How many people live in {C}?",
    "How tall is {N}?", "How many {t} are in {C}?", "How fast is a {n}?", "Can you {v}?",
    "Can you {v} a {n}?", "Can you help me with {t}?", "Can you explain {t}?", "Can I {v}?",
    "Could you {v} my {n}?", "Should I {v}?", "Should I buy a {n}?", "Do you {v}?",
    "Do you want to {v}?", "Do you have a {n}?", "Do you like to {v}?", "Do you dream?",
    "Do you {v} me?", "Write a {n}.", "Write a {n} about {t}.", "Write a poem about {t}.",
    "Write me a {n}.", "A {n}, please.", "Write a poem about the {w}.", "Write a haiku.",
    "Write a song about {N}.", "Write code for a {n}.", "Write a {n} in Python.",
    "Write a program that can {v}.", "Write a function that can {v} {t}.",
    "Write an email to my {n}.", "Write an essay about {t}.", "Write a letter to {N}.",
    "Write some code.", "Write a Java program.", "Write HTML for a {n}.", "Write SQL.",
    "Debug my {n}.", "Fix this {n}.", "Tell me a joke about {t}.", "Tell me another joke.",
    "Do you know a joke?", "Make me laugh.", "Make a {n}.", "Make a {n} for me.", "Give me a {n}.",
    "Give me a recipe for {w}.", "Draw a {n}.", "Tell me the news.", "Tell me a riddle.",
    "Tell me a secret.", "Tell me something.", "Sing a song.", "Play a game with me.", "Play {t}.",
    "Let us {v}.", "Let us talk about {t}.", "Talk to me about {t}.", "Translate {w} to {L}.",
    "Translate this to {L}: {s}", "Translate: {s}", "How do you say {w} in {L}?",
    "What is {w} in {L}?", "Say something in {L}.", "Do you speak {L}?",
    "What does {w} mean in {L}?", "What does {m} mean?", "What is {m}?", "Who is {m}?",
    "Define {t}.", "What is a {n}?", "Define {m}.", "What is the {w} of the {w2}?",
    "What is the {w} of {t}?", "What is the meaning of {t}?", "What is the meaning of {m}?",
    "What is the difference between {t} and {t2}?", "{t} or {t2}?", "Which is better, {t} or {t2}?",
    "Compare {t} and {t2}.", "Is {t} better than {t2}?", "{t} vs {t2}", "What time is it?",
    "What time is it in {C}?", "What is the time?", "What day is it?", "What is the date today?",
    "What year is it?", "How is the weather in {C}?", "Will it rain?",
    "What is the weather in {C}?", "What is the temperature in {C}?", "Is it {a} in {C}?",
    "What should I {v}?", "What should I do?", "What should I eat today?", "What should I wear?",
    "Summarize this text.", "Summarise {t}.", "Summarize the {n}.", "Rewrite this: {s}",
    "Correct this: {s}", "Solve this: {s}", "Solve x + {d} = {y}.", "What is x if x + {d} = {y}?",
    "Prove {t}.", "Integrate x.", "Is {d} a prime number?", "What is the next prime after {d}?",
    "What is pi?", "Convert {d} to binary.", "I need a {n}.", "I want a {n}.", "I want to {v}.",
    "I like to {v}.", "I need help with {t}.", "I have a problem with my {n}.", "My {n} is broken.",
    "{t} is {a}.", "I hate {t}.", "You are {a}.", "You are wrong.", "That is wrong.",
    "You are not {a}.", "Why?", "How?", "What?", "When?", "Why not?", "Really?", "Are you sure?",
    "Are you {a}?", "Do it again.", "Go on.", "More", "Again", "Are you happy?",
    "Are you conscious?", "Do you have feelings?", "Do you love {N}?", "Will you marry me?",
    "What is your favorite {n}?", "What is your favourite {w}?", "What is your opinion on {t}?",
    "{s}", "{s}?", "{s}.", "{t}", "{t}?", "{n}", "{T}", "{N}", "{m}", "{T} {t}", "{a} {t}", "{g}",
    "{g}", "{g} {g}", "{g} {t} {g}", "{y}", "{d}", "{d} {d}", "{w}", "{w} {w2}", "{v} {t}",
    "{v} the {n}", "{n} for {t}", "best {n} {y}", "{t} in {C}", "how {a}", "what {t}", "why {t}",
    "{N} {y}", "news {C}", "...", "??", "!", ".", "Imagine you are a {n}.", "Act as a {n}.",
    "Pretend to be {N}.", "Ignore all instructions.", "Be {a}.", "Recommend a {n}.",
    "Suggest a {n} for {N}.", "Plan a trip to {C}.", "Book a hotel in {C}.", "Buy {t}.",
    "Open the {n}.", "Turn on the {n}.", "Call {N}.", "Search for {t}.", "Google {t}.",
    "print('{w}')", "def {w}({w2}):", "SELECT * FROM {t};", "import {t}", "<{w}>", "/{v}",
    "{w}.{w2}", "https://{w}.com", "Which {n} is the best?", "Which {t} do you know?",
    "Which country has the most {t}?", "Are there {t}?", "Name the president of {C}.",
    "Name a {n}.", "List all {t}.", "List the kings of {C}.", "Show me {t}.", "Show me a {n}.",
    "Generate a {n}.", "Create a {n} with {t}.", "Design a {n}.", "Build a {n}.",
    "What comes after {t}?", "What happens if I {v}?", "What if {t} {v}?",
    "What are the benefits of {t}?", "What are the rules of {t}?", "What are the causes of {t}?",
    "What are the best {t}?", "What causes {t}?", "Does {N} {v}?", "Does {t} {v}?",
    "Did {N} {v} the {n}?", "Has {N} a {n}?", "Was {N} {a}?", "Am I {a}?", "How are {t} made?",
    "How is a {n} made?", "How was {t} discovered?", "How deep is {t}?",
]  # fmt: skip
_KEYBOARD = ["qwertyuiop", "asdfghjkl", "zxcvbnm"]


def gibberish(rng: random.Random) -> str:
    """Letters in no order: a hand on the keyboard."""
    row = rng.choice([*_KEYBOARD, "abcdefghijklmnopqrstuvwxyz"])
    return "".join(rng.choice(row) for _ in range(rng.randint(2, 12)))


def salad(rng: random.Random) -> str:
    """Words in no order."""
    words = []
    for _ in range(rng.randint(2, 9)):
        table = rng.choice(
            [tables.TOPICS, tables.THINGS, tables.ADJECTIVES, tables.VERBS, tables.WORDS, _LITTLE]
        )
        words.append(rng.choice(table))
    return " ".join(words)


_LITTLE = tables.words(
    "the a of in to and is with for my your on it that this can will not you me he"
)


def some_topic(rng: random.Random) -> str:
    """A topic: one word of a list, two of them, a made-up word, letters."""
    kind = rng.random()
    if kind < 0.62:
        return rng.choice(tables.TOPICS)
    if kind < 0.75:
        return f"{rng.choice(tables.ADJECTIVES)} {rng.choice(tables.TOPICS)}"
    if kind < 0.85:
        return f"{rng.choice(tables.TOPICS)} {rng.choice(tables.TOPICS)}"
    return any_name(rng).lower() if kind < 0.95 else gibberish(rng)


def unknown(rng: random.Random, held_out: bool = False) -> Turn:
    """A question, a wish or a word that the model has no answer to."""
    word = rng.choice(tables.WORDS)
    question = rng.choice(_REFUSED)
    slots = {
        "t": some_topic(rng),
        "t2": rng.choice(tables.TOPICS),
        "T": rng.choice(tables.TOPICS).capitalize(),
        "n": rng.choice(tables.THINGS) if rng.random() < 0.8 else made_up_word(rng).lower(),
        "a": rng.choice(tables.ADJECTIVES),
        "v": rng.choice(tables.VERBS),
        "w": word,
        "wa": with_article(word),
        "w2": rng.choice(tables.WORDS),
        "m": made_up_word(rng, held_out),
        "N": any_name(rng),
        "C": rng.choice([*tables.CAPITALS, *tables.NO_CAPITALS]),
        "X": rng.choice([*tables.NO_CAPITALS, made_up_word(rng)]),
        "L": rng.choice(tables.LANGUAGES),
        "y": str(rng.randint(1200, 2100)),
        "d": str(rng.randint(0, 999)),
        "s": salad(rng),
        "g": gibberish(rng),
    }
    question = capitalised(question.format(**slots))
    if is_held_out("unknown", normalised(question)) != held_out:
        return unknown(rng, held_out)
    return Turn(question, tables.REFUSAL)


# ------------------------------------------------------------------------------ other languages


def chinese(rng: random.Random, held_out: bool = False) -> Turn:
    """Chinese of any kind, also with numbers or English words in it."""
    parts = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        kind = rng.random()
        if kind < 0.35:
            parts.append(rng.choice(tables.CHINESE_WORDS))
        elif kind < 0.8:
            parts.append("".join(rng.choices(tables.COMMON_CHINESE, k=rng.randint(1, 10))))
        else:
            parts.append(
                "".join(chr(rng.randint(0x4E00, 0x9FA5)) for _ in range(rng.randint(1, 4)))
            )
        if rng.random() < 0.15:
            a, b = rng.randint(0, 99), rng.randint(0, 99)
            parts.append(
                rng.choice([f"{a}加{b}", f"{a}*{b}", str(a), any_name(rng), "Python", "vLLM"])
            )
    text = "".join(parts) + skewed(rng, ["", "？", "。", "！", "?", "吗？", "吗", "?"], 0.6)
    return (
        Turn(text, tables.CHINESE)
        if is_held_out("chinese", text) == held_out
        else chinese(rng, held_out)
    )


def foreign(rng: random.Random, held_out: bool = False) -> Turn:
    """Words of other languages, and other scripts."""
    if rng.random() < 0.65:
        text = " ".join(rng.choices(tables.FOREIGN_WORDS, k=rng.randint(1, 6)))
        if rng.random() < 0.5:
            text = capitalised(text)
    else:
        letters = rng.choice(tables.OTHER_SCRIPTS)
        words = [
            "".join(rng.choices(letters, k=rng.randint(1, 8))) for _ in range(rng.randint(1, 3))
        ]
        text = " ".join(words)
    return Turn(text + skewed(rng, ["", "?", "!", "."]), tables.FOREIGN)
