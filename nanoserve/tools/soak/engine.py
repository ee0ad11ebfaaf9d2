"""Real engines: any features at once, and the same request alone on a plain engine as the oracle.

The demo model brings text, chat and beams; tiny random checkpoints bring other families. A request
with a broken logits processor must end with "error"; every other request gets the tokens that it
gets alone. Only a near tie may be decided otherwise: then the plain engine, too, chooses the other
token as soon as the logits are moved a little (`is_near_tie`).

After each round every block is free; threads, open files and memory stay within their bounds.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanoserve.llm import LLM
from nanoserve.output_processor import CompletionOutput, RequestOutput
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.tools.soak.control import check_now, make_options, make_tiers
from nanoserve.tools.soak.rounds import Round
from nanoserve.tools.soak.worker import resident_megabytes

DIVISIBLE = ("demo", "demo", "llama", "qwen3", "qwen3_moe")  # among ranks
FAMILIES = (*DIVISIBLE, "gemma2")
SETTINGS: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TEXTS = (
    "Once upon a time there was a kind dog named Tom. He lived near the",
    "One day, a little girl",
    "What is 17 + 25?",
    "\u732b\U0001f600 e\u0301\u0000 ...",
)
WORDS = ("the", " a", "was", "little", "Tom", ".", " to the", "\u732b")
BYTES_PER_TOKEN = 2560  # of keys and values, at most
NEAR_TIE = 1e-4  # of the logits' standard deviation, in float32
MAX_FAILED_STEPS = 40  # in one round; each planted fault may fail a step or two


# -- logits processors --


class BadText:
    """Cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("repr")

    def __call__(self, output: list[int], logits: Any) -> Any:
        return self


class BadError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("str")


def fail_with(error: type[BaseException], after: int, output: list[int], logits: Any) -> Any:
    if len(output) >= after:
        raise error()
    return logits


def prefer_even(output: list[int], logits: Any) -> Any:
    """A sane processor."""
    logits[1::2] -= 2.0
    return logits


def as_double(prompt: list[int], output: list[int], logits: Any) -> Any:
    """A sane one, too: another dtype, and the prompt."""
    return logits.double()


def broken_processors(after: int) -> dict[str, Callable[..., Any]]:
    """By what is wrong with them. None of them says which token may follow `after` tokens."""
    import torch

    errors = (ValueError, KeyError, StopIteration, SystemExit, GeneratorExit, MemoryError, BadError)
    return {
        **{f"raises {error.__name__}": partial(fail_with, error, after) for error in errors},
        "returns itself, without a repr": BadText(),
        "a builtin without a signature": max,
        "torch.add": torch.add,
        "returns None": lambda output, logits: None,
        "too short": lambda output, logits: logits[:-1],
        "another dimension": lambda output, logits: logits[None],
        "a list": lambda output, logits: logits.tolist(),
        "sparse": lambda output, logits: logits.to_sparse(),
        "meta": lambda output, logits: logits.to("meta"),
        "nested": lambda output, logits: torch.nested.nested_tensor([logits]),
        "bool": lambda output, logits: logits > 0,
        "complex": lambda output, logits: logits * 1j,
        "NaN": lambda output, logits: logits * float("nan"),
        "nothing allowed": lambda output, logits: logits - float("inf"),
    }


# -- requests --


@dataclass
class Ask:
    """One request, and what came of it."""

    prompt: Any
    params: SamplingParams
    is_guilty: bool = False
    after: int = 0  # output tokens of a completion before its fault at the latest
    answers: dict[int, CompletionOutput] = field(default_factory=dict)
    is_finished: bool = False

    def take(self, output: RequestOutput) -> None:
        """Note an output; a delta is joined to what came before."""
        self.is_finished |= output.finished
        is_delta = self.params.output_kind is RequestOutputKind.DELTA
        for new in output.outputs:
            old = self.answers.get(new.index)
            if old is not None and is_delta:
                tokens, text = old.token_ids + new.token_ids, old.text + new.text
                new = replace(new, token_ids=tokens, text=text, logprobs=None)
            self.answers[new.index] = new


