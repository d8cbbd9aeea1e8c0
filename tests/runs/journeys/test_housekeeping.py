"""What a step costs beside its work is measured by the processes' own code: `benchmarks/housekeeping.py` plays a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.trainer.config import CheckpointConfig

PLAYED = Path(__file__).resolve().parents[3] / "benchmarks" / "housekeeping.py"


def housekeeping() -> Any:
    spec = importlib.util.spec_from_file_location("housekeeping", PLAYED)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_played_run_commits_every_step_and_keeps_no_more_than_it_needs(tmp_path: Path) -> None:
    kept = CheckpointConfig(interval=2, keep_last=1)
    steps = 20
    found = housekeeping().play(tmp_path / "run", steps, kept)
    assert {"draw, score", "ship", "find the batch", "commit, retain", "checkpoint", "terminal"} <= set(found[steps])
    run_dir = RunDir(tmp_path / "run")
    ledger = Ledger(run_dir.ledger, is_read_only=True)
    assert len(ledger.versions()) == steps
    assert {state: number for state, number in ledger.task_counts().items() if number} == {"trained": 2 * steps}
    ledger.close()
    assert len(list(run_dir.checkpoints.glob("step-*"))) < 4
    assert len(list(run_dir.batches.iterdir())) < steps
    assert len(list(run_dir.weights.glob("v*"))) < steps
