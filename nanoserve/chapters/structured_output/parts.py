"""What do grammars change in the engine?

    input processor   compiles the grammar, in the caller's thread
    sequence          is at a place in its grammar, and each fork at one of its own
    scheduler         new tokens advance the grammars; a step takes the masks of its sequences along
    runner            forbids what the masks forbid, before a token is chosen

*The place of a sequence.* Its grammar follows the known output tokens, whatever happens to the
steps: a preemption, or a step that is computed again, changes nothing. The next mask depends on the
last token, so a step that samples for such a sequence is read before the next one is scheduled.

*The end.* A stop token is allowed where the text may end. If the text can only end, and no stop
token may come (ignore_eos, min_tokens), the sequence ends at once: the grammar counts more.

*Drafts.* With speculative decoding, on which this chapter is stacked, a sequence has a mask behind
each of its drafts, too: the grammar goes ahead over them, and back. Those that it forbids are
dropped.

vLLM: vllm/v1/structured_output/, vllm/v1/core/sched/scheduler.py get_grammar_bitmask (V1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoserve.chapters.structured_output.backend import StructuredOutputGrammar, pack_bits
from nanoserve.chapters.structured_output.manager import StructuredOutputManager
from nanoserve.chapters.structured_output.params import (
    StructuredOutputsConfig,
    StructuredOutputsParams,
)
from nanoserve.config import EngineConfig
from nanoserve.input_batch import InputBatch
from nanoserve.input_processor import InputProcessor
from nanoserve.model_runner import ModelRunner
from nanoserve.sampler import SamplingBatch
from nanoserve.scheduler import Scheduler, StepPlan
from nanoserve.sequence import (
    ModelOutput,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
)


class MasksNote(NamedTuple):
    """From the scheduler to the runner, with a step that samples under a grammar."""

    seq_ids: set[int]  # of the sequences that have masks
    bits: np.ndarray  # [num_masks, words] int32: in the order of the rows of logits of these


@dataclass(frozen=True)
class StructuredConfig(EngineConfig):
    # Who makes grammars: a dict, such as {"backend": "xgrammar"}. The keys are in params.py.
    structured_outputs_config: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        config = StructuredOutputsConfig.read(self.structured_outputs_config or {})
        object.__setattr__(self, "structured_outputs_config", config)


@dataclass(eq=False)
class StructuredSequence(Sequence):
    grammar: StructuredOutputGrammar | None = None
    stop_bits: np.ndarray | None = None  # [words] int32: the tokens that the grammar takes as ends
    masks: np.ndarray | None = None  # [1 + number of drafts, words] int32; None: not made yet

    def make_branch(self, branch: int) -> Sequence:
        child = super().make_branch(branch)
        child.grammar, child.masks = self.grammar and self.grammar.fork(), None
        return child

    def follow(self) -> int:
        """Let the grammar follow the known output. Returns how many tokens of this it forbids: 0,
        unless a logits processor has chosen one."""
        new = self.token_ids[self.num_prompt_tokens + self.grammar.num_tokens :]
        return len(new) - self.grammar.accept_tokens(new)

    def make_masks(self, drafts: tuple[int, ...] = ()) -> int:
        """Note what may come next, and behind each of these drafts, as far as they are allowed.
        Returns how many are. (What stands behind a forbidden one does not count.)"""
        grammar, num_accepted = self.grammar, 0
        self.masks = np.full((1 + len(drafts), len(self.stop_bits)), -1, np.int32)
        for number, mask in enumerate(self.masks):
            if grammar.is_terminated():
                break
            grammar.fill_bitmask(mask)
            if not self.stop_token_ids:
                mask &= ~self.stop_bits
            if not grammar.accept_tokens(drafts[number : number + 1]):
                break
            num_accepted += 1
        grammar.rollback(num_accepted)
        return num_accepted

    def is_over(self) -> bool:
        """Can nothing follow, because the text can only end, and no stop token may come?"""
        may_stop = self.stop_token_ids and self.num_output_tokens >= self.sampling_params.min_tokens
        return not (may_stop or (self.masks[0] & ~self.stop_bits).any())


class StructuredInputProcessor(InputProcessor):
    can_constrain = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.structured_output_manager = StructuredOutputManager(
            self.config.structured_outputs_config, self.model_config, self.tokenizer
        )

    def process(self, *args: Any, **each: Any) -> Sequence:
        seq, model = super().process(*args, **each), self.model_config
        if (wanted := seq.sampling_params.structured_outputs) is not None:
            self.require_tokenizer("structured_outputs")
            wanted = StructuredOutputsParams.read(wanted)
            stops = seq.stop_token_ids or model.eos_token_ids
            seq.grammar = self.structured_output_manager.grammar_init(wanted, stops)
            seq.stop_bits, seq.reads_output = pack_bits(stops, model.vocab_size), True
        return seq


class StructuredScheduler(Scheduler):
    def make_output(self, step: StepPlan) -> SchedulerOutput:
        """As many masks for each sequence as tokens are sampled: one, and one for each draft, or
        for each branch that forks off."""
        seq_ids: set[int] = set()
        masks: list[np.ndarray] = []
        for seq_id, *_ in step.scheduled:
            seq = self.sequences[seq_id]
            if seq.grammar is not None and seq.num_output_placeholders:
                if seq.masks is None:
                    seq.make_masks()
                seq_ids.add(seq_id)
                masks += [seq.masks[: seq.num_output_placeholders]] * (1 + seq.num_pending_forks)
        if masks:
            step.notes[MasksNote] = MasksNote(seq_ids, np.concatenate(masks))
        return super().make_output(step)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelOutput
    ) -> list[SequenceUpdate]:
        updates = super().update_from_output(scheduler_output, model_output)
        for update in updates:
            if update.sequence.grammar is not None and update.tokens:
                self.advance_grammar(update)
        return updates

    def advance_grammar(self, update: SequenceUpdate) -> None:
        """Let the grammar of a sequence follow its new tokens, and drop the drafts that it forbids.
        What goes wrong with a grammar ends its own sequence alone."""
        seq, error = update.sequence, None
        try:
            if num_forbidden := seq.follow():
                update.keep(len(update.tokens) - num_forbidden)
                error = "the grammar does not allow the token that was chosen"
            elif seq.seq_id in self.sequences:
                drafts = getattr(self, "drafts", {})  # of SpeculativeScheduler
                guesses = drafts.pop(seq.seq_id, ())
                if (num_allowed := seq.make_masks(guesses)) > 0:
                    drafts[seq.seq_id] = guesses[:num_allowed]
                if seq.is_over():
                    self.finish(seq.seq_id, SequenceStatus.FINISHED_STOPPED)
        except Exception as failure:  # of a package
            error = f"the grammar failed: {failure!r}"
        if error is not None:
            self.finish(seq.seq_id, SequenceStatus.FINISHED_ERROR)
            seq.status = SequenceStatus.FINISHED_ERROR  # if it had ended otherwise, too
            seq.stop_reason = f"structured_outputs: {error}"


class StructuredRunner(ModelRunner):
    def make_sampling_batch(self, input_batch: InputBatch) -> SamplingBatch:
        batch = super().make_sampling_batch(input_batch)
        if (note := input_batch.step.notes.get(MasksNote)) is None:
            return batch
        seq_ids = self.req_states.seq_ids[input_batch.arrays.sampled_rows].tolist()
        rows = np.array([row for row, seq_id in enumerate(seq_ids) if seq_id in note.seq_ids])
        bits = torch.from_numpy(note.bits)
        assert len(rows) == len(bits), f"{len(bits)} masks for {len(rows)} rows of logits"
        if self.device.type == "cuda":  # from pinned memory, so that the CPU does not wait
            bits = bits.pin_memory().to(self.device, non_blocking=True)
        return replace(batch, mask=partial(apply_bitmask, self.send(rows=rows)["rows"], bits))


def apply_bitmask(rows: Tensor, bits: Tensor, logits: Tensor) -> Tensor:
    """A copy of logits [num_rows, vocab_size]; row rows[i] of it is -inf where bits[i] has a 0."""
    values = byte_values(bits.device).index_select(0, bits.view(torch.uint8).view(-1).int())
    return logits.index_add(0, rows, values.view(len(bits), -1)[:, : logits.shape[1]])


@cache
def byte_values(device: torch.device) -> Tensor:
    """[256, 8]: for each byte, what its bits add to eight logits, the lowest bit first."""
    byte, bit = (torch.arange(number, device=device) for number in (256, 8))
    return torch.where(byte[:, None] >> bit & 1 == 1, 0.0, -torch.inf)
