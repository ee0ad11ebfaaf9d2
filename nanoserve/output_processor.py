"""What does a step's new token mean to the user?

The OutputProcessor gives each request's new tokens to the request's consumer. Usually the consumer
is a RequestState, which turns token ids into text, looks for stop strings, and builds the
RequestOutputs. (A beam search is another kind of consumer: extras/beam_search.py.)

Detokenization is incremental, but not token by token, because a character can be several tokens
long. With a byte-level tokenizer:

    token        E4    BD    A0    E5 A5    BD         text is held back until a character is whole:
    new text     ""    ""    "你"   ""       "好"        no "�" ever reaches the user

A stop string can be found in the text only, so the scheduler learns from here that the sequence has
finished. If the step has brought more tokens behind it (accepted drafts), nobody gets them. Text
that may be the beginning of a stop string is held back too, if the output is to end before it.

Left out: tokenizers that are not backed by the `tokenizers` library.

vLLM: vllm/outputs.py, engine/output_processor/, transformers_utils/detokenizer.py (V0);
vllm/outputs.py, vllm/v1/engine/: output_processor.py, detokenizer.py, parallel_sampling.py (V1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from nanoserve.exceptions import Caught, RequestError, describe_error
from nanoserve.logger import init_logger, to_html
from nanoserve.logprobs import MAX_CONTEXT, Logprob, name_logprobs
from nanoserve.sampling_params import RequestOutputKind
from nanoserve.sequence import RequestMetrics, Sequence, SequenceStatus, SequenceUpdate

logger = init_logger(__name__)
# (seq_id, status, stop reason) -> the sequence, or None if it had finished already
FinishSequence = Callable[[int, SequenceStatus, "int | str | None"], "Sequence | None"]


@dataclass
class CompletionOutput:
    """One completion of a request, so far or, once finish_reason is set, for good. The fields and
    their order are vLLM's."""

    index: int  # which of the request's completions
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None  # sum over all its tokens, if logprobs were asked for
    logprobs: list[dict[int, Logprob]] | None  # per token: token id -> Logprob
    routed_experts: None = None  # not here
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    # The stop token id or stop string (None for the tokenizer's EOS token); with "error" the
    # message.
    stop_reason: int | str | None = None
    lora_request: None = None  # not here

    def finished(self) -> bool:
        """True once this completion has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The result of a request so far. The fields and their order are vLLM's."""

    request_id: str
    prompt: str | None  # None if token ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None  # per prompt token; first: None
    outputs: list[CompletionOutput]
    finished: bool
    # Over all completions: num_preemptions is the largest of them, tokens and drafts are summed up.
    metrics: RequestMetrics | None = None
    lora_request: Any = None  # the LoRARequest, if it has an adapter
    encoder_prompt: None = None  # not here
    encoder_prompt_token_ids: None = None  # not here
    num_cached_tokens: int | None = None  # prompt tokens whose KV came from the prefix cache
    kv_transfer_params: dict[str, Any] | None = None  # for another engine, which reads its blocks

    def _repr_html_(self) -> str | None:
        return to_html("output", self)


class Detokenizer:
    """The text of one sequence, token by token."""

    CONTEXT = 6  # prompt tokens to start from: some tokenizers write a first token differently

    def __init__(self, tokenizer: Any, prompt_token_ids: list[int], skip_special_tokens: bool):
        self.backend = tokenizer.backend_tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.held: list[int] = []  # token ids that are not a whole character yet
        self.stream = self._new_stream(self._find_context(prompt_token_ids))

    def _find_context(self, prompt_token_ids: list[int]) -> list[int]:
        """The last prompt tokens; a few more if the first of them is inside a character (of up to
        four bytes). An empty list if the prompt, as token ids, ends inside a character."""
        for length in range(self.CONTEXT, self.CONTEXT + 4):
            context = prompt_token_ids[-length:]
            text = self.backend.decode(context, skip_special_tokens=self.skip_special_tokens)
            if not text.endswith("�"):
                return context
        return []

    def append(self, token_id: int) -> str:
        """The text that this token completes; empty if the character is not whole yet."""
        self.held.append(token_id)
        try:
            text = self.stream.step(self.backend, token_id)
        except Exception:  # the stream rejects some invalid byte sequences: start again behind them
            self.stream = self._new_stream([])
            return self.flush()
        if text is None:
            return ""
        self.held.clear()
        return text

    def flush(self) -> str:
        """The text that is still held back; an incomplete character becomes U+FFFD."""
        text = self.backend.decode(self.held, skip_special_tokens=self.skip_special_tokens)
        self.held.clear()
        return text

    def _new_stream(self, context: list[int]) -> Any:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(ids=context, skip_special_tokens=self.skip_special_tokens)


