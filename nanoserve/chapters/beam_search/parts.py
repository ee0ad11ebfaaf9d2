"""What does beam search change in the engine?

llm         has beam_search
sequence    a beam's next step depends on all beams
scheduler   can fork a beam; a beam gets no drafts
request     BeamSearch, in the place of a Request: an update is a choice of beams
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from nanoserve.config import check_option
from nanoserve.engine import LLMEngine
from nanoserve.llm import LLM
from nanoserve.output_processor import Request, name_logprobs
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Logprob, Sequence, SequenceStatus, SequenceUpdate

MOST_CANDIDATES = 2**24  # of one search, over all its steps: about 240 bytes each


@dataclass
class BeamSearchParams:
    """The settings of a beam search, with vLLM's names and order."""

    beam_width: int  # beams kept, and results given; at most half of the engine's max_logprobs
    max_tokens: int  # output tokens at most
    ignore_eos: bool = False  # go on past end-of-sequence tokens
    temperature: float = 0.0  # changes nothing, as in vLLM: beams are ranked before temperature
    length_penalty: float = 1.0  # above 0: long results rank higher; 0: by log-probability alone
    include_stop_str_in_output: bool = False  # changes nothing: there are no stop strings
    skip_special_tokens: bool = True  # leave special tokens out of the texts

    def __post_init__(self) -> None:
        check_option("beam_width", self.beam_width, int)
        check_option("max_tokens", self.max_tokens, int)
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


@dataclass
class BeamSearchOutput:
    """The best beams, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class Beam:
    """A beam, the sequence that computes it, and its candidates for the next token."""

    beam: BeamSearchSequence
    sequence: Sequence
    candidates: dict[int, Logprob] = field(default_factory=dict)  # by token id, likeliest first

    def extend(self, token_id: int) -> BeamSearchSequence:
        """The beam with one more token, which is one of its candidates."""
        return replace(
            self.beam,
            tokens=[*self.beam.tokens, token_id],
            logprobs=[*self.beam.logprobs, self.candidates],
            cum_logprob=self.beam.cum_logprob + self.candidates[token_id].logprob,
        )


@dataclass(eq=False)
class BeamSequence(Sequence):
    is_beam: bool = False

    @property
    def needs_sync(self) -> bool:
        return self.is_beam or super().needs_sync


class BeamScheduler(Scheduler):
    def fork_beam(self, parent: Sequence, child: Sequence, is_last: bool) -> None:
        """Let `child` go on where `parent` is, on its blocks if it still holds them."""
        is_running = parent.status is SequenceStatus.RUNNING
        if is_running:
            self.block_manager.fork(parent, child)
        if is_last:
            self.finish(parent.seq_id, SequenceStatus.FINISHED_STOPPED)
        if is_running and self.has_seq_slot(child):
            self.sequences[child.seq_id] = child
            self.start_running(child)
            return
        if is_running:
            self.block_manager.free(child)
            child.num_computed_tokens = 0
        self.add(child)

    def num_next_drafts(self, seq: Sequence, num_tokens: int) -> int:
        """Of SpeculativeScheduler, if it is in the stack: a beam gets no drafts."""
        return 0 if seq.is_beam else super().num_next_drafts(seq, num_tokens)


class BeamSearch(Request):
    """The search of one prompt.

    Invariant: between steps every beam has one unfinished sequence in the scheduler, unless the
    search waits for a beam that was preempted.
    """

    def __init__(
        self, root: Sequence, params: BeamSearchParams, engine: LLMEngine, lora: Any
    ) -> None:
        super().__init__(root, None)
        root.is_beam, self.params, self.engine = True, params, engine
        self.scheduler, eos = engine.scheduler, engine.model_config.eos_token_ids
        self.eos_token_ids = frozenset() if params.ignore_eos else eos
        given = {"prompt": root.prompt, "cache_salt": root.extra_keys}
        orig = {"type": "token", "prompt_token_ids": root.prompt_token_ids}
        orig |= {key: value for key, value in given.items() if isinstance(value, str)}
        first = BeamSearchSequence(orig, list(root.token_ids), [], lora)
        self.beams = {root.seq_id: Beam(first, root)}
        self.completed: list[BeamSearchSequence] = []
        self.error: str | None = "the search was aborted"  # until it has finished

    @property
    def sequences(self) -> list[Sequence]:
        if not hasattr(self, "beams"):  # while it is built
            return super().sequences
        return [beam.sequence for beam in list(self.beams.values())]  # any thread may ask

    @property
    def is_finished(self) -> bool:
        return not self.beams

    def process(self, updates: list[SequenceUpdate], finish: Any) -> list[Any]:
        """Add each updated beam's candidates; choose the next beams when all have candidates."""
        for update in updates:
            [token] = update.tokens
            self.beams[update.sequence.seq_id].candidates = name_logprobs(token.logprobs, None, [])
        if all(beam.candidates for beam in self.beams.values()):
            self.advance()
            return []
        # A beam was preempted. Those that wait for it give their blocks back, because it may need
        # them; what they computed stays in the prefix cache.
        for beam in self.beams.values():
            if beam.candidates:
                self.scheduler.finish(beam.sequence.seq_id, SequenceStatus.FINISHED_ABORTED)
        return []

    def fail(self, message: str) -> list[Any]:
        self.error, self.beams = message, {}
        return []

    def advance(self) -> None:
        """Choose the next beams: every beam has candidates."""
        children: dict[int, list[BeamSearchSequence]] = {seq_id: [] for seq_id in self.beams}
        for parent, child in self.select():
            if len(child.tokens) - self.root.num_prompt_tokens >= self.root.max_tokens:
                self.completed.append(child)
            else:
                children[parent.sequence.seq_id].append(child)
        parents, self.beams = self.beams, {}
        for seq_id, successors in children.items():  # first free blocks
            if not successors:
                self.scheduler.finish(seq_id, SequenceStatus.FINISHED_STOPPED)
        for seq_id, successors in children.items():
            parent = parents[seq_id].sequence
            for child in successors:
                sequence = replace(
                    parent.make_branch(0),
                    seq_id=self.engine.input_processor.take_seq_ids(1),
                )
                sequence.token_ids = list(child.tokens)
                self.scheduler.fork_beam(parent, sequence, child is successors[-1])
                self.beams[sequence.seq_id] = Beam(child, sequence)
        self.error = self.error if self.beams else None

    def select(self) -> list[tuple[Beam, BeamSearchSequence]]:
        """Complete the candidates that end in EOS; return the best of the others. Only these become
        beams: there may be millions of candidates."""
        others: list[tuple[float, Beam, int]] = []
        for parent in self.beams.values():
            scale = (len(parent.beam.tokens) + 1) ** self.params.length_penalty
            for token_id, candidate in parent.candidates.items():
                if token_id in self.eos_token_ids:
                    self.completed.append(replace(parent.extend(token_id), finish_reason="stop"))
                else:
                    cum_logprob = parent.beam.cum_logprob + candidate.logprob
                    others.append((cum_logprob / scale, parent, token_id))
        self.completed = self.rank()
        others.sort(key=lambda other: other[0], reverse=True)
        return [(beam, beam.extend(token)) for _, beam, token in others[: self.params.beam_width]]

    def rank(self) -> list[BeamSearchSequence]:
        """The best of the completed beams."""
        return sorted(self.completed, key=self.score, reverse=True)[: self.params.beam_width]

    def score(self, beam: BeamSearchSequence) -> float:
        """Cumulative log-probability over length ** length_penalty."""
        length = len(beam.tokens) - (beam.tokens[-1] in self.eos_token_ids)
        return beam.cum_logprob / length**self.params.length_penalty

    def get_output(self) -> BeamSearchOutput:
        """The best beams, with their texts. Raises RuntimeError if the search failed."""
        if self.error is not None:
            raise RuntimeError(f"beam search {self.request_id!r} failed: {self.error}.")
        ranked, tokenizer = self.rank(), self.engine.tokenizer
        for beam in ranked if tokenizer is not None else ():
            skip = self.params.skip_special_tokens
            beam.text = tokenizer.decode(beam.tokens, skip_special_tokens=skip)
        return BeamSearchOutput(ranked)


