"""How does a GPU multiply by a weight of 4 or 8 bits without writing it out?

One Triton kernel: a program takes a tile of outputs and a tile of tokens, loads the codes of its
outputs piece by piece, decodes them in registers and multiplies. Memory is read once, and it is the
codes that are read: a quarter of the bytes of a bfloat16 weight with int4, half of them with int8.

    for each piece of BLOCK_K inputs (within one group):
        weight = codes - zeros                        exact in bfloat16 and float16
        acc   += (x times weight) * scales            the group's scales, one for each output

In int4 a byte holds the codes of inputs 2i and 2i + 1. They are not brought side by side again: the
even inputs of x are multiplied by the lower halves, the odd ones by the upper halves.

`QuantizedWeight.dequantize` and F.linear are the definition, which tests hold the kernel to.

Left out: fp8 (which has units of its own, see quantized.py), tiles chosen by trial, products of
few outputs cut along their inputs.

vLLM: vllm/model_executor/layers/quantization/awq_triton.py (V0 and V1);
vllm/model_executor/kernels/linear/mixed_precision/triton_w4a16.py (V1).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from nanoserve.kernels import attention_triton
from nanoserve.kernels.fused_triton import launch

if TYPE_CHECKING:
    from nanoserve.kernels.quantized import Product, QuantizedWeight

MAX_BLOCK_K = 128  # inputs of a piece: the largest block of all
MIN_BLOCK_K = {"int4": 32, "int8": 16}  # tl.dot takes 16 at least, and int4 has two halves
MIN_BLOCK_M = 16  # tokens, of tl.dot
MAX_BLOCK_M = 64
T4_BLOCK = 32  # the most of tokens, outputs and inputs: without tensor cores, registers are scarce


@triton.jit(do_not_specialize=["num_tokens"])
def quantized_matmul_kernel(
    x,  # [num_tokens, NUM_INPUTS]
    codes,  # [num_outputs, NUM_INPUTS], IS_INT4: [num_outputs, NUM_INPUTS / 2]
    scales,  # [num_outputs, groups] float32
    zeros,  # [num_outputs, groups] float32
    output,  # [num_tokens, num_outputs]
    num_tokens,
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    IS_INT4: tl.constexpr,
    BLOCK_M: tl.constexpr,  # tokens
    BLOCK_N: tl.constexpr,  # outputs
    BLOCK_K: tl.constexpr,  # columns, all of one group
):
    """F.linear for a tile of tokens and outputs. Grid: (tiles of outputs, tiles of tokens)."""
    NUM_GROUPS: tl.constexpr = NUM_INPUTS // GROUP_SIZE
    STEP: tl.constexpr = 2 if IS_INT4 else 1  # columns in a byte
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_output, is_token = n < num_outputs, m < num_tokens
    row = n.to(tl.int64)
    x_row = x + m.to(tl.int64)[:, None] * NUM_INPUTS
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, NUM_INPUTS, BLOCK_K):
        group = start // GROUP_SIZE
        scale = tl.load(scales + row * NUM_GROUPS + group, mask=is_output, other=0.0)
        zero = tl.load(zeros + row * NUM_GROUPS + group, mask=is_output, other=0.0)
        byte = start // STEP + tl.arange(0, BLOCK_K // STEP)
        exists = byte < NUM_INPUTS // STEP
        code = tl.load(
            codes + row[None, :] * (NUM_INPUTS // STEP) + byte[:, None],
            mask=exists[:, None] & is_output[None, :],
            other=0,
        )
        mask = is_token[:, None] & exists[None, :]
        first = tl.load(x_row + STEP * byte[None, :], mask=mask, other=0.0)
        if IS_INT4:
            lower = ((code & 15).to(tl.float32) - zero[None, :]).to(first.dtype)
            part = tl.dot(first, lower, input_precision="ieee")
            second = tl.load(x_row + 2 * byte[None, :] + 1, mask=mask, other=0.0)
            upper = ((code >> 4).to(tl.float32) - zero[None, :]).to(first.dtype)
            part = tl.dot(second, upper, part, input_precision="ieee")
        else:
            weight = (code.to(tl.float32) - zero[None, :]).to(first.dtype)
            part = tl.dot(first, weight, input_precision="ieee")
        acc += part * scale[None, :]
    tl.store(
        output + m.to(tl.int64)[:, None] * num_outputs + n[None, :],
        acc.to(output.dtype.element_ty),
        mask=is_token[:, None] & is_output[None, :],
    )


def choose_block_k(weight: QuantizedWeight) -> int | None:
    """The largest power of 2 that divides a group. One group for all columns may end anywhere: what
    is behind it is masked. None: the groups are too small for a tile."""
    if weight.num_groups == 1:
        return MAX_BLOCK_K
    block_k = min(MAX_BLOCK_K, weight.group_size & -weight.group_size)
    return block_k if block_k >= MIN_BLOCK_K[weight.kind] else None


def pack(weight: QuantizedWeight) -> Product:
    """Give the weight its zeros, one for each scale. It must have a choose_block_k."""
    zeros = weight.zeros
    if zeros is None:
        zeros = weight.scales.new_full((), 8 if weight.kind == "int4" else 0)
    weight.zeros = zeros.float().expand_as(weight.scales).contiguous()
    is_old = attention_triton.get_gpu_info(weight.codes.device).capability < 80
    return partial(multiply, most=T4_BLOCK if is_old else MAX_BLOCK_K)


def multiply(weight: QuantizedWeight, x: Tensor, expert: int, most: int) -> Tensor:
    """[num_tokens, in] -> [num_tokens, out], in blocks of `most` numbers at most."""
    output = x.new_empty(len(x), weight.num_outputs)
    block_m = max(MIN_BLOCK_M, min(MAX_BLOCK_M, triton.next_power_of_2(len(x))))
    # Few tokens: many programs, to read faster.
    block_n, num_warps = (32, 4) if block_m == MIN_BLOCK_M else (64, 8)
    sizes = (block_m, block_n, choose_block_k(weight))
    block_m, block_n, block_k = (min(size, most) for size in sizes)
    launch(
        quantized_matmul_kernel,
        (triton.cdiv(weight.num_outputs, block_n), triton.cdiv(len(x), block_m)),
        *(x.contiguous(), weight.codes, weight.scales, weight.zeros, output, *output.shape),
        NUM_INPUTS=weight.num_inputs,
        GROUP_SIZE=weight.group_size,
        IS_INT4=weight.kind == "int4",
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=num_warps,
        num_stages=3,
    )
    return output
