"""What pydantic says, as one line that names the place, the key, the value and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from mettle.config import shape
from mettle.config.layers import DEFAULT, ConfigLayer
from mettle.config.options import asked_fields, fields_of, spelled
from mettle.config.overrides import dotted
from mettle.config.positions import KeyPath
from mettle.errors import UserError

_TABLE_TYPES = (dict, list, BaseModel)


@dataclass(frozen=True, slots=True)
class Complaint:
    """One thing that is wrong."""

    path: KeyPath
    source: str
    text: str
    is_missing: bool = False


def explain(error: ValidationError, model: type[BaseModel], layer: ConfigLayer, files: Sequence[str]) -> UserError:
    """The first complaint in the order of the files, and the names of the other keys that are wrong too."""
    complaints: dict[KeyPath, Complaint] = {}
    for entry in error.errors(include_url=False):
        path = _tree_path(entry["loc"], model, layer.tree, is_unknown_key=entry["type"] == "extra_forbidden")
        complaint = _complaint(path, dict(entry), model, layer, files)
        known = complaints.get(path)
        if known is None:
            complaints[path] = complaint
        elif complaint.text not in known.text:  # the members of a union complain one by one
            complaints[path] = Complaint(path, known.source, f"{known.text}, or {_message(dict(entry))}")
    # A value that a rule put into other places is wrong there too; it was set in one.
    given = [found for found in complaints.values() if shape.value_at(layer.tree, found.path) is not shape.MISSING]
    missing = [found for found in complaints.values() if found.is_missing]
    ordered = sorted(given + missing or complaints.values(), key=lambda found: _order(found.source, files))
    line = f"{ordered[0].source}: {ordered[0].text}"
    others = [dotted(complaint.path) or "the whole" for complaint in ordered[1:]]
    return UserError(line + (f" (also wrong: {', '.join(others[:5])})" if others else ""))


def nearest(key: str, known: Sequence[str]) -> str | None:
    """The known key that was probably meant."""
    plain = key.replace("-", "_").lower()
    if plain in known:
        return plain
    close = difflib.get_close_matches(plain, known, n=1, cutoff=0.55)
    return close[0] if close else None


def _complaint(
    path: KeyPath, entry: dict[str, Any], model: type[BaseModel], layer: ConfigLayer, files: Sequence[str]
) -> Complaint:
    source = _mentioned(path, str(entry["msg"]), layer) or _place(path, layer, files)
    name = dotted(path)
    if entry["type"] == "extra_forbidden":
        return Complaint(path, source, _unknown_key(path, model, layer))
    if entry["type"] == "missing":
        return Complaint(path, source, f"{name} is missing{_how_to_set(path, model)}", True)
    if entry["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return Complaint(path, _place((*path, "type"), layer, files), _bad_type(path, entry, model, layer))
    value = entry.get("input")
    if entry["type"] == "list_type" and isinstance(value, dict):
        return Complaint(path, source, f"{name} is a list of tables; write [[{name}]]")
    shown = "" if isinstance(value, _TABLE_TYPES) and entry["type"] != "model_type" else f" = {_shown(value)}"
    return Complaint(path, source, f"{name}{shown}: {_message(entry)}" if name else _message(entry))


def _unknown_key(path: KeyPath, model: type[BaseModel], layer: ConfigLayer) -> str:
    known = shape.keys_at(model, path[:-1], layer.tree)
    if len(path) == 1:
        known = list(fields_of(model))
    guess = nearest(str(path[-1]), known)
    parent = shape.value_at(layer.tree, path[:-1])
    is_variant = isinstance(parent, dict) and isinstance(parent.get("type"), str) and "type" in known
    variant = f" (type {parent['type']!r})" if is_variant and isinstance(parent, dict) else ""
    hint = f"did you mean {guess!r}?" if guess else f"{dotted(path[:-1]) or 'the top level'} has {', '.join(known)}"
    return f"unknown key {dotted(path)!r}{variant}; {hint}"


def _bad_type(path: KeyPath, entry: dict[str, Any], model: type[BaseModel], layer: ConfigLayer) -> str:
    annotation = shape.annotation_at(model, path, layer.tree)
    names = [name for option in shape.models_of(annotation) for name in shape.type_names(option)]
    value = entry.get("input")
    given = value.get("type") if isinstance(value, dict) else value
    if given is None:
        return f"{dotted(path)}.type is missing; it is one of {', '.join(names)}"
    guess = nearest(str(given), names)
    hint = f"did you mean {guess!r}?" if guess else f"it is one of {', '.join(names)}"
    return f"{dotted(path)}.type = {_shown(given)}: no such type; {hint}"


def _how_to_set(path: KeyPath, model: type[BaseModel]) -> str:
    if getattr(model, "IS_FILE_ONLY", False):
        return ""
    flags = next((asked.option.flags for asked in asked_fields(model) if asked.path == path), "")
    return f" and has no default; set it in a file or with {flags.partition(' ')[0] or spelled(path)}"


def _message(entry: dict[str, Any]) -> str:
    text = str(entry["msg"])
    text = re.sub(r"^(Value error|Assertion failed), ", "", text)
    text = " ".join(text.split()).replace("a valid dictionary", "a table").replace("a valid list", "a list")
    return text[0].lower() + text[1:] if text.startswith("Input should") else text


def _shown(value: Any) -> str:
    text = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _tree_path(loc: tuple[int | str, ...], model: type[BaseModel], tree: Any, *, is_unknown_key: bool) -> KeyPath:
    """pydantic's location without the names of union members that it mixes in.

    It may lead out of the tree: a rule of the model can have put a value where the files have none.
    """
    path: list[str | int] = []
    annotation: Any = model
    for depth, key in enumerate(loc):
        inner = shape.entry(tree, key)
        options = shape.models_of(annotation)
        tagged = next((option for option in options if key in shape.type_names(option)), None)
        known = next((option for option in options if key in option.model_fields), None)
        if inner is shape.MISSING and tagged is not None and len(options) > 1:
            annotation = tagged
            continue
        if known is not None:
            chosen = shape.model_for(annotation, tree) or known
            annotation = chosen.model_fields[key].annotation if key in chosen.model_fields else shape.MISSING
        elif inner is not shape.MISSING or isinstance(key, int):
            annotation = shape.item_annotation(annotation, key)
        elif not (is_unknown_key and depth == len(loc) - 1):
            continue
        tree = inner
        path.append(key)
    return tuple(path)


def _mentioned(path: KeyPath, message: str, layer: ConfigLayer) -> str | None:
    """The source of the key that a rule about a whole table complains of, when its message names one."""
    if not isinstance(shape.value_at(layer.tree, path), dict):
        return None
    found: list[tuple[int, int, str]] = []
    for key, source in layer.sources.items():
        if key[: len(path)] != path or key == path:
            continue
        for name in (dotted(key[len(path) :]), str(key[-1])):
            place = re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.]*\w)", message)
            if place is not None:
                found.append((place.start(), -len(name), _said(layer, key, source)))
    return min(found)[2] if found else None


def _said(layer: ConfigLayer, path: KeyPath, source: str) -> str:
    """Of a table that is there only because something in it was set, the source of that."""
    if source != DEFAULT:
        return source
    inside = (words for key, words in layer.sources.items() if key[: len(path)] == path and words != DEFAULT)
    return next(inside, source)


def _place(path: KeyPath, layer: ConfigLayer, files: Sequence[str]) -> str:
    """Where to look: the source of the value, of something inside it, or the files."""
    known = layer.source_of(path)
    if known is not None:
        return _said(layer, path, known)
    inside = [words for key, words in layer.sources.items() if key[: len(path)] == path and path]
    return inside[0] if inside else ", ".join(files) or "config"


def _order(source: str, files: Sequence[str]) -> tuple[int, int]:
    name, _, line = source.rpartition(":")
    if name in files and line.isdecimal():
        return files.index(name), int(line)
    return len(files), 0
