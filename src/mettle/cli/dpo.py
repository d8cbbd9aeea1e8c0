"""`mettle dpo`: tuning on a file of preferences, without a run."""

from __future__ import annotations

from typing import Any

import click

from mettle.cli.groups import NounGroup
from mettle.cli.tuning import StepLines, TuningAsked, tuning_options
from mettle.errors import UserError

UNPAIRED = "kto"
LOSSES = ("dpo", "ipo", "simpo", "orpo", UNPAIRED)


@click.group(cls=NounGroup)
def dpo() -> None:
    """Tune a model on a file of preferences: DPO and its relatives."""


@dpo.command("run")
@tuning_options(lora_lr=2e-5, full_lr=1e-6)
@click.option("--loss", type=click.Choice(LOSSES), default="dpo", show_default=True, help="What is minimised.")
@click.option(
    "--beta", type=click.FloatRange(min=0, min_open=True), help="Strength of the loss.  [default: 0.1; 2 for simpo]"
)
@click.option(
    "--label-smoothing", type=click.FloatRange(min=0, max=0.5, max_open=True),
    help="Share of the pairs that may be the wrong way round (dpo).  [default: 0]",
)  # fmt: skip
@click.option("--margin", type=click.FloatRange(min=0), help="Margin of simpo.  [default: 1]")
@click.option("--desirable", type=click.FloatRange(min=0), help="Weight of good answers (kto).  [default: 1]")
@click.option("--undesirable", type=click.FloatRange(min=0), help="Weight of bad answers (kto).  [default: 1]")
def run(
    asked: TuningAsked,
    loss: str,
    beta: float | None,
    label_smoothing: float | None,
    margin: float | None,
    desirable: float | None,
    undesirable: float | None,
) -> None:
    """Tune on FILE, one JSON object a line: "prompt", "chosen" and "rejected", or for kto "prompt", "completion" and
    "label"; the model as it is is the reference."""
    _check_options(loss, label_smoothing, margin, desirable, undesirable)

    def train(tell: StepLines) -> dict[str, Any]:
        if loss == UNPAIRED:
            from mettle.trainer.unpaired import UnpairedLoss
            from mettle.trainer.unpaired_tuning import UnpairedTuning, tune_unpaired

            given = {"beta": beta, "desirable": desirable, "undesirable": undesirable}
            form = UnpairedLoss(**{name: value for name, value in given.items() if value is not None})
            return tune_unpaired(UnpairedTuning(**asked.task(), loss=form), tell)
        from mettle.trainer.preference_tuning import PreferenceTuning, tune
        from mettle.trainer.preferences import PreferenceLoss

        pairwise = PreferenceLoss(loss, beta, label_smoothing or 0.0, 1.0 if margin is None else margin)
        return tune(PreferenceTuning(**asked.task(), loss=pairwise), tell)

    words = "judged right" if loss == UNPAIRED else "preferred"

    def sum_up(done: dict[str, Any]) -> str:
        first, last = done["first"], done["last"]
        shares = f"{first['accuracy']:.0%} to {last['accuracy']:.0%}"
        what = f"answers {words}" if loss == UNPAIRED else f"chosen answers {words}"
        return f"loss {first['loss']:.4f} to {last['loss']:.4f}, {what} {shares},"

    asked.carry_out(
        train,
        lambda f: f"loss {f['loss']:.4f}  {words} {f['accuracy']:.0%}  margin {f['margin']:+.3f}",
        sum_up,
    )


def _check_options(loss: str, smoothing: float | None, margin: float | None, *weights: float | None) -> None:
    """Raises: UserError for an option that the loss would not read."""
    is_kto = loss == UNPAIRED
    for name, value, is_read in (
        ("--label-smoothing", smoothing, loss == "dpo"),
        ("--margin", margin, loss == "simpo"),
        ("--desirable", weights[0], is_kto),
        ("--undesirable", weights[1], is_kto),
    ):
        if value is not None and not is_read:
            raise UserError(f"{name} {value:g} is no option of {loss}: leave it out")
