"""How is an option read that is a dict of further ones? As a dataclass with this base:

    @dataclass(frozen=True)
    class SpeculativeConfig(OptionDict):
        option = "speculative_config"
        method: str = "ngram"

    SpeculativeConfig.read({"method": "ngram"})    or its JSON text, or such an object
    SpeculativeConfig.read({"metod": "ngram"})     TypeError: speculative_config has no key 'metod'

A value that is not allowed is a ValueError or TypeError with the name of its key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from nanoserve.config import check_option


class OptionDict:
    """The base of such a dataclass. Raises ValueError or TypeError for a value that is not allowed,
    with the name of its field."""

    option = ""  # its name, for messages

    @classmethod
    def read(cls, value: Any) -> Any:
        """From a dict, of which None means the default; see above."""
        given = json.loads(value) if isinstance(value, str) else value
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise TypeError(f"{cls.option} must be a dict, got {value!r}.")
        names = [each.name for each in fields(cls)]
        for name in given.keys() - set(names):
            raise TypeError(f"{cls.option} has no key {name!r}, but {', '.join(names)}.")
        return cls(**{name: each for name, each in given.items() if each is not None})

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            check_option(f"{self.option}: {name}", getattr(self, name), hint)
