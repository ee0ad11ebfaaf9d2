"""Bits against numbers: the compiled loop, the table, and what the bits say one by one."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.extras.structured_output.bitmask import BitmaskKernel, TokenBitmask

LOOP = BitmaskKernel(torch.device("cpu"))
TABLE = copy(LOOP)
TABLE.loop = None
# How the same logits may lie: as a rule, as columns, as a part of longer rows, as every other row.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": torch.clone,
    "columns": lambda logits: logits.t().contiguous().t(),
    "longer rows": lambda logits: torch.nn.functional.pad(logits, (1, 2))[:, 1:-2],
    "every other row": lambda logits: logits.repeat_interleave(2, 0)[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@given(st.data(), st.integers(1, 5), st.integers(1, 70))
def test_bits_forbid_tokens(
    layout: str, data: st.DataObject, num_rows: int, vocab_size: int
) -> None:
    """Also of one row only or of none, in any order, and where a logit is infinite or NaN. Other
    rows, and the logits that were given, stay as they are."""
    logits_rows = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True))
    word = st.integers(-(2**31), 2**31 - 1)
    num_words = -(-vocab_size // 32)
    words = data.draw(
        st.lists(
            st.lists(word, min_size=num_words, max_size=num_words),
            min_size=len(logits_rows),
            max_size=len(logits_rows),
        )
    )
    numbers = st.floats(width=32) | st.integers(-3, 3).map(float)
    size = num_rows * vocab_size
    values = data.draw(st.lists(numbers, min_size=size, max_size=size))
    logits = LAYOUTS[layout](torch.tensor(values).view(num_rows, vocab_size))
    expected = logits.clone()
    for row, bits in zip(logits_rows, words, strict=True):
        for token in range(vocab_size):
            if not bits[token // 32] >> token % 32 & 1:
                expected[row, token] += -torch.inf
    before = logits.clone()
    rows = torch.tensor(logits_rows, dtype=torch.int64)
    bitmask = torch.tensor(words, dtype=torch.int32).view(-1, num_words)
    for each in (LOOP, TABLE):
        found = TokenBitmask(rows, bitmask, each).apply(logits)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kernel", [LOOP, TABLE], ids=["loop", "table"])
@pytest.mark.parametrize(
    ("logits", "bits"),
    [
        (torch.zeros(3, 65), torch.zeros(1, 2, dtype=torch.int32)),
        (torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.int32)),
        (torch.zeros(3, 64), torch.zeros(2, 2, dtype=torch.int32).t()),
    ],
    ids=["more tokens than bits", "bfloat16", "bits as columns"],
)
def test_what_the_loop_must_not_read(
    kernel: BitmaskKernel, logits: torch.Tensor, bits: torch.Tensor
) -> None:
    """It gets addresses, so it would read numbers of others."""
    with pytest.raises(AssertionError, match="other logits than the bits"):
        kernel.apply(logits, torch.arange(len(bits)), bits)
