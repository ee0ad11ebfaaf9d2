"""What does a client read when its request is refused, or fails?

Every error has OpenAI's shape, whoever found it:

    HTTP/1.1 400 Bad Request
    {"error": {"message": "top_p is 2; allowed: above 0, up to 1", "type": "BadRequestError",
               "param": "top_p", "code": 400}}

An error that comes in the middle of a stream is such an object, too, in a chunk of its own.

400 and 404 are the request's fault, and say what to do. 503 is nobody's fault, and passes: the
queue is full, or the server is about to end. 500 is the server's fault: the client reads that it
happened, and the log has the traceback. A ValueError or TypeError counts as the request's, as in
vLLM: the engine raises them for a request that it does not take.

vLLM: vllm/entrypoints/serve/exception_handling/ (V1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from nanoserve.exceptions import EngineDeadError, QueueOverflowError, brief
from nanoserve.logger import init_logger

logger = init_logger(__name__)

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
RETRY_AFTER = {"Retry-After": "1"}  # seconds; OpenAI's client obeys
SHUTTING_DOWN = "this server is shutting down."
ENGINE_DEAD = "the engine has failed, and serves no request any more. The server's log says why."
MOST_ERRORS = 100  # of one body; a list of a million wrong items has as many


class HTTPError(Exception):
    """A request that is answered with an error. param: the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers

    def to_json(self) -> dict[str, Any]:
        """{"error": {...}}: the body of an answer, or a chunk of a stream that has begun."""
        kind = TYPES.get(self.status, TYPES[500 if self.status >= 500 else 400])
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.status,
            }
        }


def to_http_error(error: BaseException) -> HTTPError:
    """What is told of an error. What is nobody's business goes to the log instead."""
    match error:
        case HTTPError():
            return error
        case ValidationError() | RequestValidationError():
            return describe_validation(error)
        case HTTPException(status_code=404):
            return HTTPError(
                404,
                "there is no such path here; /openapi.json lists those there are. The base_url of "
                "OpenAI's client ends with /v1.",
            )
        case HTTPException(status_code=405):
            allowed = (error.headers or {}).get("Allow", "another one")
            message = f"this path does not take this method; allowed: {allowed}."
            return HTTPError(405, message, headers=error.headers)
        case HTTPException():
            return HTTPError(error.status_code, f"{error.detail}.", headers=error.headers)
        case QueueOverflowError():
            return HTTPError(503, str(error), headers=RETRY_AFTER)
        case EngineDeadError(__cause__=None):
            return HTTPError(503, SHUTTING_DOWN, headers=RETRY_AFTER)
        case EngineDeadError():
            return HTTPError(500, ENGINE_DEAD)
        case NotImplementedError():
            return HTTPError(501, str(error))
        case ValueError() | TypeError() | OverflowError():
            return HTTPError(400, str(error), getattr(error, "parameter", None))
    logger.error("a request failed", exc_info=error)
    return HTTPError(500, "an error of the server, not of the request. The server's log has it.")


def describe(error: BaseException) -> dict[str, Any]:
    """{"error": {...}} of any exception."""
    return to_http_error(error).to_json()


def error_response(error: BaseException) -> JSONResponse:
    """The answer that tells of an error."""
    told = to_http_error(error)
    return JSONResponse(told.to_json(), told.status, told.headers)


def describe_validation(error: ValidationError | RequestValidationError) -> HTTPError:
    """The first field that is wrong, and what is wrong with it. A field that may have several types
    has an error for each of them."""
    if isinstance(error, ValidationError) and error.error_count() > MOST_ERRORS:
        return HTTPError(400, f"{error.title}: {error.error_count()} values have a wrong type.")
    errors = list(error.errors())
    param = describe_place(errors[0]["loc"])
    reasons = [each["msg"] for each in errors if describe_place(each["loc"]) == param]
    given = errors[0]["input"]
    message = "; or ".join(dict.fromkeys(reasons))  # each once
    if param is None:
        return HTTPError(400, f"the body is no request: {message}.")
    shown = "" if errors[0]["type"] == "missing" else f" It is {brief(given)}."
    return HTTPError(400, f"{param}: {message}.{shown}", param)


def describe_place(loc: tuple[int | str, ...]) -> str | None:
    """("messages", 0, "str") -> "messages[0]"; None for the whole. pydantic adds the name of the
    type that it tried, which is no place."""
    place = ""
    for part in loc:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part.isidentifier() and part not in NO_PLACES:
            place += f".{part}" if place else part
    return place or None


# What pydantic calls types in a loc. Others, such as "list[int]", are no identifiers.
NO_PLACES = {"str", "int", "float", "bool", "none", "dict", "list", "tuple", "set", "body"}
