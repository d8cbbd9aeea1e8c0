"""`retrieve_future` and `cancel_future`: what came of a request, as often as it is asked.

A question is held open until there is an outcome; then 408 says to ask again, which clients do without a word. Failures
are answers with status 200, for that is where clients look. Invariant: a question changes nothing.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mettle.trainer.service.records import Outcome
from mettle.trainer.service.service import service_of
from mettle.trainer.service.wire.answers import json_loss_answer, json_sample_answer
from mettle.web.bodies import read_json
from mettle.web.problems import HttpError, json_response

PROTOBUF = "application/x-protobuf"


async def retrieve_future(request: Request) -> Response:
    """The outcome of one request."""
    service = service_of(request)
    owner = service.owner(request)
    body = await read_json(request)
    request_id = body.get("request_id")
    operation = service.store.operation(request_id) if isinstance(request_id, str) else None
    if operation is None or operation.owner != owner:
        session_id = str(request_id).partition(":")[0]
        if service.store.session(session_id, owner) is not None:
            raise HttpError(410, f"the result of {str(request_id)[:120]!r} is not kept any more")
        raise HttpError(404, f"there is no request {str(request_id)[:120]!r}")
    outcome = await service.outcome(operation.request_id, service.config.poll_s)
    if outcome is None:
        raise HttpError(410, f"the result of {operation.request_id!r} is not kept any more")
    if outcome.state == "waiting":
        state = {"type": "try_again", "request_id": operation.request_id, "queue_state": "active"}
        return json_response(state, status=408)
    return _answer(outcome, request.headers.get("accept", ""))


async def cancel_future(request: Request) -> Response:
    """End a sample that is not wanted any more; anything else goes on."""
    service = service_of(request)
    owner = service.owner(request)
    request_id = (await read_json(request)).get("request_id")
    operation = service.store.operation(request_id) if isinstance(request_id, str) else None
    if operation is not None and operation.owner == owner:
        service.runner.cancel(operation.request_id, "cancelled by the client")
    return json_response({})


def _answer(outcome: Outcome, accept: str) -> Response:
    if outcome.state != "done":
        return json_response({"error": outcome.error, "category": outcome.category or "server"})
    if outcome.kind in ("forward", "forward_backward", "sample"):
        if PROTOBUF in accept:
            return Response(outcome.result, media_type=PROTOBUF)
        body: dict[str, Any] = (
            json_sample_answer(outcome.result) if outcome.kind == "sample" else json_loss_answer(outcome.result)
        )
        return json_response(body)
    return Response(outcome.result, media_type="application/json")


ROUTES = [
    ("POST", "/api/v1/retrieve_future", retrieve_future, "anybody"),
    ("POST", "/api/v1/cancel_future", cancel_future, "anybody"),
]
