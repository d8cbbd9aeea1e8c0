"""Several engines as one: requests spread over them, weights that count once all of them serve them.

Each replica has a keeper, a thread that starts it, watches it and starts it again with the newest version. Parts:
`Serving` (what every replica must serve), `ReplicatedEngine`. A replica that dies gives its requests to others, unless
their listeners have heard tokens already. Invariants: a replica gets requests only while it serves the acknowledged
version; an update that one replica refuses is served by none; a completion says which replica sampled it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from mettle.errors import MettleError, ServiceError, UserError
from mettle.inference.engine.limits import Limits, check_request
from mettle.inference.engine.protocol import (
    EngineBusy,
    EngineLost,
    EngineStatus,
    EngineStopped,
    Generation,
    GenerationRequest,
    PauseMode,
    SamplingEngine,
    TokenEvent,
    TokenListener,
    WeightsRejected,
    WeightUpdate,
)
from mettle.inference.remote import RemoteEngine
from mettle.inference.routing import Affinity
from mettle.web.backoff import Backoff

logger = logging.getLogger(__name__)

WATCH_S: Final = 0.2
AWAITED_S: Final = 0.5
MAX_FAILED_STARTS: Final = 5


class ReplicaAwaited(ServiceError):
    """A replica that others start is not there yet, or not any more: it is asked for again, and that is no failure."""


class Serving(NamedTuple):
    """The published weights that are served, or None for those that the model came with, and their version."""

    weights: Path | None
    version: int


StartReplica = Callable[[Serving], SamplingEngine]
"""Starts a replica and returns it once it can answer. It is called in a thread that outlives what it starts.

