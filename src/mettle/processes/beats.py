"""Signs of life: what each process of a run says of itself twice a second, on a clock that all of them share.

Parts: `Heartbeat` (a thread that writes), `Beat` (what it wrote), `Wait` (whom a process waits for), `Questions` (to
somebody who is no process of the run, as a judge), `asking` (for whoever asks one, in whichever process), `read_beats`.
A beat is one `pwrite` into a file that has its full size from the start, so that a full disk, a locked database or a
blocked event loop keep nobody from beating. Times are CLOCK_MONOTONIC: comparable between the processes of one host,
and untouched by whoever sets the host's time. Invariant: what counts (that it beats, that its loop turns, that its
counter moves) is measured by the thread; only the name of what is awaited is the process's own word.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

BEATS_FOLDER = "METTLE_BEATS"
"""The environment variable that names the folder in which the processes of a run beat."""
BEAT_S = 0.5
TICK_S = 0.25
GAP_S = 5.0
"""A thread that comes to beat this late was stopped with everything else of its process: its measures begin anew."""
SAMPLED_S = 2.0
"""From this delay on a beat says where the main thread stands."""
FILE_BYTES = 4096
MAX_TEXT = 200
MAX_WAITS = 6
MAX_ASKED = 4
_LIBRARY = sysconfig.get_path("stdlib")


@dataclass(frozen=True, slots=True)
class Wait:
    """`owner` waits on `edge` for `target` to do what `awaits` says, since a monotonic time, and may for `budget_s`."""

    owner: str
    edge: str
    target: str
    awaits: str
    since: float
    budget_s: float

    def is_overdue(self, now: float) -> bool:
        """True when the wait has used up its budget."""
        return now - self.since > self.budget_s


@dataclass(frozen=True, slots=True)
class Questions:
    """`target`, which is no process of the run, has `num_open` questions before it.

    It has answered none for `silent_s`, in which there was one and this process could have heard of it; the longest
    such time that an answer has ended is `longest_s`. Its last answer came `answered_s` ago.
    """

    target: str
    num_open: int
    silent_s: float
    longest_s: float = 0.0
    answered_s: float | None = None


@dataclass(frozen=True, slots=True)
class Beat:
    """A process at the moment `at` (monotonic seconds).

    `progress` counts `unit` and has not moved for `still_s`; `idle_s` is the part of that in which there was work,
    `longest_idle_s` the longest such time that ended. `late_s` is how overdue its event loop is, `where` what its main
    thread is in while either is long.
    """

    name: str
    pid: int
    at: float
    progress: int = 0
    unit: str = "steps"
    has_work: bool = False
    still_s: float = 0.0
    idle_s: float = 0.0
    longest_idle_s: float = 0.0
    late_s: float = 0.0
    paused_s: float = 0.0
    where: str = ""
    waits: tuple[Wait, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    host: str = ""
    asked: tuple[Questions, ...] = ()
    is_writing: bool = False
    """In the middle of a transaction: whoever else would write waits for its end."""

    def shifted(self, by_s: float) -> Beat:
        """The same beat in the times of a clock that is `by_s` ahead."""
        waits = tuple(dataclasses.replace(wait, since=wait.since + by_s) for wait in self.waits)
        return dataclasses.replace(self, at=self.at + by_s, waits=waits)


@dataclass(frozen=True, slots=True)
class Gauge:
    """What a process counts, whether it has anything to do, and whether somebody has told it to stand still."""

    progress: int
    has_work: bool
    is_paused: bool = False


class _Outside:
    """What this process knows of somebody whom it asks; `look` measures, again and again."""

    def __init__(self, now: float) -> None:
        self.num_open = 0
        self.silent_s = self.longest_s = 0.0
        self.looked_at = now
        self.answered_at: float | None = None

    def begin(self, now: float) -> None:
        if self.num_open == 0:
            self.looked_at = now
        self.num_open += 1

    def end(self, now: float, *, is_answer: bool) -> None:
        self.num_open -= 1
        if is_answer:
            self.longest_s, self.silent_s = max(self.longest_s, self.silent_s), 0.0
            self.answered_at = now

    def look(self, target: str, now: float, *, is_heard: bool) -> Questions:
        if self.num_open and is_heard:
            self.silent_s += now - self.looked_at
        self.looked_at = now
        answered_s = None if self.answered_at is None else now - self.answered_at
        return Questions(target, self.num_open, self.silent_s, self.longest_s, answered_s)


class Heartbeat:
    """The beat of this process. Without a `path` nothing is written, and everything else works all the same.

    `gauge` replaces the counter of `advance`; without one a process has work from its first `advance` on, whenever it
    waits for nobody.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        name: str = "",
        unit: str = "steps",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name or (path.stem if path is not None else "")
        self.clock = clock
        self.gauge: Callable[[], Gauge] | None = None
        self.figures: Callable[[], dict[str, float]] = dict
        self.is_writing: Callable[[], bool] = lambda: False
        self._path = path
        self._unit = unit
        self._progress = 0
        self._waits: dict[str, Wait] = {}
        self._outside: dict[str, _Outside] = {}
        self._asking = threading.Lock()
        self._due: float | None = None
        self._watched = threading.main_thread().ident
        self._seen = -1
        self._last = self._moved_at = self._idle_since = self._paused_since = clock()
        self._longest_idle_s = 0.0
        self._file: int | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def of_run(cls, name: str, *, unit: str = "steps") -> Self:
        """The beat of the process `name` of the run that started this one; of no run where none did."""
        folder = os.environ.get(BEATS_FOLDER)
        return cls(Path(folder) / f"{name}.beat" if folder else None, name=name, unit=unit)

    # What the process says

    def advance(self, number: int = 1) -> None:
        """Something was done."""
        self._progress += number

    @contextmanager
    def waiting(self, owner: str, edge: str, target: str, awaits: str, *, budget_s: float) -> Iterator[None]:
        """Say that `owner` waits while the block runs. An owner has one wait at a time."""
        self._waits[owner] = Wait(owner, edge, target, awaits, self.clock(), budget_s)
        try:
            yield
        finally:
            self._waits.pop(owner, None)

    @contextmanager
    def asking(self, target: str) -> Iterator[None]:
        """Say that somebody outside of the run is asked while the block runs. One that raises got no answer."""
        with self._asking:
            outside = self._outside.setdefault(target, _Outside(self.clock()))
            outside.begin(self.clock())
        is_answer = False
        try:
            yield
            is_answer = True
        finally:
            with self._asking:
                outside.end(self.clock(), is_answer=is_answer)

    @property
    def waits(self) -> list[Wait]:
        """Who waits here, the longest wait first."""
        return sorted(self._waits.copy().values(), key=lambda wait: wait.since)

    def tick(self) -> None:
        """The main loop has come round. From the first call on it is expected again within `TICK_S`."""
        self._due = self.clock() + TICK_S

    def rest(self) -> None:
        """The main loop has ended; it is not expected any more."""
        self._due = None

    def tick_with(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tick with an event loop for as long as it runs."""
        self.tick()
        loop.call_later(TICK_S, self.tick_with, loop)

    # What the thread measures

    def __enter__(self) -> Self:
        HEART.set(self)
        self._over.clear()
        with suppress(OSError):  # who cannot write a beat can still work
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self.beat()
        if self._file is not None:
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._file is not None and self._path is not None:
            os.close(self._file)
            self._file = None
            self._path.unlink(missing_ok=True)

    def _own_gauge(self) -> Gauge:
        return Gauge(self._progress, self._progress > 0 and not self._waits)

    def _run(self) -> None:
        while not self._over.wait(BEAT_S):
            self.beat()

    def beat(self) -> Beat:
        """Measure, and write it down where there is a file."""
        found = self.measure()
        if self._file is not None:
            with suppress(OSError):
                os.pwrite(self._file, encode_beat(found), 0)
        return found

    def measure(self) -> Beat:
        """This process now. The delays begin anew after a gap, in which nothing of the process ran."""
        now = self.clock()
        is_gap = now - self._last > GAP_S
        if is_gap:
            self._moved_at = self._idle_since = self._paused_since = now
            self._due = None if self._due is None else now + TICK_S
        self._last = now
        gauge = (
            self.gauge() if self.gauge is not None else Gauge(self._progress, self._progress > 0 and not self._waits)
        )
        if gauge.progress != self._seen:
            if self._seen >= 0:
                self._longest_idle_s = max(self._longest_idle_s, now - self._idle_since)
            self._seen, self._moved_at, self._idle_since = gauge.progress, now, now
        late_s = 0.0 if self._due is None else max(0.0, now - self._due)
        asked = self._look_outside(now, is_heard=not is_gap and late_s <= SAMPLED_S)
        if not gauge.has_work or gauge.is_paused or any(one.num_open for one in asked):
            self._idle_since = now
        if not gauge.is_paused:
            self._paused_since = now
        idle_s = now - self._idle_since
        return Beat(
            name=self.name,
            pid=os.getpid(),
            at=now,
            progress=gauge.progress,
            unit=self._unit,
            has_work=gauge.has_work,
            still_s=now - self._moved_at,
            idle_s=idle_s,
            longest_idle_s=self._longest_idle_s,
            late_s=late_s,
            paused_s=now - self._paused_since,
            where=_where(self._watched) if max(late_s, idle_s) > SAMPLED_S else "",
            waits=tuple(self.waits[:MAX_WAITS]),
            figures=self.figures(),
            asked=asked,
            is_writing=self.is_writing(),
        )

    def _look_outside(self, now: float, *, is_heard: bool) -> tuple[Questions, ...]:
        """Those who are asked, the longest silent first."""
        with self._asking:
            found = [outside.look(target, now, is_heard=is_heard) for target, outside in self._outside.items()]
        return tuple(sorted(found, key=lambda asked: -asked.silent_s)[:MAX_ASKED])


HEART: ContextVar[Heartbeat | None] = ContextVar("heart", default=None)
"""That of this process."""


@contextmanager
def asking(target: str) -> Iterator[None]:
    """`Heartbeat.asking` of the process, where it beats."""
    heart = HEART.get()
    with heart.asking(target) if heart is not None else nullcontext():
        yield


def read_beats(folder: Path) -> dict[str, Beat]:
    """The newest beat of each process that beats in `folder`, by name."""
    found = {}
    for path in sorted(folder.glob("*.beat")):
        beat = _read(path)
        if beat is not None:
            found[beat.name] = beat
    return found


def waits_of(beats: dict[str, Beat]) -> list[Wait]:
    """Who waits for whom, the longest wait first."""
    return sorted((wait for beat in beats.values() for wait in beat.waits), key=lambda wait: wait.since)


def encode_beat(beat: Beat) -> bytes:
    """A beat as it stands in its file."""
    fields = asdict(beat)
    fields["where"] = fields["where"][-MAX_TEXT:]
    for wait in fields["waits"]:
        wait["awaits"] = wait["awaits"][:MAX_TEXT]
    for asked in fields["asked"]:
        asked["target"] = asked["target"][:MAX_TEXT]
    return json.dumps(fields).encode()[:FILE_BYTES].ljust(FILE_BYTES)


def write_beat(folder: Path, beat: Beat) -> None:
    """Write the beat of a process that cannot do so itself. Raises: OSError."""
    handle = os.open(folder / f"{beat.name}.beat", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(handle, encode_beat(beat), 0)
    finally:
        os.close(handle)


def decode_beat(text: bytes) -> Beat | None:
    """None for what is no beat: not written yet, or half of one."""
    try:
        fields: dict[str, Any] = json.loads(text)
        waits, asked = (tuple(Wait(**w) for w in fields["waits"]), tuple(Questions(**a) for a in fields["asked"]))
        return Beat(**{**fields, "waits": waits, "asked": asked})
    except (ValueError, TypeError, KeyError):
        return None


def _read(path: Path) -> Beat | None:
    try:
        return decode_beat(path.read_bytes())
    except OSError:
        return None


def _where(thread: int | None) -> str:
    """`file:line in function` of the innermost frame of a thread that is no frame of the standard library."""
    innermost = frame = sys._current_frames().get(thread or 0)
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    chosen = frame or innermost
    if chosen is None:
        return ""
    path = Path(chosen.f_code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{chosen.f_lineno} in {chosen.f_code.co_name}"


def _is_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name == __file__ or name.startswith("<frozen") or (name.startswith(_LIBRARY) and "site-packages" not in name)
