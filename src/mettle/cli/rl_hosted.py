"""`mettle rl run FILE --hosted`: a run that the Hub's machine runs."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click

from mettle.cli.account import hub_client
from mettle.cli.terminal import print_json
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
