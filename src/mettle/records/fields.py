"""Which fields of a record go into a dump: `include` and `exclude`, as pydantic reads them.

Parts: `selected`. Each is a set of names, or a mapping of names to True or to what holds for the value below; `__all__`
means every entry of a list. Invariant: what is given is not changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

Fields = Collection[Any] | Mapping[Any, Any] | None
EVERY = "__all__"


def selected(value: Any, include: Fields = None, exclude: Fields = None) -> Any:
    """`value` with the fields that `include` names (all without it) and without those that `exclude` names."""
    wanted, refused = _as_mapping(include), _as_mapping(exclude)
    if isinstance(value, list):
        kept = [index for index in range(len(value)) if _is_kept(index, len(value), wanted, refused)]
        return [_below(value[index], index, len(value), wanted, refused) for index in kept]
    if not isinstance(value, Mapping):
        return value
    names = [name for name in value if _is_kept(name, 0, wanted, refused)]
    return {name: _below(value[name], name, 0, wanted, refused) for name in names}


def _as_mapping(fields: Fields) -> Mapping[Any, Any] | None:
    if fields is None or isinstance(fields, Mapping):
        return fields
    return dict.fromkeys({fields} if isinstance(fields, str) else fields, True)


def _rule(rules: Mapping[Any, Any] | None, key: Any, length: int) -> Any:
    """What is said of a field: True (or `...`) for the whole of it, fields below it, None for nothing."""
    if rules is None:
        return None
    said = rules.get(key, rules.get(key - length) if length else None)
    return rules.get(EVERY) if said is None and length else said


def _is_kept(key: Any, length: int, wanted: Mapping[Any, Any] | None, refused: Mapping[Any, Any] | None) -> bool:
    is_wanted = wanted is None or bool(_rule(wanted, key, length))
    return is_wanted and _rule(refused, key, length) not in (True, ...)


def _below(
    value: Any, key: Any, length: int, wanted: Mapping[Any, Any] | None, refused: Mapping[Any, Any] | None
) -> Any:
    rules = [_rule(each, key, length) for each in (wanted, refused)]
    include, exclude = (None if rule in (None, True, False, ...) else rule for rule in rules)
    return value if include is None and exclude is None else selected(value, include, exclude)
