"""Which continuations are likeliest as a whole?

Beam search keeps the beam_width likeliest texts instead of one. After each step every beam brings
its 2 * beam_width likeliest next tokens as candidates. The best of all candidates become the next
beams; candidates that end in an EOS token are completed. On top of fork this costs no copying: a
beam with two successors is forked, a beam without one is finished, and all beams share the blocks
of their common beginning. beam_width 2:

    step 1          step 2                      block tables
    the -> cat      the cat -> sat  0.40  *     beam 0: [7, 2]   (fork of "the cat")
                    the cat -> ran  0.30  *     beam 1: [7, 4]   (fork of "the cat")
    a   -> dog      a dog   -> ran  0.20        finished: its blocks are free again

The rule is vLLM's: beams are ranked by cumulative log-probability / length ** length_penalty. The
length counts the prompt too, but not the EOS token.

This chapter is a consumer of a request's updates (output_processor.RequestConsumer). The engine
does not know this chapter. Without this file LLM.beam_search has no parameters to be called with;
everything else works as before.

Left out: stop strings and structured output.

vLLM: vllm/beam_search.py, entrypoints/llm.py (V0); vllm/entrypoints/generate/beam_search/ (V1).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from math import isqrt
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from nanoserve.exceptions import (
    VLLMValidationError,
    as_validation_error,
    brief,
    explain_unknown,
)
from nanoserve.inputs import PromptType, as_python, attach
from nanoserve.logger import output_stream
from nanoserve.logprobs import Logprob, name_logprobs
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.sequence import Sequence, SequenceStatus, SequenceUpdate

if TYPE_CHECKING:
    from nanoserve.engine import LLMEngine
    from nanoserve.extras.lora.request import LoRARequest
    from nanoserve.llm import LLM

MOST_BEAMS = 16384  # vLLM's limit, as that of n
MOST_CANDIDATES = 2**24  # of one search, over all its steps: about 240 bytes each


@explain_unknown({})
@dataclass
class BeamSearchParams:
    """The settings of a beam search, with vLLM's names and order. Raises VLLMValidationError, a
    ValueError, for a value that is not allowed. A search has a copy, which is checked again."""

    beam_width: int  # beams kept, and results given; at most half of the engine's max_logprobs
    max_tokens: int  # output tokens at most
    ignore_eos: bool = False  # go on past end-of-sequence tokens
    temperature: float = 0.0  # changes nothing, as in vLLM: beams are ranked before temperature
    length_penalty: float = 1.0  # above 0: long results rank higher; 0: by log-probability alone
    include_stop_str_in_output: bool = False  # changes nothing: there are no stop strings
    structured_outputs: None = None  # no beam has a grammar
    skip_special_tokens: bool = True  # leave special tokens out of the texts
    watermarking: bool | None = None  # not here

    def __post_init__(self) -> None:
        for each in fields(self):
            setattr(self, each.name, as_python(getattr(self, each.name)))
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                self._refuse(name, "ints of 1 or more")
        if self.beam_width > MOST_BEAMS:
            self._refuse("beam_width", f"1 to {MOST_BEAMS}")
        self._check_number("length_penalty", -10, 10, "-10 to 10 (0: log-probability alone)")
        self._check_number("temperature", 0, 3.4e38, "0 or more")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "True or False")
        if self.structured_outputs is not None:
            self._refuse("structured_outputs", "None; a beam search obeys no grammar")
        if self.watermarking:
            self._refuse("watermarking", "None or False; nanoserve has no watermarking")

    def _check_number(self, name: str, low: float, high: float, allowed: str) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            self._refuse(name, allowed)

    def _refuse(self, name: str, allowed: str) -> None:
        value = getattr(self, name)
        message = f"{name} is {brief(value)}; allowed: {allowed}."
        raise VLLMValidationError(message, parameter=name, value=value)

    def check_size(self, max_logprobs: int, vocab_size: int, max_tokens: int) -> None:
        """Raise ValueError if a search is wider than the engine allows. The first limit is vLLM's:
        each beam asks for 2 * beam_width logprobs.

        max_logprobs: the engine's, -1: no limit; max_tokens: output tokens that fit, 0: not known.
        """
        num_logprobs = min(2 * self.beam_width, vocab_size)
        num_candidates = self.beam_width * num_logprobs * max_tokens
        if 0 <= max_logprobs < num_logprobs:
            fits = max_logprobs // 2
            reason = f"Build the engine with max_logprobs={num_logprobs} or more (-1: no limit)."
        elif num_candidates > MOST_CANDIDATES:
            fits = isqrt(MOST_CANDIDATES // (2 * max_tokens))
            reason = f"With {max_tokens} tokens it may keep {num_candidates} candidates in memory."
        else:
            return
        message = f"beam_width is {self.beam_width}; allowed here: up to {fits}. {reason}"
        raise VLLMValidationError(message, parameter="beam_width", value=self.beam_width)

    def sampling_params(self, vocab_size: int) -> SamplingParams:
        """How each beam runs: greedily, with its candidates as logprobs."""
        return SamplingParams(
            temperature=0,
            max_tokens=self.max_tokens,
            ignore_eos=True,  # the search ends beams, not the scheduler
            logprobs=min(2 * self.beam_width, vocab_size),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def search(
        self,
        llm: LLM,
        prompts: list[PromptType],
        concurrency_limit: int | None,
        use_tqdm: bool,
        lora_requests: list[LoRARequest | None],
    ) -> list[BeamSearchOutput]:
        """What LLM.beam_search does. Raises ValueError or TypeError for a prompt that cannot be
        served, RuntimeError if a search fails or is aborted."""
        searches = [
            BeamSearch(llm.new_request_id(), prompt, self, llm.engine, lora_request)
            for prompt, lora_request in zip(prompts, lora_requests, strict=True)
        ]
        limit = concurrency_limit or max(1, len(searches))
        starts = range(0, len(searches), limit)
        for first in tqdm(starts, "Beam search", file=output_stream()) if use_tqdm else starts:
            for _ in llm.run_requests(searches[first : first + limit]):
                raise AssertionError("a beam search hands out no RequestOutput")
        return [search.get_output() for search in searches]


@dataclass
class BeamSearchSequence:
    """One beam: prompt and output. The fields and their order are vLLM's."""

    orig_prompt: dict[str, Any]  # {"type": "token", "prompt_token_ids": [...]}, a text, a salt
    tokens: list[int]  # of prompt and output
    logprobs: list[dict[int, Logprob]]  # per output token: its candidates
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    text: str | None = None  # of prompt and output, filled in at the end
    finish_reason: str | None = None  # "stop" if the beam ended in an EOS token
    stop_reason: None = None  # there are no stop strings


