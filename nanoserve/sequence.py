"""What is a request, and what does one step consist of?

The nouns of the engine, with no behaviour beyond arithmetic on their own fields. A Sequence is the
scheduler's own, mutable record of one request. All that leaves the control plane for a step is an
immutable value made of *differences*. So a step can be sent to other ranks, can be in flight while
the next step is scheduled, and costs the same however long the context is.

One sequence, two counters, one rule. With block_size 4:

    token_ids   [ t0 t1 t2 t3 | t4 t5 ]      num_tokens          = 6
    in KV cache [ t0 t1 t2 t3 |       ]      num_computed_tokens = 4
                                             to compute: 6 - 4 = 2 tokens, in every case:
    prefill (nothing computed), chunked prefill (some), decode (all but the last), a prefix-cache
    hit (some computed by another request), a resumed preemption (computed once, then dropped).

*Tokens in flight.* With overlapped steps a token can be sampled on the GPU and not yet known on the
CPU. The control plane counts such tokens in num_output_placeholders, beside token_ids. The runner
writes a placeholder (-1) into its own token ids and counts the placeholder in num_tokens.

*Notes.* A chapter may need more than this: a step carries a note from each active chapter's
scheduler to its runner, and a ModelOutput one back, keyed by the note's class.

vLLM: vllm/sequence.py (V0); vllm/v1/request.py, vllm/v1/core/sched/output.py (V1).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from nanoserve.sampling_params import SamplingParams


def new(kind: Callable[[], Any]) -> Any:
    """A field of a dataclass that begins as a new list, or dict, ..."""
    return field(default_factory=kind)


class RequestError(ValueError):
    """What one request brought cannot be computed: it ends this request, and no other one."""


class EngineDeadError(RuntimeError):
    """No step can run any more: a rank has ended, say. (vLLM: v1/engine/exceptions.py)"""


class SequenceStatus(Enum):
    """Where a sequence is in its life: WAITING <-> RUNNING <-> SWAPPED, then one FINISHED_*."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    def __init__(self, value: str) -> None:
        # "stop", "length", "abort" or "error" for a finished sequence, else None
        self.finish_reason = value if self.name.startswith("FINISHED") else None


@dataclass(eq=False)
class Sequence:
    """One request, or one of its n completions, on its way through the scheduler.

    Invariant: 0 <= num_computed_tokens <= num_tokens + num_output_placeholders, and only WAITING
    and finished sequences hold no blocks.

    A request with n > 1 begins as one sequence, branch 0. When the prompt is computed, branches
    1 .. n - 1 fork off: each gets the next seq_id, shares the prompt's blocks and continues alone.
    (Those beyond max_num_seqs are queued on their own: see output_processor.Request.)
    """

    # What was asked; this never changes.
    seq_id: int  # unique in the engine; the key of everything below the processors
    request_id: str  # the user's name for the request
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int  # output tokens at most; what fits is already considered
    stop_token_ids: frozenset[int]  # tokens that end the output: the model's EOS ids and the user's
    seed: int  # of the random stream, together with the branch
    metrics: RequestMetrics
    eos_token_id: int | None = None  # of stop_token_ids, the one that is not reported as the reason
    prompt: str | None = None  # the text, if it was given
    priority: int = 0  # lower values run first, under scheduling_policy="priority"
    extra_keys: Hashable = None  # sequences share cached blocks only if these are equal (a salt)
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that must never be completed
    reads_output: bool = False  # the sampler reads the output tokens: bad words, logits processors
    branch: int = 0  # which of the request's n completions this is
    # Where the sequence is.
    num_pending_forks: int = 0  # branches that have not forked off this sequence yet
    status: SequenceStatus = SequenceStatus.WAITING
    stop_reason: int | str | None = None  # a stop token, a stop string, or the message of an error
    token_ids: list[int] = field(init=False)  # prompt, then output
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0  # tokens whose KV is in the cache, or in flight to it
    num_output_placeholders: int = 0  # tokens that steps in flight will bring, or at most bring
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache at the first admission
    num_failures: int = 0  # steps that failed, since its last new token
    block_hashes: list[Any] = new(list)  # of its full blocks: BlockManager's own

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that a step can compute next: known ones, and those in flight."""
        return len(self.token_ids) + self.num_output_placeholders - self.num_computed_tokens

    def make_branch(self, branch: int) -> Sequence:
        """Another of the request's n completions, with no output yet. It holds no blocks."""
        return replace(
            self,
            seq_id=self.seq_id - self.branch + branch,
            branch=branch,
            num_pending_forks=0,
            status=SequenceStatus.WAITING,
            num_computed_tokens=0,
            num_output_placeholders=0,
            metrics=replace(self.metrics),
            block_hashes=[],
        )


