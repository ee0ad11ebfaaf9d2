"""What must be true of a request before it is queued?

The InputProcessor turns a prompt into token ids, refuses what would fail later, and makes a
Sequence:

    "Once upon a time", SamplingParams(max_tokens=50)
    -> prompt_token_ids [12, 7, 4, 31]      each one in the vocabulary
       max_tokens min(50, what fits)        in max_model_len and in the whole KV cache
       stop_token_ids {1}                   the model's EOS tokens and the request's own
       seed, seq_id                         drawn here: a seed fixes the random stream, in any batch

Any thread may call the InputProcessor at any time, also while the engine runs a step.

Left out: tokenizers that are not backed by the `tokenizers` library.

vLLM: vllm/inputs/preprocess.py, transformers_utils/tokenizer_group/ (V0);
vllm/v1/engine/input_processor.py (V1).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.exceptions import VLLMValidationError, brief
from nanoserve.guard import read_tokenizer
from nanoserve.inputs import PromptType, check_request, encode, parse_prompt, pick_salt, render_chat
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import RequestMetrics, Sequence

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(folder: Path, explicit: bool) -> Any | None:
    """The tokenizer in `folder`. None if `folder` has none, unless the user named the folder
    (`explicit`). Raises ValueError if the tokenizer cannot be read.
    """
    if not explicit and not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    return read_tokenizer(folder)  # imports torch: not before an engine is built


class InputProcessor:
    """Prompts and parameters in, checked Sequences out. Safe to call from several threads at once.

    Invariant: a returned Sequence can run to its end. Its token ids are in the vocabulary, prompt
    and output fit into the KV cache, and the output has a limit.
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
        self.capacity = min(self.max_model_len, self.kv_capacity)  # tokens of prompt and output
        # Nothing else ever changes. The lock guards the seq_id; a Random is thread-safe.
        self._lock, self._next_seq_id = threading.Lock(), 0
        self._seeds = random.Random(config.seed)

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        sampling_params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Sequence:
        """A Sequence for one request, with a clone of its parameters. Raises ValueError or
        TypeError for a request that this engine can never run to its end."""
        priority = check_request(request_id, priority)
        if not isinstance(sampling_params, SamplingParams):
            given = brief(sampling_params)
            raise TypeError(f"sampling_params must be SamplingParams, got {given}.")
        params = sampling_params.clone()
        self._check_sampling(params)
        components = parse_prompt(prompt)
        cache_salt = pick_salt(components.cache_salt, cache_salt)
        prompt_token_ids = self.tokenize(components)
        room = self._room_after(len(prompt_token_ids))
        bad_word_ids = self._tokenize_bad_words(params.bad_words or ())
        stop_token_ids = frozenset(params.stop_token_ids or ())
        eos_token_id = None
        if not params.ignore_eos:
            stop_token_ids |= self.model_config.eos_token_ids
            eos_token_id = getattr(self.tokenizer, "eos_token_id", None)
        return Sequence(
            seq_id=self.next_seq_ids(params.n),
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=params,
            max_tokens=min(params.max_tokens or room, room),
            stop_token_ids=stop_token_ids,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            metrics=RequestMetrics(arrival_time=time.time(), queued_ts=time.monotonic()),
            eos_token_id=eos_token_id,
            prompt=components.text,
            priority=priority,
            cache_salt=cache_salt,
            bad_word_ids=bad_word_ids,
            num_pending_forks=min(params.n, self.config.max_num_seqs or 1) - 1,
        )

    def next_seq_ids(self, number: int = 1) -> int:
        """Take `number` consecutive seq_ids; return the first."""
        with self._lock:
            first, self._next_seq_id = self._next_seq_id, self._next_seq_id + number
        return first

    def render_chat(
        self, messages: Any, options: dict[str, Any], content_format: str = "auto"
    ) -> str:
        """The text of a conversation, made by the tokenizer's chat template. `options` go to the
        template: add_generation_prompt, tools, ...; content_format: see inputs.render_chat.

        >>> processor.render_chat([{"role": "user", "content": "Hello"}], {})
        "<|im_start|>user\\nHello<|im_end|>\\n"
        """
        tokenizer = self.require_tokenizer("chat")
        return render_chat(tokenizer, messages, options, content_format)

    def tokenize(self, prompt: Any, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, each in the vocabulary. A text from render_chat contains its
        special tokens already (give add_special_tokens=False with it)."""
        text, token_ids, _ = parse_prompt(prompt)
        if token_ids is None:
            tokenizer = self.require_tokenizer("a text prompt")
            token_ids = encode(tokenizer, text or "", self.capacity, add_special_tokens)
        if not token_ids:
            raise VLLMValidationError(
                "the prompt is empty: it has no tokens. Give at least one token."
            )
        self.check_vocabulary(token_ids)
        return token_ids

    def check_vocabulary(self, token_ids: Collection[int], where: str = "") -> None:
        """Raise ValueError for a token id that the model does not have."""
        last = self.model_config.vocab_size - 1
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id <= last:
                raise VLLMValidationError(
                    f"{where}token id {brief(token_id)} is out of range; allowed: 0 to {last} "
                    "(vocab_size - 1)."
                )

    def require_tokenizer(self, what: str) -> Any:
        """The tokenizer. Raises ValueError if the checkpoint has none."""
        if self.tokenizer is None:
            raise VLLMValidationError(
                f"{what} needs a tokenizer, and {self.model_config.path} has none. Give prompts as "
                "token ids, or LLM(tokenizer=...)."
            )
        return self.tokenizer

    def _room_after(self, num_prompt_tokens: int) -> int:
        """The number of output tokens that fit. Raises ValueError if it is 0."""
        if num_prompt_tokens < self.capacity:
            return self.capacity - num_prompt_tokens
        if num_prompt_tokens >= self.max_model_len:
            raise VLLMValidationError(
                f"the prompt has {num_prompt_tokens} tokens; with one output token that is more "
                f"than max_model_len={self.max_model_len}. Shorten it, or raise max_model_len."
            )
        raise VLLMValidationError(
            f"the prompt has {num_prompt_tokens} tokens; with one output token that is more than "
            f"the whole KV cache holds ({self.kv_capacity} tokens). Shorten it, or raise "
            "num_gpu_blocks_override or kv_cache_memory_bytes."
        )

    def _check_sampling(self, params: SamplingParams) -> None:
        """Refuse values that this engine or model does not allow. SamplingParams has checked the
        rest."""
        if params.stop:
            self.require_tokenizer("a stop string")
        vocab_size = self.model_config.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self.check_vocabulary(getattr(params, name) or (), f"{name}: ")
        most = self.config.max_logprobs if self.config.max_logprobs >= 0 else vocab_size
        most = min(most, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(params, name)
            if number is not None and (vocab_size if number == -1 else number) > most:
                raise VLLMValidationError(
                    f"{name} is {brief(number)}; this engine allows {most}. Build it with a larger "
                    "max_logprobs (-1: no limit)."
                )
        if params.prompt_logprobs is not None and self.config.pipeline_parallel_size > 1:
            message = "prompt_logprobs needs an engine with pipeline_parallel_size=1."
            raise VLLMValidationError(message, parameter="prompt_logprobs")

    def _tokenize_bad_words(self, words: Seq[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that spell these words, at the beginning of a text and within it.

        Most tokenizers write a word differently after a space. vLLM's rule: the spelling after a
        space counts only if it has as many tokens as the spelling alone and begins with another
        token. So a word with one token after a space and two tokens alone is forbidden in the
        second spelling only. To forbid both, use logit_bias or a logits processor.
        """
        spellings: list[tuple[int, ...]] = []
        for word in words:
            tokenizer, text = self.require_tokenizer("bad_words"), word.lstrip()
            alone = tuple(encode(tokenizer, text, self.capacity, False, "a bad word"))
            after_space = tuple(encode(tokenizer, " " + text, self.capacity, False, "a bad word"))
            if not alone:
                raise VLLMValidationError(f"bad_words holds {brief(word)}, which has no tokens.")
            self.check_vocabulary(alone + after_space, f"{brief(word)} of bad_words: ")
            spellings.append(alone)
            if len(after_space) == len(alone) and after_space[0] != alone[0]:
                spellings.append(after_space)
        return tuple(spellings)
