"""What an environment's own pyproject.toml sets for its evaluations, under `[tool.verifiers.eval]`."""

from __future__ import annotations

from mettle.config.layers import ConfigLayer, merge_all, read_layer, sub_layer
from mettle.config.options import own_names
from mettle.envs.packages.loading import resolve_environment
from mettle.evals.spec import EvalSpec


def package_defaults(env_id: str) -> ConfigLayer:
    """What the environment's own pyproject.toml sets for its evaluations; nothing for one without such a file."""
    folder = resolve_environment(env_id).folder
    manifest = folder / "pyproject.toml" if folder is not None else None
    if manifest is None or not manifest.is_file():
        return ConfigLayer()
    layer = read_layer(manifest)
    return merge_all(own_names(EvalSpec, sub_layer(layer, ("tool", name, "eval"))) for name in ("verifiers", "mettle"))
