"""A run's figures elsewhere too: TensorBoard, Weights & Biases, Prometheus. The run's own page comes first.

Parts: `TrackingConfig` (`[tracking]` of a run), the three trackers, `Mirror` (a thread that hands trained steps on).
Invariants: the ledger is only read; a step is handed to each tracker once, also over restarts of the run; a tracker
that fails is named in the run's events and left alone, and the run goes on.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from mettle.errors import UserError
from mettle.extras import install_line
from mettle.storage.files import write_atomic
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir

POLL_S = 1.0
END_S = 60.0
"""What trackers get at the end of a run to hand over the rest."""
STATE_FILE = "tracking.json"


class WandbConfig(BaseModel):
    """Weights & Biases. The key is taken from where `wandb login` left it, or from WANDB_API_KEY."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    project: str = Field(min_length=1)
    """The project that the run is shown in."""
    entity: str | None = None
    """The team or person; None is the key's own."""
    mode: Literal["online", "offline"] = "online"
    """offline writes to RUN/wandb, for `wandb sync` later."""


class TrackingConfig(BaseModel):
    """Where a run's figures go besides its own page."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensorboard: bool = False
    """Write event files to RUN/tensorboard, for `tensorboard --logdir runs`."""
    wandb: WandbConfig | None = None
    """Show the run in Weights & Biases."""
    prometheus: Path | None = None
    """Keep the newest figures in this file, whose name ends in .prom, for a node exporter's textfile collector."""

    def check(self) -> None:
        """Raises: UserError when a package is missing, or a file's name will not do."""
        for package, is_wanted in (("tensorboard", self.tensorboard), ("wandb", self.wandb is not None)):
            if is_wanted and find_spec(package) is None:
                raise UserError(f"tracking.{package} needs the package {package}: {install_line('tracking')}")
        if self.prometheus is not None and self.prometheus.suffix != ".prom":
            raise UserError(f"tracking.prometheus {self.prometheus}: a textfile collector reads names in .prom alone")


class Tracker(Protocol):
    """A place that figures go to."""

    def log(self, step: int, figures: Mapping[str, float], at: float) -> None:
        """Take the figures of a step; `at` is when it was trained, in seconds since 1970."""

    def close(self) -> None:
        """Hand over what is left."""


class TensorBoardTracker:
    """Event files in a folder."""

    def __init__(self, folder: Path) -> None:
        writer: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = writer.EventFileWriter(str(folder))

    def log(self, step: int, figures: Mapping[str, float], at: float) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._writer.add_event(self._event(wall_time=at, step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases, the same one when the run is continued."""

    def __init__(self, config: WandbConfig, run_dir: RunDir, settings: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=config.project, entity=config.entity, mode=config.mode, name=run_dir.name, id=run_dir.name,
            resume="allow", dir=str(run_dir.path), config=dict(settings),
        )  # fmt: skip

    def log(self, step: int, figures: Mapping[str, float], at: float) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class PrometheusTracker:
    """The newest figures as a file in Prometheus's text format, replaced as a whole."""

    def __init__(self, path: Path, run: str) -> None:
        self._path = path
        self._run = run

    def log(self, step: int, figures: Mapping[str, float], at: float) -> None:
        label = self._run.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines = []
        for name, value in sorted({"step": float(step), **figures}.items()):
            full = "mettle_run_" + "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
            lines += [f"# TYPE {full} gauge", f'{full}{{run="{label}"}} {value!r}']
        write_atomic(self._path, ("\n".join(lines) + "\n").encode())

    def close(self) -> None:
        """The file stays."""


def make_trackers(
    config: TrackingConfig, run_dir: RunDir, settings: Mapping[str, Any]
) -> dict[str, Callable[[], Tracker]]:
    """How each tracker that is asked for is made, by name; they are made in the thread that uses them."""
    found: dict[str, Callable[[], Tracker]] = {}
    if config.tensorboard:
        found["tensorboard"] = lambda: TensorBoardTracker(run_dir.path / "tensorboard")
    if (wandb := config.wandb) is not None:
        found["wandb"] = lambda: WandbTracker(wandb, run_dir, settings)
    if (path := config.prometheus) is not None:
        found["prometheus"] = lambda: PrometheusTracker(path, run_dir.name)
    return found


class Mirror:
    """Hands trained steps on while the block runs, in a thread of its own: a slow tracker slows nobody down."""

    def __init__(
        self, run_dir: RunDir, trackers: Mapping[str, Callable[[], Tracker]], *, poll_s: float = POLL_S
    ) -> None:
        self._run_dir = run_dir
        self._makers = dict(trackers)
        self._poll_s = poll_s
        self._trackers: dict[str, Tracker] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        self.failures: dict[str, str] = {}

    def __enter__(self) -> Mirror:
        if self._makers:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._makers:
            self._thread.join(END_S)

    def _run(self) -> None:
        ledger = Ledger(self._run_dir.ledger, is_read_only=True)
        try:
            for name, make in self._makers.items():
                self._guarded(name, lambda name=name, make=make: self._trackers.update({name: make()}))  # type: ignore[misc]
            while not self._is_over.wait(self._poll_s):
                self._hand_on(ledger)
            self._hand_on(ledger)
        finally:
            ledger.close()
            for name, tracker in list(self._trackers.items()):
                self._guarded(name, tracker.close)

    def _hand_on(self, ledger: Ledger) -> None:
        """The steps that were trained since the last look; each tracker has its own last one."""
        state = self._read_state()
        for name, tracker in list(self._trackers.items()):
            after = int(state.get(name, 0))
            sql = "SELECT step, trained_at FROM batches WHERE trained_at IS NOT NULL AND step > ? ORDER BY step"
            for row in ledger.database.rows(sql, (after,)):
                metrics = ledger.database.rows("SELECT name, value FROM metrics WHERE step = ?", (row["step"],))
                figures = {metric["name"]: metric["value"] for metric in metrics}
                log = lambda: tracker.log(row["step"], figures, row["trained_at"])  # noqa: B023, E731
                if not self._guarded(name, log):
                    break
                state[name] = row["step"]
        write_atomic(self._run_dir.path / STATE_FILE, json.dumps(state).encode())

    def _read_state(self) -> dict[str, int]:
        with suppress(OSError, ValueError):
            found: dict[str, int] = json.loads((self._run_dir.path / STATE_FILE).read_text())
            return found
        return {}

    def _guarded(self, name: str, call: Callable[[], object]) -> bool:
        try:
            call()
        except Exception as error:
            self._trackers.pop(name, None)
            self.failures[name] = f"tracking by {name} has ended: {type(error).__name__}: {error}"
            ledger = Ledger(self._run_dir.ledger)
            try:
                ledger.journal.event("supervisor", "warning", self.failures[name])
            finally:
                ledger.close()
            return False
        return True
