"""Bodies of requests as models, within limits of size and time; FastAPI alone would read one without an end."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, Request
from pydantic import BaseModel, ConfigDict

from mettle.web.bodies import checked, read_body

MAX_JSON_BYTES = 1 << 20


class HubRequest(BaseModel):
    """A body. What clients send beyond what is known here is passed over: releases of clients differ."""

    model_config = ConfigDict(extra="ignore")


def body_of(model: type[HubRequest], max_bytes: int = MAX_JSON_BYTES) -> Any:
    """A dependency: the body as `model`."""

    async def read(request: Request) -> HubRequest:
        return checked(model, await read_body(request, max_bytes=max_bytes) or b"{}")

    return Depends(read)
