"""Does the quickstart learn on any seed, how fast, and in how much memory?

Runs `mettle quickstart` once a seed, one after the other, and prints a table; `--out` also keeps it as JSON beside an
SVG of the curves. Each figure comes from the run's own summary. The thresholds are the project's goal: at least 0.85 on
each seed and 0.9 on average, under 180 s and 2 GB.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from line_charts import Line, Panel, charts_svg


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[301, 302, 303, 304, 305])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--keep", type=Path, help="folder to keep the run directories in")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in options.seeds:
            summary = run_seed(seed, options.steps, (options.keep or Path(scratch)) / f"seed-{seed}")
            rows.append(summary)
            print(line_of(seed, summary), flush=True)
    result = figures(options.seeds, rows)
    print(f"mean final {result['final_mean']:.3f}, lowest {result['final_min']:.3f}, goal met: {result['is_goal_met']}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n")
        options.out.with_suffix(".svg").write_text(curves_svg(options.seeds, rows))
    return 0 if result["is_goal_met"] else 1


def run_seed(seed: int, steps: int | None, folder: Path) -> dict[str, Any]:
    """One quickstart, as a person would start it."""
    command = [sys.executable, "-m", "mettle.cli", "quickstart", "--json", "--no-browser"]
    command += ["--seed", str(seed), "--dir", str(folder), *(["--steps", str(steps)] if steps else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def line_of(seed: int, summary: dict[str, Any]) -> str:
    """One row of the table."""
    baseline, final = summary["baseline"], summary["final"]
    return (
        f"seed {seed:>4}  {baseline['mean']:.3f} -> {final['mean']:.3f} [{final['ci'][0]:.3f}, {final['ci'][1]:.3f}]"
        f"  {summary['wall_s']:6.1f} s  {summary['cpu_s']:6.1f} CPU-s  {summary['peak_memory_bytes'] / 2**20:6.0f} MiB"
        f"  staleness {summary['staleness_mean']:.2f}/{summary['staleness_max']}"
        f"  canary {summary['canary_mean_abs_diff']:.1e}"
    )


def figures(seeds: list[int], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept: the rows, and whether the goal is met."""
    finals = [row["final"]["mean"] for row in rows]
    walls, peaks = [row["wall_s"] for row in rows], [row["peak_memory_bytes"] for row in rows]
    return {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "seeds": seeds,
        "n": len(rows),
        "final_mean": statistics.fmean(finals),
        "final_min": min(finals),
        "wall_s": {"min": min(walls), "median": statistics.median(walls), "max": max(walls)},
        "peak_memory_bytes_max": max(peaks),
        "is_goal_met": min(finals) >= 0.85
        and statistics.fmean(finals) >= 0.9
        and max(walls) < 180
        and max(peaks) < 2e9,
        "runs": [{key: value for key, value in row.items() if key != "run_dir"} for row in rows],
    }


def curves_svg(seeds: list[int], rows: list[dict[str, Any]]) -> str:
    """Training reward by step, one line a seed."""
    longest = max(len(row["train_reward"]) for row in rows)
    lines = [
        Line(f"seed {seed}: {row['final']['mean']:.3f}", list(enumerate(row["train_reward"], 1)))
        for seed, row in zip(seeds, rows, strict=True)
    ]
    return charts_svg(
        [Panel("", f"training reward by step (1 to {longest})", lines, highest=1.0, height=360, labels_px=110)], 720
    )


if __name__ == "__main__":
    sys.exit(main())
