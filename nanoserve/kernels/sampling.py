"""How is a token chosen from a large vocabulary in little time?

`choose_tokens` gives the tokens of sampler.choose_tokens, its definition. Qwen3 has a vocabulary of
151,936 tokens, and most of the definition's time goes into three operations on all of them. Here
each of the three looks at chunks of CHUNK tokens first, and then into few of the chunks:

    definition                here
    argmax                    the maximum of each chunk; then inside the chunk of the largest one
    cumulative sum, float64   the sum of each chunk; then inside the chunk where the sum passes u
    sort                      the largest k tokens are in the k chunks with the largest maxima

On a CPU the filters of a row with top_k work on its largest tokens alone (`draw_from_largest`).
This is right if they drop the last of those: then they drop all others, too. Rows of which this is
not so (many equal logits), and rows without top_k, take the way over all tokens (`draw_from_all`).

A GPU cannot decide this without the CPU waiting for it. There all rows take the way over all
tokens, and only what the CPU knows beforehand saves work: SamplingBatch.drawn_rows and max_top_k.

*What can differ from the definition.* A random number is compared with sums that are rounded in
another order. They differ by about 1e-16 of the total in `draw_from_all`, and by about 1e-7 in
`draw_from_largest`, where the probabilities themselves are rounded in float32 in another order. A
random number within this distance of a border gives the token on the other side of the border.

vLLM: vllm/v1/sample/ops/topk_topp_sampler.py, topk_topp_triton.py (V1).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve import sampler
from nanoserve.sampler import ChosenTokens, SamplingBatch, apply_min_p, find_threshold

CHUNK = 128  # tokens
SMALL = 2**15  # logits; for fewer, neither chunks nor the largest save a CPU anything
MAX_TOP_K = 1024  # beyond it the vocabulary is sorted
SPARSE = 16  # a CPU looks at the largest tokens only if the vocabulary is so many times as large
BLOCK = 2**19  # logits that a CPU works on at a time, so that they stay in its cache
ALMOST_ONE = 1 - 2.0**-53


def choose_tokens(logits: Tensor, batch: SamplingBatch) -> ChosenTokens:
    """The tokens of sampler.choose_tokens. The CPU does not wait for a GPU."""
    if batch.is_greedy:
        return argmax(logits)
    if batch.drawn_rows is None:
        return draw_tokens(logits, batch)
    token_ids, is_possible = argmax(logits)
    rows = batch.drawn_rows
    drawn = draw_tokens(logits.index_select(0, rows), select(batch, rows))
    return ChosenTokens(token_ids.index_copy_(0, rows, drawn.token_ids), is_possible)


def select(batch: SamplingBatch, rows: Tensor) -> SamplingBatch:
    """The parameters of these rows, which draw."""
    given = {name: getattr(batch, name) for name in PER_ROW}
    some = {k: values.index_select(0, rows) for k, values in given.items() if values is not None}
    return replace(batch, drawn_rows=None, **some)


PER_ROW = ("temperature", "top_k", "top_p", "min_p", "uniform")


def draw_tokens(logits: Tensor, batch: SamplingBatch) -> ChosenTokens:
    """Draw a token for each row."""
    if logits.device.type != "cpu" or is_small(logits):
        return draw_from_all(logits, batch)
    top_k = torch.zeros(1, device="cpu") if batch.top_k is None else batch.top_k
    width = int(top_k.masked_fill(top_k > MAX_TOP_K, 0).max()) + 1  # one more than is kept
    if width == 1 or width * SPARSE > logits.shape[1]:
        return draw_in_blocks(logits, batch)
    chosen, is_enough = draw_from_largest(logits, batch, width)
    rest = (~is_enough).nonzero()[:, 0]
    if len(rest):
        some = logits if len(rest) == len(logits) else logits.index_select(0, rest)
        for all_, of_rest in zip(chosen, draw_in_blocks(some, select(batch, rest)), strict=True):
            all_[rest] = of_rest
    return chosen


def draw_in_blocks(logits: Tensor, batch: SamplingBatch) -> ChosenTokens:
    """`draw_from_all`, a few rows at a time."""
    blocks = torch.arange(len(logits), device="cpu").split(max(1, BLOCK // logits.shape[1]))
    chosen = [draw_from_all(logits[b[0] : b[-1] + 1], select(batch, b)) for b in blocks]
    return ChosenTokens(*map(torch.cat, zip(*chosen, strict=True)))


# -- all tokens --


def draw_from_all(logits: Tensor, batch: SamplingBatch) -> ChosenTokens:
    """Draw a token for each row, with any filters."""
    assert batch.uniform is not None
    return draw(compute_probs(logits, batch), batch.uniform)


def compute_probs(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """What the token of each row is drawn from, after temperature and filters. [num_rows,
    vocab_size]; rows that are greedy mean nothing."""
    assert batch.temperature is not None
    scaled = logits / batch.temperature[:, None]
    if batch.min_p is not None:
        scaled = apply_min_p(scaled, batch.min_p)
    if batch.top_k is not None or batch.top_p is not None:
        width = batch.max_top_k or logits.shape[1]
        ordered = largest(scaled, width)[0] if width <= MAX_TOP_K else sort_descending(scaled)
        threshold = find_threshold(ordered, batch.top_k, batch.top_p)
        if batch.top_k is not None and width <= MAX_TOP_K:  # rows without top_k have no top_p here
            threshold = threshold.masked_fill(batch.top_k[:, None] > width, -torch.inf)
        scaled.masked_fill_(scaled < threshold, -torch.inf)
    # A CPU takes a new page for each 4 KiB of a new tensor, which costs more than the softmax.
    place = scaled if scaled.device.type == "cpu" else None
    return torch.softmax(scaled, dim=-1, out=place)


def draw(probs: Tensor, uniform: Tensor) -> ChosenTokens:
    """As sampler.draw: the first token whose cumulative probability exceeds u.

    The chunk is found in the sums of the chunks, the token in the sums inside the chunk. These may
    end a rounding error below the sum that found the chunk, so u is kept below their end: a token
    of probability 0 is never drawn.
    """
    is_possible = probs[:, 0].isfinite()  # a softmax over NaN or infinity is NaN everywhere
    if is_small(probs):
        return ChosenTokens(sampler.draw(probs, uniform), is_possible)
    chunks = as_chunks(probs, 0.0)
    ends = chunks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = uniform[:, None] * ends[:, -1:]
    chunk = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    before = torch.where(chunk > 0, ends.gather(1, (chunk - 1).clamp_(min=0)), 0.0)
    ends_inside = take_chunks(chunks, chunk).double().cumsum(dim=-1)
    target = torch.minimum(target - before, ends_inside[:, -1:] * ALMOST_ONE)
    drawn = chunk * CHUNK + torch.searchsorted(ends_inside, target, right=True)
    return ChosenTokens(drawn.clamp_(max=probs.shape[1] - 1)[:, 0], is_possible)


# -- a few tokens --


def draw_from_largest(
    logits: Tensor, batch: SamplingBatch, width: int
) -> tuple[ChosenTokens, Tensor]:
    """Draw a token for each row from its `width` largest logits; and for which rows [num_rows]
    these were enough: their top_k is less, and the last one is dropped, so all others are. The
    tokens of the other rows mean nothing."""
    assert batch.temperature is not None and batch.uniform is not None and batch.top_k is not None
    values, token_ids = largest(logits, width)
    scaled = values / batch.temperature[:, None]
    if batch.min_p is not None:
        scaled = apply_min_p(scaled, batch.min_p)
    threshold = find_threshold(scaled, batch.top_k, batch.top_p)
    is_last_dropped = (scaled[:, -1:] < threshold)[:, 0] | (scaled[:, -1] == -torch.inf)
    scaled = scaled.masked_fill(scaled < threshold, -torch.inf)
    # The definition adds up the probabilities in the order of the token ids.
    token_ids, order = token_ids.sort(dim=-1)
    ends = scaled.softmax(dim=-1).gather(1, order).double().cumsum(dim=-1)
    target = batch.uniform[:, None] * ends[:, -1:]
    place = torch.searchsorted(ends, target, right=True).clamp_(max=width - 1)
    chosen = ChosenTokens(token_ids.gather(1, place)[:, 0], values[:, 0].isfinite())
    return chosen, is_last_dropped & (batch.top_k < width)


# -- in two levels --


def argmax(logits: Tensor) -> ChosenTokens:
    """As logits.argmax(dim=-1): the first one of equals, and NaN before all others."""
    if logits.device.type != "cpu" or is_small(logits):
        top, token_ids = logits.max(dim=-1)
        return ChosenTokens(token_ids, top.isfinite())
    chunks = as_chunks(logits, -torch.inf)
    top, chunk = chunks.amax(dim=-1).max(dim=-1)
    place = take_chunks(chunks, chunk[:, None]).argmax(dim=-1)
    return ChosenTokens(chunk * CHUNK + place, top.isfinite())


def largest(logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The largest logits of each row, in descending order, and their token ids: [num_rows, number]
    each."""
    if number * 4 > logits.shape[1] // CHUNK:
        return logits.topk(number, dim=-1)
    chunks = as_chunks(logits, -torch.inf)
    chosen = chunks.amax(dim=-1).topk(number, sorted=False).indices
    values, places = take_chunks(chunks, chosen).topk(number, dim=-1)
    token_ids = chosen.gather(1, places // CHUNK) * CHUNK + places % CHUNK
    return values, token_ids.clamp_(max=logits.shape[1] - 1)  # behind the last: -inf


def sort_descending(logits: Tensor) -> Tensor:
    """As logits.sort(dim=-1, descending=True).values. NumPy sorts numbers that bring no indices, in
    a tenth of torch's time or less."""
    if logits.device.type != "cpu":
        return logits.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(-1)


def is_small(values: Tensor) -> bool:
    """Do chunks save nothing? (On a GPU they always save a scan that runs on few of its cores.)"""
    return values.device.type == "cpu" and values.numel() <= SMALL


def as_chunks(values: Tensor, fill: float) -> Tensor:
    """[num_rows, vocab_size] as [num_rows, num_chunks, CHUNK]; `fill` stands behind the last."""
    if missing := -values.shape[1] % CHUNK:
        values = F.pad(values, (0, missing), value=fill)
    return values.unflatten(1, (-1, CHUNK))


def take_chunks(chunks: Tensor, numbers: Tensor) -> Tensor:
    """The values in the chunks of these numbers [num_rows, k]: [num_rows, k * CHUNK]."""
    rows = torch.arange(len(chunks), device=chunks.device)[:, None]
    return chunks[rows, numbers].flatten(1)
