"""Figures for Prometheus, in its text format, written by hand: there are few, and none costs more than an addition."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PREFIX: Final = "mettle_sandbox_"


class Histogram:
    """Seconds, by bucket."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BUCKETS_S) + 1)
        self._total_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(_BUCKETS_S, seconds)] += 1
        self._total_s += seconds

    def lines(self, name: str) -> Iterator[str]:
        num_so_far = 0
        for bound, count in zip((*map(str, _BUCKETS_S), "+Inf"), self._counts, strict=True):
            num_so_far += count
            yield f'{name}_bucket{{le="{bound}"}} {num_so_far}'
        yield f"{name}_sum {self._total_s:.6f}"
        yield f"{name}_count {num_so_far}"


_TIMES: Final = {
    "judge_seconds": "Time of a judgement from its cell to its last verdict.",
    "judge_queue_seconds": "Time that a judgement waited for a slot.",
    "create_seconds": "Time to make a machine.",
    "exec_seconds": "Time of a command, from its order to its result.",
    "request_seconds": "Time to answer a request, long ones included.",
}
_COUNTS: Final = {
    "requests_total": "Requests answered, by route and status.",
    "errors_total": "Requests that failed, by cause.",
    "verdicts_total": "Tests judged, by verdict.",
    "machines_ended_total": "Machines that have ended, by cause.",
}


@dataclass
class Metrics:
    """What has happened since the service started."""

    times: dict[str, Histogram] = field(default_factory=lambda: {name: Histogram() for name in _TIMES})
    counts: dict[str, Counter[tuple[tuple[str, str], ...]]] = field(
        default_factory=lambda: {name: Counter() for name in _COUNTS}
    )

    def count(self, name: str, num: int = 1, **labels: str) -> None:
        self.counts[name][tuple(labels.items())] += num

    def page(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """The page at /metrics; `gauges` are name to (meaning, value) of the moment."""
        lines: list[str] = []
        for name, (text, value) in gauges.items():
            lines += [f"# HELP {_PREFIX}{name} {text}", f"# TYPE {_PREFIX}{name} gauge", f"{_PREFIX}{name} {value:g}"]
        for name, counted in self.counts.items():
            lines += [f"# HELP {_PREFIX}{name} {_COUNTS[name]}", f"# TYPE {_PREFIX}{name} counter"]
            lines += [f"{_PREFIX}{name}{_labels(labels)} {num}" for labels, num in sorted(counted.items())]
        for name, histogram in self.times.items():
            lines += [f"# HELP {_PREFIX}{name} {_TIMES[name]}", f"# TYPE {_PREFIX}{name} histogram"]
            lines += histogram.lines(_PREFIX + name)
        return "\n".join(lines) + "\n"


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    if not labels:
        return ""
    shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return "{" + shown + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
