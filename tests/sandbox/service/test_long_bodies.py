"""A long body is read beside: the loop goes on, what is too much is refused, and the rest arrives as it was sent."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import time

import pytest

from mettle.sandbox.service.faults import TooLarge
from mettle.sandbox.service.long_bodies import LongBodies, slices
from mettle.web.problems import HttpError
from serving import ApiCaller

in_module = pytest.mark.asyncio(loop_scope="module")


async def test_a_long_body_is_the_object_that_was_sent() -> None:
    bodies = LongBodies()
    sent = {
        "code": "x",
        "tests": [{"stdin": str(number), "expected": ["\ud800", 1.5]} for number in range(2500)],
        "a": [],
    }
    try:
        assert await bodies.fields("a", json.dumps(sent).encode()) == sent
        for wrong in (b"[1]", b"{", b"[" * 100_000):
            with pytest.raises(HttpError):
                await bodies.fields("a", wrong)
        with pytest.raises(TooLarge, match="500,000 values"):
            await bodies.fields("a", b'{"a": [' + b",".join([b"[]"] * 600_000) + b"]}")
    finally:
        bodies.close()


def test_a_list_comes_in_slices() -> None:
    problem, rest, *parts = slices(json.dumps({"a": list(range(2500)), "b": 1}).encode())
    assert (problem, rest) == ("", {"a": [], "b": 1})
    assert [(name, len(items)) for name, items in parts] == [("a", 1000), ("a", 1000), ("a", 500)]


@pytest.mark.slow
@in_module
async def test_one_tenants_long_body_holds_up_nobody(api: ApiCaller) -> None:
    """Measured in processor time of the service's process, so that a busy host changes nothing."""
    longest, last = 0.0, time.process_time()

    async def others() -> None:
        nonlocal longest, last
        while True:
            now = time.process_time()
            longest, last = max(longest, now - last), now
            await asyncio.sleep(0)

    body = b'{"code": "def f(x): return 1", "tests": [{"function": "f", "args": [[%b]], "expected": 1}]}'
    body %= b",".join([b"[]"] * 400_000)
    gc.disable()  # it would look through all that other tests left in this process, which a service doesn't have
    working = asyncio.create_task(others())
    try:
        status, told = await api.ask("POST", "/judge", data=io.BytesIO(body))
    finally:
        working.cancel()
        gc.enable()
    assert status in (200, 400), told
    assert longest < 0.8
