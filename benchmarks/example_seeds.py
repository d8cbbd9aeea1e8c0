"""Do the example configs learn, on seeds drawn after their recipes were fixed?

    python benchmarks/example_seeds.py arithmetic lora --seeds 11 12 13

Runs `configs/NAME.toml` once a seed, one after the other, keeps the figures in `benchmarks/results/example_seeds.json`
(a run that stands there is not run again), draws `docs/assets/example-seeds.svg` from that file, and prints its table.
Without names it draws and prints alone. `--take RUN...` reads runs that are there instead, each of the example that its
name begins with (`lora-12`). The worst run of an example is one of its lines, like the others. Where a metric besides
the reward says whether what was meant is learnt, it is kept and told too (`METRICS`).
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from example_curves import by_version
from line_charts import Line, Panel, charts_svg

from mettle.evals.estimator import mean_over_tasks
from mettle.runs.stored import read_run_config
from mettle.runs.summary import summarise
from mettle.storage.evals import EvalRow, read_evals
from mettle.storage.ledger import Ledger
from mettle.storage.rollouts import rollout_rows
from mettle.storage.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "example_seeds.json"
PICTURE = ROOT / "docs" / "assets" / "example-seeds.svg"
MAX_TOLD = 6
"""Runs of an example that are told one by one; of more, the mean and the worst."""
METRICS = {"tool-use": ("is_unaided",)}
"""Metrics of the held-out rollouts that are told beside the reward, by example."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", help="names of files in configs/, without .toml")
    parser.add_argument("--seeds", type=int, nargs="+", default=(11, 12, 13))
    parser.add_argument("--take", type=Path, nargs="+", default=(), metavar="RUN", help="runs that are there")
    parser.add_argument(
        "--work", type=Path, help="where runs, and the teachers of some, are kept; else a folder for now"
    )
    options = parser.parse_args()
    for path in options.take:
        keep(figures_of(path, path.name.rsplit("-", 1)[0]))
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        for example in options.examples:
            for seed in options.seeds:
                if (example, seed) not in kept():
                    keep(run_seed(example, seed, work))
    known = kept()
    PICTURE.write_text(charts_svg([panel_of(*pair) for pair in by_example(known)]))
    print("\n".join(table(known)))


def run_seed(example: str, seed: int, work: Path) -> dict[str, Any]:
    """One run, as a person would start it, who works in `work`: what it needs beforehand is made there once."""
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "configs").exists():
        (work / "configs").symlink_to(ROOT / "configs", target_is_directory=True)
    *before, last = commands_of(example)
    made = work / "made.json"
    done: list[str] = json.loads(made.read_text()) if made.exists() else []
    for command in before:
        if command not in done:
            mettle(command, work)
            done.append(command)
            made.write_text(json.dumps(done))
    folder = work / f"{example}-{seed}"
    mettle(f"{last} --seed {seed} --dir {shlex.quote(str(folder))}", work)
    return figures_of(folder, example)


def commands_of(example: str) -> list[str]:
    """What the head of its file says to type, the run itself last."""
    text = (ROOT / "configs" / f"{example}.toml").read_text()
    return re.findall(r"^#   (mettle .*)$", text, re.MULTILINE) or [f"mettle rl run configs/{example}.toml"]


def mettle(command: str, work: Path) -> None:
    """Run `mettle ...` in a folder."""
    arguments = shlex.split(command)[1:]
    subprocess.run([sys.executable, "-m", "mettle.cli", *arguments], cwd=work, check=True)


def figures_of(path: Path, example: str) -> dict[str, Any]:
    """What is kept of a run: its curves, and what it took."""
    run_dir = RunDir.existing(path)
    ledger = Ledger(run_dir.ledger, is_read_only=True)
    try:
        summary = summarise(ledger, run_dir.path)
        evals = [row for row in read_evals(ledger.database) if row.is_finished and row.mean is not None]
        evals = [row for row in evals if row.kind != "probe"]  # those of the warm-up are of training tasks
        metrics = {
            name: [metric_of(ledger, row, name) for row in by_version(evals)] for name in METRICS.get(example, ())
        }
        warm = ledger.journal.fact("warm_up")
    finally:
        ledger.close()
    if summary["state"] != "finished":
        raise SystemExit(f"{path} is {summary['state']}: only what came to its end counts")
    environments = list(dict.fromkeys(row.env_id for row in evals))
    return {
        "example": example,
        "seed": read_run_config(run_dir).seed,
        "steps": summary["steps"],
        "warm_up_steps": warm["step"] if warm else 0,
        "cpu_s": round(summary["cpu_s"]),
        "held_out": {
            name: [
                [row.step, *(round(float(value or 0), 4) for value in (row.mean, row.ci_low, row.ci_high))]
                for row in by_version([row for row in evals if row.env_id == name])
            ]
            for name in environments
        },
        **({"metrics": metrics} if metrics else {}),
        "train_reward": summary["train_reward"],
    }


