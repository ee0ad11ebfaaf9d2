"""Weights of 4 and 8 bits: what they stand for, and every way to multiply by them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_oracle import needs_interpreter, one_thread
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve.attention import quantize_rows
from nanoserve.kernels.quantized import (
    FP8,
    KINDS,
    QuantizedWeight,
    ScaledMatmul,
    pack_int4,
    unpack_int4,
)
from nanoserve.kernels.quantized_cpu import LIBRARY

needs_compiler = pytest.mark.skipif(not LIBRARY.multiply, reason="no C++ compiler with OpenMP")


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def make_weight(
    kind: str,
    num_outputs: int,
    num_columns: int,
    num_groups: int = 1,
    seed: int = 0,
    has_zeros: bool = False,
    **options: Any,
) -> QuantizedWeight:
    """Random codes and scales."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, width: int) -> Tensor:
        return torch.randint(low, high, (num_outputs, width), generator=generator)

    zeros = None
    if kind == "int4":
        codes = pack_int4(integers(0, 16, num_columns).to(torch.uint8))
        zeros = integers(0, 17, num_groups)  # 16: what GPTQ's stored 15 means
    elif kind == "int8":
        codes, zeros = (
            integers(-128, 128, num_columns).to(torch.int8),
            integers(-128, 129, num_groups),
        )
    else:
        codes = torch.randn(num_outputs, num_columns, generator=generator).mul(20).to(FP8)
    scales = torch.rand(num_outputs, num_groups, generator=generator) / 100 + 0.001
    return QuantizedWeight(kind, codes, scales, zeros if has_zeros else None, **options)


