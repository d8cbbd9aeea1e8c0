"""Policy versions. v0 is the initial policy; step n trains on v{n-1} and makes v{n}."""

from __future__ import annotations

from dataclasses import dataclass


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
