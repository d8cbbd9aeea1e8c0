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
    baseline, final = _eval_of(evals, "baseline"), _eval_of(evals, "final")
    batches = ledger.batches()
    canaries = [v for _, v in journal.metric("canary/mean_abs_diff")]
    newest = ledger.newest_version()
    gain = None
    if baseline and final and baseline["mean"] is not None and final["mean"] is not None:
        gain = final["mean"] - baseline["mean"]
    return {
        "run": run_dir.name,
        "run_dir": str(run_dir),
        "state": journal.fact("state"),
        "steps": newest.weights.version if newest else 0,
        "baseline": baseline,
        "final": final,
        "gain": gain,
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
    lines = []
    for name in ("baseline", "final"):
        row = _row_of(read_evals(ledger.database), name)
        lines.append(f"{name:<10} {describe_eval(row) if row else 'not evaluated'}")
    if summary["gain"] is not None:
        lines.append(f"{'gain':<10} {summary['gain']:+.3f}   {sparkline(summary['train_reward'], 40)}")
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


def _row_of(rows: list[EvalRow], kind: str) -> EvalRow | None:
    return next((row for row in reversed(rows) if row.kind == kind and row.is_finished), None)


def _eval_of(rows: list[EvalRow], kind: str) -> dict[str, Any] | None:
    row = _row_of(rows, kind)
    if row is None:
        return None
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
