"""What an environment takes, read from its source: none of its code runs.

Parts: `check_arguments`. Where the source does not say it plainly (`load_environment` is imported, decorated or takes
any keyword) nothing is refused here, and loading it says what is wrong.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mettle.config.complaints import nearest
from mettle.envs.packages.annotations import fits
from mettle.envs.packages.registry import EnvironmentEntry
from mettle.errors import UserError

LOADER = "load_environment"


@dataclass(frozen=True, slots=True)
class _Declared:
    names: Sequence[str]
    wanted: Sequence[str]
    """Those without a default."""
    annotations: Mapping[str, ast.expr]
    """Of those that have one which their own default does not belie."""


def check_arguments(env_id: str, entry: EnvironmentEntry, given: Mapping[str, Any]) -> None:
    """Raises: UserError for an argument that the environment does not take, for one without which it is not made, and
    for a value that is plainly of another type than the argument."""
    declared = _declared(entry)
    if declared is None:
        return
    if unknown := sorted(set(given) - set(declared.names)):
        raise UserError(unknown_argument(env_id, unknown[0], declared.names))
    if missing := [name for name in declared.wanted if name not in given]:
        raise UserError(f"{env_id} wants the argument {missing[0]!r}, which has no default: give it in its args")
    for name, value in given.items():
        annotation = declared.annotations.get(name)
        if annotation is not None and not fits(annotation, value):
            raise UserError(f"{env_id}: the argument {name} is of type {ast.unparse(annotation)}, and not {value!r}")


def unknown_argument(env_id: str, name: str, known: Sequence[str]) -> str:
    """What is wrong with an argument that `load_environment` does not have."""
    guess = nearest(name, known)
    hint = f"did you mean {guess!r}? " if guess else ""
    return f"{env_id} takes no argument {name!r}; {hint}it takes {', '.join(known) or 'none'}"


def _declared(entry: EnvironmentEntry) -> _Declared | None:
    """What stands in the source; None where that is not the whole truth."""
    source = _source_of(entry)
    try:
        tree = None if source is None else ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError):  # importing it says where
        return None
    bound = [node for node in (tree.body if tree else ()) if _binds_loader(node)]
    if len(bound) != 1 or not isinstance(bound[0], ast.FunctionDef) or bound[0].decorator_list or bound[0].args.kwarg:
        return None
    arguments = bound[0].args
    taken = [*arguments.args, *arguments.kwonlyargs]
    defaults: dict[str, ast.expr | None] = dict.fromkeys((argument.arg for argument in taken), None)
    names = [argument.arg for argument in arguments.args]
    defaults.update(zip(reversed(names), reversed(arguments.defaults), strict=False))
    by_name = [argument.arg for argument in arguments.kwonlyargs]
    defaults.update(zip(by_name, arguments.kw_defaults, strict=True))
    annotations = {
        argument.arg: argument.annotation
        for argument in taken
        if argument.annotation is not None and _is_believed(argument.annotation, defaults[argument.arg])
    }
    return _Declared(list(defaults), [name for name, default in defaults.items() if default is None], annotations)


def _is_believed(annotation: ast.expr, default: ast.expr | None) -> bool:
    """Not where its own default is of another type, as in `seed: int = None`."""
    try:
        return default is None or fits(annotation, ast.literal_eval(default))
    except ValueError:
        return True


def _binds_loader(node: ast.stmt) -> bool:
    """Whether a statement of the module may be what `load_environment` stands for."""
    inside = [node] if isinstance(node, ast.FunctionDef | ast.ClassDef) else ast.walk(node)
    return any(_bound_name(inner) == LOADER for inner in inside)


def _bound_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.alias):
        return node.asname or node.name
    if isinstance(node, ast.Name):
        return node.id if isinstance(node.ctx, ast.Store) else None
    return getattr(node, "name", None)


def _source_of(entry: EnvironmentEntry) -> Path | None:
    if entry.folder is not None:
        root = entry.folder / "src" if (entry.folder / "src").is_dir() else entry.folder
        place = root.joinpath(*entry.module.split("."))
        return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)
    if "." in entry.module:  # looking for it would import what it lies in
        return None
    try:
        spec = importlib.util.find_spec(entry.module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None
