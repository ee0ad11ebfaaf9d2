"""Lab 6: adapters, beside merged matrices and the engine's own chapter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import nanoserve.demo
from nanoserve.chapters.lora.peft_helper import LoRAWeights
from nanoserve.layers import LinearMethod
from nanoserve.teaching.course.graders import answers

torch.manual_seed(6)
W, X = torch.randn(6, 8), torch.randn(5, 8)
ADAPTERS = [LoRAWeights(torch.randn(2, 8), torch.randn(6, 2), scale) for scale in (0.5, 2.0, 1.0)]


def right(number: int) -> Tensor:
    """All tokens with this adapter, as one matrix."""
    if number < 0:
        return X @ W.T
    a, b, scaling = ADAPTERS[number]
    return X @ (W + scaling * b @ a).T


def add_adapter(y: Tensor, x: Tensor, adapter: LoRAWeights) -> Tensor:
    """Task 6.1, for the tasks behind it."""
    return y + x @ (adapter.scaling * adapter.lora_b @ adapter.lora_a).T


def check(got: Tensor, wanted: Tensor, what: str) -> None:
    assert got.shape == wanted.shape, f"{what}: the shape is {[*got.shape]}, not {[*wanted.shape]}"
    row = int((got - wanted).abs().amax(dim=-1).argmax())
    assert torch.allclose(got, wanted, atol=1e-4), (
        f"{what}: row {row} is {got[row].tolist()[:3]}..., not {wanted[row].tolist()[:3]}..."
    )


def test_6_1_one_adapter(mine: Any) -> None:
    for number, adapter in enumerate(ADAPTERS):
        what = f"an adapter with scaling {adapter.scaling}"
        check(mine("add_adapter")(X @ W.T, X, adapter), right(number), what)


def test_6_1_y_is_not_written_to(mine: Any) -> None:
    y = X @ W.T
    mine("add_adapter")(y, X, ADAPTERS[0])
    assert torch.equal(y, X @ W.T), "y was changed in place, and somebody else may read it"


@pytest.mark.points(2)
def test_6_2_each_token_has_its_own(mine: Any) -> None:
    mine.using(add_adapter=add_adapter)
    ids = torch.tensor([1, 0, 1, -1, 2])
    wanted = torch.stack([right(int(number))[row] for row, number in enumerate(ids)])
    got = mine("add_adapters")(X @ W.T, X, ADAPTERS, ids)
    check(got, wanted, f"tokens with the adapters {ids.tolist()}")


def test_6_2_nobody_has_one(mine: Any) -> None:
    mine.using(add_adapter=add_adapter)
    got = mine("add_adapters")(X @ W.T, X, ADAPTERS, torch.full((5,), -1))
    check(got, X @ W.T, "no token has an adapter")


def test_6_2_who_is_not_there_is_not_multiplied_by(mine: Any) -> None:
    mine.using(add_adapter=add_adapter)
    broken = LoRAWeights(torch.full((2, 8), torch.nan), torch.full((6, 2), torch.nan), 1.0)
    got = mine("add_adapters")(X @ W.T, X, [broken, ADAPTERS[1]], torch.tensor([1, 1, -1, 1, 1]))
    assert not got.isnan().any(), "adapter 0 is NaN, no token has it, and the result is NaN"


@pytest.mark.points(2)
def test_6_3_one_matrix_for_both(mine: Any) -> None:
    check(X @ mine("merge")(W, ADAPTERS[1]).T, right(1), "the merged matrix")


@pytest.mark.points(3)
def test_6_4_the_rows_of_each_matrix(mine: Any) -> None:
    mine.using(add_adapter=add_adapter)
    a, b, scaling = ADAPTERS[0]
    parts = [
        (slice(0, 2), LoRAWeights(a, b[:2], scaling)),
        (slice(4, 6), ADAPTERS[1]._replace(lora_b=b[4:])),
    ]
    layer: Any = SimpleNamespace(weight=W, adapters=parts)
    wanted = X @ W.T
    for rows, adapter in parts:
        wanted[:, rows] += X @ adapter.lora_a.T @ adapter.lora_b.T * adapter.scaling
    bias = torch.ones(6)
    got = mine("MyLoRAMethod")(LinearMethod()).apply(layer, X, bias)
    check(got, wanted + 1, "q and v have adapters, k has none, and there is a bias")


@pytest.mark.points(2)
def test_6_5_the_engine_speaks_like_a_pirate(mine: Any) -> None:
    from nanoserve import SamplingParams
    from nanoserve.chapters.lora import LoRARequest
    from nanoserve.teaching.lesson import prompt, small_llm

    got = answers({"C": 16}, runner_cls=mine("MyRunner"))["C"]
    pirate = LoRARequest("pirate", 1, str(Path(nanoserve.demo.__file__).parent / "lora"))
    params = SamplingParams(temperature=0, max_tokens=16)
    with small_llm(enable_lora=True) as llm:
        outputs = llm.generate(prompt(llm, "C"), params, lora_request=pirate, use_tqdm=False)
    said = outputs[0].outputs[0].text
    assert got == said, f"your engine says {got!r}, and the chapter's says {said!r}"
