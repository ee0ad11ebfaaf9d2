"""How much of the KV cache holds tokens: the counts behind the picture, and the picture."""

from __future__ import annotations

import pytest

from nanoserve import SamplingParams
from nanoserve.extras import lesson, trace

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")


def run(max_tokens: int, num_blocks: int = 24) -> trace.Recorder:
    """Two requests of 18 prompt tokens and `max_tokens` output tokens, side by side."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with lesson.small_llm(num_blocks, enable_prefix_caching=False) as llm:
        recorder = trace.Recorder(llm)
        prompts = [lesson.prompt(llm, name) for name in "AB"]
        llm.generate(prompts, params, use_tqdm=False)
    return recorder


def test_every_slot_of_every_step_is_counted_once() -> None:
    """18 tokens in 5 blocks of 4: 2 slots of each request are reserved in the first step, 1 in the
    second."""
    use = trace.memory_use(run(max_tokens=2))
    assert use == (18 * 2 + 19 * 2, 2 * 2 + 1 * 2, 0, 2 * (24 - 10) * 4)
    assert use.waste == pytest.approx(6 / 80)


def test_free_slots_are_fragments_while_somebody_waits() -> None:
    """6 blocks hold one request only; 4 slots of the sixth block are of no use to the other."""
    use = trace.memory_use(run(max_tokens=1, num_blocks=6))
    assert use == (18 * 2, 2 * 2, 4, 4)


def test_the_picture() -> None:
    import matplotlib.pyplot as plt

    try:
        trace.memory_history("Two runs", {"short": run(2), "long": run(6)})
        short, long = plt.gcf().axes
        assert short.get_title(loc="left") == "short: 2 requests at once, 2 steps, 8% wasted"
        assert short.get_xlim() == long.get_xlim() == (0.5, 6.5)
    finally:
        plt.close("all")
