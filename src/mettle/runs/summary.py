"""The summary of a run, for a person and for a program: what was gained, at what cost, and whether to trust it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mettle.evals.estimator import mean_of, median
from mettle.records.versions import CANARY_TOLERANCES
from mettle.runs.costs import DEATHS, totals
from mettle.runs.progress import describe_eval
from mettle.storage.evals import EvalRow, read_evals
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.wording import sparkline

AGREEMENT = {"float32": 1e-5, "bfloat16": CANARY_TOLERANCES["bfloat16"]}
"""By the engine's type: to this the trainer's and the engine's logprobs of the same tokens agree on average."""


def summarise(ledger: Ledger, run_dir: Path) -> dict[str, Any]:
    """The figures of a run; what has not happened yet is None."""
    journal = ledger.journal
    evals = read_evals(ledger.database)
    before, after = newest_by_env(evals, "baseline"), newest_by_env(evals, "final")
    batches = ledger.batches()
    canaries = [v for _, v in journal.metric("canary/mean_abs_diff")]
    newest = ledger.newest_version()
    gains = _gains(before, after)
    return {
        "run": run_dir.name,
        "run_dir": str(run_dir),
        "state": journal.fact("state"),
        "steps": newest.weights.version if newest else 0,
        "baseline": _evaluated(before),
        "final": _evaluated(after),
        "gain": mean_of(list(gains.values())) if gains else None,
        "train_reward": [round(v, 4) for _, v in journal.metric("reward/mean")],
        "inference_tokens_per_s": _median(journal.metric("throughput/inference_tokens_per_s")),
        "trainer_tokens_per_s": _median(journal.metric("throughput/trainer_tokens_per_s")),
        "staleness_mean": mean_of([b.staleness_mean for b in batches]) if batches else None,
        "staleness_max": max((b.staleness_max for b in batches), default=None),
        "mismatch_kl_max": max((v for _, v in journal.metric("mismatch_kl/mean")), default=None),
        "canary_mean_abs_diff": max(canaries, default=None),
        "inference_dtype": RunDir(run_dir).served_as,
        "tasks": ledger.task_counts(),
        "trained_more_than_once": ledger.trained_more_than_once(),
        "restarts": sum(p.restarts for p in journal.processes()) + (journal.fact(DEATHS) or 0),
        **totals(RunDir(run_dir), journal),
    }


def summary_lines(summary: dict[str, Any], ledger: Ledger) -> list[str]:
    """The summary in a dozen lines."""
    lines, evals = [], read_evals(ledger.database)
    kinds = {kind: newest_by_env(evals, kind) for kind in ("baseline", "final")}
    for kind, rows in kinds.items():
        told = [(f"{env}: " if len(rows) > 1 else "") + describe_eval(row) for env, row in rows.items()]
        lines += [f"{'' if number else kind:<10} {text}" for number, text in enumerate(told or ["not evaluated"])]
    if gains := _gains(kinds["baseline"], kinds["final"]):
        told = [(f"{env} " if len(gains) > 1 else "") + f"{gain:+.3f}" for env, gain in gains.items()]
        lines.append(f"{'gain':<10} {', '.join(told)}   {sparkline(summary['train_reward'], 40)}")
    lines += _figure_lines(summary)
    return lines


def _figure_lines(summary: dict[str, Any]) -> list[str]:
    lines = []
    if summary["inference_tokens_per_s"] and summary["trainer_tokens_per_s"]:
        lines.append(
            f"{'speed':<10} {summary['inference_tokens_per_s']:,.0f} tokens/s sampled,"
            f" {summary['trainer_tokens_per_s']:,.0f} tokens/s trained"
        )
    if summary["staleness_max"] is not None:
        lines.append(
            f"{'staleness':<10} mean {summary['staleness_mean']:.2f}, at most {summary['staleness_max']} versions"
        )
    if summary["canary_mean_abs_diff"] is not None:
        dtype = summary["inference_dtype"]
        agrees = "agree" if summary["canary_mean_abs_diff"] <= AGREEMENT[dtype] else "DISAGREE"
        lines.append(
            f"{'logprobs':<10} trainer and engine {agrees}:"
            f" mean difference at most {summary['canary_mean_abs_diff']:.1e}, sampled in {dtype}"
        )
    tasks = ", ".join(f"{number} {name}" for name, number in summary["tasks"].items()) or "none yet"
    twice = summary["trained_more_than_once"]
    lines.append(f"{'tasks':<10} {tasks}; trained more than once: {'not noted' if twice is None else twice}")
    if summary["wall_s"] is not None:
        lines.append(
            f"{'cost':<10} {summary['wall_s']:.0f} s of wall time, {summary['cpu_s']:.0f} CPU-seconds,"
            f" {summary['peak_memory_bytes'] / 2**20:.0f} MiB at the peak, {summary['restarts']} restarts"
        )
    return lines


def newest_by_env(rows: list[EvalRow], kind: str) -> dict[str, EvalRow]:
    """The newest finished evaluation of a kind of each environment, in the order in which they were first evaluated."""
    return {row.env_id: row for row in rows if row.kind == kind and row.is_finished}


def _gains(before: dict[str, EvalRow], after: dict[str, EvalRow]) -> dict[str, float]:
    """How much each environment's mean reward has risen, where both are known."""
    found = {}
    for env, row in after.items():
        old = before[env].mean if env in before else None
        if old is not None and row.mean is not None:
            found[env] = row.mean - old
    return found


def _evaluated(rows: dict[str, EvalRow]) -> dict[str, Any] | None:
    """An evaluation; of several environments the mean of their means, which has no interval, and each by name."""
    if len(rows) <= 1:
        return next(map(_eval_of, rows.values()), None)
    means = [row.mean for row in rows.values() if row.mean is not None]
    return {
        "mean": mean_of(means) if means else None,
        "ci": [None, None],
        "num_tasks": sum(row.num_tasks for row in rows.values()),
        "num_errors": sum(row.num_errors for row in rows.values()),
        "version": max(row.version_max for row in rows.values()),
        "metrics": {},
        "envs": {env: _eval_of(row) for env, row in rows.items()},
    }


def _eval_of(row: EvalRow) -> dict[str, Any]:
    return {
        "mean": row.mean,
        "ci": [row.ci_low, row.ci_high],
        "num_tasks": row.num_tasks,
        "num_errors": row.num_errors,
        "version": row.version_max,
        "metrics": row.metrics,
    }


def _median(series: list[tuple[int, float]]) -> float | None:
    return median(v for _, v in series) if series else None
