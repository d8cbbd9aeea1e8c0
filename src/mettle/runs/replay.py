"""`mettle rl replay`: which checkpoint, which batches, which settings; the repeating is in `mettle.trainer.replay`.

A batch that is gone from the disk or damaged is made again from the shards, so that every step of a run whose shards
are there can be repeated. Invariant: the run is only read, so that it may go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mettle.config import load_config
from mettle.errors import StorageError, UserError
from mettle.orchestrator.config import OrchestratorConfig
from mettle.orchestrator.rebuilding import rebuild_batch
from mettle.records.tokens import Batch
from mettle.storage.batches import read_batch
from mettle.storage.checkpoints import damage_of
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.trainer.config import TrainerConfig, read_config

if TYPE_CHECKING:
    from mettle.trainer.replay import Replay, Start

PREFIX = "--trainer."


def replay(path: Path, step: int, *, loss: str | None, lr: float | None, overrides: Sequence[str] = ()) -> Replay:
    """Repeat `step` of the run at `path`; with a loss, a peak learning rate or other settings also with those.

    Raises: UserError for a step that was not trained, or a setting that there is not.
    """
    run_dir = RunDir.existing(path)
    config = read_config(run_dir.config("trainer"), TrainerConfig)
    other = other_settings(config, loss, lr, overrides)
    ledger = Ledger(run_dir.ledger, is_read_only=True)
    try:
        last = max((row.step for row in ledger.batches() if row.trainings), default=0)
        if not 1 <= step <= last:
            said = f"its trained steps are 1 to {last}" if last else "it has trained no step yet"
            raise UserError(f"run {run_dir.name} has no trained step {step}: {said}")
        from mettle.trainer.replay import replay_step

        return replay_step(
            config, start_before(run_dir, step), step, model=run_dir.model, batch_of=_batches(run_dir, ledger),
            recorded=lambda number: _recorded(ledger, number), other=other,
        )  # fmt: skip
    finally:
        ledger.close()


def other_settings(
    config: TrainerConfig, loss: str | None, lr: float | None, overrides: Sequence[str]
) -> TrainerConfig | None:
    """The run's settings with others in their place; None when none are given."""
    if loss is None and lr is None and not overrides:
        return None
    settings = config.model_dump(mode="json")
    if loss is not None:
        settings["loss"] = {"type": loss}
    words = [f"--{word.removeprefix(PREFIX)}" if word.startswith(PREFIX) else word for word in overrides]
    words += ["--optim.lr", repr(lr)] if lr is not None else []
    return load_config(TrainerConfig, overrides=words, defaults=settings, defaults_name="the run").config


def start_before(run_dir: RunDir, step: int) -> Start:
    """The newest complete checkpoint before `step`, or the initial policy."""
    from mettle.trainer.replay import Start

    numbers = [folder.name.removeprefix("step-") for folder in run_dir.checkpoints.glob("step-*")]
    for number in sorted((int(n) for n in numbers if n.isdigit() and int(n) < step), reverse=True):
        folder = run_dir.checkpoints / f"step-{number}"
        if damage_of(folder) is None:
            return Start(number, folder / "trainer")
    return Start(0, None)


def report(replay: Replay) -> dict[str, Any]:
    """A replay as plain values."""
    same, other = replay.same, replay.other
    return {
        "step": replay.step,
        "from_step": replay.start.step,
        "is_same": replay.step not in replay.differing,
        "differing_steps": list(replay.differing),
        "weights_digest": same.digest,
        "metrics": same.metrics,
        "other": None if other is None else {"weights_digest": other.digest, "metrics": other.metrics},
        "distance": replay.distance,
    }


def _batches(run_dir: RunDir, ledger: Ledger) -> Callable[[int], Batch]:
    config = read_config(run_dir.config("orchestrator"), OrchestratorConfig)

    def batch_of(step: int) -> Batch:
        row = ledger.batch(step)
        assert row is not None, "a trained step has a batch"
        try:
            return read_batch(run_dir.batches, row.digest)
        except StorageError:
            return rebuild_batch(run_dir, ledger, config, step)

    return batch_of


def _recorded(ledger: Ledger, step: int) -> str | None:
    row = ledger.batch(step)
    return None if row is None else row.weights_digest
