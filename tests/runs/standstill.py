"""A run with one fault in one of its processes, and when it was named where a person looks.

Parts: `FaultyRun` (the run, its processes, its page), `Sighting` (after how many seconds each place named the fault).
"""

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stories import CONFIG, Run

from mettle.processes.beats import read_beats
from mettle.processes.liveness import is_worker
from mettle.runs.keys import run_keys
from mettle.storage.journal import Event
from mettle.storage.ledger import Ledger

TEXT = CONFIG
for _small, _large in {  # the quickstart's policy, batch, groups and answers, on an environment that takes faults
    "hub = false": "hub = true",
    "ascii-share": "at-will",
    "batch_size = 32": "batch_size = 256",
    "group_size = 8": "group_size = 16",
    "max_tokens = 6": "max_tokens = 8",
}.items():
    assert _small in TEXT, f"the stories' config has no {_small!r} any more"
    TEXT = TEXT.replace(_small, _large)
ENDLESS = 100_000
PLACES = ("event", "terminal", "page")
NAMING = ("stall", "recovery", "worker_died", "clock_jump", "gap", "disk_low", "restart", "supervisor_died")
LIMIT_S = 300.0
"""For what takes seconds on a host that is not busy. How soon who stands still is named, is checked where time is
simulated (`simulation/test_histories.py`)."""
WARM_UP = """
max_steps = 1000

[warm_up]
enabled = true

[warm_up.sft]
target_reward = 1.0

[orchestrator]
batch_size = 64
group_size = 16
eval = { num_examples = 0 }
sampling = { max_tokens = 8 }
envs = [{ id = "reverse-text" }]
"""


@dataclass(slots=True)
class Sighting:
    """Seconds from the fault until each place named it; None where none did."""

    event: float | None = None
    terminal: float | None = None
    page: float | None = None

    def missing(self, places: tuple[str, ...] = PLACES) -> list[str]:
        """Those of the places that did not name it."""
        return [place for place in places if getattr(self, place) is None]


class FaultyRun(Run):
    """An endless run whose processes take faults."""

    def __init__(self, folder: Path, *overrides: str, text: str = TEXT, loads: bool = True) -> None:
        self.faults = folder / "faults"
        self.faults.mkdir()
        if not loads:
            self.begin("never-loads")
        super().__init__(folder, *overrides, steps=ENDLESS, text=text, faults=self.faults)

    def pid(self, name: str) -> int:
        """The pid of a process of the run; `worker` is any that an environment runs in."""
        if name == "supervisor":
            return self.process.pid
        beats = read_beats(self.run_dir.beats)
        if name == "worker":
            return next(beat.pid for beat in beats.values() if is_worker(beat.name))
        if name in beats:  # a rank of the trainer is no process that the supervisor has started
            return beats[name].pid
        return int(self.read(lambda ledger: {p.name: p.pid for p in ledger.journal.processes()}, {})[name])

    def stop_process(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGSTOP)

    def block(self, name: str, *, is_writing: bool = False) -> None:
        self.begin("blocked")
        os.kill(self.pid(name), signal.SIGUSR2 if is_writing else signal.SIGUSR1)

    def begin(self, fault: str, text: str = "") -> None:
        (self.faults / fault).write_text(text)

    def heal(self) -> None:
        """Whatever was begun is over, and a supervisor that was stopped goes on."""
        self.process.send_signal(signal.SIGCONT)
        for path in self.faults.iterdir():
            path.unlink()

    def admin(self, path: str) -> None:
        """A request to the admin routes of the run's engine, by somebody who may."""
        address = json.loads(self.run_dir.endpoint("inference").read_text())
        request = urllib.request.Request(
            address["base_url"].removesuffix("/v1") + path, b"{}", method="POST",
            headers={"Authorization": f"Bearer {run_keys(self.run_dir).admin}", "Content-Type": "application/json"},
        )  # fmt: skip
        urllib.request.urlopen(request, timeout=200).read()

    def page_of(self, path: str) -> str:
        """A page of the run; empty while there is none."""
        try:
            address = json.loads(self.run_dir.endpoint("hub").read_text())
            return urllib.request.urlopen(f"{address['base_url']}{path}", timeout=5).read().decode()
        except (OSError, ValueError, urllib.error.URLError):
            return ""

    def events(self) -> list[Event]:
        return self.read(lambda ledger: ledger.journal.events(), [])

    def version(self) -> int:
        return self.read(lambda ledger: row.weights.version if (row := ledger.newest_version()) else 0, 0)

    def watch(
        self, is_it: Callable[[str], bool], *, places: tuple[str, ...] = PLACES, limit_s: float = LIMIT_S
    ) -> Sighting:
        """Look everywhere until each of the `places` has a line that is it, or the time is over."""
        started, seen, first = time.monotonic(), Sighting(), max((e.event_id for e in self.events()), default=0)
        lines = self.said().count("\n")
        while time.monotonic() - started < limit_s and seen.missing(places):
            found = {
                "event": lambda: [e.message for e in self.events() if e.event_id > first and e.kind in NAMING],
                "terminal": lambda: self.said().split("\n")[lines:],
                "page": lambda: [self.page_of("/runs/run")],
            }
            for place in seen.missing(places):
                if any(map(is_it, found[place]())):
                    setattr(seen, place, time.monotonic() - started)
            time.sleep(0.2)
        return seen

    def goes_on(self, versions: int = 2, limit_s: float = 400.0) -> float:
        """Wait until the trainer has made some more versions; the seconds that it took."""
        started, target = time.monotonic(), self.version() + versions
        while self.version() < target:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() - started < limit_s, f"the run does not go on: {self.said()[-2000:]}"
            time.sleep(0.1)
        return time.monotonic() - started

    def finish(self) -> None:
        """Stop the run as a person does, and look at its accounts."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(timeout=200) in (0, 130), self.said()
        ledger = Ledger(self.run_dir.ledger, is_read_only=True)
        try:
            counts = ledger.task_counts()
            assert counts.get("in_flight", 0) == 0, counts
            twice = "SELECT uid FROM tasks WHERE state = 'trained' GROUP BY uid, epoch HAVING count(*) > 1"
            assert ledger.database.rows(twice) == []
            assert [e.message for e in ledger.journal.events() if "diverged" in e.kind] == []
            assert not list(self.run_dir.beats.glob("*.beat"))
        finally:
            ledger.close()


def note(name: str, figures: dict[str, object]) -> None:
    """Keep the figures of a fault, where they are asked for."""
    if path := os.environ.get("METTLE_STANDSTILL_LOG"):
        with Path(path).open("a") as file:
            file.write(json.dumps({"fault": name, **figures}) + "\n")
