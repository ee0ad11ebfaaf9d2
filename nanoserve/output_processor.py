"""How does a new token become text?

A Request is a user's request with its n completions. It takes each step's new tokens, makes text of
them (models/tokenizer.py has the Detokenizer), looks for stop strings, and builds the
RequestOutputs. With stop=["END"], three steps:

    new token   text        handed out, as a delta
    "a "        "a "        ""             the last 2 characters may begin a stop string: held back
    "EN"        "a EN"      "a "
    "D of"      "a "        ""             END is complete: the text is cut, the sequence has ended

A stop string can be found in the text only, so the scheduler learns from here that the sequence has
finished. A token that ends inside a character (UTF-8 has up to four bytes) waits for the next one.

vLLM: vllm/outputs.py, vllm/engine/output_processor/ (V0); vllm/v1/engine/: output_processor.py
(whose RequestState is our Request), detokenizer.py, logprobs.py (0.32).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from nanoserve.models.tokenizer import Detokenizer, name_logprobs
from nanoserve.sampling_params import RequestOutputKind
from nanoserve.sequence import (
    CompletionOutput,
    Logprob,
    RequestOutput,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
    new,
)

Finish = Callable[..., None]  # Scheduler.finish
MAX_CONTEXT = 4  # tokens before a token: a character has four bytes at most


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
    return min(found, key=lambda match: match[0] + len(match[1])) if found else None


@dataclass
class Completion:
    """The text of one completion, so far."""

    sequence: Sequence
    detokenizer: Detokenizer | None
    text: str = ""
    num_sent_chars: int = 0  # of text, in deltas
    num_sent_tokens: int = 0
    logprobs: list[dict[int, Logprob]] = new(list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None  # once its text is complete

    def append(self, update: SequenceUpdate) -> str | None:
        """Detokenize new tokens. Returns the stop string that ends the text, if there is one; then
        the update keeps only the tokens up to that."""
        if self.detokenizer is None:
            return None
        seq, params = self.sequence, self.sequence.sampling_params
        token_ids = [token.token_id for token in update.tokens]
        num_before = seq.num_output_tokens - len(token_ids)
        is_stop_token = not seq.stop_token_ids.isdisjoint(token_ids[-1:])
        if is_stop_token and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]  # the stop token is not part of the text
        new_texts = [self.detokenizer.append(token_id) for token_id in token_ids]
        if seq.status.finish_reason:
            new_texts.append(self.detokenizer.flush())
        for number, new_text in enumerate(new_texts, start=1):
            self.text += new_text
            is_too_early = min(num_before + number, seq.num_output_tokens) <= params.min_tokens
            stops = () if is_too_early else params.stop or ()
            found = find_stop_string(self.text, stops, len(new_text)) if stops else None
            if found is not None:
                position, stop = found
                end = position + len(stop) if params.include_stop_str_in_output else position
                self.text = self.text[:end]
                update.keep(number)
                return stop
        return None

    def build_output(self, is_delta: bool) -> CompletionOutput:
        """The completion so far, or the part that no delta has brought yet."""
        seq, finish_reason = self.sequence, self.finish_reason
        params = seq.sampling_params
        first_token, first_char = self.num_sent_tokens * is_delta, self.num_sent_chars * is_delta
        # What may be the beginning of a stop string is held back, unless the text may contain it.
        stops = () if params.include_stop_str_in_output or finish_reason else params.stop or ()
        num_held = max([0, *(len(stop) - 1 for stop in stops)])
        self.num_sent_tokens = seq.num_output_tokens
        self.num_sent_chars = max(first_char, len(self.text) - num_held)
        has_logprobs = params.logprobs is not None
        return CompletionOutput(
            index=seq.branch,
            text=self.text[first_char : self.num_sent_chars],
            token_ids=seq.token_ids[seq.num_prompt_tokens + first_token :],
            cumulative_logprob=self.cumulative_logprob if has_logprobs else None,
            logprobs=self.logprobs[first_token:] if has_logprobs else None,
            finish_reason=finish_reason,
            stop_reason=seq.stop_reason,
        )


class Request:
    """A request, with its n completions as text."""

    def __init__(self, root: Sequence, tokenizer: Any | None) -> None:
        """root: branch 0, from which others will fork."""
        params = root.sampling_params
        self.root, self.request_id = root, root.request_id
        self.tokenizer = tokenizer if params.detokenize else None
        self.is_finished = False  # True once all completions have ended
        self.completions: dict[int, Completion] = {}
        self._add(root)
        for branch in range(1 + root.num_pending_forks, params.n):  # no place beside branch 0
            self._add(root.make_branch(branch))
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * root.num_prompt_tokens

    def _add(self, seq: Sequence) -> None:
        detokenizer, skip = None, seq.sampling_params.skip_special_tokens
        if self.tokenizer is not None:
            detokenizer = Detokenizer(self.tokenizer, seq.prompt_token_ids, skip)
        self.completions[seq.branch] = Completion(seq, detokenizer)

    @property
    def sequences(self) -> list[Sequence]:
        return [completion.sequence for completion in list(self.completions.values())]

    def process(self, updates: list[SequenceUpdate], finish: Finish) -> list[RequestOutput]:
        """Append the new tokens, finish what a stop string ends, and build the output."""
        for update in updates:  # first: an error in one branch must end all of them
            if update.sequence.branch not in self.completions:
                self._add(update.sequence)
        for update in updates:
            seq = update.sequence
            completion = self.completions[seq.branch]
            if update.prompt_logprobs is not None and self.prompt_logprobs is not None:
                start, entries = update.prompt_logprobs
                for position, entry in enumerate(entries, start):
                    before = self.prompt_logprobs[max(0, position - MAX_CONTEXT) : position]
                    self.prompt_logprobs[position] = name_logprobs(entry, self.tokenizer, before)
            if (stop := completion.append(update)) is not None:
                finish(seq.seq_id, SequenceStatus.FINISHED_STOPPED)
                # Also if it had reached its length in this very step.
                seq.status, seq.stop_reason = SequenceStatus.FINISHED_STOPPED, stop
            for _, entry in update.tokens:
                if entry is not None:
                    before = completion.logprobs[-MAX_CONTEXT:]
                    completion.logprobs.append(name_logprobs(entry, self.tokenizer, before))
                    completion.cumulative_logprob += entry.logprobs[0]
            completion.finish_reason = seq.status.finish_reason
        changed = [u.sequence for u in updates if u.tokens or u.sequence.status.finish_reason]
        return self.build_output([seq.branch for seq in changed])

    def fail(self, message: str | None, finish_reason: str = "error") -> list[RequestOutput]:
        """The last output of a request that was ended: what was generated before."""
        for branch in range(self.root.sampling_params.n):
            if branch not in self.completions:  # it has not forked off yet
                self.completions[branch] = Completion(self.root.make_branch(branch), None)
            completion = self.completions[branch]
            if completion.finish_reason is None:
                completion.finish_reason, completion.sequence.stop_reason = finish_reason, message
        return self.build_output(list(self.completions))

    def build_output(self, changed: list[int]) -> list[RequestOutput]:
        """The RequestOutput for a step in which these completions changed. A delta holds these
        alone, any other output all completions. [] if the request wants no output now."""
        completions, kind = self.completions.values(), self.root.sampling_params.output_kind
        has_all = len(completions) == self.root.sampling_params.n  # no fork is to come
        self.is_finished = has_all and all(each.finish_reason for each in completions)
        if not changed or (kind is RequestOutputKind.FINAL_ONLY and not self.is_finished):
            return []
        is_delta = kind is RequestOutputKind.DELTA
        branches = sorted(changed if is_delta else self.completions)
        output = RequestOutput(
            request_id=self.request_id,
            prompt=self.root.prompt,
            prompt_token_ids=self.root.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[self.completions[branch].build_output(is_delta) for branch in branches],
            finished=self.is_finished,
            metrics=self.root.metrics,
            num_cached_tokens=self.root.num_cached_tokens,
        )
        return [output]
