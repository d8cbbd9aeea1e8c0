"""`mettle secret`: what hosted jobs are told and logs hide, at the Hub in use."""

from __future__ import annotations

import sys
from typing import Any

import click

from mettle.cli.account import hub_client
from mettle.cli.env_hub import hub_name
from mettle.cli.groups import NounGroup
from mettle.cli.terminal import json_option, print_json, print_next, print_table
from mettle.clients.hub import HubClient
from mettle.errors import UserError


@click.group(cls=NounGroup)
def secret() -> None:
    """Set the secrets and variables that hosted jobs are told."""


env_option = click.option("--env", "environment", help="Of this environment, OWNER/NAME.  [default: of all jobs]")


@secret.command("set")
@click.argument("name")
@click.option("--variable", "is_variable", is_flag=True, help="A variable: no secret, and shown to its owner.")
@env_option
def set_secret(name: str, is_variable: bool, environment: str | None) -> None:
    """Set a secret or a variable. Its value is asked for, or read from standard input.

    \b
    mettle secret set OPENAI_API_KEY
    echo $KEY | mettle secret set OPENAI_API_KEY --env ann/my-task
    """
    with hub_client() as client:
        value = click.prompt(f"value of {name}", hide_input=True) if sys.stdin.isatty() else sys.stdin.read().strip()
        path, team = _place(client, environment, is_variable=is_variable)
        known = next((each for each in _listed(client, environment) if each["name"] == name), None)
        if known is not None and known["isVariable"] != is_variable:
            raise UserError(f"there is a {'variable' if known['isVariable'] else 'secret'} {name}; delete it first")
        if known is None:
            client.post(path, {"name": name, "value": value, "teamId": team})
        else:
            client.ask("PATCH", _one(path, known, environment), json={"value": value})
    click.echo(f"set {name}")
    print_next("mettle secret list" + (f" --env {environment}" if environment else ""))


@secret.command("list")
@env_option
@json_option
def list_(environment: str | None, is_json: bool) -> None:
    """List secrets and variables, without the values of secrets."""
    with hub_client() as client:
        found = _listed(client, environment)
    if is_json:
        print_json(found)
    elif not found:
        click.echo("none yet; `mettle secret set NAME` makes one")
    else:
        rows = [
            (e["name"], "variable" if e["isVariable"] else "secret", e.get("value"), e["updatedAt"][:10]) for e in found
        ]
        print_table(("name", "", "value", "changed"), rows)


@secret.command("delete")
@click.argument("name")
@env_option
def delete(name: str, environment: str | None) -> None:
    """Delete a secret or a variable."""
    with hub_client() as client:
        known = next((each for each in _listed(client, environment) if each["name"] == name), None)
        if known is None:
            raise UserError(f"there is no {name} here; `mettle secret list` has what there is")
        path, _ = _place(client, environment, is_variable=known["isVariable"])
        client.delete(_one(path, known, environment))
    click.echo(f"deleted {name}")


def _place(client: HubClient, environment: str | None, *, is_variable: bool) -> tuple[str, str | None]:
    """(path, id of the team that acts) of a kind at its place."""
    if environment is None:
        return ("/variables/" if is_variable else "/secrets/"), _team(client)
    owner, name, _ = hub_name(environment)
    found = client.get(f"/environmentshub/{owner}/{name}/@latest")["data"]["id"]
    return f"/environmentshub/{found}/{'variables' if is_variable else 'secrets'}", None


def _one(path: str, known: dict[str, Any], environment: str | None) -> str:
    return f"/secrets/{known['id']}" if environment is None else f"{path}/{known['id']}"


def _listed(client: HubClient, environment: str | None) -> list[dict[str, Any]]:
    if environment is None:
        return list(client.get("/secrets/", teamId=_team(client))["data"])
    paths = [_place(client, environment, is_variable=kind)[0] for kind in (False, True)]
    return [each for path in paths for each in client.get(path)["data"]]


def _team(client: HubClient) -> str | None:
    if not client.context.team:
        return None
    mine = client.get("/user/teams")["data"]
    return next((str(team["teamId"]) for team in mine if team["slug"] == client.context.team), None)
