"""Taking up a run where it was, from the ledger alone.

Tasks that were in flight go back to pending and are rolled out again; groups that were scored are read back from their
shards, with the advantages that they were given; the curriculum goes on after the last draw. Everything is checked
before anything is changed: a configuration that does not fit the run ends as a `UserError` and touches nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from mettle.errors import UserError
from mettle.orchestrator.accounts import ALGORITHM_STATE, REJECTED
from mettle.orchestrator.admission import Admission
from mettle.orchestrator.batcher import Batcher, ReadyGroup
from mettle.orchestrator.config import CurriculumConfig
from mettle.orchestrator.curriculum import Curriculum, DifficultyPool, PastDraw, StandardSampler, TaskSampler
from mettle.orchestrator.dispatcher import Dispatcher
from mettle.orchestrator.source import TaskSource
from mettle.records.tasks import DropReason, GroupRecord, TaskState
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.shards import read_group

logger = logging.getLogger(__name__)

DATASETS = "datasets"


@dataclass(frozen=True, slots=True)
class Recovered:
    """Where the run stood. `next_step` is the first batch that has not been shipped."""

    next_step: int
    num_put_back: int
    num_ready: int


def check_fits(names: Collection[str], ledger: Ledger, source: TaskSource) -> None:
    """Raise UserError when the run's tasks are not those of the configured environments, which have these names."""
    for name in names:
        if source.num_tasks(name) < 1:
            raise UserError(f"environment {name!r} has no tasks to train on; check its arguments")
    waiting = ledger.tasks_in(TaskState.PENDING) + ledger.tasks_in(TaskState.IN_FLIGHT)
    for draw in waiting:
        if draw.env_id not in names:
            raise UserError(
                f"the run has unfinished tasks of environment {draw.env_id!r}, which the configuration does not have; "
                f"it has {', '.join(sorted(names))}. Put it back, or start a new run"
            )
    for name, size in ledger.journal.fact(DATASETS, {}).items():
        if name in names and source.num_tasks(name) != size:
            raise UserError(
                f"environment {name!r} had {size} tasks when the run began and has {source.num_tasks(name)} now; "
                "resume with the same data, or start a new run"
            )
    for draw in waiting:
        if source.uid(draw.env_id, draw.example_id) != draw.uid:
            raise UserError(
                f"task {draw.example_id} of environment {draw.env_id!r} is not the one that was drawn; "
                "resume with the same data, or start a new run"
            )


def make_curriculum(
    config_of: Callable[[str], CurriculumConfig],
    ratios: Mapping[str, float],
    ledger: Ledger,
    source: TaskSource,
    *,
    shuffle: bool,
    seed: int,
) -> Curriculum:
    """A curriculum over the environments in `ratios`, each with a config of its own, that goes on after the draws in
    the ledger."""
    samplers: dict[str, TaskSampler] = {}
    for name in ratios:
        size = source.num_tasks(name)
        past = [PastDraw(*row) for row in ledger.past_draws(name)]
        config = config_of(name)
        if config.sampler == "difficulty_pool":
            samplers[name] = DifficultyPool(name, size, past, config, seed=seed)
        else:
            samplers[name] = StandardSampler(name, size, past, seed=seed, shuffle=shuffle)
    return Curriculum(samplers, ratios, source.uid)


def recover(
    run_dir: RunDir,
    ledger: Ledger,
    *,
    names: Collection[str],
    admission: Admission,
    dispatcher: Dispatcher,
    batcher: Batcher,
    source: TaskSource,
    observe: Callable[[GroupRecord], None],
) -> Recovered:
    """Bring the state machines to where the ledger says the run is.

    `names` are the run's environments; `observe` is told each group read back.
    """
    in_flight = ledger.tasks_in(TaskState.IN_FLIGHT)
    ledger.put_back([draw.draw_id for draw in in_flight])
    dispatcher.wait(ledger.tasks_in(TaskState.PENDING))
    admission.algorithms.restore(ledger.journal.fact(ALGORITHM_STATE, {}))
    for draw_id, ref in ledger.scored_groups():
        group = read_group(run_dir.rollouts, ref)
        samples = admission.samples_of(group)
        if samples:
            batcher.add(ReadyGroup.of(draw_id, samples))
            observe(group)
        else:
            ledger.drop(draw_id, DropReason.NO_TOKENS)
    batcher.reject(ledger.journal.fact(REJECTED, 0))
    last = ledger.last_batch()
    sizes = ledger.journal.fact(DATASETS, {}) | {name: source.num_tasks(name) for name in names}
    ledger.journal.set_fact(DATASETS, sizes)
    recovered = Recovered(1 if last is None else last.step + 1, len(in_flight), batcher.num_ready)
    if last is not None or in_flight or batcher.num_ready:
        text = (
            f"resumed at step {recovered.next_step}: {recovered.num_put_back} tasks put back, "
            f"{recovered.num_ready} scored groups read back"
        )
        logger.info("%s", text)
        ledger.journal.event("orchestrator", "resumed", text)
    return recovered


def close_accounts(ledger: Ledger) -> int:
    """End of the run: every task that was neither trained nor dropped is dropped, in one transaction."""
    with ledger.database.transaction():
        ledger.put_back([draw.draw_id for draw in ledger.tasks_in(TaskState.IN_FLIGHT)])
        left = ledger.tasks_in(TaskState.PENDING) + ledger.tasks_in(TaskState.SCORED)
        for draw in left:
            ledger.drop(draw.draw_id, DropReason.RUN_ENDED)
        ledger.journal.set_fact("state", "finished")
    return len(left)
