"""What does it cost to keep an output valid? The suite "structured": masks, and a whole engine.

A constrained request costs time in three places:

    once        its grammar is compiled, in another thread, while others run
    each step   a row of the bitmask is filled, on the CPU, while the model computes
                the logits of forbidden tokens become -inf, and the new token moves the grammar on

The table of the masks has the times of a backend alone: a random walk through a grammar, of which
every state is new in the first pass, and known in the second, as it is to all later requests with
the same constraint (in microseconds of CPU time). The table of the engine has the speed of a batch
of which none, half or all requests are constrained, by regular expressions or JSON schemas that go
on for ever, so that all outputs are equally long. Only decoding is timed, as in the suite "spec";
the batches take turns.

    of unconstrained      tokens per second, against the same batch without constraints in the same
                          round (median)

A dummy model gets a tokenizer for this: the demo model's tokens, then made-up words.

vLLM: benchmarks/benchmark_serving_structured_output.py.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from torch import Tensor

from nanoserve import LLM, SamplingParams, StructuredOutputsParams
from nanoserve.bench.speculation import decode
from nanoserve.bench.turns import WARM_UP, Settings
from nanoserve.bench.workload import DUMMY_MODELS
from nanoserve.config import DEMO_MODEL
from nanoserve.extras.structured_output.backend import (
    BACKENDS,
    GrammarSpec,
    StructuredOutputGrammar,
    get_backend_cls,
)
from nanoserve.extras.structured_output.vocabulary import Vocabulary, read_vocabulary

NUM_OUTPUT, PROMPT_LEN = 64, 32
SHARES = (0.0, 0.5, 1.0)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "blue"]}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
# Each goes on for longer than an output.
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "regex": {"regex": r"([A-Z][a-z]{2,9} [0-9]{1,4}(\.[0-9]+)?[,;]\s){200,}"},
    "json": {"json": {"type": "array", "items": PERSON, "minItems": 200}},
}
TAKES = {"nano": ("regex",), "xgrammar": ("regex", "json"), "guidance": ("regex", "json")}
Row = dict[str, Any]


def structured_suite(settings: Settings) -> dict[str, Any]:
    """The engine at the largest batch size, with each backend; then the masks alone."""
    size = max(settings.batch_sizes)
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = find_tokenizer(settings, Path(folder))
        for name in BACKENDS:
            try:
                get_backend_cls(name)
            except ImportError as error:
                skipped[name] = str(error)
                continue
            options = {
                "tokenizer": tokenizer,
                "structured_outputs_config": {"backend": name},
                "max_model_len": PROMPT_LEN + NUM_OUTPUT,
                "max_num_seqs": size,
                "max_num_batched_tokens": size * PROMPT_LEN,
            }
            with settings.llms({name: options}) as llms:
                rows += compare(settings, name, llms[name], size)
                vocabulary = read_vocabulary(
                    llms[name].get_tokenizer(), settings.model_config.vocab_size, frozenset({0})
                )
        masks = [
            {"backend": name, "constraint": kind, **time_masks(name, kind, vocabulary, settings)}
            for name in BACKENDS
            if name not in skipped
            for kind in TAKES[name]
        ]
    return {
        "batch": size,
        "num_output": NUM_OUTPUT,
        "vocab_size": settings.model_config.vocab_size,
        "temperature": settings.temperature,
        "rows": rows,
        "masks": masks,
        "skipped": skipped,
    }


def find_tokenizer(settings: Settings, folder: Path) -> str | None:
    """None for the model's own; for a dummy model one that is made here, because its own has words
    instead of pieces of text."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import AutoTokenizer

    if settings.model not in DUMMY_MODELS:
        return None
    words = AutoTokenizer.from_pretrained(DEMO_MODEL).get_vocab()
    vocab_size = settings.model_config.vocab_size
    vocab = {word: number for word, number in words.items() if number < vocab_size}
    rng = Random(settings.seed)
    while len(vocab) < vocab_size:
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 9)))
        vocab.setdefault(rng.choice(("", "Ġ")) + word, len(vocab))
    backend = Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


# -- the engine --


