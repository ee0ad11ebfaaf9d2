"""What may the output of a request look like, and who sees to it?

One of six constraints, with vLLM's names:

    StructuredOutputsParams(regex="[0-9]{4}-[0-9]{2}")
    StructuredOutputsParams(choice=["yes", "no"])
    StructuredOutputsParams(json={"type": "object", "properties": {...}})    or its JSON text
    StructuredOutputsParams(json_object=True)                                any JSON object
    StructuredOutputsParams(grammar='root ::= "a" root | "b"')               EBNF, or Lark
    StructuredOutputsParams(structural_tag='{"type": "structural_tag", ...}')

    llm.generate("The year is", SamplingParams(structured_outputs=...))      or a dict of the fields

The engine's option, which no request needs, is StructuredOutputsConfig:

    LLM(structured_outputs_config={"backend": "xgrammar"})

vLLM: GuidedDecodingParams in vllm/sampling_params.py (V0); StructuredOutputsParams there and
vllm/config/structured_outputs.py (V1).
"""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from typing import Literal

from nanoserve.chapters.option_dict import OptionDict
from nanoserve.config import check_option

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass
class StructuredOutputsParams(OptionDict):
    """What the output must obey: exactly one of the constraints. The fields and their order are
    vLLM's. Raises ValueError or TypeError for a value that is not allowed; what a backend refuses
    is refused when the request is added."""

    option = "structured_outputs"
    json: str | dict | None = None  # a JSON schema
    regex: str | None = None  # of the whole output
    choice: list | None = None  # of strings: the output is one of these
    grammar: str | None = None  # EBNF (in the form of GBNF), or Lark
    json_object: bool | None = None  # True: any JSON object
    disable_any_whitespace: bool = False  # JSON without spaces and line breaks between its parts
    disable_additional_properties: bool = False  # changes nothing: see backend_xgrammar.py
    whitespace_pattern: str | None = None  # refused: no backend here has it
    structural_tag: str | None = None  # JSON: free text, with parts that obey a schema

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            found, allowed = " and ".join(given) or "no constraint", ", ".join(CONSTRAINTS)
            raise ValueError(f"structured_outputs has {found}; allowed: exactly one of {allowed}.")
        value = getattr(self, given[0])
        if (not value and given != ["json"]) or (isinstance(value, str) and "\0" in value):
            raise ValueError(f"structured_outputs: {given[0]} cannot be {value!r}.")
        for each in self.choice or ():
            check_option("structured_outputs: each choice", each, str)
        if self.whitespace_pattern is not None:
            raise ValueError("structured_outputs: whitespace_pattern is not supported.")

    @property
    def key(self) -> tuple[str, str]:
        """The constraint as a backend gets it: its name and its text (a choice as a JSON list).
        Raises ValueError or TypeError for a schema that cannot be JSON."""
        [name] = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        value = getattr(self, name)
        if name == "json_object":
            name, value = "json", {"type": "object"}
        is_text = isinstance(value, str)
        return name, value if is_text else json_module.dumps(value, allow_nan=False)


@dataclass(frozen=True)
class StructuredOutputsConfig(OptionDict):
    """The keys of structured_outputs_config, with vLLM's names."""

    option = "structured_outputs_config"
    backend: Literal["auto", "nano", "xgrammar"] = "auto"  # auto: see manager.py
    disable_any_whitespace: bool = False  # in all requests
    disable_additional_properties: bool = False  # as in a request
