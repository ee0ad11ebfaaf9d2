"""The engine end to end, as a user drives it."""

from __future__ import annotations

from nanoserve import LLM, SamplingParams


def test_chat_answers_a_sum(demo_llm: LLM) -> None:
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    [output] = demo_llm.chat(question, SamplingParams(temperature=0), use_tqdm=False)
    assert output.outputs[0].text == "17 + 25 = 42"
    assert output.outputs[0].finish_reason == "stop"
