"""Bad inputs: a valid call, option, checkpoint or template with one value changed.

Each must end with a clear error, or be served; and the engine beside it says the same afterwards.
What hangs, crashes or eats memory ends the process, which is a finding. The name of the case is
printed before it begins, so that the log of such a process ends with it.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanoserve.config import DEMO_MODEL, OPTIONS
from nanoserve.exceptions import brief
from nanoserve.llm import LLM
from nanoserve.sampling_params import SamplingParams
from nanoserve.tools.soak.judge import Probe, judge
from nanoserve.tools.soak.rounds import Round

MAX_SECONDS = 20.0  # for one case
JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
FILES = (*JSON_FILES, "model.safetensors")
SMALL = {"num_kv_blocks": 64, "max_num_seqs": 8}
VALID: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}
FRAGMENTS = (
    "{{ messages[0].content }}",
    "{% for m in messages %}{{ m.role }}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages | tojson }}",
    "{{ raise_exception('no') }}",
    "{{ 'x'.center(10**9) }}",
    "{{ '%0999999999d' % 3 }}",
    "{{ lipsum(n=10**6) }}",
    "{% include 'x' %}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x * 2 %}{% endfor %}",
    "{{ missing.thing }}",
    "{{ 1 / 0 }}",
    "{% if %}",
    "{{ '\\ud800' }}",
    "text",
    "",
)


def bad_values(rng: random.Random) -> list[Any]:
    """What a caller might give for anything."""
    number = rng.choice([2**31, 2**63, 2**70, 10**30, -(2**31), rng.randrange(-9, 9)])
    real = rng.choice([0.5, float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, -1e-9])
    text = rng.choice(["", "x", "\ud800", "x" * 100_000, "None", "1", "\x00"])
    nested: list[Any] = []
    for _ in range(500):
        nested = [nested]
    return [
        *(None, True, False, number, real, text, b"x", (), [], [None], [number], [text], [real]),
        {},
        {"a": number},
        {number: real},
        {3: number},
        {text},
        object(),
        int,
        nested,
        range(5),
        1j,
        [[1, 2], [3]],
        max,
    ]


class InputPart:
    """Rounds of bad inputs, beside an engine that must serve on."""

    def __init__(self, llm_cls: Callable[..., LLM] = LLM) -> None:
        self.llm_cls = llm_cls
        self._root = TemporaryDirectory(prefix="soak-")
        self._start()

    def _start(self) -> None:
        self.llm = self.llm_cls(**SMALL)
        self.probe = Probe(self.llm)

    def __call__(self, round: Round) -> None:
        for _ in range(8):
            name, action = self.make_case(round)
            print(name, flush=True)
            start = time.monotonic()
            verdict = judge(action)
            seconds = time.monotonic() - start
            round.num_requests += 1
            round.expect(
                verdict.kind in ("clear", "served"), f"{verdict.kind}: {name}", verdict.text
            )
            round.expect(seconds < MAX_SECONDS, f"slow: {name} took {seconds:.0f} s")
            trouble = self.probe.check()
            if trouble:
                round.expect(False, f"after {name}: {trouble}")
                self._start()
            shutil.rmtree(Path(self._root.name, "model"), ignore_errors=True)

    def make_case(self, round: Round) -> tuple[str, Callable[[], Any]]:
        """A name, and what to do."""
        rng = round.rng
        kind = rng.choice(CASES)
        name, action = getattr(self, f"make_{kind}")(rng, rng.choice(bad_values(rng)))
        return f"{kind} {name}", action

    def generate(self, prompt: Any, **fields: Any) -> Any:
        return self.llm.generate(prompt, SamplingParams(**{**VALID, **fields}), use_tqdm=False)

    # -- calls --

    def make_params(self, rng: random.Random, bad: Any) -> tuple[str, Callable[[], Any]]:
        field = rng.choice(list(SamplingParams.__dataclass_fields__))
        fields = {"temperature": rng.choice([0.0, 1.0]), "seed": 1, field: bad}
        return f"{field}={brief(bad)}", partial(self.generate, "Once upon", **fields)

    def make_prompt(self, rng: random.Random, bad: Any) -> tuple[str, Callable[[], Any]]:
        forms = [
            bad,
            [bad],
            [5, 6, bad],
            {"prompt": bad},
            {"prompt_token_ids": bad},
            {"prompt_token_ids": [5, bad]},
            {"prompt": "Once", "prompt_token_ids": bad, "cache_salt": bad},
            {"prompt": "Once", "cache_salt": bad},
        ]
        prompt = rng.choice(forms)
        return brief(prompt), partial(self.generate, prompt)

    def make_argument(self, rng: random.Random, bad: Any) -> tuple[str, Callable[[], Any]]:
        name = rng.choice(["priority", "cache_salt", "lora_request", "tokenization_kwargs"])
        call = partial(self.llm.generate, "Once", SamplingParams(**VALID), use_tqdm=False)
        return f"{name}={brief(bad)}", lambda: call(**{name: bad})

    def make_chat(self, rng: random.Random, bad: Any) -> tuple[str, Callable[[], Any]]:
        good = {"role": "user", "content": "Hi"}
        forms = [
            bad,
            [bad],
            [good, bad],
            [{**good, "role": bad}],
            [{**good, "content": bad}],
            [{**good, "content": [bad]}],
            [{**good, "content": [{"type": "text", "text": bad}]}],
            [{"role": "assistant", "tool_calls": bad}],
        ]
        messages = rng.choice(forms)
        params = SamplingParams(**VALID)
        return brief(messages), lambda: self.llm.chat(messages, params, use_tqdm=False)

    def make_beams(self, rng: random.Random, bad: Any) -> tuple[str, Callable[[], Any]]:
        from nanoserve import BeamSearchParams

        fields: dict[str, Any] = {"beam_width": 2, "max_tokens": 3}
        fields[rng.choice(list(BeamSearchParams.__dataclass_fields__))] = bad
        prompt = rng.choice(["Once", bad])

        def search() -> Any:
            return self.llm.beam_search(prompt, BeamSearchParams(**fields))

        return f"{brief(prompt)} {brief(fields)}", search

    def make_template(self, rng: random.Random, bad: Any) -> tuple[str, Callable[[], Any]]:
        template = "".join(rng.choices(FRAGMENTS, k=rng.choice([1, 1, 2])))
        if rng.random() < 0.3:
            template = template[: rng.randrange(len(template) + 1)]
        messages = [{"role": "user", "content": "Hi"}]
        params = SamplingParams(**VALID)
        chat = partial(self.llm.chat, messages, params, use_tqdm=False, chat_template=template)
        return repr(template), chat

    # -- engines --

    def build(self, model: Any = None, **options: Any) -> Any:
        """Build an engine and let it answer, with the logprobs of the answer."""
        with self.llm_cls(model, **{**SMALL, **options}) as llm:
            params = SamplingParams(temperature=0, max_tokens=3, logprobs=1)
            return llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)

    def make_option(self, rng: random.Random, bad: Any) -> tuple[str, Callable[[], Any]]:
        name = rng.choice([option.name for option in OPTIONS])
        if name == "num_gpu_blocks_override":
            return f"{name}={brief(bad)}", lambda: self.build(num_kv_blocks=bad)
        if name == "model":
            return f"{name}={brief(bad)}", lambda: self.build(bad)
        return f"{name}={brief(bad)}", lambda: self.build(**{name: bad})

    # -- checkpoints --

    def copy_model(self) -> Path:
        """A copy of the demo model, to be damaged."""
        folder = Path(self._root.name, "model")
        folder.mkdir()
        for name in FILES:
            shutil.copy(DEMO_MODEL / name, folder / name)
        return folder

    def make_json(self, rng: random.Random, bad: Any) -> tuple[str, Callable[[], Any]]:
        """One value of a JSON file is changed, taken out, or added."""
        folder = self.copy_model()
        file = folder / rng.choice(["config.json"] * 3 + [*JSON_FILES])
        content = json.loads(file.read_text())
        key = rng.choice([*content, "quantization_config", "sliding_window", "head_dim"])
        value = as_json(rng.choice([bad, rng.choice(NUMBERS)]))
        content[key] = value
        if rng.random() < 0.1:
            del content[key]
        file.write_text(json.dumps(content))
        return f"{file.name} {key}={brief(value)}", partial(self.build, str(folder))

    def make_nested(self, rng: random.Random, bad: Any) -> tuple[str, Callable[[], Any]]:
        """A value deep in tokenizer.json is changed."""
        folder = self.copy_model()
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text())
        place: Any = content
        path: list[Any] = []
        while isinstance(place, (dict, list)) and place and (not path or rng.random() < 0.8):
            above = place
            path.append(rng.choice(list(place) if isinstance(place, dict) else range(len(place))))
            place = place[path[-1]]
        above[path[-1]] = as_json(bad)
        file.write_text(json.dumps(content))
        return f"tokenizer.json {path}={brief(bad)}", partial(self.build, str(folder))

    def make_bytes(self, rng: random.Random, bad: Any) -> tuple[str, Callable[[], Any]]:
        """A file is cut, or some of its first bytes are changed."""
        folder = self.copy_model()
        file = folder / rng.choice(FILES)
        content = bytearray(file.read_bytes())
        position = rng.randrange(min(len(content), 4000))
        if rng.random() < 0.5:
            content = content[:position]
        else:
            content[position] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
        return f"{file.name}, byte {position}", partial(self.build, str(folder))

    def make_weights(self, rng: random.Random, bad: Any) -> tuple[str, Callable[[], Any]]:
        """One tensor is changed."""
        import torch
        from safetensors.torch import load_file, save_file

        folder = self.copy_model()
        file = folder / "model.safetensors"
        weights = load_file(file)
        name = rng.choice(sorted(weights))
        old = weights[name]
        changes: dict[str, Callable[[], Any]] = {
            "int8": lambda: old.to(torch.int8),
            "bool": lambda: old > 0,
            "complex": lambda: old.to(torch.complex64),
            "nan": lambda: old.fill_(float("nan")),
            "one nan": lambda: old.flatten().index_fill(0, torch.tensor([3]), float("nan")),
            "inf": lambda: old * float("inf"),
            "shorter": lambda: old[:-1].clone(),
            "wider": lambda: torch.cat([old, old], -1),
            "empty": lambda: old[:0].clone(),
            "scalar": lambda: torch.tensor(1.0),
        }
        change = rng.choice(list(changes))
        new = changes[change]()
        weights[name] = new.view_as(old) if change == "one nan" else new
        save_file(weights, file)
        return f"weights: {name} {change}", partial(self.build, str(folder))


NUMBERS = (0, -1, 1, 3, 2**31, 10**9, 10**12, 10**30, 0.0, -1.0, 1e-300, float("nan"), float("inf"))
CASES = ["params"] * 5 + ["prompt"] * 4 + ["argument", "chat", "chat", "chat", "beams", "beams"]
CASES += ["template"] * 3 + ["option"] * 4 + ["json"] * 4 + ["nested", "bytes", "weights"]


def as_json(value: Any) -> Any:
    """The value itself, or its text if JSON has no such value."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return str(type(value))
    return value
