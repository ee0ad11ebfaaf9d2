"""How did a token come out of its logits?

`token_path` gives one row of logits to the engine's own sampler and notes what each stage makes of
it. The stages stand in the order in which the sampler called them.

    path = token_path(llm, SamplingParams(temperature=0.8, top_k=5, seed=7), prompt)
    list(path.stages)                     ["logits", "temperature 0.8", "top_k 5"]
    path.probs("top_k 5")                 [vocab_size]
    path.uniform, path.token_id           the random number, and the token that it gave

The other functions draw such paths, random numbers, frequencies and log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
from torch import Tensor
from torch.nn.functional import one_hot

from nanoserve import LLM, RequestOutput, SamplingParams, sampler
from nanoserve.extras.trace.frames import Tokens
from nanoserve.extras.trace.style import (
    ALARM,
    FAINT,
    INK,
    LINE,
    WIDTH,
    box,
    canvas,
    fit,
    label,
    panels,
    show,
)
from nanoserve.input_batch import InputBatch
from nanoserve.sampler import SamplingBatch
from nanoserve.sequence import NewSequence

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAR, PALE, OTHERS = "#56B4E9", "#CFE8F7", "#D8D8D8"  # a probability, also pale; of all others
DRAWN = "#D55E00"  # the token that was drawn
# The functions of sampler.py that are stages, and the parameters that they apply.
STAGES = {
    "apply_mask": ("allowed_token_ids",),
    "apply_edits": ("bad_words", "min_tokens", "logit_bias"),
    "apply_logits_processors": ("logits_processors",),
    "apply_penalties": ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    "apply_temperature": ("temperature",),
    "apply_min_p": ("min_p",),
    "apply_top_k_top_p": ("top_k", "top_p"),
}


@dataclass(frozen=True)
class TokenPath:
    """One token's way through the sampler."""

    stages: dict[str, Tensor]  # name -> logits [vocab_size] after this stage; first: the model's
    batch: SamplingBatch  # of one row

    def probs(self, stage: str | None = None) -> Tensor:
        """[vocab_size]: the probabilities after a stage; None: those that the token comes from. A
        greedy request has one possible token, the likeliest."""
        logits = self.stages[stage or [*self.stages][-1]]
        if stage is None and self.batch.is_greedy:
            return one_hot(logits.argmax(), len(logits)).float()
        return logits.softmax(dim=-1)

    @property
    def uniform(self) -> float | None:
        """The random number in [0, 1); None if the request is greedy."""
        return None if self.batch.uniform is None else float(self.batch.uniform[0])

    @property
    def token_id(self) -> int:
        """The token that the last stage and the random number give."""
        if self.batch.uniform is None:
            return int(self.probs().argmax())
        return int(sampler.draw(self.probs()[None], self.batch.uniform)[0])


def token_path(
    llm: LLM, params: SamplingParams, prompt: Seq[int], output: Seq[int] = (), branch: int = 0
) -> TokenPath:
    """How the sampler chooses the next token of a request that has said `output` so far."""
    logits = next_logits(llm, [*prompt, *output])
    sequence = llm.engine.input_processor.process("path", list(prompt), params)
    new = NewSequence(
        seq_id=sequence.seq_id,
        token_ids=(*prompt, *output),
        num_prompt_tokens=len(prompt),
        block_ids=(),
        sampling_params=sequence.sampling_params,
        stop_token_ids=sequence.stop_token_ids,
        bad_word_ids=sequence.bad_word_ids,
        seed=sequence.seed,
        branch=branch,
        num_samples=1,
    )
    batch = InputBatch(1, len(new.token_ids) + 1, 16, len(logits))
    batch.add(new)
    row = np.zeros(1, np.int64)
    sampling_batch = batch.make_sampling_batch(row, row + branch)
    stages = {"logits": logits}
    with _noting(stages, sequence.sampling_params):
        sampled = sampler.sample(logits[None], sampling_batch)
    path = TokenPath(stages, sampling_batch)
    assert path.token_id == int(sampled.token_ids[0]), "the stages do not explain the token"
    return path


def next_logits(llm: LLM, token_ids: Seq[int]) -> Tensor:
    """[vocab_size] float32: the model's logits after these tokens."""
    found: list[Tensor] = []

    def note(output_token_ids: list[int], logits: Tensor) -> Tensor:
        found.append(logits.float().cpu())
        return logits

    params = SamplingParams(temperature=0, max_tokens=1, logits_processors=[note])
    llm.generate(list(token_ids), params, use_tqdm=False)
    return found[0]


