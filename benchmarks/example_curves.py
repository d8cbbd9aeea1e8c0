"""What the example configs come to: the curves of runs that are there, as one picture and one table.

    python benchmarks/example_curves.py runs/teacher runs/student --to docs/assets/examples.svg

Each run is a panel: training reward by step (thin; the mean over all rollouts gathered for a step), held-out reward by
version with its 95 % interval. Nothing is run here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from line_charts import Line, Panel, charts_svg

from mettle.storage.evals import EvalRow, read_evals
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, help="where to write the picture")
    options = parser.parse_args()
    panels = []
    for path in options.runs:
        ledger = Ledger(RunDir.existing(path).ledger, is_read_only=True)
        try:
            evals = [row for row in read_evals(ledger.database) if row.is_finished and row.mean is not None]
            reward = [(float(step), value) for step, value in ledger.journal.metric("reward/mean")]
        finally:
            ledger.close()
        print(line_of(path.name, evals))
        panels.append(panel_of(path.name, evals, reward))
    if options.to is not None:
        options.to.write_text(charts_svg(panels))


def line_of(name: str, evals: list[EvalRow]) -> str:
    """The held-out reward from the first version to the last."""
    told = (f"v{row.step} {row.mean:.3f} [{row.ci_low:.3f}, {row.ci_high:.3f}]" for row in by_version(evals))
    return f"{name}: {', '.join(told)}"


def panel_of(name: str, evals: list[EvalRow], reward: list[tuple[float, float]]) -> Panel:
    """Training reward, and the held-out mean between the ends of its interval."""
    rows = by_version(evals)
    # There along the lower ends and back along the upper ones: one line around the band.
    low = [(row.step, float(row.ci_low or 0)) for row in rows]
    high = [(row.step, float(row.ci_high or 0)) for row in rows]
    band = Line("its 95 % interval", [*low, *reversed(high)], is_faint=True)
    held_out = Line("held-out reward", [(row.step, float(row.mean or 0)) for row in rows])
    return Panel(name, "step", [held_out, band, Line("training reward", reward, is_faint=True)], highest=1.0)


def by_version(evals: list[EvalRow]) -> list[EvalRow]:
    """One evaluation a version, in order."""
    return sorted({row.step: row for row in evals}.values(), key=lambda row: row.step)


if __name__ == "__main__":
    main()
