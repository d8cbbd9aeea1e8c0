"""`mettle config`: what a config resolves to, and where each value came from."""

from __future__ import annotations

from collections.abc import Sequence

import click

from mettle.cli.groups import NounGroup
from mettle.cli.terminal import json_option, print_json


@click.group(cls=NounGroup)
def config() -> None:
    """Show what a config resolves to, and why."""


@config.command("show", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", metavar="FILES... [--KEY VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--toml", "is_toml", is_flag=True, help="As TOML that loads back to the same config.")
@json_option
def show(arguments: Sequence[str], is_toml: bool, is_json: bool) -> None:
    """Show the resolved config of a run. Each value, and the file and line, override or default that it came from.

    \b
    mettle config show base.toml mine.toml --trainer.optim.lr 3e-6
    """
    from mettle.cli.rl import split_arguments
    from mettle.runs.launch import load_run_config

    files, overrides = split_arguments(arguments)
    loaded = load_run_config(files, overrides)
    if is_json:
        print_json({"config": loaded.config.model_dump(mode="json"), "sources": loaded.sources})
    elif is_toml:
        click.echo(loaded.render(), nl=False)
    else:
        click.echo(loaded.render_sources(), nl=False)