@dataclass
class BeamSearchOutput:
    """The best beams, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class _Beam:
    """A beam, the sequence that computes it, and its candidates for the next token."""

    beam: BeamSearchSequence
    sequence: Sequence
    candidates: dict[int, Logprob] = field(default_factory=dict)  # by token id, likeliest first


class BeamSearch:
    """The search of one prompt: the consumer of its beams' updates.

    Invariant: between steps every beam has one unfinished sequence in the scheduler, unless the
    search waits for a beam that was preempted.
    """

    def __init__(
        self,
        request_id: str,
        prompt: PromptType,
        params: BeamSearchParams,
        engine: LLMEngine,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Raises ValueError or TypeError if the search cannot be served."""
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be BeamSearchParams, got {brief(params)}.")
        params = replace(params)
        model_config, max_logprobs = engine.model_config, engine.config.max_logprobs
        vocab_size = model_config.vocab_size
        params.check_size(max_logprobs, vocab_size, max_tokens=0)
        sampling_params = params.sampling_params(vocab_size)
        root = engine.input_processor.process(request_id, prompt, sampling_params)
        params.check_size(max_logprobs, vocab_size, root.max_tokens)
        root.always_sync = True
        attach(engine, root, lora_request)
        self.request_id = request_id
        self.params = params
        self.tokenizer = engine.tokenizer
        self.scheduler = engine.scheduler
        self.next_seq_id = engine.input_processor.next_seq_ids
        self.eos_token_ids = frozenset() if params.ignore_eos else model_config.eos_token_ids
        self.num_prompt_tokens = root.num_prompt_tokens
        self.max_tokens = root.max_tokens  # what fits
        given = {"prompt": root.prompt, "cache_salt": root.cache_salt}
        orig_prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": root.prompt_token_ids}
        orig_prompt |= {key: value for key, value in given.items() if value is not None}
        beam = BeamSearchSequence(orig_prompt, list(root.token_ids), [], lora_request)
        self.beams = {root.seq_id: _Beam(beam, root)}
        self.completed: list[BeamSearchSequence] = []
        self.error: str | None = "the search was aborted"  # until it has finished

    # -- the consumer of updates --

    @property
    def sequences(self) -> list[Sequence]:
        return [beam.sequence for beam in list(self.beams.values())]  # any thread may ask

    @property
    def is_finished(self) -> bool:
        return not self.beams

    def process(self, updates: list[SequenceUpdate]) -> None:
        """Add each updated beam's candidates; choose the next beams when all have candidates."""
        if not all(update.logprobs for update in updates):  # one beam was aborted: all end
            for sequence in self.sequences:
                self.scheduler.finish(sequence.seq_id, SequenceStatus.FINISHED_ABORTED)
            self.beams = {}
            return
        for update in updates:
            [logprobs] = update.logprobs
            self.beams[update.sequence.seq_id].candidates = name_logprobs(logprobs, None)
        self.advance()

    def fail(self, message: str) -> None:
        """The search has ended with an error."""
        self.error = message

    # -- the search --

    def advance(self) -> None:
        """Choose the next beams, if every beam has candidates.

        Otherwise a beam was preempted. The beams that wait for it give their blocks back, because
        it may need them; what they computed stays in the prefix cache.
        """
        if not all(beam.candidates for beam in self.beams.values()):
            for beam in self.beams.values():
                if beam.candidates:
                    self.scheduler.finish(beam.sequence.seq_id, SequenceStatus.FINISHED_ABORTED)
            return
        children: dict[int, list[BeamSearchSequence]] = {seq_id: [] for seq_id in self.beams}
        for parent, child in self._select():
            if len(child.tokens) - self.num_prompt_tokens >= self.max_tokens:
                self.completed.append(child)
            else:
                children[parent.sequence.seq_id].append(child)
        parents, self.beams = self.beams, {}
        for seq_id, successors in children.items():  # first free blocks
            if not successors:
                self.scheduler.finish(seq_id, SequenceStatus.FINISHED_STOPPED)
        for seq_id, successors in children.items():
            for child in successors:
                is_last = child is successors[-1]
                sequence = self._fork(parents[seq_id].sequence, child.tokens, ends_parent=is_last)
                self.beams[sequence.seq_id] = _Beam(child, sequence)
        if not self.beams:
            self.error = None

    def get_output(self) -> BeamSearchOutput:
        """The best of all completed beams, with their texts. Raises RuntimeError if the search
        failed."""
        if self.error is not None:
            raise RuntimeError(f"beam search {brief(self.request_id)} failed: {self.error}.")
        ranked = sorted(self.completed, key=self.score, reverse=True)[: self.params.beam_width]
        if self.tokenizer is None:
            return BeamSearchOutput(ranked)
        skip = self.params.skip_special_tokens
        for beam in ranked:
            with as_validation_error("the tokenizer cannot decode", beam.tokens):
                beam.text = self.tokenizer.decode(beam.tokens, skip_special_tokens=skip)
        return BeamSearchOutput(ranked)

    def score(self, beam: BeamSearchSequence) -> float:
        """Cumulative log-probability over length ** length_penalty."""
        length = len(beam.tokens) - (beam.tokens[-1] in self.eos_token_ids)
        return beam.cum_logprob / length**self.params.length_penalty

    def _select(self) -> list[tuple[_Beam, BeamSearchSequence]]:
        """Complete the candidates that end in EOS; return the best of the others. Only these become
        beams: there may be millions of candidates."""
        others: list[tuple[float, _Beam, int]] = []
        for parent in self.beams.values():
            scale = (len(parent.beam.tokens) + 1) ** self.params.length_penalty
            for token_id, candidate in parent.candidates.items():
                if token_id in self.eos_token_ids:
                    child = _extend(parent, token_id)
                    child.finish_reason = "stop"
                    self.completed.append(child)
                else:
                    cum_logprob = parent.beam.cum_logprob + candidate.logprob
                    others.append((cum_logprob / scale, parent, token_id))
        width = self.params.beam_width
        self.completed = sorted(self.completed, key=self.score, reverse=True)[:width]
        others.sort(key=lambda other: other[0], reverse=True)
        return [(parent, _extend(parent, token_id)) for _, parent, token_id in others[:width]]

    def _fork(self, parent: Sequence, token_ids: list[int], ends_parent: bool) -> Sequence:
        """A sequence of these tokens, on the parent's blocks if the parent still holds them."""
        child = replace(
            parent,
            seq_id=self.next_seq_id(),
            status=SequenceStatus.WAITING,
            num_computed_tokens=0,
            num_output_placeholders=0,
            metrics=replace(parent.metrics),
            block_hashes=[],
        )
        child.token_ids = list(token_ids)
        self.scheduler.add_fork(parent, child, ends_parent)
        return child


def _extend(parent: _Beam, token_id: int) -> BeamSearchSequence:
    """The beam with one more token, which is one of its candidates."""
    return replace(
        parent.beam,
        tokens=[*parent.beam.tokens, token_id],
        logprobs=[*parent.beam.logprobs, parent.candidates],
        cum_logprob=parent.beam.cum_logprob + parent.candidates[token_id].logprob,
    )
