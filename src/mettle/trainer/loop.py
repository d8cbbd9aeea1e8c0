"""The trainer's loop: wait for batch n, train, publish v{n}, commit; from the newest complete checkpoint on.

Parts: `Trainer.resume` (state v{c}, published again), `Trainer.next_digest` (the wait), `Trainer.take_step`; `keeper`
has the checkpoints. Batches that were shipped after the checkpoint are read from disk again
after a crash; on a CPU that makes the same bytes, so each task is trained once in the lineage of the weights.
Invariant: a version is in the ledger only after its folder is visible, and a batch is deleted only when no checkpoint
that is kept would replay it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mettle.errors import StorageError, UserError
from mettle.processes.beats import Heartbeat
from mettle.records.versions import WeightVersion
from mettle.storage.batches import batch_path, read_batch
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.weights import model_digest, remove_versions_before
from mettle.trainer.adapter import Adapter
from mettle.trainer.checkpoint import load_learner, newest_complete
from mettle.trainer.config import TrainerConfig
from mettle.trainer.distillation import Distiller
from mettle.trainer.grid import Grid
from mettle.trainer.handover import PreparedVersion, prepare_version
from mettle.trainer.keeper import CheckpointKeeper
from mettle.trainer.learner import Learner, Recipe
from mettle.trainer.loading import load_policy
from mettle.trainer.logprob_writer import LogprobWriter
from mettle.trainer.memory import fit_micro_batch
from mettle.trainer.mismatch.diagnosis import MismatchFound
from mettle.trainer.mismatch.monitor import MismatchMonitor, figures
from mettle.trainer.model import Policy
from mettle.trainer.publish import canary_sequences, fixed_sequences
from mettle.trainer.tenant import Tenant
from mettle.trainer.world import World

logger = logging.getLogger(__name__)

RUN_ADAPTER = "policy"
"""The name of the one adapter of a run."""
ENDED = ("stopping", "stopped", "failed")
"""States of a run in which no further batch will come."""
SLICE_S = 60.0
"""Between two words of rank 0 to the other ranks while it waits, so that their collective does not time out."""


@dataclass(slots=True)
class StopFlag:
    """Set by a signal handler, looked at between steps."""

    is_set: bool = False


@dataclass(slots=True)
class PendingStep:
    """A step that was trained, and is committed when its version is on disk."""

    step: int
    version: PreparedVersion
    metrics: dict[str, float]
    draw_ids: Sequence[int]
    compared: MismatchFound | None


class Trainer:
    """A run's trainer on one rank. `ledger` is None on all ranks but the first; `learner` is given where its network is
    not this trainer's alone."""

    def __init__(
        self,
        run_dir: RunDir,
        config: TrainerConfig,
        world: World,
        ledger: Ledger | None,
        stop: StopFlag,
        heart: Heartbeat | None = None,
        *,
        learner: Learner | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.config = config
        self.world = world
        self._ledger = ledger
        self._stop = stop
        self.heart = heart or Heartbeat(name="trainer")
        self.learner = learner or make_learner(
            config, config.model or run_dir.model, world, on_progress=self.heart.advance
        )
        self._monitor = MismatchMonitor(config.mismatch, self.learner, run_dir.weights, seed=config.seed)
        self.learner.before_step = self.settle
        self._pending: PendingStep | None = None
        self._logprobs = LogprobWriter(run_dir.batches) if world.is_main else None
        self._keeper = CheckpointKeeper(run_dir, config.checkpoint, self.learner, ledger, self.settle)
        if config.compile:
            body: Any = self.policy.network.base_model
            body.compile(dynamic=True)

    @property
    def policy(self) -> Policy:
        return self.learner.policy

    @property
    def ledger(self) -> Ledger:
        assert self._ledger is not None, "only rank 0 has the ledger"
        return self._ledger

    def run(self) -> int:
        """Train until `max_steps`, the end of the run, or a request to stop; returns the last step trained."""
        step = self.resume()
        self._keeper.prepare()
        while step < self.config.max_steps:
            started = time.perf_counter()
            digest = self.next_digest(step + 1)
            if digest is None:
                break
            step += 1
            self.advance(step, digest, waited_s=time.perf_counter() - started)
        self.finish(step)
        return step

    def advance(self, step: int, digest: str, *, waited_s: float) -> None:
        """Take a step, and save the state where it is time."""
        self.take_step(step, digest, waited_s=waited_s)
        if step % self.config.checkpoint.interval == 0:
            self._keeper.save(step)
        elif self._keeper.ready():
            self._keeper.settle()

    def wants_network_alone(self, step: int) -> bool:
        """Whether step `step` may put other weights into the network for a while."""
        return self._monitor.is_due(step)

    def finish(self, step: int) -> None:
        """No further step is taken for now: keep what the last checkpoint lacks."""
        self.settle()
        if step > self._keeper.step:
            self._keeper.save(step)
        self._keeper.settle()
        if self._logprobs is not None:
            self._logprobs.settle()

    def let_go(self) -> None:
        """Part from what refers back to it, so that its memory is free as soon as nobody else knows it."""
        self.learner.before_step = lambda: None
        self._keeper.let_go()

    def resume(self) -> int:
        """Take up the newest complete checkpoint, or v0, and publish that version; returns its step."""
        found: tuple[int, Path | None] | None = self._find_start() if self.world.is_main else None
        step, folder = self.world.share(found)
        if folder is not None:
            saved = load_learner(folder, self.learner)
            assert saved == step, f"the checkpoint of step {step} holds the state of step {saved}"
        self._keeper.step = step
        sequences = fixed_sequences(self.policy.vocab_size, self.config.canary_sequences)
        prepared = prepare_version(
            self.run_dir.weights, step, self.learner, sequences, served_as=self.run_dir.served_as
        )
        self.heart.advance()
        if prepared is not None:
            weights = prepared.settle()
            self.ledger.publish(weights)
            logger.info("trainer is at its start", extra={"version": step, "digest": weights.digest[:12]})
        return step

    def next_digest(self, step: int) -> str | None:
        """The digest of the batch of `step` as soon as it is shipped; None when the run is to end instead."""
        while True:
            found = self._wait_for_batch(step) if self.world.is_main else None
            is_over, digest = self.world.share(found)
            if is_over or digest is not None:
                return digest

    def take_step(self, step: int, digest: str, *, waited_s: float) -> None:
        """Train on a batch, publish the version that it made, and commit."""
        batch = read_batch(self.run_dir.batches, digest)
        if batch.step != step:
            raise StorageError(f"the batch of step {step} says that it is of step {batch.step}")
        if self._monitor.is_due(step):
            self.settle()  # it reads the published versions, and puts older weights into the network for a while
        compared = self._monitor.look(step, batch)
        writer = self._logprobs
        metrics = self.learner.train(
            batch, step, keep=None if writer is None else functools.partial(writer.write, digest, batch)
        )
        if compared is not None:
            metrics |= figures(compared)
        started = time.perf_counter()
        sequences = canary_sequences(batch, self.config.canary_sequences)
        prepared = prepare_version(
            self.run_dir.weights, step, self.learner, sequences, served_as=self.run_dir.served_as
        )
        if prepared is None:
            return
        metrics |= {"time/publish_s": time.perf_counter() - started, "time/wait_for_batch_s": waited_s}
        assert self._pending is None, "the optimiser step has settled the version before"
        self._pending = PendingStep(step, prepared, metrics, batch.draw_ids, compared)
        if not prepared.is_beside:
            self.settle()

    def settle(self) -> None:
        """Wait until the version of the newest step is on disk, and commit the step."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        started = time.perf_counter()
        weights = pending.version.settle()
        pending.metrics["time/publish_s"] += time.perf_counter() - started
        self._commit(pending.step, weights, pending.metrics, pending.draw_ids, pending.compared)

    def settle_if_ready(self) -> None:
        """Commit the newest step as soon as its version is on disk: whoever waits for a batch waits for nothing else,
        and the batch may wait for the version. The same with a checkpoint that is written."""
        if self._pending is not None and self._pending.version.ready():
            self.settle()
        if self._pending is None and self._keeper.ready():
            self._keeper.settle()

    # On rank 0

    def _find_start(self) -> tuple[int, Path | None]:
        remove_leftovers(self.run_dir)
        checkpoint = newest_complete(self.run_dir.checkpoints, self._warn)
        step = checkpoint.step if checkpoint else 0
        replayed = self.ledger.batches(after=step)
        for row in replayed:
            if not batch_path(self.run_dir.batches, row.digest).exists():
                start = f"checkpoint step-{step}" if checkpoint else "the initial policy (no complete checkpoint)"
                raise StorageError(
                    f"cannot resume {self.run_dir.name}: the newest state is {start}, and the batch of step {row.step} "
                    f"that must be trained again from there is gone"
                )
        if checkpoint or replayed:
            self.ledger.journal.event(
                "trainer", "resumed", f"resumed from v{step}; {len(replayed)} batches to train from disk", step=step
            )
        return step, checkpoint.trainer if checkpoint else None

    def _wait_for_batch(self, step: int) -> tuple[bool, str | None]:
        """(is over, digest); (False, None) when the time slice has passed without either."""
        if self._stop.is_set:
            return True, None
        row = self.ledger.batch(step)
        if row is not None:
            return False, row.digest
        journal = self.ledger.journal
        deadline = time.monotonic() + (SLICE_S if self.world.size > 1 else float("inf"))
        awaits, budget_s = f"orchestrator ships step {step}", self.config.wait.batch_s
        try:
            with self.heart.waiting("trainer", "batch", "orchestrator", awaits, budget_s=budget_s):
                while time.monotonic() < deadline:
                    self.heart.tick()
                    self.settle_if_ready()
                    time.sleep(self.config.wait.poll_s)
                    row = self.ledger.batch(step)
                    if row is not None:
                        return False, row.digest
                    if self._stop.is_set or journal.fact("state") in ENDED:
                        return True, None
        finally:
            self.heart.rest()
        return False, None

    def _commit(
        self,
        step: int,
        weights: WeightVersion,
        metrics: dict[str, float],
        draw_ids: Sequence[int],
        compared: MismatchFound | None,
    ) -> None:
        with self.ledger.database.transaction():
            is_same = self.ledger.record_trained(step, weights, draw_ids)
            self.ledger.journal.record_metrics(step, metrics)
            if compared is not None:
                self._monitor.tell(self.ledger.journal, step, compared)
            if metrics["optim/skipped"]:
                self.ledger.journal.event(
                    "trainer", "step_skipped", f"step {step}: the gradient is not finite; the weights stay", step=step
                )
        if not is_same:
            self._warn(f"step {step} made other weights than the first time it was trained")
        newest_acked = self.ledger.newest_acknowledged()
        oldest_kept = min(step - self.config.keep_versions + 1, step if newest_acked is None else newest_acked)
        remove_versions_before(self.run_dir.weights, oldest_kept)
        shown = ("loss/total", "mismatch_kl/mean", "optim/grad_norm", "time/step_s")
        logger.info("trained", extra={"step": step, **{name.split("/")[-1]: metrics[name] for name in shown}})

    def _warn(self, message: str) -> None:
        logger.warning(message)
        self.ledger.journal.event("trainer", "warning", message)


def make_learner(
    config: TrainerConfig, model: Path, world: World, *, on_progress: Callable[[], None] = lambda: None
) -> Learner:
    """The learner that a trainer's config asks for, at its start.

    Raises: UserError when the model cannot be loaded, or the adapters that are asked for do not fit it.
    """
    policy = load_base(config, model, world)
    digest = "" if config.lora is None else world.share(model_digest(model) if world.is_main else None)
    return learner_on(policy, config, world, base_digest=digest, on_progress=on_progress)


def load_base(config: TrainerConfig, model: Path, world: World) -> Policy:
    """The network that a trainer's config asks for, cut among the ranks; frozen where adapters are trained."""
    policy = load_policy(
        model,
        world,
        dtype=getattr(torch, config.dtype),
        is_frozen=config.lora is not None,
        grid=grid_of(config, world),  # what cannot be is refused before any weight is read
        is_offloaded=config.cpu_offload,
    )
    policy.checkpoint_activations(config.activation_checkpointing)
    return policy


def learner_on(
    policy: Policy, config: TrainerConfig, world: World, *, base_digest: str, on_progress: Callable[[], None]
) -> Learner:
    """A learner at its start. Any number of learners of adapters may share a network."""
    lora = config.lora
    tenant = None
    if lora is not None:
        tenant = Tenant.of_adapter(RUN_ADAPTER, Adapter.create(policy.network, lora, config.seed), config.optim)
    recipe = recipe_of(config)
    # The adapter is in force while it is measured: its factors keep their inputs.
    policy.adapters.use(None if tenant is None else tenant.adapter)
    recipe = dataclasses.replace(recipe, micro_batch=fit_micro_batch(recipe.micro_batch, policy, world))
    return Learner(
        policy,
        recipe,
        world,
        tenant=tenant,
        distiller=Distiller(config.distillation, load_teacher(config, policy, world)),
        base_digest=base_digest,
        on_progress=on_progress,
    )


def grid_of(config: TrainerConfig, world: World) -> Grid:
    """How a trainer's config places its ranks.

    Raises: UserError when these ranks cannot stand so, or have nothing to offload.
    """
    if config.cpu_offload and (world.device.type != "cuda" or world.size == 1):
        what = "one rank" if world.size == 1 else "CPUs, where all is in the host's memory"
        raise UserError(f"trainer.cpu_offload is for several ranks on GPUs, and this is {what}: leave it out")
    return Grid.of(
        world,
        num_replicas=config.num_replicas,
        context_parallel=config.context_parallel,
        expert_parallel=config.expert_parallel,
    )


def load_teacher(config: TrainerConfig, policy: Policy, world: World) -> Policy | None:
    """The frozen model that the config names as teacher, whole on every rank; None where it names none.

    Raises: UserError when it cannot be loaded, or has another vocabulary than the policy.
    """
    folder = config.distillation.teacher
    if folder is None:
        return None
    teacher = load_policy(folder, world, dtype=getattr(torch, config.dtype), is_frozen=True, is_whole=True)
    if teacher.vocab_size != policy.vocab_size:
        raise UserError(
            f"the teacher in {folder} has {teacher.vocab_size} tokens, the policy {policy.vocab_size}:"
            " take a teacher with the policy's tokenizer"
        )
    return teacher.eval()


def recipe_of(config: TrainerConfig) -> Recipe:
    """What of a trainer's config its steps depend on."""
    return Recipe(config.optim, config.scheduler, config.loss.build(), config.micro_batch, config.max_steps)


def remove_leftovers(run_dir: RunDir) -> None:
    """Delete the scratch folders that a killed trainer left behind."""
    for root, pattern in ((run_dir.weights, ".v*"), (run_dir.checkpoints, ".step-*")):
        for folder in root.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)
