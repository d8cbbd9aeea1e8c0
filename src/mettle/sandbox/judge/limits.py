"""The limits of one run: what a caller may ask for, and how they become an order.

Processor time decides; the wall only guards against code that sleeps: time in which it would have run, had the host
given it a processor, is not counted (`zygote/attempt.py`). So a busy host does not turn right answers into wrong ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from mettle.errors import UserError
from mettle.sandbox.config import LanguageSpec, SandboxConfig
from mettle.sandbox.judge.cells import Program, TestOrder

_LEAST_MEMORY_MB: Final = 32
_MAX_PARALLEL: Final = 64
_WALL_FACTOR: Final = 3.0
_WALL_EXTRA_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Of one run."""

    timeout_s: float
    memory_mb: int
    output_kb: int

    def order(
        self, mode: str, payload: bytes, function: str | None = None, program: Program | None = None
    ) -> TestOrder:
        return TestOrder(
            mode=mode,
            payload=payload,
            function=function,
            cpu_s=self.timeout_s,
            wall_s=max(_WALL_FACTOR * self.timeout_s, self.timeout_s + _WALL_EXTRA_S),
            memory_bytes=self.memory_mb << 20,
            output_bytes=self.output_kb << 10,
            program=program,
        )


def make_limits(config: SandboxConfig, spec: LanguageSpec, timeout_s: object, memory_mb: object) -> RunLimits:
    """Those asked for, or else the language's, or else the config's; UserError for one that cannot be."""
    timeout_s = spec.timeout_s or config.timeout_s if timeout_s is None else timeout_s
    memory_mb = spec.memory_mb or config.memory_mb if memory_mb is None else memory_mb
    return RunLimits(_check_timeout(timeout_s), _check_memory(memory_mb), config.output_kb)


def check_parallel(num_parallel: object) -> None:
    """UserError for a number of tests at once that cannot be."""
    if not isinstance(num_parallel, int) or isinstance(num_parallel, bool) or not 1 <= num_parallel <= _MAX_PARALLEL:
        raise UserError(f"num_parallel is {num_parallel!r}; it must be a whole number from 1 to {_MAX_PARALLEL}")


def _check_timeout(timeout_s: object) -> float:
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not math.isfinite(timeout_s) or not 0 < timeout_s <= 3600:  # type: ignore[arg-type, operator]
        raise UserError(f"timeout_s is {timeout_s!r}; it must be a number above 0 and at most 3600")
    return float(timeout_s)  # type: ignore[arg-type]


def _check_memory(memory_mb: object) -> int:
    if not isinstance(memory_mb, int) or isinstance(memory_mb, bool) or not _LEAST_MEMORY_MB <= memory_mb <= 1 << 20:
        raise UserError(f"memory_mb is {memory_mb!r}; it must be a whole number of at least {_LEAST_MEMORY_MB}")
    return memory_mb
