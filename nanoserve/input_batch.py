"""What does the runner remember of each sequence?

One row per sequence it knows: token ids, block table, sampling parameters, in NumPy arrays. Only
what a SchedulerOutput says changed is written, and a step reads its rows with vectorised indexing,
so what a step costs does not grow with the length of the contexts.

    row   token_ids            num_tokens   block_tables   temperature  top_k ...
    0     [5 9 2 7 . . . .]    4            [7 3 . .]      0.0          off
    1     (free)
    2     [5 9 2 4 4 1 . .]    6            [7 8 . .]      0.8          50

Features that few requests use (penalties, bad words, ...) live in a RowFeatures object of the rows
that have them: the others never pay.

vLLM: vllm/worker/model_runner.py, model_executor/sampling_metadata.py (V0);
vllm/v1/worker/gpu_input_batch.py, vllm/v1/sample/metadata.py (V1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoserve.sampler import Penalties, RowProcessors, SamplingBatch, TokenRows, uniform_noise
from nanoserve.sampling_params import GREEDY_TEMPERATURE, SamplingParams
from nanoserve.sequence import NewSequence, ScheduledSequence
from nanoserve.staging import StagingBuffer

PLACEHOLDER = -1  # in token_ids: sampled, but not known on the CPU yet


class RowFeatures:
    """What one sequence asks of the sampler beyond temperature and filters.

    Counts are kept up to date token by token, so that penalties cost the same at any length.
    """

    def __init__(self, new: NewSequence, vocab_size: int) -> None:
        self.params = new.sampling_params
        self.num_prompt_tokens = new.num_prompt_tokens
        self.stop_token_ids = new.stop_token_ids
        self.bad_word_ids = new.bad_word_ids
        self.is_in_prompt: Tensor | None = None
        if self.params.has_penalties:
            token_ids = torch.tensor(new.token_ids)
            self.is_in_prompt = torch.zeros(vocab_size, dtype=torch.bool)
            self.is_in_prompt[token_ids[: new.num_prompt_tokens]] = True
            output = token_ids[new.num_prompt_tokens :]
            self.output_counts = torch.bincount(output, minlength=vocab_size)

    @staticmethod
    def are_needed_by(new: NewSequence) -> bool:
        """True if the sequence uses any of the features kept here."""
        params = new.sampling_params
        return bool(
            params.has_penalties
            or params.min_tokens
            or new.bad_word_ids
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.logits_processors
        )

    def count(self, token_id: int) -> None:
        """A token was appended to the output."""
        if self.is_in_prompt is not None:
            self.output_counts[token_id] += 1

    def get_banned(self, output_token_ids: np.ndarray) -> list[int]:
        """Tokens that may not come next: what would end the output before min_tokens, and the last
        token of each bad word of which all others have just been said."""
        banned = []
        if len(output_token_ids) < self.params.min_tokens:
            banned += sorted(self.stop_token_ids)
        for *start, last in self.bad_word_ids:
            if not start or output_token_ids[-len(start) :].tolist() == start:
                banned.append(last)
        return banned


class InputBatch:
    """One row per known sequence.

    Invariant: row `row_of[seq_id]` holds all that a step may ask about the sequence; rows not in
    use are in `free_rows`, and what they hold is never read.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        staging: StagingBuffer | None = None,
    ) -> None:
        """`staging` is how arrays get to the device; None: by copies of their own, to the CPU."""
        max_blocks = -(-max_model_len // block_size)
        self.vocab_size = vocab_size
        self.staging = staging or StagingBuffer(0, torch.device("cpu"))
        self.device = self.staging.device
        self.row_of: dict[int, int] = {}
        self.free_rows = list(range(max_num_seqs))[::-1]
        self.features: dict[int, RowFeatures] = {}  # by row
        # np.zeros maps memory only when it is written: long-context tables cost nothing up front.
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
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
        self.num_prompt_logprobs: list[int | None] = [None] * max_num_seqs

    def add(self, new: NewSequence) -> None:
        """Give a new sequence a row."""
        row = self.row_of[new.seq_id] = self.free_rows.pop()
        params = new.sampling_params
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self.num_tokens[row] = len(new.token_ids)
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.block_tables[row, : len(new.block_ids)] = new.block_ids
        self.seeds[row], self.branches[row] = new.seed, new.branch
        self.num_samples[row] = new.num_samples
        self._set_sampling(row, params)
        if RowFeatures.are_needed_by(new):
            self.features[row] = RowFeatures(new, self.vocab_size)

    def _set_sampling(self, row: int, params: SamplingParams) -> None:
        self.temperature[row] = params.temperature
        self.top_k[row] = min(params.top_k or self.vocab_size, self.vocab_size)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.num_logprobs[row] = params.logprobs
        self.num_prompt_logprobs[row] = params.prompt_logprobs

    def forget(self, seq_id: int) -> None:
        """Free a sequence's row, if it has one."""
        row = self.row_of.pop(seq_id, None)
        if row is not None:
            self.features.pop(row, None)
            self.free_rows.append(row)

    def write_blocks(self, row: int, item: ScheduledSequence) -> None:
        """Write new block ids where the scheduler says."""
        end = item.first_new_block + len(item.new_block_ids)
        self.block_tables[row, item.first_new_block : end] = item.new_block_ids

    def append_placeholders(self, rows: np.ndarray) -> np.ndarray:
        """A token of each row is being sampled: it counts, though nobody knows it yet. Returns the
        positions. Branches have forked off by now, if there were any."""
        positions = self.num_tokens[rows]
        fits = positions < self.token_ids.shape[1]  # else: its last, and nobody will ask
        self.token_ids[rows[fits], positions[fits]] = PLACEHOLDER
        self.num_tokens[rows[fits]] += 1
        self.num_samples[rows] = 1
        return positions

    def fill_placeholder(self, row: int, position: int, token_id: int) -> None:
        """Now it is known."""
        if position < self.token_ids.shape[1]:
            self.token_ids[row, position] = token_id
        if row in self.features:
            self.features[row].count(token_id)

    def make_sampling_batch(self, rows: np.ndarray, forks: np.ndarray) -> SamplingBatch:
        """The sampling parameters of `rows`, one entry for each token to sample.

        A row that is about to fork stands there n times, `forks` counting 0 .. n - 1.
        """
        row_list = rows.tolist()
        special = [(i, row) for i, row in enumerate(row_list) if row in self.features]
        temperature = self.temperature[rows]
        is_greedy = bool((temperature < GREEDY_TEMPERATURE).all())
        return SamplingBatch(
            **({} if is_greedy else self._make_filters(rows, forks, temperature)),
            is_greedy=is_greedy,
            num_logprobs=tuple(self.num_logprobs[row] for row in row_list),
            **(self._make_constraints(special) if special else {}),
        )

    def _make_filters(
        self, rows: np.ndarray, forks: np.ndarray, temperature: np.ndarray
    ) -> dict[str, Any]:
        """What only rows that draw a token at random need."""
        top_k, top_p, min_p = self.top_k[rows], self.top_p[rows], self.min_p[rows]
        noise = uniform_noise(self.seeds[rows], self.branches[rows] + forks, self.num_tokens[rows])
        arrays = {"temperature": temperature, "uniform": noise}
        arrays |= {"top_k": top_k} if (top_k < self.vocab_size).any() else {}
        arrays |= {"top_p": top_p} if (top_p < 1).any() else {}
        arrays |= {"min_p": min_p} if (min_p > 0).any() else {}
        return dict(zip(arrays, self.staging.send(*arrays.values()), strict=True))

    def _make_constraints(self, special: list[tuple[int, int]]) -> dict[str, Any]:
        """What rows with features need. `special`, here and below: (index in the sampling batch,
        row) of those."""
        return {
            "allowed": tuple(
                (i, tuple(allowed))
                for i, row in special
                if (allowed := self.features[row].params.allowed_token_ids) is not None
            ),
            "banned": self._make_banned(special),
            "bias": self._make_bias(special),
            "processors": self._make_processors(special),
            "penalties": self._make_penalties(special),
        }

    def get_output_token_ids(self, row: int) -> np.ndarray:
        return self.token_ids[row, self.num_prompt_tokens[row] : self.num_tokens[row]]

    def _make_banned(self, special: list[tuple[int, int]]) -> TokenRows | None:
        pairs = [
            (i, token_id)
            for i, row in special
            for token_id in self.features[row].get_banned(self.get_output_token_ids(row))
        ]
        return TokenRows([i for i, _ in pairs], [t for _, t in pairs], []) if pairs else None

    def _make_bias(self, special: list[tuple[int, int]]) -> TokenRows | None:
        triples = [
            (i, token_id, value)
            for i, row in special
            for token_id, value in (self.features[row].params.logit_bias or {}).items()
        ]
        if not triples:
            return None
        rows, token_ids, values = zip(*triples, strict=True)
        return TokenRows(list(rows), list(token_ids), list(values))

    def _make_processors(self, special: list[tuple[int, int]]) -> tuple[RowProcessors, ...]:
        result = []
        for i, row in special:
            processors = tuple(self.features[row].params.logits_processors or ())
            if processors:
                prompt = self.token_ids[row, : self.num_prompt_tokens[row]].tolist()
                output = self.get_output_token_ids(row).tolist()
                result.append(RowProcessors(i, processors, prompt, output))
        return tuple(result)

    def _make_penalties(self, special: list[tuple[int, int]]) -> Penalties | None:
        entries = [(i, self.features[row]) for i, row in special]
        entries = [(i, feature) for i, feature in entries if feature.is_in_prompt is not None]
        if not entries:
            return None
        features = [feature for _, feature in entries]
        params = [feature.params for feature in features]
        masks = [feature.is_in_prompt for feature in features if feature.is_in_prompt is not None]
        return Penalties(
            rows=torch.tensor([i for i, _ in entries], device=self.device),
            is_in_prompt=torch.stack(masks).to(self.device),
            output_counts=torch.stack([f.output_counts for f in features]).to(self.device),
            repetition=torch.tensor([p.repetition_penalty for p in params], device=self.device),
            frequency=torch.tensor([p.frequency_penalty for p in params], device=self.device),
            presence=torch.tensor([p.presence_penalty for p in params], device=self.device),
        )
