"""What an environment says about its own checks, under `[tool.mettle.quality]` of its pyproject.toml.

Parts: `RewardTestOptions` (what `mettle env test` asks for, too), `QualitySettings`, `read_settings`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mettle.config.layers import ConfigLayer, read_layer, sub_layer
from mettle.config.loader import NOTHING_GIVEN, load_levels
from mettle.config.options import Given, Option

PRESETS: dict[str, str] = {
    "gsm8k": "hash",
    "math": "boxed",
    "numeric": "plain",
    "boolean": "plain",
    "multiple-choice": "plain",
    "label": "plain",
    "free-text": "plain",
    "json": "json",
    "code": "fenced",
    "xml": "xml",
}
"""The layout that a preset insists on; without a preset it is found by trying."""


def _known(preset: str) -> str:
    if preset not in PRESETS:
        raise ValueError(f"there is no preset {preset!r}; there are {', '.join(PRESETS)}")
    return preset


def _ordered(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] >= bounds[1]:
        raise ValueError("must be [low, high] with low below high")
    return bounds


Preset = Annotated[str, AfterValidator(_known)]
Range = Annotated[tuple[float, float], Field(strict=False), AfterValidator(_ordered)]


class RewardTestOptions(BaseModel):
    """What a reward is tried with."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    num_rows: Annotated[int, Field(ge=1), Option("-n")] = 8
    """Rows to try."""
    preset: Preset | None = None
    """Write answers in this format: gsm8k, math, numeric, multiple-choice, json, code, xml, ...; else it is found."""
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds that scoring one answer may take."""
    reward_range: Range | None = None
    """Least and greatest reward, as [low, high]; without it the sum of the weights, to both sides."""
    seed: int = 0
    """Of the rows that are taken."""


class QualitySettings(RewardTestOptions):
    """The table `[tool.mettle.quality]`."""

    IS_FILE_ONLY: ClassVar[bool] = True

    allow: dict[str, str] = {}
    """A rule of the lint or a check of the data, and the reason why it may be broken here."""


def read_settings(folder: Path | None, given: Given = NOTHING_GIVEN) -> QualitySettings:
    """The settings of an environment's folder; what is `given` goes before.

    Raises: UserError for a key or a value that is not known.
    """
    manifest = folder / "pyproject.toml" if folder is not None else None
    layer = read_layer(manifest) if manifest is not None and manifest.is_file() else ConfigLayer()
    own = sub_layer(layer, ("tool", "mettle", "quality"))
    return load_levels(QualitySettings, [own], given, [manifest] if manifest is not None else []).config
