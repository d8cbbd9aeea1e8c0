"""Figures for Prometheus: the tables of all of them, from which the reference page is made, and what has been counted.

Invariant: a page has every figure of the tables and no other, each under its own type; units are seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from mettle.web.figures import MetricSamples, metrics_page, snapshot

_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
PREFIX: Final = "mettle_sandbox_"

GAUGES: Final = {
    "judge_queue": "Judgements that wait for a slot.",
    "judge_running": "Judgements being carried out.",
    "judge_slots": "Judgements that can be carried out at a time.",
    "judge_warm": "Cells kept ready.",
    "machines": "Machines that exist.",
    "machines_making": "Machines being made.",
    "cpus": "Processors given out to machines.",
    "requests_open": "Requests being answered.",
    "token_machines": "Machines of a token.",
    "token_max_machines": "As many as it may have.",
    "token_memory_bytes": "Their memory limits, together.",
    "token_max_memory_bytes": "As much as it may have.",
    "token_disk_bytes": "Their disk limits, together.",
    "token_max_disk_bytes": "As much as it may have.",
    "token_cpus": "Processors that they may keep busy, together.",
    "token_max_cpus": "As many as it may have.",
    "token_judging": "Judgements of a token that are not yet answered.",
    "token_max_judging": "As many as it may have.",
    "token_requests_open": "Requests of a token being answered.",
}
"""Of the moment; those of tokens have the label `token`."""
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
TIMES: Final = {
    "judge_seconds": "Time of a judgement from its cell to its last verdict.",
    "judge_queue_seconds": "Time that a judgement waited for a slot.",
    "create_seconds": "Time to make a machine.",
    "exec_seconds": "Time of a command, from its order to its result.",
    "request_seconds": "Time to answer a request, long ones included.",
}
"""Histograms."""
_LABELS: Final = {
    "requests_total": ("route", "status"),
    "errors_total": ("cause",),
    "refusals_total": ("token", "cause"),
    "verdicts_total": ("verdict",),
    "machines_ended_total": ("cause",),
}
"""Of what is counted here; the other counters are the pool's."""


class MetricSample(NamedTuple):
    """A figure of the moment."""

    name: str
    labels: dict[str, str]
    value: float


class ServiceMetrics:
    """What has happened since the service started."""

    def __init__(self) -> None:
        self._times = {
            name: Histogram(PREFIX + name, text, buckets=_BUCKETS_S, registry=None) for name, text in TIMES.items()
        }
        self._counts = {
            name: Counter(PREFIX + name, COUNTS[name], labels, registry=None) for name, labels in _LABELS.items()
        }

    def count(self, name: str, **labels: str) -> None:
        self._counts[name].labels(**labels).inc()

    def add_time(self, name: str, seconds: float) -> None:
        self._times[name].observe(seconds)

    def page(self, samples: Iterable[MetricSample], is_shown: Callable[[str], bool] = lambda _: True) -> Response:
        """The page at /metrics; `is_shown` says of which tokens it has figures."""
        moment = list(samples)
        registry = CollectorRegistry(auto_describe=False)

        def figures(names: Iterable[str], texts: dict[str, str]) -> Iterator[MetricSamples]:
            for name in names:
                held = [(s.labels, s.value) for s in moment if s.name == name and _may_see(s.labels, is_shown)]
                yield MetricSamples(PREFIX + name, texts[name], held)

        snapshot(registry, lambda: figures(GAUGES, GAUGES))
        for counter in self._counts.values():
            registry.register(_Shown(counter, is_shown))
        snapshot(registry, lambda: figures((name for name in COUNTS if name not in _LABELS), COUNTS))
        for histogram in self._times.values():
            registry.register(histogram)
        return metrics_page(registry)


class _Shown(Collector):
    """A counter, without the samples of tokens that are not shown."""

    def __init__(self, counter: Counter, is_shown: Callable[[str], bool]) -> None:
        self._counter, self._is_shown = counter, is_shown

    def collect(self) -> Iterator[Metric]:
        for metric in self._counter.collect():
            metric.samples = [sample for sample in metric.samples if _may_see(sample.labels, self._is_shown)]
            yield metric


def _may_see(labels: dict[str, str], is_shown: Callable[[str], bool]) -> bool:
    return "token" not in labels or is_shown(labels["token"])
