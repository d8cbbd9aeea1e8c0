"""What the commands that train on a file have in common: their options, and the line of a step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False)),
    click.option(
        "--model", required=True, type=click.Path(path_type=Path), help="Model directory in the Hugging Face layout."
    ),
    click.option("--to", "folder", required=True, type=click.Path(path_type=Path), help="Folder for what is trained."),
    click.option("--full", "is_full", is_flag=True, help="Train all weights instead of an adapter."),
    click.option("--rank", type=click.IntRange(min=1), default=16, show_default=True, help="Rank of the adapter."),
    click.option(
        "--epochs", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, help="Passes."
    ),
    click.option(
        "--batch-size", type=click.IntRange(min=1), default=16, show_default=True, help="Examples a step."
    ),
    click.option(
        "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", help="Of forward and backward."
    ),
    click.option("--checkpointing", is_flag=True, help="Compute activations again: slower, much less memory."),
    click.option("--seed", type=int, default=0, help="Order of the examples and the adapter's start."),
    click.option(
        "--checkpoint-s", type=click.FloatRange(min=0), default=30.0, show_default=True,
        help="Seconds between checkpoints, from the newest of which the same command goes on after a kill.",
    ),
)  # fmt: skip


def tuning_options(command: Command) -> Command:
    """The file, the model, where to, and how."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def tuning_threads() -> int:
    """Threads of torch: all cores but one."""
    return max(1, (os.cpu_count() or 2) - 1)


class StepLines:
    """Says about twenty times how it goes, and where it goes on."""

    def __init__(self, show: Callable[[dict[str, float]], str], *, is_silent: bool) -> None:
        self._show = show
        self._is_silent = is_silent
        self._is_begun = False

    def __call__(self, step: int, num_steps: int, figures: dict[str, float]) -> None:
        if not self._is_silent:
            if not self._is_begun and step > 1:
                click.echo(f"going on after step {step - 1}", err=True)
            if step in (1, num_steps) or step % max(1, num_steps // 20) == 0:
                click.echo(f"step {step}/{num_steps}  {self._show(figures)}", err=True)
        self._is_begun = True
