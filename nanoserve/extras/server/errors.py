"""What does a client read when its request is refused, or fails?

Every error has OpenAI's shape, whoever found it:

    HTTP/1.1 400
    {"error": {"message": "top_p is 2, ...", "type": "BadRequestError", "param": "top_p",
               "code": 400}}

    code  type                      why
    400   BadRequestError           no JSON, a wrong type, a value that is not allowed
    401   AuthenticationError       no API key, or another one
    404   NotFoundError             no such path, no such model
    405   MethodNotAllowedError     GET where POST is meant
    413   RequestTooLargeError      a body above the limit
    500   InternalServerError       not the request's fault; what it was stands in the log alone
    501   NotImplementedError       a field of OpenAI's that does nothing here
    503   ServiceUnavailableError   the queue is full; it shuts down; the engine is dead

vLLM: vllm/entrypoints/serve/exception_handling/ (V1).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse

from nanoserve.exceptions import EngineDeadError, QueueOverflowError


class HTTPError(Exception):
    """A request that is answered with this status and this message."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


def to_http_error(error: BaseException) -> HTTPError:
    """What is told of an error."""
    if isinstance(error, HTTPError):
        return error
    if isinstance(error, (QueueOverflowError, EngineDeadError)):
        return HTTPError(503, str(error))
    if isinstance(error, (ValueError, TypeError)):
        return HTTPError(400, str(error), getattr(error, "parameter", None))
    return HTTPError(500, "internal error")


def describe(error: BaseException) -> dict[str, Any]:
    """{"error": {...}}: the body of an answer, or a chunk of a stream that had begun."""
    told = to_http_error(error)
    name = HTTPStatus(told.status).phrase.replace(" ", "") + "Error"
    return {
        "error": {"message": told.message, "type": name, "param": told.param, "code": told.status}
    }


def error_response(error: BaseException) -> JSONResponse:
    """The answer that tells of an error."""
    return JSONResponse(describe(error), to_http_error(error).status)