def make_asks(round: Round, llm: LLM, with_faults: bool) -> list[Ask]:
    """Requests that fit the engine, with prompts of which some begin alike."""
    rng = round.rng
    tokenizer, vocab_size = llm.engine.tokenizer, llm.engine.model_config.vocab_size
    config, executor = llm.engine.config, llm.engine.executor
    capacity = min(config.max_model_len or 0, executor.num_kv_blocks * config.block_size)
    beginning = [rng.randrange(2, vocab_size) for _ in range(capacity)]
    asks: list[Ask] = []
    for _ in range(rng.choice([2, 6, 12])):
        prompt = beginning[: rng.randint(1, capacity - 1)]
        if tokenizer is not None and round.chance(0.5):
            prompt = tokenizer.encode(rng.choice(TEXTS))[: capacity - 1]
        if round.chance(0.3):
            prompt = [*prompt[: capacity - 2], rng.randrange(2, vocab_size)]
        is_guilty = with_faults and round.chance(0.2)
        after = rng.randint(0, 3)
        processors = rng.choice([None, None, [prefer_even], [as_double, prefer_even]])
        params = make_params(
            round,
            vocab_size,
            capacity - len(prompt),
            tokenizer is not None,
            [rng.choice(list(broken_processors(after).values()))] if is_guilty else processors,
        )
        if params is not None:
            asks.append(Ask(prompt, params, is_guilty, after))
    return asks


def make_params(
    round: Round, vocab_size: int, room: int, has_text: bool, processors: Any
) -> SamplingParams | None:
    """Any values that are allowed together. None if the processors are refused."""
    rng = round.rng

    def ids(most: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(rng.randint(1, most))]

    n = rng.choice([1, 1, 1, 2, 4])
    max_tokens = rng.randint(1, min(16, room))
    fields: dict[str, Any] = {
        "n": n,
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0, 1.5] if n == 1 else [0.7, 1.2]),
        "seed": rng.randrange(2**63),
        "top_k": rng.choice([0, 0, 1, 5, 60]),
        "top_p": rng.choice([1.0, 1.0, 0.9, 0.2]),
        "min_p": rng.choice([0.0, 0.0, 0.02, 0.5]),
        "presence_penalty": rng.choice([0.0, 0.0, 0.8, -1.0]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.4]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.3, 0.9]),
        "max_tokens": max_tokens,
        "min_tokens": rng.choice([0, 0, rng.randint(0, max_tokens)]),
        "ignore_eos": round.chance(0.5),
        "stop_token_ids": rng.choice([None, None, ids(9)]),
        "logprobs": rng.choice([None, None, 0, 3, -1]),
        "prompt_logprobs": rng.choice([None, None, None, 0, 2]),
        "logit_bias": rng.choice([None, None, {token: rng.uniform(-9, 9) for token in ids(9)}]),
        "allowed_token_ids": rng.choice([None, None, None, ids(40)]),
        "output_kind": rng.choice(list(RequestOutputKind)),
        "skip_reading_prefix_cache": rng.choice([None, None, True]),
        "logits_processors": processors,
    }
    if has_text:
        fields |= {
            "stop": rng.choice([None, None, rng.sample(WORDS, 2)]),
            "bad_words": rng.choice([None, None, rng.sample(WORDS, 2)]),
            "skip_special_tokens": round.chance(0.7),
        }
        fields["include_stop_str_in_output"] = round.chance(0.5)
        fields["detokenize"] = bool(fields["stop"]) or round.chance(0.8)
    try:
        return SamplingParams(**fields)
    except (TypeError, ValueError):
        if processors is None or processors == [prefer_even]:
            raise
        return None  # refused at the door: as good as an error later


# -- the part --


class EnginePart:
    """Rounds on real engines; with `ranks` above 1 on so many processes."""

    def __init__(self, ranks: int = 1, llm_cls: Callable[..., LLM] = LLM) -> None:
        self.ranks = ranks
        self.llm_cls = llm_cls  # under test; a sabotaged one must be found
        self._root = TemporaryDirectory(prefix="soak-")
        self._plain: dict[str, LLM] = {}  # family -> the engine on which requests run alone
        self._usage: list[dict[str, float]] = []  # after each round

    def __call__(self, round: Round) -> None:
        rng = round.rng
        family = rng.choice(FAMILIES if self.ranks == 1 else DIVISIBLE)
        plain = self.get_plain(family)
        options = make_options(round)
        options["attention_backend"] = rng.choice(["auto", "auto", "reference"])
        if self.ranks > 1:
            options["tensor_parallel_size"] = self.ranks
        with_faults = round.chance(0.5)
        row_bytes = BYTES_PER_TOKEN * options["block_size"] * self.ranks
        with (
            TemporaryDirectory(prefix="soak-kv-") as folder,
            self.llm_cls(
                plain.engine.model_config.path,
                **options,
                **make_tiers(round, options, row_bytes, folder),
            ) as llm,
        ):
            for run in rng.sample([run_steps, run_generate, run_stream], 2):
                asks = make_asks(round, llm, with_faults)
                round.num_requests += len(asks)
                run(round, llm, asks)
                check_books(round, llm)
                if round.findings:
                    return  # what follows from it is no news
                for ask in asks:
                    check_ask(round, plain, ask, is_whole=run is not run_stream)
            if llm.engine.tokenizer is not None and self.ranks == 1:
                check_whole_calls(round, llm, plain)
                check_books(round, llm)
        self.check_usage(round)

    def get_plain(self, family: str) -> LLM:
        """The engine on which a request of this family runs alone."""
        if family not in self._plain:
            folder = None if family == "demo" else make_checkpoint(Path(self._root.name), family)
            options = {"num_kv_blocks": 256, "enable_prefix_caching": False, "max_logprobs": -1}
            self._plain[family] = LLM(folder, **options)  # type: ignore[arg-type]
        return self._plain[family]

    def check_usage(self, round: Round) -> None:
        """After the engine is closed, as much is in use as after the first rounds."""
        gc.collect()
        usage: dict[str, float] = {
            "threads": threading.active_count(),
            "objects": len(gc.get_objects()),
            "megabytes": resident_megabytes(os.getpid()),
        }
        if os.path.isdir("/proc/self/fd"):
            usage["open files"] = len(os.listdir("/proc/self/fd"))
        self._usage.append(usage)
        warm = self._usage[:25]  # every family and every kernel was there
        if len(self._usage) > len(warm):
            for name, value in usage.items():
                most = max(each[name] for each in warm)
                message = f"{name} grew from {most:.0f} to {value:.0f}"
                round.expect(value <= 1.4 * most + 8, message)


