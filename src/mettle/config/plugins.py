"""What a name in a config stands for: something of ours, a plug-in's entry point, or `module:attribute`.

Parts: `Plugins`. Our own stand in `pyproject.toml` as entry points like anybody's, and in `built_in` too, so that a
checkout that was never installed has them. Invariant: listing the names imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any


@dataclass(frozen=True, slots=True)
class Plugins:
    """The plug-ins of one kind. `group` is their entry point group, `noun` what one is called in messages."""

    group: str
    noun: str
    built_in: Mapping[str, str]
    """Name to `module:attribute`."""

    def names(self) -> list[str]:
        """The names that are registered."""
        return sorted({*self.built_in, *(point.name for point in entry_points(group=self.group))})

    def find(self, name: str) -> Any:
        """What `name` stands for, imported now. Raises: ValueError when there is no such thing."""
        place = self.built_in.get(name)
        if place is None:
            places = [point.value for point in entry_points(group=self.group) if point.name == name]
            place = places[0] if places else name
        module, colon, attribute = place.partition(":")
        if not colon:
            known = ", ".join(self.names())
            raise ValueError(f"there is no {self.noun} {name!r}; there are {known}, and any as 'module:attribute'")
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{self.noun} {name!r} cannot be imported: {error}") from error
