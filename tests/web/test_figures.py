"""The page at /metrics, as Prometheus' own parser reads it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from mettle.web.figures import CONTENT_TYPE, MetricSamples, metrics_page, snapshot


def test_figures_of_the_moment_and_counted_ones_are_on_one_page():
    registry = CollectorRegistry()
    Histogram("wait_seconds", "Waits.", buckets=(1.0, 2.0), registry=registry).observe(1.5)
    now = [3.0]
    snapshot(registry, lambda: [
        MetricSamples("slots", "Places.", [({}, now[0])]),
        MetricSamples("jobs_total", "Jobs.", [({"kind": 'a"b\n'}, 2)]),
    ])  # fmt: skip
    now[0] = 4.0
    answer = metrics_page(registry)
    assert answer.headers["content-type"] == CONTENT_TYPE
    families = {family.name: family for family in text_string_to_metric_families(bytes(answer.body).decode())}
    assert [family.type for family in families.values()] == ["histogram", "gauge", "counter"]
    assert families["slots"].samples[0].value == 4.0
    assert families["jobs"].samples[0][:3] == ("jobs_total", {"kind": 'a"b\n'}, 2.0)
    assert {s.name for s in families["wait_seconds"].samples} == {
        f"wait_seconds_{x}" for x in ("bucket", "sum", "count")
    }
