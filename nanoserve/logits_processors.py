"""What may a request's own Python do to its logits?

    SamplingParams(logits_processors=[double])      def double(output_token_ids, logits):
                                                        return 2 * logits

Such a callable is called once a token, with the logits of its own row. Nothing is believed of it:
whatever it raises or returns ends its own request at most (`errors`), and the other rows of the
batch get exactly their tokens. It is slow, because the CPU has to know all tokens so far: so its
request takes no part in overlapped steps.

Most requests have none. This is a stage of sampler.py.

vLLM: vllm/model_executor/layers/logits_processor.py (V0); vllm/v1/sample/logits_processor/ (V1,
where a processor changes a whole batch).
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch
from torch import Tensor

from nanoserve.exceptions import Caught, RequestError, brief, describe_error
from nanoserve.sampling_params import LogitsProcessor


class RequestProcessors(NamedTuple):
    """The Python callables of one request, and the token ids that they are called with."""

    logits_row: int
    processors: tuple[LogitsProcessor, ...]
    prompt_token_ids: list[int]
    output_token_ids: list[int]


def apply_logits_processors(
    logits: Tensor, requests: tuple[RequestProcessors, ...], errors: dict[int, BaseException]
) -> Tensor:
    """Call each request's callables, in their order, on the logits [vocab_size] of its row.

    As in V0, a callable with two parameters gets (output token ids, logits), one with three gets
    (prompt token ids, output token ids, logits). If one raises anything, or returns anything but a
    plain tensor like the one it got, this is noted in `errors`.
    """
    logits = logits.clone()
    for request in requests:
        row = request.logits_row
        with Caught() as caught:
            logits[row] = _run_processors(request, logits[row])
        if caught.error is not None:
            message = f"a logits processor failed: {describe_error(caught.error)}"
            errors[row] = RequestError(message)
            errors[row].__cause__ = caught.error
    return logits


def _run_processors(request: RequestProcessors, logits: Tensor) -> Tensor:
    """The logits [vocab_size] that the request's callables make of `logits`."""
    for processor in request.processors:
        arguments: list[list[int]] = [request.output_token_ids]
        if _num_required_parameters(processor) == 3:
            arguments = [request.prompt_token_ids, request.output_token_ids]
        result = processor(*arguments, logits.clone())
        if not _is_like(result, logits):
            raise RequestError(
                f"{brief(processor)} must return a tensor of shape {tuple(logits.shape)}, of "
                f"floats, on {logits.device}; got {brief(result)}."
            )
        logits = result
    return logits


def _is_like(result: object, logits: Tensor) -> bool:
    """Is it a dense tensor of floats (no subclass), with the shape and on the device of `logits`?
    (The shape is asked for last: a nested tensor has none.)"""
    return (
        type(result) is Tensor
        and not result.is_nested
        and result.layout is torch.strided
        and result.is_floating_point()
        and (result.device, result.shape) == (logits.device, logits.shape)
    )


def _num_required_parameters(processor: LogitsProcessor) -> int:
    """Parameters without a default; `lambda output, logits, k=k: ...` has two."""
    parameters = inspect.signature(processor).parameters.values()
    return sum(parameter.default is inspect.Parameter.empty for parameter in parameters)
