"""When the search must end: a refusal that everything would meet, a full disk, or failure upon failure.

Parts: `Guard`. The library logs an exception and goes on, which with a dead endpoint would be for ever; here the third
failure in a row, and any that another try would meet as well, ends the search with that error. Invariant: one good
answer clears what failed before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mettle.envs.errors import ErrorChain
from mettle.errors import ServiceError, StorageError, UserError
from mettle.evals.refusals import is_lasting

MAX_FAILURES_IN_A_ROW = 3


class Guard:
    """Counts failures in a row, by what failed. `fatal` is the error that ends the search."""

    def __init__(self) -> None:
        self.fatal: Exception | None = None
        self.num_failures = 0
        self.last_failure: str | None = None
        self._in_a_row: dict[str, int] = {}

    def __call__(self, _: Any) -> bool:
        """The library's question whether to stop."""
        return self.fatal is not None

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Whatever the block raises is counted against `what` and rises; once the search must end, nothing is tried."""
        if self.fatal is not None:
            raise self.fatal
        try:
            yield
        except Exception as error:
            self._count(what, error)
            raise
        self._in_a_row[what] = 0

    def _count(self, what: str, error: Exception) -> None:
        self.num_failures += 1
        self.last_failure = f"{type(error).__name__}: {error}"
        self._in_a_row[what] = self._in_a_row.get(what, 0) + 1
        if isinstance(error, UserError | StorageError):
            self.fatal = error
            return
        if is_lasting(str(ErrorChain(error))):
            self.fatal = UserError(f"{what}: {error}")
            return
        if self._in_a_row[what] >= MAX_FAILURES_IN_A_ROW:
            self.fatal = ServiceError(f"{what} failed {self._in_a_row[what]} times in a row: {error}")
