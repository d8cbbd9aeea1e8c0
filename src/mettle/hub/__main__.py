"""`python -m mettle.hub --runs DIR`: serve the run page until a signal ends it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mettle.errors import MettleError
from mettle.hub.config import HubConfig
from mettle.log import setup_logging


@click.command()
@click.option("--runs", required=True, type=click.Path(path_type=Path), help="A folder of runs, or one run directory.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=7860, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 takes a free one."
)
@click.option("--ready-file", type=click.Path(path_type=Path), help="Written when the server answers.")
def main(runs: Path, host: str, port: int, ready_file: Path | None) -> None:
    """Serve the live page of the runs in a folder."""
    setup_logging()
    try:
        # Imported here, so that a wrong option is answered before the web server is loaded.
        from mettle.hub.server import serve

        serve(HubConfig(runs=runs, host=host, port=port, ready_file=ready_file))
    except MettleError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