def metric_of(ledger: Ledger, evaluation: EvalRow, name: str) -> list[float]:
    """Version, mean over the tasks of an evaluation, and the ends of its 95 % interval."""
    tasks: dict[Any, list[float]] = {}
    for rollout in rollout_rows(ledger.database, evaluation.eval_id):
        if name in rollout.metrics:
            tasks.setdefault(rollout.example_id, []).append(rollout.metrics[name])
    found = mean_over_tasks(list(tasks.values()))
    if found is None or found.interval is None:
        raise SystemExit(f"{evaluation.env_id} has too few rollouts with the metric {name}")
    return [evaluation.step, *(round(value, 4) for value in (found.mean, *found.interval))]


def kept() -> dict[tuple[str, int], dict[str, Any]]:
    """The runs in the file, by example and seed."""
    rows = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
    return {(row["example"], row["seed"]): row for row in rows}


def keep(row: dict[str, Any]) -> None:
    """Add a run to the file at once, so that what follows may be stopped."""
    known = kept() | {(row["example"], row["seed"]): row}
    rows = [known[key] for key in sorted(known)]
    RESULTS.write_text(json.dumps({"runs": rows}, separators=(",", ":")) + "\n")


def by_example(known: dict[tuple[str, int], dict[str, Any]]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Example, environment, and the runs of them, by seed."""
    names = sorted({(example, name) for (example, _), row in known.items() for name in row["held_out"]})
    return [
        (example, name, [row for (its, _), row in sorted(known.items()) if its == example]) for example, name in names
    ]


def panel_of(example: str, name: str, rows: list[dict[str, Any]]) -> Panel:
    """Held-out reward by version, a line a seed, of many only best and worst named; the training rewards, thin."""
    ends = {row["seed"]: row["held_out"][name][-1][1] for row in rows}
    told = set(ends) if len(ends) <= MAX_TOLD else {min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)}
    held_out = [
        Line(
            f"seed {row['seed']}: {ends[row['seed']]:.3f}" if row["seed"] in told else "",
            [point[:2] for point in row["held_out"][name]],
        )
        for row in sorted(rows, key=lambda row: row["seed"] not in told)  # labels stand beside the first lines
    ]
    training = []
    if len(rows[0]["held_out"]) == 1:  # that of several environments is of all of them together
        training = [Line("", list(enumerate(row["train_reward"], 1)), is_faint=True) for row in rows]
    title = example if len(rows[0]["held_out"]) == 1 else f"{example}: {name}"
    highest = max((point[1] for line in (*held_out, *training) for point in line.points), default=1.0)
    return Panel(title, "step", [*held_out, *training], highest=max(1.0, highest), height=180)


def table(known: dict[tuple[str, int], dict[str, Any]]) -> list[str]:
    """A row an example: every seed's first and last held-out reward, the last with its interval."""
    lines = ["| config | steps | CPU-seconds | held-out reward, seed by seed |", "|---|---|---|---|"]
    for example, name, rows in by_example(known):
        told = [f"{row['seed']}: {_told(row['held_out'][name])}" for row in rows]
        if len(rows) > MAX_TOLD:
            told = _spread(rows, name)
        shown = f"`{example}.toml`" + (f", `{name}`" if len(rows[0]["held_out"]) > 1 else "")
        costs = sorted(row["cpu_s"] for row in rows)
        lines.append(f"| {shown} | {rows[0]['steps']} | {costs[0]} to {costs[-1]} | {'; '.join(told)} |")
        for metric in METRICS.get(example, ()):
            told = [f"{row['seed']}: {_told(row['metrics'][metric])}" for row in rows]
            lines.append(f"| {shown}, metric `{metric}` | | | {'; '.join(told)} |")
    return lines


def _spread(rows: list[dict[str, Any]], name: str) -> list[str]:
    ends = sorted((row["held_out"][name][-1][1], row["seed"]) for row in rows)
    first = [row["held_out"][name][0][1] for row in rows]
    mean, median = statistics.mean(end for end, _ in ends), statistics.median(end for end, _ in ends)
    worst = [f"{seed}: {end:.2f}" for end, seed in ends[:3]]
    return [
        f"{len(rows)} seeds ({min(seed for _, seed in ends)} to {max(seed for _, seed in ends)}): {min(first):.2f} -"
        f" {max(first):.2f} to {mean:.2f} in the mean, median {median:.2f}, best {ends[-1][0]:.2f}",
        f"worst {', '.join(worst)}",
    ]


def _told(points: list[list[float]]) -> str:
    (_, first, _, _), (_, last, low, high) = points[0], points[-1]
    return f"{first:.2f} to {last:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
