"""What a `metadata.json` says, as far as each field has a shape that means something.

Parts: `well_formed`. Invariants: whatever a file holds, those who read its fields find numbers, texts, tables and lists
where these belong, or nothing; what was passed over is named, so that a damaged file is one line about that file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mettle.wording import number

MAX_ROLLOUTS_PER_EXAMPLE = 1_000_000


def well_formed(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(the fields that can be read, the names of those that cannot). A field that is None says nothing."""
    kept, passed_over = dict(metadata), []
    for name, (is_shaped, _) in SHAPES.items():
        if kept.get(name) is not None and not is_shaped(kept[name]):
            del kept[name]
            passed_over.append(name)
    if isinstance(kept.get("stats"), dict):
        kept["stats"] = stats = dict(kept["stats"])
        for name, is_shaped in STATS.items():
            if stats.get(name) is not None and not is_shaped(stats[name]):
                del stats[name]
                passed_over.append(f"stats.{name}")
    return kept, passed_over


def complaint(metadata: Mapping[str, Any], names: list[str]) -> str:
    """What is wrong with fields that were passed over: "time is {} and no number"."""
    told = []
    for name in names:
        table, _, key = name.rpartition(".")
        value = repr((metadata[table] if table else metadata)[key])
        what = "no figures" if table else f"no {SHAPES[name][1]}"
        told.append(f"{name} is {value if len(value) <= 40 else value[:37] + '...'} and {what}")
    return "; ".join(told)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return number(value) is not None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -1 <= value < 10**12


def _is_repeat(value: Any) -> bool:
    return _is_count(value) and 1 <= value <= MAX_ROLLOUTS_PER_EXAMPLE


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_cost(value: Any) -> bool:
    return isinstance(value, dict) and "total_usd" in value and all(map(_is_number, value.values()))


def _is_estimate(value: Any) -> bool:
    if not isinstance(value, dict) or not _is_number(value.get("mean")):
        return False
    ends = value.get("interval")
    return ends is None or (isinstance(ends, list) and len(ends) == 2 and all(map(_is_number, ends)))


Shape = tuple[Callable[[Any], bool], str]
_TEXT: Shape = (_is_text, "text")
_NUMBER: Shape = (_is_number, "number")
_TABLE: Shape = (_is_table, "table")
_LIST: Shape = (_is_list, "list")
SHAPES: Mapping[str, Shape] = {
    **dict.fromkeys(("env_id", "env", "model", "base_url", "name", "date", "path_to_save"), _TEXT),
    **dict.fromkeys(("time", "time_ms", "avg_reward", "avg_error", "pass_threshold"), _NUMBER),
    **dict.fromkeys(
        (
            "env_args",
            "sampling_args",
            "version_info",
            "launch",
            "stats",
            "avg_metrics",
            "pass_at_k",
            "usage",
            "pass_on",
        ),
        _TABLE,
    ),
    **dict.fromkeys(("state_columns", "tools"), _LIST),
    "num_examples": (_is_count, "count"),
    "rollouts_per_example": (_is_repeat, "count"),
    "cost": (_is_cost, "cost"),
}
STATS: Mapping[str, Callable[[Any], bool]] = {"reward": _is_estimate, "num_rollouts": _is_count, "cost": _is_cost}
