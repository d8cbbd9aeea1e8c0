"""One rollout's side of the proxy: its secret, its calls in flight, and which answers have reached the agent.

Parts: `Answerer` (who answers: the environment), `Exchange` (one call and its answer), `AgentSession`, `SessionTable`
(all of them, by secret). Invariants: an answer becomes a step of the rollout when it is handed over, and stops being
one if it never arrived, since the agent cannot have acted on what it did not read; an SDK that repeats a request gets
the answer to that request and not another sample; a closed session answers nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Protocol

from mettle.envs.proxy.calls import AgentCall
from mettle.records.messages import Message, Response
from mettle.web.doors import is_same_secret, secret_digest
from mettle.web.problems import HttpError

MAX_CALLS = 32
MAX_REMEMBERED = 16
REPEAT_WITHIN_S = 5.0
MAX_REFUSALS_KEPT = 20


class Answerer(Protocol):
    """Answers the calls of one rollout."""

    async def answer(self, call: AgentCall) -> Response:
        """Sample an answer. Raises: HttpError."""
        ...

    async def keep(self, call: AgentCall, response: Response) -> None:
        """Make a step of an answer that is about to be handed over."""
        ...

    def drop(self, call: AgentCall, response: Response) -> None:
        """Take the step back: its answer never arrived."""
        ...

    def count_tokens(self, call: AgentCall) -> int | None:
        """Tokens of the prompt; None when nobody here can tell."""
        ...


class Exchange:
    """One call, the task that answers it, and how many connections wait for the answer."""

    def __init__(self, call: AgentCall, task: asyncio.Task[Response]) -> None:
        self.call = call
        self.task = task
        self.num_waiting = 0
        self.is_kept = False
        self.delivered_at: float | None = None

    @property
    def is_failed(self) -> bool:
        """True when there will be no answer."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    @property
    def is_open(self) -> bool:
        """True while an answer may still be handed over."""
        return not self.is_kept and not self.is_failed


