"""Bodies within limits, and complaints in one line."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import BaseModel, Field

from mettle.web.bodies import read_body, read_json, read_model
from mettle.web.problems import json_response


class Wish(BaseModel, extra="forbid"):
    name: str
    size: int = Field(default=1, ge=1, le=10)


async def take(request):
    return json_response(len(await read_body(request, max_bytes=100_000, stall_s=0.2)))


async def take_json(request):
    return json_response(await read_json(request))


async def take_wish(request):
    return json_response((await read_model(request, Wish)).model_dump())


TABLE = [("POST", "/body", take), ("POST", "/json", take_json), ("POST", "/wish", take_wish)]


async def pieces(num, size):
    for _ in range(num):
        yield b"x" * size


async def test_a_body_within_its_limit(serve, http):
    url = await serve(TABLE)
    for data in (b"", b"x" * 100_000, pieces(100, 1000)):
        async with http.post(f"{url}/body", data=data) as answer:
            assert (answer.status, await answer.json()) == (200, 0 if data == b"" else 100_000)


@pytest.mark.parametrize("data", [b"x" * 100_001, "pieces"])
async def test_a_body_beyond_its_limit_is_refused(serve, http, data):
    url = await serve(TABLE)
    async with http.post(f"{url}/body", data=pieces(101, 1000) if data == "pieces" else data) as answer:
        assert (answer.status, (await answer.json())["code"]) == (413, "too_large")


async def test_a_client_that_stalls_is_refused(serve, http):
    async def stalling():
        yield b"x"
        await asyncio.sleep(30)

    url = await serve(TABLE)
    async with http.post(f"{url}/body", data=stalling()) as answer:
        assert (answer.status, (await answer.json())["code"]) == (408, "stalled")


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
async def test_what_is_no_json_object_is_refused(serve, http, data):
    url = await serve(TABLE)
    async with http.post(f"{url}/json", data=data) as answer:
        assert answer.status == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "name"), ({"name": "a", "size": 11}, "size"), ({"name": "a", "sise": 1}, "sise"), ({"name": 1}, "name")],
)
async def test_a_complaint_is_one_line_that_names_the_field(serve, http, body, param):
    url = await serve(TABLE)
    async with http.post(f"{url}/wish", json=body) as answer:
        said = await answer.json()
    assert (answer.status, said["param"]) == (400, param)
    assert said["detail"].startswith(f"{param}: ")
    assert "\n" not in said["detail"]
