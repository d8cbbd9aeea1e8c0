"""`mettle rl replay RUN --step N`: a step repeated from its batch, and what other settings would have made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from mettle.cli.terminal import find_run, json_option, print_json, print_next, print_table


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("run")
@click.argument("overrides", metavar="[--KEY VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--step", type=int, required=True, help="The step to repeat.")
@click.option("--loss", help="What if the loss had been this one.")
@click.option("--lr", type=float, help="What if the peak learning rate had been this.")
@json_option
def replay(run: str, overrides: Sequence[str], step: int, loss: str | None, lr: float | None, is_json: bool) -> int:
    """Repeat a trained step from its batch and compare the weights with those of the run, bit for bit.

    With other settings (--loss, --lr, or any of the trainer's, as in --optim.max-grad-norm 0.5) the step is taken a
    second time with those, from the same state, and a table says what changes. The run itself is only read.

    \b
    mettle rl replay RUN --step 12 --loss gspo --lr 1e-5
    """
    from mettle.runs.replay import replay as repeat
    from mettle.runs.replay import report

    found = report(repeat(find_run(run), step, loss=loss, lr=lr, overrides=overrides))
    if is_json:
        print_json({"run": run, **found})
    else:
        _print(run, found)
    return 0 if found["is_same"] else 1


def _print(run: str, found: dict[str, Any]) -> None:
    step, start = found["step"], found["from_step"]
    since = f"the checkpoint of step {start}" if start else "the initial policy"
    word = "the same weights as in the run, bit for bit" if found["is_same"] else "OTHER weights than in the run"
    click.echo(f"step {step}, repeated from {since}: {word} ({found['weights_digest'][:12]})")
    before = [number for number in found["differing_steps"] if number < step]
    if before:
        click.echo(f"already different on the way: steps {', '.join(map(str, before))}")
    other = found["other"]
    if other is None:
        print_table(("", "repeated"), list(found["metrics"].items()))
        print_next(f"mettle rl replay {run} --step {step} --lr 1e-5")
        return
    rows = [
        (name, value, other["metrics"].get(name), _change(value, other["metrics"].get(name)))
        for name, value in found["metrics"].items()
    ]
    rows.append(("distance of the weights", 0.0, found["distance"], ""))
    print_table(("", "as in the run", "what if", "change"), rows)
    print_next(f"mettle rl metrics {run} --name 'loss/*'")


def _change(old: float, new: float | None) -> str:
    if new is None or new == old:
        return ""
    return f"{(new - old) / abs(old):+.1%}" if old else f"{new - old:+.3g}"