class AgentSession:
    """A rollout that agents may call with `secret`, at most `max_calls` at a time."""

    def __init__(self, answerer: Answerer, model: str, *, max_calls: int = MAX_CALLS) -> None:
        self.secret = secrets.token_urlsafe(32)
        self.answerer = answerer
        self.model = model
        self.max_calls = max_calls
        self.num_calls = 0
        self.num_answered = 0
        self.num_requests = 0
        self.num_refused = 0
        self.num_repeated = 0
        self.num_bytes = 0
        self.refusals: list[str] = []
        self.over: str | None = None
        self._exchanges: dict[int, Exchange] = {}
        self._responses: dict[str, list[Message]] = {}

    @property
    def num_open(self) -> int:
        """Calls that were let in and have not become steps; one whose caller hung up is among them."""
        return sum(exchange.is_open for exchange in self._exchanges.values())

    def enter(self) -> None:
        """Count a request in, before its body is read.

        Raises: HttpError when too many are in flight, or the rollout has ended.
        """
        if self.over is not None:
            raise refused_over(self.over)
        if self.num_requests >= self.max_calls:
            message = f"{self.num_requests} calls are in flight, the most for one rollout; wait for an answer"
            raise HttpError(429, message)
        self.num_requests += 1

    def leave(self) -> None:
        """Count a request out."""
        self.num_requests -= 1

    def note_refusal(self, refusal: HttpError) -> None:
        """Record what was refused."""
        self.num_refused += 1
        if len(self.refusals) < MAX_REFUSALS_KEPT:
            self.refusals.append(f"{refusal.status} {str(refusal)[:300]}")

    def exchange(self, call: AgentCall) -> Exchange:
        """The exchange of a call: one that it repeats, else a new one, which starts to be answered."""
        if self.over is not None:
            raise refused_over(self.over)
        exchange = self._repeated(call)
        if exchange is None:
            self._continue_response(call)
            self._forget_old()
            self.num_calls += 1
            exchange = Exchange(call, asyncio.get_running_loop().create_task(self.answerer.answer(call)))
            self._exchanges[self.num_calls] = exchange
        exchange.num_waiting += 1
        return exchange

    async def response(self, exchange: Exchange) -> Response:
        """The answer, once it is there. Raises: HttpError."""
        try:
            return await asyncio.shield(exchange.task)
        except asyncio.CancelledError:
            if exchange.task.cancelled() and self.over is not None:
                raise refused_over(self.over) from None
            raise

    async def hand_over(self, exchange: Exchange) -> None:
        """Make a step of an answer that is about to be written."""
        if self.over is not None:
            raise refused_over(self.over)
        if not exchange.is_kept:
            exchange.is_kept = True
            await self.answerer.keep(exchange.call, exchange.task.result())
            self.num_answered += 1

    def remember_response(self, exchange: Exchange, response_id: str) -> None:
        """Let a later call continue this answer by its id, as the Responses API has it."""
        call = exchange.call
        said = exchange.task.result().message.to_assistant()
        self._responses[response_id] = [*call.messages[_num_instructions(call) :], said]

    def close(self, reason: str) -> None:
        """Answer nothing more. What is in flight is refused; steps whose answers never arrived are taken back."""
        if self.over is not None:
            return
        self.over = reason
        for exchange in self._exchanges.values():
            if not exchange.task.done():
                exchange.task.cancel()
            elif exchange.is_kept and exchange.delivered_at is None:
                self.answerer.drop(exchange.call, exchange.task.result())
                self.num_answered -= 1
            elif not exchange.task.cancelled():
                exchange.task.exception()  # looked at, so that nobody reports it as forgotten
        self._exchanges.clear()
        self._responses.clear()

    def _repeated(self, call: AgentCall) -> Exchange | None:
        """The exchange that `call` asks for again: its SDK says so, or the one who asked first has hung up."""
        now = time.monotonic()
        for exchange in reversed(self._exchanges.values()):
            if exchange.call.digest != call.digest or exchange.is_failed:
                continue
            says_so = call.num_retries > 0 and now - (exchange.delivered_at or now) <= REPEAT_WITHIN_S
            if says_so or (exchange.delivered_at is None and not exchange.num_waiting):
                self.num_repeated += 1
                return exchange
        return None

    def _continue_response(self, call: AgentCall) -> None:
        if call.previous_response_id is None:
            return
        earlier = self._responses.get(call.previous_response_id)
        if earlier is None:
            message = f"previous response {call.previous_response_id!r} is not of this rollout"
            raise HttpError(400, message, code="previous_response_not_found")
        start = _num_instructions(call)
        call.messages[start:start] = earlier

    def _forget_old(self) -> None:
        """Let go of failures, and of answers that arrived a while ago."""
        done = [number for number, exchange in self._exchanges.items() if exchange.delivered_at is not None]
        forgotten = done[: max(0, len(done) - MAX_REMEMBERED)]
        forgotten += [number for number, exchange in self._exchanges.items() if exchange.is_failed]
        for number in forgotten:
            del self._exchanges[number]


def _num_instructions(call: AgentCall) -> int:
    """Messages at the beginning that hold for this call only: the Responses API's instructions."""
    return 1 if call.body.get("instructions") else 0


def refused_over(reason: str) -> HttpError:
    """The answer to a call after the end."""
    return HttpError(403, f"the rollout is over: {reason}", code="rollout_over")


class SessionTable:
    """The open sessions, found by their secrets in a time that tells nothing about them."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, AgentSession] = {}

    def __len__(self) -> int:
        return len(self._by_digest)

    def add(self, session: AgentSession) -> None:
        """Let `session` be found."""
        self._by_digest[secret_digest(session.secret)] = session

    def all(self) -> list[AgentSession]:
        """Every open session."""
        return list(self._by_digest.values())

    def remove(self, session: AgentSession) -> None:
        """Let it be found no more."""
        self._by_digest.pop(secret_digest(session.secret), None)

    def find(self, secret: str) -> AgentSession | None:
        """The session of `secret`."""
        session = self._by_digest.get(secret_digest(secret))
        return session if session is not None and is_secret_of(session, secret) else None


def is_secret_of(session: AgentSession, secret: str) -> bool:
    """True when `secret` is the session's, in constant time."""
    return is_same_secret(secret, session.secret)
