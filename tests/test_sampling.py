"""The fast way to choose a token, held to its definition in sampler.py; and that it never waits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_oracle import one_thread
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_sampler import ALMOST_ONE, LOGITS, NoWaiting, Params, batch_of, exact_distribution
from torch import Tensor

from nanoserve import LLM, SamplingParams, sampler
from nanoserve.kernels import sampling
from nanoserve.sampler import SamplingBatch, find_threshold
from nanoserve.sampling_params import GREEDY_TEMPERATURE
from nanoserve.staging import StagingBuffer


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways at a tiny vocabulary: chunks of 4 tokens, blocks of a row or two."""
    for name, value in (("CHUNK", 4), ("SMALL", -1), ("BLOCK", 50), ("SPARSE", 1)):
        monkeypatch.setattr(sampling, name, value)
    monkeypatch.setattr(sampling, "MAX_TOP_K", 9)


def as_sent(batch: SamplingBatch, vocab_size: int) -> SamplingBatch:
    """With what the CPU knows beforehand, as the InputBatch sends it."""
    assert batch.temperature is not None
    is_drawn = batch.temperature >= GREEDY_TEMPERATURE
    off = torch.full((len(is_drawn),), vocab_size)
    top_k = off if batch.top_k is None else batch.top_k
    has_limit = top_k < vocab_size
    has_limit |= False if batch.top_p is None else batch.top_p < 1
    limits = top_k[has_limit].tolist()
    return replace(
        batch,
        is_greedy=not is_drawn.any(),
        drawn_rows=None if is_drawn.all() else is_drawn.nonzero()[:, 0],
        max_top_k=max(limits, default=0),
    )


def choose_on_gpu(logits: Tensor, batch: SamplingBatch) -> sampler.ChosenTokens:
    """What a GPU runs, here on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "draw_tokens", sampling.draw_from_all)
        return sampling.choose_tokens(logits, batch)


REPEATABLE = settings(  # the constants are patched for all examples of a test alike
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
WAYS = {"cpu": sampling.choose_tokens, "gpu": choose_on_gpu}
EITHER_WAY = pytest.mark.parametrize("choose", WAYS.values(), ids=WAYS)

# -- the same tokens --

ROW = st.builds(
    Params,
    temperature=st.sampled_from([0.0, 1e-6, 0.1, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 9, 10, 30, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.6, 0.3, 1e-4]),
    min_p=st.sampled_from([0.0, 0.0, 0.001, 0.1, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)


@EITHER_WAY
@settings(REPEATABLE, max_examples=150)
@given(
    rows=st.lists(ROW, min_size=1, max_size=6),
    vocab_size=st.sampled_from([1, 3, 4, 16, 37, 100]),
    spread=st.sampled_from([0.2, 1.0, 5.0]),
    steps=st.sampled_from([2, 8, 10**6]),  # few steps give many ties
    bad=st.sampled_from([None, None, None, math.nan, math.inf, -math.inf]),
    seed=st.integers(0, 2**31),
)
def test_the_tokens_of_the_definition(
    small_chunks: None,
    choose: Any,
    rows: list[Params],
    vocab_size: int,
    spread: float,
    steps: int,
    bad: float | None,
    seed: int,
) -> None:
    """Filters in any company, ties, and rows in which no token is possible."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), vocab_size, generator=generator) * spread
    logits = (logits * steps).round() / steps
    if bad is not None:
        logits[-1, :: 1 if bad == -math.inf else 3] = bad
    rows = [row if row.temperature >= 1e-5 else Params(0.0) for row in rows]
    batch = as_sent(batch_of(rows, vocab_size), vocab_size)
    before = logits.clone()
    chosen, expected = choose(logits, batch), sampler.choose_tokens(logits, batch)
    assert torch.equal(logits.nan_to_num(5.5), before.nan_to_num(5.5))
    assert torch.equal(chosen.is_possible, expected.is_possible)
    assert chosen.is_possible[:-1].all() and bool(chosen.is_possible[-1]) == (bad is None)
    possible = expected.is_possible
    assert torch.equal(chosen.token_ids[possible], expected.token_ids[possible])
    assert chosen.token_ids.min() >= 0 and chosen.token_ids.max() < vocab_size


@EITHER_WAY
def test_the_tokens_of_the_definition_at_full_size(choose: Any) -> None:
    """Two vocabularies, one of them no multiple of a chunk, with the constants as they are."""
    for vocab_size, scale in itertools.product((2_048, 33_001), (1.0, 4.0)):
        logits = torch.randn(10, vocab_size, generator=torch.Generator().manual_seed(0)) * scale
        rows = [
            Params(temperature, top_k, top_p, min_p, seed=top_k)
            for temperature, top_k, top_p, min_p in (
                (0.6, 20, 0.95, 0.0),
                (1.0, 0, 1.0, 0.0),
                (0.0, 0, 1.0, 0.0),
                (1.0, 0, 0.9, 0.0),
                (1.0, 0, 1.0, 0.05),
                (1.0, 0, 0.9, 0.01),
                (1.5, 1000, 1.0, 0.0),
                (1.5, 1500, 0.8, 0.0),
                (0.01, 50, 1.0, 0.1),
                (1.0, 1, 0.5, 0.0),
            )
        ]
        for some in (rows, rows[:1] * 10, rows[1:2] * 10, rows[3:4] * 10, rows[2:3] * 10):
            batch = as_sent(batch_of(some, vocab_size), vocab_size)
            expected = sampler.choose_tokens(logits, batch)
            with torch.device("meta"):  # whatever set_default_device says
                chosen = choose(logits, batch)
            assert torch.equal(chosen.token_ids, expected.token_ids)
            assert expected.is_possible.all() and chosen.is_possible.all()


