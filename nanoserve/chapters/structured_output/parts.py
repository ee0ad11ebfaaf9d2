"""What do grammars change in the engine?

    engine      make_request compiles the grammar, in the caller's thread
    sequence    is at a place in its grammar, and each fork at one of its own
    scheduler   a step takes the masks of its sequences along; new tokens advance the grammars
    runner      forbids what the masks forbid, before a token is chosen

*Drafts.* With speculative decoding (this chapter is stacked on it) a sequence has a mask behind
each of its drafts, too, and drafts that the grammar forbids are dropped.

vLLM: vllm/v1/structured_output/, vllm/v1/core/sched/scheduler.py get_grammar_bitmask (V1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoserve.chapters.speculative.parts import SpeculativeNote
from nanoserve.chapters.structured_output.backend import (
    GrammarSpec,
    StructuredOutputGrammar,
    choose_backend,
)
from nanoserve.chapters.structured_output.bitmask import BitmaskKernel, TokenBitmask
from nanoserve.chapters.structured_output.params import StructuredOutputsConfig
from nanoserve.chapters.structured_output.vocabulary import read_vocabulary
from nanoserve.config import EngineConfig
from nanoserve.engine import LLMEngine
from nanoserve.input_batch import InputBatch
from nanoserve.model_runner import ModelRunner, PendingOutput
from nanoserve.output_processor import Request
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler, StepPlan
from nanoserve.sequence import (
    ModelOutput,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
)


class MasksNote(NamedTuple):
    """From the scheduler to the runner, with each step."""

    masks: dict[int, Tensor]  # seq_id -> [number of samples, words] int32


@dataclass(frozen=True)
class StructuredConfig(EngineConfig):
    structured_outputs_config: Any = None
    """Which backend makes grammars: a dict such as {"backend": "auto"}."""


@dataclass(eq=False)
class StructuredSequence(Sequence):
    grammar: StructuredOutputGrammar | None = None  # has accepted the known output tokens
    grammar_words: int = 0  # 32-bit words of a mask
    # Without stop tokens (ignore_eos) the output goes on as long as the grammar can.
    forbidden_ids: tuple[int, ...] = ()

    @property
    def needs_sync(self) -> bool:
        return super().needs_sync or self.grammar is not None

    def make_branch(self, branch: int) -> Sequence:
        child = super().make_branch(branch)
        child.grammar = self.grammar and self.grammar.fork()
        return child

    def make_masks(self, drafts: tuple[int, ...]) -> Tensor:
        """[1 + len(drafts), words] int32: what may come next, and behind each of the drafts."""
        masks = torch.full((1 + len(drafts), self.grammar_words), -1, dtype=torch.int32)
        for number in range(len(masks)):
            self.grammar.fill_bitmask(masks, number)
            for token_id in self.forbidden_ids:
                masks[number].numpy().view(np.uint8)[token_id // 8] &= 255 - (1 << token_id % 8)
            if number < len(drafts):
                self.grammar.accept_tokens(self.request_id, [drafts[number]])
        self.grammar.rollback(len(drafts))
        return masks


class StructuredEngine(LLMEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.grammar_config = StructuredOutputsConfig.read(config.structured_outputs_config)
        model_config, tokenizer = self.model_config, self.input_processor.require_tokenizer("it")
        self.vocabulary = read_vocabulary(
            tokenizer, model_config.vocab_size, model_config.eos_token_ids
        )
        self.compiled: dict[Any, StructuredOutputGrammar] = {}  # a real one: bounded

    def make_request(
        self, request_id: str, prompt: Any, params: SamplingParams | None = None, **each: Any
    ) -> Request:
        request = super().make_request(request_id, prompt, params, **each)
        if (wanted := request.root.sampling_params.structured_outputs) is not None:
            stops = request.root.stop_token_ids or self.vocabulary.eos_token_ids
            spec = GrammarSpec(*wanted.key, stops)
            key = choose_backend(self.grammar_config.backend, spec), spec
            if key not in self.compiled:
                self.compiled[key] = key[0](self.vocabulary).compile_grammar(spec)
            for seq in request.sequences:
                seq.grammar = self.compiled[key].fork()
                seq.grammar_words = -(-len(self.vocabulary.tokens) // 32)
                seq.forbidden_ids = () if seq.stop_token_ids else tuple(stops)
        return request


class StructuredScheduler(Scheduler):
    def make_output(self, step: StepPlan) -> SchedulerOutput:
        """The masks of the step: [number of samples, words] for each sequence with a grammar."""
        note = step.notes.get(SpeculativeNote)  # of the one chapter that this one has to know
        masks: dict[int, Tensor] = {}
        step.notes[MasksNote] = MasksNote(masks)
        for item in step.scheduled:
            seq = self.sequences[item.seq_id]
            if seq.grammar is not None and seq.num_output_placeholders:
                masks[seq.seq_id] = seq.make_masks(note.drafts.get(seq.seq_id, ()) if note else ())
        return super().make_output(step)

    def append_tokens(self, seq: Sequence, token_ids: list[int]) -> int:
        number = super().append_tokens(seq, token_ids)
        if seq.grammar is None:
            return number
        if not seq.grammar.accept_tokens(seq.request_id, token_ids[:number]):
            seq.status = SequenceStatus.FINISHED_ERROR  # a logits processor has chosen it
            seq.stop_reason = "structured_outputs: the grammar does not allow the token"
        elif seq.forbidden_ids and not seq.make_masks(()).any():
            seq.status = SequenceStatus.FINISHED_STOPPED  # nothing can follow
        return number

    def update_sequence(
        self, seq: Sequence, item: ScheduledSequence, model_output: ModelOutput
    ) -> list[SequenceUpdate]:
        updates = super().update_sequence(seq, item, model_output)
        if seq.grammar is not None and (drafts := getattr(self, "drafts", {}).get(seq.seq_id)):
            is_over = seq.grammar.is_terminated()
            valid = () if is_over else seq.grammar.validate_tokens(list(drafts))
            self.drafts[seq.seq_id] = tuple(valid)
        return updates


class StructuredRunner(ModelRunner):
    def sample(self, input_batch: InputBatch, hidden: Tensor) -> PendingOutput:
        """Forbid what the masks forbid, then choose as before."""
        choose = self.choose
        if (mask := self.make_mask(input_batch)) is not None:
            self.choose = lambda logits, batch: choose(mask.apply(logits), batch)
        try:
            return super().sample(input_batch, hidden)
        finally:
            self.choose = choose

    def make_mask(self, input_batch: InputBatch) -> TokenBitmask | None:
        """The step's masks, by row of the logits."""
        masks = input_batch.step.notes[MasksNote].masks
        if not masks:
            return None
        arrays, rows, bits = input_batch.arrays, [], []
        first: dict[int, int] = {}  # seq_id -> place of its first sample in the step
        places = zip(arrays.logits_indices.tolist(), arrays.sampled_rows.tolist(), strict=True)
        for logits_row, (place, row) in enumerate(places):
            seq_id = int(self.req_states.seq_ids[row])
            if seq_id in masks:
                rows.append(logits_row)
                bits.append(masks[seq_id][place - first.setdefault(seq_id, place)])
        if not rows:
            return None
        sent = self.send(rows=np.array(rows), bits=torch.stack(bits).numpy())
        return TokenBitmask(sent["rows"], sent["bits"], BitmaskKernel(self.device))


PARTS = {
    "config_cls": StructuredConfig,
    "sequence_cls": StructuredSequence,
    "engine_cls": StructuredEngine,
    "scheduler_cls": StructuredScheduler,
    "runner_cls": StructuredRunner,
}
