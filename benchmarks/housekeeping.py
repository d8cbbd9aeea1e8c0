"""What a step costs beside its work, early and late in a long run: `python benchmarks/housekeeping.py [--steps 50000]`.

Everything that the processes do once a step or once a checkpoint is done here by their own code against a real ledger
and real folders: tasks drawn, dispatched and scored, a batch written and shipped, a version published, committed and
acknowledged, old versions, checkpoints and spent batches removed, the terminal's look at the journal. Only the work is
left out: rollouts are empty, weights are a few bytes, checkpoints hold no state. `--folder /dev/shm` leaves out the
disk as well: 50,000 steps then take minutes. Invariant: a step in the last window takes no more than twice the
processor time of one in the first, all of it counted, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mettle.orchestrator.batcher import ReadyGroup
from mettle.orchestrator.shipping import assemble
from mettle.processes.beats import Heartbeat
from mettle.records.tasks import GroupRecord, RolloutRecord, TaskDraw, Turn
from mettle.records.tokens import Sample, filled
from mettle.runs.progress import RewardCurve, read_snapshot
from mettle.storage.batches import write_batch
from mettle.storage.checkpoints import write_checkpoint
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.shards import ShardWriter
from mettle.storage.weights import publish_weights
from mettle.trainer.config import CheckpointConfig, TrainerConfig
from mettle.trainer.keeper import CheckpointKeeper
from mettle.trainer.loop import StopFlag, Trainer
from mettle.trainer.world import World

MARKS = (1000, 10_000, 20_000, 50_000)
WINDOW = 1000
GROUPS, NUM_METRICS = 2, 40
CPU = "CPU-ms a step"


def write_number(path: Path, number: int) -> None:
    """Weights, or a state, of nothing."""
    path.write_text(str(number))


class EmptyKeeper(CheckpointKeeper):
    """The trainer's own checkpoints, of a state of nothing, written while it waits."""

    def _is_beside(self) -> bool:
        return False

    def _write(self, step: int) -> None:
        write_checkpoint(
            self._run_dir.checkpoints,
            step,
            lambda folder: write_number(folder / "state", step),
            self._orchestrator_state(step),
        )
        self._clean_up(step)


