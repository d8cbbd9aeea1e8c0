"""`mettle sandbox`: what stands between untrusted code and this machine."""

from __future__ import annotations

import click

from mettle.cli.groups import NounGroup
from mettle.cli.terminal import json_option, print_json, print_next


@click.group(cls=NounGroup)
def sandbox() -> None:
    """Look at the sandbox that runs untrusted code."""


@sandbox.command()
@click.option(
    "--require",
    "required",
    multiple=True,
    metavar="NAME",
    help="A grade (ns) or a layer (landlock, cgroup-memory, ...) that there must be; may be given more than once.",
)
@json_option
def doctor(required: tuple[str, ...], is_json: bool) -> int:
    """Show each layer of isolation that is in force, as code inside finds it. The exit code is 1 if one is missing.

    Without --require that is a layer of the grade ns; with it, any that is named.
    """
    from mettle.sandbox.config import read_requirement
    from mettle.sandbox.doctor import examine_host

    report = examine_host(read_requirement(required))
    if is_json:
        print_json(report.as_dict())
    else:
        click.echo("\n".join(report.lines()))
        if not report.unmet:
            print_next("mettle env list")
    return 1 if report.unmet else 0
