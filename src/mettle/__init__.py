"""Mettle: an open, self-hosted lab for training language models with reinforcement learning."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # `mettle.RLTrainer` is imported when it is asked for: most programs need a small part of Mettle alone.
    if name == "RLTrainer":
        from mettle.runs.python import RLTrainer

        return RLTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
