"""A refusal that every rollout of an evaluation would meet: a wrong key, an unknown model, a missing extra.

Parts: `Refusals`. Invariant: an evaluation is ended early only while no rollout of it has succeeded, so that one
request that is refused for what it says (moderation answers 403, too) never throws the others away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mettle.errors import UserError

LASTING = ("AuthenticationError", "NotFoundError", "UserError")
"""Error types that another rollout would meet as well, anywhere in the chain of causes."""


class Refusals:
    """Watches the rows of an evaluation as they finish."""

    def __init__(self) -> None:
        self._has_succeeded = False

    def see(self, outputs: Iterable[Mapping[str, Any]]) -> None:
        """Take note of finished rollouts.

        Raises: UserError, in one line, when one was refused for good and none has succeeded so far.
        """
        for output in outputs:
            error = output.get("error")
            if not error:
                self._has_succeeded = True
            elif not self._has_succeeded and any(kind in LASTING for kind in error["error_chain_str"].split(" -> ")):
                raise UserError(f"{error['message']}; no rollout could succeed, so the evaluation ended here")
