"""Lab 11, Text out: when does a token become text, and where does the text end?

The tokenizer is the demo model's: byte-level, so that a character may be several tokens.
"""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from nanoserve import output_processor
from nanoserve.demo import MODEL_DIR
from nanoserve.extras.course.labs.helpers import make_sequence
from nanoserve.extras.course.spec import Lab, Task, must
from nanoserve.output_processor import BranchState, CompletionOutput, Detokenizer
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import SequenceStatus, SequenceUpdate

MODULE = "nanoserve.output_processor"
FIND_STOP = Task("11.1", MODULE, "find_stop_string")
APPEND_TOKEN = Task("11.2", MODULE, "Detokenizer.append")
CONTEXT = Task("11.3", MODULE, "Detokenizer._find_context")
APPEND = Task("11.4", MODULE, "BranchState.append")
HELD = Task("11.5", MODULE, "BranchState._num_held_chars")
OUTPUT = Task("11.6", MODULE, "BranchState.build_output")
LAB = Lab(
    11,
    "Text out",
    [FIND_STOP, APPEND_TOKEN, CONTEXT, APPEND, HELD, OUTPUT],
    needs_torch=True,  # for transformers, which brings the library of tokenizers
    memory=4096,
    seconds=15.0,
)
LETTERS = "aab  é你好😀\n"


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    """What a Detokenizer needs of a tokenizer."""
    from tokenizers import Tokenizer

    return SimpleNamespace(backend_tokenizer=Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")))


def encode(text: str) -> list[int]:
    return list(tokenizer().backend_tokenizer.encode(text, add_special_tokens=False).ids)


def decode(token_ids: list[int]) -> str:
    return str(tokenizer().backend_tokenizer.decode(token_ids))


def whole(token_ids: list[int]) -> str:
    """The text of these tokens, without a character that is not complete yet."""
    return decode(token_ids).rstrip("\ufffd")


# -- 11.1 --


def first_stop(text: str, stops: list[str], num_new: int) -> tuple[int, str] | None:
    """Show the new characters one by one, and look for each stop string."""
    for end in range(len(text) - num_new + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end - len(stop), stop
    return None


def check_stop(text: str, stops: list[str], num_new: int) -> None:
    right = first_stop(text, stops, num_new)
    got = output_processor.find_stop_string(text, stops, num_new)
    must(
        got == right,
        f"the text {text!r}, of which {text[len(text) - num_new :]!r} is new, and the stop strings "
        f"{stops}: the result should be {right} and is {got}",
    )


@FIND_STOP.behaviour(1, "a stop string may have begun in an earlier piece")
def begun_earlier() -> None:
    check_stop("one EN", ["END"], 2)
    check_stop("one END", ["END"], 1)
    check_stop("one END two", ["END"], 5)


@FIND_STOP.behaviour(0.5, "one that was complete before is not found again")
def not_again() -> None:
    check_stop("END and on", ["END"], 3)
    check_stop("aaa", ["a"], 1)


@FIND_STOP.behaviour(1, "of several, the one that is complete first")
def complete_first() -> None:
    check_stop("x abcd", ["abcd", "bc"], 6)
    check_stop("x ab", ["b", "ab"], 2)
    check_stop("x ab", ["ab", "b"], 2)


@FIND_STOP.behaviour(0.5, "as somebody finds it who reads letter by letter", is_property=True)
def letter_by_letter(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        text = "".join(rng.choices("ab", k=rng.randint(1, 9)))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
        check_stop(text, stops, rng.randint(0, len(text)))


# -- 11.2 and 11.3 --


def pieces(prompt: list[int], output: list[int]) -> list[str]:
    """What a Detokenizer returns for each token, and at the end."""
    detokenizer = Detokenizer(tokenizer(), prompt, True)
    return [*(detokenizer.append(token_id) for token_id in output), detokenizer.flush()]


def check_pieces(text: str, cut: int = 0) -> None:
    """The tokens behind `cut` become text piece by piece."""
    token_ids = encode(text)
    prompt, output = token_ids[:cut], token_ids[cut:]
    if decode(prompt).endswith("\ufffd"):
        return
    got = pieces(prompt, output)
    where = f"the text {text!r}, {cut} of its {len(token_ids)} tokens in the prompt: "
    right = text[len(decode(prompt)) :]
    joined = "".join(got)
    must(joined == right, f"{where}the pieces {got} make {joined!r}, not {right!r}")
    for number in range(len(output)):
        shown, known = "".join(got[: number + 1]), whole(token_ids[: cut + number + 1])
        expected = known[len(decode(prompt)) :]
        must(
            shown == expected,
            f"{where}after {number + 1} output tokens the user should have {expected!r}, and has "
            f"{shown!r}",
        )


@APPEND_TOKEN.behaviour(1, "a character comes when it is whole, and no earlier")
def whole_characters() -> None:
    must(len(encode("字")) == 3, "the demo tokenizer writes 字 as three tokens")
    check_pieces("a字b")


@APPEND_TOKEN.behaviour(0.5, "what never becomes a character comes at the end")
def flushed() -> None:
    output = encode("a字")[:-1]
    got = pieces(encode("x"), output)
    must(got == ["a", "", "", "\ufffd"], f"'a' and two thirds of 字 gave {got}")


@APPEND_TOKEN.behaviour(0.5, "behind broken bytes the text goes on")
def broken_bytes() -> None:
    third = encode("字")[2]
    output = [*encode("a"), third, third, *encode("b c")]
    got = "".join(pieces(encode("x"), output))
    right = decode(output)
    must(
        got == right, f"a byte that begins no character, twice: the text is {got!r}, not {right!r}"
    )


@APPEND_TOKEN.behaviour(1, "the pieces of any tokens make their text", is_property=True)
def any_tokens(seed: int) -> None:
    rng, some = random.Random(seed), encode("你😀é")
    for _ in range(100):
        check_pieces("".join(rng.choices(LETTERS, k=rng.randint(1, 20))))
    for _ in range(300):  # a model also writes broken bytes, and special tokens
        output = [rng.choice([*some, rng.randrange(261)]) for _ in range(rng.randint(1, 20))]
        got, right = "".join(pieces(encode("x"), output)), decode(output)
        must(got == right, f"the tokens {output}: the pieces make {got!r}, the text is {right!r}")


def find_context(prompt: list[int]) -> list[int]:
    return Detokenizer(tokenizer(), [], True)._find_context(prompt)


@CONTEXT.behaviour(1, "the last prompt tokens, and no more of them")
def last_tokens() -> None:
    prompt = encode("one two three four five six seven eight nine ten")
    must(len(prompt) > 12, "a long prompt")
    got = find_context(prompt)
    must(
        got == prompt[-Detokenizer.CONTEXT :],
        f"{len(prompt)} prompt tokens of whole words: the context should be the last "
        f"{Detokenizer.CONTEXT}, and is {len(got)} tokens long",
    )
    short = encode("hi")
    got = find_context(short)
    must(got == short, f"the prompt {short} is short: all of it, not {got}")


@CONTEXT.behaviour(0.5, "none if the prompt ends inside a character")
def ends_inside() -> None:
    prompt = encode("one two three four five six 字")
    must(find_context(prompt), "the prompt ends behind a whole character: it has a context")
    got = find_context(prompt[:-1])
    must(got == [], f"two thirds of a character are no context: [], not {got}")


@CONTEXT.behaviour(0.5, "its text never ends inside a character", is_property=True)
def context_is_whole(seed: int) -> None:
    rng, longest = random.Random(seed), 0
    for _ in range(100):
        text = "".join(rng.choices(LETTERS, k=rng.randint(4, 20)))
        cut = rng.randint(1, len(encode(text)))
        check_pieces(text, cut)
        prompt = encode(text)[:cut]
        got = find_context(prompt)
        must(
            not decode(got).endswith("\ufffd"),
            f"the context {got} of the prompt {prompt} reads {decode(got)!r}",
        )
        must(got == prompt[len(prompt) - len(got) :], f"{got} is not the end of {prompt}")
        longest = max(longest, len(got))
    must(longest, "of 100 prompts, none has a context")


# -- 11.4 to 11.6 --


class Reader:
    """A request whose tokens come in steps."""

    def __init__(self, **params: Any) -> None:
        options = SamplingParams(max_tokens=500, **params)
        self.seq = make_sequence(encode("x"), max_tokens=500, params=options)
        self.seq.status = SequenceStatus.RUNNING
        self.branch = BranchState(self.seq, Detokenizer(tokenizer(), encode("x"), True))

    def step(self, token_ids: list[int], status: SequenceStatus | None = None) -> str | None:
        """These tokens come; `status` if they are the last. Returns the stop string."""
        self.seq.token_ids += token_ids
        self.seq.status = status or self.seq.status
        update = SequenceUpdate(self.seq, tuple(token_ids), ())
        stop = self.branch.append(update)
        if stop is not None:
            self.seq.status, self.seq.stop_reason = SequenceStatus.FINISHED_STOPPED, stop
        return stop

    @property
    def output(self) -> list[int]:
        return self.seq.token_ids[self.seq.num_prompt_tokens :]


def steps_of(token_ids: list[int], rng: random.Random) -> list[list[int]]:
    """The tokens in steps of one to three."""
    ends = [0]
    while ends[-1] < len(token_ids):
        ends.append(min(len(token_ids), ends[-1] + rng.randint(1, 3)))
    return [token_ids[start:end] for start, end in pairwise(ends)]


def check_append(steps: list[list[int]], stops: list[str], **params: Any) -> None:
    """Text, tokens and stop string, beside those of a reader of whole texts."""
    token_ids = [token_id for step in steps for token_id in step]
    least, keeps = params.get("min_tokens", 0), params.get("include_stop_str_in_output", False)
    right: tuple[str, int, str | None] = whole(token_ids), len(token_ids), None
    for number in range(max(least, 0) + 1, len(token_ids) + 1):
        text = whole(token_ids[:number])
        found = first_stop(text, stops, len(text) - len(whole(token_ids[: number - 1])))
        if found is not None:
            end = found[0] + len(found[1]) * keeps
            right = text[:end], number, found[1]
            break
    reader, stop = Reader(stop=stops, **params), None
    for step in steps:
        stop = reader.step(step)
        if stop is not None:
            break
    got = reader.branch.text, len(reader.output), stop
    must(
        got == right,
        f"the tokens of {decode(token_ids)!r} in steps of {[*map(len, steps)]}, stop {stops}, "
        f"{params}: (text, tokens, stop string) should be {right} and are {got}",
    )


@APPEND.behaviour(1, "the text ends before the stop string, or behind it if asked for")
def ends_before() -> None:
    steps = [[token_id] for token_id in encode("one END two")]
    check_append(steps, ["END"])
    check_append(steps, ["END"], include_stop_str_in_output=True)


@APPEND.behaviour(1, "a step's tokens behind the stop string are given back")
def given_back() -> None:
    token_ids = encode("one END two three")
    check_append([token_ids[:2], token_ids[2:]], ["END"])


@APPEND.behaviour(1, "a stop string within min_tokens does not count")
def not_too_early() -> None:
    token_ids = encode("a b a b a b")
    for least in (1, 2, 3, len(token_ids)):
        check_append([token_ids], ["b"], min_tokens=least)


@APPEND.behaviour(1, "at the end: no text of the stop token, and what is held back")
def at_the_end() -> None:
    reader, token_ids = Reader(), encode("a字b")
    reader.seq.stop_token_ids = frozenset(token_ids[-1:])
    reader.step(token_ids, SequenceStatus.FINISHED_STOPPED)
    got = reader.branch.text
    must(got == "a字", f"the last token is the stop token: the text is 'a字', not {got!r}")
    must(len(reader.output) == len(token_ids), "the stop token stays among the tokens")
    reader = Reader()
    reader.step(encode("a字")[:-1], SequenceStatus.FINISHED_LENGTH)
    got = reader.branch.text
    must(got == "a\ufffd", f"max_tokens ends it inside 字: the text is 'a\ufffd', not {got!r}")


@APPEND.behaviour(1, "however the tokens come in steps", is_property=True)
def any_steps(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        token_ids = encode("".join(rng.choices("aab é你", k=rng.randint(1, 16))))
        stops = ["".join(rng.choices("ab 你", k=rng.randint(1, 3))) for _ in range(2)]
        keeps, least = rng.random() < 0.5, rng.choice([0, 0, 3])
        options = {"include_stop_str_in_output": keeps, "min_tokens": least}
        check_append(steps_of(token_ids, rng), stops, **options)


@HELD.behaviour(1, "one less than the longest stop string")
def longest() -> None:
    for stops, right in [(["END", "\n\n\n\n\n"], 4), (["x"], 0), ([], 0)]:
        got = Reader(stop=stops).branch._num_held_chars()
        must(got == right, f"stop {stops}: {right} characters may begin one, not {got}")


@HELD.behaviour(1, "none if the text will contain the stop string")
def contains_it() -> None:
    got = Reader(stop=["END"]).branch._num_held_chars()
    must(got == 2, f"the stop string will not be shown: 2 characters may begin it, not {got}")
    got = Reader(stop=["END"], include_stop_str_in_output=True).branch._num_held_chars()
    must(got == 0, f"the stop string will be shown: nothing is held back, not {got} characters")


def run(reader: Reader, steps: list[list[int]], is_delta: bool) -> list[CompletionOutput]:
    """The output after each step."""
    outputs = []
    for number, step in enumerate(steps, start=1):
        is_last = number == len(steps)
        stop = reader.step(step, SequenceStatus.FINISHED_LENGTH if is_last else None)
        outputs.append(reader.branch.build_output(is_delta))
        if stop is not None:
            break
    return outputs


@OUTPUT.behaviour(1, "each delta brings what no delta has brought")
def deltas() -> None:
    steps = [encode("one two"), encode(" three"), encode(" four")]
    outputs = run(Reader(), steps, is_delta=True)
    got = [output.text for output in outputs]
    must(got == ["one two", " three", " four"], f"the deltas of three steps are {got}")
    ids = [output.token_ids for output in outputs]
    must(ids == steps, f"their token ids should be {steps}, and are {ids}")
    outputs = run(Reader(), steps, is_delta=False)
    got = [output.text for output in outputs]
    must(
        got == ["one two", "one two three", "one two three four"],
        f"without deltas each output has all of the text so far, not {got}",
    )


@OUTPUT.behaviour(1, "what may begin a stop string is not shown before the end")
def held_back() -> None:
    reader = Reader(stop=["END"])
    reader.step(encode("one E"))
    got = reader.branch.build_output(is_delta=True).text
    must(got == "one", f"'one E', stop 'END': the last two characters may begin it; shown: {got!r}")
    reader.step(encode("x"), SequenceStatus.FINISHED_LENGTH)
    got = reader.branch.build_output(is_delta=True).text
    must(got == " Ex", f"the output has ended with 'one Ex': ' Ex' is to be shown, not {got!r}")


@OUTPUT.behaviour(0.5, "why it has ended")
def why() -> None:
    reader = Reader(stop=["END"])
    [*_, last] = run(reader, [[token_id] for token_id in encode("one END two")], is_delta=False)
    got = last.text, last.finish_reason, last.stop_reason
    must(got == ("one ", "stop", "END"), f"(text, finish_reason, stop_reason) are {got}")
    must(last.cumulative_logprob is None and last.logprobs is None, "no logprobs were asked for")


@OUTPUT.behaviour(0.5, "the deltas of any text make the final text", is_property=True)
def deltas_join(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        text = "".join(rng.choices(LETTERS, k=rng.randint(1, 16)))
        stops = ["".join(rng.choices("ab ", k=rng.randint(1, 3))) for _ in range(rng.randint(0, 2))]
        steps, reader = steps_of(encode(text), rng), Reader(stop=stops)
        outputs = run(reader, steps, is_delta=True)
        whole_text, joined = reader.branch.text, "".join(output.text for output in outputs)
        must(
            joined == whole_text,
            f"{text!r}, stop {stops}: the deltas make {joined!r}, the text is {whole_text!r}",
        )
        ids = [token_id for output in outputs for token_id in output.token_ids]
        must(ids == reader.output, f"{text!r}, stop {stops}: the token ids of the deltas are {ids}")