@contextmanager
def _noting(stages: dict[str, Tensor], params: SamplingParams) -> Iterator[None]:
    """Note what each stage of the sampler returns for row 0."""

    def noting(function: Callable[..., Tensor], label: str) -> Callable[..., Tensor]:
        def call(*arguments: Any) -> Tensor:
            result = function(*arguments)
            stages[label] = result[0].clone()
            return result

        return call

    with ExitStack() as patches:
        for name, fields in STAGES.items():
            wrapped = noting(getattr(sampler, name), _describe(params, fields))
            patches.enter_context(patch.object(sampler, name, wrapped))
        yield


def _describe(params: SamplingParams, fields: Seq[str]) -> str:
    """The parameters of a stage that are not at their default: "top_k 5, top_p 0.9"."""
    default = SamplingParams()
    values = {name: getattr(params, name) for name in fields}
    values = {k: v for k, v in values.items() if v != getattr(default, k)} or values
    short = {k: f" {v}" if isinstance(v, (int, float)) else "" for k, v in values.items()}
    return ", ".join(name + short[name] for name in values)


# -- pictures of distributions --


def stages(title: str, paths: TokenPath | Mapping[str, TokenPath], llm: LLM, top: int = 8) -> None:
    """From logits to a token: one panel for each stage, then the draw. One line for each path."""
    paths = {"": paths} if isinstance(paths, TokenPath) else dict(paths)
    columns = max(len(path.stages) for path in paths.values()) + 1
    height = 0.75 + (0.23 * top + 0.55) * len(paths)
    axes = panels(len(paths), height, title, columns)
    for (name, path), line in zip(paths.items(), _lines(axes, columns), strict=True):
        token_ids = _likeliest([path.probs(stage) for stage in path.stages], top)
        before = None
        for ax, stage in zip(line, path.stages, strict=False):
            _draw_bars(ax, path.probs(stage), before, token_ids, llm, drawn=path.token_id)
            heading = "the model alone" if stage == "logits" else stage.replace(", ", "\n")
            ax.set_title(heading, fontsize=9, color=INK)
            if ax is not line[0]:
                ax.set_yticklabels([])
            before = path.probs(stage)
        for ax in line[len(path.stages) :]:
            ax.axis("off")
        _draw_the_draw(line[len(path.stages)], path, llm)
        if name:
            line[0].set_ylabel(name, fontsize=9.5, weight="bold", color=INK)
    show()


