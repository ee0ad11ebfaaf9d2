"""How does text become a sequence?

The InputProcessor turns a prompt into token ids, refuses what would fail later, and makes a
Sequence:

    "Once upon a time", SamplingParams(max_tokens=50)
    -> prompt_token_ids [12, 7, 4, 31]      each one in the vocabulary
       max_tokens min(50, what fits)        in max_model_len and in the whole KV cache
       stop_token_ids {1}                   the model's EOS tokens and the request's own
       seed, seq_id                         drawn here: a seed fixes the random stream, in any batch

A prompt is a string, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}; a dict may
have a "cache_salt". A prompt is tokenized in the thread of the caller, so a long one stops no step.

Left out: images and sound, encoder-decoder prompts, prompt embeddings.

vLLM: vllm/inputs/preprocess.py (V0); vllm/v1/engine/input_processor.py (0.32).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from numbers import Integral
from typing import Any

from nanoserve.config import EngineConfig
from nanoserve.models.config import ModelConfig
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import RequestMetrics, Sequence

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "type")


class InputProcessor:
    """Prompts and parameters in, checked Sequences out. Safe to call from several threads at once.

    Invariant: a returned Sequence can run to its end. Its token ids are in the vocabulary, prompt
    and output fit into the KV cache, and the output has a limit.
    """

    can_constrain = False  # True: a request may say what form its output has

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Any | None,
        num_kv_blocks: int,
        sequence_cls: type[Sequence] = Sequence,
    ) -> None:
        self.config, self.model_config, self.tokenizer = config, model_config, tokenizer
        num_slots = num_kv_blocks * config.block_size  # tokens that the KV cache holds
        limits = (config.max_model_len, "max_model_len"), (num_slots, "the size of the KV cache")
        self.capacity, self.limit = min(limits)
        self.sequence_cls = sequence_cls
        self._lock, self._next_seq_id = threading.Lock(), 0
        self._seeds = random.Random(config.seed)

    def process(
        self,
        request_id: str,
        prompt: Any,
        sampling_params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Sequence:
        """A Sequence for one request, with a clone of its parameters. Raises ValueError or
        TypeError for a request that this engine can never run to its end."""
        text, token_ids, salt = self.read_prompt(prompt)
        cache_salt = salt or cache_salt
        if not isinstance(request_id, str) or not isinstance(cache_salt, str | None):
            raise TypeError(f"request_id {request_id!r}, cache_salt {cache_salt!r}: both are str.")
        if not isinstance(priority, int):
            raise TypeError(f"priority must be an int, got {priority!r}.")
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {sampling_params!r}.")
        params = sampling_params.clone()
        self.check_sampling(params)
        room = self.check_prompt(token_ids)
        stop_token_ids, eos_token_id = frozenset(params.stop_token_ids or ()), None
        if not params.ignore_eos:
            stop_token_ids |= self.model_config.eos_token_ids
            eos_token_id = getattr(self.tokenizer, "eos_token_id", None)
        return self.sequence_cls(
            seq_id=self.take_seq_ids(params.n),
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=params,
            max_tokens=min(params.max_tokens or room, room),
            stop_token_ids=stop_token_ids,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            metrics=RequestMetrics(arrival_time=time.time()),
            eos_token_id=eos_token_id,
            prompt=text,
            priority=priority,
            extra_keys=cache_salt,
            bad_word_ids=self._tokenize_bad_words(params.bad_words or ()),
            reads_output=bool(params.bad_words or params.logits_processors),
            num_pending_forks=min(params.n, self.config.max_num_seqs) - 1,
        )

    def read_prompt(self, prompt: Any) -> tuple[str | None, list[int], str | None]:
        """Text, token ids and cache salt of a prompt."""
        prompt = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if unknown := [name for name in prompt if name not in PROMPT_KEYS and prompt[name]]:
            raise ValueError(f"a prompt has {unknown}; allowed: {', '.join(PROMPT_KEYS)}.")
        if token_ids is None:
            is_text = isinstance(text, str)
            text, token_ids = (text, self.tokenize(text)) if is_text else (None, text)
        return text, as_token_ids(token_ids), prompt.get("cache_salt")

    def check_prompt(self, token_ids: list[int]) -> int:
        """How many tokens the output may have. Raises ValueError if there is no room for one."""
        if not token_ids:
            raise ValueError("the prompt is empty: it has no tokens. Give at least one token.")
        self.check_vocabulary(token_ids, "the prompt")
        if (room := self.capacity - len(token_ids)) < 1:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens; with one output token that is more than "
                f"{self.capacity}, {self.limit}. Shorten it, or raise this limit."
            )
        return room

    def take_seq_ids(self, number: int) -> int:
        """The first of so many new ids."""
        with self._lock:
            first, self._next_seq_id = self._next_seq_id, self._next_seq_id + number
        return first

    def tokenize(self, text: str, **options: Any) -> list[int]:
        """Token ids of a text; `options` are those of the tokenizer, such as add_special_tokens.
        Raises ValueError if there is no tokenizer, or if it fails."""
        tokenizer = self.require_tokenizer("a text prompt")
        try:
            return tokenizer.encode(text, **options)
        except Exception as error:  # such as half of a surrogate pair
            raise ValueError(f"the tokenizer cannot encode {text[:50]!r}: {error}") from error

    def check_vocabulary(self, token_ids: Collection[int], where: str) -> None:
        """Raise ValueError for a token id that the model does not have."""
        last = self.model_config.vocab_size - 1
        if wrong := [each for each in token_ids if not 0 <= each <= last][:1]:
            raise ValueError(f"{where}: token id {wrong[0]} is out of range; allowed: 0 to {last}.")

    def render_chat(self, messages: Seq[Any], **options: Any) -> dict[str, Any]:
        """The prompt of a conversation, made by the tokenizer's chat template, which gets the
        `options`. The text has its special tokens already."""
        render = self.require_tokenizer("chat").apply_chat_template
        try:
            joined = [{**each, "content": join_parts(each.get("content"))} for each in messages]
            text = render(joined, tokenize=False, **options)
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the chat template cannot render {messages!r}: {error}") from error
        return {"prompt": text, "prompt_token_ids": self.tokenize(text, add_special_tokens=False)}

    def require_tokenizer(self, what: str) -> Any:
        """The tokenizer. Raises ValueError if the checkpoint has none."""
        if self.tokenizer is None:
            message = f"{what} needs a tokenizer, and {self.model_config.path} has none."
            raise ValueError(f"{message} Give prompts as token ids, or LLM(tokenizer=...).")
        return self.tokenizer

    def check_sampling(self, params: SamplingParams) -> None:
        """Refuse values that this engine or model does not allow."""
        if params.structured_outputs is not None and not self.can_constrain:
            raise ValueError("outputs cannot be constrained: this part of nanoserve is missing.")
        if params.stop:
            self.require_tokenizer("a stop string")
        vocab_size = self.model_config.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self.check_vocabulary(getattr(params, name) or (), name)
        most = self.config.max_logprobs if self.config.max_logprobs >= 0 else vocab_size
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(params, name) or 0
            if (vocab_size if number == -1 else number) > min(most, vocab_size):
                raise ValueError(f"{name} is {number}; max_logprobs of this engine is {most}.")

    def _tokenize_bad_words(self, words: Seq[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that spell these words, at the beginning of a text and within it.

        vLLM's rule: the spelling after a space counts only if it has as many tokens as the spelling
        alone and begins with another token.
        """
        spellings: list[tuple[int, ...]] = []
        for word in words:
            text = word.lstrip()
            alone, after_space = (
                tuple(self.tokenize(each, add_special_tokens=False)) for each in (text, " " + text)
            )
            spellings.append(alone)
            if len(after_space) == len(alone) and after_space[0] != alone[0]:
                spellings.append(after_space)
        return tuple(filter(None, spellings))


def join_parts(content: Any) -> Any:
    """[{"type": "text", "text": "Hi"}, ...] -> "Hi...". Raises ValueError for an image."""
    if not isinstance(content, list):
        return content
    if other := [part.get("type") for part in content if "text" not in part]:
        raise ValueError(f"this content is {other[0]!r}; nanoserve reads text only.")
    return "".join(part["text"] for part in content)


def as_token_ids(given: Any) -> list[int]:
    """A new list of Python ints, of a list, an array or a tensor. Raises TypeError for others."""
    items = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(items, Seq) or isinstance(items, (str, bytes)):
        raise TypeError(f"a prompt must be a string, token ids, or a dict, got {given!r}.")
    if not all(isinstance(item, Integral) and not isinstance(item, bool) for item in items):
        raise TypeError("token ids must be ints.")
    return list(map(int, items))
