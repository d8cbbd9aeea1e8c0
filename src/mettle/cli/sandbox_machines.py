"""`mettle sandbox` for those who use machines: create, list, exec, run, upload, download, logs, delete.

All of them speak to a service: `--url`, METTLE_SANDBOX_URL, or one of this user's own that is started when it is
needed and ends when it has been idle.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mettle.cli.terminal import json_option, print_json, print_next, print_table, seconds
from mettle.errors import UserError

if TYPE_CHECKING:
    from mettle.sandbox.machines.config import MachineConfig
    from mettle.sandbox.remote.client import SandboxClient

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def url_option(command: F) -> F:
    """The `--url` of a service."""
    return click.option(
        "--url", envvar="METTLE_SANDBOX_URL", help="Service, http://host:port or unix:/path.  [METTLE_SANDBOX_URL]"
    )(command)


def machine_options(command: F) -> F:
    """What a new machine is like."""
    for option in (
        click.option("--env", multiple=True, metavar="NAME=VALUE", help="Variable of all its commands; repeatable."),
        click.option("--label", multiple=True, metavar="NAME=VALUE", help="A label of your own; repeatable."),
        click.option("--idle", type=float, metavar="SECONDS", help="End it when nothing is asked of it for so long."),
        click.option("--lifetime", type=float, default=3600.0, show_default=True, help="Seconds until it ends."),
        click.option("--disk", type=int, default=256, show_default=True, help="MB of all its files."),
        click.option("--memory", type=int, default=512, show_default=True, help="MB of all its processes."),
    ):
        command = option(command)
    return command


def run_with_client(url: str | None, work: Callable[[SandboxClient], Awaitable[T]]) -> T:
    """Do the work with a client of the service at `url`, or of this user's own."""
    from mettle.sandbox.remote.client import SandboxClient
    from mettle.sandbox.service.local import local_service

    found = url or local_service()

    async def main() -> T:
        async with SandboxClient(found) as client:
            return await work(client)

    return asyncio.run(main())


@click.command("create")
@click.option("--name", default="", help="A name to show in lists.")
@machine_options
@url_option
@json_option
def create(url: str | None, is_json: bool, name: str, **asked: Any) -> None:
    """Make a machine and print its id."""
    config = _config(**asked)

    async def work(client: SandboxClient) -> dict[str, Any]:
        return await client.show((await client.create(config, name)).id)

    made = run_with_client(url, work)
    if is_json:
        print_json(made)
    else:
        click.echo(made["id"])
        print_next(f"mettle sandbox exec {made['id']} -- uname -a")


@click.command("list")
@click.option("--label", multiple=True, metavar="NAME[=VALUE]", help="Only those with this label; repeatable: all.")
@click.option("--status", type=click.Choice(["running", "ended"]), help="Only these.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Machines on a page.")
@click.option("--cursor", help="Begin where an earlier page ended.")
@url_option
@json_option
def list_machines(
    url: str | None, is_json: bool, label: tuple[str, ...], status: str | None, limit: int, cursor: str | None
) -> None:
    """List machines, oldest first; those that have ended are remembered for a while."""
    labels = dict(text.partition("=")[::2] for text in label)
    page = run_with_client(url, lambda client: client.page(labels, status=status, limit=limit, cursor=cursor))
    if is_json:
        print_json(page)
        return
    rows = [
        (
            machine["id"],
            machine["name"] or None,
            machine["status"] if not machine["why_ended"] else f"ended: {machine['why_ended']}",
            f"{machine['memory_mb']} MB",
            seconds(machine["age_s"]),
            " ".join(f"{key}={value}" if value else key for key, value in machine["labels"].items()) or None,
        )
        for machine in page["machines"]
    ]
    print_table(("id", "name", "status", "memory", "age", "labels"), rows)
    more = page["next_cursor"]
    print_next(f"mettle sandbox list --cursor {more}" if more else "mettle sandbox create")


@click.command("exec")
@click.argument("machine_id", metavar="ID")
@click.argument("command", nargs=-1, required=True)
@click.option("--cwd", default="/work", show_default=True, help="Directory to run in.")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="Variable of this command; repeatable.")
@click.option("--timeout", type=float, default=300.0, show_default=True, help="Seconds until it is ended.")
@click.option("-i", "--stdin", "is_fed", is_flag=True, help="Feed it this command's standard input.")
@click.option("-b", "--background", is_flag=True, help="Leave it running and print its job's number.")
@url_option
@json_option
def execute(machine_id: str, url: str | None, background: bool, **asked: Any) -> int:
    """Run a command in a machine, after `--`; a single word is a line for the shell. Exits with the command's code."""
    from mettle.sandbox.remote.terminal import Order, execute_here, start_here

    is_json = bool(asked.pop("is_json"))
    order = Order.read(_environment(asked.pop("env")), **asked)
    if background:
        job = run_with_client(url, lambda client: start_here(client, machine_id, order))
        if is_json:
            print_json({"job": job})
        else:
            click.echo(job)
            print_next(f"mettle sandbox logs {machine_id} {job}")
        return 0
    ended = run_with_client(url, lambda client: execute_here(client, machine_id, order, is_quiet=is_json))
    if is_json:
        print_json(ended.as_dict())
    return ended.exit_code


