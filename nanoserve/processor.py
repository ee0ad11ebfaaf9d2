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

import random
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.sequence import RequestMetrics, Sequence, SequenceUpdate, TokenLogprobs

Prompt = str | list[int]  # text, or token ids
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


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
    cumulative_logprob: float | None = None  # sum over token_ids, if logprobs were asked for
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
    metrics: RequestMetrics


def load_tokenizer(folder: Path, explicit: bool) -> Any | None:
    """The tokenizer in `folder`, or None if there is none and none was asked for.

    Raises ValueError if it cannot be read.
    """
    if not explicit and not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer  # imports torch: not before an engine is built

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # many kinds; all mean: no tokenizer
        raise ValueError(f"no tokenizer can be read from {folder} ({error}).") from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(
            f"{type(tokenizer).__name__} in {folder} is not backed by the tokenizers library, as "
            "incremental detokenization needs it to be. Save it as a tokenizer.json."
        )
    return tokenizer


class InputProcessor:
    """Prompts and parameters in, checked Sequences out.

    Invariant: a Sequence that leaves here can be served: its tokens exist, it fits, it will end.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Any | None,
        num_kv_blocks: int,
    ) -> None:
        assert config.max_model_len, "EngineConfig not resolved"
        self.config = config
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.max_model_len = config.max_model_len
        self.kv_capacity = num_kv_blocks * config.block_size  # tokens
        self._next_seq_id = count()
        self._seeds = random.Random(config.seed)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Sequence:
        """A Sequence for one request. Raises ValueError or TypeError if it cannot be served."""
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {sampling_params!r}.")
        self._check_priority(priority)
        self._check_sampling(sampling_params)
        prompt_token_ids = self.tokenize(prompt)
        room = self._room_after(len(prompt_token_ids))
        stop_token_ids = frozenset(sampling_params.stop_token_ids or ())
        if not sampling_params.ignore_eos:
            stop_token_ids |= self.model_config.eos_token_ids
        seed = sampling_params.seed
        return Sequence(
            seq_id=next(self._next_seq_id),
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=sampling_params,
            max_tokens=min(sampling_params.max_tokens or room, room),
            stop_token_ids=stop_token_ids,
            seed=self._seeds.getrandbits(63) if seed is None else seed,
            metrics=RequestMetrics(arrival_time=time.monotonic()),
            priority=priority,
            cache_salt=cache_salt,
        )

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, each checked to be in the vocabulary."""
        if isinstance(prompt, str):
            token_ids = self.require_tokenizer("a text prompt").encode(prompt)
        elif isinstance(prompt, (list, tuple)):
            token_ids = list(prompt)
        else:
            raise TypeError(f"a prompt must be a string or a list of token ids, got {prompt!r}.")
        if not token_ids:
            raise ValueError("the prompt is empty: it has no tokens. Give at least one token.")
        vocab_size = self.model_config.vocab_size
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise TypeError(f"token ids must be ints, got {token_id!r} in the prompt.")
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"token id {token_id} is out of range; allowed: 0 to {vocab_size - 1} "
                    "(vocab_size - 1)."
                )
        return token_ids

    def require_tokenizer(self, what: str) -> Any:
        """The tokenizer. Raises ValueError if the checkpoint has none."""
        if self.tokenizer is None:
            raise ValueError(
                f"{what} needs a tokenizer, and {self.model_config.path} has none. Give prompts as "
                "token ids, or LLM(tokenizer=...)."
            )
        return self.tokenizer

    def _room_after(self, num_prompt_tokens: int) -> int:
        """Output tokens that fit. Raises ValueError if not even one does."""
        limit = min(self.max_model_len, self.kv_capacity)
        if num_prompt_tokens < limit:
            return limit - num_prompt_tokens
        if num_prompt_tokens >= self.max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens; with one output token that is more "
                f"than max_model_len={self.max_model_len}. Shorten it, or raise max_model_len."
            )
        raise ValueError(
            f"the prompt has {num_prompt_tokens} tokens; with one output token that is more than "
            f"the whole KV cache holds ({self.kv_capacity} tokens). Shorten it, or raise "
            "num_kv_blocks or kv_cache_memory."
        )

    def _check_priority(self, priority: int) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority must be an int, got {priority!r}.")
        if priority and self.config.scheduling_policy != "priority":
            raise ValueError(
                f"priority is {priority}, but the engine serves first come, first served. Build it "
                "with scheduling_policy='priority'."
            )

    def _check_sampling(self, params: SamplingParams) -> None:
        """What depends on the engine; the rest SamplingParams has checked itself."""
        if params.stop:
            self.require_tokenizer("a stop string")
        vocab_size = self.model_config.vocab_size
        for token_id in params.stop_token_ids or ():
            if token_id >= vocab_size:
                raise ValueError(f"stop token id {token_id}: the vocabulary has {vocab_size}.")
        most = self.config.max_logprobs if self.config.max_logprobs >= 0 else vocab_size
        if (params.logprobs or 0) > min(most, vocab_size):
            raise ValueError(
                f"logprobs is {params.logprobs}; this engine allows {min(most, vocab_size)}. Build "
                "it with a larger max_logprobs (-1: no limit)."
            )


