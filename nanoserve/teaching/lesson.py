"""Small engines, the four requests of all notebooks, and checks of guesses.

A  What is 17 + 25?                       B  What is 17 + 26?      begins like A
C  What is the capital of France?         D  Remember: ...         a longer prompt
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from textwrap import dedent
from typing import Any

from nanoserve.llm import LLM
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.teaching.recorder import RecordingRunner, record

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, in each notebook
CAST = {
    "A": "What is 17 + 25?",
    "B": "What is 17 + 26?",
    "C": "What is the capital of France?",
    "D": "Remember: The red box holds 7341. What does the red box hold?",
}


def small_llm(num_blocks: int = 24, **options: Any) -> LLM:
    """The demo model on the CPU, with blocks of 4 tokens and 4 sequences at most, recorded.
    `options` are those of LLM, and win."""
    small = {"num_gpu_blocks_override": num_blocks, "block_size": 4, "max_num_seqs": 4}
    options["scheduler_cls"] = record(options.get("scheduler_cls", Scheduler))
    options.setdefault("runner_cls", RecordingRunner)
    return LLM(**{**small, "device": "cpu", **options})


def prompt(llm: LLM, name: str) -> list[int]:
    """The token ids of one of the four requests, or of any other question, as a chat."""
    messages = [{"role": "user", "content": CAST.get(name, name)}]
    processor = llm.engine.input_processor
    return processor.render_chat(messages, add_generation_prompt=True)["prompt_token_ids"]


def serve(
    llm: LLM,
    requests: Mapping[str, int | tuple[int, int]],
    salts: Mapping[str, str] | None = None,
    **params: Any,
) -> dict[str, str]:
    """Run these requests to their ends; the answers by name.

    requests: name -> how many tokens at most, or (how many, at which step it arrives, from 1). A
    name such as "X: How are you?" has a question of its own, "A2" that of A. salts: name -> its
    `cache_salt`. `params` are those of SamplingParams; without any, the answers are greedy.
    """
    due = {name: how if isinstance(how, tuple) else (how, 1) for name, how in requests.items()}
    answers: dict[str, str] = {}
    step = 1
    while due or llm.has_unfinished_requests():
        for name in [name for name, (_, first) in due.items() if first <= step]:
            most, _ = due.pop(name)
            chosen = SamplingParams(**{"temperature": 0, "max_tokens": most, **params})
            request_id, _, question = name.partition(": ")
            asked = {"prompt_token_ids": prompt(llm, question or name[0])}
            llm.add_request(request_id, {**asked, "cache_salt": (salts or {}).get(name)}, chosen)
        for output in llm.step():
            answers[output.request_id] = output.outputs[0].text
        step += 1
    return answers


class Source:
    """Python code, as a notebook shows it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.text}```"

    def __repr__(self) -> str:
        return self.text


def source(*parts: Any) -> Source:
    """The code of these classes, methods or functions: what a chapter adds to the core."""
    return Source("\n\n".join(dedent(inspect.getsource(part)) for part in parts))


def check(guess: Any, answer: Any, hints: Mapping[Any, str] | None = None) -> None:
    """Print whether a guess is right; a list counts as a tuple. `hints` say of a wrong guess what
    it would be right for. Nothing that was guessed stops a notebook."""
    guess, right = (tuple(x) if isinstance(x, list) else x for x in (guess, answer))
    if guess is None:
        print(f"The engine says: {answer!r}. (You made no guess.)")
    elif guess == right:
        print(f"Right: {answer!r}.")
    else:
        hint = "".join(text for wrong, text in (hints or {}).items() if wrong == guess)
        print(f"Not {guess!r}. {hint} The engine says: {answer!r}.")
