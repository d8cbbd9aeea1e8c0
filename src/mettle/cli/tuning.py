"""What the commands that train on a file have in common: their options, the line of a step and the last word."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any

import click

from mettle.cli.terminal import going_on, json_option, print_json, print_next

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


@dataclass(frozen=True, slots=True)
class TuningAsked:
    """What the options say; `lr` None is the usual rate."""

    file: Path
    model: Path
    folder: Path
    is_full: bool
    rank: int
    epochs: float
    batch_size: int
    dtype: str
    checkpointing: bool
    seed: int
    checkpoint_s: float
    lr: float
    is_json: bool

    def task(self) -> dict[str, Any]:
        """The arguments of a `mettle.trainer.epochs.Tuning`."""
        from mettle.trainer.config import LoraConfig

        return {
            "data": self.file,
            "model": self.model,
            "to": self.folder,
            "lora": None if self.is_full else LoraConfig(rank=self.rank, alpha=2.0 * self.rank),
            "lr": self.lr,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "dtype": self.dtype,
            "num_threads": max(1, (os.cpu_count() or 2) - 1),
            "is_checkpointing": self.checkpointing,
            "checkpoint_s": self.checkpoint_s,
        }

    def carry_out(
        self,
        train: Callable[[StepLines], dict[str, Any]],
        show: Callable[[dict[str, float]], str],
        sum_up: Callable[[dict[str, Any]], str],
    ) -> None:
        """Train, saying how it goes by `show`, and then what came of it by `sum_up`."""
        with going_on("the same command goes on from its newest checkpoint"):
            done = train(StepLines(show, is_silent=self.is_json))
        if self.is_json:
            print_json(done | {"folder": str(self.folder), "kind": "full" if self.is_full else "lora"})
            return
        click.echo(f"wrote {self.folder}: {sum_up(done)} in {done['steps']} steps")
        chat, merge = (
            f'mettle inference chat {self.folder} -q "..."',
            f"mettle adapter merge {self.folder} MODEL_FOLDER",
        )
        print_next(chat if self.is_full else merge)


def tuning_options(*, lora_lr: float, full_lr: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The file, the model, where to, and how, which the command is given as one `TuningAsked`."""
    lr = click.option(
        "--lr", type=click.FloatRange(min=0, min_open=True),
        help=f"Peak learning rate.  [default: {lora_lr:g}; {full_lr:g} with --full]",
    )  # fmt: skip

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def gathered(**given: Any) -> None:
            values = {f.name: given.pop(f.name) for f in fields(TuningAsked)}
            values["lr"] = values["lr"] or (full_lr if values["is_full"] else lora_lr)
            command(TuningAsked(**values), **given)

        for option in reversed((*_OPTIONS, lr, json_option)):
            gathered = option(gathered)
        return gathered

    return decorate


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
