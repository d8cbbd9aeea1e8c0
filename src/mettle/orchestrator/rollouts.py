"""Sampling of requests from its configuration, and the seed of each group."""

from __future__ import annotations

import hashlib

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


def group_seed(root: int, name: str, attempt: int = 0) -> int:
    """The seed of a group's requests: a function of the run's seed, of which group it is, and of how often it failed.

    So what is sampled does not depend on when a request arrives. A group cut short by a kill is sampled again alike.
    """
    return int.from_bytes(hashlib.sha256(f"{root}/{name}/{attempt}".encode()).digest()[:7], "little")
