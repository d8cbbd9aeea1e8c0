"""`python -m mettle.trainer.sharing SHARE`: the adapters of several runs, trained on one base in one process.

Parts: `SharedTrainer`, `RunTenant` (a run's trainer among others). Each run has a `Trainer` of its own, with its
ledger, checkpoints and versions; what they share is the network. Who has a batch waiting is trained by deficit round
robin in tokens, a step at a time. Invariants: a run makes the bytes here that it makes alone; what is wrong with one
ends that one and is told to its supervisor; after a kill each goes on from its own checkpoint, as it does alone.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mettle.errors import MettleError, ServiceError
from mettle.log import setup_logging
from mettle.processes.beats import Gauge, Heartbeat
from mettle.storage.ledger import BatchRow, Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.share_dir import Membership, ShareDir, TenantWord
from mettle.storage.weights import model_digest
from mettle.trainer.config import TrainerConfig, read_config
from mettle.trainer.loop import StopFlag, Trainer, learner_on, load_base
from mettle.trainer.process import guarded, setup_torch, stop_on_signals
from mettle.trainer.service.fairness import DeficitRoundRobin, Wish
from mettle.trainer.world import World, join_world

logger = logging.getLogger(__name__)

QUANTUM_TOKENS = 4096
"""Credit that each run gets in a round."""
LOOK_S = 0.5
"""Between two looks for runs that came or went."""


@dataclass(slots=True)
class RunTenant:
    """A run's trainer, the step that it has trained, and since when it waits for the next batch."""

    member: Membership
    trainer: Trainer
    step: int
    waiting_since: float

    def take_turn(self) -> None:
        """The network computes with this run's adapter from now on."""
        self.trainer.learner.switch(self.trainer.learner.tenant)

    def close(self) -> None:
        """Let go of the ledger."""
        self.trainer.ledger.close()


