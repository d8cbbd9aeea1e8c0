"""`mettle gepa`: optimise a system prompt by reflection on scored rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mettle.cli.groups import NounGroup
from mettle.cli.options import ConfigCommand, dry_run_option, file_text
from mettle.cli.terminal import json_option

if TYPE_CHECKING:
    from mettle.config.options import Given


@click.group(cls=NounGroup)
def gepa() -> None:
    """Optimise a system prompt by reflection on scored rollouts."""


@gepa.command(
    "run", cls=ConfigCommand, model="mettle.gepa.config:GepaSpec", metavar="ENV|FILE.toml... [--KEY.KEY VALUE]..."
)
@click.option("--resume", type=click.Path(path_type=Path), metavar="DIR", help="Continue the run saved here.")
@click.option("-u", "--tui", is_flag=True, hidden=True, help="A terminal gets the live display anyway.")
@click.option("--plain", is_flag=True, help="Lines, even on a terminal.")
@dry_run_option
@json_option
def run(
    words: list[str], given: Given, resume: Path | None, tui: bool, plain: bool, is_dry_run: bool, is_json: bool
) -> None:
    """Optimise the system prompt of an environment, and say what that is worth on rows the search never saw.

    \b
    mettle gepa run grade-math -m small -M big -B 500
    mettle gepa run gepa.toml
    mettle gepa run --resume outputs/gepa/grade-math--small/0a1b2c3d
    """
    from mettle.cli.optimisation import optimise

    prompt = given.layer.tree.get("seed_prompt")
    if prompt is not None:
        given = given.with_value("seed_prompt", file_text(prompt, "--seed-prompt"), "--seed-prompt")
    optimise(words, resume, given, is_json=is_json, is_plain=plain, is_dry_run=is_dry_run)
