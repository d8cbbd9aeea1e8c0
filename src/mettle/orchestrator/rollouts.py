"""Sampling of requests from its configuration."""

from __future__ import annotations

from mettle.orchestrator.config import SamplingConfig
from mettle.records.sampling import SamplingParams


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """The sampling of requests from its configuration."""
    return SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        seed=config.seed,
    )
