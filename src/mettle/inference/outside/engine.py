"""The run's engine with workers from outside beside it: one `SamplingEngine`, so that nobody else knows of them.

    submit ──► eligible, and somebody has room? ──no──► own engine
                     │ yes                                 ▲
                     ▼                                     │ nobody takes it, its holder is silent, its answer is wrong
                  LeaseBook ──poll──► worker ──answer──► checks ──► listener

A request goes out once; what comes back unanswered is the own engine's. Eligible is what draws from the policy's own
distribution, as training demands, or takes its likeliest tokens, as evaluations may, and wants the tokens when they are
all there. Under the lock of this object nothing waits. Invariant: a listener hears of one end, whoever brings it.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from mettle.errors import MettleError
from mettle.inference.engine.limits import Limits, check_request
from mettle.inference.engine.protocol import (
    Choice,
    EngineStatus,
    GenerationRequest,
    PauseMode,
    SamplingEngine,
    TokenListener,
    WeightUpdate,
)
from mettle.inference.engine.sequences import DecodeText, RunningRequest
from mettle.inference.outside.auditor import Auditor
from mettle.inference.outside.checks import (
    AuditBounds,
    WorkFault,
    audit_fault,
    audit_request,
    chosen_for_audit,
    form_fault,
)
from mettle.inference.outside.config import OutsideConfig
from mettle.inference.outside.leases import LeaseBook
from mettle.inference.outside.roster import OutsideWorker, Roster
from mettle.inference.replicated import Serving

logger = logging.getLogger(__name__)

SWEEP_S: Final = 0.2
OFFER_S: Final = 1.0
"""How long a request waits for a worker that said that it has room."""
MAX_ROOM: Final = 4096
_SEED_BITS: Final = 62
_NOT_KNOWN: Final = "the request is not yours, or not any more"


class WorkRefused(MettleError):
    """An answer that does not count. `is_banned`: and neither will any other of that worker."""

    def __init__(self, message: str, *, is_banned: bool = False) -> None:
        super().__init__(message)
        self.is_banned = is_banned


class Assignment(NamedTuple):
    """A request that a worker is to sample, under `version`."""

    request: GenerationRequest
    version: int


class PolledWork(NamedTuple):
    """What a worker is told: the version that is served, new requests, and which of its own it may forget."""

    version: int
    assignments: list[Assignment]
    lost: list[str]


@dataclasses.dataclass(slots=True)
class _OutsideRequest:
    running: RunningRequest
    request: GenerationRequest
    serving: Serving


class OutsideEngine:
    """`own` and whoever works from outside. `auditor` is asked about their answers."""

    def __init__(
        self,
        own: SamplingEngine,
        auditor: Auditor,
        config: OutsideConfig,
        roster: Roster,
        serving: Serving,
        *,
        bounds: AuditBounds,
        eos_token_ids: Iterable[int] = (),
        decode_text: DecodeText | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.config, self.roster, self._own, self._auditor = config, roster, own, auditor
        self._bounds, self._eos, self._decode_text = bounds, frozenset(eos_token_ids), decode_text
        self._clock, self._rng = clock, rng or random.SystemRandom()
        self._lock = threading.Lock()
        self._book = LeaseBook(config.lease_s, config.max_lease_s)
        self._requests: dict[str, _OutsideRequest] = {}
        self._serving = serving
        self._known = {serving.version: serving}
        self._is_paused = False
        self._wakers: set[Callable[[], None]] = set()
        self._num_tokens = self._num_answers = 0
        first = own.status()
        self._limits, self._vocab_size = Limits(first.max_slots, first.max_model_len), first.vocab_size
        self._closing = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep_on, name="outside-leases", daemon=True)
        self._sweeper.start()

    @property
    def max_model_len(self) -> int:
        """Longest prompt and completion together."""
        return self._limits.max_model_len

    # The seam

    def submit(self, request: GenerationRequest, listener: TokenListener) -> None:
        """Give a request to the workers, or to the own engine."""
        if _is_eligible(request):
            check_request(request, self._limits, self._vocab_size)
            seeded = self._seeded(request)
            with self._lock:
                if self._has_room(request):
                    running = RunningRequest(request, listener)
                    self._requests[request.request_id] = _OutsideRequest(running, seeded, self._serving)
                    self._book.offer(request.request_id, request.n, self._clock())
                    self._wake()
                    return
        self._own.submit(request, listener)

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is."""
        with self._lock:
            found = self._requests.pop(request_id, None)
            self._book.forget(request_id)
        if found is None:
            self._own.abort(request_id)
        else:
            found.running.abort()

    def update_weights(self, folder: Path, version: int) -> WeightUpdate:
        """Serve a version, and give out no more work under the one before."""
        update = self._own.update_weights(folder, version)
        with self._lock:
            self._serving = Serving(folder.resolve(), version)
            self._known[version] = self._serving
            for older in [one for one in self._known if not 0 <= version - one <= self.config.max_lag]:
                del self._known[older]
            self._wake()
        return update

    def load_adapter(self, name: str, folder: Path, version: int | None = None) -> WeightUpdate:
        """Adapters beside the policy are the own engine's alone."""
        return self._own.load_adapter(name, folder, version)

    def unload_adapter(self, name: str) -> None:
        """See `load_adapter`."""
        self._own.unload_adapter(name)

    def pause(self, mode: PauseMode) -> None:
        """Stop: what workers have is taken from them, and waits in the own engine."""
        with self._lock:
            self._is_paused = True
            left = self._book.clear()
        self._own.pause(mode)
        self._give_to_own(left)

    def resume(self) -> None:
        """Go on."""
        self._own.resume()
        with self._lock:
            self._is_paused = False

    def status(self) -> EngineStatus:
        """The own engine's, and what is outside counted as under way."""
        own = self._own.status()
        with self._lock:
            return dataclasses.replace(
                own,
                num_running=own.num_running + self._book.num_leased,
                num_waiting=own.num_waiting + self._book.num_waiting,
                total_sampled_tokens=own.total_sampled_tokens + self._num_tokens,
                total_steps=own.total_steps + self._num_answers,
            )

    def close(self) -> None:
        """Abort what is left, and end both engines."""
        self._closing.set()
        self._sweeper.join()
        with self._lock:
            left = list(self._requests.values())
            self._requests.clear()
            for worker in self.roster.here():
                self.roster.leave(worker)
            self.roster.save()
        for one in left:
            one.running.abort()
        self._own.close()
        self._auditor.close()

    # The workers

    def serving(self) -> Serving:
        """What is served now."""
        with self._lock:
            return self._serving

    @contextmanager
    def locked(self) -> Iterator[None]:
        """While nobody else touches the roster."""
        with self._lock:
            yield

    def hear(self, key: str, count: int) -> OutsideWorker:
        """A word of a worker. Raises: JoinRefused."""
        with self._lock:
            return self.roster.hear(key, count)

    def wake_with(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake`, from any thread, whenever there is something to take or to fetch; returns what ends that."""
        self._wakers.add(wake)
        return lambda: self._wakers.discard(wake)

    def _wake(self) -> None:
        for wake in list(self._wakers):
            wake()

    def poll(self, worker: OutsideWorker, version: int, room: int, working_on: Sequence[str]) -> PolledWork:
        """Hear where a worker stands and give it what it has room for, if it serves what is served."""
        with self._lock:
            now = self._clock()
            worker.heard, worker.version = now, version
            lost = self._book.renew(worker.key, working_on, now)
            served = self._serving.version
            worker.room = min(max(room, 0), MAX_ROOM) if version in self._known and not self._is_paused else 0
            is_newest = version == served
            fits = lambda request_id: is_newest or self._requests[request_id].request.may_lag  # noqa: E731
            found = []
            for request_id in self._book.take(worker.key, worker.room, now, fits):
                one = self._requests[request_id]
                one.serving = self._known[version]
                worker.room -= one.request.n
                worker.taken += one.request.n
                found.append(Assignment(one.request, version))
                self.roster.changed()
            return PolledWork(served, found, lost)

    def answer(self, worker: OutsideWorker, request_id: str, choices: Sequence[Choice]) -> None:
        """Check an answer and tell whoever asked. Blocks.

        Raises: WorkRefused when it does not count.
        """
        with self._lock:
            if worker.state != "here" or not self._book.claim(worker.key, request_id):
                raise WorkRefused(_NOT_KNOWN)
            one = self._requests[request_id]
        try:
            fault = self._fault(worker, one, choices)
        except MettleError as error:
            # Nothing is known against the worker; whoever asked is served by the own engine.
            logger.warning("an answer could not be checked: %s", error)
            self._give_to_own([request_id])
            raise WorkRefused(f"the answer could not be checked: {error}") from error
        if fault is not None:
            self._ban(worker, one, fault)
            raise WorkRefused(f"{fault.kind}: {fault.text}", is_banned=True)
        with self._lock:
            self._book.forget(request_id)
            is_wanted = self._requests.pop(request_id, None) is not None
            if is_wanted:
                worker.sampled += len(choices)
                worker.num_tokens += sum(len(choice.token_ids) for choice in choices)
                self._num_tokens += sum(len(choice.token_ids) for choice in choices)
                self._num_answers += 1
                self.roster.changed()
        if is_wanted:
            _settle(one.running, choices, one.serving.version, f"worker {worker.name}")

    def leave(self, worker: OutsideWorker) -> None:
        """A worker goes; what it has is the own engine's."""
        with self._lock:
            left = self._book.held_by(worker.key)
            worker.returned += sum(self._requests[request_id].request.n for request_id in left)
            for request_id in left:
                self._book.forget(request_id)
            self.roster.leave(worker)
        self._give_to_own(left)

    def sweep(self) -> None:
        """End what has run out. A thread does it several times a second."""
        with self._lock:
            now = self._clock()
            expired = self._book.expired(now)
            names = {worker.key: worker for worker in self.roster.here()}
            for lease in expired:
                if (worker := names.get(lease.holder)) is not None:
                    worker.returned += lease.size
                    self.roster.changed()
            left = [lease.request_id for lease in expired] + self._book.untaken(now, OFFER_S)
            for worker in self.roster.silent(self.config.lease_s):
                self.roster.leave(worker)
            self.roster.save()
        self._give_to_own(left)

    def _sweep_on(self) -> None:
        while not self._closing.wait(SWEEP_S):
            try:
                self.sweep()
            except MettleError as error:  # a full disk, for one: the leases must run out all the same
                logger.warning("the list of workers is not written: %s", error)

    def _seeded(self, request: GenerationRequest) -> GenerationRequest:
        """With a seed for each choice: what a worker draws must follow from what it is told."""
        if request.seeds or request.params.seed is not None:
            return request
        return dataclasses.replace(request, seeds=tuple(secrets.randbits(_SEED_BITS) for _ in range(request.n)))

    def _has_room(self, request: GenerationRequest) -> bool:
        if self._is_paused:
            return False
        size, versions = request.n, self._known if request.may_lag else (self._serving.version,)
        rooms = [worker.room for worker in self.roster.here() if worker.version in versions]
        if max(rooms, default=0) < size or sum(rooms) - self._book.num_waiting < size:
            return False
        if self.config.max_share == 1.0:
            return True
        outside = self._book.num_leased + self._book.num_waiting + size
        own = self._own.status()
        return outside <= self.config.max_share * (outside + own.num_running + own.num_waiting)

    def _fault(self, worker: OutsideWorker, one: _OutsideRequest, choices: Sequence[Choice]) -> WorkFault | None:
        fault = form_fault(
            one.request,
            choices,
            vocab_size=self._vocab_size,
            max_model_len=self._limits.max_model_len,
            eos_token_ids=self._eos,
            decode_text=self._decode_text,
        )
        if fault is not None:
            return fault
        chosen = [choices[i] for i in chosen_for_audit(len(choices), self.config.check_share, self._rng)]
        name = one.request.request_id
        asked = [audit_request(f"{name}/{choice.index}", one.request, choice) for choice in chosen]
        redrawn = self._auditor.redraw(one.serving, asked)
        with self._lock:
            worker.checked += len(chosen)
        faults = (audit_fault(choice, again, self._bounds) for choice, again in zip(chosen, redrawn, strict=True))
        return next((fault for fault in faults if fault is not None), None)

    def _ban(self, worker: OutsideWorker, one: _OutsideRequest, fault: WorkFault) -> None:
        logger.warning("worker banned", extra={"worker": worker.name, "fault": fault.kind, "why": fault.text})
        with self._lock:
            worker.refused += one.request.n
            left = self._book.held_by(worker.key)
            for request_id in left:
                self._book.forget(request_id)
            self.roster.ban(worker, fault)
        self._give_to_own([one.request.request_id, *left])

    def _give_to_own(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            with self._lock:
                self._book.forget(request_id)
                found = self._requests.pop(request_id, None)
            if found is None or found.running.is_settled:
                continue
            try:
                self._own.submit(found.running.request, found.running.listener)
            except MettleError as error:
                found.running.fail(error)


def _is_eligible(request: GenerationRequest) -> bool:
    params = request.params
    return (
        params.is_the_policys
        and params.max_tokens != 0
        and not request.prompt_logprobs
        and not request.top_logprobs
        and not request.has_token_events
        and not request.adapter
    )


def _settle(running: RunningRequest, choices: Sequence[Choice], version: int, sampled_by: str) -> None:
    for mine, found in zip(running.choices, choices, strict=True):
        mine.token_ids, mine.logprobs = list(found.token_ids), list(found.logprobs)
        mine.versions, mine.replica = [version] * len(found.token_ids), sampled_by
        assert found.finish_reason is not None, "its form was checked"
        running.end_choice(mine, found.finish_reason, found.stop)
    running.finish()


_KEEPS_THE_PROTOCOL: type[SamplingEngine] = OutsideEngine