class SharedTrainer:
    """Trains whoever is a member of the share, until `stop`. `config` says what holds for the process as a whole."""

    def __init__(
        self, share: ShareDir, config: TrainerConfig, world: World, stop: StopFlag, heart: Heartbeat | None = None
    ) -> None:
        assert world.size == 1, "a share has one trainer process"
        self.share = share
        self.tenants: dict[str, RunTenant] = {}
        self._world = world
        self._stop = stop
        self._heart = heart or Heartbeat(name="trainer")
        self._poll_s = config.wait.poll_s
        self._order = DeficitRoundRobin(QUANTUM_TOKENS)
        self._base = share.model.resolve()
        self._policy = load_base(config, self._base, world)
        self._digest = model_digest(self._base)
        self._settled: dict[str, str] = {}
        """The life of each run that is done, or has failed, and is not looked at again."""
        self._next_look = 0.0
        self._num_passes = 0
        self._is_working = False
        self._heart.gauge = lambda: Gauge(self._num_passes, self._is_working)

    def run(self) -> None:
        """Until told to stop; a step that has begun is finished, and what was trained since a checkpoint is saved."""
        while not self._stop.is_set:
            self._heart.tick()
            if not self.turn():
                time.sleep(self._poll_s)
        self._heart.rest()
        for name in list(self.tenants):
            self._release(name)

    def turn(self) -> bool:
        """See who came and went, then take one step of the run whose turn it is; False when nobody has a batch."""
        if time.monotonic() >= self._next_look:
            self._meet()
            self._next_look = time.monotonic() + LOOK_S
        batches = {name: row for name in list(self.tenants) if (row := self._batch_of(name)) is not None}
        if not batches:
            return False
        wishes = {name: Wish(name, max(1, row.num_tokens)) for name, row in batches.items()}
        name = self._order.pick(wishes)
        with self._working():
            self._train(name, batches[name])
        return True

    def _meet(self) -> None:
        members = {member.name: member for member in self.share.members()}
        for name, tenant in list(self.tenants.items()):
            if members.get(name) != tenant.member:
                self._release(name)
        for name, member in members.items():
            if name not in self.tenants and self._settled.get(name) != member.life:
                with self._working():
                    self._admit(member)

    def _admit(self, member: Membership) -> None:
        ledger = None
        try:
            run_dir = RunDir.existing(member.run_dir)
            config = read_config(run_dir.config("trainer"), TrainerConfig)
            ledger = Ledger(run_dir.ledger)
            learner = learner_on(self._policy, config, self._world, base_digest=self._digest, on_progress=self._advance)
            trainer = Trainer(run_dir, config, self._world, ledger, self._stop, self._heart, learner=learner)
            step = trainer.resume()
        except Exception as error:  # whatever is wrong with this run, the others go on
            if ledger is not None:
                ledger.close()
            self._fail(member, 0, error)
            return
        self.tenants[member.name] = RunTenant(member, trainer, step, time.perf_counter())
        self._say(member.name, "training")
        logger.info("a run has joined", extra={"run": member.name, "step": step})

    def _batch_of(self, name: str) -> BatchRow | None:
        """The batch that a run waits to be trained on. A run that is over is let go."""
        tenant = self.tenants[name]
        trainer = tenant.trainer
        try:
            trainer.settle_if_ready()
            if tenant.step >= trainer.config.max_steps:
                self._finish(name)
                return None
            return trainer.ledger.batch(tenant.step + 1)
        except Exception as error:
            self._drop(name, error)
            return None

    def _train(self, name: str, row: BatchRow) -> None:
        tenant = self.tenants[name]
        try:
            tenant.take_turn()
            waited_s = time.perf_counter() - tenant.waiting_since
            tenant.trainer.advance(tenant.step + 1, row.digest, waited_s=waited_s)
            tenant.step += 1
            tenant.waiting_since = time.perf_counter()
            self._say(name, "training")
        except Exception as error:
            self._drop(name, error)

    def _finish(self, name: str) -> None:
        tenant = self.tenants[name]
        tenant.trainer.finish(tenant.step)
        self._settled[name] = tenant.member.life
        self._say(name, "done")
        del self.tenants[name]
        tenant.close()
        logger.info("a run is done", extra={"run": name, "step": tenant.step})

    def _release(self, name: str) -> None:
        """A run has stopped, or the process is about to: keep what was trained."""
        tenant = self.tenants[name]
        try:
            tenant.trainer.finish(tenant.step)
        except Exception as error:
            self._drop(name, error)
            return
        del self.tenants[name]
        tenant.close()
        logger.info("a run has left", extra={"run": name, "step": tenant.step})

    def _drop(self, name: str, error: Exception) -> None:
        tenant = self.tenants.pop(name)
        tenant.close()
        self._fail(tenant.member, tenant.step, error)

    def _fail(self, member: Membership, step: int, error: Exception) -> None:
        self._settled[member.name] = member.life
        if isinstance(error, MettleError):
            message, code = str(error), error.exit_code
            logger.error("run %s has failed: %s", member.name, error)
        else:
            message, code = f"the trainer failed in it: {type(error).__name__}: {error}", ServiceError.exit_code
            logger.error("run %s has failed", member.name, exc_info=error)
        self.share.tell(member.name, TenantWord(member.life, "failed", step, message, code))

    def _advance(self) -> None:
        self._num_passes += 1

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Within the block passes are expected, and the loop does not come round."""
        self._heart.rest()
        self._is_working = True
        try:
            yield
        finally:
            self._is_working = False
            self._heart.tick()

    def _say(self, name: str, state: str) -> None:
        tenant = self.tenants[name]
        self.share.tell(name, TenantWord(tenant.member.life, state, tenant.step))


def train_share(run_dir: RunDir) -> None:
    """Train a share's runs until SIGTERM."""
    share = ShareDir(Path(run_dir.path))
    config = read_config(run_dir.config("trainer"), TrainerConfig)
    setup_torch(config.num_threads, config.seed)
    stop = StopFlag()
    stop_on_signals(stop)
    with join_world(config.device) as world, Heartbeat.of_run("trainer", unit="micro batches") as heart:
        setup_logging(run_dir.logs / "trainer.log", is_terminal=False)
        SharedTrainer(share, config, world, stop, heart).run()


if __name__ == "__main__":
    sys.exit(guarded("mettle.trainer.sharing", sys.argv[1:], train_share))
