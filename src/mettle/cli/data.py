"""`mettle data`: look at a dataset before an environment is made of it; `synthesis` makes one of rollouts."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from mettle.cli.checks import print_checks
from mettle.cli.groups import NounGroup
from mettle.cli.synthesis import generate
from mettle.cli.terminal import json_option, print_json, print_next, print_table

if TYPE_CHECKING:
    from mettle.quality.data.columns import DataColumn
    from mettle.quality.data.report import DataReport

EXCERPT = 160


@click.group(cls=NounGroup)
def data() -> None:
    """Look at a dataset; make training data of rollouts."""


data.add_command(generate)


@data.command()
@click.argument("name", metavar="NAME|FILE")
@click.option("--config", help="Configuration of a dataset on the hub.")
@click.option("--split", help="One split alone.")
@click.option("-n", "--num-rows", default=3, show_default=True, type=click.IntRange(min=0), help="Sample rows.")
@click.option("--question", metavar="COLUMN", help="Column that asks.")
@click.option("--answer", metavar="COLUMN", help="Column that answers.")
@json_option
def inspect(
    name: str,
    config: str | None,
    split: str | None,
    num_rows: int,
    question: str | None,
    answer: str | None,
    is_json: bool,
) -> None:
    """Describe a dataset: columns, rows, duplicates, leakage, the format of its answers, the reward that suits it.

    \b
    mettle data inspect train.jsonl        jsonl, json, csv, tsv, txt, parquet, arrow, or a folder of them
    mettle data inspect env:arithmetic     the rows of an environment
    mettle data inspect openai/gsm8k       a dataset of the Hugging Face hub, when that can be reached
    """
    from mettle.quality.data.report import inspect_data
    from mettle.quality.data.sources import open_dataset

    report = inspect_data(open_dataset(name, config=config, split=split), question=question, answer=answer)
    if is_json:
        print_json(report.to_dict(num_rows))
        return
    _print_report(report, num_rows)
    if report.format is not None:
        columns = "".join(
            f" --{what} {shlex.quote(c)}" for what, c in (("question", question), ("answer", answer)) if c
        )
        print_next(f"mettle env init my-task --from data {shlex.quote(name)}{columns}")


def _print_report(report: DataReport, num_rows: int) -> None:
    sizes = ", ".join(f"{split} {num}" for split, num in report.overlap.num_rows.items())
    click.echo(click.style(f"{report.dataset.name} ({report.dataset.origin}): {sizes}", bold=True))
    print_table(("column", "types", "null", "distinct", "length or range"), [_column(c) for c in report.columns])
    for number, row in enumerate(report.dataset.rows[:num_rows]):
        click.echo()
        print_table(
            ("", ""), [(f"row {number}" if at == 0 else "", _cell(key, row[key])) for at, key in enumerate(row)]
        )
    click.echo()
    print_checks(report.checks())
    for example in report.overlap.examples:
        click.echo(f"  {example}")
    click.echo()
    if report.format is None or report.recipe is None:
        click.echo("no column looks like an answer; name it with --answer COLUMN")
        return
    evidence = "; ".join(report.format.evidence)
    sure = f"confidence {report.format.confidence:.0%} (measured on labelled columns)"
    click.echo(f"answers: {report.format.name}, {sure}: {evidence}")
    click.echo(f"parser:  {report.recipe.parser}")
    click.echo(f"reward:  {report.recipe.rubric}")
    click.echo()
    click.echo(report.recipe.code())


def _column(column: DataColumn) -> tuple[Any, ...]:
    types = ", ".join(f"{kind} {num}" if len(column.types) > 1 else kind for kind, num in column.types.items())
    if column.range is not None:
        extent = f"{column.range[0]:g} to {column.range[1]:g}"
    elif column.lengths is not None:
        extent = f"{column.lengths[0]} to {column.lengths[2]}, mean {column.lengths[1]:.0f}"
    else:
        extent = "-"
    return column.name, types or "nothing", column.num_null, column.num_distinct, extent


def _cell(key: str, value: Any) -> str:
    text = " ".join(str(value).split())
    return f"{key}: {text if len(text) <= EXCERPT else text[: EXCERPT - 3] + '...'}"
