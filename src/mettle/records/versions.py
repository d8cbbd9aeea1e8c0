"""Policy versions. v0 is the initial policy; step n trains on v{n-1} and makes v{n}."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

POLICY = "policy"
"""The service that is a run's own engine, with the weights of the moment."""
CANARY_TOLERANCES: Final[Mapping[str, float]] = {"float32": 1e-3, "bfloat16": 0.02}
"""Largest mean difference of a canary by the type in which an engine computes: float32 shows 1e-7, a stale head .1 and
more; bfloat16 3e-4 to 7e-3."""


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """A published set of weights. `digest` is the sha256 of the weight file; `path` is the folder that holds it."""

    version: int
    path: str
    digest: str
    kind: str = "full"


@dataclass(frozen=True, slots=True)
class CanaryCheck:
    """How far the engine's logprobs of the canary tokens are from the trainer's, under the same version.

    Means and maxima of absolute differences in natural-log probability. Above `tolerance` the engine serves stale
    or wrong weights and the update does not count.
    """

    version: int
    mean_abs_diff: float
    max_abs_diff: float
    num_tokens: int


def staleness(step: int, version: int) -> int:
    """Versions between sampling and training: batch `step` trains v{step-1}."""
    return (step - 1) - version
