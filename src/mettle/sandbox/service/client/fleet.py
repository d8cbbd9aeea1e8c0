"""Several services as one: the least loaded of those that are there, the lease with each, and what they isolate.

Services may come, move and go: those of `url_files` are followed. Invariant: work goes only to services that answer and
that isolate what the config requires; as long as the fleet is open each service hears of it well within its lease, and
when it is closed its machines end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from mettle.errors import SandboxError, UserError
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.service.client.access import ServiceAccess
from mettle.sandbox.service.client.connection import NotConnected, ServiceConnection
from mettle.sandbox.service.faults import NoService, QuotaExceeded, ServiceBusy, ServiceLost, TokenRefused
from mettle.web.backoff import Backoff, Retries

logger = logging.getLogger(__name__)

T = TypeVar("T")
Use = Literal["judge", "machines"]
_random: Final = random.SystemRandom()  # a fork has no copy of its state: clients must differ
_LOOK_TIMEOUT_S: Final = 5.0
_NUM_MISSES: Final = 3
_LOOK_BACKOFF: Final = Backoff(first_s=1.0, max_s=2.0, jitter=0.2)
_MAX_BUSY_S: Final = 600.0
_BUSY_BACKOFF: Final = Backoff(first_s=0.075, max_s=2.0)
_FOLLOW_S: Final = 0.5


@dataclass
class Member:
    """One service of the fleet."""

    connection: ServiceConnection
    is_there: bool = False
    why_not: str = "it has not been asked yet"
    isolation: IsolationReport | None = None
    load: dict[str, int] = field(default_factory=dict)
    num_ours: int = 0
    num_misses: int = 0
    abandoned: list[str] = field(default_factory=list)
    lease_s: float = 60.0
    is_retired: bool = False

    def busyness(self, use: Use) -> float:
        """How full it is, from 0; what this client has asked for counts at once."""
        now, most = ("num_judging", "max_running") if use == "judge" else ("num_machines", "max_machines")
        return max(self.num_ours, self.load.get(now, 0)) / max(1, self.load.get(most, 1))


class Fleet:
    """The services of a config, for one use."""

    def __init__(
        self,
        config: SandboxConfig,
        use: Use,
        on_news: Callable[[Member, dict[str, Any]], None],
        *,
        access: ServiceAccess | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.config = config
        self._rng = rng or _random
        self._use = use
        self._on_news = on_news
        self._looking: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._client = f"c-{secrets.token_hex(8)}"
        self._access = access or ServiceAccess.of(config)
        self._by_file: dict[Path, Member] = {}
        self._retired: list[Member] = []
        self.members: list[Member] = []

    @property
    def isolation(self) -> IsolationReport:
        """The report of the service that gives the least, of the last ones while none is there.

        Raises: UserError before the start.
        """
        for members in (self.members, self._retired):
            reports = [member.isolation for member in members if member.isolation is not None]
            if reports:
                return next((report for report in reports if not report.meets(self.config.require)), reports[0])
        raise UserError("the remote sandbox pool has not been started; use `async with`")

    async def start(self) -> None:
        """Ask every service, and wait for the slow ones only as long as none is there.

        Raises: UserError (a refused token, too little isolation); NoService if none answers.
        """
        for url in self.config.urls:
            self._access.check(url)
        for url in self.config.urls:
            self._join(url)
        await self._await_files()
        for result in await self._meet_all():
            if isinstance(result, Exception) and not isinstance(result, ServiceLost | ServiceBusy):
                raise result
        if not any(member.is_there for member in self.members):
            raise NoService(self._why_none())
        self._looking = [
            asyncio.create_task(self._look_after(member), name="sandbox service watch") for member in self.members
        ]
        if self.config.url_files:
            self._looking.append(asyncio.create_task(self._follow(), name="sandbox services that move"))

    async def leave(self) -> None:
        """Leave every service; the machines there end."""
        for task in self._looking:
            task.cancel()
        for task in self._looking:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._looking = []
        async with asyncio.TaskGroup() as group:
            for member in self.members:
                group.create_task(_leave(member))

    async def close(self) -> None:
        """Leave every service, and let go of the connections."""
        await self.leave()
        members, self.members, self._retired = [*self.members, *self._retired], [], []
        for member in members:
            await member.connection.close()

    async def run(
        self,
        work: Callable[[Member], Awaitable[T]],
        *,
        on_move: Callable[[Member], None] = lambda _: None,
    ) -> T:
        """Do the work at the least busy service; elsewhere if that one is lost or has no room; later if all are busy.

        Only for work that may be done twice. `on_move` is told of a service that was lost in the middle of it.
        """
        avoided, retries = set[int](), self._retries()
        last: SandboxError = NoService(self._why_none())
        num_lost = 0
        while True:
            member = await self._choose(avoided, last)
            if member is None:  # every one of them has refused: begin again, after a while
                if isinstance(last, QuotaExceeded) or not await retries.again():
                    raise last
                avoided = set()
                continue
            member.num_ours += 1
            try:
                return await work(member)
            except (ServiceBusy, QuotaExceeded) as error:
                last = error
                avoided.add(id(member))
            except ServiceLost as error:
                last = error
                is_certain = isinstance(error, NotConnected)
                num_lost += not is_certain
                if not is_certain:
                    on_move(member)
                self._miss(member, str(error), is_certain=is_certain)
                if num_lost > 2 * len(self.members):
                    raise
            finally:
                member.num_ours -= 1

    async def _choose(self, avoided: set[int], last: SandboxError) -> Member | None:
        """The least busy one, waiting a while for one to come back; None when those that are there are avoided."""
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            there = [member for member in self.members if member.is_there]
            if there:
                left = [member for member in there if id(member) not in avoided]
                self._rng.shuffle(left)
                return min(left, key=lambda member: member.busyness(self._use), default=None)
            left_s = began + self.config.start_timeout_s - clock()
            if left_s <= 0 or not self._looking:
                raise NoService(self._why_none()) from last
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()

    def _retries(self) -> Retries:
        clock = asyncio.get_running_loop().time
        return Retries(_BUSY_BACKOFF, limit_s=_MAX_BUSY_S, rng=self._rng.uniform, clock=clock)

    def _join(self, url: str) -> Member:
        member = Member(ServiceConnection(url, self._access, self._client))
        self.members.append(member)
        return member

    async def _await_files(self) -> None:
        """Until a service has said where it is, if any will. Raises: NoService when none has in time."""
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            for path in self.config.url_files:
                if path not in self._by_file and (url := _url_in(path)) is not None:
                    self._by_file[path] = self._join(url)
            if self.members or not self.config.url_files:
                return
            if clock() - began > self.config.start_timeout_s:
                raise NoService("no sandbox service has said where it is")
            await asyncio.sleep(_FOLLOW_S)

    async def _follow(self) -> None:
        """Take in the services that come, and let go of those that are gone or have moved."""
        while True:
            for path in self.config.url_files:
                member, url = self._by_file.get(path), _url_in(path)
                if member is not None and member.connection.url != url:
                    self._retire(self._by_file.pop(path))
                    member = None
                if member is None and url is not None:
                    try:
                        member = self._by_file[path] = self._join(url)
                    except UserError as error:
                        logger.warning("a sandbox service cannot be spoken to: %s", error)
                        continue
                    watch = asyncio.create_task(self._look_after(member, is_new=True), name="sandbox service watch")
                    self._looking = [*(task for task in self._looking if not task.done()), watch]
            await asyncio.sleep(_FOLLOW_S)

    def _retire(self, member: Member) -> None:
        """A service is there no more, and its machines with it."""
        logger.warning("a sandbox service is gone", extra={"url": member.connection.url, "why": "it says so no more"})
        self.members.remove(member)
        self._retired.append(member)
        member.is_there, member.is_retired = False, True
        member.connection.declare_lost()
        self._on_news(member, {"machines": [], "ended": {}, "why": f"its service {member.connection.url} is gone"})

    async def _meet_all(self) -> list[BaseException | None]:
        """What came of asking each; one that has not answered in time is asked again by who looks after it."""
        asking = [asyncio.create_task(self._meet(member)) for member in self.members]
        late = set(asking)
        try:
            if late:
                _, late = await asyncio.wait(late, timeout=_LOOK_TIMEOUT_S)
            while late and not any(member.is_there for member in self.members):
                _, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in asking:
                task.cancel()
            asked = await asyncio.gather(*asking, return_exceptions=True)
        return asked

    async def _meet(self, member: Member) -> None:
        """Ask a service what it is and what it isolates. Raises: UserError when it will not do."""
        try:
            status = await member.connection.ask("GET", "/status", timeout_s=self.config.start_timeout_s)
            offered = status[self._use]
            if offered is None:
                raise UserError(f"sandbox service {member.connection.url} judges nothing (backend {status['backend']})")
            report = await member.connection.report(offered["isolation"])
        except (ServiceLost, ServiceBusy) as error:
            member.why_not = str(error)
            raise
        if not report.meets(self.config.require):
            raise UserError(
                f"sandbox service {member.connection.url} gives isolation {report.grade!r} (backend {report.backend}) "
                f"and sandbox.require is {self.config.require!r}"
            )
        missing = sorted({*self.config.python_packages} - {*status["python_packages"]})
        if missing and self._use == "machines":
            raise UserError(
                f"sandbox service {member.connection.url} does not show {', '.join(missing)} to its machines; "
                "its own sandbox.python_packages must name them"
            )
        member.isolation, member.load = report, status["load"]
        member.lease_s, member.num_misses, member.is_there = float(status["lease_s"]), 0, True
        self._changed.set()

    async def _look_after(self, member: Member, *, is_new: bool = False) -> None:
        """Keep the lease, and know whether the service is there and how busy."""
        while not member.is_retired:
            if not is_new:
                wait_s = _LOOK_BACKOFF.wait_s(member.num_misses, rng=self._rng.uniform)
                await asyncio.sleep(min(wait_s, member.lease_s / 4))
            is_new = False
            try:
                if not member.is_there:
                    await self._meet(member)
                abandoned = list(member.abandoned)
                news = await member.connection.ask(
                    "POST", "/lease", json={"abandoned": abandoned}, timeout_s=_LOOK_TIMEOUT_S
                )
            except ServiceBusy as error:  # it is shutting down, or throttles us; what it has of ours goes on
                member.is_there, member.why_not = False, str(error)
                continue
            except ServiceLost as error:
                self._miss(member, str(error), is_certain=isinstance(error, NotConnected))
                continue
            except (SandboxError, UserError, OSError) as error:
                self._miss(member, str(error), is_certain=True)
                if isinstance(error, TokenRefused):
                    logger.warning("a sandbox service refuses the token", extra={"url": member.connection.url})
                continue
            member.abandoned = [key for key in member.abandoned if key not in abandoned]
            member.num_misses, member.load = 0, news["load"]
            self._on_news(member, news)

    def _miss(self, member: Member, why: str, *, is_certain: bool) -> None:
        """A service did not answer; after a few times, or a refused connection, it counts as gone."""
        member.num_misses += 1
        if not is_certain and member.num_misses < _NUM_MISSES:
            return
        if member.is_there:
            logger.warning("a sandbox service is gone", extra={"url": member.connection.url, "why": why})
        member.is_there, member.why_not = False, why
        member.connection.declare_lost()

    def _why_none(self) -> str:
        reasons = "; ".join(dict.fromkeys(member.why_not for member in self.members if not member.is_there))
        reasons = reasons or "none says where it is"
        return f"no sandbox service is there: {reasons}" if len(self.members) != 1 else reasons


def _url_in(path: Path) -> str | None:
    """Where a service says that it is; None while it says nothing."""
    try:
        return str(json.loads(path.read_text())["url"]).rstrip("/")
    except (OSError, ValueError, KeyError, TypeError):
        return None


async def _leave(member: Member) -> None:
    if member.is_there:
        with contextlib.suppress(SandboxError, UserError, OSError):
            await member.connection.ask("DELETE", "/lease", timeout_s=_LOOK_TIMEOUT_S)
        member.is_there = False
