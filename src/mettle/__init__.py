"""Mettle: an open, self-hosted lab for training language models with reinforcement learning."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # `mettle.RLTrainer` is imported when it is asked for: most programs need a small part of Mettle alone. By name, for
    # an import statement would make the whole package a circle to type checkers.
    if name == "RLTrainer":
        return import_module("mettle.runs.rl_trainer").RLTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
