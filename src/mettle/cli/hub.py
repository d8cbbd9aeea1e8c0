"""`mettle hub`: the server that shows runs and evaluations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mettle.cli.groups import NounGroup
from mettle.cli.options import ConfigCommand, only_files
from mettle.cli.terminal import going_on
from mettle.errors import UserError

if TYPE_CHECKING:
    from mettle.config.options import Given


@click.group(cls=NounGroup)
def hub() -> None:
    """Serve the pages that show runs and evaluations."""


@hub.command(cls=ConfigCommand, model="mettle.hub.config:HubConfig", metavar="[FILE.toml]...")
def serve(words: list[str], given: Given) -> None:
    """Serve the pages of the runs in a folder, and of the evaluations here, until Ctrl-C."""
    from mettle.config import load_config
    from mettle.evals.reader import find_evaluations
    from mettle.hub.config import HubConfig
    from mettle.hub.server import serve as serve_hub
    from mettle.log import setup_logging

    config = load_config(HubConfig, only_files(words), given).config
    runs = config.runs
    is_default = runs == HubConfig.model_fields["runs"].default
    if not runs.is_dir() and not (is_default and find_evaluations(config.workspace)):
        raise UserError(f"no folder of runs at {runs}; `mettle quickstart` makes a first run")
    setup_logging()
    with going_on(f"`mettle hub serve --runs {runs}` starts it again"):
        serve_hub(
            config,
            on_ready=lambda address: click.echo(f"serving the runs in {runs} at {address} until Ctrl-C"),
        )
        raise KeyboardInterrupt  # The server ends on Ctrl-C and on SIGTERM, and says nothing then.
