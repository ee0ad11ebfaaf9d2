"""What does the runner remember of each sequence, and what does one step bring the model?

RequestState has one row for each sequence that the runner knows: token ids, block table and
sampling parameters, in NumPy arrays. A SchedulerOutput says what changed, and only that is written.
A step reads its rows with vectorised indexing:

    row   token_ids            num_tokens   block_tables   temperature  top_k ...
    0     [5 9 2 7 . . . .]    4            [7 3 . .]      0.0          off
    1     (free)
    2     [5 9 2 4 4 1 . .]    6            [7 8 . .]      0.8          50

An InputBatch is one step: the tokens of its sequences laid end to end, on the CPU and on the
device. `row` means a row of RequestState. A sampling batch has an order of its own: its i-th entry
belongs to the i-th row of the logits, and `logits_row` means such an i.

Few requests change single logits (penalties, bad words, ...). The rows of such requests have a
RowLogitState object; other rows cost nothing. The tokens that penalties count are on the device
(kernels/seen_tokens.py).

Left out: block tables on the device. Each step sends those of its sequences, 4 bytes a block.

vLLM: vllm/worker/model_runner.py, model_executor/sampling_metadata.py (V0); vllm/v1/worker/gpu/:
states.py (RequestState), input_batch.py (InputBatch), sample/ (0.32); before it
vllm/v1/worker/gpu_input_batch.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from nanoserve.attention import StepMetadata
from nanoserve.config import EngineConfig
from nanoserve.kernels.cuda_graph import GraphShape
from nanoserve.kernels.seen_tokens import SeenTokens
from nanoserve.sampler import LogitEdits, Penalties, SamplingBatch, uniform_noise
from nanoserve.sampling_params import GREEDY_TEMPERATURE
from nanoserve.sequence import NewSequence, SchedulerOutput

PLACEHOLDER = -1  # in token_ids: the token is sampled, but its id has not reached the CPU yet
Send = Callable[..., dict[str, Tensor]]  # arrays by name -> tensors on the device, by name
LogitsRow = tuple[int, int]  # (row of the logits, row of RequestState)
# Of one row: token ids [k] int64, and what to add to their logits [k] float32; -inf forbids.
Edits = tuple[np.ndarray, np.ndarray]
Array: TypeAlias = Any  # an np.ndarray before it is sent, a Tensor after


@dataclass(frozen=True)
class StepArrays:
    """What one step sends to the device: NumPy arrays before it is sent, tensors after.

    The order of the fields is the order of their addresses. The fields before block_table have the
    same sizes, and so the same addresses, in all steps of one CUDA graph.
    """

    input_ids: Array  # [num_tokens] int64; PLACEHOLDER for a token that only the device knows
    positions: Array  # [num_tokens] int64
    token_rows: Array  # [num_tokens] int64: each token's row in the RequestState
    slot_mapping: Array  # [num_tokens] int64: where to store each token's key and value
    query_start_loc: Array  # [num_seqs + 1] int32
    seq_lens: Array  # [num_seqs] int32
    block_table: Array  # [num_seqs, max_blocks] int32
    # For each token to sample; behind a prompt with n forks there are n.
    sampled_rows: Array  # [num_samples] int64: its row in the RequestState
    logits_indices: Array  # [num_samples] int64: where in the step the token before it is


class InputBatch(NamedTuple):
    """One step, on the CPU and on the device. Only `tensors` and `metadata` are padded, in a decode
    step that runs as a graph."""

    step: SchedulerOutput
    arrays: StepArrays
    tensors: StepArrays
    metadata: StepMetadata
    graph_shape: GraphShape | None = None  # run as the graph of this shape


def make_edits(values: Mapping[int, float]) -> Edits:
    """Arrays from token id -> value."""
    return np.array(list(values), np.int64), np.array(list(values.values()), np.float32)


class RowLogitState:
    """What changes single logits of one sequence: bias, forbidden tokens, penalties, processors."""

    def __init__(self, new: NewSequence) -> None:
        self.params = new.sampling_params
        self.longer_bad_words = [word for word in new.bad_word_ids if len(word) > 1]
        bad_words = {word[0]: -math.inf for word in new.bad_word_ids if len(word) == 1}
        self.bias = make_edits({**(self.params.logit_bias or {}), **bad_words})
        self.no_stop = make_edits(dict.fromkeys(sorted(new.stop_token_ids), -math.inf))
        self.allowed = make_edits(dict.fromkeys(self.params.allowed_token_ids or (), 0.0))

    def get_edits(self, output_token_ids: np.ndarray) -> Iterator[Edits]:
        """The bias, and what forbids the last token of each bad word whose other tokens end the
        output, and, before min_tokens, all stop tokens. With bad word [4 7] and output [5 4], 7 is
        forbidden.
        """
        yield self.bias
        if len(output_token_ids) < self.params.min_tokens:
            yield self.no_stop
        for *start, last in self.longer_bad_words:
            if output_token_ids[-len(start) :].tolist() == start:
                yield make_edits({last: -math.inf})


class RequestState:
    """One row per known sequence.

    Invariant: row `row_of[seq_id]` holds all that a step may ask about the sequence; rows not in
    use are in `free_rows`, and their contents are never read.
    """

    def __init__(
        self, config: EngineConfig, vocab_size: int, device: torch.device, send: Send
    ) -> None:
        """`send` makes tensors on the device of arrays."""
        max_num_seqs, max_model_len = config.max_num_seqs, config.max_model_len
        max_blocks = -(-max_model_len // config.block_size)
        self.vocab_size, self.device, self.send = vocab_size, device, send
        self.row_of: dict[int, int] = {}
        self.free_rows = list(range(max_num_seqs))[::-1]
        self.logit_states: dict[int, RowLogitState] = {}  # by row
        self.num_prompt_logprobs: dict[int, int] = {}  # by row, where asked for
        # On the device, by row: the input of the next step, before it has reached the CPU.
        self.last_sampled_token_ids = torch.zeros(max_num_seqs, dtype=torch.long, device=device)
        # np.zeros maps memory only when it is written: long-context tables cost nothing up front.
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.seq_ids = np.zeros(max_num_seqs, np.int64)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.block_tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.seeds = np.zeros(max_num_seqs, np.int64)
        self.branches = np.zeros(max_num_seqs, np.int64)
        self.num_samples = np.zeros(max_num_seqs, np.int64)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.zeros(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.num_logprobs: list[int | None] = [None] * max_num_seqs
        self.seen_tokens = SeenTokens(self)

    def add(self, new: NewSequence) -> None:
        """Give a new sequence a row."""
        row = self.row_of[new.seq_id] = self.free_rows.pop()
        self.seq_ids[row] = new.seq_id
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self.num_tokens[row] = len(new.token_ids)
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.block_tables[row, : len(new.block_ids)] = new.block_ids
        self.seeds[row], self.branches[row] = new.seed, new.branch
        self.num_samples[row] = new.num_samples
        params = new.sampling_params
        self.temperature[row] = params.temperature
        self.top_k[row] = min(params.top_k or self.vocab_size, self.vocab_size)
        self.top_p[row], self.min_p[row] = params.top_p, params.min_p
        self.num_logprobs[row] = params.logprobs
        if params.prompt_logprobs is not None:
            self.num_prompt_logprobs[row] = params.prompt_logprobs
        if params.changes_logits:
            self.logit_states[row] = RowLogitState(new)

    def remove(self, seq_id: int) -> None:
        """Free a sequence's row, if it has one."""
        row = self.row_of.pop(seq_id, None)
        if row is not None:
            self.logit_states.pop(row, None)
            self.seen_tokens.remove(row)
            self.num_prompt_logprobs.pop(row, None)
            self.free_rows.append(row)

    def clear(self) -> None:
        """Free all rows, also one that was being taken or freed when a step failed."""
        for seq_id in list(self.row_of):
            self.remove(seq_id)
        self.free_rows = list(range(len(self.num_tokens)))[::-1]

    def append_placeholders(self, rows: np.ndarray) -> None:
        """Append to each row the token that the device is sampling for it.

        The id of that token is not known yet, so a placeholder holds its position. A row of
        max_model_len tokens is full: its last token is never a model input, and is not stored.
        """
        rows = rows[self.num_tokens[rows] < self.token_ids.shape[1]]
        self.token_ids[rows, self.num_tokens[rows]] = PLACEHOLDER
        self.num_tokens[rows] += 1
        self.num_samples[rows] = 1

    def write_token(self, seq_id: int, position: int, token_id: int) -> None:
        """A sampled token is known: write it over its placeholder, or behind the known tokens. The
        sequence may have finished, or was preempted, meanwhile. From now on the row samples one
        token: its branches, if it had any, have rows of their own."""
        row = self.row_of.get(seq_id)
        if row is not None and position < self.token_ids.shape[1]:
            self.token_ids[row, position] = token_id
            self.num_tokens[row] = max(self.num_tokens[row], position + 1)
            self.num_samples[row] = 1

    def make_sampling_batch(
        self, rows: np.ndarray, branches: np.ndarray, positions: np.ndarray
    ) -> SamplingBatch:
        """The sampling parameters of `rows`, one entry for each row of the logits.

        A row that is about to fork appears n times, each time with the number of another branch.
        `positions` are those of the tokens to sample: all tokens before them count as output.
        """
        row_list = rows.tolist()
        with_state = [(i, row) for i, row in enumerate(row_list) if row in self.logit_states]
        num_logprobs = tuple(self.num_logprobs[row] for row in row_list)
        is_greedy = bool((self.temperature[rows] < GREEDY_TEMPERATURE).all())
        return SamplingBatch(
            **({} if is_greedy else self._make_filters(rows, branches, positions)),
            is_greedy=is_greedy,
            num_logprobs=num_logprobs if any(n is not None for n in num_logprobs) else (),
            **(self._make_constraints(with_state, positions) if with_state else {}),
        )

    def _make_filters(
        self, rows: np.ndarray, branches: np.ndarray, positions: np.ndarray
    ) -> dict[str, Any]:
        """The parameters of a random draw."""
        temperature, top_k = self.temperature[rows], self.top_k[rows]
        top_p, min_p = self.top_p[rows], self.min_p[rows]
        noise = uniform_noise(self.seeds[rows], branches, positions)
        drawn_rows = (temperature >= GREEDY_TEMPERATURE).nonzero()[0]
        arrays = {"temperature": temperature, "uniform": noise}
        arrays |= {"drawn_rows": drawn_rows} if len(drawn_rows) < len(rows) else {}
        arrays |= {"top_k": top_k} if (top_k < self.vocab_size).any() else {}
        arrays |= {"top_p": top_p} if (top_p < 1).any() else {}
        arrays |= {"min_p": min_p} if (min_p > 0).any() else {}
        max_top_k = top_k[(top_k < self.vocab_size) | (top_p < 1)].max(initial=0)
        return {**self.send(**arrays), "max_top_k": int(max_top_k)}

    def _make_constraints(self, rows: list[LogitsRow], positions: np.ndarray) -> dict[str, Any]:
        """What changes single logits of these rows."""
        # The output tokens of each row. The last one may be a placeholder.
        starts = self.num_prompt_tokens
        outputs = [self.token_ids[row, starts[row] : positions[i]] for i, row in rows]
        states = [(i, self.logit_states[row]) for i, row in rows]
        edits = [
            (i, each)
            for (i, state), output in zip(states, outputs, strict=True)
            for each in state.get_edits(output)
        ]
        return {
            "allowed": self._join_edits([(i, s.allowed) for i, s in states if len(s.allowed[0])]),
            "edits": self._join_edits(edits),
            "processors": [
                (i, called, self.token_ids[row, : starts[row]].tolist(), output.tolist())
                for (i, row), output in zip(rows, outputs, strict=True)
                if (called := self.logit_states[row].params.logits_processors)
            ],
            "penalties": self._make_penalties(rows),
        }

    def _join_edits(self, edits: list[tuple[int, Edits]]) -> LogitEdits | None:
        """Edits of rows of the logits, laid end to end."""
        if not edits:
            return None
        ids, values = map(np.concatenate, zip(*(each for _, each in edits), strict=True))
        rows = np.concatenate([np.full(len(each[0]), row) for row, each in edits])
        return LogitEdits(**self.send(logits_rows=rows, token_ids=ids, values=values))

    def _make_penalties(self, rows_with_state: list[LogitsRow]) -> Penalties | None:
        states = [(i, row, self.logit_states[row].params) for i, row in rows_with_state]
        states = [state for state in states if state[2].has_penalties]
        if not states:
            return None
        logits_rows, rows, params = zip(*states, strict=True)
        self.seen_tokens.update(np.array(rows))
        return Penalties(
            **self.seen_tokens.gather(np.array(rows)),
            **self.send(
                logits_rows=np.array(logits_rows),
                repetition=np.array([p.repetition_penalty for p in params], np.float32),
                frequency=np.array([p.frequency_penalty for p in params], np.float32),
                presence=np.array([p.presence_penalty for p in params], np.float32),
            ),
        )
