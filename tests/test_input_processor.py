"""Prompts to Sequences: what a Sequence gets, refusals, chat templates, several threads at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoserve import SamplingParams, inputs
from nanoserve.config import DEMO_MODEL, EngineConfig, ModelConfig
from nanoserve.exceptions import VLLMValidationError
from nanoserve.input_processor import InputProcessor, load_tokenizer
from nanoserve.sequence import SequenceStatus

SUM = [{"role": "user", "content": "What is 17 + 25?"}]
PARAMS = SamplingParams()


@lru_cache(maxsize=1)
def demo_tokenizer() -> Any:
    return load_tokenizer(DEMO_MODEL, explicit=False)


def make_processor(tokenizer: Any, num_kv_blocks: int = 64, **options: Any) -> InputProcessor:
    """An InputProcessor of the demo model, with max_model_len 256."""
    model_config = ModelConfig.from_folder(DEMO_MODEL)
    config = EngineConfig(**{"max_model_len": 256, **options}).resolve(model_config)
    return InputProcessor(config, model_config, tokenizer, num_kv_blocks)


@pytest.fixture
def processor() -> InputProcessor:
    return make_processor(demo_tokenizer())


# -- a request becomes a sequence --


def test_a_request_becomes_a_sequence(processor: InputProcessor) -> None:
    """Its end is decided here: the room that is left, the EOS ids, its own stop tokens."""
    params = SamplingParams(max_tokens=500, stop_token_ids=[7], seed=3)
    seq = processor.process("a", "One day", params, cache_salt="mine")
    assert seq.prompt_token_ids == demo_tokenizer().encode("One day")
    assert seq.max_tokens == 256 - len(seq.prompt_token_ids)
    assert seq.stop_token_ids == processor.model_config.eos_token_ids | {7}
    assert (seq.seed, seq.cache_salt, seq.status) == (3, "mine", SequenceStatus.WAITING)
    ignoring = SamplingParams(ignore_eos=True, stop_token_ids=[7])
    ignored = processor.process("b", [5], ignoring)
    assert ignored.stop_token_ids == {7}
    # Which of the stop tokens is the tokenizer's own, and not reported as a stop_reason.
    assert (seq.eos_token_id, ignored.eos_token_id) == (demo_tokenizer().eos_token_id, None)


def test_sequences_do_not_share_the_callers_list(processor: InputProcessor) -> None:
    prompt = [5, 6]
    seq = processor.process("a", prompt, PARAMS)
    prompt.append(7)
    assert seq.prompt_token_ids == seq.token_ids == [5, 6]
    seq.token_ids.append(8)
    assert seq.prompt_token_ids == [5, 6]


def test_prompts_of_every_kind(processor: InputProcessor) -> None:
    """Text is tokenized; given token ids count, even beside a text. A prompt's own salt goes before
    that of the call. (test_inputs.py has every form.)"""
    ids = demo_tokenizer().encode("One day")
    for prompt, found in (
        ("One day", ("One day", ids, "call's")),
        ({"prompt": "One day", "cache_salt": "own"}, ("One day", ids, "own")),
        (np.array([5, 6]), (None, [5, 6], "call's")),
        ({"prompt_token_ids": [5, 6], "prompt": "x"}, ("x", [5, 6], "call's")),
    ):
        seq = processor.process("a", prompt, PARAMS, cache_salt="call's")
        assert (seq.prompt, seq.prompt_token_ids, seq.cache_salt) == found
    assert processor.process("a", [5], PARAMS, np.int64(3)).priority == 3


def test_a_sequence_has_parameters_of_its_own(processor: InputProcessor) -> None:
    """What the caller assigns later reaches no request; what is wrong is refused at the next."""
    params = SamplingParams(max_tokens=3, stop_token_ids=[7])
    seq = processor.process("a", [5], params)
    params.max_tokens = 9
    params.stop_token_ids.append(8)  # type: ignore[union-attr]
    assert seq.sampling_params == SamplingParams(max_tokens=3, stop_token_ids=[7])
    assert processor.process("b", [5], params).max_tokens == 9
    params.min_tokens = 10
    with pytest.raises(VLLMValidationError, match="min_tokens is 10, more than max_tokens 9"):
        processor.process("c", [5], params)


def test_as_many_branches_fork_as_can_run() -> None:
    """Of the n completions; the others are queued on their own."""
    processor = make_processor(None, max_num_seqs=3)
    for n, num_forks in ((1, 0), (3, 2), (4, 2), (1000, 2)):
        first = processor.process("a", [5], SamplingParams(n=n))
        assert first.num_pending_forks == num_forks
        assert processor.process("b", [5], PARAMS).seq_id == first.seq_id + n


def test_seeds_of_requests_without_one_differ_and_repeat() -> None:
    """They follow from the engine's seed, in order of arrival."""

    def seeds(seed: int) -> list[int]:
        processor = make_processor(None, seed=seed)
        return [processor.process("a", [5], PARAMS).seed for _ in range(5)]

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1)}) == 10
    assert all(0 <= seed < 2**63 for seed in seeds(0))


