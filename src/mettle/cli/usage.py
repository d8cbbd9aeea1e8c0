"""`mettle usage`: the tokens that one's hosted jobs, and those of one's teams, have taken in a month."""

from __future__ import annotations

import click

from mettle.cli.account import hub_client
from mettle.cli.terminal import json_option, print_json, print_table


@click.command()
@click.option("--month", default="", help="As 2026-11, in UTC; this one without it.")
@json_option
def usage(month: str, is_json: bool) -> None:
    """Show the tokens that hosted jobs took. And their cost, of oneself and each team in a month, and the quotas.

    \b
    mettle usage
    mettle usage --month 2026-10 --json
    """
    with hub_client() as client:
        found = client.get("/usage", month=month or None)
        address = client.context.url
    if is_json:
        print_json(found)
        return
    rows = [
        (
            each["owner"],
            f"{each['tokens']:,}",
            f"{each['planned_tokens']:,}",
            "no limit" if each["quota"] is None else f"{each['quota']:,}",
            f"{each['usd']:.2f}",
        )
        for each in found["owners"]
    ]
    print_table(("whose", "tokens", "planned", "quota", "USD"), rows)
    jobs = [
        (each["owner"], job["name"], job["model"], f"{job['tokens']:,}", f"{job['usd']:.2f}")
        for each in found["owners"]
        for job in each["jobs"][:10]
    ]
    if jobs:
        print_table(("whose", "job", "model", "tokens", "USD"), jobs)
    click.echo(f"see {address}/usage")
