"""What form must an answer have?

    {"response_format": {"type": "json_schema",                      OpenAI's field
                         "json_schema": {"name": "city", "schema": {...}, "strict": true}}}
    {"structured_outputs": {"regex": "[0-9]+"}}                      vLLM's
    {"tools": [...], "tool_choice": "required"}                      a call, in the model's format

    -> StructuredOutputsParams(json={...}) of the request's SamplingParams

With both of the first two, structured_outputs may have options only, such as
disable_any_whitespace. With tools and tool_choice "auto", an answer is a call or has the form: the
two become one structural tag, which has no options. With "required" or a function there is no such
answer: response_format does not matter, and structured_outputs are an error.

A schema is always followed, also if "strict" is false. (In OpenAI's API, such a schema is a hint.)

vLLM: vllm/entrypoints/openai/protocol.py (V0); vllm/entrypoints/generate/base/protocol.py (V1).
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn

from nanoserve.exceptions import VLLMValidationError, brief

if TYPE_CHECKING:
    from nanoserve.extras.structured_output import StructuredOutputsParams

Json = dict[str, Any]

TYPES = "'text', 'json_object', 'json_schema', 'structural_tag'"
SCHEMA = "{'name': ..., 'schema': {...}}"
TAG = "{'type': 'structural_tag', 'format': {...}}, or one with 'structures' and 'triggers'"


def read_response_format(response_format: Any) -> Json:
    """The field of StructuredOutputsParams that says the same; {} for any text. Raises
    ValueError."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if response_format is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        return {"json": read_schema(response_format.get("json_schema"))}
    if kind != "structural_tag":
        allowed = f"an object with a type of {TYPES}"
        _refuse(f"response_format is {brief(response_format)}; allowed: {allowed}.")
    if not ("format" in response_format or {"structures", "triggers"} <= set(response_format)):
        _refuse(f"response_format is {brief(response_format)}; allowed: {TAG}.")
    return {"structural_tag": json.dumps(response_format)}


def read_schema(given: Any) -> Json:
    """The JSON schema of a response_format."""
    if not isinstance(given, dict):
        _refuse(f"response_format.json_schema is {brief(given)}; allowed: {SCHEMA}.")
    for name, kinds, allowed in (
        ("name", (str,), "a string"),
        ("schema", (dict,), "a JSON schema as an object"),
        ("strict", (bool, type(None)), "true, false, or leave it out"),
    ):
        if not isinstance(given.get(name), kinds):
            value = brief(given.get(name))
            _refuse(f"response_format.json_schema.{name} is {value}; allowed: {allowed}.")
    return given["schema"]


def read_structured_outputs(given: Any) -> Json:
    """Those fields of a request's structured_outputs that say something. Raises ValueError or
    TypeError."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise TypeError(f"structured_outputs must be an object, got {brief(given)}.")
    known = [each.name for each in fields(get_params_cls())]
    for name in given:
        if name not in known:
            allowed = ", ".join(known)
            message = f"structured_outputs has a field {brief(name)}; allowed: {allowed}."
            raise VLLMValidationError(message, parameter="structured_outputs")
    return {name: value for name, value in given.items() if value is not None}


def make_params(form: Json) -> StructuredOutputsParams | None:
    """None for no fields. Raises ValueError or TypeError."""
    return get_params_cls()(**form) if form else None


def get_params_cls() -> type[StructuredOutputsParams]:
    """The class of the chapter, which may have been deleted: a ValueError says so."""
    try:
        from nanoserve.extras.structured_output import StructuredOutputsParams
    except ModuleNotFoundError as error:
        message = "this server has no extras/structured_output: answers have no given form."
        raise VLLMValidationError(message, parameter="structured_outputs") from error
    return StructuredOutputsParams


def as_format(params: StructuredOutputsParams) -> Json:
    """The same constraint as a part of a structural tag. Raises ValueError."""
    if params.json_object:
        return json_format({"type": "object"})
    if params.json is not None:
        return json_format(json.loads(params.json) if isinstance(params.json, str) else params.json)
    if params.regex is not None:
        return {"type": "regex", "pattern": params.regex}
    if params.grammar is not None:
        return {"type": "grammar", "grammar": params.grammar}
    if params.choice is not None:
        texts = [{"type": "const_string", "value": each} for each in params.choice]
        return {"type": "or", "elements": texts}
    tag = json.loads(params.structural_tag or "{}")
    if "format" in tag:
        return tag["format"]
    try:  # the older form
        tags = [as_tag(each) for each in tag["structures"]]
        return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    except (KeyError, TypeError, AttributeError):
        _refuse(f"the structural tag is {brief(tag)}; allowed: {TAG}.")


def as_tag(structure: Json) -> Json:
    """A structure of the older form of structural tags."""
    content = json_format(structure.get("schema") or True)
    return {"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]}


def json_format(schema: Json | bool) -> Json:
    """JSON as a part of a structural tag. A weak model writes white space for ever if it may."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}


def _refuse(message: str) -> NoReturn:
    raise VLLMValidationError(message, parameter="response_format")
