"""Who hands pieces of weights on: other workers, which nobody has to trust, and the run, which has them all.

    a piece ─► its home among the relays ─► two others ─► the run
                 └─ has it not yet: ask once more when the other pieces are here

Each piece has a home, which follows from its hash. Whoever fetches a folder begins with the pieces whose home it is,
and hands each on as soon as it is here. So workers that all begin at once take little more than one copy from the run.
Parts: `relay_address`, `PieceAnswer`, `Relays`. Invariant: a relay that lies, is slow or dies costs time, with a bound,
and is then left out; what a piece is follows from its hash alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import urlsplit

from mettle.errors import ProviderError
from mettle.inference.outside.files import WantedPiece
from mettle.web.backoff import Backoff

RELAY_S: Final = 10.0
"""What a relay may take for a piece; of 8 MiB that is .8 MB/s."""
RUN_S: Final = 120.0
RELAYED_BYTES: Final = 64 << 10
"""A smaller piece is there sooner than a relay has said whether it has it."""
AT_ONCE: Final = 4
"""Pieces that are asked for at a time, so that a long way costs its time once and not for each."""
MAX_ASKED: Final = 3
"""Relays that are asked for one piece before the run is."""
RUN: Final = ""
ABSENT_S: Final = 2.0
"""What a relay may take to say that it has not got a piece."""
SLOWER: Final = 4.0
"""How many times as long as the run a relay may take for a piece."""
_ASIDE: Final = Backoff(first_s=60.0, max_s=3600.0, jitter=0.0)


@dataclass(frozen=True, slots=True)
class PieceAnswer:
    """A piece, or why there is none: `absent` there, `silent` (no answer in time), `false` (not what its hash says)."""

    data: bytes | None = None
    fault: Literal["", "absent", "silent", "false"] = ""


AskPiece = Callable[[str, WantedPiece, float], Awaitable[PieceAnswer]]
"""Asks a relay, or the `RUN`, for a piece, for so many seconds at most."""


class NoPiece(ProviderError):
    """Nobody has a piece: the run has gone on from that version."""


def relay_address(told: str) -> str | None:
    """An address as relays may have, without anything after its port, or None.

    What others tell is asked for pieces: with a path or a query it could be made to ask something else.
    """
    try:
        url = urlsplit(told)
        port = url.port
    except ValueError:
        return None
    if url.scheme not in ("http", "https") or not url.hostname or port == 0:
        return None
    plain = f"{url.scheme}://{url.netloc}"
    return plain if told.rstrip("/") == plain and "@" not in url.netloc else None


@dataclass(slots=True)
class _Aside:
    """A relay that failed: how often in a row, and until when it is left out."""

    num_failed: int
    until: float


@dataclass(slots=True)
class Relays:
    """The relays of one worker, `own` being its own address or "", and how they have done so far."""

    ask: AskPiece
    own: str = ""
    tell: Callable[[str], None] = lambda line: None
    clock: Callable[[], float] = time.monotonic
    num_pieces: int = 0
    """Pieces that relays have brought."""
    _run_s: float = 0.0
    """Seconds that the run took for a byte, last; 0 before it was asked, which a slow relay leads to."""
    _addresses: tuple[str, ...] = ()
    _aside: dict[str, _Aside] = field(default_factory=dict)

    def know(self, told: Iterable[object]) -> None:
        """The relays that there are now."""
        found = {address for one in told if (address := relay_address(str(one))) is not None}
        self._addresses = tuple(sorted(found - {self.own}))

    async def pieces(self, wanted: Sequence[WantedPiece]) -> AsyncGenerator[tuple[WantedPiece, bytes], None]:
        """Each piece with its bytes, in the order in which they come.

        Raises: NoPiece when nobody has one of them.
        """
        waiting = deque((piece, False) for piece in sorted(wanted, key=lambda one: not self._is_mine(one.digest)))
        asking: set[asyncio.Task[tuple[WantedPiece, bytes | None]]] = set()
        try:
            while waiting or asking:
                while waiting and len(asking) < AT_ONCE:
                    asking.add(asyncio.create_task(self._fetch(*waiting.popleft())))
                came, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                for piece, data in [task.result() for task in came]:
                    if data is None:
                        waiting.append((piece, True))
                    else:
                        yield piece, data
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    def order(self, digest: str) -> list[str]:
        """The relays that may be asked for a piece, its home first. All workers see nearly the same order."""
        now = self.clock()
        asked = [one for one in self._addresses if (aside := self._aside.get(one)) is None or now >= aside.until]
        return sorted(asked, key=lambda one: _rank(one, digest))

    def _is_mine(self, digest: str) -> bool:
        mine = self.order(digest)[:1]
        return bool(self.own) and (not mine or _rank(self.own, digest) < _rank(mine[0], digest))

    async def _fetch(self, piece: WantedPiece, was_asked: bool) -> tuple[WantedPiece, bytes | None]:
        """The piece, or None where it is worth to ask its home once more."""
        if piece.num_bytes >= RELAYED_BYTES:
            data, may_come = await self._from_relays(piece)
            if data is not None or (may_come and not was_asked and not self._is_mine(piece.digest)):
                return piece, data
        return piece, await self._from_run(piece)

    async def _from_relays(self, piece: WantedPiece) -> tuple[bytes | None, bool]:
        """The piece, if a relay has it, and else whether its home may have it soon."""
        may_come = False
        for number, base in enumerate(self.order(piece.digest)[:MAX_ASKED]):
            began = self.clock()
            answer = await self.ask(base, piece, RELAY_S)
            took_s = self.clock() - began
            if answer.fault == "false":
                self._leave_out(base, "what it hands on is not what was asked for", is_for_ever=True)
            elif answer.fault == "silent" or (answer.fault == "absent" and took_s > ABSENT_S):
                self._leave_out(base, "it did not answer in time")
            elif answer.data is None:
                may_come = may_come or number == 0
            else:
                if took_s > max(1.0, SLOWER * self._run_s * piece.num_bytes):
                    self._leave_out(base, f"it took {took_s:.1f} s for what the run hands over sooner")
                else:
                    self._aside.pop(base, None)
                self.num_pieces += 1
                return answer.data, False
        return None, may_come

    async def _from_run(self, piece: WantedPiece) -> bytes:
        began = self.clock()
        answer = await self.ask(RUN, piece, RUN_S)
        if answer.data is None:
            raise NoPiece(f"nobody has piece {piece.digest[:12]} any more")
        self._run_s = (self.clock() - began) / max(1, piece.num_bytes)
        return answer.data

    def _leave_out(self, base: str, why: str, *, is_for_ever: bool = False) -> None:
        num_failed = self._aside[base].num_failed if base in self._aside else 0
        wait_s = float("inf") if is_for_ever else _ASIDE.wait_s(num_failed)
        self._aside[base] = _Aside(num_failed + 1, self.clock() + wait_s)
        self.tell(f"the relay at {base} is not asked {'again' if is_for_ever else f'for {wait_s:.0f} s'}: {why}")


def _rank(address: str, digest: str) -> bytes:
    return hashlib.sha256(f"{address} {digest}".encode()).digest()
