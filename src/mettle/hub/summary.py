"""The headline of a run: its state, how far it is, what was gained, and whether its figures can be trusted."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mettle.evals.estimator import mean_of
from mettle.hub.models import (
    CanaryAgreement,
    Process,
    RewardNow,
    RunCard,
    RunSummary,
    ShownEvaluation,
    ShownWait,
    TaskAccounts,
    Vital,
)
from mettle.hub.reader import QUIET_S, RunReader
from mettle.hub.series import METRICS
from mettle.hub.steps import StepFigures
from mettle.processes.child import is_alive, process_state
from mettle.processes.liveness import SILENT, diagnose
from mettle.records.tasks import TaskState
from mettle.runs.costs import DEATHS
from mettle.storage.evals import read_evals

LIVE_STATES = frozenset({"preparing", "starting", "running", "restarting", "resuming", "stopping"})
HELD_OUT_KINDS = frozenset({"baseline", "interim", "final"})
RATE_STEPS = 8
"""Throughput now, and the time left, are taken over this many steps."""


def summarise(reader: RunReader) -> RunSummary:
    """The headline as it stands now."""
    reader.refresh()
    steps, journal = reader.steps.steps, reader.journal
    trained = [f for f in steps if f.trained_at is not None]
    processes = processes_of(reader)
    state, note = state_of(reader, processes)
    started, finished = _times(reader, processes)
    is_live = state in LIVE_STATES
    now = reader.clock()
    end = now if is_live else (finished or max((f.trained_at or 0 for f in trained), default=0) or None)
    evals = evaluations_of(reader)
    newest = reader.ledger.newest_version()
    max_steps = _whole(reader.fact("max_steps", "num_steps") or reader.setting("max_steps", "trainer.max_steps"))
    step = trained[-1].step if trained else 0
    return RunSummary(
        name=reader.run_dir.name,
        state=state,
        note=note,
        is_live=is_live,
        env_ids=environments(reader, evals),
        model=model_of(reader),
        branched_from=_branched_from(reader),
        step=step,
        shipped_step=steps[-1].step if steps else 0,
        max_steps=max_steps,
        version=newest.weights.version if newest else None,
        acked_version=reader.database.value("SELECT max(version) FROM versions WHERE acked_digest = digest"),
        started_at=started,
        finished_at=None if is_live else end,
        duration_s=end - started if started and end else None,
        eta_s=_time_left(trained, max_steps) if is_live else None,
        reward=_reward_now(steps),
        baselines=baselines_of(evals),
        finals=finals_of(evals),
        staleness_mean=steps[-1].staleness_mean if steps else None,
        staleness_max=steps[-1].staleness_max if steps else None,
        staleness_max_ever=max((f.staleness_max for f in steps), default=None),
        staleness_limit=_whole(reader.fact("max_staleness") or reader.setting(*STALENESS_KEYS)),
        mismatch_kl=reader.metrics.newest(METRICS["mismatch_kl"]),
        mismatch_cause=(reader.fact("mismatch") or {}).get("cause"),
        entropy=reader.metrics.newest(METRICS["entropy"]),
        canary=_canary(reader),
        inference_tokens_per_s=_recent([f.inference_tokens_per_s for f in steps]),
        training_tokens_per_s=_recent([f.training_tokens_per_s for f in trained]),
        num_rollouts=reader.steps.num_rollouts,
        num_errors=reader.steps.errors.total(),
        errors_by_kind=dict(reader.steps.errors),
        tasks=task_accounts(reader),
        restarts=sum(p.restarts for p in journal.processes()) + (reader.fact(DEATHS) or 0),
        revision=reader.revision,
    )


STALENESS_KEYS = (
    "orchestrator.max_staleness", "trainer.max_staleness", "max_staleness", "orchestrator.max_off_policy_steps",
)  # fmt: skip


def card_of(summary: RunSummary, reader: RunReader) -> RunCard:
    """The line of a run in the list of runs."""
    return RunCard(
        name=summary.name,
        state=summary.state,
        env_ids=summary.env_ids,
        model=summary.model,
        step=summary.step,
        max_steps=summary.max_steps,
        reward=summary.reward.mean if summary.reward else None,
        rewards=thin([f.reward.mean for f in reader.steps.steps if f.reward is not None], 60),
        baseline=_mean_of_means(summary.baselines),
        final=_mean_of_means(summary.finals),
        started_at=summary.started_at,
        duration_s=summary.duration_s,
        problem=None,
    )


def processes_of(reader: RunReader) -> list[Process]:
    """The processes of a run; whether a pid is alive is looked up for those that should be."""
    return [
        Process(**asdict(row), is_alive=is_alive(row.pid) if row.state in LIVE_STATES else None)
        for row in reader.journal.processes()
    ]


def waits_of(reader: RunReader) -> list[ShownWait]:
    """Who waits for whom now, the longest wait first."""
    now = time.monotonic()
    found = [
        ShownWait(
            owner=wait.owner, edge=wait.edge, target=wait.target, awaits=wait.awaits, budget_s=wait.budget_s,
            since=reader.clock() - (now - wait.since), waited_s=max(0.0, now - wait.since),
            is_overdue=wait.is_overdue(now), pid=beat.pid,
        )
        for beat in reader.beats().values()
        for wait in beat.waits
    ]  # fmt: skip
    return sorted(found, key=lambda wait: -wait.waited_s)


def vitals_of(reader: RunReader) -> list[Vital]:
    """The signs of life of the processes that run, and what is wrong with those that stand still."""
    now = time.monotonic()
    beats = reader.beats()
    faults = {fault.process: fault for fault in diagnose(beats, now, state_of=process_state)}
    return [
        Vital(
            process=beat.name, pid=beat.pid, beat_age_s=max(0.0, now - beat.at), progress=beat.progress,
            unit=beat.unit, idle_s=beat.idle_s, late_s=beat.late_s, paused_s=beat.paused_s,
            fault=faults[beat.name].kind if beat.name in faults else None,
            text=faults[beat.name].text if beat.name in faults else "",
        )
        for beat in beats.values()
    ]  # fmt: skip


def _standing_still(reader: RunReader) -> list[str]:
    """A sentence on each process that stands still, and on whom they ask in vain that is none of the run's."""
    faults = diagnose(reader.beats(), time.monotonic(), state_of=process_state)
    return [vital.text for vital in vitals_of(reader) if vital.fault] + [f.text for f in faults if f.kind == SILENT]


