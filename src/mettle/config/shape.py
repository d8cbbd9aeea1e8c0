"""What a config model says about a key path: its annotation, the keys beside it, its default.

A table whose field is a union of models becomes the variant whose `type` it names, or the first where `type` has a
default.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typing_extensions import get_type_hints, is_typeddict

from mettle.config.positions import KeyPath

MISSING: Any = object()
"""Stands for "the model knows no such key"; None is an annotation of its own."""


def variants(annotation: Any) -> list[Any]:
    """The members of a union, with Annotated and type aliases unwrapped; a plain annotation is its only member."""
    if hasattr(annotation, "__value__"):  # a `type` alias
        return variants(annotation.__value__)
    origin = get_origin(annotation)
    if origin is Annotated:
        return variants(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [member for arg in get_args(annotation) for member in variants(arg)]
    return [annotation]


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The models among the variants."""
    return [v for v in variants(annotation) if isinstance(v, type) and issubclass(v, BaseModel)]


def type_names(model: type[BaseModel]) -> tuple[str, ...]:
    """What the `type` of a variant may say; empty for a model that is no variant."""
    field = model.model_fields.get("type")
    return () if field is None else tuple(str(arg) for arg in get_args(field.annotation))


def model_for(annotation: Any, value: Any) -> type[BaseModel] | None:
    """The model that the table `value` becomes; None when there is none or it cannot be told."""
    models = models_of(annotation)
    if len(models) == 1:
        return models[0]
    named = value.get("type") if isinstance(value, dict) else None
    if named is None and models:
        kind = models[0].model_fields.get("type")
        return models[0] if kind is not None and not kind.is_required() else None
    return next((model for model in models if named in type_names(model)), None)


def annotation_at(model: type[BaseModel], path: Iterable[str | int], tree: Any) -> Any:
    """The annotation of the value at `path`, or MISSING. `tree` tells which variant a union is."""
    annotation: Any = model
    for key in path:
        chosen = model_for(annotation, tree)
        if chosen is not None:
            field = chosen.model_fields.get(str(key))
            annotation = MISSING if field is None else field.annotation
        else:
            annotation = item_annotation(annotation, key)
        if annotation is MISSING:
            return MISSING
        tree = entry(tree, key)
    return annotation


def keys_at(model: type[BaseModel], path: KeyPath, tree: Any) -> list[str]:
    """The keys that the table at `path` may have."""
    annotation = annotation_at(model, path, tree)
    chosen = None if annotation is MISSING else model_for(annotation, value_at(tree, path))
    return [] if chosen is None else list(chosen.model_fields)


def value_at(tree: Any, path: KeyPath) -> Any:
    """The value at `path`, or MISSING."""
    for key in path:
        tree = entry(tree, key)
    return tree


def typed_keys(annotation: Any) -> dict[str, Any]:
    """The keys of a `TypedDict` and their annotations; nothing for anything else."""
    table = next((member for member in variants(annotation) if is_typeddict(member)), None)
    return {} if table is None else get_type_hints(table, include_extras=True)


def item_annotation(annotation: Any, key: str | int) -> Any:
    """The annotation of one entry of a dict, list or tuple, or MISSING."""
    for member in variants(annotation):
        origin, args = get_origin(member), get_args(member)
        if is_typeddict(member):
            return typed_keys(member).get(str(key), Any)
        if member is Any or (member is dict and not args):
            return Any
        if origin is dict and isinstance(key, str):
            return args[1]
        if origin is list and isinstance(key, int):
            return args[0]
        if origin is tuple and isinstance(key, int):
            return args[0] if args[-1] is Ellipsis else args[key] if key < len(args) else MISSING
    return MISSING


def takes_none(annotation: Any) -> bool:
    """True when None is a value there."""
    return any(v is None or v is type(None) or v is Any for v in variants(annotation))


def takes_bool(annotation: Any) -> bool:
    """True when a bare `--flag` can mean yes there."""
    return any(v is bool for v in variants(annotation))


def takes_text_only(annotation: Any) -> bool:
    """True when the value is text whatever it looks like, so that `--name 42` stays "42"; or a boolean."""
    members = [v for v in variants(annotation) if v not in (None, type(None), bool)]
    return bool(members) and all(_is_text(v) for v in members)


def takes_list(annotation: Any) -> bool:
    """True when the value is a list or a tuple."""
    return any(get_origin(v) in (list, tuple) or v in (list, tuple) for v in variants(annotation))


def default_of(field: FieldInfo) -> Any:
    """The default of a field, or MISSING when a value is required or the default depends on other fields."""
    if field.is_required() or field.default_factory_takes_validated_data:
        return MISSING
    return field.get_default(call_default_factory=True)


def _is_text(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return all(isinstance(arg, str) for arg in get_args(annotation))
    return isinstance(annotation, type) and (
        issubclass(annotation, (str, Path)) or (issubclass(annotation, Enum) and issubclass(annotation, str))
    )


def entry(tree: Any, key: str | int) -> Any:
    """What a tree has under `key`, or MISSING."""
    if isinstance(tree, dict) and key in tree:
        return tree[key]
    if isinstance(tree, list) and isinstance(key, int) and 0 <= key < len(tree):
        return tree[key]
    return MISSING


def is_table(annotation: Any) -> bool:
    """True for what a table of TOML becomes."""
    return (
        annotation is dict or get_origin(annotation) is dict or is_typeddict(annotation) or bool(models_of(annotation))
    )


def has_inside(annotation: Any) -> bool:
    """True when the value may be a table or a list."""
    return takes_list(annotation) or any(member is Any or is_table(member) for member in variants(annotation))


def limits_of(field: FieldInfo) -> list[str]:
    """The bounds of a field as people read them: `>= 1`."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return [
        f"{sign} {getattr(bound, name)}"
        for bound in field.metadata
        for name, sign in signs.items()
        if getattr(bound, name, None) is not None
    ]
