"""Who has which request, and until when. Pure: times come from the caller's monotonic clock, nothing waits here.

    waiting ──take──► leased ──claim──► claimed (its answer is being checked) ──► gone
       ▲                │ silent for lease_s, or had for max_lease_s
       └────expire──────┘

Invariant: a request has one holder at most, and only its holder can claim it, once; so an answer that comes late or
twice finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class RequestLease:
    """A request of `size` completions that `holder` has since `since`; it was heard of at `heard` last."""

    request_id: str
    holder: str
    size: int
    since: float
    heard: float


class LeaseBook:
    """The requests that are for workers from outside."""

    def __init__(self, lease_s: float, max_lease_s: float) -> None:
        self._lease_s, self._max_lease_s = lease_s, max_lease_s
        self._waiting: dict[str, tuple[int, float]] = {}
        self._leases: dict[str, RequestLease] = {}
        self._claimed: dict[str, RequestLease] = {}

    @property
    def num_waiting(self) -> int:
        """Completions that nobody has taken."""
        return sum(size for size, _ in self._waiting.values())

    @property
    def num_leased(self) -> int:
        """Completions that somebody has, or that are being checked."""
        return sum(lease.size for book in (self._leases, self._claimed) for lease in book.values())

    def offer(self, request_id: str, size: int, now: float) -> None:
        """Put a request up."""
        assert request_id not in self._leases, "it was put up once"
        self._waiting[request_id] = (size, now)

    def take(
        self, holder: str, room: int, now: float, fits: Callable[[str], bool] = lambda request_id: True
    ) -> list[str]:
        """Requests that fit a holder with room for so many completions, the oldest first."""
        taken = []
        for request_id, (size, _) in list(self._waiting.items()):
            if size <= room and fits(request_id):
                room -= size
                del self._waiting[request_id]
                self._leases[request_id] = RequestLease(request_id, holder, size, now, now)
                taken.append(request_id)
        return taken

    def renew(self, holder: str, request_ids: Iterable[str], now: float) -> list[str]:
        """Hear of requests that a holder works on; those of them that it does not have (any more)."""
        lost = []
        for request_id in request_ids:
            lease = self._leases.get(request_id) or self._claimed.get(request_id)
            if lease is None or lease.holder != holder:
                lost.append(request_id)
            else:
                lease.heard = now
        return lost

    def claim(self, holder: str, request_id: str) -> bool:
        """Whether the holder may answer; from here on nobody else can, and nor can it again."""
        lease = self._leases.get(request_id)
        if lease is None or lease.holder != holder:
            return False
        self._claimed[request_id] = self._leases.pop(request_id)
        return True

    def holder_of(self, request_id: str) -> str | None:
        """Who has a request, if anybody has."""
        lease = self._leases.get(request_id) or self._claimed.get(request_id)
        return None if lease is None else lease.holder

    def held_by(self, holder: str) -> list[str]:
        """What a holder has and has not answered."""
        return [lease.request_id for lease in self._leases.values() if lease.holder == holder]

    def forget(self, request_id: str) -> None:
        """A request is settled, or goes elsewhere."""
        self._waiting.pop(request_id, None)
        self._leases.pop(request_id, None)
        self._claimed.pop(request_id, None)

    def expired(self, now: float) -> list[RequestLease]:
        """Leases that have run out, which are ended here."""
        found = [
            lease
            for lease in self._leases.values()
            if now - lease.heard > self._lease_s or now - lease.since > self._max_lease_s
        ]
        for lease in found:
            del self._leases[lease.request_id]
        return found

    def untaken(self, now: float, offer_s: float) -> list[str]:
        """Requests that nobody took within `offer_s`, which are ended here."""
        found = [request_id for request_id, (_, since) in self._waiting.items() if now - since > offer_s]
        for request_id in found:
            del self._waiting[request_id]
        return found

    def clear(self) -> list[str]:
        """End everything that is not being checked."""
        found = [*self._waiting, *self._leases]
        self._waiting.clear()
        self._leases.clear()
        return found
