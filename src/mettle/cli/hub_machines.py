"""`mettle hub invite`, `join`, `leave`, `machines`: machines that work for a Hub."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mettle.cli.account import hub_client
from mettle.cli.options import ConfigCommand, one_word, split_words
from mettle.cli.terminal import going_on, json_option, print_json, print_next, print_table

if TYPE_CHECKING:
    from mettle.config.options import Given

TOKEN_ENV = "METTLE_JOIN_TOKEN"
_directory = click.option(
    "--dir", "directory", type=click.Path(path_type=Path), default=Path("machine"), show_default=True,
    help="Folder of the machine: who it is, and what it works on.",
)  # fmt: skip


@click.command(cls=ConfigCommand, model="mettle.hub.config:HubConfig", metavar="NAME [FILE.toml]...")
def invite(words: list[str], given: Given) -> None:
    """Make a token with which one machine joins, within a day. For who runs the Hub, on its own machine; admins make
    such tokens on its page of machines as well.

    \b
    mettle hub invite gpu-1 --data /srv/hub
    """
    from mettle.config import load_config
    from mettle.hub.accounts import audit
    from mettle.hub.config import HubConfig
    from mettle.hub.lab import existing_lab
    from mettle.hub.machines import fleet

    files, names = split_words(words)
    name = one_word(names, "NAME")
    config = load_config(HubConfig, files, given).config
    lab = existing_lab(config.data, database=config.database, blobs=config.blobs)
    try:
        with lab.database.write() as c:
            _, token = fleet.invite(c, "the Hub's operator", name)
            audit.note(c, "the Hub's operator", "machine.invite", name)
    finally:
        lab.close()
    click.echo(f"the token of {name}, shown once and good for a day: {token}")
    print_next(f"mettle hub join URL --token {token}")


@click.command()
@click.argument("url")
@click.option("--token", help=f"What lets it in; not needed to come back.  [default: {TOKEN_ENV}]")
@_directory
def join(url: str, token: str | None, directory: Path) -> int:
    """Work for a Hub: run its hosted evaluations here, until Ctrl-C or `mettle hub leave`.

    The Hub never connects to this machine. What is begun is handed back on Ctrl-C, and goes on elsewhere.

    \b
    mettle hub join https://hub.example.org --token mtj_...
    mettle hub join https://hub.example.org              # a machine that was here before
    """
    from mettle.clients.hub_contexts import checked_url
    from mettle.hub.machines.joined import JoinedWorker
    from mettle.log import setup_logging

    setup_logging()
    worker = JoinedWorker(directory)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: worker.stop())
    with going_on(f"`mettle hub join {url}` goes on"):
        why = worker.work(checked_url(url), token or os.environ.get(TOKEN_ENV, ""), lambda line: click.echo(line))
    click.echo(f"has left {url}: {why}")
    return 0


@click.command()
@_directory
@click.option("--now", is_flag=True, help="Hand back what is begun, instead of finishing it.")
def leave(directory: Path, now: bool) -> None:
    """Let this machine work for its Hub no more: it finishes what it has, and then its `mettle hub join` ends."""
    from mettle.hub.machines.joined import leave as leave_hub

    known, _ = leave_hub(directory, is_over=now)
    what = "hands back what it has" if now else "finishes what it has"
    click.echo(f"{known.name} {what} and gets no more from {known.url}")
    print_next(f"mettle hub join {known.url} --dir {directory}")


@click.command()
@json_option
def machines(is_json: bool) -> None:
    """Show the machines that have joined the Hub in use: what each has, and what it does."""
    with hub_client() as client:
        found = client.get("/compute/machines")
    if is_json:
        print_json(found)
        return
    if not found["machines"]:
        click.echo("no machine has joined this Hub; it works by itself")
        print_next("mettle hub invite NAME")
        return
    heads = ("machine", "state", "does", "cores", "memory", "free", "gpus", "isolation", "torch", "seen")
    print_table(heads, [_row(each) for each in found["machines"]])


def _row(one: dict[str, object]) -> tuple[str, ...]:
    work = one["work"]
    assert isinstance(work, list), "the API answers a list"
    does = ", ".join(each["name"] or f"a {each['kind']} of others" for each in work) or "nothing"
    gpus = one["gpus"]
    num_gpus = len(gpus) if isinstance(gpus, list) else 0
    ago = max(0.0, time.time() - float(str(one["seen_at"])))
    return (
        str(one["name"]), str(one["state"]), does, str(one["cores"] or "-"), _size(one["memory_bytes"]),
        _size(one["free_bytes"]), str(num_gpus), str(one["isolation"] or "-"), str(one["torch"] or "-"),
        f"{ago:.0f} s ago",
    )  # fmt: skip


def _size(value: object) -> str:
    return f"{value / (1 << 30):.1f} GiB" if isinstance(value, int | float) else "-"