class BeamLLM(LLM):
    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The params.beam_width likeliest continuations of each prompt, best first."""
        vocab_size, most = self.engine.model_config.vocab_size, self.engine.config.max_logprobs
        num_logprobs = min(2 * params.beam_width, vocab_size)
        if 0 <= most < num_logprobs:
            raise ValueError(f"beam_width is {params.beam_width}; allowed here: up to {most // 2}.")
        how = SamplingParams(
            temperature=0,
            max_tokens=params.max_tokens,
            ignore_eos=True,  # the search ends beams, not the scheduler
            logprobs=num_logprobs,
            detokenize=False,
        )
        each = {} if lora_request is None else {"lora_request": lora_request}
        kind = RequestOutputKind.FINAL_ONLY
        searches = []
        for request in self.make_requests(prompts, how, each, kind):
            if params.beam_width * num_logprobs * request.root.max_tokens > MOST_CANDIDATES:
                raise ValueError("the search may keep too many candidates: lower beam_width.")
            searches.append(BeamSearch(request.root, params, self.engine, lora_request))
        limit = concurrency_limit or max(1, len(searches))
        for first in tqdm(range(0, len(searches), limit), "Beam search", disable=not use_tqdm):
            for _ in self.run_requests(searches[first : first + limit]):
                raise AssertionError("a beam search hands out no RequestOutput")
        return [search.get_output() for search in searches]


PARTS = {"llm_cls": BeamLLM, "sequence_cls": BeamSequence, "scheduler_cls": BeamScheduler}