def test_the_spellings_of_a_bad_word(processor: InputProcessor) -> None:
    """The spelling after a space counts if it has as many tokens as the spelling alone."""
    for word, num_alone, num_after_space in (("a", 1, 1), ("was", 2, 1)):
        alone = tuple(demo_tokenizer().encode(word))
        after_space = tuple(demo_tokenizer().encode(" " + word))
        assert (len(alone), len(after_space)) == (num_alone, num_after_space)
        seq = processor.process("a", [5], SamplingParams(bad_words=[word]))
        both = (alone, after_space)
        assert seq.bad_word_ids == (both if num_alone == num_after_space else (alone,))


# -- refusals --

PROMPTS: list[tuple[Any, type[Exception], str]] = [
    ("", ValueError, r"prompt is empty.*at least one token"),
    ([], ValueError, r"prompt is empty"),
    ("a" * 9 + "\ud800" * 99, ValueError, r"^the prompt holds 'a{9}\\ud800'; allowed: whole ch"),
    ([5, 10**6], ValueError, r"1000000 is out of range; allowed: 0 to 2047"),
    ([5, -1], ValueError, r"-1 is out of range; allowed: 0 to 2047"),
    ([True, False], TypeError, r"token ids must be ints, got True"),
    ([5, 1.5], TypeError, r"token ids must be ints, got 1\.5"),
    ([5, None], TypeError, r"token ids must be ints, got None"),
    ([5, "a"], TypeError, r"token ids must be ints, got 'a'"),
    (None, TypeError, r"a prompt must be a string, a list of token ids, or a dict .* got None"),
    ({"prompt_token_ids": []}, ValueError, r"prompt is empty"),
    ({"prompt": "a", "cache_salt": ""}, TypeError, r"cache_salt must be None or a non-empty"),
    ([10**5000], ValueError, r"token id <int> is out of range"),
    ("x" * 10**7, ValueError, r"^the prompt has 10000000 characters.*no more than 256 tokens fit"),
    ([5] * 256, ValueError, r"256 tokens.*max_model_len=256\. Shorten it, or raise max_model_len"),
]
REQUESTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"request_id": ""}, TypeError, r"request_id must be a non-empty string, got ''"),
    ({"request_id": 5}, TypeError, r"request_id must be a non-empty string, got 5"),
    ({"sampling_params": None}, TypeError, r"sampling_params must be SamplingParams, got None"),
    ({"sampling_params": {"n": 2}}, TypeError, r"sampling_params must be Sampl.* got \{'n': 2\}"),
    ({"priority": 1.0}, TypeError, r"priority must be an int, got 1\.0"),
    ({"priority": False}, TypeError, r"priority must be an int, got False"),
    ({"priority": 2**63}, ValueError, r"priority is 9223372036854775808; allowed: -2\*\*63"),
    ({"priority": -(10**5000)}, ValueError, r"priority is <int>; allowed"),
    ({"request_id": "x" * 1025}, ValueError, r"request_id has 1025 characters; .* up to 1024"),
    ({"cache_salt": "x" * 1025}, ValueError, r"cache_salt has 1025 characters; .* up to 1024"),
    ({"cache_salt": 5}, TypeError, r"cache_salt must be None or a non-empty string, got 5"),
    ({"cache_salt": ""}, TypeError, r"cache_salt must be None or a non-empty string, got ''"),
]
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {9999: 1.0}}, r"logit_bias: token id 9999 is out of range; .* 0 to 2047"),
    ({"allowed_token_ids": [5, 2048]}, r"allowed_token_ids: token id 2048 is out of range"),
    ({"stop_token_ids": [2048]}, r"stop_token_ids: token id 2048 is out of range"),
    ({"logprobs": 21}, r"logprobs is 21; this engine allows 20.*larger max_logprobs"),
    ({"logprobs": -1}, r"logprobs is -1; this engine allows 20"),
    ({"prompt_logprobs": 21}, r"prompt_logprobs is 21; this engine allows 20"),
    ({"logprobs": 10**5000}, r"logprobs is <int>; this engine allows 20"),
    ({"bad_words": [" "]}, r"bad_words holds ' ', which has no tokens"),
    ({"bad_words": ["x" * 2**15]}, r"^a bad word has 32768 characters.* Shorten it\.$"),
]


