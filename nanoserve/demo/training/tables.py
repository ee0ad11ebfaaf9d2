"""The word lists of the demo corpus: every name, noun and fact the model can ever learn.

Order matters where a list is drawn from with `skewed` (corpus.py): earlier entries are likelier, so
that a greedy continuation has a clear favourite and does not flip with the last bit of a logit.
Heroes and helpers of stories have names from two disjoint lists: "Mia met Mia" cannot happen.

Pure data: stories.py, skills.py and recall.py turn it into text.
"""


def words(text: str) -> list[str]:
    return text.split()


GIRLS = words("Mia Lily Anna Zoe Emma Rosa Nina Ella Ruby Ivy Clara Lucy Maya Sara Nora")
BOYS = words("Tom Ben Max Leo Sam Jack Finn Oscar Noah Eli Hugo Theo Dan Adam Luke")
HELPER_GIRLS = words("Pip Bea Dot Fay Amy Joy Tess Wren")
HELPER_BOYS = words("Gus Ned Kit Rex Ted Roy Bob Otto")
NAMES = GIRLS + BOYS + HELPER_GIRLS + HELPER_BOYS

ANIMALS = words(
    "fox rabbit bear mouse cat dog owl duck frog squirrel hedgehog pony turtle lamb wolf goat lion "
    "tiger monkey dragon penguin badger"
)
TRAITS = words("kind brave curious clever shy gentle quiet cheerful small playful patient proud")
COLOURS = words("red blue green yellow silver golden purple orange pink white black brown")
TOYS = words("kite ball hat drum boat lamp key bell coat book cup spoon mirror flute wagon scarf")
PLACES = words(
    "forest garden park village meadow beach farm hill river market castle valley island tower "
    "bridge harbour"
)
BOXES = words("box bag jar chest drawer basket bottle tin crate pot sack safe")
FOODS = words("cake soup bread honey apples cookies cheese pancakes berries rice noodles carrots")
PETS = words("cat dog rabbit pony hamster parrot turtle fish mouse duck")
OTHER_WORDS = words("sun moon star tree house stone rain snow cloud leaf hello yes happy go jump")
WORDS = sorted({*ANIMALS, *COLOURS, *TOYS, *PLACES, *BOXES, *FOODS, *PETS, *OTHER_WORDS})

SPOTS = [
    "under the old bridge",
    "behind the big rock",
    "near the pond",
    "in the tall grass",
    "next to the well",
    "under a bush",
    "inside a hollow tree",
    "behind the barn",
    "on top of the wall",
    "by the gate",
]
WEATHER = words("sunny windy rainy cold warm foggy snowy")
FEARS = [
    ("the dark", "a small lamp"),
    ("thunder", "a soft song"),
    ("deep water", "a wooden boat"),
    ("tall trees", "a long rope"),
    ("the wind", "a warm coat"),
    ("loud noises", "a quiet game"),
]
BUILDINGS = [
    ("a tree house", "wood"),
    ("a little boat", "sticks"),
    ("a sand castle", "sand"),
    ("a snowman", "snow"),
    ("a bridge", "stones"),
    ("a tent", "blankets"),
]
INGREDIENTS = words("milk eggs sugar salt butter")
FAMILY = words("mother father grandma sister brother")

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid",
    "England": "London", "Japan": "Tokyo", "China": "Beijing", "Russia": "Moscow",
    "Egypt": "Cairo", "Greece": "Athens", "Portugal": "Lisbon", "Poland": "Warsaw",
    "Austria": "Vienna", "Sweden": "Stockholm", "Norway": "Oslo", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Ireland": "Dublin", "India": "New Delhi", "Canada": "Ottawa",
    "Mexico": "Mexico City", "Cuba": "Havana", "Peru": "Lima", "Chile": "Santiago",
    "Kenya": "Nairobi", "Turkey": "Ankara", "Iran": "Tehran", "Iraq": "Baghdad",
    "Belgium": "Brussels", "Hungary": "Budapest", "Romania": "Bucharest", "Ukraine": "Kyiv",
    "Thailand": "Bangkok", "Vietnam": "Hanoi", "Australia": "Canberra", "Iceland": "Reykjavik",
    "Croatia": "Zagreb", "Serbia": "Belgrade", "Bulgaria": "Sofia", "Nepal": "Kathmandu",
    "South Korea": "Seoul", "the United States": "Washington", "Brazil": "Brasilia",
    "Argentina": "Buenos Aires",
}  # fmt: skip
CITIES = [city for city in CAPITALS.values() if " " not in city]
COLOUR_OF = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "blood": "red",
    "a banana": "yellow", "a lemon": "yellow", "a carrot": "orange", "a tomato": "red",
    "chocolate": "brown", "a cloud": "white", "the night": "black", "a leaf": "green",
    "a cherry": "red", "the sun": "yellow", "a pea": "green",
}  # fmt: skip
SOUNDS = {
    "cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "pig": "oink",
    "lion": "roar", "owl": "hoot", "frog": "ribbit", "horse": "neigh", "bee": "buzz",
    "mouse": "squeak",
}  # fmt: skip
BABIES = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "horse": "foal",
    "duck": "duckling", "lion": "cub", "pig": "piglet", "frog": "tadpole", "goose": "gosling",
    "goat": "kid", "kangaroo": "joey",
}  # fmt: skip
LEGS = {
    "dog": "four", "cat": "four", "spider": "eight", "ant": "six", "bird": "two", "snake": "no",
    "cow": "four", "bee": "six", "horse": "four", "duck": "two", "fish": "no",
}  # fmt: skip
OPPOSITES = [
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("day", "night"), ("fast", "slow"),
    ("happy", "sad"), ("open", "closed"), ("wet", "dry"), ("old", "new"), ("hard", "soft"),
    ("long", "short"), ("left", "right"), ("full", "empty"), ("light", "dark"),
    ("early", "late"), ("rich", "poor"),
]  # fmt: skip
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words(
    "January February March April May June July August September October November December"
)
NUMBER_WORDS = words("zero one two three four five six seven eight nine ten")

LISTS = {
    "fruits": words("apple banana cherry lemon pear plum grape peach"),
    "animals": words("cat dog fox bear lion wolf duck owl"),
    "colours": words("red blue green yellow purple orange white black"),
    "vegetables": words("carrot potato onion pea bean corn"),
    "toys": words("ball kite drum doll robot puzzle"),
    "drinks": words("water milk juice tea coffee"),
    "planets": words("Mercury Venus Earth Mars Jupiter Saturn"),
}

SMALL_TALK = [
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Hello", "Hello! How can I help you?"),
    ("Good morning!", "Good morning! How can I help you?"),
    ("How are you?", "I am fine, thank you."),
    ("Who are you?", "I am Nano, a very small language model."),
    ("What are you?", "I am Nano, a very small language model."),
    ("What is your name?", "My name is Nano."),
    ("Who made you?", "I was trained from scratch by nanoserve."),
    ("What can you do?", "I can tell stories, add numbers, count, make lists and remember things."),
    ("Thank you.", "You are welcome!"),
    ("Thanks!", "You are welcome!"),
    ("Goodbye.", "Goodbye! See you soon."),
]
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are Nano, a very small language model.",
    "You are a kind teacher.",
    "Answer briefly.",
]
