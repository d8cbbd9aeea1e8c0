"""`mettle rl run FILE --hosted`: a run that the Hub's machine runs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import click

from mettle.cli.account import hub_client
from mettle.cli.terminal import print_json
from mettle.errors import UserError


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
    click.echo(f"follow it at {address}/runs/{run['id']}, stop it at {address}/training")
