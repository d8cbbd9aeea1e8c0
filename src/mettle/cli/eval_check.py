"""`mettle eval check`: can training learn from the rewards of an evaluation, and what should change before it."""

from __future__ import annotations

from typing import Any

import click

from mettle.cli.checks import print_checks
from mettle.cli.terminal import json_option, print_json, print_next, print_table


@click.command()
@click.argument("name", metavar="PATH|ENV")
@json_option
def check(name: str, is_json: bool) -> None:
    """Check the rewards of a saved evaluation. A path, or an environment, whose newest evaluation is taken.

    Exits with 1 when a check fails. Then comes advice: difficulty, group size, which tasks to leave out.
    """
    from mettle.quality.advice import advise
    from mettle.quality.checks import worst
    from mettle.quality.evaluations import distribution_checks, find_evaluation, read_distribution

    folder = find_evaluation(name)
    found = read_distribution(folder)
    checks, advice = distribution_checks(found), advise(found)
    status = worst(checks)
    if is_json:
        document: dict[str, Any] = {"path": str(folder), "status": status, "distribution": found.to_dict()}
        document |= {"checks": [each.to_dict() for each in checks], "advice": [each.to_dict() for each in advice]}
        print_json(document)
    else:
        click.echo(f"{found.env_id} with {found.model}: {found.num_rollouts} rollouts in {folder}")
        print_checks(checks)
        click.echo()
        print_table(("advice", "because", "do"), [(each.topic, each.finding, each.action) for each in advice])
    if status == "fail":
        raise click.exceptions.Exit(1)
    if not is_json:
        print_next("mettle rl run CONFIG")