def assert_multiplies_as_defined(
    weight: QuantizedWeight, num_rows: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> None:
    """Before `prepare` and after it. The sums of float32 are in another order, no more."""
    x = torch.randn(num_rows, weight.num_inputs, generator=torch.Generator().manual_seed(seed))
    x, bias = x.to(dtype), torch.randn(weight.num_outputs, dtype=dtype)
    exact = F.linear(x.double(), weight.dequantize().double(), bias.double())
    room = F.linear(x.double().abs(), weight.dequantize().double().abs()) + 1e-9
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for is_prepared in (False, True):
        if is_prepared:
            weight.prepare()
        output = weight.multiply(x, bias)
        assert (output.dtype, output.shape) == (dtype, exact.shape)
        assert ((output.double() - exact).abs() <= tolerance * (room + bias.abs())).all()


# -- the definition --


def test_the_example_of_the_module() -> None:
    codes = pack_int4(torch.tensor([[11, 7, 8, 15]], dtype=torch.uint8))
    scales = torch.tensor([[0.5, 0.25]])
    weight = QuantizedWeight("int4", codes, scales, torch.tensor([[8, 8]]))
    assert weight.dequantize().tolist() == [[1.5, -0.5, 0.0, 1.75]]
    assert torch.equal(QuantizedWeight("int4", codes, scales).dequantize(), weight.dequantize())


@given(st.lists(st.integers(0, 15), min_size=2, max_size=20).filter(lambda x: len(x) % 2 == 0))
def test_two_codes_in_a_byte(codes: list[int]) -> None:
    packed = pack_int4(torch.tensor([codes], dtype=torch.uint8))
    assert packed[0, 0] == codes[0] + 16 * codes[1]
    assert unpack_int4(packed).tolist() == [codes]


@given(st.sampled_from(KINDS), st.booleans(), st.integers(0, 99))
def test_a_weight_number_by_number(kind: str, has_zeros: bool, seed: int) -> None:
    weight = make_weight(kind, 3, 12, 4, seed, has_zeros)
    codes = (unpack_int4(weight.codes) if kind == "int4" else weight.codes).float().tolist()
    default = [[8 if kind == "int4" else 0] * 4] * 3
    zeros = default if weight.zeros is None else weight.zeros.tolist()
    for row in range(3):
        for column in range(12):
            scale = weight.scales[row, column // 3].item()
            number = (codes[row][column] - zeros[row][column // 3]) * scale
            assert weight.dequantize()[row, column].item() == pytest.approx(number, rel=1e-6)


def test_columns_in_another_order() -> None:
    """Act-order: columns of one group are neighbours, wherever their inputs are."""
    order = torch.tensor([4, 0, 5, 3, 2, 1])
    plain, weight = make_weight("int8", 2, 6, 2), make_weight("int8", 2, 6, 2, order=order)
    for column, its_input in enumerate(order.tolist()):
        assert torch.equal(weight.dequantize()[:, its_input], plain.dequantize()[:, column])
    assert_multiplies_as_defined(weight, 3)


@given(st.sampled_from([torch.int8, FP8]), st.floats(1e-30, 1e30), st.integers(0, 99))
def test_rows_of_8_bits(dtype: torch.dtype, size: float, seed: int) -> None:
    """The error of int8 is half a unit of the row; that of fp8 a sixteenth of the number, and of
    numbers below its smallest exponent half a unit of it."""
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(seed)) * size
    x[1] = 0
    numbers, scale = quantize_rows(x, dtype)
    assert (numbers.dtype, scale.shape) == (dtype, (5, 1))
    error = (numbers.float() * scale - x).abs()
    room = scale / 2 if dtype == torch.int8 else (x.abs() / 16).maximum(scale * 2**-10)
    assert (error <= room * (1 + 1e-5)).all()
    assert not numbers[1].float().any()


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_a_number_that_is_none(dtype: torch.dtype, bad: float) -> None:
    numbers, scale = quantize_rows(torch.tensor([[1.0, bad], [1.0, 2.0]]), dtype)
    assert not (numbers[0].float() * scale[0]).isfinite().all()
    assert (numbers[1].float() * scale[1]).isfinite().all()


@pytest.mark.parametrize(
    ("kind", "scales", "message"),
    [
        ("int2", (4, 1), "kind 'int2' .int4, int8, fp8."),
        ("int8", (4, 3), "4 x 8 codes, and 4 x 3 scales"),
        ("int8", (3, 1), "4 x 8 codes, and 3 x 1 scales"),
    ],
)
def test_scales_that_do_not_fit(kind: str, scales: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizedWeight(kind, torch.zeros(4, 8, dtype=torch.int8), torch.ones(scales))


# -- products --


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    num_outputs=st.sampled_from([1, 3, 63, 64, 65, 200]),
    groups=st.sampled_from([(1, 2), (1, 7), (1, 130), (4, 32), (3, 5), (2, 128)]),
    num_rows=st.integers(0, 9),
    has_zeros=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_products_on_this_machine(
    kind: str,
    num_outputs: int,
    groups: tuple[int, int],
    num_rows: int,
    has_zeros: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    num_groups, size = groups
    size += size % 2 if kind == "int4" else 0
    weight = make_weight(kind, num_outputs, num_groups * size, num_groups, seed, has_zeros)
    assert_multiplies_as_defined(weight, num_rows, dtype, seed)


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_every_code(kind: str) -> None:
    """Of each kind all codes, times 1: the exact numbers, fp8's smallest ones included."""
    codes = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 2)
    if kind == "fp8":
        codes = codes[codes[:, 0] & 0x7F != 0x7F]  # the rest are NaN
    codes = codes.view({"int4": torch.uint8, "int8": torch.int8, "fp8": FP8}[kind])
    weight = QuantizedWeight(kind, codes, torch.ones(len(codes), 1))
    exact = weight.dequantize()
    weight.prepare()
    assert torch.equal(weight.multiply(torch.eye(weight.num_inputs)), exact.t())


@needs_compiler
@pytest.mark.parametrize("num_threads", [1, 2])
def test_as_many_outputs_as_a_head_has(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    assert_multiplies_as_defined(make_weight("int4", 5000, 256, 2), 6)


@needs_compiler
@pytest.mark.parametrize(("kind", "bits"), [("int4", 4), ("int8", 8), ("fp8", 8)])
def test_memory_is_taken_once(kind: str, bits: int) -> None:
    weight = make_weight(kind, 256, 512, 4)
    weight.prepare()
    num_bytes = sum(tensor.nbytes for tensor in weight.buffers())
    assert num_bytes == 256 * 512 * bits // 8 + 256 * 4 * 4


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_compiler_the_weight_is_dequantized(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIBRARY, "multiply", None)
    weight = make_weight(kind, 70, 24, 3)
    assert_multiplies_as_defined(weight, 3)
    assert weight.product is None and weight.codes is not None


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_experts(kind: str, is_prepared: bool) -> None:
    """Three experts of 10 outputs; the second gets no row."""
    weight = make_weight(kind, 30, 16, 2, num_experts=3)
    rows, offsets = torch.randn(7, 16), torch.tensor([4, 4, 7]).int()
    matrices = weight.dequantize().unflatten(0, (3, 10))
    expected = torch.cat([rows[:4] @ matrices[0].t(), rows[4:] @ matrices[2].t()])
    if is_prepared:
        weight.prepare()

    def matmul(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
        parts = [rows[a:b] for a, b in itertools.pairwise([0, *offsets.tolist()])]
        return torch.cat([part @ each.t() for part, each in zip(parts, matrices, strict=True)])

    output = weight.multiply_grouped(rows, offsets, matmul)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_rows_of_one_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever multiplies here; on a GPU that is a product which knows no experts."""
    weight, rows = make_weight("fp8", 32, 48, quantizes_inputs=True), torch.randn(7, 48)
    monkeypatch.setattr(torch, "_scaled_mm", multiply_as_fp8_units_do)
    monkeypatch.setattr("nanoserve.kernels.quantized.choose_product", lambda _: ScaledMatmul)
    weight.prepare()
    output = weight.multiply_grouped(rows, torch.tensor([7]).int(), torch.mm)
    assert torch.equal(output, weight.multiply(rows))


# -- FP8 units --


def multiply_as_fp8_units_do(
    a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """torch._scaled_mm with a scale for each row and each column."""
    assert a.dtype == b.dtype == FP8 and a.is_contiguous() and b.t().is_contiguous()
    assert (scale_a.shape, scale_b.shape) == ((len(a), 1), (1, b.shape[1]))
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert scale_a.is_contiguous() and scale_b.is_contiguous()
    return (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)


@pytest.mark.parametrize("input_scale", [None, 0.5 / 448])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_both_sides_in_fp8(
    num_rows: int, input_scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token has a scale, or all have the checkpoint's; then inputs beyond it are cut off. Here
    it reaches to 0.5."""
    monkeypatch.setattr(torch, "_scaled_mm", multiply_as_fp8_units_do)
    scale = None if input_scale is None else torch.tensor([input_scale])
    weight = make_weight("fp8", 32, 48, input_scale=scale, quantizes_inputs=True)
    matrix, x = weight.dequantize(), torch.randn(num_rows, 48)
    output = ScaledMatmul(weight)(x)
    expected = F.linear(x if scale is None else x.clamp(-0.5, 0.5), matrix)
    room = F.linear(x.abs(), matrix.abs()) / 8  # 3 bits of mantissa
    assert output.dtype == x.dtype
    assert ((output - expected).abs() <= room).all()


# -- the Triton kernel --


@needs_interpreter
@pytest.mark.parametrize(
    ("kind", "num_columns", "num_groups", "num_rows"),
    [
        ("int4", 128, 1, 1),
        ("int4", 192, 6, 3),  # groups of 32
        ("int4", 72, 1, 20),  # the last piece is a part
        ("int8", 256, 2, 2),
        ("int8", 48, 3, 5),  # groups of 16
        ("int8", 36, 1, 1),
    ],
)
@pytest.mark.parametrize("has_zeros", [False, True])
def test_the_triton_kernel_is_as_defined(
    kind: str, num_columns: int, num_groups: int, num_rows: int, has_zeros: bool
) -> None:
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    from nanoserve.kernels.quantized_triton import TritonProduct, can_multiply

    weight = make_weight(kind, 40, num_columns, num_groups, has_zeros=has_zeros)
    assert can_multiply(weight)
    x = torch.randn(num_rows, 2 * num_columns)[:, :num_columns]  # rows of a larger product
    expected = F.linear(x, weight.dequantize())
    torch.testing.assert_close(TritonProduct(weight)(x), expected, rtol=2e-5, atol=2e-5)
    half = TritonProduct(weight)(x.half())
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("kind", "num_columns", "num_groups", "expected"),
    [
        ("int4", 512, 4, True),
        ("int4", 512, 16, True),
        ("int4", 512, 32, False),  # groups of 16: a half of them is too few for a tensor core
        ("int8", 512, 32, True),
        ("int8", 60, 6, False),
        ("int8", 60, 1, True),
    ],
)
def test_groups_that_fit_the_kernels_tiles(
    kind: str, num_columns: int, num_groups: int, expected: bool
) -> None:
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    from nanoserve.kernels.quantized_triton import can_multiply

    assert can_multiply(make_weight(kind, 2, num_columns, num_groups)) is expected
