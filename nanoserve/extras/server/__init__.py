"""How does a request come over HTTP to the engine, and its answer back?"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoserve.extras.server.app import ServerState as ServerState
    from nanoserve.extras.server.app import build_app as build_app
    from nanoserve.extras.server.cli import main as main

MODULES = {"ServerState": "app", "build_app": "app", "main": "cli"}


def __getattr__(name: str) -> object:
    """A module is imported when a name of it is used: the command reads its flags without
    FastAPI."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
