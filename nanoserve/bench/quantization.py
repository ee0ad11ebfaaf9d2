"""What do fewer bits save, and what do they cost? The suite "quantization".

The same checkpoint in several engines: with weights of 8 and 4 bits (quantized while they are
loaded), and with a KV cache of 8 bits. Each takes turns with an engine that has the checkpoint as
it is; no more than two are in memory at once.

    weights               MiB of the model, as the engine holds it
    KV bytes              of one token
    perplexity            of answers that the model has to give: e^(mean of -log p of their tokens)
    right answers         share of the answers whose every token is the likeliest
    right tokens          share of the tokens of all answers that are the likeliest
    tokens per second     of decoding, at each batch size: medians over the rounds
    speed-up              against the checkpoint as it is, in the same round (median)

The demo model gets held-out questions of its own training corpus (demo/training/evaluate.py), with
the answers. A model of random weights has nothing to say that is right: there the answers are what
the first engine says itself, so that "right" means the same as that engine. (It knows no token much
likelier than others, so that few answers stay the same to the end.)

vLLM: benchmarks/kernels/ (speed), tests/quantization/, lm-eval in tests/evals/ (quality).
"""

from __future__ import annotations

import math
import statistics
from itertools import chain
from random import Random
from typing import Any, NamedTuple

from nanoserve import LLM, SamplingParams
from nanoserve.bench.speculation import decode
from nanoserve.bench.turns import WARM_UP, Settings
from nanoserve.bench.workload import draw_requests
from nanoserve.config import resolve_folder
from nanoserve.kv_cache import choose_kv_cache_dtype

PLAIN = "as it is"
ENGINES: dict[str, dict[str, Any]] = {
    "fp8": {"quantization": "fp8"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "KV fp8": {"kv_cache_dtype": "fp8"},
    "KV int8": {"kv_cache_dtype": "int8"},
}
ANSWERS_PER_TASK = 20  # of the demo model's tasks
NUM_OWN = 16  # texts of a model that can answer nothing
OWN_LENGTH = 48  # tokens


class Text(NamedTuple):
    """Token ids of a prompt and of its answer."""

    prompt: list[int]
    answer: list[int]


def quantization_suite(
    settings: Settings, prompt_len: int = 64, num_output: int = 64
) -> dict[str, Any]:
    """Every engine of ENGINES, beside the first. One that cannot be built is left out, and the
    result says why."""
    is_demo = settings.folder == resolve_folder(None)
    length = max(512, prompt_len + num_output)  # room for the texts, too
    common = {
        "max_model_len": min(settings.model_config.max_model_len, length),
        "max_num_seqs": max(settings.batch_sizes),
        "max_num_batched_tokens": max(settings.batch_sizes) * prompt_len,  # all in one step
    }
    texts: list[Text] = []
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for name, options in ENGINES.items():
        try:
            with settings.llms({PLAIN: common, name: {**common, **options}}) as llms:
                plain = llms[PLAIN]
                texts = texts or (
                    draw_answers(plain) if is_demo else write_answers(plain, settings)
                )
                rows += [] if rows else [{"engine": PLAIN, **inspect(plain, texts)}]
                speeds = compare(settings, name, llms, prompt_len, num_output)
                rows.append({"engine": name, **inspect(llms[name], texts), **speeds})
        except ValueError as error:
            skipped[name] = str(error)
    if not rows:
        raise ValueError(f"No engine could be built: {skipped}")
    return {
        "num_texts": len(texts),
        "batch_sizes": list(settings.batch_sizes),
        "rows": rows,
        "skipped": skipped,
    }


def inspect(llm: LLM, texts: list[Text]) -> dict[str, Any]:
    """What does not depend on time."""
    return {**measure_bytes(llm), **read(llm, texts)}


def compare(
    settings: Settings, name: str, llms: dict[str, LLM], prompt_len: int, num_output: int
) -> dict[str, Any]:
    """Tokens per second of decoding, and against the first engine in the same round."""
    vocab_size = settings.model_config.vocab_size
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False)
    found: dict[int, list[tuple[float, float]]] = {size: [] for size in settings.batch_sizes}
    for round_ in settings.progress(range(WARM_UP, settings.repeat), f"quantization: {name}"):
        for size in settings.batch_sizes:
            drawn = draw_requests(size, prompt_len, prompt_len, vocab_size, settings.seed, round_)
            prompts = [request.prompt for request in drawn]
            speeds = {}
            for label in (PLAIN, name) if round_ % 2 else (name, PLAIN):
                decoded = decode(llms[label], prompts, [params] * size, settings.device)
                speeds[label] = decoded.num_tokens / decoded.seconds
            if round_ != WARM_UP:
                found[size].append((speeds[PLAIN], speeds[name]))
    row: dict[str, Any] = {}
    for size, pairs in found.items():
        row[f"plain_tokens_per_second_{size}"] = statistics.median(plain for plain, _ in pairs)
        row[f"tokens_per_second_{size}"] = statistics.median(speed for _, speed in pairs)
        row[f"speed_up_{size}"] = statistics.median(speed / plain for plain, speed in pairs)
    return row


