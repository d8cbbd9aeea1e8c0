"""Printing checks: a mark, what was found, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from mettle.wording import printable

if TYPE_CHECKING:
    from mettle.quality.checks import Check

COLOURS = {"pass": "green", "skip": "bright_black", "warn": "yellow", "untested": "yellow", "fail": "red"}


def print_checks(checks: Sequence[Check]) -> None:
    """One line a check, and under one that did not pass what to do."""
    width = max((len(each.name) for each in checks), default=0)
    for each in checks:
        mark = click.style(f"{each.status:<8}", fg=COLOURS[each.status])
        click.echo(f"{mark}  {each.name:<{width}}  {_line(each.detail)}")
        if each.fix and each.status not in ("pass", "skip"):
            click.echo(f"{'':<{10 + width}}  -> {_line(each.fix)}")


def _line(text: str) -> str:
    return " ".join(printable(text).split())
