"""What must be true of a request before it is queued?

The InputProcessor turns a prompt into token ids, checks whatever could go wrong later, and makes a
Sequence of it:

    "Once upon a time", SamplingParams(max_tokens=50)
    -> prompt_token_ids [12, 7, 4, 31]      each one in the vocabulary
       max_tokens min(50, what fits)        in max_model_len and in the whole KV cache
       stop_token_ids {1}                   the model's EOS tokens and the request's own
       seed, seq_id                         drawn here, so that a seed gives the same text anywhere

Left out: tokenizers that are not backed by the `tokenizers` library.

vLLM: vllm/inputs/preprocess.py, transformers_utils/tokenizer_group/ (V0);
vllm/v1/engine/input_processor.py (V1).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import RequestMetrics, Sequence

Prompt = str | list[int]  # text, or token ids


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


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
        self._next_seq_id = 0
        self._seq_id_lock = threading.Lock()  # requests are made in their callers' threads
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
        if not isinstance(request_id, str) or not request_id:
            raise TypeError(f"request_id must be a non-empty string, got {request_id!r}.")
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {sampling_params!r}.")
        self._check_priority(priority)
        self._check_sampling(sampling_params)
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise TypeError(f"cache_salt must be None or a non-empty string, got {cache_salt!r}.")
        return self.make_sequence(request_id, prompt, sampling_params, priority, cache_salt)

    def make_sequence(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Sequence:
        """A Sequence with parameters that need no check; the prompt is checked here."""
        prompt_token_ids = self.tokenize(prompt)
        room = self._room_after(len(prompt_token_ids))
        stop_token_ids = frozenset(sampling_params.stop_token_ids or ())
        if not sampling_params.ignore_eos:
            stop_token_ids |= self.model_config.eos_token_ids
        seed = sampling_params.seed
        num_branches = sampling_params.n
        return Sequence(
            seq_id=self.next_seq_ids(num_branches),
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=sampling_params,
            max_tokens=min(sampling_params.max_tokens or room, room),
            stop_token_ids=stop_token_ids,
            seed=self._seeds.getrandbits(63) if seed is None else seed,
            metrics=RequestMetrics(arrival_time=time.monotonic()),
            priority=priority,
            cache_salt=cache_salt,
            bad_word_ids=self._tokenize_bad_words(sampling_params.bad_words or ()),
            num_pending_forks=num_branches - 1,
        )

    def next_seq_ids(self, number: int = 1) -> int:
        """Take `number` consecutive seq_ids; return the first."""
        with self._seq_id_lock:
            first, self._next_seq_id = self._next_seq_id, self._next_seq_id + number
        return first

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, each checked to be in the vocabulary."""
        if isinstance(prompt, str):
            tokenizer = self.require_tokenizer("a text prompt")
            try:
                token_ids = tokenizer.encode(prompt)
            except Exception as error:  # a lone surrogate, say
                raise ValueError(f"the tokenizer cannot encode {prompt!r}: {error}.") from error
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
        if params.n > (self.config.max_num_seqs or params.n):
            raise ValueError(
                f"n is {params.n}; this engine runs at most {self.config.max_num_seqs} sequences "
                "at once. Lower n, or raise max_num_seqs."
            )
        vocab_size = self.model_config.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                if token_id >= vocab_size:
                    raise ValueError(
                        f"{name} holds {token_id}; the vocabulary has {vocab_size} tokens: 0 to "
                        f"{vocab_size - 1}."
                    )
        most = self.config.max_logprobs if self.config.max_logprobs >= 0 else vocab_size
        most = min(most, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(params, name)
            if number is not None and (vocab_size if number == -1 else number) > most:
                raise ValueError(
                    f"{name} is {number}; this engine allows {most}. Build it with a larger "
                    "max_logprobs (-1: no limit)."
                )

    def _tokenize_bad_words(self, words: Seq[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that spell these words, at the beginning of a text and within it.

        Most tokenizers write a word differently behind a space. vLLM's rule, and ours: the second
        spelling counts only if it has as many tokens as the first and begins with another one. So
        a word that is one token behind a space and two without it is forbidden only in the latter
        spelling; to forbid both, give " word" as a logit_bias or logits processor.
        """
        spellings: list[tuple[int, ...]] = []
        for word in words:
            encode = self.require_tokenizer("bad_words").encode
            alone = tuple(encode(word.lstrip(), add_special_tokens=False))
            if not alone:
                raise ValueError(f"bad_words holds {word!r}, which has no tokens.")
            behind_space = tuple(encode(" " + word.lstrip(), add_special_tokens=False))
            spellings.append(alone)
            if len(behind_space) == len(alone) and behind_space[0] != alone[0]:
                spellings.append(behind_space)
        return tuple(spellings)
