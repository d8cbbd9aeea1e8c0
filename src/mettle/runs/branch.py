"""A run that shares the first steps of another: the same weights, optimiser and tasks up to a checkpoint, then its own.

    RUN        v0 --- v1 --- ... --- v40 --- v41 --- ...        goes on, or has ended
                                      |
    RUN-v40                           +----- v41' --- ...       from the checkpoint of step 40, other settings

Parts: `branch` (makes the run, starts nothing), `settings_of` (what somebody set in a run's config, as a layer to lay
others over). A branch without other settings repeats its parent where that can be repeated at all (`max_staleness` 0).
Invariants: the parent is only read, and may be running; the ledger comes last, by a rename, and without it there is no
run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from mettle.config import load_config
from mettle.config.layers import DEFAULT
from mettle.config.loader import DERIVED
from mettle.errors import UserError
from mettle.orchestrator.accounts import ALGORITHM_STATE
from mettle.runs.config import RunConfig
from mettle.runs.create import check_run, new_ledger, write_configs, write_facts
from mettle.runs.stored import read_run_config
from mettle.storage.batches import batch_path
from mettle.storage.checkpoints import damage_of, newest_checkpoint
from mettle.storage.files import link_or_copy, storage_errors
from mettle.storage.ledger import Ledger
from mettle.storage.ledger_copy import copy_ledger
from mettle.storage.rewind import rewind
from mettle.storage.run_dir import RunDir
from mettle.storage.shards import take_shards
from mettle.storage.trained_logprobs import logprobs_path

FIXED = ("seed", "model", "warm_up", "orchestrator.envs")
"""What the first steps were made with: the policy's shape, the order of the tasks and where they come from."""
OPTIMISER = "trainer.optim.type"
"""What a checkpoint's moments are of; before the first step there are none."""
ALGORITHM = "orchestrator.algorithm"


def branch(parent: RunDir, step: int | None, overrides: Sequence[str], path: Path | None, folder: Path) -> RunDir:
    """Make a run from the checkpoint of `step` of another (None: its newest; 0: its initial policy), at `path` or in
    `folder`, with its settings and `overrides` over them.

    Raises: UserError when there is no such checkpoint, when an override is of what the first steps were made with, or
    when no step would be left to train.
    """
    step = _chosen(parent, step)
    config = read_run_config(parent)
    if config.deployment.share is not None:
        raise UserError(f"run {parent.name} is of a share, whose runs have one trainer together; it cannot be branched")
    name = f"{parent.name}-v{step}"
    path = path or _free(folder, name)
    loaded = load_config(
        RunConfig,
        overrides=["--name", path.name, *overrides],
        defaults=settings_of(parent, config),
        defaults_name=f"run {parent.name}",
    )
    _check(parent, step, config, loaded.config)
    check_run(loaded, path)
    if path.exists():
        raise UserError(f"{path} is there already; name a folder that is not")
    made = RunDir(path.resolve())
    with storage_errors(made.path, "writing"):
        made.path.mkdir(parents=True)
        try:
            _take_files(parent, made, step)
            write_configs(made, loaded)
            _take_ledger(parent, made, step, loaded.config)
        except BaseException:
            shutil.rmtree(made.path, ignore_errors=True)
            raise
    return made


def settings_of(run_dir: RunDir, config: RunConfig) -> dict[str, Any]:
    """What somebody set in a run's config, without what follows from it and without defaults."""
    sources: dict[str, str] = json.loads((run_dir.path / "sources.json").read_text())
    given = [key for key, source in sources.items() if source not in (DEFAULT, DERIVED)]

    def chosen(value: Any, key: str) -> Any:
        inner = [name for name in given if name == key or name.startswith(f"{key}.")]
        if isinstance(value, Mapping) and inner and inner != [key]:
            found = {name: chosen(item, f"{key}.{name}") for name, item in value.items()}
            return {name: item for name, item in found.items() if item is not None}
        return value if inner else None

    dump = config.model_dump(mode="json")
    found = {name: chosen(value, name) for name, value in dump.items() if name != "name"}
    return {name: value for name, value in found.items() if value is not None}