def filters(
    title: str, paths: Mapping[str, TokenPath], llm: LLM, top: int = 7, columns: int = 4
) -> None:
    """Small multiples: what a request's parameters make of the model's own probabilities, which
    are the outlines."""
    rows = -(-len(paths) // columns)
    axes = panels(rows, 0.45 + (0.2 * (top + 1) + 0.45) * rows, title, columns)
    for ax in axes[len(paths) :]:
        ax.axis("off")
    for ax, (name, path) in zip(axes, paths.items(), strict=False):
        token_ids = _likeliest([path.probs("logits"), path.probs()], top)
        _draw_bars(ax, path.probs(), path.probs("logits"), token_ids, llm, rest=True)
        ax.set_title(name.replace(", ", "\n"), fontsize=9, weight="bold", color=INK)
    show()


def _lines(axes: list[Axes], columns: int) -> list[list[Axes]]:
    return [axes[i : i + columns] for i in range(0, len(axes), columns)]


def _likeliest(distributions: Seq[Tensor], top: int) -> list[int]:
    """`top` token ids: the likeliest of the first distribution, and, in place of the last of them,
    those that are likely in a later one only. In the order of the first."""
    order = distributions[0].argsort(descending=True, stable=True).tolist()
    chosen = order[:top]
    for probs in distributions[1:]:
        for token_id in probs.topk(2).indices.tolist():
            if token_id not in chosen and probs[token_id] > 0.05:
                chosen = [*chosen[: top - 1], token_id]
    return sorted(chosen, key=order.index)


def _draw_bars(
    ax: Axes,
    probs: Tensor,
    before: Tensor | None,
    token_ids: list[int],
    llm: LLM,
    drawn: int | None = None,
    rest: bool = False,
) -> None:
    """Bars of these tokens; the outline is what they were before. A cross: it can never come."""
    text_of = Tokens(llm.get_tokenizer()).text
    names = [text_of(token_id, 9) for token_id in token_ids]
    values, earlier = _values(probs, token_ids, rest), _values(before, token_ids, rest)
    shades = [DRAWN if token_id == drawn else BAR for token_id in token_ids]
    if rest:
        names, shades = [*names, "all others"], [*shades, OTHERS]
    places = range(len(names))
    largest = max(*values, *earlier, 0.2)
    ax.barh(places, values, height=0.74, color=shades)
    if earlier:
        ax.barh(places, earlier, height=0.74, facecolor="none", edgecolor=INK, linewidth=0.8)
    for place in places:
        is_gone = bool(earlier) and values[place] == 0 and earlier[place] > 0
        end = max(values[place], earlier[place] if earlier else 0) + 0.03 * largest
        if is_gone:
            label(ax, end, place, "✕", 8.5, color=ALARM, ha="left", weight="bold")
        else:
            label(ax, end, place, _percent(values[place]), 7.5, ha="left")
    ax.set_xlim(0, 1.35 * largest)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_yticks(places, names, fontsize=8.5)
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines["bottom"].set_visible(False)
    ax.spines["left"].set_color(LINE)


def _values(probs: Tensor | None, token_ids: list[int], rest: bool) -> list[float]:
    if probs is None:
        return []
    values = [float(probs[token_id]) for token_id in token_ids]
    others = 1 - sum(values)
    return [*values, others if others > 1e-6 else 0.0] if rest else values


def _percent(value: float) -> str:
    return "0" if value == 0 else "<0.5%" if value < 0.005 else f"{100 * value:.0f}%"


def _draw_the_draw(ax: Axes, path: TokenPath, llm: LLM) -> None:
    """The cumulative distribution as one column, in the order of the token ids, and the random
    number as an arrow into it."""
    ax.set_xlim(-0.75, 1.1)
    ax.set_ylim(1.02, -0.02)  # 0 at the top
    ax.axis("off")
    text_of = Tokens(llm.get_tokenizer()).text
    probs, bottom, others = path.probs().double(), 0.0, 0.0
    for token_id in [*probs.nonzero()[:, 0].tolist(), None]:
        share = 0.0 if token_id is None else float(probs[token_id])
        if token_id is not None and share < 0.025 and token_id != path.token_id:
            others += share
            continue
        if others:  # of neighbours that are too small to be drawn one by one
            _draw_segment(ax, bottom, others, "others", OTHERS)
            bottom, others = bottom + others, 0.0
        if token_id is not None:
            shade = DRAWN if token_id == path.token_id else PALE
            _draw_segment(ax, bottom, share, text_of(token_id, 9), shade)
            bottom += share
    uniform = path.uniform
    heading = "argmax" if uniform is None else f"draw: u = {uniform:.2f}"
    style: dict[str, Any] = {"fontsize": 9, "color": DRAWN, "weight": "bold"}
    ax.set_title(f"{heading}\n→ {text_of(path.token_id, 9)}", **style)
    if uniform is not None:
        arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.6}
        ax.annotate("", (0.02, uniform), (-0.5, uniform), arrowprops=arrow)
        label(ax, -0.62, uniform, "u", 10)
        for value in (0, 1):
            label(ax, -0.07, value, str(value), 7.5, color=FAINT, ha="right")


def _draw_segment(ax: Axes, top: float, share: float, text: str, shade: str) -> None:
    box(ax, 0, top, 1, share, facecolor=shade, edgecolor="white", linewidth=1)
    if share >= 0.06:
        ink = "white" if shade == DRAWN else INK
        label(ax, 0.5, top + share / 2, text, 8, color=ink)


# -- random numbers, frequencies, log-probabilities --


def streams(title: str, outputs: Mapping[str, RequestOutput], seed: int, llm: LLM) -> None:
    """One line for each completion, one column for each position: the random number (the darker,
    the larger) and the token that came of it."""
    rows = [(name, output, done) for name, output in outputs.items() for done in output.outputs]
    text_of = Tokens(llm.get_tokenizer()).text
    left, line = 2.5, 0.44
    cell = min(0.75, (WIDTH - left) / max(len(done.token_ids) for _, _, done in rows))
    height = 0.85 + line * len(rows) + 0.1 * (len(outputs) - 1)
    ax = canvas(height, title)
    label(ax, left - 0.12, height - 0.56, "position", 8.5, color=FAINT, ha="right")
    note = "number: u (the darker, the larger)"
    label(ax, WIDTH, height - 0.2, note, 8.5, color=FAINT, ha="right")
    top, last = height - 0.7, ""
    for name, output, done in rows:
        start = len(output.prompt_token_ids)
        if not last:
            for i in range(max(len(done.token_ids) for _, _, done in rows)):
                label(ax, left + (i + 0.5) * cell, height - 0.56, str(start + i), color=FAINT)
        top -= 0.1 if last and name != last else 0
        if name != last:
            label(ax, 0, top - line / 2, name, 9, ha="left", weight="bold")
            if number := output.metrics.num_preemptions if output.metrics else 0:
                times = "once" if number == 1 else f"{number} times"
                label(ax, 0, top - line / 2 - 0.22, f"preempted {times}", 8.5, ha="left")
        label(ax, left - 0.12, top - line / 2, f"branch {done.index}", 8.5, ha="right")
        positions = start + np.arange(len(done.token_ids))
        same = np.ones(len(positions), np.int64)
        numbers = sampler.uniform_noise(seed * same, done.index * same, positions)
        for i, (token_id, noise) in enumerate(zip(done.token_ids, numbers.tolist(), strict=True)):
            x, shade = left + i * cell, _mix(BAR, 0.1 + 0.75 * noise)
            box(ax, x, top - line + 0.04, cell - 0.04, line - 0.04, facecolor=shade, linewidth=0)
            middle = x + (cell - 0.04) / 2
            label(ax, middle, top - 0.12, f"{noise:.2f}", 7.5)
            text, size = fit(text_of(token_id, 9), cell - 0.1, 8.5)
            label(ax, middle, top - 0.29, text, size, weight="bold")
        top, last = top - line, name
    show()


