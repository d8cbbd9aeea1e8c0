"""How much each token has, against how much it may have.

Invariant: what was taken is given back once, however the work ends; refusals name the quota, the figure and the limit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.service.config import QuotaConfig
from mettle.sandbox.service.faults import QuotaExceeded, ServiceBusy
from mettle.sandbox.service.tokens import Holder

ROUNDING: Final = 1e-6
"""Of processors, which are added up in fractions."""


@dataclass
class Account:
    """What one token has now, and may have."""

    quota: QuotaConfig = field(default_factory=QuotaConfig)
    num_machines: int = 0
    memory_mb: int = 0
    disk_mb: int = 0
    cpus: float = 0.0
    num_judging: int = 0
    num_requests: int = 0
    burst: float | None = None
    refilled: float = 0.0


@dataclass
class Quotas:
    """The accounts of all tokens, by their names. `uncapped_cpus` is what a machine without `cpus` counts as."""

    clock: Callable[[], float] = time.monotonic
    accounts: dict[str, Account] = field(default_factory=dict)
    uncapped_cpus: float = 0.0

    @property
    def cpus(self) -> float:
        """Processors given out, to all tokens together."""
        return sum(account.cpus for account in self.accounts.values())

    def of(self, holder: Holder) -> Account:
        account = self.accounts.setdefault(holder.name, Account())
        account.quota = holder.quota
        return account

    @contextlib.contextmanager
    def request(self, holder: Holder) -> Iterator[None]:
        """Count a request while it is answered."""
        account, quota = self.of(holder), holder.quota
        self._take_from_burst(account, quota.max_requests_per_s)
        if account.num_requests >= quota.max_requests:
            raise ServiceBusy(f"token {holder.name!r} has {account.num_requests} requests open (max_requests)")
        account.num_requests += 1
        try:
            yield
        finally:
            account.num_requests -= 1

    @contextlib.contextmanager
    def judging(self, holder: Holder) -> Iterator[None]:
        """Count a judgement while it is waited for."""
        account, most = self.of(holder), holder.quota.max_judging
        if account.num_judging >= most:
            raise ServiceBusy(f"token {holder.name!r} has {account.num_judging} judgements open (max_judging {most})")
        account.num_judging += 1
        try:
            yield
        finally:
            account.num_judging -= 1

    def take_machine(self, holder: Holder, config: MachineConfig) -> Callable[[], None]:
        """Count a machine; the function returned gives it back."""
        account, quota, cpus = self.of(holder), holder.quota, config.cpus or self.uncapped_cpus
        figures: tuple[tuple[str, float, float, float | None], ...] = (
            ("machines", account.num_machines, 1, quota.max_machines),
            ("memory_mb", account.memory_mb, config.memory_mb, quota.max_memory_mb),
            ("disk_mb", account.disk_mb, config.disk_mb, quota.max_disk_mb),
            ("cpus", account.cpus, cpus, quota.max_cpus),
        )
        for what, has, wants, most in figures:
            if most is not None and has + wants > most + ROUNDING:
                raise QuotaExceeded(
                    f"token {holder.name!r} has {has:.10g} of max_{what} {most:.10g} and asks for {wants:.10g} more: "
                    "delete machines"
                )
        account.num_machines += 1
        account.memory_mb += config.memory_mb
        account.disk_mb += config.disk_mb
        account.cpus += cpus
        is_given_back = False

        def give_back() -> None:
            nonlocal is_given_back
            if not is_given_back:
                is_given_back = True
                account.num_machines -= 1
                account.memory_mb -= config.memory_mb
                account.disk_mb -= config.disk_mb
                account.cpus = account.cpus - cpus if account.num_machines else 0.0

        return give_back

    def _take_from_burst(self, account: Account, per_s: float) -> None:
        now, most = self.clock(), max(1.0, per_s)
        left = most if account.burst is None else min(most, account.burst + (now - account.refilled) * per_s)
        account.refilled = now
        if left < 1.0:
            account.burst = left
            raise ServiceBusy(f"more than {per_s:g} requests per second (max_requests_per_s)")
        account.burst = left - 1.0