def evaluations_of(reader: RunReader) -> list[ShownEvaluation]:
    """Those on held-out tasks, oldest first; the warm-up's probes are on training tasks."""
    return [ShownEvaluation(**asdict(row)) for row in read_evals(reader.database) if row.kind in HELD_OUT_KINDS]


def _mean_of_means(evals: list[ShownEvaluation]) -> float | None:
    """Over the environments, each of which counts alike."""
    means = [shown.mean for shown in evals if shown.mean is not None]
    return mean_of(means) if means else None


def baselines_of(evals: list[ShownEvaluation]) -> list[ShownEvaluation]:
    """The newest baseline of each environment."""
    return list({e.env_id: e for e in evals if e.kind == "baseline" and e.state == "finished"}.values())


def finals_of(evals: list[ShownEvaluation]) -> list[ShownEvaluation]:
    """The newest evaluation of each environment that is no baseline."""
    return list({e.env_id: e for e in evals if e.kind in ("interim", "final") and e.state == "finished"}.values())


def state_of(reader: RunReader, processes: list[Process]) -> tuple[str, str]:
    """The state of a run and, where it needs one, a sentence."""
    state = str(reader.fact("state") or ("running" if processes else "new"))
    failure = reader.fact("failure", "error")
    if state == "failed":
        return state, str(failure or "")
    expected = [p for p in processes if p.state in LIVE_STATES]
    is_abandoned = state in LIVE_STATES and not any(p.is_alive for p in expected) and reader.quiet_s > QUIET_S
    if is_abandoned:
        return (
            "interrupted",
            f"Its processes are gone. To go on where it stopped: mettle rl resume {reader.run_dir.name}",
        )
    if state in LIVE_STATES:
        return state, "; ".join(_standing_still(reader))
    return state, ""


