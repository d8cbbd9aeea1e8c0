"""What an environment says about its own checks, under `[tool.mettle.quality]` of its pyproject.toml.

Parts: `QualitySettings`, `read_settings`. Keys: `reward_range` ([low, high]), `num_rows`, `timeout_s`, `preset`,
`allow` (a rule of the lint or a check of the data, and the reason why it may be broken here).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mettle.errors import UserError
from mettle.quality.rewards.reward_test import PRESETS, RewardTestOptions

KEYS = ("reward_range", "num_rows", "timeout_s", "preset", "allow")


@dataclass(frozen=True, slots=True)
class QualitySettings:
    """Settings, with the defaults of the reward test."""

    options: RewardTestOptions = field(default_factory=RewardTestOptions)
    allow: dict[str, str] = field(default_factory=dict)


def read_settings(folder: Path | None, *, preset: str | None = None, num_rows: int | None = None) -> QualitySettings:
    """The settings of an environment's folder; what is given here goes before.

    Raises: UserError for a key or a value that is not known.
    """
    table = _table(folder) if folder is not None else {}
    unknown = sorted(set(table) - set(KEYS))
    if unknown:
        raise UserError(
            f"{folder}/pyproject.toml: [tool.mettle.quality] has no {unknown[0]!r}; it has {', '.join(KEYS)}"
        )
    chosen = preset or table.get("preset")
    if chosen is not None and chosen not in PRESETS:
        raise UserError(f"there is no preset {chosen!r}; there are {', '.join(PRESETS)}")
    default = RewardTestOptions()
    options = RewardTestOptions(
        num_rows=num_rows or int(table.get("num_rows", default.num_rows)),
        timeout_s=float(table.get("timeout_s", default.timeout_s)),
        reward_range=_range(folder, table.get("reward_range")),
        preset=chosen,
    )
    return QualitySettings(options, {str(rule): str(reason) for rule, reason in (table.get("allow") or {}).items()})


def _table(folder: Path) -> dict[str, Any]:
    path = folder / "pyproject.toml"
    if not path.is_file():
        return {}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    table = ((document.get("tool") or {}).get("mettle") or {}).get("quality") or {}
    return table if isinstance(table, dict) else {}


def _range(folder: Path | None, value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2 and all(isinstance(each, int | float) for each in value)
    if not is_pair or value[0] >= value[1]:
        raise UserError(f"{folder}/pyproject.toml: reward_range is [low, high] with low below high, not {value!r}")
    return float(value[0]), float(value[1])
