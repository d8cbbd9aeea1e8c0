"""Runs that the Hub's machine runs: `mettle rl run FILE --hosted`, `mettle rl restart`, `mettle rl checkpoints`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from mettle.cli.account import hub_client
from mettle.cli.terminal import json_option, print_json, print_next, print_table
from mettle.errors import UserError
from mettle.wording import duration, num_bytes


def plan_words(run: dict[str, Any]) -> str:
    """What a run will take, as the Hub has planned it."""
    said = [f"{run['plannedTokens']:,} tokens"]
    if run["plannedSeconds"] is not None:
        said.append(f"about {duration(run['plannedSeconds'])}")
    if run["plannedMemoryBytes"] is not None:
        said.append(f"{num_bytes(run['plannedMemoryBytes'])} of memory or more")
    if (run["plannedUsd"] or 0) >= 0.005:
        said.append(f"${run['plannedUsd']:.2f}")
    return f"{', '.join(said)} ({run['planBasis']})"


def submit_hosted(file: Path, *, is_json: bool, is_overridden: bool = False) -> None:
    """Submit a hosted TOML. Raises: UserError when it cannot be read, or the Hub refuses it."""
    try:
        body = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: {error}") from error
    if is_overridden:
        body["override_card"] = True
    with hub_client() as client:
        if client.context.team:
            mine = client.get("/user/teams")["data"]
            body["team_id"] = next((t["teamId"] for t in mine if t["slug"] == client.context.team), None)
        run = client.post("/rft/runs", body)["run"]
        address = client.context.url
    if is_json:
        print_json(run)
        return
    waits = f", {run['runsAhead']} before it" if run["runsAhead"] else ""
    click.echo(f"queued {run['name']} as {run['id']}{waits}")
    click.echo(f"planned: {plan_words(run)}")
    click.echo(f"follow it at {address}/runs/{run['id']}, stop it at {address}/training")


@click.command()
@click.argument("run_id", metavar="ID")
@click.option(
    "--step", type=click.IntRange(min=0), help="Version to start a new run from.  [default: this run goes on]"
)
@json_option
def restart(run_id: str, step: int | None, is_json: bool) -> None:
    """Let a hosted run that was stopped or has failed go on, or start a new one from a version of it.

    With --step a new run is queued: this one's settings, its weights as of that version, as many steps as it had left.
    Tasks and optimiser begin anew. This run stays as it is.

    \b
    mettle rl restart ID
    mettle rl restart ID --step 40
    """
    with hub_client() as client:
        params = {} if step is None else {"step": step}
        run = client.ask("PUT", f"/rft/runs/{quote(run_id, safe='')}/restart", params=params)["run"]
        address = client.context.url
    if is_json:
        print_json(run)
        return
    click.echo(f"queued {run['name']} as {run['id']}")
    click.echo(f"follow it at {address}/runs/{run['id']}, stop it at {address}/training")


@click.command()
@click.argument("run_id", metavar="ID")
@json_option
def checkpoints(run_id: str, is_json: bool) -> None:
    """List the versions of a hosted run that are on its disk."""
    with hub_client() as client:
        found = client.get(f"/rft/runs/{quote(run_id, safe='')}/checkpoints")["checkpoints"]
    if is_json:
        print_json(found)
        return
    if not found:
        click.echo("no version is on disk yet")
        return
    print_table(
        ("step", "size", "written"), [(f"v{v['step']}", num_bytes(v["sizeBytes"]), v["createdAt"]) for v in found]
    )
    print_next(f"mettle rl restart {run_id} --step {found[-1]['step']}")
