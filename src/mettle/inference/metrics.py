"""Figures for Prometheus: what the engine says of itself when it is asked, and how long requests took."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram

from mettle.inference.engine.protocol import EngineStatus
from mettle.web.figures import MetricSamples, snapshot

_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PREFIX = "mettle_inference_"


class ServingMetrics:
    """The page of one server. `request_seconds` counts requests in when they end, cancelled and failed ones too."""

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        self.registry = CollectorRegistry()
        self.request_seconds = Histogram(
            f"{_PREFIX}request_seconds",
            "Time from taking a request to its last token.",
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        snapshot(self.registry, lambda: _figures(status()))


def _figures(status: EngineStatus) -> Iterator[MetricSamples]:
    for name, value, text in (
        ("policy_version", status.version, "Version of the weights in use."),
        ("running_sequences", status.num_running, "Sequences being decoded."),
        ("waiting_sequences", status.num_waiting, "Sequences waiting for a slot."),
        ("slots", status.max_slots, "Sequences that can be decoded at a time."),
        ("max_model_length", status.max_model_len, "Longest sequence in tokens."),
        ("kv_bytes", status.kv_bytes, "Memory set aside for keys and values, cached prefixes among them."),
        ("kv_budget_bytes", status.kv_budget_bytes, "Memory that keys and values may take."),
        ("paused", int(status.is_paused), "1 while sampling is paused."),
        ("requests_total", status.total_requests, "Requests taken."),
        ("aborted_requests_total", status.total_aborted, "Requests ended by their client."),
        ("prompt_tokens_total", status.total_prompt_tokens, "Tokens of prompts."),
        ("prefix_hit_tokens_total", status.total_prefix_hit_tokens, "Tokens of prompts that were known, not computed."),
        ("preempted_sequences_total", status.total_preempted, "Sequences that gave up their memory and began again."),
        ("sampled_tokens_total", status.total_sampled_tokens, "Tokens sampled."),
        ("steps_total", status.total_steps, "Steps of the engine."),
        ("weight_updates_total", status.total_updates, "Updates that came into force."),
        ("rejected_weight_updates_total", status.total_rejected_updates, "Updates that were refused."),
    ):
        yield MetricSamples(_PREFIX + name, text, [({}, value)])
