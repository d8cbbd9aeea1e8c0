"""What stands around a handler: doors, errors as answers, and the end of a request nobody waits for."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from starlette.responses import Response

from mettle.errors import UserError
from mettle.web.doors import Door
from mettle.web.problems import HttpError, json_response, openai_body
from mettle.web.streams import StreamedAnswer, sse


async def hello(request):
    return Response("hello")


async def fail(request):
    raise UserError("this cannot be")


async def refuse(request):
    raise HttpError(429, "later", param="n", code="busy")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil"])
async def test_another_name_for_this_machine_is_refused(serve, http, host):
    url = await serve([("GET", "/", hello)])
    async with http.get(url, headers={"Host": host}) as answer:
        assert answer.status == 400
        assert (await answer.json())["code"] == "host_refused"


async def test_a_page_of_another_origin_is_refused_and_one_of_ours_is_not(serve, http):
    url = await serve([("POST", "/", hello)])
    for origin, status in (("https://evil.example", 403), ("null", 403), (url, 200)):
        async with http.post(url, headers={"Origin": origin}) as answer:
            assert answer.status == status, origin


async def test_a_server_for_others_answers_to_any_name(serve, http):
    url = await serve([("GET", "/", hello)], door=Door(None))
    async with http.get(url, headers={"Host": "lab.example"}) as answer:
        assert answer.status == 200


async def test_errors_are_answers_in_the_words_of_the_app(serve, http):
    table = [("GET", "/refuse", refuse), ("GET", "/fail", fail), ("POST", "/post", hello)]
    known = lambda error: HttpError(400, str(error)) if isinstance(error, UserError) else None  # noqa: E731
    ours = await serve(table, as_error=known)
    openai = await serve(table, error_body=openai_body)
    async with http.get(f"{ours}/refuse") as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        body = {"title": "Too Many Requests", "status": 429, "detail": "later", "code": "busy", "param": "n"}
        assert await answer.json() == body
    async with http.get(f"{openai}/refuse") as answer:
        body = {"message": "later", "type": "rate_limit_error", "param": "n", "code": "busy"}
        assert await answer.json() == {"error": body}
    async with http.get(f"{ours}/fail") as answer:
        assert (answer.status, (await answer.json())["detail"]) == (400, "this cannot be")
    async with http.get(f"{ours}/nowhere") as answer:
        assert (answer.status, (await answer.json())["code"]) == (404, "no_route")
    async with http.get(f"{ours}/post") as answer:
        assert answer.status == 405
        assert answer.headers["Allow"] == "POST"


async def test_an_error_that_nobody_knows_is_logged_and_is_a_500(serve, http, caplog):
    url = await serve([("GET", "/", fail)])
    async with http.get(url) as answer:
        assert (answer.status, (await answer.json())["code"]) == (500, "internal")
    assert "a handler failed" in caplog.text


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_handler_whose_client_has_gone_is_cancelled(serve, http, method):
    entered, cancelled = asyncio.Event(), asyncio.Event()

    async def slow(request):
        await request.body()
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    url = await serve([(method, "/", slow)])
    asking = asyncio.create_task(http.request(method, url, data=b"x" * 200_000 if method == "POST" else None))
    await entered.wait()
    asking.cancel()
    async with asyncio.timeout(60):
        await cancelled.wait()


async def test_a_stream_is_read_as_it_comes_and_closed_when_its_reader_goes(serve, http):
    go_on, closed = asyncio.Event(), asyncio.Event()

    async def pieces():
        try:
            yield sse({"n": 1})
            await go_on.wait()
            while True:
                yield sse({"n": 2}, "more")
                await asyncio.sleep(0)
        finally:
            closed.set()

    async def stream(request):
        return StreamedAnswer(pieces())

    answer = await http.get(await serve([("GET", "/", stream)]))
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert await answer.content.readline() == b'data: {"n":1}\n'
    go_on.set()
    assert await answer.content.readline() == b"\n"
    assert await answer.content.readline() == b"event: more\n"
    answer.close()
    async with asyncio.timeout(60):
        await closed.wait()


async def test_a_slow_reader_holds_up_its_own_stream(serve, http):
    num_made = 0

    async def pieces():
        nonlocal num_made
        while True:
            num_made += 1
            yield b"x" * 65536

    async def stream(request):
        return StreamedAnswer(pieces(), "application/octet-stream")

    url = await serve([("GET", "/", stream), ("GET", "/ok", hello)])
    answer = await http.get(url)
    await answer.content.readexactly(65536)
    async with http.get(f"{url}/ok") as other:
        assert await other.text() == "hello"
    held_at = 0
    async with asyncio.timeout(100):
        while num_made != held_at:  # until what is not read is not made
            held_at = num_made
            await asyncio.sleep(0.05)
    answer.close()


async def test_a_stream_that_fails_breaks_off(serve, http):
    async def pieces():
        yield b"a"
        raise ValueError("broken")

    async def stream(request):
        return StreamedAnswer(pieces())

    answer = await http.get(await serve([("GET", "/", stream)]))
    with pytest.raises(aiohttp.ClientPayloadError):
        await answer.read()


async def test_state_is_at_the_request(serve, http):
    async def show(request):
        return json_response({"thing": request.app.state.thing, "name": request.path_params["name"]})

    url = await serve([("GET", "/{name:path}", show)], thing="mine")
    async with http.get(f"{url}/a/b%20c") as answer:
        assert await answer.json() == {"thing": "mine", "name": "a/b c"}
