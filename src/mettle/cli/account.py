"""`mettle login`, `logout`, `whoami`, `teams`, `switch`: who one is at a Hub."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from mettle.cli.terminal import going_on, json_option, print_json, print_next, print_table
from mettle.clients.hub import HubClient
from mettle.clients.hub_contexts import Contexts, HubContext, checked_url
from mettle.errors import UserError

POLL_S = 2.0


def hub_client(*, needs_token: bool = True) -> HubClient:
    """A client of the Hub in use. Raises: UserError when nobody is signed in."""
    context = Contexts.load().active
    if needs_token and not context.token:
        raise UserError(f"not signed in at {context.url}: `mettle login {context.url}`, or set METTLE_API_KEY")
    return HubClient(context)


@click.command()
@click.argument("url", required=False)
@click.option("--token", is_flag=True, help="Ask for a token instead of opening a browser; it may be piped in.")
@click.option("--headless", is_flag=True, help="Print the address and open no browser.")
@click.option("--context", "name", default="default", show_default=True, help="Name to save this Hub under.")
def login(url: str | None, token: bool, headless: bool, name: str) -> None:
    """Sign in at a Hub.

    \b
    mettle login                            # the Hub on this machine
    mettle login https://hub.example.org
    echo $TOKEN | mettle login --token
    """
    contexts = Contexts.load()
    known = contexts.saved.get(name, HubContext())
    address = checked_url(url) if url else known.url
    if token:
        secret = click.prompt("Token", hide_input=True) if sys.stdin.isatty() else sys.stdin.readline()
        secret = secret.strip()
        if not secret:
            raise UserError("no token was given; type it, or pipe it in: `echo $TOKEN | mettle login --token`")
    else:
        secret = _by_browser(address, opens=not headless)
    with HubClient(HubContext(address, secret)) as client:
        me = client.get("/user/whoami")["data"]
    contexts.saved[name] = HubContext(address, secret, str(me["slug"]))
    contexts.current = name
    contexts.save()
    click.echo(f"signed in at {address} as {me['slug']}")
    print_next("mettle env list --hub")


def _by_browser(address: str, *, opens: bool) -> str:
    """The token that somebody approves on a page of the Hub."""
    with HubClient(HubContext(address)) as client:
        asked = client.post("/auth_challenge/generate", {})
        code = str(asked["challenge"])
        page = f"{address}/dashboard/tokens/challenge?code={code}"
        click.echo(f"open {page}\nand approve the code {code}")
        if opens:
            click.launch(page)
        waiter = HubClient(HubContext(address, str(asked["status_auth_token"])))
        with waiter, going_on(f"`mettle login {address}` begins again"):
            while True:
                found = waiter.get("/auth_challenge/status", challenge=code)["result"]
                if found is not None:
                    return str(found)
                time.sleep(POLL_S)


@click.command()
def logout() -> None:
    """Forget the token of the Hub in use. To close it for good, revoke it on your account's page."""
    contexts = Contexts.load()
    if not contexts.saved.pop(contexts.current, HubContext()).token:
        raise UserError("not signed in, so there is nothing to forget")
    contexts.save()
    click.echo("signed out; the token still exists until it is revoked on your account's page")


@click.command()
@json_option
def whoami(is_json: bool) -> None:
    """Say who one is at the Hub in use. And what the token covers."""
    with hub_client() as client:
        me, context = client.get("/user/whoami")["data"], client.context
    if is_json:
        print_json({**me, "url": context.url, "team": context.team or None})
        return
    covers = ", ".join(
        f"{area}:{right}" for area, rights in me["scope"].items() for right, has in rights.items() if has
    )
    rows = [("user", me["slug"]), ("name", me["name"]), ("hub", context.url), ("acts as", context.team or me["slug"])]
    print_table(("", ""), [*rows, ("token covers", covers)])


@click.command()
@json_option
def teams(is_json: bool) -> None:
    """List one's teams at the Hub in use."""
    with hub_client() as client:
        found = client.get("/user/teams")["data"]
        address = client.context.url
    if is_json:
        print_json(found)
    elif not found:
        click.echo(f"you are in no team; make one at {address}/teams")
    else:
        print_table(("team", "name", "role"), [(t["slug"], t["name"], t["role"].lower()) for t in found])
        print_next(f"mettle switch {found[0]['slug']}")


@click.command()
@click.argument("target", metavar="TEAM|personal")
def switch(target: str) -> None:
    """Act as a team, or as oneself. What is pushed from then on belongs to it."""
    contexts = Contexts.load()
    here = contexts.saved.get(contexts.current)
    if here is None:
        raise UserError("not signed in: `mettle login` first")
    if target != "personal":
        with hub_client() as client:
            known = [str(t["slug"]) for t in client.get("/user/teams")["data"]]
        if target not in known:
            raise UserError(f"you are in no team {target!r}; there are {', '.join(known) or 'none'}, and personal")
    team = "" if target == "personal" else target
    contexts.saved[contexts.current] = HubContext(here.url, here.token, here.user, team)
    contexts.save()
    click.echo(f"acting as {target if team else here.user}")


def shown_contexts(contexts: Contexts) -> list[dict[str, Any]]:
    """The saved Hubs without their tokens."""
    return [
        {
            "name": name, "is_current": name == contexts.current, "url": c.url, "user": c.user or None,
            "team": c.team or None, "token": f"{c.token[:8]}..." if c.token else None,
        }
        for name, c in contexts.saved.items()
    ]  # fmt: skip
