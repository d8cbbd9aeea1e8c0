"""The door over HTTP: who may read, whose word counts, and what becomes of liars and of those who go."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from houses import PROMPT, OpenHouse

from mettle.errors import ProviderError, UserError
from mettle.inference.engine.protocol import Choice, GenerationRequest
from mettle.inference.outside import relays, worker
from mettle.inference.outside.roster import invite
from mettle.inference.outside.signatures import WorkerKey
from mettle.inference.outside.worker import OutsideClient, OutsideWorking, SessionOver, WordRefused
from mettle.records.sampling import SamplingParams
from mettle.runs.ports import free_port


async def joined(house: OpenHouse, place: Path, name: str = "ann", room: int = 8) -> OutsideClient:
    """A client that has joined and said that it has room, under the version that is served."""
    client = house.client(place, name)
    client.session = (await client.read("/facts"))["session"]
    await client.say("/join", {"relay": ""})
    await client.say("/poll", {"version": 0, "room": room})
    return client


async def taken(client: OutsideClient) -> dict[str, Any]:
    """The one request that is waiting."""
    told = await client.say("/poll", {"version": 0, "room": 8, "wait_s": 5.0})
    (assigned,) = told["assigned"]
    return dict(assigned)


def answer_of(generation: Any) -> list[dict[str, Any]]:
    return [
        {"token_ids": c.token_ids, "logprobs": c.logprobs, "finish_reason": c.finish_reason, "stop": c.stop}
        for c in generation.choices
    ]


async def test_nothing_is_read_without_an_invitation_nor_by_a_page(house: OpenHouse, tmp_path: Path) -> None:
    base = house.door.base_url + "/work/v1"
    token = {"Authorization": f"Bearer {invite(house.folder, 'ann')}"}
    async with aiohttp.ClientSession() as http:
        for path in ("/facts", "/versions/0", "/pieces/" + "0" * 64):
            async with http.get(base + path) as response:
                assert response.status == 401
        for headers, status in (({}, 200), ({"Host": "evil.example"}, 400), ({"Origin": "http://evil.example"}, 403)):
            async with http.get(base + "/facts", headers={**token, **headers}) as response:
                assert response.status == status
        async with http.post(base + "/join", headers=token, data=b"{}") as response:
            assert (response.status, (await response.json())["code"]) == (401, "bad_signature")
        async with http.get(base + "/pieces/" + "0" * 64, headers=token) as response:
            assert response.status == 404


async def test_a_word_that_was_heard_before_or_in_another_session_does_not_count(
    house: OpenHouse, tmp_path: Path
) -> None:
    client = await joined(house, tmp_path / "ann")
    key, body = WorkerKey.of_file(tmp_path / "ann" / "key"), b'{"version": 0, "room": 1}'
    said = key.headers("POST", "/work/v1/poll", client.session, 7, body)
    other = key.headers("POST", "/work/v1/poll", "0" * 32, 8, body)
    async with aiohttp.ClientSession() as http:
        for headers, status in ((said, 200), (said, 403), (other, 401)):
            async with http.post(house.door.base_url + "/work/v1/poll", headers=headers, data=body) as response:
                assert response.status == status
    client.session = "0" * 32
    with pytest.raises(SessionOver):
        await client.say("/poll", {"version": 0, "room": 1})
    await client.close()


async def test_an_answer_counts_once_and_only_from_who_has_the_request(house: OpenHouse, tmp_path: Path) -> None:
    alone = await house.ask(n=2)
    house.num_requests = 0
    ann, bob = await joined(house, tmp_path / "ann"), await joined(house, tmp_path / "bob", "bob", room=0)
    asking = asyncio.create_task(house.ask(n=2))
    request = await taken(ann)
    answer = {"request_id": request["request_id"], "choices": answer_of(alone)}
    with pytest.raises(WordRefused, match="not yours"):
        await bob.say("/answer", answer)
    await ann.say("/answer", answer)
    with pytest.raises(WordRefused, match="not yours"):
        await ann.say("/answer", answer)
    assert [choice.token_ids for choice in (await asking).choices] == [c.token_ids for c in alone.choices]
    assert [(one.name, one.sampled, one.refused) for one in house.named()] == [("ann", 2, 0), ("bob", 0, 0)]
    await ann.close()
    await bob.close()


async def test_a_liar_is_banned_and_what_it_had_is_sampled_by_the_own_engine(house: OpenHouse, tmp_path: Path) -> None:
    client = await joined(house, tmp_path / "ann")
    alone = await house.engine_alone(2)
    first, second = (asyncio.create_task(house.ask(n=2)) for _ in range(2))
    told = {"assigned": []}
    while len(told["assigned"]) < 2:
        told["assigned"] += (await client.say("/poll", {"version": 0, "room": 8, "wait_s": 1.0}))["assigned"]
    lie = answer_of(alone[0])
    lie[1]["token_ids"] = [(token + 1) % 256 for token in lie[1]["token_ids"]]
    with pytest.raises(UserError, match="banned"):
        await client.say("/answer", {"request_id": told["assigned"][0]["request_id"], "choices": lie})
    for asking, expected in zip((first, second), alone, strict=True):
        assert [c.token_ids for c in (await asking).choices] == [c.token_ids for c in expected.choices]
    with pytest.raises(UserError, match="banned"):
        await client.say("/poll", {"version": 0, "room": 8})
    with pytest.raises(UserError, match="banned"):
        await client.read("/facts")
    (ann,) = house.written()
    assert (ann.state, ann.sampled, ann.refused) == ("banned", 0, 2)
    (evidence,) = (house.folder / "refused").glob("*.json")
    assert json.loads(json.loads(evidence.read_text())["body"])["choices"] == lie
    await client.close()


async def test_what_a_worker_that_vanished_had_comes_back_after_its_lease(policy_folder: Path, tmp_path: Path) -> None:
    house = await OpenHouse.open(policy_folder, tmp_path / "outside", lease_s=0.3)
    try:
        client = await joined(house, tmp_path / "ann")
        asking = asyncio.create_task(house.ask(n=2))
        request = await taken(client)
        found = await asking  # the own engine's
        assert len(found.choices) == 2
        (ann,) = house.written()
        assert (ann.state, ann.returned) == ("gone", 2)
        with pytest.raises(SessionOver, match="is to join"):
            await client.say("/answer", {"request_id": request["request_id"], "choices": answer_of(found)})
        await client.close()
    finally:
        await house.close()


async def test_who_leaves_gives_its_work_back_at_once(house: OpenHouse, tmp_path: Path) -> None:
    client = await joined(house, tmp_path / "ann")
    asking = asyncio.create_task(house.ask(n=2))
    await taken(client)
    await client.say("/leave", {})
    assert len((await asking).choices) == 2
    assert house.named()[0].state == "gone"
    await client.close()


async def test_only_what_may_lag_goes_to_a_worker_that_is_behind(
    house: OpenHouse, versions: Path, tmp_path: Path
) -> None:
    client = await joined(house, tmp_path / "ann")
    await asyncio.to_thread(house.engine.update_weights, versions / "v1", 1)
    assert (await client.say("/poll", {"version": 0, "room": 8}))["version"] == 1
    await house.ask(n=2)
    assert house.named()[0].taken == 0
    request = GenerationRequest("lag", PROMPT, SamplingParams(max_tokens=4), n=2, may_lag=True)
    asking = asyncio.create_task(house.bridge.generate(request))
    assert (await taken(client))["version"] == 0
    asking.cancel()
    await client.close()


async def test_a_request_that_nobody_wants_any_more_is_lost_to_its_worker(house: OpenHouse, tmp_path: Path) -> None:
    client = await joined(house, tmp_path / "ann")
    asking = asyncio.create_task(house.ask(n=2))
    request = await taken(client)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    told = await client.say("/poll", {"version": 0, "room": 8, "working_on": [request["request_id"]]})
    assert told["lost"] == [request["request_id"]]
    await client.close()


async def test_weights_come_from_another_worker_where_one_hands_them_on(
    house: OpenHouse, versions: Path, tmp_path: Path
) -> None:
    first = house.worker(tmp_path / "ann", relay=f"http://127.0.0.1:{free_port()}")
    await house.served(first)
    await asyncio.to_thread(house.engine.update_weights, versions / "v1", 1)
    await house.until(lambda: first._version == 1)
    second = house.worker(tmp_path / "bob", "bob")
    await house.until(lambda: second._version == 1)
    assert second.done.from_relays > 0
    assert first.done.from_relays == 0


async def test_a_worker_that_fetches_says_so_within_the_lease_that_the_run_tells(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "IDLE_WAIT_S", 10_000.0)
    house = await OpenHouse.open(policy_folder, tmp_path / "outside", lease_s=0.3)
    said = asyncio.Event()

    async def say(self: OutsideClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("room") == 0:
            said.set()
        return await spoken(self, path, {**body, "wait_s": 0.1} if "wait_s" in body else body)

    async def serve(self: OutsideWorking, version: int) -> None:
        await said.wait()  # as long as it takes
        await served(self, version)

    spoken, served = OutsideClient.say, OutsideWorking._serve
    monkeypatch.setattr(OutsideClient, "say", say)
    monkeypatch.setattr(OutsideWorking, "_serve", serve)
    working = house.worker(tmp_path / "ann")
    await house.until(lambda: working._version == 0)
    await house.close()


@contextlib.asynccontextmanager
async def relay_that(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """The address of a relay that answers so."""
    app = web.Application()
    app.router.add_get("/pieces/{digest}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port := free_port())
    await site.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


async def test_relays_that_lie_hang_and_are_dead_cost_a_worker_time_and_nothing_else(
    house: OpenHouse, versions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "RELAY_S", 0.5)
    num_sent = 0

    async def lie(request: web.Request) -> web.StreamResponse:
        nonlocal num_sent
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while num_sent < 1 << 32:  # without an end, as far as a worker could keep it
                await response.write(bytes(1 << 20))
                num_sent += 1 << 20
        return response

    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60.0)
        raise AssertionError("nobody waits so long")

    async with relay_that(lie) as liar, relay_that(hang) as silent:
        for name, address in (("liar", liar), ("silent", silent), ("dead", f"http://127.0.0.1:{free_port()}")):
            client = house.client(tmp_path / name, name)
            client.session = (await client.read("/facts"))["session"]
            await client.say("/join", {"relay": address})
            await client.close()
        await asyncio.to_thread(house.engine.update_weights, versions / "v1", 1)
        said: list[str] = []
        working = house.worker(tmp_path / "ann", tell=said.append)
        await house.until(lambda: working._version == 1)
        assert working.done.from_relays == 0
        left_out = {line.split(" is not asked ")[1].partition(": ")[2] for line in said if "is not asked" in line}
        assert left_out == {"what it hands on is not what was asked for", "it did not answer in time"}
        assert num_sent < 64 << 20, "whoever has no end is not listened to"


@pytest.mark.parametrize("relay", ["here", "http://10.0.0.7:7300/reboot?", "file:///etc/passwd"])
async def test_a_relay_that_is_no_plain_address_is_refused(house: OpenHouse, tmp_path: Path, relay: str) -> None:
    client = house.client(tmp_path / "ann")
    client.session = (await client.read("/facts"))["session"]
    with pytest.raises(ProviderError, match="is no address"):
        await client.say("/join", {"relay": relay})
    await client.close()


async def test_a_worker_that_samples_what_it_likes_is_told_and_ends(house: OpenHouse, tmp_path: Path) -> None:
    async def lie(request: GenerationRequest) -> list[Choice]:
        return [Choice(i, [65] * 12, [-0.1] * 12, [], finish_reason="length") for i in range(request.n)]

    working = house.worker(tmp_path / "ann", sample=lie)
    await house.served(working)
    await house.ask(n=2)
    (_, task) = house.workers[0]
    with pytest.raises(UserError, match="banned: logprobs"):
        await task