@EITHER_WAY
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (6, 0.8, 0.0), (0, 0.7, 0.2)])
def test_tokens_follow_the_exact_distribution(
    small_chunks: None, choose: Any, top_k: int, top_p: float, min_p: float
) -> None:
    """Pearson's chi-square, as in test_sampler; here two rows of ten are of the same chunk."""
    number, params = 8_000, Params(0.8, top_k, top_p, min_p)
    expected = number * np.array(exact_distribution(LOGITS, params))
    batch = batch_of([replace(params, seed=seed, position=3) for seed in range(number)], 10)
    logits = torch.tensor(LOGITS).expand(number, -1)
    tokens = choose(logits, as_sent(batch, len(LOGITS))).token_ids
    counts = np.bincount(tokens, minlength=len(LOGITS))
    possible = expected > 0
    assert not counts[~possible].any(), "a filtered token was drawn"
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


# -- the draw in two levels --


@settings(REPEATABLE, max_examples=150)
@given(
    weights=st.lists(
        st.sampled_from([0.0, 0.0, 0.0, 1e-38, 1e-30, 1e-7, 0.1, 1.0]), min_size=1, max_size=30
    ),
    u=st.sampled_from([0.0, 2.0**-53, 0.25, 0.3, 0.5, 0.999, ALMOST_ONE]),
)
def test_the_draw_inverts_the_cumulative_sum(
    small_chunks: None, weights: list[float], u: float
) -> None:
    """At the ends of [0, 1) and at borders between tokens; never a token of probability 0."""
    if not sum(weights):
        weights = [*weights, 1.0]
    probs = torch.tensor([weights]) / sum(weights)
    sums = list(itertools.accumulate(probs[0].double().tolist()))
    borders = [total / sums[-1] for total in sums if total < sums[-1]]
    for uniform in (u, *borders, *(math.nextafter(border, 0) for border in borders if border)):
        [drawn] = sampling.draw(probs, torch.tensor([uniform], dtype=torch.float64)).token_ids
        assert probs[0, drawn] > 0
        low, high = ([0.0, *sums][drawn + side] / sums[-1] for side in (0, 1))
        assert low - 1e-15 <= uniform < high + 1e-15


def test_the_draw_resolves_a_large_vocabulary() -> None:
    """u just before and just after the end of a token's share."""
    probs = torch.randn(1, 150_001, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    tokens = np.array([0, 1, 126, 127, 128, 6_001, 77_777, 149_887, 149_888, 149_999])
    sums = np.cumsum(probs[0].double().numpy())
    for side, expected in ((-1e-12, tokens), (1e-12, tokens + 1)):
        uniform = torch.from_numpy((sums[tokens] + side) / sums[-1])
        drawn = sampling.draw(probs.expand(len(tokens), -1), uniform).token_ids
        assert drawn.tolist() == expected.tolist()


def test_the_ends_of_the_draw() -> None:
    """u = 0 and u just below 1, with whole chunks of filtered tokens at both ends."""
    logits = torch.randn(2, 150_000, generator=torch.Generator().manual_seed(0))
    logits[:, :200] = logits[:, -300:] = -math.inf
    uniform = torch.tensor([0.0, ALMOST_ONE], dtype=torch.float64)
    assert sampling.draw(logits.softmax(dim=-1), uniform).token_ids.tolist() == [200, 149_699]


# -- the other two --


@settings(REPEATABLE, max_examples=100)
@given(
    rows=st.integers(1, 4).flatmap(
        lambda size: st.lists(
            st.lists(
                st.sampled_from([-math.inf, -1.0, 0.0, 2.0, 2.0, math.inf, math.nan]),
                min_size=7 * size,
                max_size=7 * size,
            ),
            min_size=1,
            max_size=4,
        )
    )
)
def test_argmax_takes_the_first_of_equals_and_nan_first(
    small_chunks: None, rows: list[list[float]]
) -> None:
    logits = torch.tensor(rows)
    chosen = sampling.argmax(logits)
    assert torch.equal(chosen.token_ids, logits.argmax(dim=-1))
    assert torch.equal(chosen.is_possible, logits.max(dim=-1).values.isfinite())


@settings(REPEATABLE, max_examples=100)
@given(
    size=st.integers(1, 130),
    number=st.integers(1, 12),
    steps=st.sampled_from([1, 3, 10**6]),
    seed=st.integers(0, 2**31),
)
def test_the_largest_are_the_beginning_of_the_sorted(
    small_chunks: None, size: int, number: int, steps: int, seed: int
) -> None:
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(seed))
    logits = (logits * steps).round() / steps
    ordered = logits.sort(dim=-1, descending=True).values
    assert torch.equal(sampling.sort_descending(logits), ordered)
    number = min(number, size)
    values, token_ids = sampling.largest(logits, number)
    assert torch.equal(values, ordered[:, :number])
    assert torch.equal(logits.gather(1, token_ids), values)
    assert all(len(set(row)) == number for row in token_ids.tolist())


