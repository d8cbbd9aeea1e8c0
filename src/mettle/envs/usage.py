"""Tokens that a rollout has used, counted while it runs.

Parts: `UsageTracker`. Invariant: `usage` is one read-only mapping for the whole rollout, which shows each call's counts
as soon as they are added; `snapshot` tells "nothing was counted" (None) from "zero was counted".
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class UsageTracker:
    """`input_tokens` and `output_tokens`, summed over a rollout's model calls."""

    __slots__ = ("_is_seen", "_totals", "usage")

    def __init__(self) -> None:
        self._totals = {"input_tokens": 0.0, "output_tokens": 0.0}
        self._is_seen = False
        self.usage: Mapping[str, float] = MappingProxyType(self._totals)

    def increment(self, input_tokens: float = 0, output_tokens: float = 0) -> None:
        """Add tokens that were used, by the policy or by any other model that the environment asked."""
        self._is_seen = True
        self._totals["input_tokens"] += input_tokens
        self._totals["output_tokens"] += output_tokens

    def increment_from_response(self, response: Any) -> None:
        """Add what a response says it used; one without counts adds nothing."""
        usage = getattr(response, "usage", None)
        if usage is not None:
            self.increment(usage.prompt_tokens or 0, usage.completion_tokens or 0)

    def snapshot(self) -> dict[str, float] | None:
        """The counts as they are, or None when no call told any."""
        return dict(self._totals) if self._is_seen else None
