"""What is measured, and in which turns?

    suite        requests                         figures (the first one is compared)
    throughput   many at once                     output tokens per second
    latency      one at a time                    TPOT, TTFT
    prefix       many that begin alike            prompt tokens per second, with caching and without
    serve        arriving at a rate               TTFT and ITL, median and 99th percentile
    roofline     equal ones at once               TPOT: a decode step, beside what it must take
    gap          a long one, while others decode  the longest wait of the others for a token
    repeat       one at a time; each goes on      TPOT, also with n-gram drafts
                 with what the model has said
    structured   many at once                     tokens per second: free, and by two grammars
    chats        one at a time; chats that        TTFT of these, without a tier for evicted blocks,
                 come back                        with main memory, and with a disk
    pipeline     equal ones at once               tokens per second behind the prompts: two stages
                                                  with one batch in flight, and with two

TTFT is the time to the first token, ITL the time between two tokens, TPOT its mean in a request.
With two engines and three rounds, the turns are A B, A B, A B; x is the median of A's figure over
B's within a round.

vLLM: vllm/benchmarks/throughput.py, latency.py, serve.py, benchmark_prefix_caching.py.
"""

from __future__ import annotations

import ast
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from tqdm import trange

from nanoserve.bench.client import ServerEngine
from nanoserve.bench.cost_model import Machine, Shape, add, decode, ideal_steps, prefill
from nanoserve.bench.engines import ENGINES, Peer, StepEngine
from nanoserve.bench.workload import Request, draw_arrivals, draw_requests, read_vocab_size
from nanoserve.config import CPU_BUDGET, GPU_BUDGET
from nanoserve.models.config import ModelConfig

TURNS, QUESTION_LEN = 3, 40  # of a chat; tokens of an answer and the next question
ALONE = ("latency", "repeat", "chats")  # one request at a time
FIGURES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("throughput", "structured"), ("tokens_per_s",)),
    **dict.fromkeys(("roofline", "repeat"), ("tpot_ms",)),
    "latency": ("tpot_ms", "ttft_ms"),
    "prefix": ("prompt_tokens_per_s",),
    "serve": ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "requests_per_s"),
    "gap": ("longest_gap_ms", "itl_ms"),
    "chats": ("ttft_ms",),
    "pipeline": ("decode_tokens_per_s",),
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
NGRAM |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
# Two grammars that do not end before the longest output.
REGEX = {"regex": r"([A-Z][a-z]{2,9} [0-9]{1,4}(\.[0-9]+)?[,;]\s){200,}"}
RECORD = {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}}
OBJECT = {"type": "object", "properties": RECORD, "required": ["name", "age"]}
JSON = {"json": {"type": "array", "items": OBJECT, "minItems": 200}}

Figures = dict[str, float]
Rounds = dict[str, list[Any]]  # label of an engine -> what each round gave
Result = dict[str, Figures]  # label of an engine -> its figures


@dataclass(frozen=True)
class Variant:
    """One column of a comparison."""

    label: str
    engine: str = "nanoserve"
    options: dict[str, Any] = field(default_factory=dict)
    python: str = sys.executable


@dataclass(frozen=True)
class Settings:
    folder: Path
    variants: tuple[Variant, ...] = (Variant("nanoserve"),)
    num_requests: int = 32
    min_len: int = 50  # tokens, of prompts and outputs
    max_len: int = 256
    prefix_len: int = 512
    long_len: int = 2048
    repeat: int = 3
    rate: float = 4.0  # requests per second
    dtype: str = "float32"  # in which nanoserve computes, and transformers shall
    machine: Machine | None = None  # for what the cost model expects


def parse_variant(text: str) -> Variant:
    """ "eager:enforce_eager=True;max_num_seqs=8" -> Variant("eager", options={...})"""
    label, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for pair in filter(None, rest.split(";")):
        name, equals, value = pair.partition("=")
        try:
            options[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):  # a word needs no quotes
            options[name.strip()] = value.strip()
        if not equals:
            raise ValueError(f"--variant {text!r}: write LABEL:OPTION=VALUE;OPTION=VALUE.")
    return Variant(label, options=options)


def parse_peer(text: str) -> Variant:
    """ "vllm=~/vllm/bin/python" -> Variant("vllm", "vllm", python="/home/...")"""
    name, _, python = text.partition("=")
    if name not in (*ENGINES, "http"):
        raise ValueError(f"--peer {name!r}; allowed: {', '.join(ENGINES)}, http.")
    return Variant(name, name, python=str(Path(python).expanduser()) if python else sys.executable)


def build(variant: Variant, settings: Settings, share: float) -> Any:
    """The engine of a column. nanoserve runs here, a peer in a process of its own; on a GPU each
    gets its share of the memory."""
    import torch

    options, folder = dict(variant.options), settings.folder
    if variant.engine == "transformers":
        options.setdefault("dtype", settings.dtype)
    if variant.engine not in ("transformers", "mini-sglang") and torch.cuda.is_available():
        options.setdefault("gpu_memory_utilization", 0.9 * share)
    if variant.engine == "nanoserve":
        return StepEngine("nanoserve", str(folder), options)
    if variant.engine == "http":
        return ServerEngine(str(folder), options)
    return Peer(variant.engine, variant.python, str(folder), options)


