"""`mettle hub`: the lab's server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mettle.cli.groups import NounGroup
from mettle.cli.hub_machines import invite, join, leave, machines
from mettle.cli.options import ConfigCommand, one_word, only_files, split_words
from mettle.cli.terminal import going_on, print_next
from mettle.errors import UserError

if TYPE_CHECKING:
    from mettle.config.options import Given
    from mettle.hub.backup import BackupManifest


@click.group(cls=NounGroup)
def hub() -> None:
    """Serve a lab: accounts, environments, runs and evaluations."""


@hub.command(cls=ConfigCommand, model="mettle.hub.config:HubConfig", metavar="[FILE.toml]...")
def serve(words: list[str], given: Given) -> None:
    """Serve this lab until Ctrl-C. Accounts, environments, runs and evaluations, on one port, from one folder."""
    import gc

    gc.disable()  # What a start imports stays: looking through it for garbage is a tenth of a start. Till it answers.
    try:
        _serve(words, given)
    finally:
        gc.enable()


def _serve(words: list[str], given: Given) -> None:
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
        for entry in config.train_models:
            name = entry.partition("=")[0]
            click.echo(f"training adapters on {name}: TINKER_BASE_URL={address}/train/{name} TINKER_API_KEY=tml-TOKEN")
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
    lab = open_lab(config.data, database=config.database, blobs=config.blobs)
    try:
        num = publish_shipped(lab, lambda name, done: click.echo(f"{done}: {name}"))
    finally:
        lab.close()
    click.echo(f"{num} new in the Hub in {config.data}")
    print_next(f"mettle hub serve --data {config.data}")


@hub.command(cls=ConfigCommand, model="mettle.hub.config:HubConfig", metavar="FILE [FILE.toml]...")
@click.option("--no-runs", is_flag=True, help="Leave out the directories of hosted runs; weights are large.")
def backup(words: list[str], given: Given, no_runs: bool) -> None:
    """Write a Hub into one file, while its server runs. What is in it is read back before it gets its name.

    \b
    mettle hub backup monday.tar
    mettle hub backup monday.tar --data /srv/hub
    """
    from mettle.config import load_config
    from mettle.hub.backup import back_up
    from mettle.hub.config import HubConfig
    from mettle.hub.lab import existing_lab

    files, names = split_words(words)
    target = Path(one_word(names, "FILE"))
    config = load_config(HubConfig, files, given).config
    lab = existing_lab(config.data, database=config.database, blobs=config.blobs)
    try:
        made = back_up(lab, target, with_runs=not no_runs)
    finally:
        lab.close()
    click.echo(f"{target}: {_counted(made)}; read back and whole")
    print_next(f"mettle hub restore {target} --data elsewhere")


@hub.command(cls=ConfigCommand, model="mettle.hub.config:HubConfig", metavar="FILE [FILE.toml]...")
def restore(words: list[str], given: Given) -> None:
    """Make a Hub of a backup, in a folder (and a database) that holds none yet.

    \b
    mettle hub restore monday.tar --data hub
    mettle hub restore monday.tar --data hub --database postgresql+psycopg://me@host/hub
    """
    from mettle.config import load_config
    from mettle.hub import backup as backups
    from mettle.hub.config import HubConfig

    files, names = split_words(words)
    source = Path(one_word(names, "FILE"))
    config = load_config(HubConfig, files, given).config
    made = backups.restore(source, config.data, database=config.database, blobs=config.blobs)
    click.echo(f"the Hub in {config.data}: {_counted(made)}")
    print_next(f"mettle hub serve --data {config.data}")


for _command in (invite, join, leave, machines):
    hub.add_command(_command)


def _counted(made: BackupManifest) -> str:
    rows = made.num_rows
    said = ", ".join(
        f"{rows.get(name, 0):,} {name}" for name in ("people", "environments", "releases", "results", "jobs")
    )
    return f"{said}; {len(made.sha256):,} files, {made.num_bytes / 1e6:,.1f} MB"
