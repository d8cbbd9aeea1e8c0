"""Does the quickstart learn on any seed, how fast, and in how much memory?

Runs `mettle quickstart` once a seed, one after the other, and prints a table; `--out` also keeps it as JSON beside an
SVG of the curves, after each seed, and a second call goes on where the first was stopped. Each figure comes from the
run's own summary. The seeds were drawn after the recipe was frozen. The thresholds are the project's goal: at least
0.93 on each seed and 0.97 on average, under 180 s and 2 GB.
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

SEEDS = (
    10417, 11576, 22447, 22533, 23735, 25749, 39714, 45735, 56067, 56506,
    59306, 61001, 62809, 63757, 64408, 65200, 77676, 78832, 82326, 99386,
)  # fmt: skip
LOWEST, MEAN, WALL_S, MEMORY_BYTES = 0.93, 0.97, 180, 2e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--keep", type=Path, help="folder to keep the run directories in")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    options = parser.parse_args()
    rows = {row["seed"]: row for row in done_before(options.out)}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in options.seeds:
            if seed not in rows:
                summary = run_seed(seed, options.steps, (options.keep or Path(scratch)) / f"seed-{seed}")
                summary["train_reward"] = [round(reward, 4) for reward in summary["train_reward"]]
                rows[seed] = {"seed": seed, **summary}
            print(line_of(rows[seed]), flush=True)
            if options.out is not None:
                write(options.out, list(rows.values()))
    result = figures([rows[seed] for seed in options.seeds])
    print(f"mean final {result['final_mean']:.3f}, lowest {result['final_min']:.3f}, goal met: {result['is_goal_met']}")
    return 0 if result["is_goal_met"] else 1


def done_before(path: Path | None) -> list[dict[str, Any]]:
    """The runs that an earlier call has kept."""
    if path is None or not path.exists():
        return []
    return [row for row in json.loads(path.read_text())["runs"] if "seed" in row]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """The figures as JSON and the curves as SVG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures(rows), separators=(",", ":")) + "\n")
    path.with_suffix(".svg").write_text(curves_svg(rows))


def run_seed(seed: int, steps: int | None, folder: Path) -> dict[str, Any]:
    """One quickstart, as a person would start it."""
    command = [sys.executable, "-m", "mettle.cli", "quickstart", "--json", "--no-browser"]
    command += ["--seed", str(seed), "--dir", str(folder), *(["--steps", str(steps)] if steps else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def line_of(summary: dict[str, Any]) -> str:
    """One row of the table."""
    baseline, final = summary["baseline"], summary["final"]
    return (
        f"seed {summary['seed']:>5}  {baseline['mean']:.3f} -> {final['mean']:.3f}"
        f" [{final['ci'][0]:.3f}, {final['ci'][1]:.3f}]"
        f"  {summary['wall_s']:6.1f} s  {summary['cpu_s']:6.1f} CPU-s  {summary['peak_memory_bytes'] / 2**20:6.0f} MiB"
        f"  staleness {summary['staleness_mean']:.2f}/{summary['staleness_max']}"
        f"  canary {summary['canary_mean_abs_diff']:.1e}"
    )


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept: the rows, and whether the goal is met."""
    finals = [row["final"]["mean"] for row in rows]
    walls, peaks = [row["wall_s"] for row in rows], [row["peak_memory_bytes"] for row in rows]
    return {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "seeds": [row["seed"] for row in rows],
        "n": len(rows),
        "final_mean": statistics.fmean(finals),
        "final_min": min(finals),
        "wall_s": {"min": min(walls), "median": statistics.median(walls), "max": max(walls)},
        "peak_memory_bytes_max": max(peaks),
        "is_goal_met": min(finals) >= LOWEST
        and statistics.fmean(finals) >= MEAN
        and max(walls) < WALL_S
        and max(peaks) < MEMORY_BYTES,
        "runs": [{key: value for key, value in row.items() if key != "run_dir"} for row in rows],
    }


def curves_svg(rows: list[dict[str, Any]]) -> str:
    """Training reward by step, one line a seed."""
    longest = max(len(row["train_reward"]) for row in rows)
    lines = [
        Line(f"seed {row['seed']}: {row['final']['mean']:.3f}", list(enumerate(row["train_reward"], 1))) for row in rows
    ]
    return charts_svg(
        [Panel("", f"training reward by step (1 to {longest})", lines, highest=1.0, height=360, labels_px=110)], 720
    )


if __name__ == "__main__":
    sys.exit(main())