@click.command("run")
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
    from mettle.sandbox.remote.terminal import Order, run_once

    config = _config(**asked)
    order = Order.read({}, command=command, cwd=cwd, timeout=timeout, is_fed=is_fed)
    ended = run_with_client(url, lambda client: run_once(client, config, order, is_quiet=is_json))
    if is_json:
        print_json(ended.as_dict())
    return ended.exit_code


@click.command("upload")
@click.argument("machine_id", metavar="ID")
@click.argument("source", type=click.Path(exists=True, path_type=Path), metavar="LOCAL")
@click.argument("target", metavar="REMOTE", required=False)
@url_option
def upload(machine_id: str, source: Path, target: str | None, url: str | None) -> None:
    """Copy a file or a directory into a machine; relative paths are below /work."""
    path = target or source.resolve().name

    async def work(client: SandboxClient) -> None:
        await (await client.machine(machine_id)).upload(path, source)

    run_with_client(url, work)
    click.echo(f"{source} is {path} in {machine_id}")
    print_next(f"mettle sandbox exec {machine_id} -- ls -l")


@click.command("download")
@click.argument("machine_id", metavar="ID")
@click.argument("source", metavar="REMOTE")
@click.argument("target", type=click.Path(path_type=Path), metavar="LOCAL", required=False)
@url_option
def download(machine_id: str, source: str, target: Path | None, url: str | None) -> None:
    """Copy a file out of a machine; LOCAL may be - for standard output."""

    async def work(client: SandboxClient) -> bytes:
        return await (await client.machine(machine_id)).download(source)

    path = target or Path(Path(source).name)
    try:
        data = run_with_client(url, work)
        if str(path) == "-":
            sys.stdout.buffer.write(data)
            return
        path.write_bytes(data)
    except OSError as error:
        raise UserError(f"{error.filename or source}: {error.strerror or error}") from error
    click.echo(f"{path}: {len(data):,} bytes")
    print_next(f"mettle sandbox delete {machine_id}")


@click.command("logs")
@click.argument("machine_id", metavar="ID")
@click.argument("job", required=False)
@url_option
@json_option
def logs(machine_id: str, job: str | None, url: str | None, is_json: bool) -> None:
    """Show what a background command has written; of the last one if none is named."""
    from mettle.sandbox.remote.terminal import job_logs, write_output

    shown = run_with_client(url, lambda client: job_logs(client, machine_id, job))
    if is_json:
        print_json(shown)
        return
    write_output("stdout", shown["stdout"].encode())
    write_output("stderr", shown["stderr"].encode())
    click.echo(shown["state"], err=True)


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
    labels = dict(text.partition("=")[::2] for text in label)
    deleted = run_with_client(url, lambda client: client.delete(ids, labels, is_all=is_all))
    missing = [machine_id for machine_id in ids if machine_id not in deleted]
    if is_json:
        print_json({"deleted": deleted, "missing": missing})
    elif deleted:
        click.echo(f"deleted {' '.join(deleted)}")
        print_next("mettle sandbox list")
    if missing:
        raise UserError(f"not running, or never made: {' '.join(missing)}")


def _config(
    memory: int,
    disk: int,
    lifetime: float,
    idle: float | None,
    label: tuple[str, ...],
    env: tuple[str, ...],
    **rest: Any,
) -> MachineConfig:
    from mettle.sandbox.machines.config import MachineConfig
    from mettle.sandbox.remote.terminal import files_of

    config = MachineConfig(
        memory_mb=memory,
        disk_mb=disk,
        lifetime_s=lifetime,
        idle_s=idle,
        labels=dict(text.partition("=")[::2] for text in label),
        env=_environment(env),
        files=files_of(rest.get("files", ())),
    )
    config.limits()
    return config


def _environment(given: tuple[str, ...]) -> dict[str, str]:
    """NAME=VALUE, or NAME for the value that it has here."""
    pairs = [text.partition("=") for text in given]
    return {name: value if sign else os.environ.get(name, "") for name, sign, value in pairs}
