"""When does it pay to draft? The suite "spec": one engine with speculative decoding and without.

Speculative decoding trades arithmetic for steps. A step with k drafts computes k + 1 tokens of a
sequence and gains as many tokens as are accepted, plus one. So it pays where the drafts are right
(the text copies, or repeats itself) and where a step costs nearly the same with more tokens (small
batches, which wait for the weights):

    drafts right    batch 1                     batch 32
    often           fewer steps, as long        fewer steps, but longer ones
    rarely          as many steps, as long      as many steps, and longer ones: slower than without

The demo model answers questions of four kinds (workload.py). Suffix decoding finds much of the
answers in earlier answers of the run: that is what it is made for, in a service whose requests are
alike. Other models have random weights as a
rule, and cannot copy. They continue their own text: the prompt is what the model itself has
written, and a random model repeats itself after a while. How much, the acceptance says.

Only decoding is timed, from the step in which every request has a token. The engines take turns.

    speed-up              tokens per second, against plain decoding in the same round (median)
    accepted              accepted drafts / drafts
    mean length           accepted drafts + 1, of the steps that had drafts
    tokens per step       of a sequence, over all steps

Papers: arXiv 2211.17192 (speculative decoding); 2411.04975 (suffix decoding).
vLLM: examples/offline_inference/spec_decode.py, vllm/v1/spec_decode/metrics.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

import torch

from nanoserve import LLM, RequestOutput, SamplingParams
from nanoserve.bench.policies import logged
from nanoserve.bench.roofline import synchronize
from nanoserve.bench.turns import WARM_UP, Settings
from nanoserve.bench.workload import QUESTIONS, draw_questions
from nanoserve.config import resolve_folder

DEMO = "nanoserve/demo"
MEDUSA_HEADS = 4  # of the demo model, one for each draft
OWN_TEXT = "own text"
MIN_REQUESTS = 8  # of a measurement: small batches come one after the other
Prompts = list[list[int]]
Row = dict[str, Any]


@dataclass(frozen=True)
class Decoded:
    """What an engine did with some batches."""

    seconds: float = 0.0
    num_tokens: int = 0  # in these seconds
    num_sequence_steps: int = 0  # in these seconds: of each step its sequences
    token_ids: tuple[tuple[int, ...], ...] = ()  # per request
    num_drafts: int = 0  # steps of a sequence that verified drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def __add__(self, other: Decoded) -> Decoded:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Decoded(*(mine + its for mine, its in pairs))


def spec_suite(settings: Settings, num_output: int = 128) -> dict[str, Any]:
    """Every method that can draft for this model, for each kind of prompt and batch size."""
    is_demo = settings.folder == resolve_folder(None)
    kinds = tuple(QUESTIONS) if is_demo else (OWN_TEXT,)
    prompt_len = 64 if is_demo else settings.prefix_len
    num_seqs = max(MIN_REQUESTS, *settings.batch_sizes)
    common: dict[str, Any] = {
        "max_model_len": prompt_len + num_output,
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": num_seqs * prompt_len,  # all prompts in one step
    }
    prompts: dict[tuple[str, int], Prompts] = {}
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    for name, config in configs_of(settings.num_speculative_tokens, is_demo).items():
        options = {"plain": common, name: {**common, "speculative_config": config}}
        try:
            with settings.llms(options) as llms:
                rows += compare(settings, name, llms, kinds, num_output, prompts)
        except ValueError as error:
            skipped[name] = str(error)
    if not rows:
        raise ValueError(f"No method can draft for {settings.model}: {skipped}")
    return {
        "num_speculative_tokens": settings.num_speculative_tokens,
        "temperature": settings.temperature,
        "slower": say_slower(rows),
        "rows": rows,
        "skipped": skipped,
    }


def configs_of(num_speculative_tokens: int, is_demo: bool) -> dict[str, dict[str, Any]]:
    """Method -> its speculative_config. Suffix decoding chooses the number of drafts itself."""
    number = {"num_speculative_tokens": num_speculative_tokens}
    configs: dict[str, dict[str, Any]] = {
        "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4, **number},
        "suffix": {"method": "suffix"},
    }
    if is_demo:
        for method, folder in (("draft_model", "draft"), ("medusa", "medusa"), ("eagle", "eagle")):
            configs[method] = {"method": method, "model": f"{DEMO}/{folder}", **number}
        heads = min(num_speculative_tokens, MEDUSA_HEADS)
        configs["medusa"]["num_speculative_tokens"] = heads
    return configs


def compare(
    settings: Settings,
    name: str,
    llms: dict[str, LLM],
    kinds: tuple[str, ...],
    num_output: int,
    prompts: dict[tuple[str, int], Prompts],
) -> Iterator[Row]:
    """The rows of one method, against plain decoding. `prompts`, by kind and round, are those
    of all methods."""
    found: dict[tuple[str, int], list[dict[str, Decoded]]] = {}
    for round_ in settings.progress(range(WARM_UP, settings.repeat), f"spec: {name}"):
        sizes, length = settings.batch_sizes, num_output
        if round_ == WARM_UP:
            sizes, length = sizes[-1:], 8
        number = sum(size * num_batches(size) for size in sizes)
        for kind in kinds:
            if (kind, round_) not in prompts:
                prompts[kind, round_] = draw_prompts(settings, llms["plain"], kind, round_, number)
            left = iter(prompts[kind, round_])
            for size in sizes:
                batches = [list(islice(left, size)) for _ in range(num_batches(size))]
                both = {
                    label: decode_all(llms[label], batches, settings, kind, length)
                    for label in (("plain", name) if round_ % 2 else (name, "plain"))
                }
                if round_ != WARM_UP:
                    found.setdefault((kind, size), []).append(both)
    for (kind, size), rounds in found.items():
        plain = [both["plain"] for both in rounds]
        drafted = [both[name] for both in rounds]
        yield {"method": name, "prompts": kind, "batch": size, **summarise(plain, drafted)}


def summarise(plain: list[Decoded], drafted: list[Decoded]) -> Row:
    """One row: the same batches without drafts and with them, once for each round."""
    pairs = list(zip(plain, drafted, strict=True))
    total = sum(drafted, Decoded())
    accepted = total.num_accepted_tokens
    return {
        "plain_tokens_per_second": statistics.median(d.num_tokens / d.seconds for d in plain),
        "tokens_per_second": statistics.median(d.num_tokens / d.seconds for d in drafted),
        "speed_up": statistics.median(
            (new.num_tokens / new.seconds) / (old.num_tokens / old.seconds) for old, new in pairs
        ),
        "acceptance_rate": accepted / total.num_draft_tokens if total.num_draft_tokens else None,
        "mean_length": 1 + accepted / total.num_drafts if total.num_drafts else None,
        "tokens_per_step": total.num_tokens / total.num_sequence_steps,
        "same_tokens": all(old.token_ids == new.token_ids for old, new in pairs),
    }


def say_slower(rows: list[Row]) -> str:
    """Where it does not pay: "ngram, stories (batch 8, 16)"."""
    losses: dict[str, list[str]] = {}
    for row in rows:
        if row["speed_up"] < 1:
            losses.setdefault(f"{row['method']}, {row['prompts']}", []).append(str(row["batch"]))
    said = [f"{name} (batch {', '.join(sizes)})" for name, sizes in losses.items()]
    return "; ".join(said) or "nowhere"


# -- prompts --


def num_batches(size: int) -> int:
    return -(-MIN_REQUESTS // size)


def draw_prompts(settings: Settings, llm: LLM, kind: str, round_: int, number: int) -> Prompts:
    """Each is used once, because suffix decoding remembers earlier outputs."""
    if kind == OWN_TEXT:
        return write_own_text(settings, llm, round_, number)
    render = llm.get_tokenizer().apply_chat_template
    return [
        render([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False)
        for text in draw_questions(kind, number, settings.seed, round_)
    ]


def write_own_text(settings: Settings, llm: LLM, round_: int, number: int) -> Prompts:
    """Prompts of prefix_len tokens: a few random ones, and what the model makes of them. (For the
    warm-up all are random.)"""
    rng = Random(f"own text {settings.seed} {round_}")
    length, vocab_size = settings.prefix_len, settings.model_config.vocab_size
    num_random = length if round_ == WARM_UP else min(8, length - 1)
    starts = [[rng.randrange(vocab_size) for _ in range(num_random)] for _ in range(number)]
    if round_ == WARM_UP:
        return starts
    params = SamplingParams(
        temperature=0, max_tokens=length - num_random, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(starts, params, use_tqdm=False)
    return [[*start, *out.outputs[0].token_ids] for start, out in zip(starts, outputs, strict=True)]


# -- decoding --


def decode_all(
    llm: LLM, batches: list[Prompts], settings: Settings, kind: str, num_output: int
) -> Decoded:
    """The batches one after the other."""
    params = [
        SamplingParams(
            temperature=settings.temperature,
            seed=number,
            max_tokens=num_output,
            ignore_eos=kind == OWN_TEXT,
            detokenize=False,
        )
        for number in range(len(batches[0]))
    ]
    return sum((decode(llm, batch, params, settings.device) for batch in batches), Decoded())


def decode(llm: LLM, prompts: Prompts, params: list[SamplingParams], device: str) -> Decoded:
    """Decode a batch; the clock starts when each request has a token."""
    latest: dict[str, RequestOutput] = {}
    for number, (prompt, its_params) in enumerate(zip(prompts, params, strict=True)):
        llm.add_request(str(number), prompt, its_params)

    def num_tokens() -> int:
        return sum(len(output.outputs[0].token_ids) for output in latest.values())

    while len(latest) < len(prompts):
        latest |= {output.request_id: output for output in llm.step()}
    before = num_tokens()
    synchronize(torch.device(device))
    with logged(llm) as log:
        start = time.perf_counter()
        while llm.has_unfinished_requests():
            latest |= {output.request_id: output for output in llm.step()}
        seconds = time.perf_counter() - start
    metrics = [output.metrics for output in latest.values() if output.metrics]
    return Decoded(
        seconds,
        num_tokens() - before,
        sum(log.num_running),
        tuple(tuple(latest[str(i)].outputs[0].token_ids) for i in range(len(prompts))),
        sum(each.num_drafts for each in metrics),
        sum(each.num_draft_tokens for each in metrics),
        sum(each.num_accepted_tokens for each in metrics),
    )
