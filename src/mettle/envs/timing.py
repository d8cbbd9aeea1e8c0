"""How long a rollout took, in both spellings of verifiers: nested seconds, and flat milliseconds.

Parts: `TimeSpan`, `TimeSpans`, `RolloutTiming`. Invariant: times are seconds since the epoch, durations are seconds;
the `*_ms` keys are computed from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mettle.processes.clock import steady_time


class TimeSpan:
    """From `start` to `end`; both 0 until they are known."""

    __slots__ = ("end", "start")

    def __init__(self, start: float = 0.0, end: float = 0.0) -> None:
        self.start = start
        self.end = end

    @property
    def duration(self) -> float:
        """Seconds, 0 while the span is open."""
        return max(0.0, self.end - self.start) if self.end else 0.0

    def __getitem__(self, key: str) -> float:
        if key in ("start", "end", "duration"):
            value: float = getattr(self, key)
            return value
        raise KeyError(key)

    def to_dict(self) -> dict[str, float]:
        """As it is saved."""
        return {"start": self.start, "end": self.end, "duration": self.duration}


class TimeSpans:
    """Several spans of one kind of work."""

    __slots__ = ("spans",)

    def __init__(self) -> None:
        self.spans: list[TimeSpan] = []

    @property
    def duration(self) -> float:
        """Seconds over all spans."""
        return sum(span.duration for span in self.spans)

    def __getitem__(self, key: str) -> Any:
        if key in ("spans", "duration"):
            return getattr(self, key)
        raise KeyError(key)

    def to_dict(self) -> dict[str, Any]:
        """As it is saved."""
        return {"spans": [span.to_dict() for span in self.spans], "duration": self.duration}


class RolloutTiming:
    """Spans of one rollout. Reads by attribute and by key; `generation_ms`, `scoring_ms`, `total_ms` are there too."""

    __slots__ = ("env", "generation", "model", "scoring", "setup", "start_time")
    KEYS = ("start_time", "setup", "generation", "scoring", "model", "env", "total", "overhead")
    KEYS_MS = ("generation_ms", "scoring_ms", "total_ms")

    def __init__(self) -> None:
        self.start_time = steady_time()
        self.setup = TimeSpan()
        self.generation = TimeSpan()
        self.scoring = TimeSpan()
        self.model = TimeSpans()
        self.env = TimeSpans()

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> RolloutTiming:
        """Read what `to_dict` wrote."""
        timing = cls()
        timing.start_time = float(saved["start_time"])
        for name in ("setup", "generation", "scoring"):
            setattr(timing, name, TimeSpan(saved[name]["start"], saved[name]["end"]))
        for name in ("model", "env"):
            getattr(timing, name).spans = [TimeSpan(span["start"], span["end"]) for span in saved[name]["spans"]]
        return timing

    @property
    def total(self) -> float:
        """Seconds from the start of generation to the end of scoring."""
        end = self.scoring.end or self.generation.end
        return max(0.0, end - self.generation.start) if end and self.generation.start else 0.0

    @property
    def overhead(self) -> float:
        """Seconds that were neither setup, model, environment nor scoring."""
        known = self.setup.duration + self.model.duration + self.env.duration + self.scoring.duration
        return max(0.0, self.total - known)

    @property
    def generation_ms(self) -> float:
        """Milliseconds of generation."""
        return self.generation.duration * 1000.0

    @property
    def scoring_ms(self) -> float:
        """Milliseconds of scoring."""
        return self.scoring.duration * 1000.0

    @property
    def total_ms(self) -> float:
        """Milliseconds in total."""
        return self.total * 1000.0

    def __getitem__(self, key: str) -> Any:
        if key in self.KEYS or key in self.KEYS_MS:
            return getattr(self, key)
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key in ("generation_ms", "scoring_ms"):
            span: TimeSpan = getattr(self, key.removesuffix("_ms"))
            span.start = span.start or self.start_time
            span.end = span.start + float(value) / 1000.0
        elif key in self.__slots__:
            setattr(self, key, value)
        else:
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return key in self.KEYS or key in self.KEYS_MS

    def get(self, key: str, default: Any = None) -> Any:
        """Like `dict.get`."""
        return getattr(self, key) if key in self.KEYS or key in self.KEYS_MS else default

    def __iter__(self) -> Iterator[str]:
        return iter(self.KEYS)

    def keys(self) -> tuple[str, ...]:
        """The nested spelling's keys."""
        return self.KEYS

    def to_dict(self) -> dict[str, Any]:
        """As it is saved."""
        spans = {name: getattr(self, name).to_dict() for name in ("setup", "generation", "scoring", "model", "env")}
        return {"start_time": self.start_time, **spans, "total": self.total, "overhead": self.overhead}
