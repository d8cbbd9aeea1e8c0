"""`mettle config`: what a config resolves to and where each value came from; the Hubs that one is signed in at."""

from __future__ import annotations

from collections.abc import Sequence

import click

from mettle.cli.groups import NounGroup
from mettle.cli.terminal import json_option, print_json, print_next, print_table
from mettle.errors import UserError


@click.group(cls=NounGroup)
def config() -> None:
    """Show what a config resolves to, and why; choose between Hubs."""


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


@config.command("view")
@json_option
def view(is_json: bool) -> None:
    """List the Hubs that one is signed in at, tokens left out."""
    from mettle.cli.account import shown_contexts
    from mettle.clients.hub_contexts import Contexts

    found = shown_contexts(Contexts.load())
    if is_json:
        print_json(found)
    elif not found:
        click.echo("signed in at no Hub")
        print_next("mettle login")
    else:
        rows = [("*" if c["is_current"] else "", c["name"], c["url"], c["user"], c["team"], c["token"]) for c in found]
        print_table(("", "context", "hub", "user", "team", "token"), rows)


@config.command("use")
@click.argument("name")
def use(name: str) -> None:
    """Use another of the Hubs that one is signed in at."""
    from mettle.clients.hub_contexts import Contexts

    contexts = Contexts.load()
    if name not in contexts.saved:
        known = ", ".join(contexts.saved) or "none"
        raise UserError(f"no context {name!r}; there are {known}; `mettle login URL --context {name}` makes it")
    contexts.current = name
    contexts.save()
    click.echo(f"using {name}: {contexts.saved[name].url}")
