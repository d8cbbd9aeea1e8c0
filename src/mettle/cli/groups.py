"""Command groups: loaded when they are asked for, and kind to a slip of the fingers."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import click


class Lazy(NamedTuple):
    """A command that is imported on first use: `module:attribute`, and the line that help shows until then."""

    target: str
    help: str


class NounGroup(click.Group):
    """A group that, asked for a command it does not have, names the nearest one, or what that is called here."""

    elsewhere: Mapping[str, str] = MappingProxyType({})
    """What to type for names that users of other trainers know."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that `args` starts with."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            meant = self.elsewhere.get(name)
            hint = f"that is `{meant}` here" if meant else _nearest(name, self.list_commands(ctx), ctx.command_path)
            raise click.UsageError(f"no command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)


class LazyGroup(NounGroup):
    """A group whose commands are imported on first use; its help needs none of them."""

    def __init__(
        self, *args: Any, lazy: dict[str, Lazy], elsewhere: Mapping[str, str] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy
        self.elsewhere = elsewhere or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they are listed."""
        return [*self.lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        entry = self.lazy.get(cmd_name)
        if entry is None:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = entry.target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the nouns with their help lines, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in self.lazy.items()])


def _nearest(name: str, known: Iterable[str], path: str) -> str:
    import difflib

    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean '{path} {close[0]}'?" if close else f"there are {', '.join(names)}"
