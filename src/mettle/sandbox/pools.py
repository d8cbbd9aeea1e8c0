"""What every pool does when it starts: measure what isolates it here, and refuse a host that gives too little."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from mettle.errors import UserError
from mettle.sandbox import isolation
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.isolation import IsolationReport


class MeasuredPool(ABC):
    """Used as `async with`. Invariant: a pool whose start fails holds nothing."""

    def __init__(self, config: SandboxConfig | None) -> None:
        self.config = config or SandboxConfig()
        self._isolation: IsolationReport | None = None

    @property
    def isolation(self) -> IsolationReport:
        """What was measured to be in force when the pool started. Raises: UserError before that."""
        if self._isolation is None:
            name = type(self).__name__
            raise UserError(f"the pool has not been started; use `async with {name}(...) as pool`")
        return self._isolation

    async def __aenter__(self) -> Self:
        try:
            report = await self.measure()
            isolation.check(report, self.config)
        except BaseException:
            await self.close()
            raise
        self._isolation = report
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @abstractmethod
    async def measure(self) -> IsolationReport:
        """Find out what is in force here, by running code that tries the doors."""

    @abstractmethod
    async def close(self) -> None:
        """End everything that the pool has made. Safe to call twice."""
