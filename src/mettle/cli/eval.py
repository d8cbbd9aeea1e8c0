"""`mettle eval`: measure a model on an environment, and look at what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mettle.cli.eval_check import check
from mettle.cli.eval_hosted import logs, stop
from mettle.cli.eval_hub import list_pushed, push, samples
from mettle.cli.eval_import import import_
from mettle.cli.groups import NounGroup
from mettle.cli.options import ConfigCommand, dry_run_option
from mettle.cli.terminal import json_option
from mettle.errors import UserError

if TYPE_CHECKING:
    from mettle.config.options import Given


@click.group(cls=NounGroup)
def evaluations() -> None:
    """Measure a model on an environment, and look at the results."""


@evaluations.command(
    "run", cls=ConfigCommand, model="mettle.evals.spec:EvalSpec", metavar="ENV|FILE.toml... [--KEY.KEY VALUE]..."
)
@click.option("-d", "--disable-tui", "is_plain", is_flag=True, help="Lines instead of the live display.")
@click.option("--hosted", is_flag=True, help="Let the Hub in use run it; the key of -k is a secret there.")
@click.option("--override-card", is_flag=True, help="With --hosted: also where the quality card has failed.")
@dry_run_option
@json_option
def run(
    words: list[str], given: Given, is_plain: bool, hosted: bool, override_card: bool, is_dry_run: bool, is_json: bool
) -> None:
    """Measure a model on an environment, or run the evaluations of TOML files.

    \b
    mettle eval run reverse-text -m runs/my-run/policy -n 20
    mettle eval run reverse-text -m gpt-5-mini -p openai -n 50 -r 4
    mettle eval run configs/eval/nightly.toml --resume
    mettle eval run ann/my-task -m gpt-5-mini -b https://host/v1 -k MY_KEY --hosted
    mettle eval run configs/eval/nightly.toml --sampling.top-p 0.9
    """
    from mettle.cli.evaluation import evaluate

    if override_card and not hosted:
        raise UserError("--override-card is for --hosted evaluations; nothing here looks at a card")
    evaluate(
        words,
        given,
        is_json=is_json,
        is_plain=is_plain,
        is_dry_run=is_dry_run,
        hosted=(override_card,) if hosted else None,
    )


@evaluations.command()
@click.argument("path", type=click.Path(path_type=Path), required=False)
@click.option("-i", "--rollout", "index", type=click.IntRange(min=0), help="Show this rollout whole.")
@click.option("-n", "--num-rows", default=50, type=click.IntRange(min=1), help="Rows to list.  [default: 50]")
@click.option("--plain", "is_plain", is_flag=True, help="Print instead of opening the browser.")
@json_option
def view(path: Path | None, index: int | None, num_rows: int, is_plain: bool, is_json: bool) -> None:
    """Look at saved evaluations. All of them, those under a folder, the rollouts of one, or one rollout.

    In a terminal this opens a browser (it needs `mettle-lab[tui]`); anywhere else, and with --plain, it prints.
    """
    from mettle.cli.browser import open_browser
    from mettle.cli.results import view_evaluation, view_evaluations, view_rollout
    from mettle.evals.places import is_collection

    is_list = path is None or is_collection(path)
    if is_list and index is not None:
        raise UserError("name the evaluation that the rollout is of: `mettle eval view PATH -i 0`")
    if not is_plain and not is_json and open_browser(path, index):
        return
    if is_list or path is None:
        view_evaluations(num_rows, is_json=is_json, folder=path)
    elif index is None:
        view_evaluation(path, num_rows, is_json=is_json)
    else:
        view_rollout(path, index, is_json=is_json)


@evaluations.command("list")
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option("-n", "--num-rows", default=50, type=click.IntRange(min=1), help="Rows to list.  [default: 50]")
@json_option
def list_(run: Path | None, num_rows: int, is_json: bool) -> None:
    """List saved evaluations, newest first. All of them, those under a folder, or those of
    one RUN, which shows the probes of its warm-up too.

    `runs/mine:3` and `runs/mine:final`, as listed, are what `view`, `compare`, `check` and `export` take.
    """
    from mettle.cli.results import view_evaluations

    view_evaluations(num_rows, is_json=is_json, folder=run)


@evaluations.command()
@click.argument("paths", metavar="A B [C]...", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("-n", "--num-tasks", default=10, type=click.IntRange(min=0), help="Flipped tasks to list.  [default: 10]")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the table here, too: .html, .md or .json.")
@json_option
def compare(paths: tuple[Path, ...], num_tasks: int, out: Path | None, is_json: bool) -> None:
    """Say what changed from evaluation A to evaluation B, task by task, and how sure that is.

    More than two are set beside each other, each with its interval, each pair with its difference.

    \b
    mettle eval compare runs/one:base runs/one:final
    mettle eval compare A B C --out report.html
    """
    from mettle.cli.comparison import compare_evaluations

    if len(paths) < 2:
        raise UserError(f"{paths[0]} alone cannot be compared; name two evaluations or more")
    compare_evaluations(paths, num_tasks, out, is_json=is_json)


@evaluations.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write.  [default: beside the results]")
@click.option(
    "-f", "--format", "kind", type=click.Choice(["html", "csv", "parquet", "jsonl"]),
    help="What to write; the ending of -o says it too; jsonl is verifiers' format, with its metadata when -o is a"
    " folder.  [default: html]",
)  # fmt: skip
@click.option("--num-rollouts", type=click.IntRange(min=0), help="Conversations in the page.  [default: all]")
@json_option
def export(path: Path, output: Path | None, kind: str | None, num_rollouts: int | None, is_json: bool) -> None:
    """Write an evaluation as one page for a browser, or as a table.

    \b
    mettle eval export outputs/evals/reverse-text--mine/0a1b2c3d -o report.html
    """
    from mettle.cli.results import export_evaluation

    export_evaluation(path, output, kind, num_rollouts, is_json=is_json)


for _command in (check, import_, push, list_pushed, samples, logs, stop):
    evaluations.add_command(_command)
