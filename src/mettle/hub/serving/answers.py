"""A request for a model of the Hub, passed on to its engine; what it read and wrote is counted.

Parts: `ModelQuestion` (who asks for what), `passed_on` (the answer as it comes), `said` (one answer in a conversation).
Invariants: tokens are counted by the engine's own figures, of streams too, before the client has the end of its answer;
an answer whose client goes away ends there, and what was sampled until then is counted.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import anyio
import httpx
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from mettle.errors import MettleError
from mettle.hub.caller import Caller
from mettle.hub.lab import Lab
from mettle.hub.serving.engines import ModelEngine, ModelEngines
from mettle.hub.serving.models import HubModel, find_model
from mettle.hub.training import usage
from mettle.web.problems import HttpError

logger = logging.getLogger(__name__)
_TIMEOUT: Final = httpx.Timeout(10.0, read=600.0)
_EVENT: Final = "data:"
_DONE: Final = "data: [DONE]"
_USAGE_OPTIONS: Final = ("include_usage", "continuous_usage_stats")
"""At a stream's end, and with each piece."""


@dataclass(frozen=True, slots=True)
class ModelQuestion:
    """A model that somebody may ask now."""

    lab: Lab
    caller: Caller
    model: HubModel

    @classmethod
    def of(cls, lab: Lab, caller: Caller, name: object) -> ModelQuestion:
        """Raises: HttpError where there is no such model, it is not for them, or their month's quota is used up."""
        assert caller.person is not None, "the routes are for people who are signed in"
        if not isinstance(name, str) or not name:
            raise HttpError(400, "model is missing: GET /v1/models lists those of this Hub", param="model")
        with lab.database.read() as c:
            model = find_model(c, lab, caller, name)
            usage.must_have_room(c, caller.person.id, 1)
        return cls(lab, caller, model)

    def count(self, told: Any) -> None:
        """Add the tokens that an answer's `usage` names. A database that refuses is told in the log alone: the answer
        is there."""
        num = told.get("total_tokens") if isinstance(told, dict) else None
        if not isinstance(num, int) or num <= 0:
            return
        assert self.caller.person is not None, "looked at before"
        try:
            with self.lab.database.write() as c:
                usage.count_answer(c, self.caller.person.id, self.caller.name, self.model.name, num)
        except MettleError as error:
            logger.warning("an answer was not counted", extra={"model": self.model.name, "error": str(error)})


async def passed_on(engines: ModelEngines, asked: ModelQuestion, path: str, body: dict[str, Any]) -> Response:
    """The answer of the engine to `body`, whole or as it streams.

    Raises: HttpError 503 where there is none, 400 for options that are none.
    """
    is_stream = bool(body.get("stream"))
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise HttpError(400, f"stream_options is {str(options)[:60]!r} and no object", param="stream_options")
    sent = {**body, "model": asked.model.name}
    if is_stream:  # with the tokens so far in each piece: a client may go away before the last
        sent["stream_options"] = {**options, **dict.fromkeys(_USAGE_OPTIONS, True)}
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(engines.using(asked.model))
        answer = await _asked(stack, engine, path, sent)
        if is_stream and answer.status_code == 200:
            kept = stack.pop_all()
            return StreamingResponse(_stream(kept, answer, asked, options), media_type="text/event-stream")
        data = await answer.aread()
    if answer.status_code == 200:
        await run_in_threadpool(asked.count, json.loads(data).get("usage"))
    return Response(data, answer.status_code, media_type=answer.headers.get("content-type", "application/json"))


async def said(engines: ModelEngines, asked: ModelQuestion, messages: list[dict[str, str]], max_tokens: int) -> str:
    """The next message of a conversation. Raises: HttpError with what the engine refuses."""
    body = {"messages": messages, "max_tokens": max_tokens}
    answer = await passed_on(engines, asked, "/chat/completions", body)
    told = json.loads(bytes(answer.body))
    if answer.status_code != 200:
        raise HttpError(400, str((told.get("error") or {}).get("message") or "the model refuses this"))
    return str(told["choices"][0]["message"].get("content") or "")


async def _asked(
    stack: contextlib.AsyncExitStack, engine: ModelEngine, path: str, body: dict[str, Any]
) -> httpx.Response:
    client = await stack.enter_async_context(httpx.AsyncClient(timeout=_TIMEOUT, trust_env=False))
    headers = {"Authorization": f"Bearer {engine.key}"}
    try:
        return await stack.enter_async_context(client.stream("POST", engine.url + path, json=body, headers=headers))
    except httpx.HTTPError as error:
        raise HttpError(503, f"the model's process does not answer: {type(error).__name__}") from error


async def _stream(
    stack: contextlib.AsyncExitStack, answer: httpx.Response, asked: ModelQuestion, options: dict[str, Any]
) -> AsyncIterator[str]:
    """Events as they come, with the usage where it was asked for. What was used is counted before the last one goes
    out, and once however the stream ends: a client that goes away has used what was sampled until then."""
    at_end, in_each = (bool(options.get(name)) for name in _USAGE_OPTIONS)
    told: Any = None
    is_counted = False

    async def count() -> None:
        nonlocal is_counted
        if not is_counted:
            is_counted = True
            with anyio.CancelScope(shield=True):
                await run_in_threadpool(asked.count, told)

    async with stack:
        try:
            async for line in answer.aiter_lines():
                if not line:
                    continue
                event = _event(line)
                told = event.get("usage") or told
                is_piece = bool(event.get("choices"))
                if line == _DONE or ("usage" in event and not is_piece):
                    await count()
                if "usage" in event and not (in_each if is_piece else at_end):
                    if not is_piece:
                        continue
                    del event["usage"]
                    line = f"{_EVENT} {json.dumps(event)}"
                yield f"{line}\n\n"
        finally:
            await count()


def _event(line: str) -> dict[str, Any]:
    data = line.removeprefix(_EVENT).strip() if line.startswith(_EVENT) else ""
    if not data.startswith("{"):
        return {}
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
