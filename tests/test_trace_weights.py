"""The pictures of matrices say what is true of their numbers; oracles of notebooks 15 and 16."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("matplotlib")

import matplotlib
import torch

from nanoserve.extras import cases, trace


@pytest.fixture
def plt() -> Any:
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def test_matrices_are_drawn_to_one_scale(plt: Any) -> None:
    b, a = torch.full((60, 4), -0.5), torch.full((4, 120), 2.0, dtype=torch.bfloat16)
    trace.matrices("Low rank", {"lora_B": b, "lora_A": a, "B A": b @ a.float()})
    [ax] = plt.gcf().axes
    texts = {text.get_text() for text in ax.texts}
    assert {"lora_B", "60 × 4", "up to ±0.5", "4 × 120", "60 × 120", "up to ±4"} <= texts
    sizes = []
    for image in ax.images:
        left, right, bottom, top = image.get_extent()
        sizes.append((round(top - bottom, 3), round(right - left, 3)))
    (b_height, b_width), (a_height, a_width), product = sizes
    assert product == (b_height, a_width) and b_height == pytest.approx(a_width / 2, abs=0.01)
    assert b_width == pytest.approx(a_height, abs=0.01)


@pytest.mark.parametrize("shared", [False, True])
def test_a_shared_scale_makes_sizes_comparable(plt: Any, shared: bool) -> None:
    trace.matrices("Error", {"before": [[2.0, -2.0]], "error": [[0.1, 0.1]]}, shared=shared)
    tops = [image.norm.vmax for image in plt.gcf().axes[0].images]
    assert tops == pytest.approx([6.0, 6.0] if shared else [6.0, 0.3])


def test_a_staircase_counts_its_steps(plt: Any) -> None:
    row = torch.tensor([-2.0, -1.0, 0.4, 1.0])
    trace.staircase("Rounded", row, {"same": row, "whole": row.round(), "sign": row.sign()})
    titles = [ax.get_title(loc="right") for ax in plt.gcf().axes]
    assert titles == ["4 different, error 0%", "4 different, error 9.1%", "2 different, error 36%"]


@pytest.mark.parametrize(("bits", "group_size"), [(2, 6), (4, 4), (8, 12)])
def test_rounded_weights_are_the_nearest_codes(bits: int, group_size: int) -> None:
    """The oracle of notebook 16: no number is off by more than half a scale."""
    weight = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    after = cases.rounded(weight, bits, group_size)
    scales = weight.unflatten(1, (-1, group_size)).abs().amax(2) / (2 ** (bits - 1) - 1)
    codes = after.unflatten(1, (-1, group_size)) / scales[..., None]
    assert torch.allclose(codes, codes.round(), atol=1e-4)
    error = (after - weight).unflatten(1, (-1, group_size)).abs().amax(2)
    assert (error <= scales / 2 + 1e-6).all()


def test_the_engine_reads_an_adapter_again_when_there_was_no_room_for_it() -> None:
    """The oracle of notebook 15."""
    assert [cases.adapter_reads("pqpq", room) for room in (1, 2)] == [4, 2]
