"""What is to be optimised, how far, and with which models.

    model = "mine"
    reflection_model = "writer"      # the model without it

    [env]
    env_id = "grade-math"

    [gepa]
    max_calls = 500

    [sampling]
    max_tokens = 512

Parts: `GepaSpec`, `read_file`, `load_spec`. The tables `[env]`, `[gepa]` and `[execution]` only group a file: their
keys are those of the top level. Settings that say where models answer and how an environment is loaded are those of
evaluations (`mettle.evals.spec`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from mettle.config import Loaded
from mettle.config.layers import ConfigLayer, merge_all, read_layer, sub_layer
from mettle.config.loader import NOTHING_GIVEN, check_needed, load_levels
from mettle.config.options import Foreign, Given, Option, own_names
from mettle.config.positions import KeyPath
from mettle.errors import UserError
from mettle.evals.spec import RolloutSettings


class GepaSpec(RolloutSettings):
    """One prompt optimisation."""

    FOREIGN: ClassVar = {"verbose": Foreign(), "tui": Foreign()}
    GROUPS: ClassVar = ("gepa", "execution", "env")
    """Tables of a file whose keys are those of the top level."""

    provider: Annotated[str | None, Option("-p")] = None
    """Who serves the models: openai, anthropic, openrouter, ollama, ..."""
    env_dir_path: Annotated[str | None, Option(is_path=True)] = None
    """Another folder that environments are in."""
    reflection_model: Annotated[str | None, Option("-M")] = None
    """Model that rewrites prompts; the model itself without it."""
    max_calls: Annotated[int, Field(ge=1), Option("-B")] = 500
    """Rollouts to search with. The round that crosses it is finished, and held-out rollouts come on top."""
    num_train: Annotated[int, Field(ge=1), Option("-n")] = 100
    """Rows to learn from."""
    num_val: Annotated[int, Field(ge=1), Option("-N")] = 50
    """Rows to choose by."""
    num_test: Annotated[int, Field(ge=0)] = 50
    """Held-out rows, measured before and after."""
    test_rollouts: Annotated[int, Field(ge=1)] = 1
    """Rollouts of each of those."""
    minibatch_size: Annotated[int, Field(ge=1)] = 3
    """Rows of one reflection."""
    perfect_score: float = 1.0
    """Reward that needs no reflection."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of rows and search."""
    seed_prompt: str | None = None
    """Prompt to start from, on the command line also as @FILE; the environment's without it."""
    tool_descriptions: bool = False
    """Rewrite the tools' descriptions, too."""
    run_dir: Annotated[str | None, Option("-o")] = None
    """Where to save; outputs/gepa without it, beside the environment where its source is here."""
    save_results: Annotated[bool, Option("--save-results/--no-save")] = True
    """Keep the run on disk."""

    def to_dict(self) -> dict[str, Any]:
        """As it is saved, so that `--resume` needs to be told nothing again; headers can hold secrets and are not."""
        saved = self.model_dump(exclude={"headers"})
        shared = RolloutSettings.model_fields
        return {name: value for name, value in saved.items() if name not in shared or value not in (None, {}, [])}


def read_file(path: Path) -> ConfigLayer:
    """The settings of a TOML file.

    Raises: UserError for a file that cannot be read, or several environments.
    """
    layer = read_layer(path)
    top = ConfigLayer({key: value for key, value in layer.tree.items() if key not in GepaSpec.GROUPS}, layer.sources)
    return merge_all(own_names(GepaSpec, level, path.parent) for level in (top, *_groups(layer, path)))


def load_spec(
    levels: Sequence[ConfigLayer], given: Given = NOTHING_GIVEN, files: Sequence[Path] = ()
) -> Loaded[GepaSpec]:
    """One optimisation from levels of settings, the strongest last, under what was `given`.

    Raises: UserError when something is wrong, or when there is no environment or no model.
    """
    hows = {
        "env_id": "say which environment: `mettle gepa run ENV -m MODEL`; `mettle env list` names them",
        "model": "say which model with -m: a model directory, an endpoint's id, or a model at -b",
    }
    check_needed(GepaSpec, levels, given, files, hows)
    return load_levels(GepaSpec, levels, given, files)


def _groups(layer: ConfigLayer, path: Path) -> Iterator[ConfigLayer]:
    for name in GepaSpec.GROUPS:
        value = layer.tree.get(name, {})
        place: KeyPath = (name,)
        where = layer.source_of(place) or str(path)
        if name == "env" and isinstance(value, list):
            if len(value) != 1:
                raise UserError(f"{where}: {len(value)} environments; one run optimises the prompt of one")
            place, value = (name, 0), value[0]
        if not isinstance(value, dict):
            raise UserError(f"{where}: {name} is a table, as [{name}]")
        yield sub_layer(layer, place)
