"""What an engine would have recorded under other sampling parameters, computed by the engine's own code.

Parts: `SampledToken` (a token with the context that penalties look at), `recorded_under`, `fit` (the value of one
parameter that explains what was recorded best). Legend: K tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mettle.inference.engine.penalties import LogitShifts
from mettle.inference.engine.sampler import Truncation
from mettle.records.sampling import SamplingParams

Floats = NDArray[np.float64]

SEARCHED: dict[str, tuple[float, ...]] = {
    "temperature": tuple(np.geomspace(0.1, 5.0, 40).tolist()),
    "repetition_penalty": tuple(np.linspace(0.8, 2.0, 25).tolist()),
    "presence_penalty": tuple(np.linspace(-2.0, 2.0, 41).tolist()),
    "frequency_penalty": tuple(np.linspace(-2.0, 2.0, 41).tolist()),
    "top_p": (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995),
    "top_k": (1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100, 128, 200, 256, 512, 1000),
    "min_p": (0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3),
}
"""Values that are tried of each parameter; between those of `REFINED` the best is looked for."""
REFINED = frozenset({"temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"})
NUM_REFINEMENTS = 12


@dataclass(slots=True)
class SampledToken:
    """A row as the engine's penalties see it: all before the completion is the prompt."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    sampled_ids: Sequence[int]


def recorded_under(
    logits_KV: Tensor, token_ids_K: Tensor, contexts: Sequence[tuple[Sequence[int], Sequence[int]]], how: SamplingParams
) -> Floats:
    """Log-probabilities [K] of the tokens as an engine that draws by `how` records them; -inf where it never draws."""
    every = list(range(len(contexts)))
    if how.has_penalty:
        rows = [SampledToken(how, prompt, sampled) for prompt, sampled in contexts]
        logits_KV = LogitShifts(rows, every, logits_KV.shape[1], logits_KV.device).apply(logits_KV)
    logits_KV = logits_KV / how.temperature
    if how.is_truncating:
        logits_KV = Truncation.of([how] * len(every), every, logits_KV.device).apply(logits_KV)
    found: Floats = torch.log_softmax(logits_KV, -1).gather(1, token_ids_K[:, None])[:, 0].double().cpu().numpy()
    return found


def fit(name: str, start: SamplingParams, error_of: Callable[[SamplingParams], float]) -> tuple[SamplingParams, float]:
    """(parameters, error) with the value of `name` at which the error is least."""

    def tried(value: float) -> tuple[float, float]:
        return error_of(_with(start, name, value)), value

    grid = SEARCHED[name]
    scores = [tried(value) for value in grid]
    best = min(range(len(grid)), key=lambda i: scores[i][0])
    error, value = scores[best]
    if name in REFINED:
        low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
        ratio = (math.sqrt(5) - 1) / 2
        for _ in range(NUM_REFINEMENTS):  # the golden section: two thirds of the interval stay each time
            left, right = high - ratio * (high - low), low + ratio * (high - low)
            one, other = tried(left), tried(right)
            error, value = min((error, value), one, other)
            low, high = (low, right) if one <= other else (left, high)
    return _with(start, name, value), error


def _with(start: SamplingParams, name: str, value: float) -> SamplingParams:
    changed: Any = {name: int(value) if name == "top_k" else float(value)}
    return replace(start, **changed)
