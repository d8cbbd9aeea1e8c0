"""`mettle sandbox`: machines and judgements for untrusted code, here or at a service; and the service itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mettle.cli import sandbox_machines as machines
from mettle.cli.groups import NounGroup
from mettle.cli.sandbox_machines import run_with_client, url_option
from mettle.cli.terminal import going_on, json_option, print_json, print_next, print_table

if TYPE_CHECKING:
    from mettle.sandbox.config import Requirement


@click.group(cls=NounGroup)
def sandbox() -> None:
    """Run untrusted code: machines to work in, here or at a service."""


for verb in (
    machines.create,
    machines.list_machines,
    machines.execute,
    machines.run,
    machines.upload,
    machines.download,
    machines.logs,
    machines.delete,
):
    sandbox.add_command(verb)


@sandbox.command()
@click.option(
    "--require",
    "required",
    multiple=True,
    metavar="NAME",
    help="A grade (ns) or a layer (landlock, cgroup-memory, ...) that there must be; may be given more than once.",
)
@click.option("--backend", help="Of another backend than zygote: docker, kubernetes.")
@click.option("--config", type=click.Path(path_type=Path), help="TOML file whose table [sandbox] is looked at.")
@url_option
@json_option
def doctor(required: tuple[str, ...], backend: str | None, config: Path | None, url: str | None, is_json: bool) -> int:
    """Show each layer of isolation that is in force, as code inside finds it. The exit code is 1 if one is missing.

    Without --require that is a layer of the grade ns; with it, any that is named.
    """
    from mettle.sandbox.doctor import examine_host
    from mettle.sandbox.service.settings import sandbox_config

    settings = sandbox_config(config, backend, required)
    if url is not None:
        return _doctor_of_service(url, settings.require, is_json)
    report = examine_host(settings)
    if is_json:
        print_json(report.as_dict())
    else:
        click.echo("\n".join(report.lines()))
        if not report.unmet:
            print_next("mettle sandbox run -- uname -a")
    return 1 if report.unmet else 0


def _doctor_of_service(url: str, required: Requirement, is_json: bool) -> int:
    reports = run_with_client(url, lambda client: client.isolation())
    if is_json:
        print_json({use: report.as_dict() for use, report in reports.items()})
    else:
        for use, report in reports.items():
            click.echo("\n".join([f"{use}:", *report.lines()]))
        print_next(f"mettle sandbox run --url {url} -- uname -a")
    return 0 if all(report.meets(required) for report in reports.values()) else 1


@sandbox.command()
@url_option
@click.option("-n", "--num", type=click.IntRange(3, 10_000), default=30, show_default=True, help="Repetitions.")
@json_option
def bench(url: str | None, num: int, is_json: bool) -> None:
    """Measure judgements, commands and machines beside a plain process; without --url, in this process."""
    import asyncio

    from mettle.sandbox import SandboxConfig
    from mettle.sandbox.bench import measure

    config = SandboxConfig(backend="remote", urls=(url,)) if url else SandboxConfig()
    figures = asyncio.run(measure(config, num))
    if is_json:
        print_json({"url": url, "figures": [figure.as_dict() for figure in figures]})
        return
    rows = [(f.what, f.num, round(f.p50_ms, 2), round(f.p95_ms, 2), round(f.per_s), round(f.ratio, 2)) for f in figures]
    print_table(("what", "n", "p50 ms", "p95 ms", "per s", "to plain"), rows)
    print_next("mettle sandbox doctor")


@sandbox.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8300, help="0 takes a free one.  [default: 8300]")
@click.option("--unix", type=click.Path(path_type=Path), help="Listen on this Unix socket instead; needs no token.")
@click.option("--tokens", type=click.Path(path_type=Path), help="File of tokens; that of `mettle sandbox token`.")
@click.option("--backend", default="zygote", show_default=True, help="What it runs on.")
@click.option(
    "--max-running", type=click.IntRange(min=1), help="Judgements at a time; twice the processors by default."
)
@click.option("--config", type=click.Path(path_type=Path), help="TOML file with more settings (ServiceConfig).")
def serve(config: Path | None, **given: Any) -> None:
    """Serve machines and judgements over HTTP until Ctrl-C."""
    import asyncio

    from mettle.sandbox.service.server import serve as serve_until_told
    from mettle.sandbox.service.settings import service_config

    settings = service_config(config, **given)

    def on_ready(url: str) -> None:
        click.echo(f"serving sandboxes (backend {settings.sandbox.backend}) at {url} until Ctrl-C")
        print_next(f"mettle sandbox run --url {url} -- uname -a")

    with going_on("its machines have ended; `mettle sandbox serve` starts it again"):
        asyncio.run(serve_until_told(settings, on_ready))


@sandbox.command()
@click.argument("name", required=False)
@click.option("--revoke", is_flag=True, help="End the token instead; running services refuse it at once.")
@click.option("--tokens", type=click.Path(path_type=Path), help="File of tokens.  [default: in ~/.config/mettle]")
@click.option("--quota", multiple=True, metavar="NAME=N", help="A limit of its own, as in max_machines=20.")
@json_option
def token(name: str | None, revoke: bool, tokens: Path | None, quota: tuple[str, ...], is_json: bool) -> None:
    """Make a token for a service and print it, once; without a NAME, list those that there are."""
    from mettle.sandbox.service import tokens as kept
    from mettle.sandbox.service.settings import parse_quota

    path = tokens or kept.default_tokens_file()
    if name is None:
        rows = [{key: row.get(key) for key in ("name", "created", "quota")} for row in kept.read_tokens(path)]
        if is_json:
            print_json(rows)
        else:
            print_table(("name", "created", "quota"), [tuple(row.values()) for row in rows])
            print_next("mettle sandbox token NAME")
    elif revoke:
        kept.revoke_token(path, name)
        click.echo(f"token {name} is refused from now on")
        print_next("mettle sandbox token")
    else:
        made = kept.add_token(path, name, parse_quota(quota))
        if is_json:
            print_json({"name": name, "token": made})
        else:
            click.echo(made)
            click.echo(f"kept as a hash in {path}; clients take it from {kept.TOKEN_ENV}", err=True)
            click.echo("next: mettle sandbox serve", err=True)
