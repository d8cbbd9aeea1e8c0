"""`mettle doctor`: does this machine have what Mettle needs?"""

from __future__ import annotations

from dataclasses import asdict

import click

from mettle.cli.terminal import json_option, print_json, print_next


@click.command()
@json_option
def doctor(is_json: bool) -> int:
    """Check that this machine has what Mettle needs. The exit code is 1 when something is missing."""
    from mettle.cli.preflight import Finding, findings

    found: list[Finding] = []
    for finding in findings():
        found.append(finding)
        if not is_json:
            _print(finding.name, finding.level, finding.detail, finding.advice)
    failed = [finding.name for finding in found if finding.level == "fail"]
    if is_json:
        print_json({"ok": not failed, "checks": [asdict(finding) for finding in found]})
    elif failed:
        click.echo(f"\nnot ready: {', '.join(failed)}")
    else:
        click.echo()
        print_next("mettle quickstart")
    return 1 if failed else 0


def _print(name: str, level: str, detail: str, advice: str) -> None:
    import os

    colour = {"ok": "green", "warn": "yellow", "fail": "red"}[level]
    mark = click.style(f"{level:<4}", fg=None if os.environ.get("NO_COLOR") else colour)
    click.echo(f"{mark}  {name:<13} {detail}")
    if advice:
        click.echo(f"      {'':<13} -> {advice}")
