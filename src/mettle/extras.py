"""What the distribution declares that it needs, what of it is missing here, and the line that installs it.

Parts: `missing_requirements`, `missing_by_extra`, `extra_of`, `install_line`, `CHECKOUT`. Invariant: nothing is
imported to find out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

DISTRIBUTION: Final = "mettle-lab"
CHECKOUT: Final[Path | None] = next(
    (root for root in [Path(__file__).resolve().parents[2]] if (root / "src" / "mettle" / "extras.py").is_file()), None
)
"""The source checkout that this package runs from; None for one that was installed from a wheel."""


class _Requirement(NamedTuple):
    extra: str
    name: str
    text: str


def missing_requirements() -> dict[str, list[str]]:
    """For each extra of Mettle ("" is the core), what of it is not installed, as pip takes it.

    Raises: PackageNotFoundError when Mettle itself is not installed.
    """
    missing: dict[str, list[str]] = {}
    for extra, name, text in _declared():
        lacking = missing.setdefault(extra, [])
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            lacking.append(text)
    return missing


def missing_by_extra() -> dict[str, list[str]]:
    """The same by the names of the packages."""
    return {extra: [_name_of(text) for text in texts] for extra, texts in missing_requirements().items()}


def extra_of(module: str) -> str | None:
    """The extra that brings a module, `dev` being nobody's advice; None for what Mettle does not ask for."""
    wanted = module.partition(".")[0].replace("_", "-").lower()
    try:
        found = [extra for extra, name, _ in _declared() if name.replace("_", "-").lower() == wanted and extra != "dev"]
    except metadata.PackageNotFoundError:
        return None
    return found[0] if found else None


def install_line(*extras: str) -> str:
    """The command that brings extras, for a person to type where Mettle runs from."""
    named = f"[{','.join(extra for extra in extras if extra)}]" if any(extras) else ""
    return f"pip install -e '{CHECKOUT}{named}'" if CHECKOUT is not None else f"pip install '{DISTRIBUTION}{named}'"


def _declared() -> Iterator[_Requirement]:
    for line in metadata.requires(DISTRIBUTION) or []:
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        if name := _name_of(requirement):
            yield _Requirement(extra[1] if extra else "", name, requirement.strip())


def _name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    return found[0] if found else ""