Raises: UserError for what no other attempt can mend, ReplicaAwaited while there is nothing to start."""


class Replica:
    """One place for an engine, which is None while none serves there."""

    def __init__(self, number: int, start: StartReplica) -> None:
        self.number = number
        self.start = start
        self.engine: SamplingEngine | None = None
        self.load = 0
        self.is_retired = False

    @property
    def name(self) -> str:
        """What its tokens say of where they were sampled."""
        return self.engine.name if isinstance(self.engine, RemoteEngine) else f"replica-{self.number}"


class ReplicatedEngine:
    """One engine of several. Returns once all of them have started.

    Raises: UserError, ServiceError when a replica does not start.
    """

    def __init__(
        self,
        starts: Sequence[StartReplica],
        serving: Serving,
        *,
        backoff: Backoff = Backoff(),  # noqa: B008 - frozen
        on_death: Callable[[MettleError], None] | None = None,
    ) -> None:
        self._replicas = [Replica(number, start) for number, start in enumerate(starts)]
        self._serving = serving
        self._backoff = backoff
        self._on_death = on_death
        self._affinity = Affinity()
        self._lock = threading.Lock()
        self._update_lock = threading.Lock()
        self._closing = threading.Event()
        self._started = threading.Semaphore(0)
        self._routed: dict[str, _Routed] = {}
        self._past = EngineStatus(0, 0, 0, False, True, 0, 0, 0)
        self._adapters: dict[str, tuple[Path, int | None]] = {}
        self._pause: PauseMode | None = None
        self._death: MettleError | None = None
        self._num_updates = self._num_rejected = 0
        self._keepers = [
            threading.Thread(target=self._keep, args=(replica,), name=f"replica-{replica.number}", daemon=True)
            for replica in self._replicas
        ]
        for keeper in self._keepers:
            keeper.start()
        for _ in self._replicas:
            self._started.acquire()
        self._raise_early_death()
        while not self._live():  # those that are awaited need not all be there
            self._closing.wait(WATCH_S)
            self._raise_early_death()
        first = self.status()
        self._limits, self._vocab_size = Limits(first.max_slots, first.max_model_len), first.vocab_size

    def _raise_early_death(self) -> None:
        if self._death is not None:
            self.close()
            raise self._death

    def submit(self, request: GenerationRequest, listener: TokenListener) -> None:
        """Give a request to a replica."""
        check_request(request, self._limits, self._vocab_size, keeps_grammars=True)
        self._check_open()
        self._route(_Routed(self, request, listener))

    def abort(self, request_id: str) -> None:
        """End a request where it runs."""
        with self._lock:
            routed = self._routed.get(request_id)
            if routed is not None:
                routed.is_aborted = True
            engine = None if routed is None or routed.replica is None else routed.replica.engine
        if engine is not None:
            engine.abort(request_id)

    def update_weights(self, folder: Path, version: int) -> WeightUpdate:
        """Have every replica serve the version; one that dies meanwhile comes back with it."""
        with self._update_lock:
            self._check_open()
            live = self._live()
            if not live:
                raise EngineStopped("no replica serves at the moment; they are being started")
            with ThreadPoolExecutor(len(live)) as pool:
                outcomes = list(pool.map(lambda engine: _attempt(engine, folder, version), live.values()))
            updates = [outcome for outcome in outcomes if isinstance(outcome, WeightUpdate)]
            refusals = [outcome for outcome in outcomes if isinstance(outcome, WeightsRejected)]
            if refusals or not updates:
                self._num_rejected += 1
                for replica, outcome in zip(list(live), outcomes, strict=True):
                    if not isinstance(outcome, WeightsRejected):
                        self._go_back(replica)
                raise refusals[0] if refusals else EngineStopped(f"no replica took version {version}: {outcomes[0]}")
            self._serving = Serving(folder, version)
            self._num_updates += 1
            for replica, outcome in zip(list(live), outcomes, strict=True):
                if not isinstance(outcome, WeightUpdate):
                    logger.warning("replica %d did not take v%d: %s", replica.number, version, outcome)
                    replica.is_retired = True
            return _worst(version, updates)

    def load_adapter(self, name: str, folder: Path, version: int | None = None) -> WeightUpdate:
        """Have every replica serve the adapter; it is taken back where one of them refuses it."""
        with self._update_lock:
            self._check_open()
            live = self._live()
            if not live:
                raise EngineStopped("no replica serves at the moment; they are being started")
            updates: list[WeightUpdate] = []
            for replica, engine in live.items():
                try:
                    updates.append(engine.load_adapter(name, folder, version))
                except WeightsRejected:
                    for other in list(live)[: len(updates)]:
                        other.is_retired = True
                    raise
                except MettleError as error:
                    logger.warning("replica %d did not take adapter %s: %s", replica.number, name, error)
                    replica.is_retired = True
            if not updates:
                raise EngineStopped(f"no replica took adapter {name}")
            self._adapters[name] = (folder, version)
            return _worst(updates[0].version, updates)

    def unload_adapter(self, name: str) -> None:
        """Have every replica take no more requests for it."""
        with self._update_lock:
            self._adapters.pop(name, None)
            self._on_all(lambda engine: engine.unload_adapter(name))

    def pause(self, mode: PauseMode) -> None:
        """Stop all of them."""
        with self._update_lock:
            self._pause = mode
            self._on_all(lambda engine: engine.pause(mode))

    def resume(self) -> None:
        """Go on with all of them."""
        with self._update_lock:
            self._pause = None
            self._on_all(lambda engine: engine.resume())

    def status(self) -> EngineStatus:
        """Sums over the replicas; `version` is the one that all of them have acknowledged."""
        parts = [engine.status() for engine in self._live().values()]
        total = self._past
        for part in parts:
            total = _added(total, part)
        one = parts[0] if parts else None
        return dataclasses.replace(
            total,
            version=self._serving.version,
            adapters=one.adapters if one else (),
            dtype=one.dtype if one else self._past.dtype,
            canary_tolerance=one.canary_tolerance if one else self._past.canary_tolerance,
            is_paused=self._pause is not None,
            is_alive=self._death is None and not self._closing.is_set(),
            max_slots=sum(part.max_slots for part in parts) if one else self._limits.max_slots,
            max_model_len=one.max_model_len if one else self._limits.max_model_len,
            vocab_size=one.vocab_size if one else self._vocab_size,
            total_updates=self._num_updates,
            total_rejected_updates=self._num_rejected,
        )

    def close(self) -> None:
        """End all of them."""
        self._closing.set()
        for keeper in self._keepers:
            keeper.join()

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    @property
    def num_serving(self) -> int:
        """Replicas that take requests now."""
        return len(self._live())

    def route_again(self, routed: _Routed, error: MettleError) -> None:
        """A replica failed under a request: another takes it if nobody has heard of it, or the listener is told."""
        is_lost = isinstance(error, EngineLost | EngineStopped | EngineBusy) and not self._closing.is_set()
        if is_lost and not routed.has_spoken:
            with contextlib.suppress(MettleError):
                self._route(routed)
                return
        self.forget(routed)
        routed.listener.on_failure(error)

    def forget(self, routed: _Routed) -> None:
        """A request has ended."""
        with self._lock:
            self._routed.pop(routed.request.request_id, None)
            routed.leave()

    def _route(self, routed: _Routed) -> None:
        """Give a request to a replica that has not failed it. Raises: EngineBusy when there is none."""
        while True:
            with self._lock:
                open_to = {r.number: r.load for r in self._replicas if r.engine is not None and not r.is_retired}
                loads = {number: load for number, load in open_to.items() if number not in routed.tried}
                if not loads:
                    self._routed.pop(routed.request.request_id, None)
                    routed.leave()
                    raise routed.refusal or EngineBusy("no replica can take the request now; try again later")
                replica = self._replicas[self._affinity.choose(routed.request.prompt_ids, loads)]
                engine = replica.engine
                routed.go_to(replica)
                self._routed[routed.request.request_id] = routed
            try:
                assert engine is not None, "only replicas that serve are chosen"
                engine.submit(routed.request, routed)
            except (EngineBusy, EngineStopped) as error:
                routed.refusal = error
            else:
                return

    def _keep(self, replica: Replica) -> None:
        num_failed, has_started = 0, False
        while not self._closing.is_set():
            try:
                self._admit(replica, replica.start(self._serving))
            except ReplicaAwaited:
                if not has_started and self._live():
                    self._started.release()
                    has_started = True
                self._closing.wait(AWAITED_S)
                continue
            except MettleError as error:
                num_failed += 1
                if not has_started or isinstance(error, UserError) or num_failed >= MAX_FAILED_STARTS:
                    self._die(ServiceError(f"replica {replica.number}: {error}") if has_started else error)
                    break
                logger.warning("replica %d does not start: %s", replica.number, error)
                self._closing.wait(self._backoff.wait_s(num_failed - 1))
                continue
            if not has_started:
                self._started.release()
            num_failed, has_started = 0, True
            self._watch(replica)
        if not has_started:  # another one has ended the whole meanwhile; whoever waits must hear of it
            self._started.release()

    def _admit(self, replica: Replica, engine: SamplingEngine) -> None:
        """Let a replica take requests, once it serves what the others serve."""
        with self._update_lock:
            try:
                weights, version = self._serving
                if weights is not None and engine.status().version != version:
                    engine.update_weights(weights, version)
                for name, (folder, pinned) in self._adapters.items():
                    engine.load_adapter(name, folder, pinned)
                if self._pause is not None:
                    engine.pause(self._pause)
            except MettleError:
                engine.close()
                raise
            with self._lock:
                replica.engine, replica.is_retired = engine, False
        logger.info("replica serves", extra={"replica": replica.number, "version": self._serving.version})

    def _watch(self, replica: Replica) -> None:
        engine = replica.engine
        assert engine is not None, "a replica that was admitted has an engine"
        while not self._closing.is_set() and not replica.is_retired and engine.status().is_alive:
            self._closing.wait(WATCH_S)
        with self._lock:
            self._past = _added(self._past, dataclasses.replace(engine.status(), num_running=0, num_waiting=0))
            replica.engine = None
        if not self._closing.is_set():
            logger.warning("replica %d is gone; its requests go to others and it is started again", replica.number)
        engine.close()

    def _die(self, error: MettleError) -> None:
        is_first = self._death is None
        self._death = self._death or error
        self._closing.set()
        if is_first and self._on_death is not None:
            self._on_death(error)

    def _go_back(self, replica: Replica) -> None:
        """Another replica refused the version that this one serves by now."""
        engine = replica.engine
        weights, version = self._serving
        try:
            if engine is None or weights is None:
                raise EngineStopped("there is nothing to go back to but a new start")
            engine.update_weights(weights, version)
        except MettleError:
            replica.is_retired = True

    def _live(self) -> dict[Replica, SamplingEngine]:
        with self._lock:
            return {r: r.engine for r in self._replicas if r.engine is not None and not r.is_retired}

    def _on_all(self, do: Callable[[SamplingEngine], None]) -> None:
        self._check_open()
        live = self._live()
        with ThreadPoolExecutor(max(1, len(live))) as pool:
            for replica, error in zip(live, pool.map(lambda engine: _tried(do, engine), live.values()), strict=True):
                replica.is_retired = replica.is_retired or error is not None

    def _check_open(self) -> None:
        if self._death is not None or self._closing.is_set():
            raise EngineStopped(str(self._death or "the engine is shutting down"))


class _Routed:
    """A request and where it runs; the listener of whichever engine has it."""

    def __init__(self, engine: ReplicatedEngine, request: GenerationRequest, listener: TokenListener) -> None:
        self.request, self.listener = request, listener
        self.replica: Replica | None = None
        self._sampled_by = ""
        self.tried: set[int] = set()
        self.has_spoken = self.is_aborted = False
        self.refusal: MettleError | None = None
        self._engine = engine

    def go_to(self, replica: Replica) -> None:
        """Under the engine's lock."""
        self.leave()
        self.replica, self._sampled_by = replica, replica.name
        self.tried.add(replica.number)
        replica.load += self.request.n

    def leave(self) -> None:
        """Under the engine's lock."""
        if self.replica is not None:
            self.replica.load -= self.request.n
            self.replica = None

    def on_token(self, event: TokenEvent) -> None:
        self.has_spoken = True
        self.listener.on_token(event)

    def on_finish(self, generation: Generation) -> None:
        is_cut = any(choice.finish_reason == "abort" for choice in generation.choices)
        if is_cut and not self.is_aborted and not self._engine.is_closing:
            # A replica that goes ends what it has; nobody asked for that.
            self._engine.route_again(self, EngineLost("a replica went away under the request"))
            return
        self._engine.forget(self)
        for choice in generation.choices:  # a replica that is several itself has said which of them
            choice.replica = f"{self._sampled_by}/{choice.replica}" if choice.replica else self._sampled_by
        self.listener.on_finish(generation)

    def on_failure(self, error: MettleError) -> None:
        self._engine.route_again(self, error)


def _attempt(engine: SamplingEngine, folder: Path, version: int) -> WeightUpdate | MettleError:
    try:
        return engine.update_weights(folder, version)
    except MettleError as error:
        return error


def _tried(do: Callable[[SamplingEngine], None], engine: SamplingEngine) -> MettleError | None:
    try:
        do(engine)
    except MettleError as error:
        return error
    return None


def _worst(version: int, updates: Sequence[WeightUpdate]) -> WeightUpdate:
    canaries = [update.canary for update in updates if update.canary is not None]
    worst = max(canaries, key=lambda canary: canary.mean_abs_diff, default=None)
    return WeightUpdate(version, max(u.load_ms for u in updates), max(u.swap_ms for u in updates), worst)


def _added(total: EngineStatus, part: EngineStatus) -> EngineStatus:
    summed = {
        field.name: getattr(total, field.name) + getattr(part, field.name)
        for field in dataclasses.fields(EngineStatus)
        if field.name.startswith(("total_", "num_", "kv_"))
    }
    return dataclasses.replace(total, **summed)


_KEEPS_THE_PROTOCOL: type[SamplingEngine] = ReplicatedEngine
