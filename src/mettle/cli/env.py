"""`mettle env`: make, list, describe and install environments; `env_quality` holds its tests and checks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mettle.cli.env_card import card
from mettle.cli.env_hub import (
    delete,
    difference,
    fork,
    info_hub,
    install_hub,
    is_hub_name,
    list_hub,
    pull,
    push,
    star,
    versions,
    yank,
)
from mettle.cli.env_hub import inspect as inspect_package
from mettle.cli.env_quality import check, test
from mettle.cli.groups import NounGroup
from mettle.cli.terminal import json_option, print_json, print_next, print_table
from mettle.errors import MettleError, ServiceError, UserError

if TYPE_CHECKING:
    from mettle.envs.packages.registry import EnvironmentEntry

ENVIRONMENTS = Path("environments")


@click.group(cls=NounGroup)
def env() -> None:
    """Make, list, install and check environments."""


@env.command()
@click.argument("name")
@click.option(
    "--template",
    type=click.Choice(["single-turn", "multi-turn", "tool", "sandbox", "judge", "game"]),
    help="What to begin with.  [default: single-turn]",
)
@click.option(
    "--from",
    "source",
    nargs=2,
    metavar="data FILE",
    help="Make it of a dataset: a file, or what `mettle data inspect` knows.",
)
@click.option("--question", metavar="COLUMN", help="Column that asks, with --from data.")
@click.option("--answer", metavar="COLUMN", help="Column that answers, with --from data.")
@click.option(
    "--path",
    "directory",
    type=click.Path(path_type=Path),
    default=ENVIRONMENTS,
    help="Folder to make it in.  [default: environments]",
)
def init(
    name: str,
    template: str | None,
    source: tuple[str, str] | None,
    question: str | None,
    answer: str | None,
    directory: Path,
) -> None:
    """Make a new environment package that works. Change it into yours.

    \b
    mettle env init my-task --template tool
    mettle env init my-task --from data train.jsonl
    """
    from mettle.envs.packages.scaffold import create_environment

    if source is None:
        folder = create_environment(name, directory, template or "single-turn")
        click.echo(f"made {folder}")
    elif source[0] != "data":
        raise UserError(f"--from takes the word data and a file, as in `--from data train.jsonl`, not {source[0]!r}")
    elif template is not None:
        raise UserError("the data decides the template; leave out --template or --from")
    else:
        folder = _make_from_data(name, directory, source[1], question, answer)
    is_found = directory.resolve() == ENVIRONMENTS.resolve()
    print_next(f"mettle env test {folder.name.replace('_', '-')}" if is_found else f"mettle env install {folder}")


def _make_from_data(name: str, directory: Path, file: str, question: str | None, answer: str | None) -> Path:
    from mettle.quality.data.package import create_from_data
    from mettle.quality.data.report import held_out_check, inspect_data
    from mettle.quality.data.sources import open_dataset

    made = create_from_data(name, directory, inspect_data(open_dataset(file), question=question, answer=answer))
    rows = made.prepared.rows
    num_eval = sum(row["split"] == "eval" for row in rows)
    click.echo(
        f"made {made.folder}: {len(rows) - num_eval} rows to train on, {num_eval} to evaluate, {made.recipe.format}"
    )
    held_out = held_out_check({"train": len(rows) - num_eval, "eval": num_eval})
    if held_out.status != "pass":
        click.secho(f"few evaluation rows: {held_out.detail}; {held_out.fix}", fg="yellow")
    for reason, num in made.prepared.left_out.most_common():
        click.echo(f"left out {num} rows: {reason}")
    return made.folder


@env.command("list")
@click.argument("words", default="")
@click.option(
    "--hub", "is_hub", is_flag=True, help="Those of the Hub in use, with WORDS in name, description or README."
)
@click.option("--mine", is_flag=True, help="Those on the Hub that are one's own or one's teams'.")
@json_option
def list_environments(words: str, is_hub: bool, mine: bool, is_json: bool) -> None:
    """List the environments that can be loaded here; with --hub, those of the Hub."""
    from mettle.envs.packages import registry

    if is_hub or mine:
        list_hub(words, is_mine=mine, is_json=is_json)
        return
    if words:
        raise UserError(f"words are looked for on a Hub: `mettle env list {words} --hub`")

    entries = registry.list_environments()
    if is_json:
        print_json([_entry(entry) for entry in entries])
        return
    if not entries:
        click.echo("no environments installed, and none in ./environments")
        print_next("mettle env init my-environment")
        return
    print_table(
        ("environment", "version", "where", "description"),
        [(e.name, e.version, _short(e.origin), e.description) for e in entries],
    )
    print_next(f"mettle env info {entries[0].name}")


@env.command()
@click.argument("name")
@json_option
def info(name: str, is_json: bool) -> None:
    """Describe an environment. What it takes, how many tasks it has, how it scores. Loads it, so its code runs.

    OWNER/NAME[@VERSION] is one of the Hub, of which nothing runs.
    """
    from mettle.envs.packages.loading import parse_environment_id
    from mettle.envs.packages.registry import find_environment

    if is_hub_name(name):
        info_hub(name, is_json=is_json)
        return
    entry = find_environment(parse_environment_id(name).name)
    facts = {**_entry(entry), **_described(entry)}
    problem = facts.get("problem")
    if is_json:
        print_json(facts)
    else:
        shown = {key: value for key, value in facts.items() if key != "problem" and value not in (None, "", [], {})}
        print_table(("", ""), [(key.replace("_", " "), _cell(value)) for key, value in shown.items()])
    if problem is not None:
        raise UserError(problem)
    if is_json:
        return
    print_next(f"mettle eval run {entry.name} -m MODEL")


@env.command()
@click.argument("source", metavar="PATH|NAME|OWNER/NAME[@VERSION]")
@click.option("--editable/--no-editable", default=True, help="Install a folder so that changes take effect at once.")
def install(source: str, editable: bool) -> None:
    """Install an environment. From a folder, one under ./environments, the Hub, or a package that pip can find."""
    import subprocess

    from mettle.envs.packages.install import builds_with_what_is_here, package_folder, pip_error

    if is_hub_name(source):
        _check_installed()
        install_hub(source)
        return
    folder = package_folder(source)
    _check_installed()
    target = [source] if folder is None else [*(["-e"] if editable else []), str(folder)]
    if folder is not None and builds_with_what_is_here(folder):
        target = ["--no-build-isolation", *target]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *target]
    click.echo(f"installing {folder or source}")
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise ServiceError(f"pip could not install {folder or source}: {pip_error(done.stderr)}")
    name = _project_name(folder) if folder is not None else source.partition("=")[0].partition("@")[0]
    click.echo(f"installed {name}")
    print_next(f"mettle env info {name}")


for _command in (push, pull, versions, difference, inspect_package, fork, star, yank, delete, card, test, check):
    env.add_command(_command)


def _entry(entry: EnvironmentEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "version": entry.version,
        "description": entry.description,
        "module": entry.module,
        "origin": entry.origin,
    }


def _described(entry: EnvironmentEntry) -> dict[str, Any]:
    """What the environment says about itself once it is loaded; why not, when it does not load."""
    import inspect

    from mettle.envs import load_environment

    try:
        loaded = load_environment(entry.name)
    except MettleError as error:
        return {"problem": str(error)}
    loader = getattr(sys.modules[entry.module], "load_environment")  # noqa: B009
    parameters = inspect.signature(loader).parameters.values()
    arguments = {
        p.name: None if p.default is p.empty else p.default
        for p in parameters
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    return {
        "kind": type(loaded).__name__,
        "arguments": arguments,
        "train_tasks": _length(loaded.dataset),
        "eval_tasks": _length(loaded.eval_dataset),
        "rewards": _rewards(loaded.rubric),
        "tools": [tool["name"] for tool in loaded.tool_defs],
        "system_prompt": loaded.system_prompt,
    }


def _rewards(rubric: Any) -> dict[str, float]:
    rubrics = getattr(rubric, "rubrics", None) or [rubric]
    found: dict[str, float] = {}
    for part in rubrics:
        names = [getattr(func, "__name__", str(func)) for func in getattr(part, "funcs", [])]
        found.update(zip(names, getattr(part, "weights", []), strict=False))
    return found


def _length(rows: Any) -> int | None:
    return None if rows is None else len(rows)


def _project_name(folder: Path) -> str:
    import tomllib

    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")).get("project") or {}
    return str(project.get("name") or folder.name)


def _check_installed() -> None:
    """Environments depend on mettle-lab; where it is missing, pip would look for it on an index, in vain or worse."""
    from importlib import metadata

    try:
        metadata.distribution("mettle-lab")
    except metadata.PackageNotFoundError:
        raise UserError(
            "Mettle runs from its source and is not installed here, so pip would look for it elsewhere: `make install`"
            " first; an environment under ./environments needs no installing"
        ) from None


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={item!r}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return str(value)


def _short(origin: str) -> str:
    path = Path(origin)
    try:
        return str(path.relative_to(Path.cwd())) if path.is_absolute() else origin
    except ValueError:
        return origin
