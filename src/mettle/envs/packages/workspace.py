"""A workspace: a folder with configs that load, an environment that works, and notes for whoever works there.

Parts: `set_up`, `WrittenFile`. Everything comes from the package itself, so nothing is fetched. Invariants: nothing
that exists is overwritten, whatever it is; what was left as it was is said; setting up twice changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mettle.envs.packages.scaffold import create_environment
from mettle.errors import StorageError, UserError

Status = Literal["written", "same", "kept"]

LOCAL_URL = "http://127.0.0.1:8000/v1"
STARTER = "my-task"
SKILL_FOLDERS: Mapping[str, str] = {
    "claude": ".claude/skills", "codex": ".codex/skills", "cursor": ".cursor/skills", "opencode": ".opencode/skills",
    "amp": ".agents/skills",
}  # fmt: skip
"""Where coding agents look for skills, each a folder with a SKILL.md."""

_FOLDER = Path(__file__).with_name("workspace_files")
_NAMES = {"gitignore": ".gitignore"}


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One file of a workspace. `same` had this very text already, `kept` has another, which was left alone."""

    path: str
    status: Status
    note: str = ""


def set_up(
    folder: Path, *, environment: str | None = None, url: str = LOCAL_URL, agents: Sequence[str] = ()
) -> tuple[str, list[WrittenFile]]:
    """Make `folder` a workspace; the name of the environment that its configs are about, and what became of each file.

    That environment is `environment`, or the first that is there already, or a new one from a template.
    Raises: UserError for an agent nobody knows or a folder that is a file; StorageError when it cannot be written.
    """
    unknown = [agent for agent in agents if agent not in SKILL_FOLDERS]
    if unknown:
        raise UserError(f"no coding agent {unknown[0]!r} is known; there are {', '.join(SKILL_FOLDERS)}")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; a workspace is a folder")
    name, made = _environment(folder, environment)
    values = {"env": name, "url": url}
    files = [*made]
    for path, text in _texts(values, agents):
        files.append(_write(folder, path, text))
    return name, files


def _environment(folder: Path, wanted: str | None) -> tuple[str, list[WrittenFile]]:
    packages = sorted(path.parent.name for path in (folder / "environments").glob("*/pyproject.toml"))
    names = [package.replace("_", "-") for package in packages]
    name = wanted.replace("_", "-") if wanted else names[0] if names else STARTER
    if name in names:
        return name, [WrittenFile(f"environments/{name.replace('-', '_')}/", "kept", "the environment is there")]
    package = create_environment(name, folder / "environments")
    written = sorted(path for path in package.rglob("*") if path.is_file())
    return package.name.replace("_", "-"), [
        WrittenFile(path.relative_to(folder).as_posix(), "written") for path in written
    ]


def _texts(values: Mapping[str, str], agents: Sequence[str]) -> Iterator[tuple[str, str]]:
    for source in sorted(_FOLDER.rglob("*.txt")):
        inside = source.relative_to(_FOLDER).as_posix().removesuffix(".txt")
        text = source.read_text(encoding="utf-8")
        for name, value in values.items():
            text = text.replace("{{" + name + "}}", value)
        if inside == "CLAUDE.md" and "claude" not in agents:
            continue
        yield _NAMES.get(inside, inside), text
        if inside.startswith("skills/"):
            skill = Path(inside).stem
            for agent in agents:
                yield f"{SKILL_FOLDERS[agent]}/{skill}/SKILL.md", text


def _write(folder: Path, path: str, text: str) -> WrittenFile:
    target = folder / path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    except FileExistsError:
        return _left(target, path, text)
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror}; what is there is as it was") from error
    try:
        with os.fdopen(file, "w", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        target.unlink(missing_ok=True)  # A file that was cut short would be kept as if somebody had written it so.
        raise StorageError(f"cannot write {target}: {error.strerror}") from error
    return WrittenFile(path, "written")


def _left(target: Path, path: str, text: str) -> WrittenFile:
    try:
        found = target.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return WrittenFile(path, "kept", "it cannot be read as text")
    if found == text:
        return WrittenFile(path, "same")
    if target.name == ".gitignore":
        lacking = [line for line in text.splitlines() if line and line[0] != "#" and line not in found.splitlines()]
        return WrittenFile(path, "kept", f"it lacks {', '.join(lacking)}" if lacking else "")
    return WrittenFile(path, "kept")
