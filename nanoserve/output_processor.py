"""Text in; text, stop strings and RequestOutput out?

Everything the model does not see. On the way in, the InputProcessor turns a prompt into token ids,
checks at the door whatever could go wrong later, and makes a Sequence of it. On the way out, the
OutputProcessor turns the step's new token ids into text as they come, looks for stop strings, and
builds the RequestOutputs.

Why detokenization is incremental but not token by token: a character can be several tokens long.
With a byte-level tokenizer:

    token        E4    BD    A0    E5 A5    BD         text is held back until it is whole:
    new text     ""    ""    "你"   ""       "好"        no "�" ever reaches the user

Left out: tokenizers that are not backed by the `tokenizers` library.

vLLM: vllm/inputs/, outputs.py, engine/output_processor/, transformers_utils/detokenizer.py (V0);
vllm/outputs.py, vllm/v1/engine/: input_processor.py, output_processor.py, detokenizer.py (V1).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from nanoserve.sampling_params import RequestOutputKind
from nanoserve.sequence import RequestMetrics, Sequence, SequenceUpdate, TokenLogprobs


@dataclass(frozen=True)
class Logprob:
    """One token's log-probability at one position."""

    logprob: float
    rank: int  # 1 for the likeliest token
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a request, so far or, once finish_reason is set, for good."""

    index: int  # which of the request's completions
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # "stop", "length", "abort"
    stop_reason: int | str | None = None  # the stop token id or stop string; None for an EOS token
    cumulative_logprob: float | None = None  # sum over all its tokens, if logprobs were asked for
    logprobs: list[dict[int, Logprob]] | None = None  # per token: token id -> Logprob


@dataclass(frozen=True)
class RequestOutput:
    """What a request has brought so far; the same fields as vLLM's."""

    request_id: str
    prompt: str | None  # None if token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int  # prompt tokens whose KV came from the prefix cache
    metrics: RequestMetrics  # over all completions; num_preemptions is that of the unluckiest
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # per prompt token; first: None


class Detokenizer:
    """The text of one sequence, as its tokens come."""

    CONTEXT = 6  # prompt tokens to start from: some tokenizers write a first token differently

    def __init__(self, tokenizer: Any, prompt_token_ids: list[int], skip_special_tokens: bool):
        self.backend = tokenizer.backend_tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.held: list[int] = []  # tokens that are not yet a whole character
        self.stream = self._new_stream(self._find_context(prompt_token_ids))

    def _find_context(self, prompt_token_ids: list[int]) -> list[int]:
        """The last prompt tokens, some more if their first one is within a character (of up to four
        bytes); none if the prompt, being token ids, ends within one."""
        for length in range(self.CONTEXT, self.CONTEXT + 4):
            context = prompt_token_ids[-length:]
            text = self.backend.decode(context, skip_special_tokens=self.skip_special_tokens)
            if not text.endswith("�"):
                return context
        return []

    def append(self, token_id: int) -> str:
        """The text that this token completes, perhaps none."""
        self.held.append(token_id)
        try:
            text = self.stream.step(self.backend, token_id)
        except Exception:  # the stream rejects some invalid byte sequences: start anew behind them
            self.stream = self._new_stream([])
            return self.flush()
        if text is None:
            return ""
        self.held.clear()
        return text

    def flush(self) -> str:
        """What is still held back: an unfinished character reads as U+FFFD."""
        text = self.backend.decode(self.held, skip_special_tokens=self.skip_special_tokens)
        self.held.clear()
        return text

    def _new_stream(self, context: list[int]) -> Any:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(ids=context, skip_special_tokens=self.skip_special_tokens)


def find_stop_string(text: str, stops: Seq[str], num_new: int) -> tuple[int, str] | None:
    """(where it starts, stop string) of the first one that ends in the last `num_new` characters.

    find_stop_string("a END b", ["END"], 4) -> (2, "END")
    """
    found = [
        (position, stop)
        for stop in stops
        if (position := text.find(stop, max(0, len(text) - num_new - len(stop) + 1))) >= 0
    ]
    return min(found, default=None)


@dataclass
class BranchState:
    """The text of one completion, so far."""

    sequence: Sequence
    detokenizer: Detokenizer | None
    text: str = ""
    num_sent_chars: int = 0  # of text, in deltas
    num_sent_tokens: int = 0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0


@dataclass
class RequestState:
    """What the OutputProcessor remembers of one unfinished request."""

    root: Sequence  # branch 0
    prompt: str | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    branches: dict[int, BranchState] = field(default_factory=dict)  # by branch

    @property
    def is_finished(self) -> bool:
        """True if all n completions are there and have ended."""
        branches = self.branches.values()
        return len(branches) == self.root.sampling_params.n and all(
            state.sequence.status.finish_reason for state in branches
        )


