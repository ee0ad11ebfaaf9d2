"""Which continuations are likeliest as a whole?

Beam search keeps the beam_width likeliest texts instead of one. After each step every beam proposes
its 2 * beam_width likeliest next tokens; of all proposals the best become the next beams, those
that end in an EOS token are completed. On top of fork this costs no copying: a beam that goes on
twice is forked, one that is dropped is finished, and all share the blocks of what they have in
common. beam_width 2:

    step 1          step 2                      block tables
    the -> cat      the cat -> sat  0.40  *     beam 0: [7, 2]   (fork of "the cat")
                    the cat -> ran  0.30  *     beam 1: [7, 4]   (fork of "the cat")
    a   -> dog      a dog   -> ran  0.20        finished: its own blocks are free again

The rule is vLLM's: beams are ranked by cumulative log-probability / length ** length_penalty, where
the length counts the prompt, too, but not the EOS token.

Left out: stop strings and structured output.

vLLM: vllm/beam_search.py, entrypoints/llm.py (V0); vllm/entrypoints/generate/beam_search/ (V1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence, SequenceStatus, SequenceUpdate

if TYPE_CHECKING:
    from collections.abc import Set


@dataclass(frozen=True)
class BeamSearchParams:
    """What a beam search may ask for. Raises ValueError for a value out of range."""

    beam_width: int  # beams kept, and results given
    max_tokens: int  # output tokens at most
    ignore_eos: bool = False  # go on past end-of-sequence tokens
    length_penalty: float = 1.0  # above 0 favours long results; 0 ranks by log-probability alone

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; allowed: ints of 1 or more.")
        value = self.length_penalty
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -10 <= value <= 10:
            raise ValueError(
                f"length_penalty is {value!r}; allowed: -10 to 10 (0 ranks by log-probability "
                "alone)."
            )
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos is {self.ignore_eos!r}; allowed: True or False.")

    def sampling_params(self, vocab_size: int) -> SamplingParams:
        """How each beam is run: greedily, with the proposals as logprobs."""
        return SamplingParams(
            temperature=0,
            max_tokens=self.max_tokens,
            ignore_eos=True,  # the search ends beams, not the scheduler
            logprobs=min(2 * self.beam_width, vocab_size),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


@dataclass(frozen=True)
class BeamSearchSequence:
    """One beam: prompt and output."""

    tokens: list[int]
    cum_logprob: float = 0.0
    text: str | None = None  # of prompt and output, filled in at the end
    finish_reason: str | None = None  # "stop" or "length"


@dataclass(frozen=True)
class BeamSearchOutput:
    """The best beams, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class _Beam:
    """A beam and the sequence that computes it."""

    beam: BeamSearchSequence
    sequence: Sequence
    proposals: dict[int, float] = field(default_factory=dict)  # token id -> log-probability


class BeamSearch:
    """One prompt's search, driven by the engine: `take` every update, then `end_step`.

    Invariant: between steps every live beam has one unfinished sequence in the scheduler, unless
    the search is waiting for beams that were preempted.
    """

    def __init__(
        self,
        root: Sequence,
        params: BeamSearchParams,
        scheduler: Scheduler,
        next_seq_id: Callable[[], int],
        eos_token_ids: Set[int],
    ) -> None:
        root.is_beam = True
        self.params = params
        self.scheduler = scheduler
        self.next_seq_id = next_seq_id
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.num_prompt_tokens = root.num_prompt_tokens
        self.max_tokens = root.max_tokens  # what fits
        self.live = {root.seq_id: _Beam(BeamSearchSequence(list(root.token_ids)), root)}
        self.completed: list[BeamSearchSequence] = []

    def take(self, update: SequenceUpdate) -> None:
        """A beam's sequence has made a step: remember what it proposes."""
        [logprobs] = update.logprobs
        proposals = zip(logprobs.token_ids, logprobs.logprobs, strict=True)
        self.live[update.sequence.seq_id].proposals = dict(proposals)

    def end_step(self) -> bool:
        """Choose the next beams, if all have proposed; True when the search is over.

        Beams that wait for a preempted one give their blocks back meanwhile (the preempted one may
        need just these); what they computed stays in the prefix cache.
        """
        if not all(live.proposals for live in self.live.values()):
            for live in self.live.values():
                if live.proposals:
                    self.scheduler.finish(live.sequence.seq_id, SequenceStatus.FINISHED_ABORTED)
            return False
        children: dict[int, list[BeamSearchSequence]] = {seq_id: [] for seq_id in self.live}
        for parent, beam in self._choose():
            if len(beam.tokens) - self.num_prompt_tokens >= self.max_tokens:
                self.completed.append(replace(beam, finish_reason="length"))
            else:
                children[parent.sequence.seq_id].append(beam)
        parents, self.live = self.live, {}
        for seq_id, beams in children.items():  # first make place
            if not beams:
                self.scheduler.finish(seq_id, SequenceStatus.FINISHED_STOPPED)
        for seq_id, beams in children.items():
            for beam in beams:
                sequence = self._fork(parents[seq_id].sequence, beam.tokens, beam is beams[-1])
                self.live[sequence.seq_id] = _Beam(beam, sequence)
        return not self.live

    def get_output(self) -> BeamSearchOutput:
        """The best of all completed beams."""
        ranked = sorted(self.completed, key=self.score, reverse=True)
        return BeamSearchOutput(ranked[: self.params.beam_width])

    def score(self, beam: BeamSearchSequence) -> float:
        """Cumulative log-probability over length ** length_penalty."""
        length = len(beam.tokens) - (beam.tokens[-1] in self.eos_token_ids)
        return beam.cum_logprob / length**self.params.length_penalty

    def stop(self) -> None:
        """Give the search up: finish whatever it still runs."""
        for seq_id in self.live:
            self.scheduler.finish(seq_id, SequenceStatus.FINISHED_ABORTED)

    def _choose(self) -> list[tuple[_Beam, BeamSearchSequence]]:
        """Of all proposals, complete those that end, and return the best of the others."""
        candidates: list[tuple[_Beam, BeamSearchSequence]] = []
        for parent in self.live.values():
            for token_id, logprob in parent.proposals.items():
                beam = BeamSearchSequence(
                    [*parent.beam.tokens, token_id], parent.beam.cum_logprob + logprob
                )
                if token_id in self.eos_token_ids:
                    self.completed.append(replace(beam, finish_reason="stop"))
                else:
                    candidates.append((parent, beam))
        candidates.sort(key=lambda candidate: self.score(candidate[1]), reverse=True)
        return candidates[: self.params.beam_width]

    def _fork(self, parent: Sequence, token_ids: list[int], ends_parent: bool) -> Sequence:
        """A sequence of these tokens, on the parent's blocks if it still has them."""
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
