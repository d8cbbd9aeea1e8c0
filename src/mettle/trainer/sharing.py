"""`python -m mettle.trainer.sharing SHARE`: the adapters of several runs, trained on one base in one process.

Parts: `SharedTrainer`, `RunTenant` (a run's trainer among others). Each run has a `Trainer` of its own, with its
ledger, checkpoints and versions; what they share is the network. Who has a batch waiting is trained by deficit round
robin in tokens. On a CPU steps of several runs are trained side by side, as many as there are cores, each by a thread
that computes as the run's own trainer would. Invariants: a run makes the bytes here that it makes alone; what is wrong
with one ends that one and is told to its supervisor; after a kill each goes on from its own checkpoint, as it does
alone. Nobody joins, and no network is looked into, while a step runs.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mettle.errors import MettleError, ServiceError
from mettle.log import setup_logging
from mettle.processes.beats import Gauge, Heartbeat
from mettle.processes.host import usable_cores
from mettle.storage.ledger import BatchRow, Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.share_dir import Membership, ShareDir, TenantWord
from mettle.storage.weights import model_digest
from mettle.trainer.config import TrainerConfig, read_config
from mettle.trainer.loop import StopFlag, Trainer, learner_on, load_base
from mettle.trainer.process import setup_torch, stop_on_signals
from mettle.trainer.program import guarded
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
    running: Future[None] | None = None
    """The step that is being trained by a thread."""
    is_alone: bool = False
    """The step that runs may put other weights into the network for a while."""

    def train(self, digest: str) -> None:
        """Take a step, with this run's adapter in force in the network."""
        learner = self.trainer.learner
        learner.switch(learner.tenant)
        waited_s = time.perf_counter() - self.waiting_since
        try:
            self.trainer.advance(self.step + 1, digest, waited_s=waited_s)
        finally:
            learner.policy.adapters.use(None)  # the network would hold it, when the run has long gone

    def close(self) -> None:
        """Let go of the ledger, and of all memory."""
        self.trainer.ledger.close()
        self.trainer.let_go()


class SharedTrainer:
    """Trains whoever is a member of the share, until `stop`. `config` says what holds for the process as a whole."""

    def __init__(
        self,
        share: ShareDir,
        config: TrainerConfig,
        world: World,
        stop: StopFlag,
        heart: Heartbeat | None = None,
        *,
        num_at_once: int = 1,
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
        self._heart.gauge = lambda: Gauge(self._num_passes, self._is_working or bool(self._running()))
        self._chosen: str | None = None
        """Whose turn it is, from when it is decided to when its step begins."""
        is_apart = world.device.type == "cpu" and not self._policy.computes_short  # that widens the weights in place
        self._num_at_once = num_at_once if is_apart else 1
        self._threads = ThreadPoolExecutor(self._num_at_once, "step", partial(self._begin_thread, config.num_threads))

    def run(self) -> None:
        """Until told to stop; a step that has begun is finished, and what was trained since a checkpoint is saved."""
        try:
            while not self._stop.is_set:
                self._heart.tick()
                if not self.turn():
                    time.sleep(self._poll_s)
            wait(self._running().values())
            self._collect()
            self._heart.rest()
            for name in list(self.tenants):
                self._release(name)
        finally:
            self._threads.shutdown()

    def turn(self) -> bool:
        """See who came and went, then have a step taken by those whose turn it is; False when there was nothing to do.

        With one step at a time it is done on return, else `_collect` sees its end.
        """
        has_done = self._collect()
        is_due = time.monotonic() >= self._next_look
        if is_due and self._meet():
            self._next_look = time.monotonic() + LOOK_S
        elif is_due:
            return has_done  # no further step begins until they can be admitted
        return self._begin_steps() or has_done

    def _running(self) -> dict[str, Future[None]]:
        return {name: each.running for name, each in list(self.tenants.items()) if each.running is not None}

    def _begin_steps(self) -> bool:
        waiting = [name for name, tenant in self.tenants.items() if tenant.running is None]
        batches = {name: row for name in waiting if (row := self._batch_of(name)) is not None}
        has_begun = False
        while batches and len(self._running()) < self._num_at_once:
            if self._chosen not in batches:
                self._chosen = self._order.pick(
                    {name: Wish(name, max(1, row.num_tokens)) for name, row in batches.items()}
                )
            tenant = self.tenants[self._chosen]
            is_alone = tenant.trainer.wants_network_alone(tenant.step + 1)
            if self._running() and (is_alone or any(each.is_alone for each in self.tenants.values())):
                break
            tenant.is_alone = is_alone
            self._begin(tenant, batches.pop(self._chosen))
            self._chosen, has_begun = None, True
            if self._num_at_once == 1:
                break
        return has_begun

    def _begin(self, tenant: RunTenant, row: BatchRow) -> None:
        if self._num_at_once > 1:
            tenant.running = self._threads.submit(tenant.train, row.digest)
            return
        tenant.running = Future()
        with self._working():
            try:
                tenant.train(row.digest)
            except Exception as error:  # it is told by `_collect`, as that of a thread
                tenant.running.set_exception(error)
            else:
                tenant.running.set_result(None)
        self._collect()

    def _begin_thread(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._policy.adapters.separate()

    def _collect(self) -> bool:
        """See which steps have ended; True when one has."""
        ended = [(name, future) for name, future in self._running().items() if future.done()]
        for name, future in ended:
            tenant = self.tenants[name]
            tenant.running, tenant.is_alone = None, False
            error = future.exception()
            if error is None:
                tenant.step += 1
                tenant.waiting_since = time.perf_counter()
                self._say(name, "training")
            elif isinstance(error, Exception):
                self._drop(name, error)
            else:
                raise error
        return bool(ended)

    def _meet(self) -> bool:
        """Let go of who has left and admit who has come; False while somebody waits for steps to end for that."""
        members = {member.name: member for member in self.share.members()}
        running = self._running()
        left = [name for name, tenant in self.tenants.items() if members.get(name) != tenant.member]
        for name in left:
            if name not in running:
                self._release(name)
        came = [m for m in members.values() if m.name not in self.tenants and self._settled.get(m.name) != m.life]
        if running and (came or running.keys() & set(left)):
            return False
        for member in came:
            with self._working():
                self._admit(member)
        return True

    def _admit(self, member: Membership) -> None:
        ledger = None
        try:
            run_dir = RunDir.existing(member.run_dir)
            config = read_config(run_dir.config("trainer"), TrainerConfig)
            ledger = Ledger(run_dir.ledger)
            learner = learner_on(self._policy, config, self._world, base_digest=self._digest, on_progress=self._advance)
            trainer = Trainer(run_dir, config, self._world, ledger, self._stop, self._heart, learner=learner)
            step = trainer.resume()
            self._policy.adapters.use(None)
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
        SharedTrainer(share, config, world, stop, heart, num_at_once=steps_at_once(config)).run()


def steps_at_once(config: TrainerConfig) -> int:
    """One for every core that a step can have; the engine, between its steps, takes its time from all of them."""
    return max(1, usable_cores() // config.num_threads)


if __name__ == "__main__":
    sys.exit(guarded("mettle.trainer.sharing", sys.argv[1:], train_share))
