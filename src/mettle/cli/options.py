"""Commands whose options are the fields of a config model.

    @evaluations.command("run", cls=ConfigCommand, model="mettle.evals.spec:EvalSpec", metavar="[ENV|FILE.toml]...")
    @json_option
    def run(words: list[str], given: Given, is_json: bool) -> None: ...

Parts: `ConfigCommand`, `split_words` (files and other words), `own_option` (one field as a click option). The command
gets `words` (what is no option), and `given`: the options as a layer, the overrides (`--sampling.temperature 0.7`) that
follow. Invariants: the model is imported when its options are asked for, so that a group lists its commands without it;
values are read here and checked by the model alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mettle.cli.terminal import print_json
from mettle.errors import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from mettle.config import Loaded
    from mettle.config.options import Asked, Given

FIELD = "field__"
"""Marks the parameters that are fields of the model."""


class ConfigCommand(click.Command):
    """A command that takes words, the fields of `model` ("module:Class") as options, and dotted overrides."""

    def __init__(self, *args: Any, model: str, metavar: str, **kwargs: Any) -> None:
        self._model = model
        self._made: list[click.Parameter] | None = None
        super().__init__(*args, **kwargs)
        self.context_settings.setdefault("ignore_unknown_options", True)
        self._words = click.Argument(["words"], metavar=metavar, nargs=-1, type=click.UNPROCESSED)

    @property
    def model(self) -> type[BaseModel]:
        """The class of the fields."""
        module, _, name = self._model.partition(":")
        model: type[BaseModel] = getattr(importlib.import_module(module), name)
        return model

    @property
    def params(self) -> list[click.Parameter]:
        """The words, an option for each field, then the command's own options."""
        if self._made is None:
            from mettle.config.options import asked_fields

            fields = [own_option(asked) for asked in asked_fields(self.model) if not asked.option.is_argument]
            self._made = [self._words, *fields, *self._own]
        return self._made

    @params.setter
    def params(self, own: list[click.Parameter]) -> None:
        self._own = own

    def invoke(self, ctx: click.Context) -> Any:
        """Hand over what was given."""
        words, tokens = _split(ctx.params.pop("words"), self, ctx)
        ctx.params["given"] = _given(ctx, tokens)
        ctx.params["words"] = words
        return super().invoke(ctx)


CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def dry_run_option(command: CommandT) -> CommandT:
    """The `--dry-run` of everything that is configured."""
    text = "Print the resolved config with the source of each value, and stop."
    return click.option("--dry-run", "is_dry_run", is_flag=True, help=text)(command)


def print_config(loaded: Loaded[Any], *, is_json: bool) -> None:
    """A resolved config with the source of each value: TOML that loads back to it, or JSON."""
    if is_json:
        print_json({"config": loaded.config.model_dump(mode="json"), "sources": loaded.sources})
    else:
        click.echo(loaded.render(), nl=False)


def with_words(given: Given, name: str, words: Sequence[str]) -> Given:
    """What was given, and the field `name` from the one word that is no file. Raises: UserError for a second word."""
    if len(words) > 1:
        raise UserError(f"unexpected {words[1]!r} after {words[0]!r}: one environment, or TOML files")
    return given.with_value(name, words[0], "command line") if words else given


def one_word(words: Sequence[str], name: str) -> str:
    """The one word that a command takes. Raises: UsageError for none or several."""
    if len(words) != 1:
        raise click.UsageError(f"unexpected {words[1]!r} after {words[0]!r}" if words else f"Missing argument {name!r}")
    return words[0]


