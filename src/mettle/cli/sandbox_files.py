"""`mettle sandbox` for what goes into machines and comes out of them: upload, download, logs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mettle.cli.sandbox_options import print_next_step, run_with_client, url_option
from mettle.cli.terminal import json_option, print_json
from mettle.errors import UserError

if TYPE_CHECKING:
    from mettle.sandbox.service.client.client import ServiceClient


@click.command("upload")
@click.argument("machine_id", metavar="ID")
@click.argument("source", type=click.Path(exists=True, path_type=Path), metavar="LOCAL")
@click.argument("target", metavar="REMOTE", required=False)
@url_option
def upload(machine_id: str, source: Path, target: str | None, url: str | None) -> None:
    """Copy a file or a directory into a machine; relative paths are below /work."""
    path = target or source.resolve().name

    async def work(client: ServiceClient) -> None:
        await (await client.machine(machine_id)).upload(path, source)

    run_with_client(url, work)
    click.echo(f"{source} is {path} in {machine_id}")
    print_next_step(url, f"exec {machine_id} -- ls -l")


@click.command("download")
@click.argument("machine_id", metavar="ID")
@click.argument("source", metavar="REMOTE")
@click.argument("target", type=click.Path(path_type=Path), metavar="LOCAL", required=False)
@url_option
def download(machine_id: str, source: str, target: Path | None, url: str | None) -> None:
    """Copy a file or a directory out of a machine; LOCAL may be - for the standard output of a file.

    Of a directory, files and directories come; links and programs' rights to another user do not.
    """
    from mettle.sandbox.service.client.downloads import download_here

    path = target or Path(Path(source).name or "work")

    async def work(client: ServiceClient) -> str:
        return await download_here(await client.machine(machine_id), source, path)

    try:
        shown = run_with_client(url, work)
    except OSError as error:
        raise UserError(f"{error.filename or source}: {error.strerror or error}") from error
    if str(path) != "-":
        click.echo(shown)
        print_next_step(url, f"delete {machine_id}")


@click.command("logs")
@click.argument("machine_id", metavar="ID")
@click.argument("job", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on until it ends.")
@url_option
@json_option
def logs(machine_id: str, job: str | None, follow: bool, url: str | None, is_json: bool) -> None:
    """Show what a background command has written; of the last one if none is named."""
    from mettle.sandbox.service.client.terminal import follow_job, job_logs

    if follow and is_json:
        raise UserError("--follow writes as it comes, and --json at once: give one of them")
    if not follow and is_json:
        print_json(run_with_client(url, lambda client: job_logs(client, machine_id, job)))
        return
    state = run_with_client(url, lambda client: follow_job(client, machine_id, job, is_patient=follow))
    click.echo(state, err=True)
