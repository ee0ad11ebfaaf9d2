"""What does beam search add to an LLM? One method, on top of generate.

vLLM: vllm/entrypoints/generate/beam_search/offline.py (V1).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from nanoserve.config import check_option
from nanoserve.llm import LLM
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import Logprob, RequestError


@dataclass
class BeamSearchParams:
    """The settings of a beam search; names and order are vLLM's. Raises ValueError or TypeError."""

    beam_width: int  # beams kept, and results given; at most half of the engine's max_logprobs
    max_tokens: int  # output tokens at most
    ignore_eos: bool = False  # go on past end-of-sequence tokens
    temperature: float = 0.0  # changes nothing: beams are ranked by the model's own probabilities
    length_penalty: float = 1.0  # above 0: long results rank higher; 0: by log-probability alone
    include_stop_str_in_output: bool = False  # changes nothing: there are no stop strings
    skip_special_tokens: bool = True  # leave special tokens out of the texts

    def __post_init__(self) -> None:
        check_option("beam_width", self.beam_width, int)
        check_option("max_tokens", self.max_tokens, int)
        check_option("ignore_eos", self.ignore_eos, bool)
        if not -10 <= self.length_penalty <= 10:
            raise ValueError(f"length_penalty is {self.length_penalty}; allowed: -10 to 10.")


@dataclass
class BeamSearchSequence:
    """One beam: prompt and output. The fields and their order are vLLM's."""

    orig_prompt: dict[str, Any]  # {"type": "token", "prompt_token_ids": [...]}, a text, a salt
    tokens: list[int]  # of prompt and output
    logprobs: list[dict[int, Logprob]]  # per output token: its candidates
    lora_request: Any = None
    cum_logprob: float = 0.0
    text: str | None = None  # of prompt and output, filled in at the end
    finish_reason: str | None = None  # "stop" if the beam ended in an EOS token
    stop_reason: None = None  # there are no stop strings

    def extend(self, token_id: int, candidates: dict[int, Logprob]) -> BeamSearchSequence:
        """This beam with one more token, which is one of its candidates."""
        return replace(
            self,
            tokens=[*self.tokens, token_id],
            logprobs=[*self.logprobs, candidates],
            cum_logprob=self.cum_logprob + candidates[token_id].logprob,
        )


@dataclass
class BeamSearchOutput:
    """The best beams, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class Search:
    """The search of one prompt. It has ended when no beam is left."""

    params: BeamSearchParams
    eos_token_ids: frozenset[int]
    max_length: int  # of prompt and output, in tokens
    beams: list[BeamSearchSequence]
    completed: list[BeamSearchSequence] = field(default_factory=list)

    def advance(self, candidates: Seq[dict[int, Logprob]]) -> None:
        """Choose the next beams, of the candidates of each beam."""
        others = []
        for beam, logprobs in zip(self.beams, candidates, strict=True):
            for token_id in logprobs:
                child = beam.extend(token_id, logprobs)
                if token_id in self.eos_token_ids:
                    self.completed.append(replace(child, finish_reason="stop"))
                else:
                    others.append(child)
        self.beams, self.completed = self.best(others), self.best(self.completed)
        if self.beams and len(self.beams[0].tokens) >= self.max_length:
            self.beams, self.completed = [], self.best(self.completed + self.beams)

    def best(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=self.score, reverse=True)[: self.params.beam_width]

    def score(self, beam: BeamSearchSequence) -> float:
        """Cumulative log-probability over length ** length_penalty."""
        length = len(beam.tokens) - (beam.tokens[-1] in self.eos_token_ids)
        return beam.cum_logprob / length**self.params.length_penalty


class BeamLLM(LLM):
    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The params.beam_width likeliest continuations of each prompt, best first.
        `concurrency_limit`: prompts that are searched at a time; None: all. Raises ValueError or
        TypeError for a search that can never be served, RequestError for one that fails."""
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be BeamSearchParams, got {params!r}.")
        engine = self.llm_engine
        num_logprobs = min(2 * params.beam_width, engine.model_config.vocab_size)
        if 0 <= engine.config.max_logprobs < num_logprobs:
            need = f"beam_width {params.beam_width} needs LLM(max_logprobs={num_logprobs})"
            raise ValueError(f"{need}: so many candidates of each beam.")
        how = SamplingParams(
            temperature=0,
            max_tokens=params.max_tokens,
            ignore_eos=True,  # an EOS token ends a beam, not the request
            logprobs=num_logprobs,
            detokenize=False,
        )
        searches = self.make_searches(prompts, params, how, lora_request)
        how, limit = replace(how, max_tokens=1), concurrency_limit or max(1, len(searches))
        for start in tqdm(range(0, len(searches), limit), "Beam search", disable=not use_tqdm):
            while group := [each for each in searches[start : start + limit] if each.beams]:
                self.advance_all(group, how)
        if (tokenizer := engine.tokenizer) is not None:
            for beam in (beam for search in searches for beam in search.completed):
                skip = params.skip_special_tokens
                beam.text = tokenizer.decode(beam.tokens, skip_special_tokens=skip)
        return [BeamSearchOutput(search.completed) for search in searches]

    def make_searches(
        self, prompts: Any, params: BeamSearchParams, how: SamplingParams, lora_request: Any
    ) -> list[Search]:
        """A search for each prompt. The prompts are tokenized and checked as those of requests."""
        roots = [request.root for request in self.make_requests(prompts, how)]
        is_list = isinstance(lora_request, (list, tuple))
        loras = lora_request if is_list else [lora_request] * len(roots)
        eos = frozenset() if params.ignore_eos else self.llm_engine.model_config.eos_token_ids
        searches = []
        for root, lora in zip(roots, loras, strict=True):
            given = {"prompt": root.prompt, "cache_salt": root.extra_keys}
            prompt = {"type": "token", "prompt_token_ids": root.prompt_token_ids}
            prompt |= {key: value for key, value in given.items() if value is not None}
            beam = BeamSearchSequence(prompt, list(root.prompt_token_ids), [], lora)
            searches.append(Search(params, eos, root.num_tokens + root.max_tokens, [beam]))
        return searches

    def advance_all(self, searches: list[Search], how: SamplingParams) -> None:
        """One token more for all beams of these searches."""
        beams = [beam for search in searches for beam in search.beams]
        prompts = [{**beam.orig_prompt, "prompt_token_ids": beam.tokens} for beam in beams]
        loras = [beam.lora_request for beam in beams]
        outputs = iter(self.generate(prompts, how, use_tqdm=False, lora_request=loras))
        for search in searches:
            completions = [next(outputs).outputs[0] for _ in search.beams]
            for failed in (each for each in completions if each.finish_reason == "error"):
                raise RequestError(f"a beam search failed: {failed.stop_reason}.")
            search.advance([completion.logprobs[0] for completion in completions])
