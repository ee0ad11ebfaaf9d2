"""How do the hidden states of a step become vectors?

PoolingModelRunner replaces the last stage of ModelRunner.launch: `sample` becomes pooling. Of a
step with the last 2 tokens of a prompt, and 3 of 5 tokens of another one:

    hidden        [ h3 h4 | h0 h1 h2 ]      [num_tokens, hidden]
    LAST            h4                      the last token, which sees all others
    MEAN            (sum + h3 + h4) / 5     `sum` is what the chunk before has left: h0 + h1 + h2
    CLS             h0, of a prompt that is whole in the step

Then each vector is cut to the dimensions of its request, and divided by its length. The sums are
made in float32, whatever the type of the model.

vLLM: vllm/model_executor/layers/pooler/seqwise/: methods.py, heads.py, and _pool in
vllm/v1/worker/gpu_model_runner.py (V1); vllm/worker/pooling_model_runner.py (V0).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.exceptions import RequestError
from nanoserve.extras.pooling.params import PoolingParams, get_pooling_params
from nanoserve.model_runner import ModelRunner, PendingOutput, StepInputs
from nanoserve.sequence import ModelOutput, ScheduledSequence, SchedulerOutput
from nanoserve.staging import copy_to_host, record_event

NOT_FINITE = "the model's hidden states are NaN or infinite. Damaged weights do that."


class PoolingModelRunner(ModelRunner):
    """A model without a head, its KV cache, and the way from a SchedulerOutput to vectors."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, *args: Any, **options: Any
    ) -> None:
        """The arguments of ModelRunner; config.pooler_config must be resolved."""
        super().__init__(config, model_config, *args, **options)
        self.pooling_type = config.pooler_config.seq_pooling_type
        self.pooling_params: dict[int, PoolingParams] = {}  # by seq_id, of those that have a row
        # By row of the batch, [max_num_seqs, hidden]: of a prompt in chunks, the sum of the hidden
        # states so far. Made in the first step that needs it.
        self.sums: Tensor | None = None

    def update_batch(self, scheduler_output: SchedulerOutput) -> np.ndarray:
        """As ModelRunner does; note what each new sequence asks for."""
        if scheduler_output.is_restart:
            self.pooling_params.clear()
        for seq_id in scheduler_output.finished_seq_ids:
            self.pooling_params.pop(seq_id, None)
        for new in scheduler_output.new_sequences:
            self.pooling_params[new.seq_id] = get_pooling_params(new.sampling_params)
        return super().update_batch(scheduler_output)

    def sample(
        self, scheduled: tuple[ScheduledSequence, ...], inputs: StepInputs, hidden: Tensor
    ) -> PendingPooling:
        """A vector for each sequence whose last token was in the step. hidden: [num_tokens,
        hidden]."""
        vectors = self.pool(inputs, hidden).float()  # [num_vectors, hidden]
        seq_ids = self.batch.seq_ids[inputs.arrays.sampled_rows].tolist()
        params = [self.pooling_params[seq_id] for seq_id in seq_ids]
        return PendingPooling(seq_ids, params, vectors)

    def pool(self, inputs: StepInputs, hidden: Tensor) -> Tensor:
        """Hidden states [num_tokens, hidden] -> [number of prompts that end, hidden]."""
        step = inputs.tensors
        if self.pooling_type == "LAST":
            return hidden.index_select(0, step.logits_indices)
        if self.pooling_type == "CLS":  # all prompts are whole
            return hidden.index_select(0, step.query_start_loc[:-1])
        if self.sums is None:
            sizes = len(self.batch.num_tokens), hidden.shape[1]
            self.sums = hidden.new_zeros(sizes, dtype=torch.float32)
        first = inputs.arrays.token_rows[inputs.arrays.positions == 0]
        self.sums.index_fill_(0, self.staging.send(first=first)["first"], 0.0)
        self.sums.index_add_(0, step.token_rows, hidden.float())
        lengths = step.positions.index_select(0, step.logits_indices) + 1
        return self.sums.index_select(0, step.sampled_rows) / lengths[:, None]


class PendingPooling(PendingOutput):
    """A step that was launched. `result()` waits for its vectors."""

    def __init__(self, seq_ids: list[int], params: list[PoolingParams], vectors: Tensor) -> None:
        """Start the copy of `vectors` [len(seq_ids), hidden] to the CPU."""
        self._seq_ids, self._params = seq_ids, params
        self._vectors = copy_to_host(vectors)
        self._event = record_event(vectors.device)

    def result(self) -> ModelOutput:
        """The vectors, as ordinary tensors, and the errors of what is no vector."""
        if self._event is not None:
            self._event.synchronize()
        output = ModelOutput({}, {})
        for seq_id, params, vector in zip(self._seq_ids, self._params, self._vectors, strict=True):
            if vector.isfinite().all():
                output.pooler_output[seq_id] = apply_head(vector, params)
            else:
                output.errors[seq_id] = RequestError(NOT_FINITE)
        return output


def apply_head(vector: Tensor, params: PoolingParams) -> Tensor:
    """[hidden] -> [dimensions]: the part of the vector that is asked for, then divided by its
    length if it is to be normalised (vLLM: EmbeddingPoolerHead)."""
    part = vector[: params.dimensions].clone()  # not a view: that would keep the whole step's
    return F.normalize(part, dim=-1) if params.use_activation else part
