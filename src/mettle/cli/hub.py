"""`mettle hub`: the server that shows runs and evaluations."""

from __future__ import annotations

from pathlib import Path

import click

from mettle.cli.groups import NounGroup
from mettle.cli.terminal import going_on
from mettle.errors import UserError


@click.group(cls=NounGroup)
def hub() -> None:
    """Serve the pages that show runs and evaluations."""


@hub.command()
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder of runs, or one run directory.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=7860, help="0 takes a free one.  [default: 7860]")
def serve(runs: Path, host: str, port: int) -> None:
    """Serve the pages of the runs in a folder, and of the evaluations here, until Ctrl-C."""
    from mettle.evals.reader import find_evaluations
    from mettle.hub.config import HubConfig
    from mettle.hub.server import serve as serve_hub
    from mettle.log import setup_logging

    evaluations = find_evaluations()
    if not runs.is_dir() and not evaluations:
        raise UserError(f"no folder of runs at {runs}, and no evaluations; `mettle quickstart` makes a first run")
    setup_logging()
    with going_on(f"`mettle hub serve --runs {runs}` starts it again"):
        serve_hub(
            HubConfig(runs=runs, host=host, port=port),
            on_ready=lambda address: click.echo(f"serving the runs in {runs} at {address} until Ctrl-C"),
        )
        raise KeyboardInterrupt  # The server ends on Ctrl-C and on SIGTERM, and says nothing then.
