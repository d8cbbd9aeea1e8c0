"""What the commands of `mettle sandbox` share: the service they speak to, sizes, where a command begins, what is next.

The service is `--url`, METTLE_SANDBOX_URL, or one of this user's own that is started when it is needed and ends when it
has been idle. Invariant: what is printed as the next command reaches the same service as the one that was typed.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from mettle.cli.terminal import print_next
from mettle.errors import UserError

if TYPE_CHECKING:
    from mettle.sandbox.machines.config import MachineConfig
    from mettle.sandbox.service.client.client import ServiceClient

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_ACCESS: Final = "mettle.sandbox.access"
URL_ENV: Final = "METTLE_SANDBOX_URL"
CA_FILE_ENV: Final = "METTLE_SANDBOX_CA_FILE"
PLAIN_HTTP_ENV: Final = "METTLE_SANDBOX_PLAIN_HTTP"
_SIZE: Final = re.compile(r"(\d+)\s*([mg]?)(?:i?b)?", re.IGNORECASE)


def _megabytes(_: click.Context, __: click.Parameter, value: str) -> int:
    """A size in MB: 512, 512M or 2G."""
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise click.BadParameter(f"{value!r} is not a size in MB; write 512, 512M or 2G")
    return int(found[1]) << (10 if found[2].lower() == "g" else 0)


class CommandLine(click.Command):
    """A command that takes another one: from its first word on, everything belongs to that, with or without `--`."""

    num_names = 0
    """Arguments that stand before the other command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the `--` where it was left out."""
        if "--" not in args:
            begin = self._beginning(ctx, args)
            args = [*args[:begin], "--", *args[begin:]]
        return super().parse_args(ctx, args)

    def _beginning(self, ctx: click.Context, args: list[str]) -> int:
        valued = {
            name
            for option in self.get_params(ctx)
            if isinstance(option, click.Option) and not option.is_flag
            for name in option.opts
        }
        num_seen, index = 0, 0
        while index < len(args):
            if args[index].startswith("-") and args[index] != "-":
                index += 1 if args[index] not in valued else 2
                continue
            if num_seen == self.num_names:
                return index
            num_seen += 1
            index += 1
        return len(args)


class CommandInMachine(CommandLine):
    """The same, after the machine's id."""

    num_names = 1


def url_option(command: F) -> F:
    """The `--url` of a service, and how far it is trusted; the latter is read by `access_given`."""
    for option in (
        click.option(
            "--plain-http",
            is_flag=True,
            envvar=PLAIN_HTTP_ENV,
            expose_value=False,
            callback=_keep,
            help="Send the token to another host without TLS.",
        ),
        click.option(
            "--ca-file",
            type=click.Path(path_type=Path),
            envvar=CA_FILE_ENV,
            expose_value=False,
            callback=_keep,
            help="Who may have signed its certificate.",
        ),
        click.option("--url", envvar=URL_ENV, help=f"Service, https://host:port or unix:/path.  [{URL_ENV}]"),
    ):
        command = option(command)
    return command


def access_given() -> dict[str, Any]:
    """`ca_file` and `plain_http` of the command that was typed."""
    held: dict[str, Any] = click.get_current_context().meta.get(_ACCESS, {})
    return dict(held)


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    ctx.meta.setdefault(_ACCESS, {})[param.name] = value


def machine_options(command: F) -> F:
    """What a new machine is like."""
    for option in (
        click.option("--image", help="Image of its files, where the service's backend has images."),
        click.option("--env", multiple=True, metavar="NAME=VALUE", help="Variable of all its commands; repeatable."),
        click.option("--label", multiple=True, metavar="NAME=VALUE", help="A label of your own; repeatable."),
        click.option("--idle", type=float, metavar="SECONDS", help="End it when nothing is asked of it for so long."),
        click.option("--lifetime", type=float, default=3600.0, show_default=True, help="Seconds until it ends."),
        click.option(
            "--disk", callback=_megabytes, metavar="MB", default="256", show_default=True, help="All its files; or 2G."
        ),
        click.option(
            "--memory",
            callback=_megabytes,
            metavar="MB",
            default="512",
            show_default=True,
            help="All its processes; or 2G.",
        ),
    ):
        command = option(command)
    return command


def run_with_client(url: str | None, work: Callable[[ServiceClient], Awaitable[T]]) -> T:
    """Do the work with a client of the service at `url`, or of this user's own."""
    from mettle.sandbox.service.client.client import ServiceClient
    from mettle.sandbox.service.local import local_service

    found, access = url or local_service(), access_given()

    async def main() -> T:
        async with ServiceClient(found, **access) as client:
            return await work(client)

    return asyncio.run(main())


def print_next_step(url: str | None, step: str, *, is_aside: bool = False) -> None:
    """Name the command that comes next, at the same service; aside: where the output is a value for a script."""
    verb, _, rest = step.partition(" ")
    chosen = f" --url {url}" if url and url != os.environ.get(URL_ENV) else ""
    access = access_given()
    if access.get("ca_file") and CA_FILE_ENV not in os.environ:
        chosen += f" --ca-file {access['ca_file']}"
    if access.get("plain_http") and PLAIN_HTTP_ENV not in os.environ:
        chosen += " --plain-http"
    text = f"mettle sandbox {verb}{chosen} {rest}".rstrip()
    print_next(text, is_aside=is_aside)


def machine_config(
    memory: int,
    disk: int,
    lifetime: float,
    idle: float | None,
    label: tuple[str, ...],
    env: tuple[str, ...],
    **rest: Any,
) -> MachineConfig:
    """The machine that the options ask for. Raises: UserError."""
    from mettle.sandbox.machines.config import MachineConfig
    from mettle.sandbox.service.client.terminal import files_of

    config = MachineConfig(
        memory_mb=memory,
        disk_mb=disk,
        lifetime_s=lifetime,
        idle_s=idle,
        labels=labels_of(label),
        env=environment_of(env),
        files=files_of(rest.get("files", ())),
        image=rest.get("image"),
    )
    config.limits()
    return config


def labels_of(given: tuple[str, ...]) -> dict[str, str]:
    """NAME=VALUE, or NAME alone."""
    return dict(text.partition("=")[::2] for text in given)


def environment_of(given: tuple[str, ...]) -> dict[str, str]:
    """NAME=VALUE, or NAME for the value that it has here. Raises: UserError when it has none."""
    found: dict[str, str] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign and name not in os.environ:
            raise UserError(f"--env {name}: there is no such variable here; write {name}=VALUE")
        found[name] = value if sign else os.environ[name]
    return found
