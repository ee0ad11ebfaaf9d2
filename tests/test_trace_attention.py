"""Pictures of attention: their numbers are those of the definition."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_oracle import Shape, Step, make_step

pytest.importorskip("matplotlib")

import matplotlib.pyplot as plt

from nanoserve.attention import AttentionBackend
from nanoserve.extras import lesson, trace

SCALE = 8**-0.5
SHAPE = Shape(((1, 9), (5, 0), (3, 4)))  # a decode, a prompt, a chunk


@pytest.fixture(autouse=True)
def without_a_window() -> Iterator[None]:
    plt.switch_backend("agg")
    yield
    plt.close("all")


@pytest.fixture
def step() -> Step:
    """A step in which no slot holds NaN: the names of slots are summed up over all of them."""
    step = make_step(SHAPE)
    for cache in step.caches:
        cache.nan_to_num_(0.0)
    return step


def words_of(axes: plt.Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_slot_weights_are_those_of_the_definition(step: Step) -> None:
    """They sum to 1, stand on visible slots of the query's own blocks only, and give its output."""
    weights = trace.slot_weights(step.query, step.key_cache, step.metadata, SCALE)
    assert weights.shape == (9, 4, *step.key_cache.shape[:2])
    torch.testing.assert_close(weights.sum((2, 3)), torch.ones(9, 4))
    value = step.value_cache.repeat_interleave(2, dim=2)  # two query heads share a key head
    output = AttentionBackend().attend(step.query, step.caches, step.metadata, scale=SCALE)
    torch.testing.assert_close(torch.einsum("qhbs,bshd->qhd", weights, value), output)
    num_visible = (weights > 0).sum((2, 3))[:, 0].tolist()
    assert num_visible == [10, 1, 2, 3, 4, 5, 5, 6, 7]
    of_the_decode = set(step.block_table[0, :3].tolist())
    assert set(weights[0].sum((0, 2)).nonzero().flatten().tolist()) == of_the_decode


def read_in_blocks(scores: list[list[float]]) -> tuple[list[trace.BlockRead], torch.Tensor]:
    """An online softmax over blocks of scores, with values of 8 numbers; the output in full."""
    values = [torch.randn(len(block), 8, dtype=torch.float64) for block in scores]
    m, total, acc = torch.tensor(-torch.inf).double(), torch.zeros(()), torch.zeros(8)
    reads = []
    for block_id, (score, value) in enumerate(zip(scores, values, strict=True)):
        new_m = torch.maximum(m, torch.tensor(score).double().max())
        weight, shrink = (torch.tensor(score).double() - new_m).exp(), (m - new_m).exp()
        total, acc = total * shrink + weight.sum(), acc * shrink + weight @ value
        m = new_m
        reads.append(trace.BlockRead(block_id, weight, shrink, m, total, acc / total))
    every = torch.tensor([score for block in scores for score in block]).double()
    return reads, every.softmax(0) @ torch.cat(values)


def test_the_last_panel_of_online_softmax_is_the_definition() -> None:
    reads, expected = read_in_blocks([[1, 3, 0, 1], [9, 2, 2, 0], [9, 4]])
    trace.online_softmax("title", reads, expected, ["abcd", "efgh", "ij"])
    words = words_of(plt.gca())
    assert words[0] == "title"
    assert words.count("= the definition") == 1
    assert [word for word in words if word.startswith("block")] == ["block 0", "block 1", "block 2"]
    assert [word for word in words if word.startswith("old")] == ["old sums × 2e-03"]
    assert set("abcdefghij") <= set(words)


def test_a_wrong_output_is_not_called_the_definition() -> None:
    reads, expected = read_in_blocks([[1, 3, 0, 1], [4, 2, 2, 0]])
    trace.online_softmax("title", reads, expected + 0.1, ["abcd", "efgh"])
    assert "= the definition" not in words_of(plt.gca())
    assert "old sums × 0.37" in words_of(plt.gca())


@pytest.mark.parametrize(("num_kv_heads", "intensity"), [(32, 1), (8, 4), (1, 32)])
def test_a_decode_has_as_many_operations_per_byte_as_heads_share_a_key(
    num_kv_heads: int, intensity: int
) -> None:
    """In numbers of 2 bytes, whatever the number of keys, but for the query itself."""
    work = trace.Work.attention(1, 100_000, 32, num_kv_heads, 128)
    assert work.intensity == pytest.approx(intensity, rel=0.001)


def test_work() -> None:
    """2 queries at the end of 3 keys see 2 + 3 of them; one head, two numbers in each vector."""
    work = trace.Work.attention(2, 3, 1, 1, 2)
    assert work.operations == 5 * 4 * 2
    assert work.num_bytes == 2 * (3 * 2 + 3 * 2 + 2 * 2 + 2 * 2)  # keys, values, queries, outputs
    work = trace.Work.product(5, 3, 4)
    assert work == (2 * 5 * 3 * 4, 2 * (3 * 4 + 5 * 3 + 5 * 4))


def test_a_roofline_says_which_share_of_the_rate_is_reached() -> None:
    groups = {"slow": {"a": trace.Work(10, 10)}, "fast": {"b": trace.Work(10_000, 10)}}
    trace.roofline("title", "a GPU", 1e14, 1e12, groups)
    words = [text.get_text() for text in plt.gcf().texts]
    assert words[0] == "title"
    assert {"slow", "fast", "1  a", "2  b", "1.0 %", "100 %", "1,000"} <= set(words)
    assert "100" in words_of(plt.gca())  # operations per byte at the ridge


def test_token_texts() -> None:
    with lesson.small_llm() as llm:
        ids = llm.get_tokenizer().encode(" red box\n")
        assert trace.token_texts(llm, ids)[:2] == ["red", "box"]
        assert trace.token_texts(llm.engine, ids) == trace.token_texts(llm, ids)
