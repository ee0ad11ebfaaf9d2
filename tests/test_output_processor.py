"""New tokens become text: incremental detokenization, stop strings, outputs, errors."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from fakes import make_sequence
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanoserve import SamplingParams
from nanoserve.config import DEMO_MODEL
from nanoserve.input_processor import load_tokenizer
from nanoserve.output_processor import (
    CompletionOutput,
    Detokenizer,
    Logprob,
    OutputProcessor,
    RequestOutput,
    find_stop_string,
)
from nanoserve.sampling_params import RequestOutputKind
from nanoserve.sequence import (
    PromptLogprobs,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
    TokenLogprobs,
)

# Characters of one to four bytes, joined emoji, combining marks, and any other character.
TEXTS = st.text(
    st.one_of(
        st.sampled_from(
            "ab é ñ 你好世界 한국 ไทย 😀🎉 👩\u200d👩\u200d👧 e\u0301 a\u0308\u0323 \n\t"
        ),
        st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"),
    ),
    max_size=30,
)


@lru_cache(maxsize=1)
def demo_tokenizer() -> Any:
    return load_tokenizer(DEMO_MODEL, explicit=False)


def pieces_of(
    tokenizer: Any, prompt: list[int], output: list[int], skip_special_tokens: bool = True
) -> list[str]:
    """The text that a Detokenizer returns for each output token, and at the end."""
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens)
    return [*(detokenizer.append(token_id) for token_id in output), detokenizer.flush()]


def test_a_character_of_several_tokens_comes_whole() -> None:
    """The demo tokenizer writes 字 as three tokens, one for each byte."""
    tokenizer = demo_tokenizer()
    assert len(tokenizer.encode("字")) == 3
    assert pieces_of(tokenizer, tokenizer.encode("a"), tokenizer.encode("字b")) == [
        "",
        "",
        "字",
        "b",
        "",
    ]


def test_an_unfinished_character_is_flushed_as_a_replacement() -> None:
    """max_tokens may end a text anywhere."""
    tokenizer = demo_tokenizer()
    output = tokenizer.encode("a字")[:-1]
    assert pieces_of(tokenizer, tokenizer.encode("x"), output) == ["a", "", "", "\ufffd"]


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, cut=st.integers(0, 100))
@example(text="你好", cut=2)  # the prompt ends within a character
@example(text="你", cut=0)  # no context at all
@example(text="a\u0301", cut=1)  # a mark on a letter of the prompt
def test_pieces_of_any_text_join_to_the_text(text: str, cut: int) -> None:
    """The prompt may end anywhere, even within a character. No half character is shown."""
    tokenizer = demo_tokenizer()
    token_ids = tokenizer.encode(text)
    prompt, output = token_ids[:cut], token_ids[cut:]
    pieces = pieces_of(tokenizer, prompt, output)
    assert "".join(pieces) == tokenizer.decode(output, skip_special_tokens=True)
    if not tokenizer.decode(prompt).endswith("\ufffd"):
        assert "\ufffd" not in "".join(pieces)
        assert pieces[-1] == ""  # nothing was left to flush


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_of_any_tokens_join_to_their_text(data: st.DataObject, skip: bool) -> None:
    """Models also write broken bytes, and special tokens in mid-sentence."""
    tokenizer = demo_tokenizer()
    any_token = st.one_of(
        st.integers(0, len(tokenizer) - 1),
        st.integers(0, 260),  # special tokens and single bytes
        st.sampled_from(tokenizer.encode("你😀é")),
    )
    prompt = data.draw(st.lists(any_token, max_size=12))
    output = data.draw(st.lists(any_token, max_size=20))
    pieces = pieces_of(tokenizer, prompt, output, skip)
    assert "".join(pieces) == tokenizer.decode(output, skip_special_tokens=skip)


# -- tokenizers that write spaces as part of words, as SentencePiece does --


def as_transformers(backend: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend)


@lru_cache(maxsize=1)
def llama_like_tokenizer() -> Any:
    """BPE with "▁" for a space and bytes for unknown characters, as Llama 2's: the first space of
    a text is dropped, so the text of a token depends on whether the token is the first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh", "▁a", "▁b"]
    merges = [("▁", "a"), ("▁", "b")]
    vocab = {word: i for i, word in enumerate(words)}
    bpe = models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    backend = Tokenizer(bpe)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return as_transformers(backend)


