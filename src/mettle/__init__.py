"""Mettle: an open, self-hosted lab for training language models with reinforcement learning."""

from __future__ import annotations

TYPE_CHECKING = False
"""Not the one of `typing`: `mettle_names.pth` imports this file at each start of an interpreter, whoever's it is."""
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"


_LAZY = {
    "RLTrainer": ("mettle.runs.rl_trainer", "RLTrainer"),
    "Client": ("mettle.clients.hub", "HubClient"),
    "AsyncClient": ("mettle.clients.hub_async", "AsyncHubClient"),
    "HubContext": ("mettle.clients.hub_contexts", "HubContext"),
}


def __getattr__(name: str) -> Any:
    # What a program begins with is imported when it is asked for: most need a small part of Mettle alone. By name, for
    # an import statement would make the whole package a circle to type checkers.
    if name in _LAZY:
        from importlib import import_module

        module, own = _LAZY[name]
        return getattr(import_module(module), own)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
