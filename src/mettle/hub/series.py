"""What the run page draws: charts, their series, and the columns behind them.

A series comes from the ledger's own rows where they tell it (reward, staleness, throughput) and from a recorded metric
otherwise; `METRICS` names the metrics that are looked for, the first that is there counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mettle.hub.metrics import MetricTable, align
from mettle.hub.steps import StepFigures, StepTable

METRICS: dict[str, tuple[str, ...]] = {
    "entropy": ("entropy/mean", "entropy/all/mean", "entropy"),
    "mismatch_kl": ("mismatch_kl/mean", "mismatch_kl/all/mean", "mismatch_kl"),
    "loss": ("loss/mean", "loss/total", "loss"),
    "grad_norm": ("optim/grad_norm", "grad_norm"),
}

TIMES = (
    ("time/step_s", "training", "ember"),
    ("time/publish_s", "publishing weights", "moss"),
    ("time/wait_for_batch_s", "waiting for a batch", "faint"),
)
"""What a trainer's step is made of: metric, label, colour."""

WARM_UP = (("sft/reward", "reward", "ember"), ("sft/loss", "loss", "steel"))
"""Metrics of the warm-up, whose steps are its own."""


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart. `tone` is a colour of the style sheet; `is_dotted` draws points and no average."""

    key: str
    label: str
    tone: str
    is_dotted: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of the run page. `hint` says in a sentence what is seen; `band` fills between two columns."""

    id: str
    title: str
    hint: str
    series: tuple[Series, ...]
    unit: str = ""
    is_log: bool = False
    is_stacked: bool = False
    floor: float | None = None
    band: tuple[str, str] | None = None
    x: str = "step"


CHARTS = (
    Chart(
        "staleness", "Staleness", "Policy versions between the sampling of a token and its training.",
        (Series("staleness_mean", "mean", "steel"), Series("staleness_max", "max", "faint", True)), "versions", floor=0,
    ),
    Chart(
        "mismatch_kl", "Mismatch KL", "Divergence of the sampler's logprobs from the trainer's, on the tokens trained.",
        (Series("mismatch_kl", "KL", "plum"),), "nats", is_log=True,
    ),
    Chart(
        "entropy", "Entropy", "Mean entropy of the policy at the sampled tokens.",
        (Series("entropy", "mean", "moss"),), "nats", floor=0,
    ),
    Chart(
        "throughput", "Throughput", "Tokens a second: answers that were sampled, and whole sequences that trained.",
        (
            Series("inference_tokens_per_s", "sampled", "ember"),
            Series("training_tokens_per_s", "trained, with prompts", "steel"),
        ),
        "tokens/s", floor=0,
    ),
    Chart(
        "pass_at_k", "Pass@k",
        "Rollouts with the full reward (pass@1), and groups in which one has it (pass@k, k the size of a group).",
        (Series("pass_at_group", "pass@k", "sand"), Series("pass_at_1", "pass@1", "ember")), floor=0,
    ),
    Chart(
        "length", "Length", "Sampled tokens a rollout, whether its group was trained or not.",
        (Series("length_mean", "mean", "steel"),), "tokens", floor=0,
    ),
    Chart(
        "cut_off", "Cut off and failed", "Shares of the rollouts that ended at a limit, and that failed.",
        (Series("truncated_rate", "cut off", "plum"), Series("error_rate", "failed", "ember")), floor=0,
    ),
    Chart("loss", "Loss", "The policy loss of each step.", (Series("loss", "loss", "steel"),)),
    Chart(
        "grad_norm", "Gradient norm", "Before clipping.", (Series("grad_norm", "norm", "moss"),), floor=0,
    ),
)  # fmt: skip

REWARD = Chart(
    "reward", "Reward", "Mean over the rollouts scored for each step; the band is the 10th to the 90th percentile.",
    (Series("reward_mean", "train mean", "ember"),), band=("reward_p10", "reward_p90"),
)  # fmt: skip

TIME = Chart(
    "time", "Where the trainer's time goes", "Seconds of each step by part.",
    tuple(Series(*part) for part in TIMES), "s", is_stacked=True, floor=0,
)  # fmt: skip

WARM_UP_CHART = Chart(
    "warm_up", "Warm-up", "Supervised steps on demonstrations, before the first policy version is published.",
    tuple(Series(*part) for part in WARM_UP), floor=0, x="warm-up step",
)  # fmt: skip

WARM_UP_LARGE = replace(WARM_UP_CHART, id="warm_up_large")
"""The same in the place of the reward, until there is a reward."""

FROM_STEPS: dict[str, Callable[[StepFigures], float | None]] = {
    "reward_mean": lambda f: f.reward.mean if f.reward else None,
    "reward_p10": lambda f: f.reward.p10 if f.reward else None,
    "reward_p90": lambda f: f.reward.p90 if f.reward else None,
    "staleness_mean": lambda f: f.staleness_mean,
    "staleness_max": lambda f: float(f.staleness_max),
    "inference_tokens_per_s": lambda f: f.inference_tokens_per_s,
    "training_tokens_per_s": lambda f: f.training_tokens_per_s,
    "pass_at_1": lambda f: f.pass_at_1,
    "pass_at_group": lambda f: f.pass_at_group,
    "length_mean": lambda f: f.length_mean,
    "truncated_rate": lambda f: f.truncated_rate,
    "error_rate": lambda f: f.error_rate,
}


def charts_of(metrics: MetricTable, *, is_warming: bool = False) -> list[Chart]:
    """The charts of a run below the reward; the warm-up when there was one, or may still be one."""
    has_warm_up = is_warming or metrics.find([name for name, _, _ in WARM_UP]) is not None
    return [*CHARTS, TIME, *([WARM_UP_CHART] if has_warm_up else [])]


def warm_up_columns(metrics: MetricTable) -> tuple[list[int], dict[str, list[float | None]]]:
    """The columns of the warm-up, over its own steps."""
    return align((name, metrics.after(name, -1)) for name, _, _ in WARM_UP)


def warm_up_now(metrics: MetricTable) -> dict[str, float] | None:
    """The newest figures of the warm-up by label, and its step; None when there was none."""
    known = {label: column for name, label, _ in WARM_UP if (column := metrics.columns.get(name))}
    if not known:
        return None
    figures = {label: column[next(reversed(column))] for label, column in known.items()}
    return {"step": max(max(column) for column in known.values()), **figures}


def columns_after(
    steps: StepTable, metrics: MetricTable, after: int
) -> tuple[list[int], dict[str, list[float | None]]]:
    """Every column that the charts need, over the steps after `after`."""
    figures = [f for f in steps.steps if f.step > after]
    series: list[tuple[str, Sequence[tuple[int, float]]]] = []
    for key, value_of in FROM_STEPS.items():
        points = [(f.step, value) for f in figures if (value := value_of(f)) is not None]
        series.append((key, points))
    for key, candidates in METRICS.items():
        name = metrics.find(candidates)
        series.append((key, metrics.after(name, after) if name else []))
    # The trainer writes the times of a step when it has taken it; until then they are not its own.
    trained = {f.step for f in figures if f.trained_at is not None}
    for name, _, _ in TIMES:
        series.append((name, [point for point in metrics.after(name, after) if point[0] in trained]))
    return align(series)
