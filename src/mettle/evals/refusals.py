"""A refusal that every rollout of an evaluation would meet: a wrong key, an unknown model, a missing extra.

Parts: `Refusals`. Invariant: an evaluation is ended early only while no rollout of it has succeeded, so that one
request that is refused for what it says (moderation answers 403, too) never throws the others away.
"""

from __future__ import annotations

from collections.abc import Iterable

from mettle.errors import UserError
from mettle.records.tasks import UNSCORED, RolloutRecord

LASTING = ("AuthenticationError", "NotFoundError", "UserError")
"""Error types that another rollout would meet as well, anywhere in the chain of causes."""


class Refusals:
    """Watches the rollouts of an evaluation as they finish."""

    def __init__(self) -> None:
        self._has_succeeded = False

    def see(self, records: Iterable[RolloutRecord]) -> None:
        """Take note of finished rollouts.

        Raises: UserError, in one line, when one was refused for good and none has succeeded so far.
        """
        for record in records:
            if record.error_kind in (None, UNSCORED):
                self._has_succeeded = True
            elif not self._has_succeeded and is_lasting(record.error_chain):
                raise UserError(f"{record.error}; no rollout could succeed, so the evaluation ended here")


def is_lasting(error_chain: str | None) -> bool:
    """Whether another try would meet the same, by the names of an error and its causes."""
    return any(kind in LASTING for kind in (error_chain or "").split(" -> "))
