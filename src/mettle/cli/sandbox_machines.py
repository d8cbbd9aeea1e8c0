"""`mettle sandbox` for machines: create, list, exec, run, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from mettle.cli.sandbox_options import (
    CommandInMachine,
    CommandLine,
    environment_of,
    labels_of,
    machine_config,
    machine_options,
    print_next_step,
    run_with_client,
    url_option,
)
from mettle.cli.terminal import json_option, print_json, print_table
from mettle.errors import UserError
from mettle.wording import duration

if TYPE_CHECKING:
    from mettle.sandbox.service.client.client import ServiceClient


@click.command("create")
@click.option("--name", default="", help="A name to show in lists.")
@machine_options
@url_option
@json_option
def create(url: str | None, is_json: bool, name: str, **asked: Any) -> None:
    """Make a machine and print its id."""
    config = machine_config(**asked)

    async def work(client: ServiceClient) -> dict[str, Any]:
        return await client.show((await client.create(config, name)).id)

    made = run_with_client(url, work)
    if is_json:
        print_json(made)
    else:
        click.echo(made["id"])
        print_next_step(url, f"exec {made['id']} -- uname -a", is_aside=True)


@click.command("list")
@click.option("--label", multiple=True, metavar="NAME[=VALUE]", help="Only those with this label; repeatable: all.")
@click.option("-a", "--all", "is_all", is_flag=True, help="Also those that have ended, and why.")
@click.option("--status", type=click.Choice(["running", "ended"]), help="Only these.  [default: running]")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Machines on a page.")
@click.option("--cursor", help="Begin where an earlier page ended.")
@url_option
@json_option
def list_machines(
    url: str | None, is_json: bool, label: tuple[str, ...], is_all: bool, status: str | None, **paging: Any
) -> None:
    """List machines that run, oldest first; those that have ended are remembered for a while (-a)."""
    asked = None if is_all else status or "running"
    page = run_with_client(url, lambda client: client.page(labels_of(label), status=asked, **paging))
    if is_json:
        print_json(page)
        return
    machines = page["machines"]
    if not machines:
        click.echo(f"no machine {'with this label ' if label else ''}{f'is {asked}' if asked else 'is known'}")
    rows = [
        (
            machine["id"],
            machine["name"] or None,
            machine["status"] if not machine["why_ended"] else f"ended: {machine['why_ended']}",
            f"{machine['memory_mb']} MB",
            duration(machine["age_s"]),
            " ".join(f"{key}={value}" if value else key for key, value in machine["labels"].items()) or None,
        )
        for machine in machines
    ]
    if rows:
        print_table(("id", "name", "status", "memory", "age", "labels"), rows)
    running = next((machine["id"] for machine in machines if machine["status"] == "running"), None)
    more = page["next_cursor"]
    print_next_step(url, f"list --cursor {more}" if more else f"exec {running} -- ps" if running else "create")


@click.command("exec", cls=CommandInMachine)
@click.argument("machine_id", metavar="ID")
@click.argument("command", nargs=-1, required=True)
@click.option("--cwd", default="/work", show_default=True, help="Directory to run in.")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="Variable of this command; repeatable.")
@click.option("--timeout", type=float, default=300.0, show_default=True, help="Seconds until it is ended.")
@click.option("-i", "--stdin", "is_fed", is_flag=True, help="Feed it this command's standard input.")
@click.option("--background", is_flag=True, help="Leave it running and print its job's number.")
@url_option
@json_option
def execute(machine_id: str, url: str | None, background: bool, **asked: Any) -> int:
    """Run a command in a machine, after `--`; a single word is a line for the shell. Exits with the command's code."""
    from mettle.sandbox.service.client.terminal import execute_here, start_here, typed_command

    is_json = bool(asked.pop("is_json"))
    spec = typed_command(environment_of(asked.pop("env")), **asked)
    if background:
        job = run_with_client(url, lambda client: start_here(client, machine_id, spec))
        if is_json:
            print_json({"job": job})
        else:
            click.echo(job)
            print_next_step(url, f"logs {machine_id} {job}", is_aside=True)
        return 0
    ended = run_with_client(url, lambda client: execute_here(client, machine_id, spec, is_quiet=is_json))
    if is_json:
        print_json(ended.as_dict())
    return ended.exit_code


@click.command("run", cls=CommandLine)
@click.argument("command", nargs=-1, required=True)
@click.option("--cwd", default="/work", show_default=True, help="Directory to run in.")
@click.option("--timeout", type=float, default=300.0, show_default=True, help="Seconds until it is ended.")
@click.option("-i", "--stdin", "is_fed", is_flag=True, help="Feed it this command's standard input.")
@click.option(
    "--upload", "files", multiple=True, metavar="FILE[:PATH]", help="Put a file or directory there first; repeatable."
)
@machine_options
@url_option
@json_option
def run(
    command: tuple[str, ...], cwd: str, timeout: float, is_fed: bool, url: str | None, is_json: bool, **asked: Any
) -> int:
    """Run a command, after `--`, in a new machine that is deleted afterwards. Exits with the command's code."""
    from mettle.sandbox.service.client.terminal import run_once, typed_command

    config = machine_config(**asked)
    spec = typed_command({}, command=command, cwd=cwd, timeout=timeout, is_fed=is_fed)
    ended = run_with_client(url, lambda client: run_once(client, config, spec, is_quiet=is_json))
    if is_json:
        print_json(ended.as_dict())
    return ended.exit_code


@click.command("shell", cls=CommandInMachine)
@click.argument("machine_id", metavar="ID")
@click.argument("command", nargs=-1)
@url_option
def shell(machine_id: str, command: tuple[str, ...], url: str | None) -> int:
    """Open a shell in a machine, or run COMMAND, with this terminal as its own. Exits with its code."""
    from mettle.sandbox.service.client.shell import shell_here

    async def work(client: ServiceClient) -> int:
        return await shell_here(await client.machine(machine_id), command)

    return run_with_client(url, work)


@click.command("delete")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--label", multiple=True, metavar="NAME[=VALUE]", help="Those with this label; repeatable: all of them.")
@click.option("--all", "is_all", is_flag=True, help="Every machine of this token.")
@url_option
@json_option
def delete(ids: tuple[str, ...], label: tuple[str, ...], is_all: bool, url: str | None, is_json: bool) -> None:
    """End machines, and everything in them."""
    if not ids and not label and not is_all:
        raise UserError("which machines? give their ids, or --label, or --all")
    labels = labels_of(label)
    deleted = run_with_client(url, lambda client: client.delete(ids, labels, is_all=is_all))
    missing = [machine_id for machine_id in ids if machine_id not in deleted]
    if is_json:
        print_json({"deleted": deleted, "missing": missing})
    elif deleted:
        click.echo(f"deleted {' '.join(deleted)}")
        print_next_step(url, "list")
    if missing:
        raise UserError(f"not running, or never made: {' '.join(missing)}")