class Housekeeper(Trainer):
    """The trainer's own accounts and retention, without a policy."""

    def __init__(self, run_dir: RunDir, config: TrainerConfig, ledger: Ledger) -> None:
        self.run_dir, self.config, self._ledger = run_dir, config, ledger
        self.world = World(0, 1, torch.device("cpu"))
        self.heart, self._stop = Heartbeat(name="trainer"), StopFlag()
        self._pending = None
        no_learner: Any = None  # an empty keeper saves the state of none
        self.keeper = self._keeper = EmptyKeeper(run_dir, config.checkpoint, no_learner, ledger, self.settle)

    def commit(self, step: int, draw_ids: list[int]) -> None:
        """What follows a step's training."""
        weights = publish_weights(self.run_dir.weights, step, lambda path: write_number(path, step))
        metrics = {f"trainer/{n}": float(step) for n in range(NUM_METRICS // 2)}
        shown = dict.fromkeys(
            ("loss/total", "mismatch_kl/mean", "optim/grad_norm", "time/step_s", "optim/skipped"), 0.0
        )
        self._commit(step, weights, metrics | shown, draw_ids, None)
        self.ledger.acknowledge(weights, None, 1.0)


class Stopwatch:
    """Seconds by part, of the steps since the last look, and the processor time of all of them."""

    def __init__(self) -> None:
        self.parts: defaultdict[str, list[float]] = defaultdict(list)
        self._step, self._cpu_s = 0, time.process_time()

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Add the time of the block to `part`."""
        started = time.perf_counter()
        yield
        self.parts[part].append(time.perf_counter() - started)

    def look(self, step: int) -> dict[str, float]:
        """After `step`: median milliseconds of each part, and processor milliseconds a step, all of it. Then forget."""
        found = {part: statistics.median(values) * 1000 for part, values in self.parts.items()}
        found[CPU] = (time.process_time() - self._cpu_s) / (step - self._step) * 1000
        self.parts.clear()
        self._step, self._cpu_s = step, time.process_time()
        return found


def one_group(draw: TaskDraw) -> tuple[GroupRecord, ReadyGroup]:
    """A group of two rollouts of two tokens."""
    ids = np.array([1, 2], np.int32)
    turn = Turn(0, ids, ids, np.zeros(2, np.float32), np.zeros(2, np.int32))
    rollouts = tuple(RolloutRecord(f"t{draw.draw_id}-{n}", float(n), {}, [], (turn,)) for n in range(2))
    sample = Sample(**filled(2, {"token_ids": ids, "loss_mask": np.ones(2, bool), "versions": np.zeros(2, np.int32)}))
    return GroupRecord(draw, 0, rollouts), ReadyGroup.of(draw.draw_id, [sample])


def play(folder: Path, steps: int, checkpoint: CheckpointConfig | None = None) -> dict[int, dict[str, float]]:
    """A run of `steps`; what each part took over the window before each mark."""
    run_dir = RunDir(folder)
    ledger, shards, watch = Ledger(run_dir.ledger), ShardWriter(run_dir.rollouts), Stopwatch()
    trainer = Housekeeper(run_dir, TrainerConfig(max_steps=steps, checkpoint=checkpoint or CheckpointConfig()), ledger)
    found, curve = {}, RewardCurve()
    for step in range(1, steps + 1):
        with watch.time("draw, score"):
            draws = ledger.draw_tasks([("env", f"u{n}", step, n) for n in range(GROUPS)])
            ready = []
            for draw in draws:
                ledger.dispatch(draw.draw_id)
                group, samples = one_group(draw)
                ledger.record_scored(group, shards.append(group))
                ready.append(samples)
        with watch.time("ship"):
            batch = assemble(step, ready)
            digest, _ = write_batch(run_dir.batches, batch)
            ledger.ship(
                step,
                digest,
                batch.draw_ids,
                num_sequences=GROUPS,
                num_tokens=4,
                staleness=(0.0, 0),
                orchestrator_state={},
            )
            figures = {f"orchestrator/{n}": float(step) for n in range(NUM_METRICS // 2)}
            ledger.journal.record_metrics(step, {"reward/mean": 0.5, **figures})
        with watch.time("find the batch"):
            trainer.next_digest(step)
        with watch.time("commit, retain"):
            trainer.commit(step, list(batch.draw_ids))
        if step % trainer.config.checkpoint.interval == 0:
            with watch.time("checkpoint"):
                trainer.keeper.save(step)
        if step % 20 == 0:
            with watch.time("terminal"):
                read_snapshot(ledger, steps, curve=curve)
        if step in MARKS or step == steps:
            found[step] = watch.look(step) | {"run.db, MB": run_dir.ledger.stat().st_size / 1e6}
        elif any(step == mark - WINDOW for mark in (*MARKS, steps)):
            watch.look(step)
    ledger.close()
    return found


def main() -> int:
    """Play, print a table, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=MARKS[-1])
    parser.add_argument("--folder", type=Path, help="where the run is written (default: where temporary files are)")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = play(Path(folder) / "run", arguments.steps)
    parts = ("draw, score", "ship", "find the batch", "commit, retain", "checkpoint", "terminal", "run.db, MB", CPU)
    print("| after step | " + " | ".join(parts) + " |\n" + "|---:" * (len(parts) + 1) + "|")
    for step, row in found.items():
        print(f"| {step:,} | " + " | ".join(f"{row[part]:.2f}" for part in parts) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps({str(step): row for step, row in found.items()}, indent=1) + "\n")
    rows = list(found.values())
    first, last = rows[0][CPU], rows[-1][CPU]
    print(
        f"\nparts: median milliseconds of the {WINDOW:,} steps before; the last of them take {last / first:.2f} times"
    )
    print("the processor time of the first")
    return int(last > 2 * first)


if __name__ == "__main__":
    sys.exit(main())
