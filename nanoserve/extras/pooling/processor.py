"""How does a prompt become a request for a vector, and a vector an output?

What a pooling engine has in place of the core's own classes; the rest of the engine is the same.

    PoolingInputProcessor    PoolingParams are checked; the prompt may fill max_model_len, because
                             no token comes behind it
    PoolingScheduler         a sequence ends with its vector
    PoolingRequestState      the request's consumer: makes the PoolingRequestOutput

A sequence that waits for its vector is scheduled as one that waits for its first token: the step
with the last token of its prompt brings it. So chunks, preemption, priorities, aborts, overlapped
steps and the search for a request that makes steps fail need nothing new.

vLLM: vllm/v1/engine/: input_processor.py, output_processor.py, and the pooling branch of
vllm/v1/core/sched/scheduler.py (V1); vllm/core/scheduler.py (V0).
"""

from __future__ import annotations

import time
from typing import Any

from nanoserve.exceptions import VLLMValidationError, brief, describe_error
from nanoserve.extras.pooling.outputs import PoolingOutput, PoolingRequestOutput, RequestError
from nanoserve.extras.pooling.params import PoolingParams, as_sampling_params
from nanoserve.input_processor import InputProcessor
from nanoserve.inputs import PromptType, check_request, parse_prompt, pick_salt
from nanoserve.output_processor import OutputProcessor, RequestState
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import (
    ModelOutput,
    RequestMetrics,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
)


class PoolingInputProcessor(InputProcessor):
    """Prompts and PoolingParams in, checked Sequences out."""

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        sampling_params: SamplingParams | PoolingParams,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Sequence:
        """A Sequence for one request; sampling_params are PoolingParams. Raises ValueError or
        TypeError for a request that this engine can never run."""
        priority = check_request(request_id, priority)
        if isinstance(sampling_params, SamplingParams):
            raise VLLMValidationError(
                f"{self.model_config.path.name} runs as a pooling model, which makes vectors and "
                "writes no text. Use embed, encode or score (of a server /v1/embeddings or "
                "/v1/score). To write text, build the engine with runner='generate'."
            )
        if not isinstance(sampling_params, PoolingParams):
            given = brief(sampling_params)
            raise TypeError(f"pooling_params must be PoolingParams, got {given}.")
        params = sampling_params.verify(self.model_config, self.config)
        components = parse_prompt(prompt)
        cache_salt = pick_salt(components.cache_salt, cache_salt)
        prompt_token_ids = self.tokenize(components)
        if (number := len(prompt_token_ids)) > self.capacity:
            limit = f"max_model_len={self.max_model_len}"
            if number <= self.max_model_len:
                limit = f"the whole KV cache holds ({self.kv_capacity} tokens)"
            text = f"the prompt has {number} tokens, which is more than {limit}. Shorten it."
            raise VLLMValidationError(text)
        return Sequence(
            seq_id=self.next_seq_ids(),
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=as_sampling_params(params),
            max_tokens=1,  # the vector, while it is in flight
            stop_token_ids=frozenset(),
            seed=0,
            metrics=RequestMetrics(arrival_time=time.time(), queued_ts=time.monotonic()),
            prompt=components.text,
            priority=priority,
            cache_salt=cache_salt,
        )


class PoolingScheduler(Scheduler):
    """Ends a sequence when its vector comes."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelOutput
    ) -> list[SequenceUpdate]:
        """Report and end the sequences whose vectors this step brought, or whose errors. A vector
        of a sequence that was aborted while the step ran is dropped."""
        updates: list[SequenceUpdate] = []
        for item in scheduler_output.scheduled:
            seq = self.sequences.get(item.seq_id)
            if seq is None:
                continue
            pooled = model_output.pooler_output.get(item.seq_id)
            error = model_output.errors.get(item.seq_id)
            if pooled is None and error is None:
                if item.num_computed_tokens + item.num_scheduled_tokens >= seq.num_tokens:
                    raise RuntimeError(
                        f"the model's output has no vector for sequence {item.seq_id}. A "
                        "runner_cls of a pooling engine is a subclass of PoolingModelRunner "
                        "(nanoserve.extras.pooling.runner)."
                    )
                continue  # a chunk
            updates.append(SequenceUpdate(seq, (), (), error=error, pooler_output=pooled))
            if error is None:
                self.finish(seq.seq_id, SequenceStatus.FINISHED_STOPPED)
            else:
                status = SequenceStatus.FINISHED_ERROR
                self.finish(seq.seq_id, status, describe_error(error))
        return updates


class PoolingRequestState(RequestState):
    """The consumer of a request for a vector."""

    pooled: Any = None  # the vector [dimensions], when it has come

    def process(self, updates: list[SequenceUpdate]) -> Any:
        """Take the vector; return the PoolingRequestOutput."""
        self.pooled = updates[-1].pooler_output
        return super().process(updates)

    def _build_output(self, changed: list[Sequence]) -> Any:
        """The PoolingRequestOutput of a request that has ended, with its vector or with an error;
        also of one that was aborted."""
        import torch

        error, reason = None, self.root.status.finish_reason
        if self.pooled is None:
            message = self.root.stop_reason or "the request was aborted"
            error = RequestError(str(reason), str(message))
        return PoolingRequestOutput(
            request_id=self.request_id,
            outputs=PoolingOutput(torch.empty(0) if self.pooled is None else self.pooled),
            prompt_token_ids=self.prompt_token_ids,
            num_cached_tokens=self.root.num_cached_tokens,
            finished=True,
            error=error,
        )


class PoolingOutputProcessor(OutputProcessor):
    """The consumers of all unfinished requests for vectors."""

    def make_state(self, sequence: Sequence) -> PoolingRequestState:
        """The consumer of a request."""
        return PoolingRequestState(sequence, None, self.finish)
