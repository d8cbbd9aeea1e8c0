"""Does a value fit an annotation that stands in source? Nothing is imported and nothing is run for that.

Parts: `fits`. Only what is plain is compared: built-in types, None, `Literal`, `Optional` and unions, lists and tables,
and what is in them. Whatever else an annotation says, every value fits it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

_SEQUENCES = frozenset({"list", "List", "tuple", "Tuple", "Sequence", "Iterable", "Collection"})
_TABLES = frozenset({"dict", "Dict", "Mapping", "MutableMapping"})
_PLAIN: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    **dict.fromkeys(_SEQUENCES, lambda value: isinstance(value, list | tuple)),
    **dict.fromkeys(_TABLES, lambda value: isinstance(value, dict)),
}


def fits(annotation: ast.expr, value: Any) -> bool:
    """False when the annotation says plainly that it is for other values."""
    match annotation:
        case ast.Constant(value=None):
            return value is None
        case ast.Constant(value=str(quoted)):
            return fits(_parsed(quoted), value)
        case ast.Name() | ast.Attribute():
            is_of = _PLAIN.get(_name(annotation))
            return is_of is None or is_of(value)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return fits(left, value) or fits(right, value)
        case ast.Subscript(value=outer, slice=inner):
            return _fits_inside(_name(outer), inner.elts if isinstance(inner, ast.Tuple) else [inner], value)
    return True


def _fits_inside(outer: str, inner: list[ast.expr], value: Any) -> bool:
    if outer == "Optional":
        return value is None or fits(inner[0], value)
    if outer == "Union":
        return any(fits(each, value) for each in inner)
    if outer == "Literal":
        return any(not isinstance(each, ast.Constant) or _is_same(each.value, value) for each in inner)
    if outer in _SEQUENCES:
        is_plain = outer not in ("tuple", "Tuple") and len(inner) == 1
        return _PLAIN[outer](value) and (not is_plain or all(fits(inner[0], each) for each in value))
    if outer in _TABLES:
        return _PLAIN[outer](value) and (len(inner) != 2 or all(fits(inner[1], each) for each in value.values()))
    return True


def _is_same(literal: Any, value: Any) -> bool:
    return type(literal) is type(value) and bool(literal == value)


def _name(node: ast.expr) -> str:
    """The last part of a dotted name; empty of anything else."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _parsed(quoted: str) -> ast.expr:
    try:
        return ast.parse(quoted, mode="eval").body
    except (SyntaxError, ValueError):
        return ast.Name(quoted)
