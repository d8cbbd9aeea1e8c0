"""`mettle rl invite`, `rl work`, `rl workers`: workers from outside that sample for a run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import click

from mettle.cli.terminal import find_run, going_on, json_option, print_json, print_next, print_table
from mettle.errors import ProviderError, UserError

TOKEN_ENV = "METTLE_WORK_TOKEN"


@click.command()
@click.argument("run")
@click.option("--name", default="worker", show_default=True, help="Whom it is for; the run's events say this name.")
@json_option
def invite(run: str, name: str, is_json: bool) -> None:
    """Invite a worker from outside to a run that has [inference.outside]; the token is shown once."""
    from dataclasses import asdict

    from mettle.runs.outside import invite_worker
    from mettle.storage.run_dir import RunDir

    found = invite_worker(RunDir.existing(find_run(run)), name)
    if is_json:
        print_json({"run": run, **asdict(found)})
        return
    click.echo(f"token of {found.name}: {found.token}")
    if found.url is None:
        click.echo("the door is not open yet; it is once the run's engine serves")
    print_next(f"mettle rl work {found.url or 'URL'} --token {found.token}")


@click.command()
@click.argument("url")
@click.option("--token", help=f"That of the invitation.  [default: {TOKEN_ENV}]")
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), default=Path("work"), show_default=True,
    help="Folder for this worker's key and the weights that it fetches.",
)  # fmt: skip
@click.option("--slots", default=64, show_default=True, type=click.IntRange(1, 4096), help="Completions at a time.")
@click.option("--threads", type=click.IntRange(1), help="Threads of one tensor operation.")
@click.option("--relay", default="", help="Hand weights on to other workers at this address, as http://10.0.0.7:7300.")
@json_option
def work(
    url: str, token: str | None, directory: Path, slots: int, threads: int | None, relay: str, is_json: bool
) -> int:
    """Sample for a run that is somewhere else, until it ends or Ctrl-C.

    What is sampled here is computed again there before it counts.
    """
    import asyncio
    from dataclasses import asdict

    from mettle.inference.outside.signatures import WorkerKey
    from mettle.inference.outside.worker import OutsideClient, OutsideWorking, RunGone, WorkPlace

    token = token or os.environ.get(TOKEN_ENV, "")
    if not token:
        raise UserError(f"name the token of your invitation with --token or {TOKEN_ENV}; `mettle rl invite` makes one")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{url!r} is no address of a run; `mettle rl invite` says it, as in http://10.0.0.1:7200")
    if relay and not (relay.startswith("http://") and relay.rpartition(":")[2].isdecimal()):
        raise UserError(f"--relay {relay!r} is no address with a port, as in http://10.0.0.7:7300")
    key = WorkerKey.of_file(directory / "key")
    place = WorkPlace(directory, slots, threads, relay)

    def tell(line: str) -> None:
        click.echo(line, err=True)

    async def go() -> OutsideWorking:
        working = OutsideWorking(OutsideClient(url, token, key), place, tell)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, working.stop)
        try:
            await working.run()
        except RunGone as error:
            if not working.done.versions:
                raise ProviderError(f"no run lets workers in at {url}: {error}") from error
            tell("the run does not answer any more")
        return working

    with going_on("the run goes on without this worker"):
        done = asyncio.run(go()).done
    if is_json:
        print_json(asdict(done))
    else:
        click.echo(
            f"{done.completions} completions of {done.num_tokens} tokens under {done.versions} versions;"
            f" {done.fetched_bytes:,} bytes fetched, {done.from_relays} pieces of them from other workers"
        )
    return 0


@click.command()
@click.argument("run")
@json_option
def workers(run: str, is_json: bool) -> None:
    """Show the workers from outside of a run, and what became of their work."""
    from mettle.inference.outside.roster import read_roster
    from mettle.runs.outside import has_door, no_door
    from mettle.storage.run_dir import RunDir

    run_dir = RunDir.existing(find_run(run))
    found = read_roster(run_dir.outside)
    names = ("name", "state", "taken", "sampled", "num_tokens", "checked", "returned", "refused", "reason")
    if is_json:
        print_json(
            [{"key": one.key, "joined_at": one.joined_at} | {n: getattr(one, n) for n in names} for one in found]
        )
        return
    if not found and not has_door(run_dir):
        click.echo(no_door(run_dir))
        return
    if not found:
        click.echo(f"nobody has worked for {run} from outside")
        print_next(f"mettle rl invite {run}")
        return
    heads = ("worker", "state", "taken", "sampled", "tokens", "checked", "returned", "refused", "")
    print_table(heads, [tuple(getattr(one, name) for name in names) for one in found])