def _mix(shade: str, strength: float) -> tuple[float, float, float]:
    """The colour, thinned with white."""
    parts = [int(shade[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (1 - strength * (1 - part) for part in parts)
    return red, green, blue


def frequencies(title: str, probs: Tensor, counts: Tensor, llm: LLM, top: int = 12) -> None:
    """How often each token came, beside how often it should: as a share, and as a distance in
    standard deviations."""
    number = int(counts.sum())
    text_of = Tokens(llm.get_tokenizer()).text
    token_ids = probs.argsort(descending=True, stable=True)[:top]
    exact, seen = probs[token_ids].double().numpy(), counts[token_ids].double().numpy() / number
    distance = (seen - exact) / np.sqrt(exact * (1 - exact) / number)
    places = range(len(token_ids))
    left, right = panels(1, 1.05 + 0.21 * len(token_ids), title, 2, sharey=True)
    left.barh(places, exact, height=0.74, color=PALE, edgecolor=BAR, label="exact probability")
    left.plot(seen, places, "o", color=DRAWN, markersize=5, label=f"share of {number:,} draws")
    left.legend(fontsize=8.5, frameon=False, loc="lower right")
    left.set_yticks(places, [text_of(int(token_id), 9) for token_id in token_ids], fontsize=8.5)
    left.set_ylim(len(token_ids) - 0.4, -0.6)
    left.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    right.axvspan(-2, 2, color="#EEEEEE")
    right.set_title("grey: where 95 of 100 lie by chance", fontsize=8.5, color=FAINT)
    right.axvline(0, color=LINE, linewidth=0.8)
    right.plot(distance, places, "o", color=DRAWN, markersize=5)
    right.set_xlim(-4, 4)
    right.set_xlabel("distance from the exact value, in standard deviations", fontsize=8.5)
    for ax in (left, right):
        ax.tick_params(axis="y", length=0)
    show()


def perplexity(output: RequestOutput) -> float:
    """e to the power of the mean surprise of the prompt's tokens. Needs prompt_logprobs."""
    assert output.prompt_logprobs is not None, "the request needs prompt_logprobs"
    found = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    surprises = [-entry[token_id].logprob for token_id, entry in found if entry]
    return math.exp(sum(surprises) / len(surprises))


def surprise(title: str, outputs: Mapping[str, RequestOutput], llm: LLM) -> None:
    """The tokens of each prompt, with the surprise of each: minus its log-probability. Needs
    prompt_logprobs."""
    text_of = Tokens(llm.get_tokenizer()).text
    line, height = 0.78, 0.55 + 0.78 * len(outputs)
    ax = canvas(height, title)
    cell = min(0.8, WIDTH / max(len(output.prompt_token_ids) for output in outputs.values()))
    for number, (name, output) in enumerate(outputs.items()):
        top = height - 0.42 - line * number
        label(ax, 0, top - 0.1, name, 9, ha="left", weight="bold")
        assert output.prompt_logprobs is not None, "the requests need prompt_logprobs"
        found = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        for i, (token_id, entry) in enumerate(found):
            value = -entry[token_id].logprob if entry else None
            shade = "#F2F2F2" if value is None else _mix(DRAWN, min(0.65, value / 16))
            x = i * cell
            box(ax, x, top - 0.49, cell - 0.03, 0.28, facecolor=shade, linewidth=0)
            text, size = fit(text_of(token_id, 9), cell - 0.08, 8.5)
            label(ax, x + cell / 2, top - 0.35, text, size)
            below = "–" if value is None else f"{abs(value):.1f}"
            label(ax, x + cell / 2, top - 0.58, below, 7.5, color=FAINT)
    show()