def test_bad_requests_are_refused(processor: InputProcessor) -> None:
    """The message says what was given, what is allowed, and what to do."""
    good: dict[str, Any] = {"request_id": "a", "prompt": [5], "sampling_params": PARAMS}
    cases = [({"prompt": prompt}, *rest) for prompt, *rest in PROMPTS] + list(REQUESTS)
    cases += [({"sampling_params": SamplingParams(**f)}, ValueError, m) for f, m in FIELDS]
    for bad, error, message in cases:
        with pytest.raises(error, match=message) as raised:
            processor.process(**{**good, **bad})
        assert isinstance(raised.value, VLLMValidationError) == (error is ValueError)
    assert processor.process(**good).seq_id == 0, "a refused request takes no seq_id"


class Broken:
    """A tokenizer that gives these token ids, or raises this."""

    def __init__(self, answer: list[int] | BaseException) -> None:
        self.answer = answer

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class Panic(BaseException):
    """As the tokenizers library raises it: pyo3's PanicException is no Exception either."""


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ([5, 2048], VLLMValidationError, "token id 2048 is out of range; allowed: 0 to 2047"),
        ([-1], VLLMValidationError, "token id -1 is out of range"),
        (Panic("regex"), VLLMValidationError, "tokenizer cannot encode '.*word'.*Panic: regex"),
        (TypeError("no text"), VLLMValidationError, "tokenizer cannot encode '.*word'.*no text"),
        (KeyboardInterrupt(), VLLMValidationError, "tokenizer cannot encode '.*word'.*Keyboard"),
    ],
)
def test_whatever_a_tokenizer_does_is_no_step_that_fails(
    answer: list[int] | BaseException, error: type[BaseException], message: str
) -> None:
    """It ends the call that brought the text: a prompt, a word of bad_words."""
    processor = make_processor(Broken(answer))
    for call in (
        lambda: processor.process("a", "word", PARAMS),
        lambda: processor.process("a", [5], SamplingParams(bad_words=["word"])),
    ):
        with pytest.raises(error, match=message):
            call()


def test_prompt_and_output_fit_the_kv_cache() -> None:
    """2 blocks hold 32 tokens: a prompt of 31 leaves room for one."""
    processor = make_processor(None, num_kv_blocks=2)
    assert processor.process("a", [5] * 31, PARAMS).max_tokens == 1
    with pytest.raises(ValueError, match=r"32 tokens.*cache holds \(32 tokens\).*num_gpu_blocks"):
        processor.process("a", [5] * 32, PARAMS)


def test_no_limit_on_logprobs_if_the_engine_has_none() -> None:
    processor = make_processor(None, max_logprobs=-1)
    for number in (-1, 2048):
        params = SamplingParams(logprobs=number, prompt_logprobs=number)
        assert processor.process("a", [5], params).sampling_params == params
    with pytest.raises(ValueError, match="logprobs is 2049; this engine allows 2048"):
        processor.process("a", [5], SamplingParams(logprobs=2049))


def test_text_needs_a_tokenizer() -> None:
    processor = make_processor(None)
    calls: list[Callable[[], Any]] = [
        lambda: processor.process("a", "text", PARAMS),
        lambda: processor.process("a", [5], SamplingParams(stop="x")),
        lambda: processor.process("a", [5], SamplingParams(bad_words=["x"])),
        lambda: processor.render_chat(SUM, {}),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"needs a tokenizer, and .* has none.*token ids"):
            call()


def test_memory_that_ends_while_a_tokenizer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(folder: Path) -> None:
        raise MemoryError

    monkeypatch.setattr("nanoserve.guard.check_files", read)
    with pytest.raises(ValueError, match=r"no tokenizer can be read .*\(MemoryError\)"):
        load_tokenizer(DEMO_MODEL, explicit=True)


def test_load_tokenizer(tmp_path: Path) -> None:
    """A folder without tokenizer files is an error only if the user named it."""
    assert load_tokenizer(tmp_path, explicit=False) is None
    with pytest.raises(ValueError, match="no tokenizer can be read from"):
        load_tokenizer(tmp_path, explicit=True)