def task_accounts(reader: RunReader) -> TaskAccounts:
    """Task draws by state."""
    counts = reader.ledger.task_counts()
    dropped = {name.partition(":")[2]: number for name, number in counts.items() if name.startswith("dropped:")}
    by_state = {state.value: counts.get(state.value, 0) for state in TaskState if state is not TaskState.DROPPED}
    return TaskAccounts(**by_state, dropped=dropped, total=sum(counts.values()))


def environments(reader: RunReader, evals: list[ShownEvaluation]) -> list[str]:
    """The environments of a run: as it says, or as its config or its evaluations show."""
    named = reader.fact("env_ids", "envs", "env")
    if isinstance(named, str):
        return [named]
    if isinstance(named, list):
        return [str(entry) for entry in named]
    tables = reader.setting("env", "orchestrator.env")
    tables = tables if isinstance(tables, list) else [tables]
    found = [str(table["id"]) for table in tables if isinstance(table, dict) and "id" in table]
    return found or sorted({e.env_id for e in evals})


def model_of(reader: RunReader) -> str | None:
    """The name of the model that is trained."""
    name = reader.fact("model", "model_name") or reader.setting("model.name", "model.path", "model")
    return name if isinstance(name, str) else None


def _branched_from(reader: RunReader) -> str | None:
    """As `v40 of RUN`."""
    found = reader.fact("branched_from")
    return f"v{found['step']} of {Path(found['run']).name}" if isinstance(found, dict) else None


def thin(values: list[float], most: int) -> list[float]:
    """At most `most` of the values, evenly taken, the last one among them."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _times(reader: RunReader, processes: list[Process]) -> tuple[float | None, float | None]:
    started = reader.fact("started_at", "created_at")
    if not isinstance(started, int | float):
        started = min((p.started_at for p in processes if p.started_at), default=None)
        first = reader.database.value("SELECT min(published_at) FROM versions")
        started = min((t for t in (started, first) if t is not None), default=None)
    finished = reader.fact("finished_at", "ended_at")
    return started, finished if isinstance(finished, int | float) else None


def _reward_now(steps: list[StepFigures]) -> RewardNow | None:
    newest = next((f for f in reversed(steps) if f.reward is not None), None)
    if newest is None or newest.reward is None:
        return None
    return RewardNow(step=newest.step, **asdict(newest.reward))


def _canary(reader: RunReader) -> CanaryAgreement | None:
    row = reader.database.row(
        "SELECT count(*) AS number, max(canary_mean) AS worst FROM versions"
        " WHERE canary_mean IS NOT NULL AND acked_digest = digest"
    )
    newest = reader.database.row(
        "SELECT version, canary_mean, canary_max FROM versions WHERE canary_mean IS NOT NULL AND acked_digest = digest"
        " ORDER BY version DESC LIMIT 1"
    )
    if row is None or newest is None:
        return None
    return CanaryAgreement(
        version=newest["version"], mean_abs_diff=newest["canary_mean"], max_abs_diff=newest["canary_max"],
        worst_mean_abs_diff=row["worst"], num_versions=row["number"],
        dtype=str(reader.setting("inference.dtype") or "float32"),
    )  # fmt: skip


def _recent(rates: list[float | None]) -> float | None:
    known = [r for r in rates if r is not None][-RATE_STEPS:]
    return mean_of(known) if known else None


def _time_left(trained: list[StepFigures], max_steps: int | None) -> float | None:
    window = [f.trained_at for f in trained[-RATE_STEPS - 1 :] if f.trained_at is not None]
    if max_steps is None or len(window) < 2:
        return None
    return (window[-1] - window[0]) / (len(window) - 1) * max(0, max_steps - trained[-1].step)


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
