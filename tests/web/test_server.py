"""The life of a server: sockets, connections that ask nothing, heads without end, and the stop."""

from __future__ import annotations

import asyncio
import socket
import stat
import time

import aiohttp
import pytest
from starlette.responses import Response

from mettle.errors import UserError
from mettle.web import server as module
from mettle.web.server import bind, bind_unix, url_of


async def hello(request):
    return Response("hello")


def connect(url):
    host, _, port = url.removeprefix("http://").rpartition(":")
    return asyncio.open_connection(host, int(port))


def test_a_port_that_is_taken_is_one_clear_line():
    with bind("127.0.0.1", 0) as taken, pytest.raises(UserError, match="is in use; give another with --port"):
        bind("127.0.0.1", taken.getsockname()[1])


def test_an_address_of_another_machine_is_one_clear_line():
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1:0"):
        bind("192.0.2.1", 0)
    with pytest.raises(UserError, match="no such host"):
        bind("no-such-host.invalid", 0)


def test_a_unix_socket_is_its_owners_alone(tmp_path):
    with bind_unix(tmp_path / "s") as listener:
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
        assert listener.family == socket.AF_UNIX
    with pytest.raises(UserError, match="cannot listen on"):
        bind_unix(tmp_path / "no" / "s")


def test_a_unix_socket_takes_only_the_place_of_one_that_was_left_behind(tmp_path):
    with bind_unix(tmp_path / "s"), pytest.raises(UserError, match="another process does; give another path, or stop"):
        bind_unix(tmp_path / "s")
    with bind_unix(tmp_path / "s"):
        pass
    file = tmp_path / "file"
    file.write_text("somebody's work")
    for path in (file, tmp_path):
        with pytest.raises(UserError, match="it is no socket"):
            bind_unix(path)
    assert file.read_text() == "somebody's work"


def test_urls():
    assert (url_of("127.0.0.1", 80), url_of("::1", 80, "https")) == ("http://127.0.0.1:80", "https://[::1]:80")


async def test_answers_leave_at_once(serve, http):
    """With Nagle's algorithm on, the second write of an answer waits 40 ms for the client's delayed acknowledgement."""
    url = await serve([("GET", "/", hello)])
    for _ in range(2000):  # each of them waits that long, where it has to; a busy host makes only some of them wait
        started = time.perf_counter()
        async with http.get(url) as answer:
            assert await answer.text() == "hello"
        if time.perf_counter() - started < 0.035:
            return
    raise AssertionError("every answer took as long as an acknowledgement is delayed")


async def test_a_head_without_an_end_is_refused(serve):
    reader, writer = await connect(await serve([("GET", "/", hello)]))
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nx-long: ")
    async with asyncio.timeout(100):
        while not reader.at_eof():
            writer.write(b"a" * 10_000)
            try:
                await writer.drain()
                await asyncio.wait_for(reader.read(1000), 0.01)
            except TimeoutError:
                continue
            except ConnectionError:
                break
    writer.close()


async def test_a_head_that_is_too_long_is_refused_though_it_came_at_once(serve, http):
    url = await serve([("GET", "/", hello)])
    async with http.get(url, headers={"x-long": "a" * 100_000}) as answer:
        assert answer.status == 400


async def test_connections_that_ask_nothing_are_hung_up_on(serve, http, monkeypatch):
    monkeypatch.setattr(module, "_SWEEP_S", 0.05)
    url = await serve([("GET", "/", hello)], options={"keep_alive_s": 1, "max_idle": 2})
    several = [await connect(url) for _ in range(4)]
    async with asyncio.timeout(100):
        assert [await reader.read() for reader, _ in several[:2]] == [b"", b""], "the oldest of too many"
        assert [await reader.read() for reader, _ in several[2:]] == [b"", b""], "too old"
    async with http.get(url) as answer:
        assert answer.status == 200
    for _, writer in several:
        writer.close()


async def test_a_stop_lets_requests_finish_within_their_time(serve, http):
    entered = asyncio.Event()

    async def slow(request):
        entered.set()
        await asyncio.sleep(0.1)
        return Response("done")

    url = await serve([("GET", "/", slow)])
    asking = asyncio.create_task(http.get(url))
    await entered.wait()
    await serve.last.stop(grace_s=5)
    async with await asking as answer:
        assert await answer.text() == "done"
    with pytest.raises(aiohttp.ClientConnectionError):
        await http.get(url)


async def test_a_stop_cancels_what_takes_too_long_and_says_so(serve, http):
    entered, cancelled = asyncio.Event(), asyncio.Event()

    async def slow(request):
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    asking = asyncio.create_task(http.get(await serve([("GET", "/", slow)])))
    await entered.wait()
    await serve.last.stop(grace_s=0.05)
    async with await asking as answer:
        assert (answer.status, (await answer.json())["code"]) == (503, "stopping")
    assert cancelled.is_set()
    assert serve.last.num_connections == 0
