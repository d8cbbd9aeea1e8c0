"""Figures for Prometheus, through its own client library.

Parts: `snapshot` (figures of the moment, asked for when the page is), `metrics_page`. Invariant: a figure has its unit
in its name, seconds or bytes; a name ends in `_total` exactly when it is a counter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

# Or each counter and histogram has a second time series, which nobody reads.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricSamples(NamedTuple):
    """A figure of the moment. A `name` that ends in `_total` is a counter, any other a gauge."""

    name: str
    text: str
    samples: Iterable[tuple[dict[str, str], float]]


class _Snapshot(Collector):
    def __init__(self, figures: Callable[[], Iterable[MetricSamples]]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        for name, text, samples in self._figures():
            family: Metric
            family = CounterMetricFamily(name, text) if name.endswith("_total") else GaugeMetricFamily(name, text)
            for labels, value in samples:
                family.add_sample(name, labels, value)
            yield family


def snapshot(registry: CollectorRegistry, figures: Callable[[], Iterable[MetricSamples]]) -> None:
    """Let the page of `registry` have what `figures` gives when it is asked for."""
    registry.register(_Snapshot(figures))


def metrics_page(registry: CollectorRegistry) -> Response:
    """The answer of `/metrics`."""
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE})