def split_words(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """TOML files, and the other words. `@` before a file is allowed, as elsewhere in this field."""
    files = [word for word in words if word.endswith(".toml") or word.startswith("@")]
    return [Path(file.removeprefix("@")) for file in files], [word for word in words if word not in files]


def only_files(words: Sequence[str]) -> list[Path]:
    """The TOML files of a command that takes nothing else. Raises: UsageError for another word."""
    files, names = split_words(words)
    if names:
        raise click.UsageError(f"unexpected {names[0]!r}: config files end with .toml")
    return files


def own_option(asked: Asked) -> click.Option:
    """The option of one field. Its value is None when it is not given."""
    from mettle.config import shape
    from mettle.config.options import spelled

    flags = asked.option.flags.split()
    long = [flag for flag in flags if flag.startswith("--")] or [spelled((asked.name,))]
    short = [flag for flag in flags if not flag.startswith("--")]
    kind = _FieldType(asked.annotation)
    word = "TEXT" if asked.option.is_repeatable else kind.word
    settings: dict[str, Any] = {"type": kind, "multiple": asked.option.is_repeatable, "metavar": word}
    if kind.is_switch:
        settings = {"default": None}
        if "/" not in long[0]:
            long[0] += f"/--no-{long[0].removeprefix('--')}"
        short = [f"{flag}/ " for flag in short]
    elif shape.takes_bool(asked.annotation):
        settings |= {"is_flag": False, "flag_value": "true", "metavar": f"[{word}]"}
    name = FIELD + asked.name
    return click.Option([name, *short, *long], help=_help(asked), **settings)


class _FieldType(click.ParamType):  # type: ignore[type-arg]
    """Reads a text as the value of a field: a table as JSON, everything else as an override is read."""

    def __init__(self, annotation: Any) -> None:
        from mettle.config import shape

        self.annotation = annotation
        members = [member for member in shape.variants(annotation) if member not in (None, type(None))]
        self.is_switch = members == [bool]
        self.is_table = any(shape.is_table(member) for member in members)
        self.word = "JSON" if self.is_table else _word(members)
        self.name = self.word

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value that the text means. Raises: UserError for a table that is no JSON object."""
        from mettle.cli.arguments import json_object
        from mettle.config.overrides import parse_value

        if not isinstance(value, str):
            return value
        flag = max(param.opts, key=len) if param is not None else ""
        is_lines = param is not None and getattr(param, "multiple", False)
        if self.is_table and not is_lines:
            return json_object(value, flag)
        return value if is_lines else parse_value(value, self.annotation)


def _word(members: Sequence[Any]) -> str:
    """What stands for the value in the help: `INTEGER`, or the words that it may be."""
    from typing import Literal, get_args, get_origin

    choices = [str(arg) for member in members if get_origin(member) is Literal for arg in get_args(member)]
    plain = [member for member in members if get_origin(member) is not Literal and member is not bool]
    words = {int: "INTEGER", float: "NUMBER", tuple: "LIST", Path: "PATH"}
    names = [words.get(get_origin(member) or member, "TEXT") for member in plain]
    return "|".join(dict.fromkeys([*choices, *names]))


def _help(asked: Asked) -> str:
    from mettle.config import shape

    text = " ".join((asked.info.description or "").split())
    default = shape.default_of(asked.info)
    notes = []
    if isinstance(default, bool):
        notes = ["default: yes"] if default else []
    elif isinstance(default, int | float | Path) or (isinstance(default, str) and default):
        notes = [f"default: {default}"]
    elif isinstance(default, list) and default:
        notes = [f"default: {','.join(map(str, default))}"]
    notes += shape.limits_of(asked.info)
    return f"{text}  [{'; '.join(notes)}]" if notes else text


def _split(words: Sequence[str], command: ConfigCommand, ctx: click.Context) -> tuple[list[str], list[str]]:
    """Words before the first override, and the overrides. Raises: NoSuchOption for a flag that is no field."""
    from mettle.config.options import fields_of

    first = next((at for at, word in enumerate(words) if word.startswith("--")), len(words))
    names = set(fields_of(command.model))
    flags = [flag for param in command.get_params(ctx) for flag in (*param.opts, *param.secondary_opts)]
    for word in words:
        name = word.partition("=")[0]
        own = name[2:].replace("-", "_")
        is_field = own in names or own.removeprefix("no_") in names or "." in name
        if word.startswith("-") and len(word) > 1 and not word[1:2].isdigit() and not (word[:2] == "--" and is_field):
            from difflib import get_close_matches

            close = get_close_matches(name, [flag for flag in flags if flag.startswith("--")], cutoff=0.6)
            raise click.NoSuchOption(name, possibilities=close, ctx=ctx)
    return list(words[:first]), list(words[first:])


def _given(ctx: click.Context, tokens: Sequence[str]) -> Given:
    """The options that were given, taken out of the context, and the overrides."""
    from mettle.config.layers import ConfigLayer
    from mettle.config.options import Given
    from mettle.config.overrides import parse_overrides

    layer = ConfigLayer()
    for param in ctx.command.params:
        own = (param.name or "").removeprefix(FIELD)
        if own == param.name:
            continue
        value = ctx.params.pop(param.name)
        if value is not None and value != ():
            layer.tree[own] = value
            layer.sources[(own,)] = max(param.opts, key=len)
    return Given(layer, tuple(parse_overrides(tokens)))


def file_text(value: str, flag: str) -> str:
    """A text, or with `@` before it what the file of that name holds. Raises: UserError."""
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{flag}: cannot read {value[1:]}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{flag}: {value[1:]} is not UTF-8 text (byte {error.start})") from error
