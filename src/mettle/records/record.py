"""A dict whose keys are attributes: the base of messages and of every record that authors read.

Parts: `Record`; `view_of`, which reads any JSON so. Invariant: a record is a plain dict to anybody who wants one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from mettle.records.fields import Fields, selected


class Record(dict[str, Any]):
    """A dict with attribute access. `FIELDS` are the keys that read as None when they are absent."""

    __slots__ = ()
    FIELDS: ClassVar[frozenset[str]] = frozenset()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}; it has {sorted(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __missing__(self, name: str) -> Any:
        if name in self.FIELDS:
            return None
        raise KeyError(name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.items())})"

    @classmethod
    def model_validate(cls, raw: Any) -> Self:
        """Make one from a mapping or from any object with `model_dump` (a pydantic model)."""
        return cls(**(raw if isinstance(raw, Mapping) else raw.model_dump()))

    def model_dump(
        self, *, include: Fields = None, exclude: Fields = None, exclude_none: bool = False, **_: Any
    ) -> dict[str, Any]:
        """A plain dict of plain values, with the fields that are asked for."""
        dumped: dict[str, Any] = _plain(self)
        if include is not None or exclude is not None:
            dumped = selected(dumped, include, exclude)
        return {key: value for key, value in dumped.items() if value is not None} if exclude_none else dumped

    def model_dump_json(self, **options: Any) -> str:
        """`model_dump` as JSON text."""
        return json.dumps(self.model_dump(**options), ensure_ascii=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy, with some fields replaced."""
        source = _copied(self) if deep else dict(self)
        return type(self)(**{**source, **(update or {})})

    def copy(self) -> Self:
        """A shallow copy of the same class."""
        return type(self)(**self)


def view_of(value: Any) -> Any:
    """JSON as records, as deep as it goes."""
    if isinstance(value, Mapping):
        return Record({key: view_of(item) for key, item in value.items()})
    return [view_of(item) for item in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _copied(value: Any) -> Any:
    if isinstance(value, Record):
        copied = type(value).__new__(type(value))
        dict.update(copied, {key: _copied(item) for key, item in value.items()})
        return copied
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value