def _chosen(parent: RunDir, step: int | None) -> int:
    if step == 0:
        return 0
    found = newest_checkpoint(parent.checkpoints, at_step=step)
    if found is not None:
        return found.step
    steps = sorted(int(f.name.removeprefix("step-")) for f in parent.checkpoints.glob("step-*/"))
    kept = f"it has those of steps {', '.join(map(str, [0, *steps]))}"
    wanted = "no checkpoint yet" if step is None else f"no complete checkpoint of step {step}"
    raise UserError(f"run {parent.name} has {wanted}; {kept} (0: its initial policy; trainer.checkpoint says how many)")


def _free(folder: Path, name: str) -> Path:
    """`folder`/`name`, or with the first number that makes it new."""
    number = 1
    path = folder / name
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}"
    return path


def _check(parent: RunDir, step: int, before: RunConfig, after: RunConfig) -> None:
    if step >= after.max_steps:
        raise UserError(
            f"step {step} is the last of max_steps {after.max_steps}: give the branch more, as in"
            f" `--max_steps {2 * step}`"
        )
    for name in FIXED:
        old, new = _value(before, name), _value(after, name)
        if old != new and not (step == 0 and name == "seed"):
            raise UserError(
                f"{name} is what the first {step} steps of run {parent.name} were made with, so a branch keeps it;"
                f" for another, start a new run from the weights: `mettle rl export {parent.name} DIR`, then"
                " `--model.path DIR`"
            )
    if step > 0 and (old := _value(before, OPTIMISER)) != _value(after, OPTIMISER):
        raise UserError(
            f"{OPTIMISER} of run {parent.name} is {old!r}, and a branch goes on with its moments: leave it, branch from"
            " --step 0, or start a new run from the weights (`mettle rl export`)"
        )
    if step == 0 and not (parent.model / "config.json").exists():
        raise UserError(f"run {parent.name} has not made its initial policy yet")


def _value(config: RunConfig, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    if name == "warm_up":  # which has the run's seed, of which there is a word of its own
        return value.model_dump(exclude={"sft": {"seed"}})
    return value


def _take_files(parent: RunDir, made: RunDir, step: int) -> None:
    """Files that are never written to again are shared with the parent where the disk allows it."""
    taken = [parent.model, parent.path / "sft", parent.version(step)]
    if step > 0:
        taken.append(parent.checkpoints / f"step-{step}")
    for source in taken:
        target = made.path / source.relative_to(parent.path)
        if source.is_symlink():
            target.symlink_to(source.resolve(), target_is_directory=True)
        elif source.exists():
            shutil.copytree(source, target, copy_function=link_or_copy)
    if step > 0 and (damage := damage_of(made.checkpoints / f"step-{step}")) is not None:
        raise UserError(f"the checkpoint of step {step} went away meanwhile ({damage}): a newer one is there now")


def _take_ledger(parent: RunDir, made: RunDir, step: int, config: RunConfig) -> None:
    with ExitStack() as stack:
        aside = stack.enter_context(new_ledger(made))
        copy_ledger(parent.ledger, aside)
        take_shards(parent.rollouts, made.rollouts)  # after the ledger, so that all that it names is there
        ledger = stack.enter_context(closing(Ledger(aside)))
        state = rewind(ledger, step)
        if state and _value(config, ALGORITHM) == _value(read_run_config(parent), ALGORITHM):
            ledger.journal.set_fact(ALGORITHM_STATE, state["algorithm"])
        ledger.move_versions(made.weights)
        made.batches.mkdir()
        for row in ledger.batches():
            for path_of in (batch_path, logprobs_path):
                source = path_of(parent.batches, row.digest)
                if source.exists():  # of the others there are the rollouts, as in the parent
                    link_or_copy(source, path_of(made.batches, row.digest))
        write_facts(made, config, ledger)
        ledger.journal.set_fact("branched_from", {"run": str(parent.path), "step": step})
        ledger.journal.set_fact("state", "stopped")
        text = f"branched from v{step} of run {parent.name}"
        ledger.journal.event("supervisor", "branched", text, run=str(parent.path), step=step)