class NewSequence(NamedTuple):
    """A sequence that the runner does not know: new, or resumed after a preemption. Sent in full,
    once."""

    seq_id: int
    token_ids: tuple[int, ...]  # all known tokens, also those generated before a preemption
    num_prompt_tokens: int
    block_ids: tuple[int, ...]  # its block table so far: cached, forked or swapped-in blocks
    sampling_params: SamplingParams
    stop_token_ids: frozenset[int]
    bad_word_ids: tuple[tuple[int, ...], ...]
    seed: int
    branch: int
    num_samples: int  # tokens to sample from its next logits: one for itself and each pending fork


class ScheduledSequence(NamedTuple):
    """What one sequence does in one step: compute tokens [num_computed, + num_scheduled)."""

    seq_id: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    first_new_block: int  # index in the block table at which new_block_ids are written
    new_block_ids: list[int]  # usually behind the table's end; a copied block replaces the last one


BlockPair = tuple[int, int]  # (source, destination)


@dataclass(frozen=True)
class SchedulerOutput:
    """One step, as the scheduler decided it: all that the data plane receives.

    Invariant: each sequence appears at most once in `scheduled`. The runner knows the sequence from
    an earlier step, or from `new_sequences`.
    """

    scheduled: tuple[ScheduledSequence, ...] = ()  # in batch order; empty: nothing to do
    new_sequences: tuple[NewSequence, ...] = ()
    dropped_seq_ids: tuple[int, ...] = ()  # finished or preempted: the runner may drop these
    blocks_to_swap_out: tuple[BlockPair, ...] = ()  # (KV block, CPU block): copied first
    blocks_to_swap_in: tuple[BlockPair, ...] = ()  # (CPU block, KV block)
    blocks_to_copy: tuple[BlockPair, ...] = ()  # (shared KV block, the writer's own): copy-on-write
    is_restart: bool = False  # the last step failed: the runner drops every sequence
    needs_sync: bool = False  # the next step depends on the tokens of this one
    notes: dict[type, Any] = new(dict)  # to the runner, by class


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: of the sampled token, then of the likeliest tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampled_rank: int  # 1 for the likeliest token


class SampledToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None = None  # if the request asked for them


@dataclass(frozen=True)
class ModelOutput:
    """The result of a step, by seq_id. A sequence is in `sampled` if its last known token was
    computed, or in `errors` if no token could be sampled for it: its request ends."""

    sampled: dict[int, list[SampledToken]] = new(dict)  # usually one token each
    forks: dict[int, list[SampledToken]] = new(dict)  # of branches 1 .. n - 1
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = new(dict)
    errors: dict[int, RequestError] = new(dict)
    notes: dict[type, Any] = new(dict)  # to the scheduler, by class


@dataclass
class SequenceUpdate:
    """What a step brought one sequence: from the scheduler to the output processor."""

    sequence: Sequence
    tokens: list[SampledToken] = new(list)
    prompt_logprobs: tuple[int, list[TokenLogprobs]] | None = None  # (first position, entries)

    def keep(self, number: int) -> None:
        """Take all but the first `number` new tokens back: a stop string ends the output there."""
        if (surplus := len(self.tokens) - number) > 0:
            del self.sequence.token_ids[-surplus:]
            self.tokens = self.tokens[:number]


@dataclass
class RequestMetrics:
    """Moments in the life of a request, under vLLM V1's names; None until they come.

    arrival_time is in seconds of time.time(); the others are in seconds of time.monotonic().
    """

    arrival_time: float
    queued_ts: float | None = None  # when the scheduler got it
    scheduled_ts: float | None = None  # in its first step
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    finished_ts: float | None = None
    num_preemptions: int = 0


# -- what the user gets --


@dataclass
class Logprob:
    """One token's log-probability at one position."""

    logprob: float
    rank: int | None = None  # 1 for the likeliest token
    decoded_token: str | None = None  # None without a tokenizer, or with detokenize=False


@dataclass
class CompletionOutput:
    """One completion of a request, so far or, once finish_reason is set, for good."""

    index: int  # which of the request's completions
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None  # sum over all its tokens, if logprobs were asked for
    logprobs: list[dict[int, Logprob]] | None  # per token: token id -> Logprob
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    # The stop token id or stop string (None for the tokenizer's EOS token); with "error" the
    # message.
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """True once this completion has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The result of a request so far."""

    request_id: str
    prompt: str | None  # None if token ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None  # per prompt token; first: None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None  # of its first completion
    num_cached_tokens: int | None = None  # prompt tokens whose KV came from the prefix cache
