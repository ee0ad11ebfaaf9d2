"""What the pictures of the tiers show is where the blocks are."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from nanoserve import SamplingParams
from nanoserve.extras import lesson, trace

matplotlib = pytest.importorskip("matplotlib")
tiers = pytest.importorskip("nanoserve.extras.trace.tiers")
policies = pytest.importorskip("nanoserve.extras.kv_offload.policies")

ROW = 20_480  # bytes: 8 tokens of the demo model
PROMPTS = {name: [start + i for i in range(26)] for name, start in (("A", 5), ("B", 50), ("C", 90))}


def shown() -> Counter[str]:
    """The texts of the last picture."""
    import matplotlib.pyplot as plt
    from matplotlib.text import Text

    return Counter(text.get_text() for text in plt.gcf().findobj(Text))


def ask(llm: lesson.LLM, names: str) -> None:
    one = SamplingParams(temperature=0, max_tokens=1)
    for name in names:
        llm.generate(PROMPTS[name], one, use_tqdm=False)


def test_blocks_go_down_and_come_back(tmp_path: Path) -> None:
    """Two engines, one after the other, above one folder."""
    matplotlib.use("agg")
    tier = {"type": "fs", "root_dir": str(tmp_path)}
    extra = {"cpu_bytes_to_use": 9 * ROW, "secondary_tiers": [tier]}
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    config |= {"kv_connector_extra_config": extra}  # type: ignore[dict-item]
    with lesson.small_llm(6, block_size=8, kv_transfer_config=config) as llm:
        with trace.watch_tiers(llm, PROMPTS) as steps:
            ask(llm, "ABA")
        assert [step.names for step in steps] == [(), ("A",), ("B",), ("A",)]
        assert steps[1].files == (("A", 0), ("A", 1), ("A", 2))
        assert set(steps[1].rows.values()) == set(steps[1].files)
        for before, step in pairwise(steps):
            assert all(step.kv_blocks[block] == before.rows[row] for row, block in step.loads)
            assert all(step.rows[row] == step.kv_blocks[block] for block, row in step.saves)
        assert steps[-1].loads
    with lesson.small_llm(6, block_size=8, kv_transfer_config=config) as llm:
        with trace.watch_tiers(llm, PROMPTS) as steps:
            ask(llm, "A")
        assert len(steps[0].files) == 6
        assert len(steps[1].loads) == 3
        trace.tier_map("title", steps)
        assert shown()["B2"] == 2 and shown()["A0"] == 4


def test_without_tiers_there_is_nothing_to_watch() -> None:
    with (
        lesson.small_llm() as llm,
        pytest.raises(ValueError, match="no CPU tier"),
        trace.watch_tiers(llm, {}),
    ):
        pass


def test_the_trace_of_the_policies_is_that_of_their_docstring() -> None:
    rows = re.findall(r"(?m)^    ([a-e])        (.*)$", policies.__doc__)
    found = tiers.run_policies("".join(key for key, _ in rows), 3)
    assert len(found) == 8
    for (_, line), each in zip(rows, found, strict=True):
        lru, t1, t2, b1, *_ = re.split("  +", line)
        assert lru.replace("*", "").split() == list(each.lru)
        for text, name in ((t1, "t1"), (t2, "t2"), (b1, "b1")):
            assert text.strip("* -").split() == list(each.arc[name]), (line, name)
    matplotlib.use("agg")
    trace.evictions("title", "ababcdea", rows=3)
    assert shown()["a"] > 8
