"""What a request asks: its body within limits of size and time, as bytes, as JSON, or as a pydantic model.

Parts: `body_chunks`, `read_body`, `read_json`, `read_model`, `first_fault`. Invariant: nothing is read beyond its
limit, and a complaint is one line that names the field.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from mettle.web.doors import MAX_BODY_BYTES, body_too_long
from mettle.web.problems import HttpError

M = TypeVar("M", bound=BaseModel)

STALL_S: Final = 60.0


async def body_chunks(
    request: Request, *, max_bytes: int = MAX_BODY_BYTES, stall_s: float = STALL_S
) -> AsyncIterator[bytes]:
    """The body, piece by piece.

    Raises: HttpError 413 for one that is too long, 408 for a client that sends nothing for `stall_s` in the middle of
    one, and starlette's ClientDisconnect when it has gone.
    """
    if int(request.headers.get("content-length") or 0) > max_bytes:
        raise body_too_long(max_bytes)
    async for chunk in _rest(request, await _received(request, stall_s), max_bytes, stall_s):
        yield chunk


async def _rest(request: Request, message: Message, max_bytes: int, stall_s: float) -> AsyncIterator[bytes]:
    num_bytes = 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise body_too_long(max_bytes)
        if chunk:
            yield chunk
        if not message.get("more_body"):
            return
        message = await _received(request, stall_s)


async def _received(request: Request, stall_s: float) -> Message:
    try:
        async with asyncio.timeout(stall_s):
            return await request.receive()
    except TimeoutError:
        raise HttpError(408, f"nothing came for {stall_s:g} s in the middle of a body", code="stalled") from None


async def read_body(request: Request, *, max_bytes: int = MAX_BODY_BYTES, stall_s: float = STALL_S) -> bytes:
    """The whole body. Raises: as `body_chunks`."""
    # Most bodies come at once, and a time limit costs as much as reading one does. The server hangs up on a client
    # that never begins.
    message = await request.receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        whole: bytes = message.get("body", b"")
        if len(whole) > max_bytes:
            raise body_too_long(max_bytes)
        return whole
    return b"".join([chunk async for chunk in _rest(request, message, max_bytes, stall_s)])


async def read_json(
    request: Request,
    *,
    max_bytes: int = MAX_BODY_BYTES,
    stall_s: float = STALL_S,
    empty: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The body as a JSON object; `empty`, if given, where there is no body. Raises: HttpError 400 for anything else."""
    return json_object(await read_body(request, max_bytes=max_bytes, stall_s=stall_s), empty=empty)


def json_object(body: bytes, *, empty: dict[str, Any] | None = None) -> dict[str, Any]:
    """The same of a body that is here."""
    if not body and empty is not None:
        return empty
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise HttpError(400, "the body must be a JSON object")
    return value


async def read_model(
    request: Request, model: type[M], *, max_bytes: int = MAX_BODY_BYTES, stall_s: float = STALL_S
) -> M:
    """The body as `model`; JSON is read and checked in one pass, by pydantic.

    Raises: HttpError 400 with the first thing that is wrong.
    """
    return checked(model, await read_body(request, max_bytes=max_bytes, stall_s=stall_s))


def checked(model: type[M], body: bytes) -> M:
    """JSON as `model`. Raises: HttpError 400 with the first thing that is wrong."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        field, message = first_fault(error.errors(include_url=False, include_input=False, include_context=False))
        text = f"{field}: {message}" if field else f"the body cannot be read: {message}"
        raise HttpError(400, text, param=field.partition(".")[0] or None) from None


def first_fault(errors: Any) -> tuple[str, str]:
    """The place and the text of the first of pydantic's errors, in one line."""
    first = errors[0]
    place = ".".join(str(part) for part in first["loc"])
    return place, str(first["msg"]).removeprefix("Value error, ")
