"""What may the output of a request look like, and who sees to it?

One of six constraints, with vLLM's names:

    StructuredOutputsParams(regex="[0-9]{4}-[0-9]{2}")
    StructuredOutputsParams(choice=["yes", "no"])
    StructuredOutputsParams(json={"type": "object", "properties": {...}})    or its JSON text
    StructuredOutputsParams(json_object=True)                                any JSON object
    StructuredOutputsParams(grammar='root ::= "a" root | "b"')               EBNF, or Lark
    StructuredOutputsParams(structural_tag='{"type": "structural_tag", ...}')

    llm.generate("The year is", SamplingParams(structured_outputs=...))

Whether a backend has each feature of a schema or regex is asked when the request is added. Here are
the checks that need no backend: types, sizes, nesting.

StructuredOutputsConfig is an option of the engine:

    LLM(structured_outputs_config={"backend": "guidance"})

vLLM: GuidedDecodingParams in vllm/sampling_params.py (V0); StructuredOutputsParams there and
vllm/config/structured_outputs.py (V1).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nanoserve.chapters.structured_output.backend import BACKENDS, StructuredOutputOptions
from nanoserve.entrypoints.errors import VLLMValidationError, brief, explain_unknown
from nanoserve.entrypoints.prompts import as_python, check_is_dict, parse_option

SPEC_LIMIT = 2**18  # characters of a schema, a regex, a grammar, ...
CHOICES_LIMIT = 2**12  # strings of `choice`
NESTING_LIMIT = 64  # objects and arrays within each other, in JSON
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
TEXTS = ("regex", "grammar", "structural_tag", "whitespace_pattern")  # must be strings
EXAMPLE = '{"backend": "xgrammar"}'
# vLLM's other keys of structured_outputs_config, with the values that change nothing here.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "reasoning_parser": ("",),
    "reasoning_parser_plugin": ("",),
    "enable_in_reasoning": (False,),
}


@explain_unknown({"backend": "it is of the engine: structured_outputs_config={'backend': ...}."})
@dataclass
class StructuredOutputsParams:
    """What the output must obey: exactly one of the constraints. The fields and their order are
    vLLM's. Raises VLLMValidationError, a ValueError, for a value that is not allowed and TypeError
    for a wrong type. A request has a copy, which is checked again."""

    json: str | dict[str, Any] | None = None  # a JSON schema
    regex: str | None = None  # of the whole output
    choice: list[str] | None = None  # the output is one of these
    grammar: str | None = None  # EBNF (in the form of GBNF), or Lark
    json_object: bool | None = None  # True: any JSON object
    disable_any_whitespace: bool = False  # JSON without spaces and line breaks between its parts
    disable_additional_properties: bool = False  # objects have the properties of the schema only
    whitespace_pattern: str | None = None  # a regex of what may stand between the parts of JSON
    structural_tag: str | None = None  # JSON: free text, with parts that obey a schema

    def __post_init__(self) -> None:
        for each in fields(self):
            setattr(self, each.name, as_python(getattr(self, each.name)))
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            what = " and ".join(given) or "none"
            raise _error(f"it has {what}; allowed: exactly one of {', '.join(CONSTRAINTS)}.")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            _check_bool(f"structured_outputs: {name}", getattr(self, name))
        for name in TEXTS:
            value = getattr(self, name)
            if not isinstance(value, (str, type(None))):
                advice = " json.dumps(...) makes one of a dict." * (name == "structural_tag")
                what = f"structured_outputs: {name} must be a string, got {brief(value)}."
                raise TypeError(what + advice)
        if self.json_object not in (None, True):
            raise _error(f"json_object is {brief(self.json_object)}; allowed: True, or None.")
        self._check_choice()
        self._check_text()

    def _check_choice(self) -> None:
        if self.choice is None:
            return
        try:
            choice = list(self.choice) if isinstance(self.choice, (list, tuple)) else []
        except Exception as error:  # a list of the caller's own may raise any
            message = f"choice is {brief(self.choice)}, which cannot be read ({error})."
            raise _error(message) from error
        if not choice:
            raise _error(f"choice is {brief(self.choice)}; allowed: a list of strings, not empty.")
        if len(choice) > CHOICES_LIMIT:
            raise _error(f"choice has {len(choice)} items; allowed: up to {CHOICES_LIMIT}.")
        for each in choice:
            if not isinstance(each, str):
                raise _error(f"choice holds {brief(each)}; allowed: strings.")
        self.choice = choice

    def _check_text(self) -> None:
        """What a backend gets must be text of bounded size, and JSON where it is to be JSON."""
        kind, text = self.key
        name = kind.name.lower()
        for part, value in ((name, text), ("whitespace_pattern", self.whitespace_pattern or "")):
            if len(value) > SPEC_LIMIT:
                raise _error(f"{part} has {len(value)} characters; allowed: up to {SPEC_LIMIT}.")
            if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
                message = f"{part} is {brief(value)}; allowed: no NUL, no half of a character."
                raise _error(message)
        if kind is StructuredOutputOptions.GRAMMAR and not text.strip():
            raise _error('grammar is empty; allowed: rules, such as \'root ::= "a" | "b"\'.')
        if kind in (StructuredOutputOptions.JSON, StructuredOutputOptions.STRUCTURAL_TAG):
            _check_json(name, text)

    @property
    def key(self) -> tuple[StructuredOutputOptions, str]:
        """The constraint as a backend gets it: its kind and its text (of a choice: a JSON list)."""
        [name] = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        value = getattr(self, name)
        if name == "json_object":
            value = ""
        elif not isinstance(value, str):
            if name == "json" and not isinstance(value, Mapping):
                what = f"structured_outputs: json must be a dict or its JSON, got {brief(value)}"
                raise TypeError(f"{what}. Of a pydantic model: json=Model.model_json_schema().")
            try:
                value = json.dumps(value, ensure_ascii=False, allow_nan=False)
            except Exception as error:  # a dict of the caller's own may raise any
                message = f"{name} is {brief(value)}, which cannot be written as JSON ({error})."
                raise _error(message) from None
        return StructuredOutputOptions[name.upper()], value


def _check_json(name: str, text: str) -> None:
    """Raise unless `text` is JSON, an object or a Boolean, that is not nested too deeply."""
    too_deep = _error(f"{name} is nested more than {NESTING_LIMIT} levels deep; allowed: less.")
    try:
        level = [json.loads(text)]
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        raise _error(f"{name} is {brief(text)}, which is not JSON ({error}).") from None
    if not isinstance(level[0], (dict, bool)):
        raise _error(f"{name} is {brief(text)}; allowed: a JSON object.")
    for _ in range(NESTING_LIMIT):
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise too_deep


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {brief(value)}.")


def _error(message: str) -> VLLMValidationError:
    return VLLMValidationError(f"structured_outputs: {message}", parameter="structured_outputs")


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """The keys of structured_outputs_config. Raises ValueError or TypeError for values that are not
    allowed."""

    # auto: for regex and choice automaton.py, for all else xgrammar. What one of them refuses, or
    # what is not installed, goes to the next one of backend.AUTO.
    backend: str = "auto"
    disable_any_whitespace: bool = False  # in all requests
    disable_additional_properties: bool = False  # in all requests

    @classmethod
    def read(cls, value: Any) -> StructuredOutputsConfig:
        """From a dict, its JSON text, or a StructuredOutputsConfig."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            value = parse_option("structured_outputs_config", value, EXAMPLE)
        check_is_dict("structured_outputs_config", value, EXAMPLE)
        names = [each.name for each in fields(cls)]
        for name, given in value.items():
            if name not in names and given not in ACCEPTED.get(name, ()):
                advice = f"it has: {', '.join(names)}"
                if name in ACCEPTED:
                    advice = "nanoserve has no parser of reasoning. Leave it out"
                raise ValueError(
                    f"structured_outputs_config: {brief(name)} is {brief(given)}; {advice}."
                )
        return cls(**{name: value[name] for name in names if name in value})

    def __post_init__(self) -> None:
        if self.backend not in ("auto", *BACKENDS):
            raise ValueError(
                f"structured_outputs_config: backend is {brief(self.backend)}; allowed: auto, "
                f"{', '.join(BACKENDS)}."
            )
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            _check_bool(f"structured_outputs_config: {name}", getattr(self, name))
