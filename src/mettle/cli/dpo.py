"""`mettle dpo`: tuning on a file of preference pairs, without a run."""

from __future__ import annotations

from pathlib import Path

import click

from mettle.cli.groups import NounGroup
from mettle.cli.terminal import going_on, json_option, print_json, print_next
from mettle.cli.tuning import StepLines, tuning_options, tuning_threads

LORA_LR, FULL_LR = 2e-5, 1e-6
LOSSES = ("dpo", "ipo", "simpo", "orpo")


@click.group(cls=NounGroup)
def dpo() -> None:
    """Tune a model on a file of preference pairs: DPO and its relatives."""


@dpo.command("run")
@tuning_options
@click.option("--loss", type=click.Choice(LOSSES), default="dpo", show_default=True, help="What is minimised.")
@click.option(
    "--beta", type=click.FloatRange(min=0, min_open=True), help="Strength of the loss.  [default: 0.1; 2 for simpo]"
)
@click.option(
    "--label-smoothing", type=click.FloatRange(min=0, max=0.5, max_open=True), default=0.0, show_default=True,
    help="Share of the pairs that may be the wrong way round (dpo).",
)  # fmt: skip
@click.option("--margin", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Margin of simpo.")
@click.option(
    "--lr", type=click.FloatRange(min=0, min_open=True), help="Peak learning rate.  [default: 2e-5; 1e-6 with --full]"
)
@json_option
def run(
    file: Path,
    model: Path,
    folder: Path,
    is_full: bool,
    rank: int,
    epochs: float,
    batch_size: int,
    dtype: str,
    checkpointing: bool,
    seed: int,
    checkpoint_s: float,
    loss: str,
    beta: float | None,
    label_smoothing: float,
    margin: float,
    lr: float | None,
    is_json: bool,
) -> None:
    """Tune on FILE, one JSON object a line: "prompt", "chosen" and "rejected"; the model as it is is the reference."""
    from mettle.trainer.config import LoraConfig
    from mettle.trainer.preference_tuning import PreferenceTuning, tune
    from mettle.trainer.preferences import PreferenceLoss

    lora = None if is_full else LoraConfig(rank=rank, alpha=2.0 * rank)
    rate = lr or (FULL_LR if is_full else LORA_LR)
    task = PreferenceTuning(
        file, model, folder, lora, rate, epochs, batch_size, seed, dtype, tuning_threads(), checkpointing, checkpoint_s,
        loss=PreferenceLoss(loss, beta, label_smoothing, margin),
    )  # fmt: skip

    def show(figures: dict[str, float]) -> str:
        return f"loss {figures['loss']:.4f}  preferred {figures['accuracy']:.0%}  margin {figures['margin']:+.3f}"

    with going_on("the same command goes on from its newest checkpoint"):
        done = tune(task, StepLines(show, is_silent=is_json))
    if is_json:
        print_json(done | {"folder": str(folder), "kind": "full" if is_full else "lora"})
        return
    first, last = done["first"], done["last"]
    click.echo(
        f"wrote {folder}: loss {first['loss']:.4f} to {last['loss']:.4f}, chosen answers preferred "
        f"{first['accuracy']:.0%} to {last['accuracy']:.0%}, in {done['steps']} steps"
    )
    print_next(f'mettle inference chat {folder} -q "..."' if is_full else f"mettle adapter merge {folder} MODEL_FOLDER")
