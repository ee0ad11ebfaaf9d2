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

*Drafts* (speculative decoding). A step may compute guesses behind the known tokens, to find out
whether the model would have sampled the same. With the drafts d e f behind 6 known tokens:

    known       [ t0 t1 t2 t3 | t4 t5 ]  d  e  f     num_tokens = 6, spec_token_ids = (d, e, f)
    to compute                     [ t5  d  e  f ]   4 positions, so 4 tokens are sampled:
    sampled                           d  e  x  .     d and e are accepted, x is the next token
    known       [ t0 t1 t2 t3 | t4 t5  d  e | x ]    num_tokens = 9, num_computed_tokens = 8

While the step is in flight it counts as computed whole (10), with 4 placeholders. What follows a
rejected draft is not computed any more: the counter goes back, and the slots are written again.

Left out: SequenceGroup. V0 bundles the samples of a request into one object. In V1 and here each
sample is a sequence of its own, and the output processor bundles the results.

vLLM: vllm/sequence.py (V0); vllm/v1/request.py, vllm/v1/core/sched/output.py (V1).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, Protocol

from nanoserve.sampling_params import SamplingParams


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


class Gate(Protocol):
    """What a waiting sequence needs before it can run: a compiled grammar, an adapter in memory."""

    def start(self, fail: Callable[[BaseException], object]) -> None:
        """The request was added: begin what the sequence waits for, in another thread. Must not
        raise. Any thread may call `fail`: it ends the request with this error."""

    def is_open(self) -> bool:
        """May the sequence be admitted now? Asked before each step in which there is room."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request, or one of its n completions, on its way through the scheduler.

    Invariant: 0 <= num_computed_tokens <= num_tokens + num_output_placeholders, and only WAITING
    sequences hold no blocks.

    A request with n > 1 begins as one sequence, branch 0. When the prompt is computed, branches
    1 .. n - 1 fork off: each gets the next seq_id, shares the prompt's blocks and continues alone.
    With n > max_num_seqs, the branches that find no place beside branch 0 are queued on their own
    and find the prompt in the prefix cache.
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
    cache_salt: str | None = None  # only requests with the same salt share cached blocks
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that must never be completed
    branch: int = 0  # which of the request's n completions this is
    always_sync: bool = False  # each next step depends on the last one's output (a beam search)
    gates: tuple[Gate, ...] = ()  # it waits until all are open
    structured_output_request: Any = None  # its grammar (extras/structured_output/manager.py)
    lora: Any = None  # its adapter, an Adapter of extras/lora; None: the model as it is
    kv_transfer_params: Any = None  # what a KV connector (extras/kv_offload) says of its blocks
    # Where the sequence is.
    num_pending_forks: int = 0  # branches that have not forked off this sequence yet
    status: SequenceStatus = SequenceStatus.WAITING
    # What ended the sequence: a stop token id, a stop string, or the message of an error.
    stop_reason: int | str | None = None
    token_ids: list[int] = field(init=False)  # prompt, then output
    num_computed_tokens: int = 0  # tokens whose KV is in the cache, or in flight to it
    num_output_placeholders: int = 0  # tokens that steps in flight will bring, or at most bring
    spec_token_ids: tuple[int, ...] = ()  # drafts: guesses at its next tokens, to be verified
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache at the first admission
    num_external_computed_tokens: int = 0  # of these, loaded from another tier (extras/kv_offload)
    is_held: bool = False  # must wait: a search for the cause of a failed step tries others
    cleared_at: int = 0  # the num_tokens with which the search finds it innocent; forks inherit it
    block_hashes: list[Any] = field(default_factory=list)  # of its full blocks: BlockManager's own
    needs_output_token_ids: bool = field(init=False)  # the CPU reads the output before sampling

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        params = self.sampling_params
        reads_output = params.logits_processors or params.structured_outputs
        self.needs_output_token_ids = bool(self.bad_word_ids or reads_output)

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
    def extra_keys(self) -> Hashable:
        """Sequences share what is cached only if these are equal."""
        return self.cache_salt if self.lora is None else (self.cache_salt, self.lora.key)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that a step can compute next: known ones, and those in flight."""
        return len(self.token_ids) + self.num_output_placeholders - self.num_computed_tokens

    @property
    def needs_sync(self) -> bool:
        """True if the next step cannot be scheduled before the tokens of this step are known: the
        sampler reads the tokens, or new sequences are made of them (forks, beams)."""
        return self.needs_output_token_ids or self.always_sync or self.num_pending_forks > 0

    @property
    def blocked_by_in_flight(self) -> bool:
        """True if this sequence cannot be scheduled before a step in flight is read: the token in
        flight may be the sequence's last one, or the sampler needs to know the token."""
        num_in_flight = self.num_output_placeholders
        if not num_in_flight:
            return False
        return self.num_output_tokens + num_in_flight >= self.max_tokens or self.needs_sync

    def is_ready(self) -> bool:
        """False while a waiting sequence cannot be admitted yet: a gate is closed, or a token was
        in flight when the sequence was preempted."""
        return self.num_output_placeholders == 0 and all(gate.is_open() for gate in self.gates)

    def make_branch(self, branch: int) -> Sequence:
        """Another of the request's n completions, with no output yet. It holds no blocks."""
        grammar = self.structured_output_request
        return replace(
            self,
            structured_output_request=grammar and grammar.fork(),
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
    extra_keys: Hashable = None
    lora_slot: int = -1  # where the adapter is on the device; -1: none
    structured_output_request: Any = None  # shared with the scheduler: rank 0 alone makes masks


class ScheduledSequence(NamedTuple):
    """What one sequence does in one step: compute tokens [num_computed, + num_scheduled)."""

    seq_id: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    first_new_block: int  # index in the block table at which new_block_ids are written
    new_block_ids: list[int]  # usually behind the table's end; a copied block replaces the last one
    draft_token_ids: tuple[int, ...] = ()  # the last of the scheduled tokens: guesses
    num_spec_tokens: int = 0  # how many drafts may be proposed behind this step's tokens


BlockPair = tuple[int, int]  # (source, destination)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step, as the scheduler decided it: all that the data plane receives.

    Invariant: each sequence appears at most once in `scheduled`. The runner knows the sequence from
    an earlier step, or from `new_sequences`.
    """

    scheduled: tuple[ScheduledSequence, ...]  # in batch order
    new_sequences: tuple[NewSequence, ...]
    finished_seq_ids: tuple[int, ...]  # finished or preempted: the runner may drop these
    total_num_scheduled_tokens: int
    blocks_to_swap_out: tuple[BlockPair, ...] = ()  # (KV block, CPU block): copied first
    blocks_to_swap_in: tuple[BlockPair, ...] = ()  # (CPU block, KV block)
    blocks_to_copy: tuple[BlockPair, ...] = ()  # (shared KV block, the writer's own): copy-on-write
    loras_to_load: tuple[tuple[int, Any], ...] = ()  # (slot, an adapter's weights by layer)
    kv_connector_metadata: Any = None  # copies of blocks from and to another tier; None: none
    is_restart: bool = False  # the last step failed: the runner drops every sequence
    needs_sync: bool = False  # this step's tokens must be known before the next is scheduled
    # With pipeline stages: (seq_id, position, token id) of what rank 0 has sampled since the last
    # step, for the other ranks that look up token ids.
    new_token_ids: tuple[tuple[int, int, int], ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to execute."""
        return not self.scheduled


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: of the sampled token, then of the likeliest tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampled_rank: int  # 1 for the likeliest token


class ForkSample(NamedTuple):
    """The first token of a branch that forks off."""

    token_id: int
    logprobs: tuple[TokenLogprobs, ...]  # one entry, if the request asked for logprobs


class PromptLogprobs(NamedTuple):
    """Log-probabilities of prompt tokens [start, start + len(entries))."""

    start: int
    entries: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The result of a step: the sampled tokens of each sequence whose last token was computed. With
    drafts these are the accepted ones, and one more.

    A sequence for which no token could be sampled is in `errors` instead: its request ends.
    """

    sampled_token_ids: dict[int, tuple[int, ...]]  # seq_id -> new tokens
    logprobs: dict[int, tuple[TokenLogprobs, ...]]  # only of sequences that asked for logprobs
    forks: dict[int, tuple[ForkSample, ...]] = field(default_factory=dict)  # branches 1 .. n - 1
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)  # seq_id -> what went wrong
    draft_token_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)  # for the next step
    pooler_output: dict[int, Any] = field(default_factory=dict)  # of a pooling model: seq_id -> it


@dataclass(slots=True)
class SequenceUpdate:
    """What a step brought one sequence: from the scheduler to the output processor."""

    sequence: Sequence
    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: PromptLogprobs | None = None
    error: BaseException | None = None  # what ends the request
    num_accepted_tokens: int = 0  # drafts
    pooler_output: Any = None  # of a pooling model, in place of tokens

    def keep(self, number: int) -> None:
        """Take all but the first `number` new tokens back: a stop string ends the output there."""
        if (surplus := len(self.new_token_ids) - number) > 0:
            del self.sequence.token_ids[-surplus:]
            self.sequence.metrics.num_generation_tokens -= surplus
            self.new_token_ids = self.new_token_ids[:number]
            self.logprobs = self.logprobs[:number]


@dataclass
class RequestMetrics:
    """Moments in the life of a request, under vLLM V1's names; None until they come.

    arrival_time is in seconds of time.time(); the others are in seconds of time.monotonic().
    """

    arrival_time: float
    queued_ts: float
    scheduled_ts: float | None = None  # in its first step
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    finished_ts: float | None = None
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0  # steps that verified drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def record_tokens(self, now: float, number: int) -> None:
        """Tokens were appended."""
        self.first_token_ts = self.first_token_ts or now
        self.last_token_ts = now
        self.num_generation_tokens += number

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step."""
        return None if self.scheduled_ts is None else self.scheduled_ts - self.queued_ts

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_ts is None else self.first_token_ts - self.queued_ts

    def inter_token_latency(self, num_output_tokens: int) -> float | None:
        """Mean seconds from one token to the next; None with fewer than two."""
        if self.last_token_ts is None or self.first_token_ts is None or num_output_tokens < 2:
            return None
        return (self.last_token_ts - self.first_token_ts) / (num_output_tokens - 1)
