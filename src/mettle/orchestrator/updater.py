"""Keeps the engine on the newest weights.

Each published version is pushed to the engine and counts once the engine has acknowledged it and reproduced its canary.
The engine's health is asked now and then: one that was restarted, or serves another version than the acknowledged
one, gets the weights again before any group is opened. An evaluation that pins its version holds updates back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from mettle.errors import ProviderError, ServiceError
from mettle.inference.engine.protocol import WeightsRejected, WeightUpdate
from mettle.orchestrator.concurrency import EngineLoad
from mettle.orchestrator.policy import ServedPolicy
from mettle.orchestrator.server import PolicyServer, ServerHealth
from mettle.orchestrator.telling import tell
from mettle.orchestrator.waits import Waits
from mettle.records.versions import WeightVersion
from mettle.storage.database import transaction_soon
from mettle.storage.ledger import Ledger

logger = logging.getLogger(__name__)

OWNER = "orchestrator/updater"
MAX_REFUSALS = 3
REFUSAL_PAUSE_S = 1.0
PROBE_EVERY_S = 0.25
"""How often a lost engine is looked for."""


class UpdateOrder(Protocol):
    """Which version the engine should serve next."""

    def target(self, current: int, newest: int) -> int:
        """A version from `current` to `newest`: `current` holds the update back."""
        ...


class Updater:
    """Pushes versions, watches the engine. One task runs it."""

    def __init__(
        self,
        engine: PolicyServer,
        ledger: Ledger,
        policy: ServedPolicy,
        waits: Waits,
        order: UpdateOrder,
        *,
        poll_s: float,
        health_s: float,
        canary_tolerance: float,
        inference_budget_s: float,
        on_load: Callable[[EngineLoad], None] = lambda load: None,
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._policy = policy
        self._waits = waits
        self._order = order
        self._poll_s = poll_s
        self._health_s = health_s
        self._canary_tolerance = canary_tolerance
        self._inference_budget_s = inference_budget_s
        self._on_load = on_load
        self._probing: asyncio.Lock = asyncio.Lock()
        self._next_probe = 0.0
        self._num_refused = 0
        self.updates: list[WeightUpdate] = []
        """Updates since somebody last emptied the list; the metrics of a step."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._keep_in_touch()
            await self._push_what_is_due()
            await asyncio.sleep(self._poll_s)

    async def probe(self) -> ServerHealth | None:
        """Ask for the engine's health now; None when it does not answer (and the policy is marked as lost)."""
        async with self._probing:
            self._next_probe = asyncio.get_running_loop().time() + self._health_s
            try:
                health = await self._engine.health()
            except ProviderError as error:
                if self._policy.is_serving:
                    logger.warning("the engine does not answer: %s", error)
                    await tell(self._ledger, "engine_lost", str(error))
                self._policy.lose()
                return None
            if self._policy.is_serving and (
                health.version != self._policy.version or health.incarnation != self._policy.incarnation
            ):
                text = f"the engine serves v{health.version} where v{self._policy.version} was acknowledged"
                if health.incarnation != self._policy.incarnation:
                    text = f"the engine was restarted and serves v{health.version}"
                logger.warning("%s: pushing the weights again", text)
                await tell(self._ledger, "engine_changed", text, version=health.version)
                self._policy.lose()
            if health.load is not None:
                self._on_load(health.load)
            return health

    async def _keep_in_touch(self) -> None:
        """Probe when it is time; while nothing answers, wait for the engine under its budget."""
        if self._policy.is_serving and asyncio.get_running_loop().time() < self._next_probe:
            return
        if await self.probe() is not None:
            return
        budget_s = self._inference_budget_s
        started = asyncio.get_running_loop().time()
        with self._waits.told(OWNER, "inference", "engine answers /health", budget_s=budget_s):
            while await self.probe() is None:
                if asyncio.get_running_loop().time() - started > budget_s:
                    raise ServiceError(self._waits.stall(OWNER, "inference", "engine answers /health", budget_s))
                await asyncio.sleep(PROBE_EVERY_S)

    async def _push_what_is_due(self) -> None:
        weights = self._due()
        if weights is None:
            return
        try:
            health = await self._engine.health()
            update = await self._engine.update(weights)
            self._check(weights, update)
        except WeightsRejected as error:
            await self._refused(error)
        except ProviderError as error:
            logger.warning("could not update the engine: %s", error)
            self._policy.lose()
        else:
            self._num_refused = 0
            async with transaction_soon(self._ledger.database):
                self._ledger.acknowledge(weights, update.canary, update.update_ms)
            self.updates.append(update)
            self._policy.acknowledge(weights, health.incarnation)

    def _due(self) -> WeightVersion | None:
        """The weights to push now, or None when the engine has what it should have."""
        newest = self._ledger.newest_version()
        if newest is None:
            return None
        self._policy.published(newest.weights.version)
        target = self._order.target(self._policy.version, newest.weights.version)
        row = newest if target == newest.weights.version else self._ledger.version(target)
        if row is None:
            return None
        current = self._policy.acknowledged
        is_same = current is not None and (current.version, current.digest) == (row.weights.version, row.weights.digest)
        return None if is_same and self._policy.is_serving else row.weights

    def _check(self, weights: WeightVersion, update: WeightUpdate) -> None:
        canary = update.canary
        if canary is not None and not canary.mean_abs_diff <= self._canary_tolerance:
            raise WeightsRejected(
                f"the engine took v{weights.version}, but its canary differs by {canary.mean_abs_diff:.3g} on average "
                f"(at most {self._canary_tolerance:.3g}): it serves other weights"
            )

    async def _refused(self, error: WeightsRejected) -> None:
        self._num_refused += 1
        logger.warning("%s", error)
        await tell(self._ledger, "update_refused", str(error), attempt=self._num_refused)
        if self._num_refused >= MAX_REFUSALS:
            raise ServiceError(f"{error}; refused {self._num_refused} times, so the policy cannot be updated")
        await asyncio.sleep(REFUSAL_PAUSE_S)
