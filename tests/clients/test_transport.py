"""What a transport does about an endpoint that fails."""

from __future__ import annotations

import random

import pytest

from mettle.clients.errors import (
    AuthenticationError,
    InvalidModelResponseError,
    ModelError,
    OverlongPromptError,
    RateLimitError,
)
from mettle.clients.transport import ModelTransport, RetryPolicy
from mettle.errors import ProviderError


@pytest.fixture
async def transport(endpoint):
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    made = ModelTransport(endpoint.url, retry=RetryPolicy(max_retries=2), sleep=sleep, rng=random.Random(0))
    made.waits = waits
    yield made
    await made.close()


async def test_a_json_object_comes_back(endpoint, transport):
    endpoint.answers = [{"ok": 1}]
    assert await transport.post("/x", {"a": "é"}) == {"ok": 1}
    assert endpoint.requests == [{"a": "é"}]


@pytest.mark.parametrize("failure", [(500, "oops"), (503, ""), (429, "slow down"), "hang up", "half"])
async def test_a_passing_failure_is_tried_again(endpoint, transport, failure):
    endpoint.answers = [failure, failure, {"ok": 1}]
    assert await transport.post("/x", {}) == {"ok": 1}
    assert len(endpoint.requests) == 3
    assert len(transport.waits) == 2


@pytest.mark.parametrize(
    ("failure", "kind", "num_requests", "says"),
    [
        ((401, '{"error": {"message": "bad key"}}'), AuthenticationError, 1, "status 401: bad key"),
        ((403, "no"), AuthenticationError, 1, "status 403: no"),
        ((404, '{"detail": "no model"}'), ModelError, 1, "status 404"),
        ((429, "slow down"), RateLimitError, 3, "status 429: slow down"),
        ((500, "<html>" + "x" * 5000), ModelError, 3, "status 500"),
        ((400, '{"error": {"message": "maximum context length is 8"}}'), OverlongPromptError, 1, "status 400"),
        ((200, "<html>proxy</html>"), InvalidModelResponseError, 2, "not JSON: '<html>proxy</html>'"),
        ((200, ""), InvalidModelResponseError, 2, "not JSON: ''"),
        ((200, "[1]"), InvalidModelResponseError, 2, "a JSON list, no object"),
        ("half", ModelError, 3, "ClientPayloadError"),
        ("hang up", ModelError, 3, "ServerDisconnected"),
    ],
)
async def test_a_lasting_failure_names_url_and_status(endpoint, transport, failure, kind, num_requests, says):
    endpoint.answers = [failure]
    with pytest.raises(kind) as caught:
        await transport.post("/x", {})
    assert f"{endpoint.url}/x" in str(caught.value)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert len(endpoint.requests) == num_requests
    assert caught.value.kind in ("provider", "overlong")


async def test_retry_after_is_obeyed_up_to_the_limit(endpoint, transport):
    endpoint.answers = [(429, "", {"Retry-After": "7"}), (429, "", {"Retry-After": "9999"}), {"ok": 1}]
    await transport.post("/x", {})
    assert transport.waits == [7.0, 30.0]


async def test_nobody_listening_is_a_provider_error(no_wait):
    transport = ModelTransport("http://127.0.0.1:9/v1", retry=RetryPolicy(max_retries=1), sleep=no_wait)
    with pytest.raises(ProviderError, match=r"http://127\.0\.0\.1:9/v1/x: ClientConnectorError"):
        await transport.post("/x", {})
    await transport.close()


async def test_an_endpoint_that_never_answers_times_out_once(endpoint, no_wait):
    import asyncio

    async def never(_seconds: float = 3600) -> None:
        await asyncio.sleep(_seconds)

    endpoint.answers = [lambda _: never(2)]
    transport = ModelTransport(endpoint.url, timeout_s=0.05, sleep=no_wait)
    with pytest.raises(ModelError, match=r"no answer within 0\.05 s"):
        await transport.post("/x", {})
    assert len(endpoint.requests) == 1
    await transport.close()


async def test_the_key_is_sent_as_a_bearer(endpoint):
    endpoint.answers = [{}]
    transport = ModelTransport(endpoint.url, api_key="k", headers={"X-Team": "t"})
    await transport.post("/x", {})
    await transport.close()
    assert endpoint.headers[0]["Authorization"] == "Bearer k"
    assert endpoint.headers[0]["X-Team"] == "t"
