"""What does a client read when its request is refused, or fails?

Every error has OpenAI's shape, whoever found it, also as an event in the middle of a stream:

    HTTP/1.1 400 Bad Request
    {"error": {"message": "top_p is 2; allowed: above 0, up to 1", "type": "BadRequestError",
               "param": "top_p", "code": 400}}

400 and 404 are the request's fault, and say what to do; a ValueError or TypeError of the engine is
one. 503 passes: the queue is full, or the server is about to end. 500 is the server's fault: the
client reads that it happened, and the log has the traceback.

vLLM: vllm/entrypoints/serve/exception_handling/ (V1).
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from nanoserve.entrypoints.async_llm import QueueOverflowError
from nanoserve.sequence import EngineDeadError

logger = logging.getLogger("nanoserve")


def to_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status and the body that tell of an error."""
    status, message, param = 500, str(error), None
    if isinstance(error, StarletteHTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        param = ".".join(each for each in first["loc"][1:] if isinstance(each, str)) or None
        message = first["msg"].removeprefix("Value error, ")
        status, message = 400, f"{param}: {message}" if param else message
    elif isinstance(error, (QueueOverflowError, EngineDeadError)):
        status = 503
    elif isinstance(error, (ValueError, TypeError)):
        status = 400
    else:
        logger.error("a request failed", exc_info=error)
        message = "an error of the server, not of the request; its log has it."
    kind = HTTPStatus(status).phrase.replace(" ", "").removesuffix("Error") + "Error"
    return status, {"error": {"message": message, "type": kind, "param": param, "code": status}}


async def on_error(_: Request, error: Exception) -> JSONResponse:
    """The handler of exceptions."""
    status, body = to_error(error)
    return JSONResponse(body, status, {"Retry-After": "1"} if status == 503 else None)


HANDLED = (  # FastAPI has handlers of its own for the first two
    StarletteHTTPException,
    RequestValidationError,
    HTTPException,
    EngineDeadError,
    QueueOverflowError,
    ValueError,
    TypeError,
    Exception,
)
