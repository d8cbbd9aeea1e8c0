"""`mettle rl simulate`: what a run would do on more engines, from the times that an earlier one measured.

    RUN's ledger ──► RunTimes (step, update, rollout times, shares) ──► SimulatedWorld
    config, GPUs ──► the real dispatcher, groups, staleness, ledger on a virtual clock ──► throughput, idle, staleness

Only time is invented. A rollout's time in the model follows the number that runs beside it on its engine: s = a + b n,
fitted to the run's own groups; its time in the environment and the judge stays. The trainer's step shrinks by the ranks
it is spread over times `RANK_EFFICIENCY`, which is an assumption and is told as one. Invariant: the same configuration,
run and seed give the same prediction.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mettle.errors import UserError
from mettle.evals.estimator import mean_of
from mettle.orchestrator.config import OrchestratorConfig
from mettle.orchestrator.simulator import MeasuredPace, SimulatedWorld, simulate
from mettle.processes.virtual_time import Deadlock, run_virtually
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.trainer.ranks import RANK_EFFICIENCY
from mettle.wording import duration

SKIPPED_STEPS = 1
"""The first step's times are those of a process that warms up."""
MIN_STEPS = 3
MAX_SIMULATED_STEPS = 100


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Times of a run, in seconds. `model_s[i]` of rollout i passed in the model while `beside[i]` others ran."""

    train_s: float
    publish_s: float
    update_s: float
    model_s: tuple[float, ...]
    other_s: tuple[float, ...]
    beside: tuple[float, ...]
    equal_rate: float
    error_rate: float
    num_steps: int
    wall_s: float
    tokens: float
    """Sampled tokens a rollout."""

    @property
    def steps_per_s(self) -> float:
        """Of the run itself, over the steps that were measured."""
        return self.num_steps / self.wall_s


def measure(path: Path) -> RunTimes:
    """The times of a run.

    Raises: UserError when it has trained too few steps to say anything.
    """
    ledger = Ledger(RunDir.existing(path).ledger, is_read_only=True)
    try:
        metric = ledger.journal.metric
        trained = ledger.database.rows(
            "SELECT step, trained_at FROM batches WHERE trained_at IS NOT NULL ORDER BY step"
        )
        if len(trained) < SKIPPED_STEPS + MIN_STEPS:
            raise UserError(
                f"{path} has trained {len(trained)} steps, which say too little: take a run of at least "
                f"{SKIPPED_STEPS + MIN_STEPS}"
            )
        begin, end = trained[SKIPPED_STEPS - 1]["trained_at"], trained[-1]["trained_at"]
        rows = ledger.database.rows(
            "SELECT duration_s, model_s, created_at, num_tokens, error_kind FROM rollouts "
            "WHERE kind = 'train' AND created_at >= ?",
            (begin,),
        )
        well = [row for row in rows if row["error_kind"] is None]
        if not well:
            raise UserError(f"{path} has no finished rollout to take times from")
        spans = [(row["created_at"] - row["duration_s"], row["created_at"]) for row in well]
        model = [min(row["duration_s"], row["model_s"] or row["duration_s"]) for row in well]
        zero = _mean(metric("groups/zero_advantage"))
        return RunTimes(
            train_s=_mean(metric("time/step_s")),
            publish_s=_mean(metric("time/publish_s")),
            update_s=_mean(metric("weights/update_ms")) / 1000,
            model_s=tuple(model),
            other_s=tuple(max(0.0, row["duration_s"] - own) for row, own in zip(well, model, strict=True)),
            beside=tuple(_beside(spans)),
            equal_rate=min(0.95, zero),
            error_rate=1 - len(well) / len(rows),
            num_steps=len(trained) - SKIPPED_STEPS,
            wall_s=max(1e-6, end - begin),
            tokens=mean_of([row["num_tokens"] for row in well]),
        )
    finally:
        ledger.close()


def fit_pace(seen: RunTimes, num_engines: int) -> MeasuredPace:
    """How long rollouts take when n run on each engine: the line through the run's own, never falling with n."""
    n = [beside + 1 for beside in seen.beside]
    mean_n, mean_s = mean_of(n), mean_of(seen.model_s)
    spread = sum((x - mean_n) ** 2 for x in n)
    slope = sum((x - mean_n) * s for x, s in zip(n, seen.model_s, strict=True)) / spread if spread > 0 else 0.0
    slope = min(max(0.0, slope), mean_s / mean_n)  # the base is no less than nothing
    return MeasuredPace(
        shares=tuple(s / mean_s for s in seen.model_s) if mean_s > 0 else (1.0,),
        base_s=max(0.0, mean_s - slope * mean_n),
        each_s=slope,
        other_s=seen.other_s,
        num_engines=num_engines,
    )