def add_variants(suite: str, variants: list[Variant], settings: Settings) -> list[Variant]:
    """What a suite compares with nanoserve by itself."""

    def more(label: str, **options: Any) -> Variant:
        return replace(variants[0], label=label, options={**variants[0].options, **options})

    if suite == "prefix":
        return [*variants, more("caching off", enable_prefix_caching=False)]
    if suite == "repeat":
        return [*variants, more("ngram", speculative_config=NGRAM)]
    if suite == "structured":
        regex = more("regex", sampling={"structured_outputs": REGEX})
        json_ = more("JSON, xgrammar", sampling={"structured_outputs": JSON})
        return [*variants, regex, *([json_] if find_spec("xgrammar") else [])]
    if suite == "chats":  # a quarter of the blocks that all of them need
        requests, folder = draw(suite, settings, 0), tempfile.mkdtemp()
        number = (-(-len(requests[-1].prompt) // 16) + 1) * (len(requests) // TURNS // 4)
        extra = {"cpu_bytes_to_use": 2**24, "secondary_tiers": [{"type": "fs", "root_dir": folder}]}
        disk = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
        tiers: dict[str, dict[str, Any]] = {"no tier": {}, "main memory": {"kv_offloading_size": 1}}
        tiers["disk"] = {"kv_transfer_config": {"kv_role": "kv_both", **disk}}
        return [more(key, num_gpu_blocks_override=number, **own) for key, own in tiers.items()]
    if suite == "pipeline":
        one = more("one in flight", pipeline_parallel_size=2, in_flight=1)
        return [one, more("two in flight", pipeline_parallel_size=2)]
    return variants


# -- the suites: which requests, which figures --


def draw(suite: str, settings: Settings, round_: int) -> list[Request]:
    number, low, high = settings.num_requests, settings.min_len, settings.max_len
    vocab_size = read_vocab_size(settings.folder)
    if suite in ("latency", "repeat"):
        number = max(1, number // 8)
    if suite == "prefix":
        low, high = max(1, low // 4), max(1, high // 8)
    if suite == "chats":
        number, high = max(4, number // 8), settings.prefix_len + TURNS * QUESTION_LEN
    if suite in ("roofline", "pipeline", "chats"):
        low = high
    prefix_len = settings.prefix_len if suite == "prefix" else 0
    requests = draw_requests(number, low, high, vocab_size, round_, prefix_len)
    if suite == "serve":
        arrivals = draw_arrivals(number, settings.rate, round_)
        return [replace(each, arrival=at) for each, at in zip(requests, arrivals, strict=True)]
    if suite == "gap":  # the long prompt comes when the others have a quarter of their tokens
        length, after = settings.long_len, max(1, high // 4)
        long = replace(draw_requests(1, length, length, vocab_size, round_)[0], num_output=1)
        others = requests[: max(1, number // 4)]
        return [replace(each, num_output=high) for each in others] + [replace(long, after=after)]
    if suite == "chats":  # all take a turn, then all the next one: what was said, and some tokens
        ends = [settings.prefix_len + turn * QUESTION_LEN for turn in range(TURNS)]
        return [Request(chat.prompt[:end], 2) for end in ends for chat in requests]
    return requests


def say_more(engine: Any, requests: list[Request], length: int) -> list[Request]:
    """Prompts of `length` tokens: a few of each request, and what the engine makes of them."""
    starts = [Request(request.prompt[:8], max(1, length - 8)) for request in requests]
    said = engine.run([asdict(start) for start in starts])
    texts = [start.prompt + its["token_ids"] for start, its in zip(starts, said, strict=True)]
    return [replace(each, prompt=text) for each, text in zip(requests, texts, strict=True)]


def run_round(engine: Any, suite: str, requests: list[Request]) -> tuple[Figures, list[Any]]:
    """One turn of one engine: its figures, and the tokens of each request."""
    rows = [asdict(request) for request in requests]
    start = time.perf_counter()
    groups = [[row] for row in rows] if suite in ALONE else [rows]
    results = [result for group in groups for result in engine.run(group)]
    seconds = time.perf_counter() - start
    token_ids = [result["token_ids"] for result in results]
    times = [result["times"] for result in results]
    return compute_figures(suite, requests, times, seconds), token_ids


def compute_figures(suite: str, requests: list[Request], times: list[Any], end: float) -> Figures:
    """times: of each request, when its tokens came, in seconds after its arrival. end: seconds that
    the round took."""
    if suite == "chats":
        times = times[len(times) // TURNS :]  # without the first turns
    first = sorted(each[0] for each in times)
    gaps = sorted(b - a for each in times for a, b in pairwise(each)) or [0.0]
    means = [(each[-1] - each[0]) / max(1, len(each) - 1) for each in times]
    start, last = first[-1], max(each[-1] for each in times)  # of decoding, behind all prompts
    decoded = sum(moment > start for each in times for moment in each)
    found = {
        "tokens_per_s": sum(map(len, times)) / end,
        "prompt_tokens_per_s": sum(len(request.prompt) for request in requests) / end,
        "decode_tokens_per_s": decoded / max(1e-9, last - start),
        "requests_per_s": len(times) / end,
        "tpot_ms": 1000 * statistics.median(means),
        "longest_gap_ms": 1000 * gaps[-1],
    }
    for name, values in (("ttft_ms", first), ("itl_ms", gaps)):
        found[name] = 1000 * statistics.median(values)
        for percent in (50, 99):
            found[f"{name}_p{percent}"] = 1000 * values[(len(values) - 1) * percent // 100]
    return {key: found[key] for key in FIGURES[suite]}


# -- turns --


def compare(suite: str, settings: Settings, tell: Callable[[str], None] = print) -> Result:
    """All variants in turns: the median of each figure, the ratio to the first variant, and the
    share of requests with the same tokens as there."""
    variants = add_variants(suite, list(settings.variants), settings)
    base, expected = variants[0].label, expect(suite, settings)
    engines: dict[str, Any] = {}
    rounds: Rounds = {variant.label: [] for variant in variants}
    tokens: Rounds = {variant.label: [] for variant in variants}

    def prepare(round_: int) -> list[Request]:
        requests = draw(suite, settings, round_)
        if suite == "repeat":
            requests = say_more(engines[base], requests, settings.prefix_len)
        return requests

    try:
        for variant in variants:
            engines[variant.label] = build(variant, settings, 1 / len(variants))
        for round_ in (-2, -1):  # warm up, then see how long it takes
            start = time.perf_counter()
            requests = prepare(round_)
            few = requests if suite in ("gap", "chats") else requests[:4]
            for engine in engines.values():
                run_round(engine, suite, few)
        seconds = (time.perf_counter() - start) * settings.repeat * len(requests) / len(few)
        tell(f"{suite}: {settings.repeat} rounds of {', '.join(engines)}; at most {seconds:.0f} s")
        for label, figures in expected.items():
            tell(f"  {label}: " + ", ".join(f"{k} {each:,.4g}" for k, each in figures.items()))
        for number in trange(settings.repeat, leave=False):
            requests = prepare(number)
            for label, engine in engines.items():
                figures, token_ids = run_round(engine, suite, requests)
                rounds[label].append(figures)
                tokens[label] += token_ids
    finally:
        for engine in engines.values():
            engine.close()
    return {label: summarize(label, base, rounds, tokens) for label in engines} | expected


def summarize(label: str, base: str, rounds: Rounds, tokens: Rounds) -> Figures:
    """Medians over the rounds; x: how many times as fast as the base."""
    found = {key: statistics.median(each[key] for each in rounds[label]) for key in rounds[base][0]}
    key = next(iter(found))
    pairs = list(zip(rounds[label], rounds[base], strict=True))
    ratios = [own[key] / its[key] for own, its in pairs if own[key] and its[key]]
    if "_ms" in key:  # a shorter time is a higher speed
        ratios = [1 / ratio for ratio in ratios]
    same = [a == b for a, b in zip(tokens[label], tokens[base], strict=True)]
    found["x"] = statistics.median(ratios) if ratios else 1.0
    found["same_tokens"] = sum(same) / len(same)
    return found


def expect(suite: str, settings: Settings) -> Result:
    """What the cost model says of nanoserve, and what the roofline: no engine is faster there."""
    machine = settings.machine
    if machine is None or suite not in ("throughput", "latency", "roofline", "gap"):
        return {}
    itemsize = 4 if settings.dtype == "float32" else 2
    shape = Shape.of(ModelConfig.from_folder(settings.folder), itemsize)
    requests = draw(suite, settings, 0)
    if suite == "latency":  # one of them
        requests = sorted(requests, key=lambda each: len(each.prompt))[len(requests) // 2 :][:1]
    number = sum(request.num_output for request in requests)
    steps = {"tokens_per_s": list(ideal_steps(requests))}
    lengths = [len(request.prompt) + request.num_output // 2 for request in requests]
    prompts = add(prefill(len(request.prompt)) for request in requests)
    if suite in ("latency", "roofline"):
        steps = {"tpot_ms": [decode(lengths)], "ttft_ms": [prompts]}
    if suite == "gap":  # the longest step has the end of the prompt
        budget = GPU_BUDGET if machine.is_overlapped else CPU_BUDGET
        others, long = decode(lengths[:-1]), settings.long_len
        chunk = prefill(long, max(0, long - budget + len(lengths)))
        steps = {"longest_gap_ms": [add([others, chunk])], "itl_ms": [others]}
    ways = {"cost model": machine.expected_seconds, "roofline": machine.least_seconds}
    found: Result = {}
    for label, seconds in ways.items():
        sums = {key: sum(seconds(shape, step) for step in steps[key]) for key in FIGURES[suite]}
        found[label] = {key: 1000 * total for key, total in sums.items()}
        if suite == "throughput":
            found[label] = {"tokens_per_s": number / sums["tokens_per_s"]}
    return found
