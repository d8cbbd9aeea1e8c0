"""`mettle env card`: what the Hub found when it installed, loaded and tried a release."""

from __future__ import annotations

import click

from mettle.cli.account import hub_client
from mettle.cli.env_hub import card_word, hub_name
from mettle.cli.terminal import json_option, print_json, print_next, print_table
from mettle.errors import UserError


@click.command()
@click.argument("name", metavar="OWNER/NAME[@VERSION]")
@click.option("--log", "is_log", is_flag=True, help="Print what the check has said instead.")
@click.option("--retry", "is_retry", is_flag=True, help="Check it once more.")
@json_option
def card(name: str, is_log: bool, is_retry: bool, is_json: bool) -> None:
    """Show the quality card that the Hub made of a release. It is made after each push, in a sandbox.

    Exits with 1 when it has failed.
    """
    owner, project, version = hub_name(name)
    base = f"/environmentshub/{owner}/{project}"
    with hub_client(needs_token=is_retry) as client:
        release = client.get(f"{base}/@{version}")["data"]
        said = f"{owner}/{project}@{release['semantic_version']}"
        if is_retry:
            client.post(f"{base}/actions/retry", {"action_id": release["semantic_version"]})
            click.echo(f"{said} is checked again")
            print_next(f"mettle env card {said}")
            return
        if is_log:
            click.echo(client.get(f"{base}/actions/{release['semantic_version']}/logs")["data"]["logs"])
            return
    state, found = release["card_state"], release["card"]
    if is_json:
        print_json({"environment": said, "state": state, "card": found})
    elif not state:
        raise UserError(f"{said} was never checked; `mettle env card {said} --retry` asks for it")
    else:
        for section, checks in (found or {"sections": {}})["sections"].items():
            click.echo(click.style(section, bold=True))
            print_table(("", "", ""), [(each["status"], each["name"], each["detail"]) for each in checks])
        click.echo(f"{said}: {card_word(state)}")
        print_next(f"mettle env card {said} --log" if state != "SUCCESS" else f"mettle env install {said}")
    if state == "FAILED":
        raise click.exceptions.Exit(1)
