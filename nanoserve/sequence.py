"""What is a request, and what does one step consist of?

The nouns of the engine, with no behaviour beyond arithmetic on themselves. A Sequence is the
scheduler's own, mutable record of one request; everything that leaves the control plane for a
step is an immutable value made of *differences*, so that a step can be sent to other ranks, can be
in flight while the next is scheduled, and costs the same however long the context is.

One sequence, two counters, one rule. With block_size 4:

    token_ids   [ t0 t1 t2 t3 | t4 t5 ]      num_tokens          = 6
    in KV cache [ t0 t1 t2 t3 |       ]      num_computed_tokens = 4
                                             to do: 6 - 4 = 2 tokens, whatever we call them:
    prefill (nothing computed), chunked prefill (some), decode (all but the last), a prefix-cache
    hit (some computed by another request), a resumed preemption (computed once, then dropped).

Left out: SequenceGroup. V0 bundles the samples of a request into one; V1 and we let them stand
alone and bundle results in the output processor.

vLLM: vllm/sequence.py (V0); vllm/v1/request.py, vllm/v1/core/sched/output.py (V1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from nanoserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanoserve.block_manager import BlockHash


class SequenceStatus(Enum):
    """Where a sequence is in its life: WAITING <-> RUNNING <-> SWAPPED, then one FINISHED_*."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"

    def __init__(self, value: str) -> None:
        # "stop", "length" or "abort" for a finished sequence, else None
        self.finish_reason = value if self.name.startswith("FINISHED") else None


