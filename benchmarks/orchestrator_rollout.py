"""What does the orchestrator itself cost a rollout? CPU of its own work, with a simulated engine and environment.

    python benchmarks/orchestrator_rollout.py [--steps 20] [--json FILE]

Batches of 256 in groups of 16, eight sampled tokens at most, as in the quickstart. Counted: opening, judging, writing
and shipping groups. Not counted: the environment, the client, the engine, and asyncio.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mettle.orchestrator import loop, shipping
from mettle.orchestrator.accounts import GroupAccounts
from mettle.orchestrator.config import OrchestratorConfig
from mettle.orchestrator.groups import GroupRunner
from mettle.orchestrator.metrics import StepStats
from mettle.orchestrator.simulator import SimulatedWorld, simulate
from mettle.processes.virtual_time import run_virtually
from mettle.storage.batches import write_batch
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir

PARTS: tuple[tuple[Any, Callable[..., Any], str], ...] = (
    (GroupRunner, GroupRunner._open_groups, "open groups"),
    (GroupAccounts, GroupAccounts.settle, "judge and record groups"),
    (loop, shipping.assemble, "pack a batch"),
    (shipping, write_batch, "write a batch"),
    (Ledger, Ledger.ship, "ship a batch"),
    (StepStats, StepStats.figures, "metrics"),
)


def main() -> None:
    """Measure, print a table, and write JSON when asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    spent: defaultdict[str, float] = defaultdict(float)
    for owner, function, part in PARTS:
        setattr(owner, function.__name__, timed(function, part, spent))
    totals, parts = [], []
    for _ in range(options.repeats):
        spent.clear()
        num_rollouts = play(options.steps)
        parts.append({part: seconds / num_rollouts * 1e3 for part, seconds in spent.items()})
        totals.append(sum(parts[-1].values()))
    for part in parts[0]:
        print(f"{part:<26}{statistics.median(run[part] for run in parts):8.4f} ms a rollout")
    print(
        f"{'all':<26}{statistics.median(totals):8.4f} ms a rollout (of {options.repeats}: {min(totals):.4f} to", end=" "
    )
    print(f"{max(totals):.4f})")
    if options.json:
        result = {"machine": platform.processor() or platform.machine(), "ms_a_rollout": totals, "parts": parts}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def play(num_steps: int) -> int:
    """One simulated run; returns its number of rollouts."""
    values = {
        "max_steps": num_steps,
        "batch_size": 256,
        "group_size": 16,
        "envs": [{"id": "words"}],
        "eval": {"num_examples": 0},
    }
    world = SimulatedWorld(num_tasks=4000, equal_rate=0.05)
    with tempfile.TemporaryDirectory() as folder:
        run_virtually(simulate(Path(folder), OrchestratorConfig.model_validate(values), world))
        ledger = Ledger(RunDir(Path(folder)).ledger, is_read_only=True)
        count = int(ledger.database.value("SELECT count(*) FROM rollouts"))
        ledger.close()
    return count


def timed(function: Callable[..., Any], part: str, spent: defaultdict[str, float]) -> Callable[..., Any]:
    """`function`, with its CPU time added to `spent[part]`; of a coroutine that of its steps, without its waits."""

    def measured(*args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        try:
            made = function(*args, **kwargs)
        finally:
            spent[part] += time.process_time() - started
        return TimedSteps(made, part, spent) if inspect.iscoroutine(made) else made

    return measured


@dataclass(frozen=True)
class TimedSteps:
    """A coroutine whose steps are added up."""

    coroutine: Coroutine[Any, Any, Any]
    part: str
    spent: defaultdict[str, float]

    def __await__(self) -> Generator[Any, Any, Any]:
        step, given = self.coroutine.send, None
        while True:
            started = time.process_time()
            try:
                awaited = step(given)
            except StopIteration as end:
                return end.value
            finally:
                self.spent[self.part] += time.process_time() - started
            try:
                step, given = self.coroutine.send, (yield awaited)
            except BaseException as error:  # a cancellation, which is the coroutine's to answer
                step, given = self.coroutine.throw, error


if __name__ == "__main__":
    main()
