"""What an environment's own pyproject.toml sets for its evaluations, under `[tool.verifiers.eval]`."""

from __future__ import annotations

import tomllib
from typing import Any

from mettle.envs.packages.loading import resolve_environment
from mettle.errors import UserError
from mettle.evals.plan import hint
from mettle.evals.spec import checked


def package_defaults(env_id: str) -> dict[str, Any]:
    """What the environment's own pyproject.toml sets for its evaluations; nothing for one without such a file."""
    folder = resolve_environment(env_id).folder
    manifest = folder / "pyproject.toml" if folder is not None else None
    if manifest is None or not manifest.is_file():
        return {}
    tools = tomllib.loads(manifest.read_text(encoding="utf-8")).get("tool") or {}
    found: dict[str, Any] = {}
    for tool in ("verifiers", "mettle"):
        for key, value in ((tools.get(tool) or {}).get("eval") or {}).items():
            try:
                name, setting = checked(key, value)
            except KeyError:
                raise UserError(f"{manifest}: [tool.{tool}.eval] has an unknown key {key!r}; {hint(key)}") from None
            except UserError as error:
                raise UserError(f"{manifest}: [tool.{tool}.eval] {error}") from None
            found[name] = setting
    return found
