"""From a name to an environment.

Parts: `load_environment`, `resolve_environment`, `parse_environment_id`. Invariants: `verifiers` resolves to this
library before the environment's module is imported; what is wrong with the name, the version, the arguments or the
environment's own code is a `UserError`, which says where.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mettle.envs.environment import Environment
from mettle.envs.errors import EnvironmentLoadError, described_fault
from mettle.envs.legacy.adaptation import adapt_functions
from mettle.envs.legacy.aliases import install_verifiers_alias
from mettle.envs.legacy.prime_sandboxes import install_prime_sandboxes_alias
from mettle.envs.packages.arguments import unknown_argument
from mettle.envs.packages.registry import EnvironmentEntry, find_environment
from mettle.errors import MettleError, UserError
from mettle.extras import extra_of, install_line


@dataclass(frozen=True, slots=True)
class EnvironmentId:
    """`owner/name@version`; owner and version may be missing."""

    name: str
    owner: str | None = None
    version: str | None = None


def parse_environment_id(env_id: str) -> EnvironmentId:
    """Take an id apart.

    Raises: UserError when there is no name in it.
    """
    path, _, version = env_id.strip().partition("@")
    owner, _, name = path.rpartition("/")
    if not name or "/" in owner:
        raise UserError(f"{env_id!r} is no environment id; it looks like name, owner/name or owner/name@version")
    return EnvironmentId(name, owner or None, None if version in ("", "latest") else version)


def load_environment(env_id: str, **env_args: Any) -> Any:
    """The environment that `env_id` names, made with `env_args`.

    Raises: UserError when there is none, when another version is here, or when an argument is unknown; MissingKeyError
    from the environment itself; EnvironmentLoadError for anything else that it raises, `sys.exit` included, and when
    what it makes is no environment.
    """
    entry = resolve_environment(env_id)
    install_verifiers_alias()
    install_prime_sandboxes_alias()
    module = _import(entry)
    loader = getattr(module, "load_environment", None)
    if loader is None:
        raise UserError(f"{env_id}: the module {entry.module} ({entry.origin}) has no function load_environment")
    _check_arguments(env_id, loader, env_args)
    try:
        env = loader(**env_args)
    except MettleError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentLoadError(
            f"failed to load environment {env_id!r}: {described_fault(error, _root(entry, module))}"
        ) from error
    if not isinstance(env, Environment):
        raise EnvironmentLoadError(
            f"load_environment of {env_id!r} ({entry.origin}) returned {_kind(env)} and no environment;"
            " it has to end with `return` and the environment that it made"
        )
    env.env_id = env.env_id or parse_environment_id(env_id).name
    env.env_args = env.env_args or dict(env_args)
    env.env_version = entry.version
    return env


def resolve_environment(env_id: str) -> EnvironmentEntry:
    """Where the environment that `env_id` names is; none of its code runs.

    Raises: UserError when there is none, or when another version is here.
    """
    wanted = parse_environment_id(env_id)
    entry = find_environment(wanted.name)
    if wanted.version is not None and entry.version != wanted.version:
        raise UserError(
            f"{env_id}: version {entry.version} is here ({entry.origin}), not {wanted.version}; "
            f"install that version, or ask for {wanted.name!r} without one"
        )
    return entry


def _import(entry: EnvironmentEntry) -> ModuleType:
    if entry.folder is not None:
        _put_on_path(entry.folder, entry.module)
    try:
        module = importlib.import_module(entry.module)
        adapt_functions(module)
        return module
    except ModuleNotFoundError as error:
        if error.name == entry.module:
            raise UserError(f"{entry.name}: {entry.origin} has no module {entry.module}") from error
        extra = extra_of(error.name or "")
        how = install_line(extra) if extra else f"mettle env install {entry.name}"
        raise UserError(
            f"{entry.name} needs the module {error.name!r}, which is not installed; `{how}` brings it"
        ) from error
    except MettleError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentLoadError(
            f"failed to import {entry.name} ({entry.origin}): {described_fault(error, entry.folder)}"
        ) from error


def _root(entry: EnvironmentEntry, module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return entry.folder or (Path(file).resolve().parent if file else None)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _put_on_path(folder: Path, module: str) -> None:
    """Make the package's own module importable; a module of that name from elsewhere gives way to it."""
    top = module.partition(".")[0]
    root = folder / "src" if (folder / "src").is_dir() else folder
    present = sys.modules.get(top)
    present_file = getattr(present, "__file__", None)
    if present_file is not None and not Path(present_file).resolve().is_relative_to(folder):
        for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
            del sys.modules[name]
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
        importlib.invalidate_caches()


def _check_arguments(env_id: str, loader: Any, env_args: dict[str, Any]) -> None:
    parameters = inspect.signature(loader).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    unknown = sorted(set(env_args) - set(parameters))
    if unknown:
        raise UserError(unknown_argument(env_id, unknown[0], list(parameters)))