class OutputProcessor:
    """New token ids in, RequestOutputs out."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer
        self.states: dict[str, RequestState] = {}  # by request id

    def add(self, sequence: Sequence, prompt: str | None) -> None:
        """Expect output of this sequence, and of the branches that will fork off it."""
        asks = sequence.sampling_params.prompt_logprobs is not None
        state = RequestState(
            sequence, prompt, [None] * sequence.num_prompt_tokens if asks else None
        )
        self.states[sequence.request_id] = state
        self._add_branch(state, sequence)

    def _add_branch(self, state: RequestState, sequence: Sequence) -> BranchState:
        params = sequence.sampling_params
        detokenizer = None
        if self.tokenizer is not None and params.detokenize:
            detokenizer = Detokenizer(
                self.tokenizer, sequence.prompt_token_ids, params.skip_special_tokens
            )
        state.branches[sequence.branch] = BranchState(sequence, detokenizer)
        return state.branches[sequence.branch]

    def append(self, update: SequenceUpdate) -> str | None:
        """Take in one sequence's new tokens; return the stop string that ends it, if one does."""
        seq = update.sequence
        state = self.states[seq.request_id]
        if update.prompt_logprobs is not None and state.prompt_logprobs is not None:
            for position, entry in enumerate(
                update.prompt_logprobs.entries, start=update.prompt_logprobs.start
            ):
                state.prompt_logprobs[position] = self._name_logprobs(entry)
        branch = state.branches.get(seq.branch) or self._add_branch(state, seq)
        for token_logprobs in update.logprobs:
            branch.logprobs.append(self._name_logprobs(token_logprobs))
            branch.cumulative_logprob += token_logprobs.logprobs[0]
        return self._append_text(branch, update.new_token_ids)

    @staticmethod
    def _append_text(branch: BranchState, new_token_ids: tuple[int, ...]) -> str | None:
        """Detokenize, and look for stop strings in what is new."""
        if branch.detokenizer is None:
            return None
        seq, params = branch.sequence, branch.sequence.sampling_params
        finish_reason = seq.status.finish_reason
        if finish_reason == "stop" and not params.include_stop_str_in_output:
            new_token_ids = new_token_ids[:-1]  # the stop token is not part of the text
        new_text = "".join(branch.detokenizer.append(token_id) for token_id in new_token_ids)
        if finish_reason:
            new_text += branch.detokenizer.flush()
        branch.text += new_text
        is_too_early = 0 < seq.num_output_tokens <= params.min_tokens
        if not new_text or is_too_early:
            return None
        found = find_stop_string(branch.text, params.stop or (), len(new_text))
        if found is None:
            return None
        position, stop = found
        end = position + len(stop) if params.include_stop_str_in_output else position
        branch.text = branch.text[:end]
        return stop

    def build_output(self, sequences: list[Sequence]) -> RequestOutput | None:
        """The RequestOutput to hand out now, if their request wants one now.

        `sequences` are those of one request that have news. A delta tells of these alone, any other
        output of all branches.
        """
        state = self.states[sequences[0].request_id]
        kind = state.root.sampling_params.output_kind
        is_finished = state.is_finished
        if kind is RequestOutputKind.FINAL_ONLY and not is_finished:
            return None
        is_delta = kind is RequestOutputKind.DELTA
        branches = sorted(seq.branch for seq in sequences) if is_delta else sorted(state.branches)
        completions = [self._build_completion(state.branches[b], is_delta) for b in branches]
        if is_finished:
            del self.states[state.root.request_id]
        return RequestOutput(
            request_id=state.root.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.root.prompt_token_ids,
            outputs=completions,
            finished=is_finished,
            num_cached_tokens=state.root.num_cached_tokens,
            metrics=self._merge_metrics(state),
            prompt_logprobs=state.prompt_logprobs,
        )

    def _build_completion(self, branch: BranchState, is_delta: bool) -> CompletionOutput:
        seq = branch.sequence
        finish_reason = seq.status.finish_reason
        first_token = branch.num_sent_tokens if is_delta else 0
        first_char = branch.num_sent_chars if is_delta else 0
        last_char = len(branch.text) - (0 if finish_reason else self._num_held_chars(seq))
        branch.num_sent_tokens = seq.num_output_tokens
        branch.num_sent_chars = max(first_char, last_char)
        has_logprobs = seq.sampling_params.logprobs is not None
        return CompletionOutput(
            index=seq.branch,
            text=branch.text[first_char : branch.num_sent_chars],
            token_ids=seq.token_ids[seq.num_prompt_tokens + first_token :],
            finish_reason=finish_reason,
            stop_reason=seq.stop_reason,
            cumulative_logprob=branch.cumulative_logprob if has_logprobs else None,
            logprobs=branch.logprobs[first_token:] if has_logprobs else None,
        )

    @staticmethod
    def _merge_metrics(state: RequestState) -> RequestMetrics:
        """A snapshot over all completions: the first token of any, the end of the last."""
        of_branches = [branch.sequence.metrics for branch in state.branches.values()]
        last_tokens = [m.last_token_time for m in of_branches if m.last_token_time is not None]
        ends = [m.finished_time for m in of_branches if m.finished_time is not None]
        return replace(
            state.root.metrics,
            last_token_time=max(last_tokens, default=None),
            finished_time=max(ends, default=None) if state.is_finished else None,
            num_preemptions=max(m.num_preemptions for m in of_branches),
        )

    @staticmethod
    def _num_held_chars(seq: Sequence) -> int:
        """Characters that may still turn out to be the beginning of a stop string."""
        return max((len(stop) - 1 for stop in seq.sampling_params.stop or ()), default=0)

    def _name_logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """token id -> Logprob: the sampled (or given) token first, then the likeliest ones."""
        ranks = [entry.sampled_rank, *range(1, len(entry.token_ids))]
        named: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
            if token_id not in named:
                named[token_id] = Logprob(logprob, rank, self._decode(token_id))
        return named

    def _decode(self, token_id: int) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode([token_id])
