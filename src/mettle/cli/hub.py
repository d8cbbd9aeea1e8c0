"""`mettle hub`: the lab's server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mettle.cli.groups import NounGroup
from mettle.cli.options import ConfigCommand, only_files
from mettle.cli.terminal import going_on, print_next
from mettle.errors import UserError

if TYPE_CHECKING:
    from mettle.config.options import Given


@click.group(cls=NounGroup)
def hub() -> None:
    """Serve a lab: accounts, environments, runs and evaluations."""


@hub.command(cls=ConfigCommand, model="mettle.hub.config:HubConfig", metavar="[FILE.toml]...")
def serve(words: list[str], given: Given) -> None:
    """Serve this lab until Ctrl-C. Accounts, environments, runs and evaluations, on one port, from one folder."""
    from mettle.config import load_config
    from mettle.hub.config import HubConfig
    from mettle.hub.server import serve_hub
    from mettle.log import setup_logging

    config = load_config(HubConfig, only_files(words), given).config
    if config.runs != HubConfig.model_fields["runs"].default and not config.runs.is_dir():
        raise UserError(f"no folder of runs at {config.runs}; `mettle quickstart` makes a first run")
    setup_logging()

    def say(address: str, link: str | None) -> None:
        click.echo(f"serving the runs in {config.runs} and the Hub in {config.data} at {address} until Ctrl-C")
        if link is not None:
            click.echo(f"nobody has an account yet; this link makes the first admin, once: {link}")

    with going_on(f"`mettle hub serve --data {config.data}` starts it again"):
        serve_hub(config, say)
        raise KeyboardInterrupt  # The server ends on Ctrl-C and on SIGTERM, and says nothing then.


@hub.command(cls=ConfigCommand, model="mettle.hub.config:HubConfig", metavar="[FILE.toml]...")
def init(words: list[str], given: Given) -> None:
    """Publish the environments that ship with Mettle into a Hub. Those that are there already are passed over.

    \b
    mettle hub init
    mettle hub init --data /srv/hub
    """
    from mettle.config import load_config
    from mettle.hub.config import HubConfig
    from mettle.hub.lab import open_lab
    from mettle.hub.shipped import publish_shipped

    config = load_config(HubConfig, only_files(words), given).config
    lab = open_lab(config.data, database=config.database)
    try:
        num = publish_shipped(lab, lambda name, done: click.echo(f"{done}: {name}"))
    finally:
        lab.close()
    click.echo(f"{num} new in the Hub in {config.data}")
    print_next(f"mettle hub serve --data {config.data}")
