"""Is the distribution of an evaluation's rewards one that training can learn from?

Parts: `Distribution` (figures of the saved rollouts), `distribution_of`, `distribution_checks`, `find_evaluation`.
Invariants: a rollout that failed is counted as failed and in nothing else; each check that fails says what to do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mettle.errors import UserError
from mettle.evals.entries import OWN_KIND, EvaluationEntry, list_evaluations
from mettle.evals.estimator import mean_of, mean_over_tasks, spread
from mettle.evals.facts import facts_of_row
from mettle.evals.passing import PassRule
from mettle.evals.reader import EvaluationReader
from mettle.quality.checks import Check, check
from mettle.wording import number

MIN_ROLLOUTS = 20
MIN_MEAN, MAX_MEAN = 0.05, 0.95
MIN_STD = 0.05
MIN_FORMAT = 0.3
MAX_ERROR_SHARE = 0.05
MAX_TRUNCATED_SHARE = 0.2
MIN_VARYING_SHARE = 0.2
EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Distribution:
    """Figures of one evaluation. What begins with `group_` is by task; groups of one tell nothing of variance."""

    env_id: str
    model: str
    num_rollouts: int
    num_errors: int
    error_kinds: dict[str, int]
    num_truncated: int
    mean: float | None
    std: float | None
    formats: dict[str, float]
    num_groups: int
    num_varying_groups: int
    group_means: tuple[float, ...] = ()
    group_tries: tuple[int, ...] = ()
    pass_threshold: float = 0.5
    group_passes: tuple[float, ...] = field(default=(), repr=False)

    @property
    def num_scored(self) -> int:
        """Rollouts that have a reward."""
        return self.num_rollouts - self.num_errors

    def to_dict(self) -> dict[str, Any]:
        """As JSON wants it."""
        figures = asdict(self)
        for name in ("group_means", "group_tries", "group_passes"):
            del figures[name]
        return figures


def distribution_of(rows: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any] | None = None) -> Distribution:
    """Read the figures off the rows of `results.jsonl`."""
    metadata = metadata or {}
    rule = PassRule.of_metadata(metadata)
    scored = [row for row in rows if row.get("error") is None and number(row.get("reward")) is not None]
    failed = [row for row in rows if row not in scored] if len(scored) < len(rows) else []
    rewards = [float(row["reward"]) for row in scored]
    groups: dict[str, list[float]] = defaultdict(list)
    passes: dict[str, list[float]] = defaultdict(list)
    for row in scored:
        groups[repr(row.get("example_id", 0))].append(float(row["reward"]))
        passes[repr(row.get("example_id", 0))].append(float(rule.holds(facts_of_row(row))))
    estimate, seen = mean_over_tasks(list(groups.values())), spread(rewards)
    several = [group for group in groups.values() if len(group) > 1]
    return Distribution(
        env_id=str(metadata.get("env_id", "")),
        model=str(metadata.get("model", "")),
        num_rollouts=len(rows),
        num_errors=len(failed),
        error_kinds=dict(Counter(_error_kind(row) for row in failed).most_common()),
        num_truncated=sum(bool(row.get("is_truncated")) for row in scored),
        mean=estimate.mean if estimate else None,
        std=seen.std if seen else None,
        formats=_formats(scored),
        num_groups=len(several),
        num_varying_groups=sum(max(group) - min(group) > EPSILON for group in several),
        group_means=tuple(mean_of(group) for group in groups.values()),
        group_tries=tuple(len(group) for group in groups.values()),
        pass_threshold=rule.threshold,
        group_passes=tuple(mean_of(group) for group in passes.values()),
    )


def distribution_checks(found: Distribution) -> list[Check]:
    """What training needs of the distribution."""
    mean, std = found.mean or 0.0, found.std or 0.0
    checks = [
        check("enough rollouts", found.num_scored >= MIN_ROLLOUTS, f"{found.num_scored} scored", _MORE),
        check("mean above 0.05", mean > MIN_MEAN, f"mean {mean:.3f}", _TOO_HARD),
        check("mean below 0.95", mean < MAX_MEAN, f"mean {mean:.3f}", _TOO_EASY),
        check("std above 0.05", std > MIN_STD, f"std {std:.3f}", _NO_SPREAD),
        _format_check(found),
        _error_check(found),
        _truncation_check(found),
        _variance_check(found),
    ]
    if found.mean is None:
        nothing = "no rollout has a reward"
        keep = ("enough rollouts", "few errors")
        return [each if each.name in keep else Check(each.name, "untested", nothing) for each in checks]
    return checks


_MORE = f"measure at least {MIN_ROLLOUTS} rollouts: mettle eval run ENV -m MODEL -n 20 -r 4"
_TOO_HARD = "too hard, or the answer is not found: read rollouts (mettle eval view), try easier tasks or a larger model"
_TOO_EASY = "too easy: take harder tasks or a smaller model; or the reward pays too much (mettle env check)"
_NO_SPREAD = "every rollout earns about the same: give partial credit, or mix easy and hard tasks"


def find_evaluation(name: str, root: Path = Path()) -> Path:
    """The path of an evaluation: itself, the newest of a run or one of it (`RUN:final`), or of an environment.

    Raises: UserError when there is none.
    """
    try:
        return Path(EvaluationReader(Path(name)).entry.name)
    except UserError:
        found = [entry for entry in list_evaluations(root) if entry.problem is None and _is_of(entry, name)]
    if not found:
        raise UserError(
            f"{name!r} is no saved evaluation, and no environment with one; mettle eval run {name} -m MODEL"
        )
    return Path(found[0].name)


def read_distribution(folder: Path) -> Distribution:
    """The figures of a saved evaluation."""
    evaluation = EvaluationReader(folder)
    return distribution_of(list(evaluation.rows()), evaluation.metadata)


def _is_of(entry: EvaluationEntry, env_id: str) -> bool:
    """Folders are named `<environment>--<model>`; a run says which environment it evaluated."""
    wanted = env_id.partition("@")[0].replace("_", "-").replace("/", "--")
    name = entry.path.parent.name if entry.kind == OWN_KIND else f"{entry.env_id}--"
    return name.replace("_", "-").replace("/", "--").startswith(f"{wanted}--")


def _formats(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in (row.get("metrics") or {}).items():
            if "format" in name.lower() and isinstance(value, int | float):
                values[name].append(float(value))
    return {name: mean_of(found) for name, found in values.items()}


def _error_kind(row: Mapping[str, Any]) -> str:
    error = row.get("error")
    if isinstance(error, Mapping):
        return str(error.get("kind") or error.get("error") or "error")
    return str(error).partition(":")[0][:40] if error else "no reward"


def _format_check(found: Distribution) -> Check:
    if not found.formats:
        return Check("format above 0.3", "skip", "no metric has `format` in its name")
    name, value = min(found.formats.items(), key=lambda item: item[1])
    fix = "say the format in the system prompt with an example, or warm up on demonstrations (SFT)"
    return check("format above 0.3", value > MIN_FORMAT, f"{name} {value:.3f}", fix, otherwise="warn")


def _error_check(found: Distribution) -> Check:
    share = found.num_errors / found.num_rollouts if found.num_rollouts else 0.0
    kinds = ", ".join(f"{kind} {num}" for kind, num in found.error_kinds.items())
    detail = f"{found.num_errors} of {found.num_rollouts} failed" + (f": {kinds}" if kinds else "")
    return check("few errors", share <= MAX_ERROR_SHARE, detail, "mend the cause; an errored rollout trains nothing")


def _truncation_check(found: Distribution) -> Check:
    share = found.num_truncated / found.num_scored if found.num_scored else 0.0
    detail = f"{share:.0%} were cut off"
    fix = "raise max_tokens (-t), or ask for shorter answers; a cut answer cannot be right"
    return check("few cut off", share <= MAX_TRUNCATED_SHARE, detail, fix, otherwise="warn")


def _variance_check(found: Distribution) -> Check:
    name = "variance within groups"
    if not found.num_groups:
        return Check(name, "untested", "each task was tried once", "try each task several times: -r 4")
    share = found.num_varying_groups / found.num_groups
    detail = f"{found.num_varying_groups} of {found.num_groups} tasks have rollouts that differ in reward"
    fix = "raise the temperature or the group size, or drop tasks that are always or never solved"
    return check(name, share >= MIN_VARYING_SHARE, detail, fix)
