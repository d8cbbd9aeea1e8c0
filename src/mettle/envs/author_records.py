"""The records and typed dicts that authors of environments make or annotate with by hand, under verifiers' names.

Parts: typed dicts for tokens, prices and versions; records for rows, scores, endpoints and evaluations. Invariant: the
library's own loop works on none of them; they are plain data, and nothing is imported for them.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from mettle.records.record import Record


class TokenUsage(TypedDict):
    """Tokens of one rollout."""

    input_tokens: float
    output_tokens: float
    final_input_tokens: NotRequired[float]
    final_output_tokens: NotRequired[float]


class ModelPricing(TypedDict):
    """US dollars per million tokens."""

    input_usd_per_mtok: float
    output_usd_per_mtok: float


class EvalCost(TypedDict):
    """US dollars."""

    input_usd: float
    output_usd: float
    total_usd: float


class VersionInfo(TypedDict):
    """What made the results."""

    vf_version: str
    vf_commit: str | None
    env_version: str | None
    env_commit: str | None


class BaseRolloutInput(Record):
    """A row that a rollout starts from: `prompt` and `example_id`."""

    __slots__ = ()


class RolloutInput(BaseRolloutInput):
    """A row with what its rewards need: `answer`, `info`, `task`."""

    __slots__ = ()
    FIELDS = frozenset({"answer", "info", "task"})


class RolloutOutput(Record):
    """A finished rollout as it is saved."""

    __slots__ = ()


class ErrorData(Record):
    """A failure as it is saved: `error`, `message`, `error_chain_repr`, `error_chain_str`."""

    __slots__ = ()


class RolloutScore(Record):
    """One rollout's `reward` and `metrics`."""

    __slots__ = ()


class RolloutScores(Record):
    """A group's `reward` (a list) and `metrics` (a list for each name)."""

    __slots__ = ()


class GenerateInputs(Record):
    """Columns to generate from: `prompt`, and `answer`, `info`, `task`, `completion`."""

    __slots__ = ()
    FIELDS = frozenset({"answer", "info", "task", "completion"})


class GenerateMetadata(Record):
    """What was evaluated and what came of it."""

    __slots__ = ()


class ProcessedOutputs(Record):
    """Token arrays of finished rollouts, as trainers of 0.1 took them."""

    __slots__ = ()


class EndpointConfig(Record):
    """A row of an endpoint registry: `model`, `base_url`, `api_key_var`, `api_client_type`, `extra_headers`."""

    __slots__ = ()
    FIELDS = frozenset({"api_client_type", "extra_headers"})


class EvalConfig(Record):
    """One evaluation as it is asked for. What is not given reads as None."""

    __slots__ = ()

    def __missing__(self, name: str) -> Any:
        return None


class EvalRunConfig(EvalConfig):
    """Several evaluations: `evals`."""

    __slots__ = ()
