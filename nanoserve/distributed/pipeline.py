"""How does rank 0 sample when another stage has the logits?

With pipeline_parallel_size > 1 the layers are divided among stages (parallel.py shows the
messages). The last stage has the logits; the scheduler, the grammars and the users' callables are
on rank 0. So rank 0 launches a step, and samples when the step is read. Two stages, and two steps
in flight, A and B, each with half of the sequences:

    rank 0     launch A | launch B | sample A, launch A | sample B, launch B | ...
    layers     [ A ]      [ B ]                [ A ]                [ B ]
    stage 1               [ A ]                [ B ]                [ A ]

A sequence with a token in flight waits, because stage 0 must know the token. As many steps are in
flight as there are stages; Scheduler._num_decodes_of_a_step divides the sequences among them.

A step that samples nothing (a chunk of a prompt) is answered, too, by one number. Otherwise rank 0
would run ahead with all chunks of a prompt: their hidden states would fill the memory, and a new
request would wait behind all of them.

The sampling parameters of a step are gathered at its launch. When it is read, its sequences may
have been aborted or preempted, and their rows may belong to others.

Left out: several virtual engines, each with a scheduler of its own (vLLM V0).

vLLM: vllm/worker/model_runner.py and vllm/engine/llm_engine.py (V0); vllm/v1/worker/gpu_worker.py,
step_with_batch_queue in vllm/v1/engine/core.py (V1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nanoserve import sampler
from nanoserve.device import current_device
from nanoserve.kernels.sampling import choose_tokens
from nanoserve.sampler import SamplingBatch
from nanoserve.sequence import ModelOutput

if TYPE_CHECKING:
    from nanoserve.model_runner import ModelRunner, PendingOutput, StepInputs


def sample_later(
    runner: ModelRunner,
    inputs: StepInputs,
    hidden: Tensor,
    branches: np.ndarray,
    positions: np.ndarray,
    make_output: Callable[..., PendingOutput],
) -> Any:
    """One rank's part in sampling a step, of whose rows ModelRunner.sample knows `branches` and
    `positions`. make_output(sampled, []) gives what a runner without stages returns; on rank 0 a
    PendingLogits is returned in its place."""
    parallel, batch, rows = runner.parallel, runner.batch, inputs.arrays.sampled_rows
    pending: Any = make_output(None, [])
    if parallel.is_last_stage:
        rows_of_logits = hidden.index_select(0, inputs.tensors.logits_indices)
        answer = runner.model.compute_logits(rows_of_logits) if len(rows) else hidden[:1, :1]
        parallel.send(answer, parallel.back)
    if parallel.rank == 0:
        shape = (len(rows), runner.model_config.vocab_size) if len(rows) else (1, 1)
        logits = torch.empty(shape, dtype=runner.dtype, device=runner.device)
        receive = parallel.start_receive(logits, parallel.back)  # also if nobody reads the step
        sampling_batch = batch.make_sampling_batch(rows, branches, positions)
        places = dict(zip(batch.seq_ids[rows].tolist(), positions.tolist(), strict=True))
        pending = PendingLogits(runner, receive, sampling_batch, places, make_output)
    batch.append_placeholders(rows)
    return pending


class PendingLogits:
    """A step that was launched on all stages. `result()` waits for the last one, and samples."""

    def __init__(
        self,
        runner: ModelRunner,
        receive: Callable[[], Tensor],
        sampling_batch: SamplingBatch,
        positions: dict[int, int],  # seq_id -> where its token will be
        make_output: Callable[..., PendingOutput],
    ) -> None:
        self._runner, self._receive = runner, receive
        self._sampling_batch, self._positions = sampling_batch, positions
        self._make_output = make_output

    @torch.inference_mode()
    def result(self) -> ModelOutput:
        """The sampled tokens, and the errors of what cannot be sampled."""
        runner, batch = self._runner, self._runner.batch
        with current_device(runner.device):
            logits = self._receive()
            if not self._positions:
                return self._make_output(None, []).result()
            sampled = sampler.sample(logits, self._sampling_batch, choose_tokens)
            output = self._make_output(sampled, []).result()
            tokens = {seq_id: ids[0] for seq_id, ids in output.sampled_token_ids.items()}
            known = [seq_id for seq_id in tokens if seq_id in batch.row_of]
            # The next step reads them on the CPU; penalties count them here, on the device.
            rows = torch.tensor([batch.row_of[seq_id] for seq_id in known], device=runner.device)
            token_ids = torch.tensor([tokens[seq_id] for seq_id in known], device=runner.device)
            batch.last_sampled_token_ids[rows.long()] = token_ids.long()
        if runner.parallel.tp_size > 1:  # others of this stage look up the tokens
            for seq_id in known:
                runner.new_token_ids.append((seq_id, self._positions[seq_id], tokens[seq_id]))
        return output
