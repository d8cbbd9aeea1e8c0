"""What a Dockerfile does to a world, for a sandbox that builds no images.

Parts: `Step`, `TaskWorld`, `read_dockerfile`. `COPY` and `ADD` of local files, `RUN`, `ENV` and `WORKDIR` become steps
that a machine can carry out; the base image is this host's own programs. Invariant: an instruction that would be
silently wrong (a copy from another stage, a download) is an error that names its line.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from mettle.errors import UserError

WITHOUT_EFFECT = frozenset(
    {"ARG", "CMD", "ENTRYPOINT", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "MAINTAINER", "SHELL", "STOPSIGNAL", "USER"}
    | {"VOLUME"}
)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True)
class Step:
    """Files to put in place, or a command to run, with the variables and the directory of that moment."""

    line: int
    workdir: str
    env: dict[str, str]
    command: str = ""
    files: dict[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskWorld:
    """What a Dockerfile makes."""

    steps: tuple[Step, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = ""


def read_dockerfile(path: Path) -> TaskWorld:
    """The steps of a Dockerfile whose build context is its folder."""
    steps: list[Step] = []
    env: dict[str, str] = {}
    workdir = ""
    for number, instruction, rest in _instructions(path.read_text(encoding="utf-8")):
        if instruction == "WORKDIR":
            workdir = str(PurePosixPath(workdir or "/") / _expanded(rest.strip(), env))
        elif instruction == "ENV":
            env = {**env, **_variables(rest, env)}
        elif instruction == "RUN":
            steps.append(Step(number, workdir or "/", env, command=_command(rest)))
        elif instruction in ("COPY", "ADD"):
            steps.append(Step(number, workdir or "/", env, files=_copied(path, number, rest, workdir or "/", env)))
        elif instruction not in WITHOUT_EFFECT:
            raise UserError(f"{path}:{number}: {instruction} is not understood")
    return TaskWorld(tuple(steps), env, workdir)


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, instruction, rest), with continued lines joined and comments left out."""
    pending, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and not pending):
            continue
        start = start or number
        if line.rstrip().endswith("\\"):
            pending += line.rstrip()[:-1] + " "
            continue
        instruction, _, rest = (pending + line).strip().partition(" ")
        yield start, instruction.upper(), rest.strip()
        pending, start = "", 0


def _expanded(text: str, env: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda found: env.get(found.group(1) or found.group(2), ""), text)


def _variables(rest: str, env: dict[str, str]) -> dict[str, str]:
    words = shlex.split(rest)
    if words and "=" not in words[0]:
        name, _, value = rest.partition(" ")
        return {name: _expanded(value.strip(), env)}
    return {name: _expanded(value, env) for name, _, value in (word.partition("=") for word in words)}


def _command(rest: str) -> str:
    words = [word for word in rest.split(" ") if word]
    while words and words[0].startswith("--"):
        words = words[1:]
    joined = " ".join(words) if rest.startswith("--") else rest
    if joined.startswith("["):
        return shlex.join(json.loads(joined))
    return joined


def _copied(path: Path, number: int, rest: str, workdir: str, env: dict[str, str]) -> dict[str, Path]:
    """Target paths and the files of the build context that go there."""
    words: list[str] = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    options = [word for word in words if word.startswith("--")]
    if any(option.startswith("--from") for option in options):
        raise UserError(f"{path}:{number}: a copy from another stage or image cannot be made here: {rest}")
    *sources, target = [_expanded(word, env) for word in words if not word.startswith("--")]
    whole = str(PurePosixPath(workdir) / target)
    is_folder = target.endswith("/") or target in (".", "./") or len(sources) > 1
    files: dict[str, Path] = {}
    for source in sources:
        if "://" in source:
            raise UserError(f"{path}:{number}: {source} would be downloaded, and the sandbox has no network")
        found = _matching(path, number, source)
        for place in found:
            if place.is_dir():
                files.update({f"{whole}/{inner.relative_to(place).as_posix()}": inner for inner in _files(place)})
            else:
                files[f"{whole}/{place.name}" if is_folder or len(found) > 1 else whole] = place
    return {target: place for target, place in files.items() if place != path}


def _matching(path: Path, number: int, source: str) -> list[Path]:
    context = path.parent.resolve()
    pattern = source.lstrip("/") or "."
    found = [context] if pattern in (".", "./") else sorted(context.glob(pattern.removesuffix("/")))
    inside = [place for place in found if place.resolve().is_relative_to(context)]
    if not inside:
        raise UserError(f"{path}:{number}: {source} is not in {context}")
    return inside


def _files(folder: Path) -> list[Path]:
    return sorted(inner for inner in folder.rglob("*") if inner.is_file() and not inner.is_symlink())