@lru_cache(maxsize=1)
def metaspace_tokenizer() -> Any:
    """Unigram with Metaspace, as T5's and many others'."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<unk>", "▁", *"abcdefgh", "▁a", "▁b", "ab", "▁cd"]
    backend = Tokenizer(models.Unigram([(word, -float(len(word) < 2)) for word in words], 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return as_transformers(backend)


@pytest.mark.parametrize("make_tokenizer", [llama_like_tokenizer, metaspace_tokenizer])
@settings(max_examples=100, deadline=None)
@given(text=st.text("abcdefgh  ", min_size=1, max_size=30), cut=st.integers(1, 29))
def test_prompt_and_pieces_join_to_the_text(make_tokenizer: Any, text: str, cut: int) -> None:
    """The prompt may end anywhere. The output begins with a space exactly if the text has one."""
    tokenizer = make_tokenizer()
    token_ids = tokenizer.encode(text)
    prompt, output = token_ids[:cut], token_ids[cut:]
    joined = tokenizer.decode(prompt) + "".join(pieces_of(tokenizer, prompt, output))
    assert joined == tokenizer.decode(token_ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab 你😀é", min_size=1, max_size=12), cut=st.integers(1, 30))
@example(text="你aaé你😀😀 ", cut=19)  # the last tokens of the prompt begin within a character
def test_bytes_of_a_llama_like_tokenizer_become_characters(text: str, cut: int) -> None:
    tokenizer = llama_like_tokenizer()
    token_ids = tokenizer.encode(text)
    prompt, output = token_ids[:cut], token_ids[cut:]
    if tokenizer.decode(prompt).endswith("\ufffd"):
        return  # the text of half a character is not defined
    pieces = pieces_of(tokenizer, prompt, output)
    assert tokenizer.decode(prompt) + "".join(pieces) == tokenizer.decode(token_ids)
    assert "\ufffd" not in "".join(pieces)


# -- stop strings --

AB = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def find_by_brute_force(text: str, stops: list[str], num_new: int) -> tuple[int, str] | None:
    """Show the new characters one by one, and look for each stop string in the order of the
    list."""
    for end in range(len(text) - num_new + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end - len(stop), stop
    return None


def test_where_a_stop_string_starts() -> None:
    assert find_stop_string("a END b", ["END"], 4) == (2, "END")
    assert find_stop_string("a END b", ["END"], 2) is None  # END is not new
    assert find_stop_string("a END b", ["b", "END"], 7) == (2, "END")  # the first one in the text
    assert find_stop_string("a END b", [], 7) is None
    assert find_stop_string("a END b", ["a END b", "END"], 7) == (2, "END")  # complete first
    assert find_stop_string("a END b", ["D", "END", "ND"], 7) == (4, "D")  # the list's first


@settings(max_examples=300, deadline=None)
@given(text=AB, stops=STOPS, num_new=st.integers(0, 12))
def test_stop_strings_as_by_brute_force(text: str, stops: list[str], num_new: int) -> None:
    num_new = min(num_new, len(text))
    assert find_stop_string(text, stops, num_new) == find_by_brute_force(text, stops, num_new)


# -- outputs --


def no_scheduler(seq_id: int, status: SequenceStatus, stop_reason: int | str | None) -> None:
    """Takes the place of Scheduler.finish: the scheduler has no such sequence any more."""


def make_branch(request_id: str, branch: int, params: SamplingParams) -> Sequence:
    """The seq_id is the branch, also of requests side by side: these tests need no scheduler."""
    seq = make_sequence(branch, [5], sampling_params=params, branch=branch)
    seq.request_id = request_id
    return seq


def add(processor: OutputProcessor, request_id: str, **fields: Any) -> list[Sequence]:
    """The n sequences of one request; only the first is known to the processor."""
    params = SamplingParams(max_tokens=99, **fields)
    sequences = [make_branch(request_id, branch, params) for branch in range(params.n)]
    sequences[0].num_pending_forks = params.n - 1
    processor.add(processor.make_state(sequences[0]))
    sequences[0].num_pending_forks = 0  # the first step forks them off
    return sequences


@settings(max_examples=150, deadline=None)
@given(
    text=st.text("ab你 ", min_size=1, max_size=12),
    stops=st.lists(st.text("ab你 ", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    num_missing=st.integers(0, 2),
)
@example(text="aab", stops=["ab"], include=False, num_missing=0)
@example(text="ab", stops=["abb", "b"], include=False, num_missing=0)
@example(text="abbb", stops=["abb", "bb"], include=True, num_missing=0)
@example(text="a你", stops=[], include=False, num_missing=1)  # ends within a character
def test_shown_text_is_never_taken_back(
    text: str, stops: list[str], include: bool, num_missing: int
) -> None:
    """At each step the text so far is a prefix of the final text. The final text is the whole text,
    cut at the first stop string. Deltas and cumulative outputs agree."""
    processor = OutputProcessor(demo_tokenizer(), no_scheduler)
    seqs = [
        add(processor, kind.name, stop=stops, include_stop_str_in_output=include, output_kind=kind)
        for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE)
    ]
    token_ids = demo_tokenizer().encode(text)
    token_ids = token_ids[: max(1, len(token_ids) - num_missing)]
    decoded = demo_tokenizer().decode(token_ids)
    shown = [""]
    for i, token_id in enumerate(token_ids, start=1):
        for [seq] in seqs:
            seq.token_ids.append(token_id)
            if i == len(token_ids):
                seq.status = SequenceStatus.FINISHED_LENGTH
        updates = [SequenceUpdate(seq, (token_id,), ()) for [seq] in seqs]
        delta, output = processor.process_outputs(updates)
        shown.append(shown[-1] + delta.outputs[0].text)
        assert shown[-1] == output.outputs[0].text
        assert delta.finished == output.finished
        if output.finished:
            break
    final = shown[-1]
    assert all(final.startswith(earlier) for earlier in shown)
    assert decoded.startswith(final)
    assert not processor.requests
    if output.outputs[0].finish_reason == "stop":
        stop = str(output.outputs[0].stop_reason)
        assert stop in stops
        assert final.endswith(stop) if include else decoded.startswith(final + stop)
    else:
        assert final == decoded
    if not include:
        assert not any(stop in final for stop in stops)


def test_constructors_are_vllms() -> None:
    """The order of the fields, and which of them may be left out."""
    completion = CompletionOutput(0, "text", [5], -1.5, None)
    assert completion == CompletionOutput(
        index=0,
        text="text",
        token_ids=[5],
        cumulative_logprob=-1.5,
        logprobs=None,
        routed_experts=None,
        finish_reason=None,
        stop_reason=None,
        lora_request=None,
    )
    assert not completion.finished()
    completion.finish_reason = "length"
    assert completion.finished()
    output = RequestOutput("a", "prompt", [1], None, [completion], True)
    assert output == RequestOutput(
        request_id="a",
        prompt="prompt",
        prompt_token_ids=[1],
        prompt_logprobs=None,
        outputs=[completion],
        finished=True,
        metrics=None,
        lora_request=None,
        encoder_prompt=None,
        encoder_prompt_token_ids=None,
        num_cached_tokens=None,
    )
    assert Logprob(-0.5) == Logprob(logprob=-0.5, rank=None, decoded_token=None)


@pytest.mark.parametrize(
    ("tokenizer", "detokenize", "decoded"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_logprobs_without_text(tokenizer: bool, detokenize: bool, decoded: bool) -> None:
    """No tokenizer, or detokenize=False: decoded_token is None, as in vLLM."""
    processor = OutputProcessor(demo_tokenizer() if tokenizer else None, no_scheduler)
    [seq] = add(processor, "a", logprobs=0, prompt_logprobs=0, detokenize=detokenize)
    seq.prompt_token_ids.append(6)
    seq.token_ids.append(6)
    update = update_of(seq, 7)
    entry = TokenLogprobs((6,), (-0.5,), 3)
    processor.requests["a"].prompt_logprobs = [None, None]  # type: ignore[attr-defined]
    [output] = processor.process_outputs(
        [replace(update, prompt_logprobs=PromptLogprobs(1, (entry,)))]
    )
    names = {6: None, 7: None}
    if decoded:
        names = {token_id: demo_tokenizer().decode([token_id]) for token_id in names}
    assert output.prompt_logprobs == [None, {6: Logprob(-0.5, 3, names[6])}]
    assert output.outputs[0].logprobs == [{7: Logprob(-1.0, 1, names[7])}]


def test_branches_that_cannot_fork_are_sequences_of_their_own() -> None:
    """Of five completions three are in one sequence: two more are queued. The request has ended
    when all have, or when the root ends before its branches fork off."""
    params = SamplingParams(n=5, max_tokens=9)
    root = make_branch("a", 0, params)
    root.num_pending_forks = 2
    state = OutputProcessor(None, no_scheduler).make_state(root)
    assert [(seq.seq_id, seq.branch) for seq in state.sequences] == [(0, 0), (3, 3), (4, 4)]
    assert [seq.num_pending_forks for seq in state.sequences] == [2, 0, 0]
    assert len({id(seq.metrics) for seq in state.sequences}) == 3
    for seq in state.sequences[1:]:
        assert not state.is_finished
        seq.status = SequenceStatus.FINISHED_ABORTED
    assert not state.is_finished
    root.status = SequenceStatus.FINISHED_ABORTED
    assert state.is_finished
    root.num_pending_forks = 0  # two branches have forked off, and no update has told of them yet
    assert not state.is_finished


# -- errors --


class BrokenTokenizer:
    """A tokenizer that cannot name one token."""

    def __init__(self, bad_token_id: int) -> None:
        self.bad_token_id = bad_token_id
        self.backend_tokenizer = demo_tokenizer().backend_tokenizer

    def decode(self, token_ids: list[int]) -> str:
        if self.bad_token_id in token_ids:
            raise ZeroDivisionError("no such token")
        return str(token_ids)


def update_of(sequence: Sequence, token_id: int, ends: bool = False) -> SequenceUpdate:
    """One new token with its logprob, as the scheduler hands it over."""
    sequence.token_ids.append(token_id)
    if ends:
        sequence.status = SequenceStatus.FINISHED_LENGTH
    return SequenceUpdate(sequence, (token_id,), (TokenLogprobs((token_id,), (-1.0,), 1),))


def reasons(output: RequestOutput) -> list[tuple[int, str | None]]:
    return [(completion.index, completion.finish_reason) for completion in output.outputs]


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("ends", [False, True])
def test_the_error_of_a_request_is_its_last_output(
    kind: RequestOutputKind, ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also in the very step that would have ended the request. Other requests get their outputs;
    the log gets the traceback."""
    finished: list[int] = []
    processor = OutputProcessor(
        BrokenTokenizer(13), lambda seq_id, status, reason: finished.append(seq_id)
    )
    fields: dict[str, Any] = {"logprobs": 0, "output_kind": kind}
    [bad] = add(processor, "bad", **fields)
    [good] = add(processor, "good", **fields)
    first = [update_of(seq, 7) for seq in (bad, good)]
    assert all(not output.finished for output in processor.process_outputs(first))
    updates = [update_of(bad, 13, ends), update_of(good, 8, ends=True)]
    error, output = processor.process_outputs(updates)
    assert (error.request_id, error.finished) == ("bad", True)
    [completion] = error.outputs
    assert completion.finish_reason == "error"
    assert completion.stop_reason == "ZeroDivisionError: no such token"
    assert completion.token_ids == ([13] if kind is RequestOutputKind.DELTA else [7, 13])
    assert (output.request_id, reasons(output)) == ("good", [(0, "length")])
    assert bad.seq_id in finished
    assert not processor.requests
    [record] = caplog.records
    assert record.exc_info is not None
    assert "request 'bad' failed: ZeroDivisionError" in record.getMessage()


