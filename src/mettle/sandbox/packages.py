"""Which files make up installed Python packages, so that machines can be shown those and nothing beside them.

A whole site-packages would also show installed environments, and with them the answers to their questions.
Invariant: only what a distribution lists as its own, or its requirements' own, is found.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mettle.errors import UserError

_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


class PackagePaths(NamedTuple):
    """Files and directories to show, and the names of packages that are not installed here."""

    found: tuple[Path, ...]
    missing: tuple[str, ...]


@functools.cache
def package_paths(names: Sequence[str]) -> PackagePaths:
    """The top-level files and directories of these packages and of all that they require."""
    found: dict[Path, None] = {}
    missing: list[str] = []
    seen: set[str] = set()
    waiting = [(name, True) for name in names]
    while waiting:
        name, is_wanted = waiting.pop()
        plain = re.sub(r"[-_.]+", "-", name).lower()
        if plain in seen:
            continue
        seen.add(plain)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if is_wanted:  # a requirement that is absent belongs to another platform or version
                missing.append(name)
            continue
        found.update(dict.fromkeys(_top_level(distribution)))
        waiting += [(required, False) for required in _requirements(distribution)]
    return PackagePaths(tuple(sorted(found)), tuple(sorted(missing)))


def distributions_of(modules: Sequence[str]) -> tuple[str, ...]:
    """The packages that these modules belong to; UserError naming those that are not installed."""
    if not modules:
        return ()
    known = importlib.metadata.packages_distributions()
    tops = [name.partition(".")[0] for name in modules]
    missing = [name for name in tops if name not in known and name not in sys.stdlib_module_names]
    if missing:
        raise UserError(f"sandbox.preload names {', '.join(missing)}, which is not installed here")
    return tuple(dict.fromkeys(known[name][0] for name in tops if name in known))


def _top_level(distribution: importlib.metadata.Distribution) -> list[Path]:
    names = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__", "/")}
    paths = [Path(str(distribution.locate_file(name))) for name in names]
    return [path for path in paths if path.exists()]


def _requirements(distribution: importlib.metadata.Distribution) -> list[str]:
    """What it requires without any of its extras."""
    found = []
    for text in distribution.requires or ():
        requirement, _, marker = text.partition(";")
        match = _NAME.match(requirement)
        if match and "extra" not in marker:
            found.append(match[1])
    return found