def measure_bytes(llm: LLM) -> dict[str, Any]:
    """What the engine holds: of weights, and for each token in the KV cache."""
    runner, config = llm.engine.executor.runner, llm.engine.config
    dtype = choose_kv_cache_dtype(config.kv_cache_dtype, runner.dtype)
    block_bytes = sum(
        spec.num_bytes(config.block_size, dtype) for spec in runner.model.kv_cache_specs()
    )
    weight_mib = runner.model.num_bytes() / 2**20
    return {"weight_mib": weight_mib, "kv_bytes": block_bytes / config.block_size}


def read(llm: LLM, texts: list[Text]) -> dict[str, Any]:
    """How well the model foresees the answers."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    prompts = [text.prompt + text.answer for text in texts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    logprobs: list[float] = []
    verdicts: list[list[bool]] = []
    for text, output in zip(texts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        entries = output.prompt_logprobs[len(text.prompt) :]
        found = [(entry or {})[token] for entry, token in zip(entries, text.answer, strict=True)]
        logprobs += [each.logprob for each in found]
        verdicts.append([each.rank == 1 for each in found])
    return {
        "perplexity": math.exp(-statistics.fmean(logprobs)),
        "right_answers": statistics.fmean(map(all, verdicts)),
        "right_tokens": statistics.fmean(chain.from_iterable(verdicts)),
    }


def draw_answers(llm: LLM, number: int = ANSWERS_PER_TASK) -> list[Text]:
    """Questions that no training row asks, and their answers: `number` of each task."""
    from nanoserve.demo.training.corpus import IM_END
    from nanoserve.demo.training.evaluate import TASKS

    tokenizer = llm.get_tokenizer()
    texts = []
    for task in TASKS:
        if task.name.startswith(("recall", "name")):  # these ask the model for its tokens first
            continue
        rng = Random(task.name)
        for _ in range(number):
            item = task.draw(rng, None)  # type: ignore[arg-type]
            prompt = tokenizer.apply_chat_template(
                item.messages, add_generation_prompt=True, return_dict=False
            )
            answer = tokenizer.encode(item.answer + IM_END, add_special_tokens=False)
            texts.append(Text(prompt, answer))
    return texts


def write_answers(llm: LLM, settings: Settings) -> list[Text]:
    """What this engine says itself after random tokens."""
    vocab_size = settings.model_config.vocab_size
    requests = draw_requests(NUM_OWN, 16, 16, vocab_size, settings.seed, WARM_UP)
    params = SamplingParams(temperature=0, max_tokens=OWN_LENGTH, ignore_eos=True, detokenize=False)
    outputs = llm.generate([request.prompt for request in requests], params, use_tqdm=False)
    return [
        Text(request.prompt, list(output.outputs[0].token_ids))
        for request, output in zip(requests, outputs, strict=True)
    ]