@dataclass
class RequestMetrics:
    """Moments in the life of a request, in seconds of time.monotonic(); None until they come."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    def note_token(self, now: float) -> None:
        """A token has come."""
        if self.first_token_time is None:
            self.first_token_time = now
        self.last_token_time = now

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step."""
        return _difference(self.first_scheduled_time, self.arrival_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return _difference(self.first_token_time, self.arrival_time)

    def inter_token_latency(self, num_output_tokens: int) -> float | None:
        """Mean seconds from one token to the next; None with fewer than two."""
        total = _difference(self.last_token_time, self.first_token_time)
        if total is None or num_output_tokens < 2:
            return None
        return total / (num_output_tokens - 1)


def _difference(later: float | None, earlier: float | None) -> float | None:
    return None if later is None or earlier is None else later - earlier


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way through the scheduler.

    Invariant: 0 <= num_computed_tokens <= num_tokens + num_output_placeholders, and only WAITING
    sequences hold no blocks.

    A request with n > 1 begins as one sequence, its branch 0. When its prompt is computed, branches
    1 .. n - 1 fork off: each has the next seq_id, shares the prompt's blocks and goes its own way.
    """

    seq_id: int  # unique in the engine; the key of everything below the processor
    request_id: str  # the user's name for it
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int  # output tokens at most, what fits already considered
    stop_token_ids: frozenset[int]  # tokens that end it: the model's EOS ids and the user's own
    seed: int  # of its random stream, together with the branch
    metrics: RequestMetrics
    priority: int = 0  # lower runs first, under scheduling_policy="priority"
    cache_salt: str | None = None  # only requests with the same salt share cached blocks
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # token sequences never to complete
    branch: int = 0  # which of the request's n completions this is
    num_pending_forks: int = 0  # branches that are still to fork off this one
    status: SequenceStatus = SequenceStatus.WAITING
    stop_reason: int | str | None = None  # the stop token id or string that ended it, if one did
    token_ids: list[int] = field(init=False)  # prompt, then output
    needs_output_token_ids: bool = field(init=False)  # its sampling looks at what was said before
    num_computed_tokens: int = 0  # tokens whose KV is in the cache, or in flight to it
    num_output_placeholders: int = 0  # tokens that steps in flight will bring: counted, not known
    is_beam: bool = False  # what comes next is chosen by a beam search, from what the step brings
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache when first admitted
    block_hashes: list[BlockHash] = field(default_factory=list)  # of its full blocks, so far

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        params = self.sampling_params
        self.needs_output_token_ids = bool(
            params.has_penalties or self.bad_word_ids or params.logits_processors
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def needs_sync(self) -> bool:
        """True if the next step cannot be launched before this one's tokens are known: the sampler
        looks at them, or what runs next is made of them."""
        return self.needs_output_token_ids or self.is_beam or self.num_pending_forks > 0

    @property
    def blocked_by_in_flight(self) -> bool:
        """True if a step in flight brings what decides about this sequence's next step: perhaps its
        last token, or one it awaits."""
        num_promised = self.num_output_placeholders
        if not num_promised:
            return False
        return self.num_output_tokens + num_promised >= self.max_tokens or self.needs_sync

    def is_ready(self) -> bool:
        """False while something must come first (a grammar compiling, KV still loading; or a token
        that was in flight when the sequence was preempted)."""
        return self.num_output_placeholders == 0


class RequestError(ValueError):
    """One sequence's own doing made a step fail, such as a logits processor that raises."""

    def __init__(self, seq_id: int, message: str) -> None:
        super().__init__(message)
        self.seq_id = seq_id


class NewSequence(NamedTuple):
    """A sequence the runner does not know: new, or back from preemption. Sent in full, once."""

    seq_id: int
    token_ids: tuple[int, ...]  # all known tokens, those generated before a preemption too
    num_prompt_tokens: int
    block_ids: tuple[int, ...]  # its block table so far: cached, forked or swapped-in blocks
    sampling_params: SamplingParams
    stop_token_ids: frozenset[int]
    bad_word_ids: tuple[tuple[int, ...], ...]
    seed: int
    branch: int
    num_samples: int  # tokens to sample of its next logits row: one for itself and each fork


class ScheduledSequence(NamedTuple):
    """What one sequence does in one step: compute tokens [num_computed, + num_scheduled)."""

    seq_id: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    first_new_block: int  # index in its block table from which new_block_ids are to be written
    new_block_ids: list[int]  # usually behind its end; a copied block replaces the last one


BlockPair = tuple[int, int]  # (source, destination)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step, as the scheduler decided it: all that the data plane is told.

    Invariant: each sequence appears at most once, and the runner has been told of it before or is
    told of it in `new_sequences`.
    """

    scheduled: tuple[ScheduledSequence, ...]  # in batch order
    new_sequences: tuple[NewSequence, ...]
    finished_seq_ids: tuple[int, ...]  # the runner may forget these (also: preempted ones)
    total_num_scheduled_tokens: int
    blocks_to_swap_out: tuple[BlockPair, ...] = ()  # (KV block, CPU block): copy before all else
    blocks_to_swap_in: tuple[BlockPair, ...] = ()  # (CPU block, KV block)
    blocks_to_copy: tuple[BlockPair, ...] = ()  # (shared KV block, the writer's own): copy-on-write
    is_restart: bool = False  # the last step failed: the runner forgets all it knows
    needs_sync: bool = False  # the next step cannot be decided before this one's tokens are known

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to execute."""
        return not self.scheduled


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the sampled token first, then the likeliest ones."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampled_rank: int  # 1 for the likeliest token


class ForkSample(NamedTuple):
    """The first token of a branch that forks off."""

    token_id: int
    logprobs: tuple[TokenLogprobs, ...]  # of the one token, if asked for


class PromptLogprobs(NamedTuple):
    """Log-probabilities of prompt tokens [start, start + len(entries))."""

    start: int
    entries: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What came of a step: for each sequence that reached its last token, what was sampled."""

    sampled_token_ids: dict[int, tuple[int, ...]]  # seq_id -> new tokens
    logprobs: dict[int, tuple[TokenLogprobs, ...]]  # only of sequences that asked
    forks: dict[int, tuple[ForkSample, ...]] = field(default_factory=dict)  # branches 1 .. n - 1
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)


class SequenceUpdate(NamedTuple):
    """News of one sequence after a step, from the scheduler to the output processor."""

    sequence: Sequence
    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: PromptLogprobs | None = None
