"""`mettle lab`: a folder to work in."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from mettle.cli.groups import NounGroup
from mettle.cli.terminal import json_option, print_json, print_next

MARKS = {"written": "wrote", "same": "as it was", "kept": "left"}


@click.group(cls=NounGroup)
def lab() -> None:
    """Make a workspace: configs, an environment, notes for coding agents."""


@lab.command()
@click.argument("directory", metavar="[DIR]", type=click.Path(path_type=Path), default=Path())
@click.option(
    "--env", "environment", metavar="NAME", help="Environment that the configs are about.  [default: my-task]"
)
@click.option("-b", "--api-base-url", help="Endpoint that configs call local.  [default: http://127.0.0.1:8000/v1]")
@click.option("--agents", help="Put the skills where these look, too: claude,codex,cursor,opencode,amp.")
@json_option
def setup(
    directory: Path, environment: str | None, api_base_url: str | None, agents: str | None, is_json: bool
) -> None:
    """Make DIR (here, by default) a workspace. Nothing is fetched, and nothing that exists is overwritten.

    \b
    mettle lab setup my-lab
    mettle lab setup --agents claude,codex
    """
    from mettle.envs.packages.workspace import LOCAL_URL, set_up

    named = [name.strip() for name in agents.split(",") if name.strip()] if agents else []
    name, files = set_up(directory, environment=environment, url=api_base_url or LOCAL_URL, agents=named)
    if is_json:
        print_json({"path": str(directory), "environment": name, "files": [asdict(file) for file in files]})
        return
    for file in files:
        if file.status != "same":
            click.echo(f"{MARKS[file.status]:<6} {file.path}{f' ({file.note})' if file.note else ''}")
    num_same = sum(file.status == "same" for file in files)
    if num_same:
        click.echo(f"{num_same} files are as they were")
    if directory.resolve() != Path.cwd():
        click.echo(f"first: cd {directory}")
    print_next(f"mettle env check {name}")
