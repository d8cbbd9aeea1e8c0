"""Which environments there are, found without importing any of them.

Parts: `EnvironmentEntry`, `list_environments`, `find_environment`, `search_path`. Searched in this order: installed
packages (the entry point group `mettle.envs`, then a distribution of that name), the folder that one is in,
`./environments`, the folders in METTLE_ENVIRONMENTS, those that ship with Mettle (in its wheel, or in the folder
`environments` of a source checkout, whether they are installed from there or not), any module that can be imported.
Invariant: reading an entry runs no code of it.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from mettle.errors import UserError
from mettle.extras import CHECKOUT

ENTRY_POINT_GROUP = "mettle.envs"
SHIPPED = (CHECKOUT or Path(__file__).resolve().parents[2]) / "environments"
"""The environments that ship with Mettle: the folder of a source checkout, which a wheel has inside the package."""


@dataclass(frozen=True, slots=True)
class EnvironmentEntry:
    """An environment that can be loaded; `module` holds `load_environment`.

    `folder` is where its source lies; None for one that is installed, but not from a folder that can be edited.
    """

    name: str
    version: str
    module: str
    description: str = ""
    folder: Path | None = None

    @property
    def origin(self) -> str:
        """Where it was found, for people."""
        return "installed" if self.folder is None else str(self.folder)

    @property
    def is_shipped(self) -> bool:
        """True when it came with Mettle, so that its code is Mettle's own."""
        return self.folder is not None and self.folder.resolve().parent == SHIPPED.resolve()


def search_path() -> list[Path]:
    """The folders that hold environment packages, each once."""
    given = [Path(part) for part in os.environ.get("METTLE_ENVIRONMENTS", "").split(os.pathsep) if part]
    found: list[Path] = []
    for folder in (Path.cwd() / "environments", *given, SHIPPED):
        resolved = folder.expanduser().resolve()
        if resolved not in found:
            found.append(resolved)
    return found


def list_environments() -> list[EnvironmentEntry]:
    """Every environment, by name; one found earlier on the way hides its namesakes."""
    entries: dict[str, EnvironmentEntry] = {}
    for entry in (*_installed(), *(entry for folder in search_path() for entry in _in_folder(folder))):
        entries.setdefault(entry.name, entry)
    return sorted(entries.values(), key=lambda entry: entry.name)


def find_environment(name: str) -> EnvironmentEntry:
    """The environment called `name`; `-` and `_` are the same.

    Raises: UserError naming what was searched and the nearest name.
    """
    wanted = normalized(name)
    for entry in _installed():
        if entry.name == wanted:
            return entry
    distribution = _distribution(wanted)
    if distribution is not None:
        return distribution
    here = _read_package(Path.cwd())
    if here is not None and here.name == wanted:
        return here
    for folder in search_path():
        package = folder / wanted.replace("-", "_")
        entry_here = _read_package(package) or _read_package(folder / wanted) or _named(folder, wanted)
        if entry_here is not None:
            return entry_here
    module = wanted.replace("-", "_")
    if _is_importable(module):
        return EnvironmentEntry(name=wanted, version="", module=module)
    raise UserError(_not_found(wanted))


def _is_importable(module: str) -> bool:
    """Whether `import module` would find something; nothing of it runs."""
    try:
        return module.isidentifier() and importlib.util.find_spec(module) is not None
    except ValueError:
        return module in sys.modules


def normalized(name: str) -> str:
    """A package name as the index spells it."""
    return name.strip().lower().replace("_", "-")


def _not_found(wanted: str) -> str:
    known = [entry.name for entry in list_environments()]
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
    searched = ", ".join(["installed packages", *(str(folder) for folder in search_path())])
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known) or 'none'}"
    return f"no environment {wanted!r}; searched {searched}; {hint}"


def _installed() -> Iterator[EnvironmentEntry]:
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        entry = _entry_of(point.dist, normalized(point.name), point.value.partition(":")[0])
        if entry is not None:
            yield entry


def _distribution(name: str) -> EnvironmentEntry | None:
    """An installed package that declares no entry point, as packages made for verifiers do not."""
    try:
        distribution = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        return None
    tops = {Path(file).parts[0].removesuffix(".py") for file in distribution.files or () if file.suffix == ".py"}
    return _entry_of(distribution, name, _spelt(name, tops))


def _entry_of(distribution: metadata.Distribution | None, name: str, module: str) -> EnvironmentEntry | None:
    """An installed environment; None for one that ships, which is found in its folder, after those that were named."""
    if distribution is None:
        return EnvironmentEntry(name, "", module)
    folder = _editable_folder(distribution)
    if folder is not None and folder.parent == SHIPPED:
        return None
    return EnvironmentEntry(name, distribution.version, module, distribution.metadata["Summary"] or "", folder)


def _editable_folder(distribution: metadata.Distribution) -> Path | None:
    """Where the source of an editable installation lies (PEP 610)."""
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        parts = urlsplit(str(origin.get("url", "")))
        is_editable = bool((origin.get("dir_info") or {}).get("editable")) and parts.scheme == "file"
    except (ValueError, AttributeError):
        return None
    return Path(url2pathname(parts.path)).resolve() if is_editable else None


def _named(folder: Path, wanted: str) -> EnvironmentEntry | None:
    """The package of that name in a folder that is called otherwise, with capitals for example."""
    return next((entry for entry in _in_folder(folder) if entry.name == wanted), None)


def _spelt(name: str, modules: Iterable[str]) -> str:
    """The module of that name as it is spelt among `modules`; where there is none, as a package's usually is."""
    usual = name.replace("-", "_")
    found = sorted(module for module in modules if normalized(module) == name)
    return usual if usual in found or not found else found[0]


def _in_folder(folder: Path) -> Iterator[EnvironmentEntry]:
    if not folder.is_dir():
        return
    for package in sorted(folder.iterdir()):
        entry = _read_package(package)
        if entry is not None:
            yield entry


def _read_package(package: Path) -> EnvironmentEntry | None:
    manifest = package / "pyproject.toml"
    if not manifest.is_file():
        return None
    try:
        project = tomllib.loads(manifest.read_text(encoding="utf-8")).get("project") or {}
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {manifest}: {error}") from error
    name = normalized(str(project.get("name") or package.name))
    points = (project.get("entry-points") or {}).get(ENTRY_POINT_GROUP) or {}
    declared = {normalized(point): str(value) for point, value in points.items()}
    root = package / "src" if (package / "src").is_dir() else package
    target = declared.get(name) or _spelt(name, (path.name.removesuffix(".py") for path in root.iterdir()))
    return EnvironmentEntry(
        name=name,
        version=str(project.get("version") or "0"),
        module=target.partition(":")[0],
        description=str(project.get("description") or ""),
        folder=package.resolve(),
    )
