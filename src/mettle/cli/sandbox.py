"""`mettle sandbox`: machines and judgements for untrusted code, here or at a service; and the service itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from mettle.cli import sandbox_files as files
from mettle.cli import sandbox_machines as machines
from mettle.cli.groups import NounGroup
from mettle.cli.sandbox_options import access_given, print_next_step, run_with_client, url_option
from mettle.cli.terminal import going_on, json_option, print_json, print_next, print_table

if TYPE_CHECKING:
    from mettle.sandbox.config import Requirement


class SandboxGroup(NounGroup):
    """Knows what other tools of this kind call these commands, and says what they are called here."""

    names_elsewhere: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("ls", "ps"), "list"),
        **dict.fromkeys(("rm", "kill", "stop", "terminate"), "delete"),
        **dict.fromkeys(("push", "put"), "upload"),
        **dict.fromkeys(("pull", "get"), "download"),
        **dict.fromkeys(("new", "start", "spawn"), "create"),
        **dict.fromkeys(("ssh", "connect", "attach"), "shell"),
        "cp": "upload' or 'mettle sandbox download",
        "tokens": "token",
        "up": "serve",
    }

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that `args` starts with."""
        meant = self.names_elsewhere.get(args[0])
        if meant is not None:
            raise click.UsageError(f"no command {args[0]!r}; did you mean 'mettle sandbox {meant}'?", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=SandboxGroup)
def sandbox() -> None:
    """Run untrusted code: machines to work in, here or at a service."""


for verb in (
    machines.create,
    machines.list_machines,
    machines.execute,
    machines.run,
    machines.shell,
    files.upload,
    files.download,
    files.logs,
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
        print_next_step(url, "run -- uname -a")
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

    config = SandboxConfig(backend="remote", urls=(url,), **access_given()) if url else SandboxConfig()
    figures = asyncio.run(measure(config, num))
    if is_json:
        print_json({"url": url, "figures": [figure.as_dict() for figure in figures]})
        return
    rows = [(f.what, f.num, round(f.p50_ms, 2), round(f.p95_ms, 2), round(f.per_s), round(f.ratio, 2)) for f in figures]
    print_table(("what", "n", "p50 ms", "p95 ms", "per s", "to plain"), rows)
    print_next_step(url, "doctor")


@sandbox.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8300, help="0 takes a free one.  [default: 8300]")
@click.option("--unix", type=click.Path(path_type=Path), help="Listen on this Unix socket instead; needs no token.")
@click.option("--tokens", type=click.Path(path_type=Path), help="File of tokens; that of `mettle sandbox token`.")
@click.option("--tls-cert", type=click.Path(path_type=Path), help="Speak TLS with this certificate (PEM).")
@click.option("--tls-key", type=click.Path(path_type=Path), help="Its private key, unless it is in the same file.")
@click.option("--public-url", help="Where `prime` clients are sent; the address that they came to by default.")
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
        if settings.is_in_the_open:
            click.echo("warning: without --tls-cert the network can read what clients send, tokens too", err=True)

    with going_on("its machines have ended; `mettle sandbox serve` starts it again"):
        asyncio.run(serve_until_told(settings, on_ready))
    click.echo("stopped; its machines have ended")


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
            _show_tokens(rows, path)
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
            print_next("mettle sandbox serve", is_aside=True)


def _show_tokens(rows: list[dict[str, Any]], path: Path) -> None:
    if not rows:
        click.echo(f"there is no token in {path}")
        return
    shown = []
    for row in rows:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["created"])) if row["created"] else None
        shown.append((row["name"], made, " ".join(f"{key}={value}" for key, value in (row["quota"] or {}).items())))
    print_table(("name", "created", "quota"), shown)