def test_an_error_ends_branches_that_are_new_in_this_step() -> None:
    """The request's first step brings a token for each branch, and the first token fails."""
    finished: set[int] = set()
    processor = OutputProcessor(
        BrokenTokenizer(13), lambda seq_id, status, reason: finished.add(seq_id)
    )
    branches = add(processor, "bad", n=3, logprobs=0)
    updates = [update_of(seq, 13 + branch) for branch, seq in enumerate(branches)]
    [output] = processor.process_outputs(updates)
    assert finished == {0, 1, 2}
    assert output.finished
    assert reasons(output) == [(0, "error"), (1, "error"), (2, "error")]


@pytest.mark.parametrize("text", ["é你", "a你b", "字🎉"])
def test_the_last_token_of_a_character_has_its_text(text: str) -> None:
    """The tokens before it have none, in the output and in the prompt, as in vLLM. A likely token
    beside it is judged on its own."""
    tokenizer = demo_tokenizer()
    processor = OutputProcessor(tokenizer, no_scheduler)
    [seq] = add(processor, "a", logprobs=1, prompt_logprobs=1)
    token_ids, other = tokenizer.encode(text), tokenizer.encode("b")[0]
    entries = tuple(TokenLogprobs((t, t, other), (-0.5, -0.5, -1.0), 1) for t in token_ids)
    seq.prompt_token_ids += token_ids
    processor.requests["a"].prompt_logprobs = [None] * (1 + len(entries))  # type: ignore[attr-defined]
    chunks = [PromptLogprobs(1, entries[:2]), PromptLogprobs(3, entries[2:])]
    for chunk in chunks:
        processor.process_outputs([SequenceUpdate(seq, (), (), chunk)])
    seq.token_ids = [*seq.prompt_token_ids, *token_ids]
    [output] = processor.process_outputs([SequenceUpdate(seq, tuple(token_ids), entries)])
    for named in (output.outputs[0].logprobs, output.prompt_logprobs[1:]):
        texts = [entry[t].decoded_token for t, entry in zip(token_ids, named, strict=True)]
        assert "".join(texts) == text
        assert set(texts) <= {"", *text}
        assert {entry[other].decoded_token for entry in named} == {"b"}


@pytest.mark.parametrize("include", [True, False])
def test_what_is_held_back_for_a_stop_string(include: bool) -> None:
    """Nothing if the text will contain the stop string, as in vLLM."""
    processor = OutputProcessor(demo_tokenizer(), no_scheduler)
    kind = RequestOutputKind.DELTA
    [seq] = add(processor, "a", stop=["END"], include_stop_str_in_output=include, output_kind=kind)
    [token_id] = demo_tokenizer().encode("b")
    seq.token_ids.append(token_id)
    [output] = processor.process_outputs([SequenceUpdate(seq, (token_id,), ())])
    assert output.outputs[0].text == ("b" if include else "")


def test_an_outputs_prompt_is_the_users() -> None:
    """Changing it changes nothing in the engine."""
    processor = OutputProcessor(None, no_scheduler)
    [seq] = add(processor, "a")
    [output] = processor.process_outputs([update_of(seq, 7)])
    output.prompt_token_ids += output.outputs[0].token_ids
    assert seq.prompt_token_ids == [5]
    assert seq.output_token_ids == [7]
