"""Figures for Prometheus, in its text format. Few enough to write by hand: no client library in the hot path."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mettle.inference.engine.protocol import EngineStatus

_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class RequestMetrics:
    """How long requests took, cancelled and failed ones included."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._counts = [0] * len(_BUCKETS_S)
        self._num_requests = 0
        self._total_s = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count a request in when it ends, however it ends."""
        started = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - started
            self._num_requests += 1
            self._total_s += seconds
            for i, bound in enumerate(_BUCKETS_S):
                self._counts[i] += seconds <= bound

    def lines(self) -> Iterator[str]:
        """The histogram."""
        name = "mettle_inference_request_seconds"
        yield f"# HELP {name} Time from taking a request to its last token."
        yield f"# TYPE {name} histogram"
        for bound, count in zip(_BUCKETS_S, self._counts, strict=True):
            yield f'{name}_bucket{{le="{bound}"}} {count}'
        yield f'{name}_bucket{{le="+Inf"}} {self._num_requests}'
        yield f"{name}_sum {self._total_s:.6f}"
        yield f"{name}_count {self._num_requests}"


def prometheus_text(status: EngineStatus, requests: RequestMetrics) -> str:
    """The page at /metrics."""
    lines: list[str] = []
    for name, kind, value, text in _figures(status):
        lines += [f"# HELP mettle_inference_{name} {text}", f"# TYPE mettle_inference_{name} {kind}"]
        lines.append(f"mettle_inference_{name} {value}")
    return "\n".join([*lines, *requests.lines()]) + "\n"


def _figures(status: EngineStatus) -> list[tuple[str, str, int, str]]:
    return [
        ("policy_version", "gauge", status.version, "Version of the weights in use."),
        ("running_sequences", "gauge", status.num_running, "Sequences being decoded."),
        ("waiting_sequences", "gauge", status.num_waiting, "Sequences waiting for a slot."),
        ("slots", "gauge", status.max_slots, "Sequences that can be decoded at a time."),
        ("max_model_length", "gauge", status.max_model_len, "Longest sequence in tokens."),
        ("kv_bytes", "gauge", status.kv_bytes, "Memory set aside for keys and values."),
        ("paused", "gauge", int(status.is_paused), "1 while sampling is paused."),
        ("requests_total", "counter", status.total_requests, "Requests taken."),
        ("aborted_requests_total", "counter", status.total_aborted, "Requests ended by their client."),
        ("prompt_tokens_total", "counter", status.total_prompt_tokens, "Tokens of prompts."),
        ("sampled_tokens_total", "counter", status.total_sampled_tokens, "Tokens sampled."),
        ("steps_total", "counter", status.total_steps, "Steps of the engine."),
        ("weight_updates_total", "counter", status.total_updates, "Updates that came into force."),
        ("rejected_weight_updates_total", "counter", status.total_rejected_updates, "Updates that were refused."),
    ]
