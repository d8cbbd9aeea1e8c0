"""`mettle sandbox`: what stands between untrusted code and this machine."""

from __future__ import annotations

import click

from mettle.cli.groups import NounGroup
from mettle.cli.terminal import json_option, print_json, print_next


@click.group(cls=NounGroup)
def sandbox() -> None:
    """Look at the sandbox that runs untrusted code."""


@sandbox.command()
@json_option
def doctor(is_json: bool) -> int:
    """Show which isolation is really in force, as code inside finds it. The exit code is 1 when it is not whole."""
    from mettle.sandbox import probe

    report = probe()
    if is_json:
        print_json(report.as_dict())
    else:
        click.echo("\n".join(report.lines()))
        if report.grade == "ns":
            print_next("mettle env list")
    return 0 if report.grade == "ns" else 1
