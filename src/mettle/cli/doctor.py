"""`mettle doctor`: does this machine have what Mettle needs?"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from mettle.cli.terminal import json_option, print_json, print_next
from mettle.errors import UserError

if TYPE_CHECKING:
    from mettle.runs.preflight import Finding
    from mettle.runs.repairs import Attempt

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
NAME_WIDTH = 20


@click.command()
@click.option("--fix", "is_fix", is_flag=True, help="Put right what can be, and check again.")
@click.option("--yes", "is_yes", is_flag=True, help="With --fix, run what installs packages, too.")
@json_option
def doctor(is_fix: bool, is_yes: bool, is_json: bool) -> int:
    """Check that this machine has what Mettle needs. The exit code is 1 when something is missing.

    --fix clears what dead runs left, makes folders and completes .gitignore; what needs root is shown as commands.
    """
    from mettle.runs.preflight import findings

    if is_yes and not is_fix:
        raise UserError("--yes is an answer to --fix: `mettle doctor --fix --yes`")
    found: list[Finding] = []
    attempts: list[Attempt] = []
    for finding in findings():
        attempt = _attempt(finding, is_yes) if is_fix else None
        if not is_json:
            _print(finding, attempt)
        if attempt is not None:
            attempts.append(attempt)
        found.append(finding if attempt is None else attempt.after)
    failed = [finding.name for finding in found if finding.level == "fail"]
    if is_json:
        print_json(_document(found, attempts, is_fix))
    elif failed:
        click.echo(f"\nnot ready: {', '.join(failed)}")
    else:
        click.echo()
        print_next("mettle quickstart" if is_fix or all(f.level == "ok" for f in found) else "mettle doctor --fix")
    return 1 if failed else 0


def _attempt(finding: Finding, is_yes: bool) -> Attempt | None:
    from mettle.runs.repairs import repair

    return repair(finding, is_yes=is_yes)


def _document(found: list[Finding], attempts: list[Attempt], is_fix: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "ok": all(finding.level != "fail" for finding in found),
        "checks": [asdict(finding) for finding in found],
    }
    if is_fix:
        document["repairs"] = [
            {"name": each.name, "status": each.status, "what": each.what, "detail": each.detail} for each in attempts
        ]
    return document


def _print(finding: Finding, attempt: Attempt | None) -> None:
    colour = None if os.environ.get("NO_COLOR") else COLOURS[finding.level]
    mark = click.style(f"{finding.level:<4}", fg=colour)
    click.echo(f"{mark}  {finding.name:<{NAME_WIDTH}} {finding.detail}")
    indent = f"      {'':<{NAME_WIDTH}} "
    if attempt is None or attempt.status in ("by hand", "needs yes"):
        if finding.advice:
            click.echo(f"{indent}-> {finding.advice}")
        for command in finding.commands:
            click.echo(f"{indent}   $ {command}")
    if attempt is not None and attempt.what and attempt.status != "needs yes":
        click.echo(f"{indent}{attempt.status}: {attempt.what}{f' ({attempt.detail})' if attempt.detail else ''}")
    elif attempt is not None and attempt.status == "needs yes":
        click.echo(f"{indent}not run: {attempt.detail}")