def find_stop_string(text: str, stops: Seq[str], num_new: int) -> tuple[int, str] | None:
    """(start, stop string) of the stop string that is complete first, and ends in the last
    `num_new` characters. Of two that are complete at once, the first of the list.

    find_stop_string("a END b", ["END"], 4) -> (2, "END")
    """
    found = [
        (position, stop)
        for stop in stops
        if (position := text.find(stop, max(0, len(text) - num_new - len(stop) + 1))) >= 0
    ]
    return min(found, key=lambda match: match[0] + len(match[1]), default=None)


class RequestConsumer(Protocol):
    """Receives the updates of one unfinished request, after every step that brought some."""

    request_id: str

    @property
    def sequences(self) -> Iterable[Sequence]:
        """The request's sequences, finished ones too."""

    @property
    def is_finished(self) -> bool:
        """True if no more updates will come."""

    def process(self, updates: list[SequenceUpdate]) -> RequestOutput | None:
        """Take a step's updates; return the RequestOutput to hand out now, if there is one."""

    def fail(self, message: str) -> RequestOutput | None:
        """The request has ended with an error; its sequences are finished."""


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

    def append(self, update: SequenceUpdate) -> str | None:
        """Detokenize new tokens. Returns the stop string that ends the text, if there is one; then
        the update keeps only the tokens up to that."""
        if self.detokenizer is None:
            return None
        seq, params = self.sequence, self.sequence.sampling_params
        finish_reason, token_ids = seq.status.finish_reason, update.new_token_ids
        num_before = seq.num_output_tokens - len(token_ids)
        ends_in_stop = not seq.stop_token_ids.isdisjoint(token_ids[-1:])
        if ends_in_stop and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]  # the stop token is not part of the text
        new_texts = [self.detokenizer.append(token_id) for token_id in token_ids]
        if finish_reason:
            new_texts.append(self.detokenizer.flush())
        for number, new_text in enumerate(new_texts, start=1):
            self.text += new_text
            is_too_early = min(num_before + number, seq.num_output_tokens) <= params.min_tokens
            stops = () if is_too_early else params.stop or ()
            found = find_stop_string(self.text, stops, len(new_text))
            if found is not None:
                position, stop = found
                end = position + len(stop) if params.include_stop_str_in_output else position
                self.text = self.text[:end]
                update.keep(number)
                return stop
        return None

    def build_output(self, is_delta: bool) -> CompletionOutput:
        """The completion so far, or the part that no delta has brought yet."""
        seq = self.sequence
        finish_reason = seq.status.finish_reason
        first_token = self.num_sent_tokens if is_delta else 0
        first_char = self.num_sent_chars if is_delta else 0
        last_char = len(self.text) - (0 if finish_reason else self._num_held_chars())
        self.num_sent_tokens = seq.num_output_tokens
        self.num_sent_chars = max(first_char, last_char)
        has_logprobs = seq.sampling_params.logprobs is not None
        return CompletionOutput(
            index=seq.branch,
            text=self.text[first_char : self.num_sent_chars],
            token_ids=seq.token_ids[seq.num_prompt_tokens + first_token :],
            finish_reason=finish_reason,
            stop_reason=seq.stop_reason,
            cumulative_logprob=self.cumulative_logprob if has_logprobs else None,
            logprobs=self.logprobs[first_token:] if has_logprobs else None,
        )

    def _num_held_chars(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string, unless the
        text will contain it."""
        params = self.sequence.sampling_params
        stops = () if params.include_stop_str_in_output else params.stop or ()
        return max((len(stop) - 1 for stop in stops), default=0)


class RequestState:
    """The consumer of an ordinary request: its n completions, as text."""

    def __init__(self, root: Sequence, tokenizer: Any | None, finish: FinishSequence) -> None:
        """root: branch 0, from which others will fork. finish: see Scheduler.finish."""
        self.root = root
        self.request_id = root.request_id
        self.prompt_token_ids = list(root.prompt_token_ids)  # the user's: the engine has its own
        self.tokenizer = tokenizer if root.sampling_params.detokenize else None
        self.finish = finish
        self.branches: dict[int, BranchState] = {}
        self._add_branch(root)
        for branch in range(1 + root.num_pending_forks, root.sampling_params.n):
            self._add_branch(root.make_branch(branch))
        # Per prompt token; the first one has no logprobs.
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if root.sampling_params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * root.num_prompt_tokens

    @property
    def sequences(self) -> list[Sequence]:
        return [branch.sequence for branch in list(self.branches.values())]  # any thread may ask

    @property
    def is_finished(self) -> bool:
        """True if all completions have ended. A root that ends before its branches fork off has no
        branches."""
        num_known = len(self.branches) + self.root.num_pending_forks
        has_all = num_known == self.root.sampling_params.n
        return has_all and all(seq.status.finish_reason for seq in self.sequences)

    def process(self, updates: list[SequenceUpdate]) -> RequestOutput | None:
        """Append the new tokens, finish what a stop string ends, and build the output."""
        changed: list[Sequence] = []
        for update in updates:  # first: an error in one branch must end all of them
            if update.sequence.branch not in self.branches:
                self._add_branch(update.sequence)
        for update in updates:
            stop = self._append(update)
            if stop is not None:
                _finish(update.sequence, self.finish, SequenceStatus.FINISHED_STOPPED, stop)
            if update.new_token_ids or update.sequence.status.finish_reason:
                changed.append(update.sequence)
        return self._build_output(changed) if changed else None

    def fail(self, message: str) -> RequestOutput | None:
        """The last output: what was generated before the error."""
        return self.end(SequenceStatus.FINISHED_ERROR)

    def end(self, status: SequenceStatus) -> RequestOutput | None:
        """The last output of a request that has ended like this, by an error or an abort: what was
        generated before. It has an entry for each of the n completions, also for those that have
        not forked off yet."""
        self.root.num_pending_forks = 0
        for index in set(range(self.root.sampling_params.n)) - set(self.branches):
            self.branches[index] = BranchState(self.root.make_branch(index), None)
        for branch in self.branches.values():
            if branch.sequence.status.finish_reason is None:
                branch.sequence.status = status
        ended = [branch for branch in self.branches.values() if branch.sequence.status is status]
        for branch in ended:
            with Caught():  # the detokenizer may be what has failed
                branch.text += branch.detokenizer.flush() if branch.detokenizer else ""
        return self._build_output([branch.sequence for branch in ended])

    def _append(self, update: SequenceUpdate) -> str | None:
        """Take in one sequence's new tokens. Returns the stop string that ends it, if there is
        one."""
        if update.prompt_logprobs is not None and self.prompt_logprobs is not None:
            start, entries = update.prompt_logprobs
            for position, entry in enumerate(entries, start=start):
                before = self.prompt_logprobs[max(0, position - MAX_CONTEXT) : position]
                self.prompt_logprobs[position] = name_logprobs(entry, self.tokenizer, before)
        seq = update.sequence
        branch = self.branches[seq.branch]
        stop = branch.append(update)
        for entry in update.logprobs:
            previous = branch.logprobs[-MAX_CONTEXT:]
            branch.logprobs.append(name_logprobs(entry, self.tokenizer, previous))
            branch.cumulative_logprob += entry.logprobs[0]
        return stop

    def _add_branch(self, sequence: Sequence) -> None:
        skip, detokenizer = sequence.sampling_params.skip_special_tokens, None
        if self.tokenizer is not None:
            detokenizer = Detokenizer(self.tokenizer, sequence.prompt_token_ids, skip)
        self.branches[sequence.branch] = BranchState(sequence, detokenizer)

    def _build_output(self, changed: list[Sequence]) -> RequestOutput | None:
        """The RequestOutput for a step in which these sequences changed. A delta holds these alone,
        any other output all completions. None if the request wants no output now."""
        kind = self.root.sampling_params.output_kind
        is_finished = self.is_finished
        if kind is RequestOutputKind.FINAL_ONLY and not is_finished:
            return None
        is_delta = kind is RequestOutputKind.DELTA
        branches = sorted(seq.branch for seq in changed) if is_delta else sorted(self.branches)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.root.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs and self.prompt_logprobs[:],
            outputs=[self.branches[branch].build_output(is_delta) for branch in branches],
            finished=is_finished,
            metrics=self._merge_metrics(is_finished),
            lora_request=self.root.lora and self.root.lora.request,
            num_cached_tokens=self.root.num_cached_tokens,
            kv_transfer_params=self.root.kv_transfer_params,
        )

    def _merge_metrics(self, is_finished: bool) -> RequestMetrics:
        """Over all completions: the last token and the end of the one that took longest."""
        metrics = [seq.metrics for seq in self.sequences]
        last_tokens = [m.last_token_ts for m in metrics if m.last_token_ts is not None]
        ends = [m.finished_ts for m in metrics if m.finished_ts is not None]
        names = ("num_generation_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
        return replace(
            self.root.metrics,
            last_token_ts=max(last_tokens, default=None),
            finished_ts=max(ends, default=None) if is_finished else None,
            num_preemptions=max(m.num_preemptions for m in metrics),
            **{name: sum(getattr(m, name) for m in metrics) for name in names},
        )


class OutputProcessor:
    """The consumers of all unfinished requests.

    Invariant: the error of one request ends that request only.
    """

    def __init__(self, tokenizer: Any | None, finish: FinishSequence) -> None:
        """finish: see Scheduler.finish."""
        self.tokenizer = tokenizer
        self.finish = finish
        self.requests: dict[str, RequestConsumer] = {}
        # Called with the RequestConsumer of each request that has ended, in whatever way. They must
        # not raise.
        self.finish_listeners: list[Callable[[Any], None]] = []
        self._error: BaseException | None = None  # see raise_error

    def make_state(self, sequence: Sequence) -> RequestState:
        """The consumer of an ordinary request."""
        return RequestState(sequence, self.tokenizer, self.finish)

    def add(self, request: RequestConsumer) -> None:
        """Expect updates of this request. Raises ValueError if its request id is in use."""
        # setdefault is atomic: of several threads with one id, one gets it.
        if self.requests.setdefault(request.request_id, request) is not request:
            raise ValueError(f"request id {request.request_id!r} is in use; choose another.")

    def process_outputs(self, updates: list[SequenceUpdate]) -> list[RequestOutput]:
        """Give a step's updates to their requests; return the outputs to hand out."""
        by_request: dict[str, list[SequenceUpdate]] = {}
        for update in updates:
            by_request.setdefault(update.sequence.request_id, []).append(update)
        outputs: list[RequestOutput | None] = []
        for request_id, its_updates in by_request.items():
            request = self.requests.get(request_id)
            if request is None:  # the consumer of another request has aborted it just now
                continue
            error = next((update.error for update in its_updates if update.error is not None), None)
            output = None
            if error is None:
                with Caught() as caught:
                    output = request.process(its_updates)
                    if request.is_finished:
                        self.end_request(request_id, SequenceStatus.FINISHED_STOPPED)
                error = caught.error
            if error is not None:  # ends sequences that the consumer doesn't know yet, too
                sequences = [update.sequence for update in its_updates]
                with Caught() as again:
                    output = self.fail_request(request_id, error, sequences)
                self._error = self._error or again.error
            outputs.append(output)
        return [output for output in outputs if output is not None]

    def raise_error(self) -> None:
        """If process_outputs could not end a request whose consumer failed, raise why. (It has
        served the other requests first.)"""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def fail_request(
        self, request_id: str, error: BaseException, sequences: Iterable[Sequence]
    ) -> RequestOutput | None:
        """End a request, and these sequences of it, with finish_reason "error"; return its last
        output. The log gets the traceback, or that of the cause if `error` is a RequestError."""
        message = describe_error(error)
        cause = error.__cause__ if isinstance(error, RequestError) else error
        logger.error("request %r failed: %s", request_id, message, exc_info=cause)
        for sequence in sequences:
            _finish(sequence, self.finish, SequenceStatus.FINISHED_ERROR, message)
        request = self.end_request(request_id, SequenceStatus.FINISHED_ERROR, message)
        output = None
        with Caught() as caught:
            output = request.fail(message) if request else None
        if caught.error is not None:
            text = "request %r has no output about its error"
            logger.error(text, request_id, exc_info=caught.error)
        return output

    def end_request(
        self, request_id: str, status: SequenceStatus, stop_reason: str | None = None
    ) -> RequestConsumer | None:
        """Finish all unfinished sequences of a request, and expect no more updates. None if the
        request has ended already: its own consumer may have aborted it."""
        request = self.requests.pop(request_id, None)
        for sequence in request.sequences if request else ():
            self.finish(sequence.seq_id, status, stop_reason)
        for tell in self.finish_listeners if request else ():
            tell(request)
        return request


def _finish(
    sequence: Sequence, finish: FinishSequence, status: SequenceStatus, reason: str | None
) -> None:
    """Finish a sequence, also one that the scheduler finished in this very step."""
    if finish(sequence.seq_id, status, reason) is None:
        sequence.status, sequence.stop_reason = status, reason