@settings(REPEATABLE, max_examples=100)
@given(
    top_k=st.lists(st.integers(1, 20), min_size=3, max_size=3),
    top_p=st.none() | st.lists(st.sampled_from([1.0, 0.9, 0.3]), min_size=3, max_size=3),
    steps=st.sampled_from([1, 3, 10**6]),
    seed=st.integers(0, 2**31),
)
def test_the_threshold_is_in_the_beginning(
    top_k: list[int], top_p: list[float] | None, steps: int, seed: int
) -> None:
    """The largest top_k logits of a row give the same threshold as all of them: so the same
    tokens are kept, ties included."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(seed))
    ordered = ((logits * steps).round() / steps).sort(dim=-1, descending=True).values
    limits = torch.tensor(top_k), None if top_p is None else torch.tensor(top_p)
    few = find_threshold(ordered[:, : max(top_k)], *limits)
    assert torch.equal(few, find_threshold(ordered, *limits))


# -- no waiting --


class NoCopies(NoWaiting):
    """Also errors: an index that is a mask; a tensor made of Python numbers, and an array for which
    the staging buffer has no room. To copy these two to a GPU, the CPU waits."""

    def __enter__(self) -> Any:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("a tensor of Python numbers waits for its copy")

        def write(staging: StagingBuffer, array: np.ndarray) -> Any:
            written = self.write(staging, array)
            assert written, f"an array of {array.nbytes} bytes waits for a copy of its own"
            return written

        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(torch, "tensor", refuse)
        self.patch.setattr(torch, "as_tensor", refuse)
        self.write = StagingBuffer._write
        self.patch.setattr(StagingBuffer, "_write", write)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.patch.undo()
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if "index" in str(func):
            indices = [x for arg in args[1:2] for x in (arg if isinstance(arg, list) else [arg])]
            dtypes = [x.dtype for x in indices if isinstance(x, Tensor)]
            assert torch.bool not in dtypes, f"{func} waits for the number of rows"
        return super().__torch_dispatch__(func, types, args, kwargs)


def many_requests() -> list[SamplingParams]:
    """Together they use all that the sampler can do on its own."""
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "n": 2},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01, "min_tokens": 3},
        {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.3},
        {"temperature": 0.7, "frequency_penalty": 0.2, "logit_bias": {5: 1.0}},
        {"temperature": 0.7, "allowed_token_ids": list(range(40)), "bad_words": ["the"]},
    ]
    return [SamplingParams(seed=i, max_tokens=4, **given) for i, given in enumerate(fields)]


def test_a_step_is_sampled_without_waiting(demo_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the forward pass and the result: on the way that a GPU takes, with every feature."""
    runner = demo_llm.engine.executor.runner
    sample, num_watched = runner.sample, 0

    def watched(*args: Any) -> Any:
        nonlocal num_watched
        num_watched += 1
        with NoCopies():
            return sample(*args)

    monkeypatch.setattr(sampling, "draw_tokens", sampling.draw_from_all)
    monkeypatch.setattr(sampling, "SMALL", -1)
    monkeypatch.setattr(runner, "sample", watched)
    params = many_requests()
    outputs = demo_llm.generate(["Once upon a time"] * len(params), params, use_tqdm=False)
    assert len(outputs) == len(params)
    assert num_watched >= 4


def test_the_watch_sees_what_waits() -> None:
    """Each of the ways in which a sampler waited once, or could."""
    logits = torch.randn(2, 3)
    staging = StagingBuffer(64, torch.device("cpu"))
    for wait in (
        lambda: staging.send(array=np.zeros(9)),
        lambda: logits[0, 0].item(),
        lambda: logits.tolist() and bool(logits[0, 0] > 0),
        lambda: logits[logits > 0],
        lambda: logits.nonzero(),
        lambda: torch.tensor([1, 2]),
        lambda: logits.clone().index_put_((logits > 0,), torch.zeros(())),
    ):
        with pytest.raises(AssertionError, match="waits"), NoCopies():
            wait()


@pytest.mark.gpu
def test_a_step_is_sampled_without_waiting_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch itself reports an operation that makes the CPU wait."""
    with LLM(device="cuda", num_kv_blocks=512) as llm:
        params = many_requests()
        prompts = ["Once upon a time"] * len(params)
        llm.generate(prompts, params, use_tqdm=False)  # kernels are compiled, memory is there
        runner = llm.engine.executor.runner
        sample = runner.sample

        def watched(*args: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return sample(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(runner, "sample", watched)
        assert len(llm.generate(prompts, params, use_tqdm=False)) == len(params)