class RankPart(EnginePart):
    """The same on two ranks."""

    def __init__(self) -> None:
        super().__init__(ranks=2)


def make_checkpoint(root: Path, model_type: str) -> Path:
    """A small random checkpoint. Its weights are large enough that ties of logits are rare."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    extra = MOE if "moe" in model_type else {}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**SETTINGS, **extra})
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.3 if parameter.dim() == 1 else 0.15
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(noise + 1 if "norm" in name else noise)
    model.save_pretrained(root / model_type)
    return root / model_type


# -- ways to run requests --


def run_steps(round: Round, llm: LLM, asks: list[Ask]) -> None:
    """Requests come one by one; parameters that the caller changes later change nothing."""
    by_id = {str(i): ask for i, ask in enumerate(asks)}
    waiting = list(by_id)
    num_failed = 0
    while waiting or llm.has_unfinished_requests():
        if waiting and (round.chance(0.5) or not llm.has_unfinished_requests()):
            name = waiting.pop()
            params = by_id[name].params.clone()
            llm.add_request(name, by_id[name].prompt, params, priority=round.rng.randint(0, 2))
            if isinstance(params.logit_bias, dict):
                params.logit_bias[10**6] = 5.0
        try:
            outputs = llm.step()
        except BaseException as error:
            num_failed += 1
            if num_failed > MAX_FAILED_STEPS:
                round.expect(False, f"steps fail again and again: {type(error).__name__}")
                llm.abort_request(list(by_id))
                return
            continue
        for output in outputs:
            by_id[output.request_id].take(output)
        llm.engine.block_manager.check()


def run_generate(round: Round, llm: LLM, asks: list[Ask]) -> None:
    try:
        outputs = llm.generate([a.prompt for a in asks], [a.params for a in asks], use_tqdm=False)
    except BaseException as error:
        round.expect(False, f"generate raised {type(error).__name__}", asks)
        raise
    for ask, output in zip(asks, outputs, strict=True):
        ask.answers = {each.index: each for each in output.outputs}
        ask.is_finished = output.finished


def run_stream(round: Round, llm: LLM, asks: list[Ask]) -> None:
    """Read some outputs, then leave: the requests that have not ended are aborted."""
    prompts, params = [a.prompt for a in asks], [a.params for a in asks]
    stream = llm.stream(prompts, params, output_kind=RequestOutputKind.CUMULATIVE)
    num_outputs = round.rng.choice([0, 1, 5, 10**6])
    by_id: dict[str, Ask] = {}
    rest = list(asks)
    for number, output in enumerate(stream):
        if output.request_id not in by_id:
            match = [ask for ask in rest if ask.prompt == output.prompt_token_ids]
            if len(match) != 1 and [a.prompt for a in asks].count(output.prompt_token_ids) > 1:
                continue  # which of them it is, only the whole calls say
            by_id[output.request_id] = match[0]
        ask = by_id[output.request_id]
        ask.answers = {each.index: each for each in output.outputs}
        ask.is_finished = output.finished
        if number >= num_outputs:
            break
    stream.close()  # type: ignore[attr-defined]


# -- what must hold --


def check_books(round: Round, llm: LLM) -> None:
    """Nothing is left, every block is free."""
    engine = llm.engine
    check_now(engine)
    if not engine.get_num_unfinished_requests():
        engine.step()  # reads what was in flight when the last requests were aborted
    round.expect(not engine.has_unfinished_requests(), "requests are left", engine)
    free, number = engine.block_manager.num_free_blocks, engine.executor.num_kv_blocks
    round.expect(free == number, f"{free} of {number} blocks are free", engine)


def check_ask(round: Round, plain: LLM, ask: Ask, is_whole: bool) -> None:
    """The request got what it gets alone, or "error" if it is guilty."""
    if is_whole and not round.expect(ask.is_finished, "the request has not ended", ask):
        return
    if ask.is_guilty:
        num_tokens = max((len(each.token_ids) for each in ask.answers.values()), default=0)
        is_failed = "error" in {each.finish_reason for each in ask.answers.values()}
        if is_whole and num_tokens > ask.after:
            round.expect(is_failed, "guilty, and served", ask, ask.params.logits_processors)
        return
    [alone] = plain.generate(ask.prompt, ask.params, use_tqdm=False)
    if is_whole:
        same = len(alone.outputs) == len(ask.answers)
        round.expect(same or "error" in str(alone), "completions are missing", ask)
    for index, got in ask.answers.items():
        right = alone.outputs[index]
        position = first_difference(got.token_ids, right.token_ids, is_whole)
        if position is None:
            if is_whole:
                shown = got.text, got.finish_reason, got.stop_reason
                expected = right.text, right.finish_reason, right.stop_reason
                round.expect(shown == expected, "another end", shown, expected, ask.params)
        elif not is_near_tie(plain, ask, index, position):
            tokens = got.token_ids, right.token_ids
            round.expect(False, f"another token at {position}", *tokens, ask.prompt, ask.params)


def first_difference(got: list[int], right: list[int], is_whole: bool) -> int | None:
    """The first position at which the tokens differ. None if there is none."""
    for i, (one, other) in enumerate(zip(got, right, strict=False)):
        if one != other:
            return i
    if len(got) == len(right) or (not is_whole and len(got) < len(right)):
        return None
    return min(len(got), len(right))


def is_near_tie(plain: LLM, ask: Ask, index: int, position: int) -> bool:
    """Does the plain engine choose the other token when the logits are moved a little?"""
    import torch

    token_ids = ask.answers[index].token_ids
    if position >= len(token_ids):
        return False
    before, generator = token_ids[:position], torch.Generator().manual_seed(0)

    def shake(output: list[int], logits: Any) -> Any:
        if output != before:
            return logits
        finite = logits[logits.isfinite()]
        noise = torch.randn(logits.shape, generator=generator)
        return logits + noise * NEAR_TIE * finite.std()

    processors = [*(ask.params.logits_processors or ()), shake]
    params = replace(ask.params, logits_processors=processors)
    for _ in range(12):
        [output] = plain.generate(ask.prompt, params, use_tqdm=False)
        if output.outputs[index].token_ids[: position + 1] == token_ids[: position + 1]:
            return True
    return False


def check_whole_calls(round: Round, llm: LLM, plain: LLM) -> None:
    """Chat and beam search say what they say on the plain engine."""
    from nanoserve import BeamSearchParams

    rng = round.rng
    capacity = min(
        llm.engine.config.max_model_len or 0,
        llm.engine.executor.num_kv_blocks * llm.engine.config.block_size,
    )
    params = SamplingParams(temperature=0, max_tokens=4)
    messages = [{"role": "user", "content": rng.choice(["Hi", "2 + 3?"])}]
    try:
        [said] = llm.chat(messages, params, use_tqdm=False)
    except ValueError:  # the prompt is longer than this engine allows
        round.expect(capacity < 64, "chat was refused", capacity)
    else:
        [expected] = plain.chat(messages, params, use_tqdm=False)
        same = said.outputs[0].token_ids == expected.outputs[0].token_ids[:capacity]
        round.expect(same or len(said.prompt_token_ids) + 4 > capacity, "another chat", messages)
    beams = BeamSearchParams(beam_width=rng.randint(1, 4), max_tokens=rng.randint(1, 6))
    prompt = [rng.randrange(2, 2000) for _ in range(rng.randint(1, 10))]
    [found] = llm.beam_search(prompt, beams)
    [expected_beams] = plain.beam_search(prompt, beams)
    gaps = [
        abs((one.cum_logprob or 0) - (other.cum_logprob or 0))
        for one, other in zip(found.sequences, expected_beams.sequences, strict=True)
    ]
    round.expect(max(gaps) < 1e-2, "other beams", gaps, prompt, beams)
