"""Figures for Prometheus, in its text format, written by hand: there are few, and none costs more than an addition.

Parts: the tables of all figures, from which the reference page is made; `ServiceMetrics`, what has been counted.
Invariant: a page has every figure of the tables and no other, each under its own type; units are seconds and bytes.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
PREFIX: Final = "mettle_sandbox_"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


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


TIMES: Final = {
    "judge_seconds": "Time of a judgement from its cell to its last verdict.",
    "judge_queue_seconds": "Time that a judgement waited for a slot.",
    "create_seconds": "Time to make a machine.",
    "exec_seconds": "Time of a command, from its order to its result.",
    "request_seconds": "Time to answer a request, long ones included.",
}
"""Histograms."""
COUNTS: Final = {
    "requests_total": "Requests answered, by route and status.",
    "errors_total": "Requests that failed, by cause.",
    "refusals_total": "Requests refused for what their token has already, by token and cause (quota or busy).",
    "verdicts_total": "Tests judged, by verdict.",
    "machines_ended_total": "Machines that have ended, by cause.",
    "judge_cells_total": "Cells made.",
    "judge_cells_lost_total": "Cells that ended before their work did.",
    "judge_remembered_total": "Judgements that were remembered and not carried out again.",
}
"""Counters, since the start of the service."""
GAUGES: Final = {
    "judge_queue": "Judgements that wait for a slot.",
    "judge_running": "Judgements being carried out.",
    "judge_slots": "Judgements that can be carried out at a time.",
    "judge_warm": "Cells kept ready.",
    "machines": "Machines that exist.",
    "machines_making": "Machines being made.",
    "requests_open": "Requests being answered.",
    "token_machines": "Machines of a token.",
    "token_max_machines": "As many as it may have.",
    "token_memory_bytes": "Their memory limits, together.",
    "token_max_memory_bytes": "As much as it may have.",
    "token_disk_bytes": "Their disk limits, together.",
    "token_max_disk_bytes": "As much as it may have.",
    "token_judging": "Judgements of a token that are not yet answered.",
    "token_max_judging": "As many as it may have.",
    "token_requests_open": "Requests of a token being answered.",
}
"""Of the moment; those of tokens have the label `token`."""
Labels = tuple[tuple[str, str], ...]
Sample = tuple[Labels, float]


@dataclass
class ServiceMetrics:
    """What has happened since the service started."""

    times: dict[str, Histogram] = field(default_factory=lambda: {name: Histogram() for name in TIMES})
    counts: dict[str, Counter[Labels]] = field(default_factory=lambda: {name: Counter() for name in COUNTS})

    def count(self, name: str, num: int = 1, **labels: str) -> None:
        self.counts[name][tuple(labels.items())] += num

    def page(self, gauges: Mapping[str, Sequence[Sample]], shown: Callable[[str], bool] = lambda _: True) -> str:
        """The page at /metrics; `gauges` are the samples of the moment, `shown` says which tokens' figures it has."""
        lines: list[str] = []
        for name, text in GAUGES.items():
            lines += _head(name, "gauge", text)
            lines += [f"{PREFIX}{name}{_labels(labels)} {_figure(value)}" for labels, value in gauges.get(name, ())]
        for name, counted in self.counts.items():
            lines += _head(name, "counter", COUNTS[name])
            for labels, num in sorted(counted.items()):
                if shown(dict(labels).get("token", "")):
                    lines.append(f"{PREFIX}{name}{_labels(labels)} {num}")
        for name, histogram in self.times.items():
            lines += _head(name, "histogram", TIMES[name])
            lines += histogram.lines(PREFIX + name)
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}"


def _figure(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return "{" + shown + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
