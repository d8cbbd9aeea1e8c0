"""A share on one machine: its trainer, its engine and its page, and a supervisor for each of the runs it started.

Parts: `drive_share`, `MemberProcess`, `ShareOutcome`. Runs may join from elsewhere (`deployment.share`); the share ends
when those that it started have ended and nobody else is a member. Invariants: a run that fails or is stopped leaves the
others alone, and one whose supervisor is killed goes on; when `drive_share` returns, no process of the share is left.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mettle.errors import ProviderError, ServiceError, UserError
from mettle.inference.client import ServerClient
from mettle.log import setup_logging
from mettle.processes.managed import ManagedProcess, ProcessSpec
from mettle.runs.adapter_watch import FACT, AdapterWatch
from mettle.runs.config import RunConfig
from mettle.runs.costs import settle, settle_last
from mettle.runs.devices import check_devices
from mettle.runs.keys import run_keys
from mettle.runs.launch import is_finished
from mettle.runs.launcher import IMPORTS, IMPORTS_OF_RUNS, MEMBER, LocalLauncher
from mettle.runs.lock import RunLock
from mettle.runs.ports import free_port, is_port_free
from mettle.runs.stored import read_run_config
from mettle.runs.supervisor import StopSignals, Supervisor
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.share_dir import Membership, ShareDir

logger = logging.getLogger(__name__)

STOP_GRACE_S = 60.0
MAX_DEATHS = 8
RESTART_PAUSE_S = 1.0
STOPPED = 130


@dataclass(frozen=True, slots=True)
class ShareOutcome:
    """How the runs of a share ended, by name: 0 finished, 130 stopped, else failed with this exit code and sentence."""

    share: ShareDir
    codes: dict[str, int]
    reasons: dict[str, str]
    page: str | None

    @property
    def code(self) -> int:
        """0 when all are finished, else the code of the first that is not."""
        return next((code for code in self.codes.values() if code != 0), 0)


class MemberProcess:
    """The supervisor of one run, in a process of its own."""

    def __init__(self, run_dir: RunDir, launcher: LocalLauncher) -> None:
        self.name = run_dir.name
        self._launcher = launcher
        self.code: int | None = 0 if is_finished(run_dir.path) else None
        spec = ProcessSpec(f"run-{self.name}", MEMBER, (str(run_dir.path),))
        self.process = ManagedProcess(spec, run_dir.logs / "supervisor.out", launcher.server(MEMBER))
        self._deaths = 0
        self._start_at = 0.0
        self._is_begun = False
        self._is_asked = False

    def attend(self) -> None:
        """Start it, or again after a kill; note how it has ended."""
        if self.code is not None:
            return
        if not self._is_begun:
            if time.monotonic() >= self._start_at and self._launcher.can_start(self.process.spec):
                self.process.start()
                self._is_begun = True
            return
        code = self.process.exit_code()
        if code is None:
            return
        if code < 0 and self._deaths < MAX_DEATHS:
            self._deaths += 1
            self._is_begun, self._start_at = False, time.monotonic() + RESTART_PAUSE_S
            logger.warning("the supervisor of run %s was ended by signal %d; it is started again", self.name, -code)
            return
        self.code = code if code >= 0 else ServiceError.exit_code
        logger.info("run %s has ended", self.name, extra={"code": code})

    def reason(self) -> str:
        """What it said last."""
        return self.process.last_line() if self.code not in (0, STOPPED, None) else ""

    def ask_to_end(self) -> None:
        """Once: a second signal would cut its ending short, as a second Ctrl-C does."""
        if self._is_begun and not self._is_asked and self.code is None and self.process.exit_code() is None:
            self._is_asked = True
            self.process.signal(signal.SIGTERM)

    def stop(self) -> None:
        """Ask it to end, and wait for that."""
        if self.code is not None:
            return
        if not self._is_begun:
            self.code = STOPPED
            return
        self.ask_to_end()
        if self.process.exit_code() is None and self.process.wait(STOP_GRACE_S) is None:
            self.process.signal(signal.SIGKILL)
            self.process.wait(5.0)
        code = self.process.exit_code()
        self.code = STOPPED if code is None or code < 0 else code


def drive_share(share: ShareDir, *, tell: Callable[[str], None] = lambda line: None) -> ShareOutcome:
    """Supervise a share to the end of its runs, or until a person wishes it stopped.

    Raises: ServiceError or UserError when the trainer or the engine cannot go on.
    """
    about = share.about()
    names: list[str] = about["runs"]
    base = Path(about["base"])
    if not (base / "config.json").exists():
        raise UserError(f"the base of the share, {base}, is gone; put it back, and resume")
    run_dir = share.as_run
    check_devices(read_run_config(RunDir(share.runs / names[0])))
    with RunLock(run_dir):
        setup_logging(run_dir.logs / "supervisor.log", is_terminal=False)
        ledger = Ledger(run_dir.ledger)
        try:
            return _Share(share, names, ledger, tell).drive()
        finally:
            ledger.close()


class _Share:
    def __init__(self, share: ShareDir, names: Sequence[str], ledger: Ledger, tell: Callable[[str], None]) -> None:
        self._share, self._ledger, self._tell = share, ledger, tell
        config = read_run_config(RunDir(share.runs / names[0]))
        life, death = settle_last(share.as_run, ledger)
        self._has_page = config.deployment.hub
        self._keys = run_keys(share.as_run)
        specs = _specs(share, config, self._keys.environment())
        restarts = config.deployment.max_restarts
        imports = IMPORTS if config.inference.engine == "embedded" else ()
        launcher = LocalLauncher(share.as_run.logs, imports, for_runs=IMPORTS_OF_RUNS)
        self._members = [MemberProcess(RunDir(share.runs / name), launcher) for name in names]
        self._supervisor = Supervisor(
            share.as_run, ledger, specs, main="trainer", max_restarts=restarts, life=life, launcher=launcher
        )
        if death:
            tell(death)
        self._served: set[str] = set()
        self._said: dict[str, str] = {}
        self._adapters = AdapterWatch()
        self._is_stopping = False
        self._next_look = 0.0
        self._page: str | None = None

    def drive(self) -> ShareOutcome:
        supervisor = self._supervisor
        try:
            with StopSignals(self._stop):
                for _ in supervisor.ticks():
                    if self._is_stopping or self._is_done():
                        self._end_members()
                        for member in self._members:  # one that was done between two looks
                            self._compare(Membership(member.name, self._share.runs / member.name, ""))
                        supervisor.stop()
                        continue
                    for member in self._members:
                        member.attend()
                    self._look()
                self._end_members()
        finally:
            self._end_members()
            settle(self._ledger, supervisor.costs.figures())
        if supervisor.failure is not None:
            kind = UserError if supervisor.failure_code == UserError.exit_code else ServiceError
            path = self._share.path
            raise kind(f"{supervisor.failure} (logs in {path / 'logs'}; `mettle rl resume {path}` continues its runs)")
        codes = {member.name: member.code or 0 for member in self._members}
        reasons = {member.name: member.reason() for member in self._members}
        return ShareOutcome(self._share, codes, reasons, self._page)

    def _stop(self) -> None:
        self._is_stopping = True

    def _is_done(self) -> bool:
        return all(member.code is not None for member in self._members) and not self._share.members()

    def _end_members(self) -> None:
        for member in self._members:  # all at once: each may take a while
            member.ask_to_end()
        for member in self._members:
            member.stop()

    def _look(self) -> None:
        """Once a second: the page, what the trainer says, and the adapters of runs that have left."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + 1.0
        if self._has_page and self._page is None:
            endpoint = self._supervisor.process("hub").endpoint()
            if endpoint is not None:
                self._page = f"http://{endpoint['host']}:{endpoint['port']}/"
                self._tell(f"page {self._page}")
        there = {member.name: member for member in self._share.members()}
        for name, membership in there.items():
            word = self._share.told(membership)
            said = "" if word is None else f"{name}: {word.state}, step {word.step}"
            if said and self._said.get(name) != said:
                self._said[name] = said
                self._tell(said)
                self._compare(membership)
        for name in sorted(self._served - there.keys()):
            self._unload(name)
        self._served = set(there)

    def _compare(self, member: Membership) -> None:
        """Lay what a run's trainer has found of engine and trainer beside what those of the others have."""
        look = self._adapters.read(member)
        if look is None:
            return
        journal, fact, news = self._ledger.journal, self._adapters.fact(), self._adapters.news()
        metrics = {f"mismatch/adapter/{member.name}": look.mean_abs}
        self._supervisor.record(lambda: journal.set_fact(FACT, fact))
        self._supervisor.record(lambda: journal.record_metrics(look.step, metrics))
        if news is not None:
            self._supervisor.event(*news)
            self._tell(news[1])

    def _unload(self, name: str) -> None:
        endpoint = self._supervisor.process("inference").endpoint()
        if endpoint is None:
            return

        async def unload() -> None:
            client = ServerClient(lambda: str(endpoint["base_url"]), self._keys.admin)
            try:
                with suppress(ProviderError):
                    await client.unload_adapter(name)
            finally:
                await client.close()

        asyncio.run(unload())


def _specs(share: ShareDir, config: RunConfig, keys: dict[str, str]) -> list[ProcessSpec]:
    run_dir = share.as_run
    specs = []
    if config.deployment.hub:
        port = config.deployment.hub_port
        if port == 0 or not is_port_free(port):
            port = free_port()
        ready = run_dir.endpoint("hub")
        page = ("--runs", str(share.runs), "--port", str(port), "--ready-file", str(ready))
        specs.append(ProcessSpec("hub", "mettle.hub", page, ready_file=ready, is_service=True))
    inference = (
        "--config", str(run_dir.config("inference")), "--ready-file", str(share.endpoint),
        "--log-file", str(run_dir.logs / "inference.log"),
    )  # fmt: skip
    timeout_s = config.inference.start_timeout_s
    specs += [
        ProcessSpec(
            "inference", "mettle.inference", inference, ready_file=share.endpoint, is_service=True, environment=keys,
            ready_timeout_s=timeout_s,
        ),
        ProcessSpec("trainer", "mettle.trainer.sharing", (str(share.path),), is_service=True),
    ]  # fmt: skip
    return specs
