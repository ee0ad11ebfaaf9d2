"""Online softmax: held to the definition of attention, block by block and in splits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("nanoserve.extras.online_softmax")

import torch
from attention_oracle import STEPS, Shape, attention_by_definition, make_step, one_thread
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve import LLM, SamplingParams
from nanoserve.extras.online_softmax import OnlineSoftmax, Running, add_block, merge


@pytest.fixture(autouse=True, scope="module")
def one() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("name", STEPS)
def test_it_is_attention(name: str, num_splits: int) -> None:
    """NaN stands in every slot that nobody owns. With 3 splits some have no key at all."""
    for window, cap in [(None, None), (3, None), (None, 2.0)]:
        options = {"sliding_window": window, "logits_soft_cap": cap}
        shape = Shape(STEPS[name], value_dim=4, **options)
        step = make_step(shape)
        found = OnlineSoftmax(num_splits).attend(
            step.query, step.caches, step.metadata, **shape.options
        )
        expected = attention_by_definition(*step.tensors, **shape.options)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=40)
@given(st.lists(st.lists(st.floats(-600, 600), min_size=1, max_size=4), min_size=1), st.data())
def test_blocks_may_come_in_any_order_and_part(
    blocks: list[list[float]], data: st.DataObject
) -> None:
    """Scores so far apart that e^score alone would overflow."""
    order = data.draw(st.permutations(blocks))
    cuts = data.draw(st.integers(1, len(blocks)))
    one = torch.zeros(1, 1, 1, dtype=torch.float64)
    parts = [Running(one - torch.inf, one, one)] * cuts
    for number, scores in enumerate(order):
        score = torch.tensor([[scores]], dtype=torch.float64)
        parts[number % cuts] = add_block(parts[number % cuts], score, score.mT)
    scores = torch.tensor([score for block in blocks for score in block], dtype=torch.float64)
    merged = merge(parts)
    torch.testing.assert_close(
        merged.acc / merged.total, (scores.softmax(0) @ scores)[None, None, None]
    )
    assert merged.m == scores.max()


def test_an_engine_writes_the_same_text() -> None:
    prompts, params = ["Once upon a time", "The red"], SamplingParams(temperature=0, max_tokens=12)
    options = {"num_gpu_blocks_override": 32, "max_model_len": 64, "max_num_seqs": 2}
    texts = [
        [
            output.outputs[0].text
            for output in LLM(attention_backend=backend, **options).generate(
                prompts, params, use_tqdm=False
            )
        ]
        for backend in ("reference", OnlineSoftmax(num_splits=2))
    ]
    assert texts[0] == texts[1]


def test_no_split_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="num_splits is 0; give 1 or more"):
        OnlineSoftmax(0)