# -- chat --


def test_a_conversation_is_rendered_by_the_template(processor: InputProcessor) -> None:
    begun = [*SUM, {"role": "assistant", "content": "17 + 25"}]
    tokenizer = demo_tokenizer()
    for messages, options in (
        (SUM, {"add_generation_prompt": True}),
        (SUM, {"add_generation_prompt": False}),
        (begun, {"add_generation_prompt": False, "continue_final_message": True}),
    ):
        text = processor.render_chat(messages, options)
        assert text == tokenizer.apply_chat_template(messages, tokenize=False, **options)
        token_ids = processor.tokenize(text, add_special_tokens=False)
        assert token_ids == tokenizer.encode(text, add_special_tokens=False)
    assert text.endswith("17 + 25")


def test_parts_of_a_content_reach_the_template(processor: InputProcessor) -> None:
    """As one string, or as parts if the template loops over them; a template may be given."""
    parts = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}]
    joined = [{"role": "user", "content": "a\nb"}]
    assert processor.render_chat(parts, {}) == processor.render_chat(joined, {})
    loop = "{% for part in messages[0].content %}<{{ part.text }}>{% endfor %}"
    assert processor.render_chat(parts, {"chat_template": loop}) == "<a><b>"
    assert processor.render_chat(joined, {"chat_template": loop}) == "<a\nb>"
    content = {"chat_template": "{{ messages[0].content }}"}
    assert processor.render_chat(parts, content, "openai").startswith("[{'type': 'text'")


def test_a_conversation_has_a_size(
    processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its form. Below it, a template may drop what is long: only its text must fit."""
    long = "x" * 10**6
    last = {"chat_template": "{{ messages[-1].content }}"}
    contents: list[Any] = [long, [long], [{"type": "text", "text": long}]]
    for content in contents:
        messages = [{"role": "user", "content": content}, *SUM]
        assert processor.render_chat(messages, last) == SUM[0]["content"]
        with monkeypatch.context() as patch:
            patch.setattr(inputs, "MAX_CHAT_CHARACTERS", 10**6)
            with pytest.raises(VLLMValidationError, match=r"^the messages have 10000\d\d char"):
                processor.render_chat(messages, last)


def test_bad_conversations_are_refused(processor: InputProcessor) -> None:
    for messages in ([], ["hello"], [*SUM, "hello"], "hello"):
        with pytest.raises(TypeError, match="a conversation is a list of message dicts, got"):
            processor.render_chat(messages, {})
    with pytest.raises(ValueError, match=r"chat template refuses \[\{'content': 'Hi'\}\].*role"):
        processor.render_chat([{"content": "Hi"}], {})
    both = {"add_generation_prompt": True, "continue_final_message": True}
    with pytest.raises(ValueError, match="chat template refuses"):
        processor.render_chat(SUM, both)


# -- several threads --


class SlowInt(int):
    """A number that lets other threads run in the middle of an addition."""

    def __add__(self, other: int) -> SlowInt:
        time.sleep(1e-5)
        return SlowInt(int(self) + other)


def test_several_threads_at_once(processor: InputProcessor) -> None:
    """Each request gets its own seq_ids and seed, and the tokens of its own text."""
    processor._next_seq_id = SlowInt(0)
    num_threads, num_requests = 4, 50
    params = SamplingParams(n=3, temperature=1.0)
    begin = threading.Barrier(num_threads)
    found: list[tuple[int, int]] = []  # first seq_id, number of seq_ids
    seeds: list[int] = []
    wrong: list[object] = []

    def work(thread: int) -> None:
        begin.wait()
        for number in range(num_requests):
            text = f"Thread {thread} tells story {number}. " * (1 + number % 5)
            messages = [{"role": "user", "content": text}]
            seq = processor.process(text, text, params if number % 2 else replace(params, n=1))
            found.append((seq.seq_id, seq.sampling_params.n))
            seeds.append(seq.seed)
            if demo_tokenizer().decode(seq.prompt_token_ids) != text:
                wrong.append(text)
            if text.strip() not in processor.render_chat(messages, {}):
                wrong.append(messages)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    seq_ids = [int(first) + i for first, number in found for i in range(number)]
    assert sorted(seq_ids) == list(range(num_threads * num_requests * 2)), "none twice, none lost"
    assert len(set(seeds)) == num_threads * num_requests
