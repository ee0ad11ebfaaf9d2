"""A prompt and its parameters become a checked Sequence.

What the InputProcessor refuses, and with which message, is in test_llm.py and test_requests.py.
"""

from __future__ import annotations

import pytest

from nanoserve import SamplingParams
from nanoserve.config import DEMO_MODEL, EngineConfig, ModelConfig
from nanoserve.input_processor import InputProcessor, load_tokenizer
from nanoserve.sequence import SequenceStatus

MODEL_CONFIG = ModelConfig.from_folder(DEMO_MODEL)


@pytest.fixture(scope="module")
def processor() -> InputProcessor:
    config = EngineConfig(max_model_len=256).resolve(MODEL_CONFIG)
    return InputProcessor(config, MODEL_CONFIG, load_tokenizer(DEMO_MODEL, explicit=False), 64)


def test_a_request_becomes_a_sequence(processor: InputProcessor) -> None:
    """With everything that ends the output: the tokens that fit, the EOS ids, the stop tokens."""
    params = SamplingParams(max_tokens=500, stop_token_ids=[7], seed=3)
    seq = processor.process("a", "One day", params, cache_salt="mine")
    assert seq.prompt_token_ids == processor.tokenizer.encode("One day")
    assert seq.max_tokens == 256 - len(seq.prompt_token_ids)
    assert seq.stop_token_ids == MODEL_CONFIG.eos_token_ids | {7}
    assert (seq.seed, seq.cache_salt, seq.status) == (3, "mine", SequenceStatus.WAITING)
    ignoring = SamplingParams(ignore_eos=True, stop_token_ids=[7])
    assert processor.process("b", [5], ignoring).stop_token_ids == {7}


def test_a_sequence_copies_the_callers_list(processor: InputProcessor) -> None:
    prompt = [5, 6]
    seq = processor.process("a", prompt, SamplingParams())
    prompt.append(7)
    assert seq.prompt_token_ids == seq.token_ids == [5, 6]
    seq.token_ids.append(8)
    assert seq.prompt_token_ids == [5, 6]


def test_seeds_of_requests_without_one_differ_and_repeat() -> None:
    """The engine draws them from its own seed, in the order of arrival."""

    def seeds(seed: int) -> list[int]:
        config = EngineConfig(seed=seed).resolve(MODEL_CONFIG)
        processor = InputProcessor(config, MODEL_CONFIG, None, 64)
        return [processor.process("a", [5], SamplingParams()).seed for _ in range(5)]

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1)}) == 10
    assert all(0 <= seed < 2**63 for seed in seeds(0))