def compare(settings: Settings, name: str, llm: LLM, size: int) -> Iterator[Row]:
    """For each kind of constraint: no request, half of them, all of them are constrained."""
    for kind in TAKES[name]:
        found: dict[float, list[float]] = {share: [] for share in SHARES}
        for round_ in settings.progress(
            range(WARM_UP, settings.repeat), f"structured: {name} {kind}"
        ):
            if round_ == WARM_UP:  # compiles, and makes the first masks
                run(settings, llm, kind, 1.0, size, round_)
                continue
            for share in SHARES if round_ % 2 else SHARES[::-1]:
                found[share].append(run(settings, llm, kind, share, size, round_))
        for share, speeds in found.items():
            pairs = zip(speeds, found[0.0], strict=True)
            yield {
                "backend": name,
                "constraint": kind,
                "constrained": share,
                "tokens_per_second": statistics.median(speeds),
                "of_unconstrained": statistics.median(speed / plain for speed, plain in pairs),
            }


def run(settings: Settings, llm: LLM, kind: str, share: float, size: int, round_: int) -> float:
    """Tokens per second of a batch."""
    rng = Random(f"structured {settings.seed} {round_}")
    vocab_size = settings.model_config.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(PROMPT_LEN)] for _ in range(size)]
    common: dict[str, Any] = {
        "temperature": settings.temperature,
        "max_tokens": NUM_OUTPUT,
        "detokenize": False,
    }
    params = [SamplingParams(seed=number, ignore_eos=True, **common) for number in range(size)]
    for number in range(round(share * size)):
        constraint = StructuredOutputsParams(**CONSTRAINTS[kind])
        params[number] = SamplingParams(seed=number, structured_outputs=constraint, **common)
    decoded = decode(llm, prompts, params, settings.device)
    if short := [len(tokens) for tokens in decoded.token_ids if len(tokens) < NUM_OUTPUT]:
        raise ValueError(f"outputs ended after {short} tokens: the constraint does not go on")
    return decoded.num_tokens / decoded.seconds


# -- masks --


def time_masks(name: str, kind: str, vocabulary: Vocabulary, settings: Settings) -> Row:
    """Microseconds for one row and one token, and what comes before the first of them."""
    start = time.perf_counter()
    backend = get_backend_cls(name)(vocabulary)
    built = time.perf_counter()
    grammar_kind, text = StructuredOutputsParams(**CONSTRAINTS[kind]).key
    spec = GrammarSpec(grammar_kind, text, vocabulary.eos_token_ids)
    compiled = []
    for _ in range(max(1, settings.repeat)):
        begun = time.perf_counter()
        origin = backend.compile_grammar(spec)
        compiled.append(time.perf_counter() - begun)
    bitmask = backend.allocate_token_bitmask(1)
    new_fill, _, tokens = walk(origin.fork(), bitmask, None)
    fill, accept, _ = walk(origin.fork(), bitmask, tokens)
    return {
        "build_ms": 1e3 * (built - start),
        "compile_ms": 1e3 * statistics.median(compiled),
        "new_mask_us": 1e6 * statistics.mean(new_fill),
        "slowest_mask_us": 1e6 * max(new_fill),
        "mask_us": 1e6 * statistics.mean(fill),
        "accept_us": 1e6 * statistics.mean(accept),
    }


def walk(
    grammar: StructuredOutputGrammar, bitmask: Tensor, tokens: list[int] | None
) -> tuple[list[float], list[float], list[int]]:
    """CPU seconds of each fill_bitmask and each accept_tokens, and the tokens: these, or random
    ones that are allowed."""
    rng, clock = Random(0), time.thread_time  # of this thread's work, whatever else runs here
    fills, accepts, walked = list[float](), list[float](), list[int]()
    for step in range(NUM_OUTPUT):
        start = clock()
        grammar.fill_bitmask(bitmask, 0)
        fills.append(clock() - start)
        if tokens is None:
            bits = np.unpackbits(bitmask[0].numpy().view(np.uint8), bitorder="little")
            token = rng.choice(np.flatnonzero(bits).tolist())
        else:
            token = tokens[step]
        start = clock()
        grammar.accept_tokens("", [token])
        accepts.append(clock() - start)
        walked.append(token)
    return fills, accepts, walked
