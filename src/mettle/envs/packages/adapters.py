"""Classes that adapter packages offer, found by name without importing any.

Parts: `adapter_class`, `find_adapters`, `put_shipped_on_path`. An adapter is a package that declares classes in the
entry point group `mettle.adapters` (`GymEnv = "mettle_gym.env:GymEnv"`); those of a source checkout are found in its
`adapters` folder, installed or not. Invariant: finding imports nothing.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from functools import cache
from importlib import metadata
from typing import Any

from mettle.envs.guests import SHIPPED

GROUP = "mettle.adapters"


def adapter_class(name: str) -> Any:
    """The class that an adapter offers under `name`; None where none does."""
    target = find_adapters().get(name)
    if target is None:
        return None
    put_shipped_on_path()
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


@cache
def find_adapters() -> dict[str, str]:
    """`module:class` of each name that an adapter offers; one that is installed hides one of the checkout."""
    found: dict[str, str] = {}
    for manifest in sorted(SHIPPED.glob("*/pyproject.toml")):
        project = tomllib.loads(manifest.read_text(encoding="utf-8"))["project"]
        found |= project.get("entry-points", {}).get(GROUP, {})
    return found | {point.name: point.value for point in metadata.entry_points(group=GROUP)}


def put_shipped_on_path() -> None:
    """Let the packages of a source checkout be imported, after whatever is installed."""
    for manifest in SHIPPED.glob("*/pyproject.toml"):
        if (folder := str(manifest.parent)) not in sys.path:
            sys.path.append(folder)