def predict(
    config: OrchestratorConfig, seen: RunTimes, *, num_engines: int, num_ranks: int, seed: int = 0
) -> dict[str, Any]:
    """Play the run on a virtual clock; throughput, idle shares and staleness as plain values.

    Raises: UserError when the run would come to a stand.
    """
    steps = min(config.max_steps, MAX_SIMULATED_STEPS)
    # What credit a group gets takes no time here, and a frozen model that an algorithm asks is not there.
    envs = [env.model_copy(update={"algorithm": None, "algorithm_args": {}}) for env in config.envs]
    shorter = config.model_copy(
        update={
            "max_steps": steps,
            "envs": envs,
            "algorithm": "grpo",
            "algorithm_args": {},
            "eval": config.eval.model_copy(update={"num_examples": 0}),
            "max_empty_batches": 10_000,
        }
    )
    train_s = seen.train_s / (1 + RANK_EFFICIENCY * (num_ranks - 1))
    world = SimulatedWorld(
        seed=seed,
        pace_seed=seed,
        num_tasks=100_000,
        pace=fit_pace(seen, num_engines),
        train_s=train_s + seen.publish_s,
        update_s=seen.update_s,
        equal_rate=seen.equal_rate,
        error_rate=seen.error_rate,
        limit_s=1e9,
    )
    with tempfile.TemporaryDirectory(prefix="mettle-simulate-") as scratch:
        try:
            done = run_virtually(simulate(Path(scratch), shorter, world))
        except Deadlock as error:
            raise UserError(f"this run would come to a stand: {error}") from error
        ledger = Ledger(RunDir(Path(scratch)).ledger)
        try:
            first, last, stale, largest = _shipped(ledger)
            dropped = sum(value for _, value in ledger.journal.metric("staleness/dropped"))
            cut = sum(value for _, value in ledger.journal.metric("staleness/cut_short"))
        finally:
            ledger.close()
    span = max(1e-9, last - first) / max(1, steps - 1)
    return {
        "num_engines": num_engines,
        "num_ranks": num_ranks,
        "steps": steps,
        "step_s": span,
        "steps_per_hour": 3600 / span,
        "rollouts_per_s": config.batch_size / span,
        "tokens_per_s": config.batch_size * seen.tokens / span,
        "trainer_idle": max(0.0, 1 - (train_s + seen.publish_s) / span),
        "engines_idle": 1 - done.engine.busy_s / max(1e-9, done.duration_s * num_engines),
        "staleness_mean": stale,
        "staleness_max": largest,
        "groups_dropped_stale": int(dropped),
        "groups_cut_short": int(cut),
        "run_s": span * config.max_steps,
    }


def prediction_lines(found: dict[str, Any], seen: RunTimes) -> list[str]:
    """The prediction for a terminal."""
    ranks = "" if found["num_ranks"] == 1 else f" (assuming {RANK_EFFICIENCY:.0%} of the ideal speed-up)"
    return [
        f"measured   {duration(seen.wall_s / seen.num_steps)} a step over {seen.num_steps} steps",
        f"layout     {found['num_engines']} engines, {found['num_ranks']} trainer ranks{ranks}",
        f"predicted  {duration(found['step_s'])} a step, {found['rollouts_per_s']:,.1f} rollouts/s,"
        f" {found['tokens_per_s']:,.0f} tokens/s; the run {duration(found['run_s'])}",
        f"idle       trainer {found['trainer_idle']:.0%}, engines {found['engines_idle']:.0%}",
        f"staleness  mean {found['staleness_mean']:.2f}, at most {found['staleness_max']};"
        f" {found['groups_dropped_stale']} groups too old, {found['groups_cut_short']} cut short",
    ]


def layouts(num_gpus: int, *, num_ranks: int | None) -> list[tuple[int, int]]:
    """(engines, trainer ranks) to try: as asked, or every power of two of ranks that leaves an engine.

    Raises: UserError when no engine is left.
    """
    if num_gpus < 2:
        return [(1, 1)]  # they share it
    if num_ranks is not None:
        if num_ranks >= num_gpus:
            raise UserError(f"{num_ranks} trainer ranks leave no engine of {num_gpus} GPUs: take fewer")
        return [(num_gpus - num_ranks, num_ranks)]
    found, ranks = [], 1
    while ranks < num_gpus:
        found.append((num_gpus - ranks, ranks))
        ranks *= 2
    return found


def _shipped(ledger: Ledger) -> tuple[float, float, float, int]:
    rows = ledger.database.rows("SELECT trained_at, staleness_mean, staleness_max FROM batches ORDER BY step")
    settled = rows[len(rows) // 3 :]  # the start has nothing stale
    return (
        rows[0]["trained_at"],
        rows[-1]["trained_at"],
        mean_of([row["staleness_mean"] for row in settled]),
        max(row["staleness_max"] for row in rows),
    )


def _beside(spans: Sequence[tuple[float, float]]) -> list[float]:
    """How many others ran beside each, on average over its time: all overlaps over its length."""
    edges = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    # The integral of the number that runs, up to each edge; the difference over a span is the time that all had in it.
    times, totals, running, total = [edges[0][0]], [0.0], 0, 0.0
    for at, change in edges:
        total += running * (at - times[-1])
        running += change
        times.append(at)
        totals.append(total)
    where = {at: value for at, value in zip(times, totals, strict=True)}
    return [max(0.0, (where[end] - where[begin]) / (end - begin) - 1) if end > begin else 0.0 for begin, end in spans]


def _mean(series: Sequence[tuple[int, float]]) -> float:
    values = [value for step, value in series if step > SKIPPED_STEPS] or [value for _, value in series]
    return mean_of(values) if values else 0.0