class Detokenizer:
    """The text of one sequence, as its tokens come."""

    CONTEXT = 6  # prompt tokens to start from: some tokenizers write a first token differently

    def __init__(self, tokenizer: Any, prompt_token_ids: list[int], skip_special_tokens: bool):
        self.backend = tokenizer.backend_tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.held: list[int] = []  # tokens that are not yet a whole character
        context = prompt_token_ids[-self.CONTEXT :]
        if self.backend.decode(context, skip_special_tokens=skip_special_tokens).endswith("�"):
            context = []  # a prompt of token ids may end within a character
        self.stream = self._new_stream(context)

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
class RequestState:
    """What the OutputProcessor remembers of one unfinished request."""

    sequence: Sequence
    prompt: str | None
    detokenizer: Detokenizer | None
    text: str = ""
    num_sent_chars: int = 0  # of text, in deltas
    num_sent_tokens: int = 0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0


class OutputProcessor:
    """New token ids in, RequestOutputs out."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer
        self.states: dict[int, RequestState] = {}  # by seq_id

    def add(self, sequence: Sequence, prompt: str | None) -> None:
        """Expect output of this sequence."""
        detokenizer = None
        if self.tokenizer is not None:
            skip = sequence.sampling_params.skip_special_tokens
            detokenizer = Detokenizer(self.tokenizer, sequence.prompt_token_ids, skip)
        self.states[sequence.seq_id] = RequestState(sequence, prompt, detokenizer)

    def append(self, update: SequenceUpdate) -> str | None:
        """Take in one sequence's new tokens; return the stop string that ends it, if one does."""
        state = self.states[update.sequence.seq_id]
        for token_logprobs in update.logprobs:
            state.logprobs.append(self._name_logprobs(token_logprobs))
            state.cumulative_logprob += token_logprobs.logprobs[0]
        if state.detokenizer is None:
            return None
        seq, params = update.sequence, update.sequence.sampling_params
        ended_by_token = seq.status.finish_reason == "stop"
        new_token_ids = update.new_token_ids
        if ended_by_token and not params.include_stop_str_in_output:
            new_token_ids = new_token_ids[:-1]  # the stop token is not part of the text
        new_text = "".join(state.detokenizer.append(token_id) for token_id in new_token_ids)
        if seq.status.finish_reason:
            new_text += state.detokenizer.flush()
        state.text += new_text
        found = find_stop_string(state.text, params.stop or (), len(new_text)) if new_text else None
        if found is None:
            return None
        position, stop = found
        end = position + len(stop) if params.include_stop_str_in_output else position
        state.text = state.text[:end]
        return stop

    def build_output(self, seq: Sequence) -> RequestOutput | None:
        """The RequestOutput to hand out now, if this request wants one now."""
        state, kind = self.states[seq.seq_id], seq.sampling_params.output_kind
        finish_reason = seq.status.finish_reason
        if kind is RequestOutputKind.FINAL_ONLY and not finish_reason:
            return None
        first_token = state.num_sent_tokens if kind is RequestOutputKind.DELTA else 0
        first_char = state.num_sent_chars if kind is RequestOutputKind.DELTA else 0
        last_char = len(state.text) - (0 if finish_reason else self._num_held_chars(seq))
        state.num_sent_tokens = seq.num_output_tokens
        state.num_sent_chars = max(first_char, last_char)
        has_logprobs = seq.sampling_params.logprobs is not None
        completion = CompletionOutput(
            index=0,
            text=state.text[first_char : state.num_sent_chars],
            token_ids=seq.output_token_ids[first_token:],
            finish_reason=finish_reason,
            stop_reason=seq.stop_reason,
            cumulative_logprob=state.cumulative_logprob if has_logprobs else None,
            logprobs=state.logprobs[first_token:] if has_logprobs else None,
        )
        if finish_reason:
            del self.states[seq.seq_id]
        return RequestOutput(
            request_id=seq.request_id,
            prompt=state.prompt,
            prompt_token_ids=seq.prompt_token_ids,
            outputs=[completion],
            finished=finish_reason is not None,
            num_cached_tokens=seq.num_cached_tokens,
            metrics=seq.metrics,
        )

    @staticmethod
    def _num_held_chars(seq: Sequence) -> int:
        """Characters that may still turn out to be the beginning of a stop string."""
        return max((len(stop) - 1 for stop in seq.sampling_params.stop or ()), default=0)

    def _name_logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """token id -> Logprob, of the sampled token and the likeliest ones."""
        ranks = [entry.sampled_rank, *range(1, len(entry.token_ids))]
        return {
            token_id: Logprob(logprob, rank, self._decode(token_id))
            for token_id, logprob, rank in zip(
                reversed(entry.token_ids), reversed(entry.logprobs), reversed(ranks), strict=True
            )
        }

    def _decode(self, token_id: int) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode([token_id])
