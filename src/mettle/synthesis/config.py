"""What a set of training data is made of: which rollouts, and which of them are kept.

Parts: `Rules` (which rollouts become rows), `GenerateSpec` (a whole command), `load_spec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mettle.config import Loaded, load_config
from mettle.config.options import Given, Option
from mettle.errors import UserError
from mettle.evals.spec import NumOrAll, RolloutSettings, name_list

Format = Literal["jsonl", "parquet"]


class Rules(BaseModel):
    """Which rollouts become rows."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    min_reward: float | None = None
    """Least reward that is kept; without it, what passes in the evaluation."""
    best: Annotated[int, Field(ge=1)] = 1
    """Rollouts to keep of each task."""
    near: Annotated[float, Field(ge=0.1, le=1.01)] = 0.8
    """Share of three-word runs that makes a near copy; 1.01 keeps near copies."""
    reasoning: Literal["keep", "strip"] = "keep"
    """The model's thoughts."""
    held_out: Annotated[float, Field(ge=0.0, le=0.9)] = 0.1
    """Share of tasks set aside."""
    keep_truncated: bool = False
    """Keep rollouts that were cut off."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the order of tasks and of the split."""


class GenerateSpec(RolloutSettings, Rules):
    """One set of training data: rollouts of an environment, or a saved evaluation."""

    env_id: Annotated[str, Option(also=("id",), is_argument=True)] = ""
    """Environment to run; not needed with --from."""
    model: Annotated[str, Option("-m", also=("endpoint_id",))] = ""
    """A model directory, a named endpoint, or a model at -b or at a provider; not needed with --from."""
    results: Annotated[str | None, Option("--from", also=("from",), is_path=True)] = None
    """Take a saved evaluation instead of running one."""
    output_dir: Annotated[str | None, Option("-o")] = None
    """Where the set goes; data/ENV without it."""
    num_tasks: Annotated[NumOrAll, Option("-n")] = 100
    """Tasks, -1 for all."""
    rollouts: Annotated[int, Field(ge=1), Option("-r", also=("rollouts_per_example",))] = 4
    """Rollouts of each task."""
    split: Literal["train", "eval"] = "train"
    """Rows to use."""
    formats: Annotated[list[Format], Field(min_length=1), Option("-f --format", also=("format",), read=name_list)] = [
        "jsonl"
    ]
    """How the set is written: jsonl, parquet, or jsonl,parquet."""

    @property
    def folder(self) -> Path:
        """Where the set goes."""
        name = (self.env_id or "from-results").rpartition("/")[2].partition("@")[0]
        return Path(self.output_dir) if self.output_dir is not None else Path("data") / name


def load_spec(files: Sequence[Path], given: Given) -> Loaded[GenerateSpec]:
    """A set from TOML files and what was `given`.

    Raises: UserError when something is wrong, or when it is not clear which rollouts are meant.
    """
    loaded = load_config(GenerateSpec, files, given)
    spec = loaded.config
    if bool(spec.env_id) == (spec.results is not None):
        raise UserError("say either which environment to run, or with --from which saved evaluation to take")
    if spec.env_id and not spec.model:
        raise UserError("say which model with -m: a model directory, an endpoint's id, or a model at -b or -p")
    return loaded
