"""A service whose clients send garbage, too much, too little or nothing at all, or vanish; and full disks."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from serving import ApiCaller, make_token, serving, wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("_needs_isolation")]


@pytest.mark.parametrize(
    ("method", "path", "request_", "status", "words"),
    [
        ("POST", "/judge", {"data": b"\xff\x00 not json"}, 400, "not JSON"),
        ("POST", "/judge", {"data": b"[" * 100_000}, 400, "not JSON"),
        ("POST", "/judge", {"json": [1]}, 400, "JSON object"),
        ("POST", "/judge", {"json": {"tests": []}}, 400, "no code"),
        ("POST", "/judge", {"json": {"code": "1", "tests": 3}}, 400, "must be a list"),
        ("POST", "/judge", {"json": {"code": "1", "tests": [{"stdout": "1"}]}}, 400, "stdout"),
        ("POST", "/judge", {"json": {"code": "1", "tests": [{"$record": "os.system"}]}}, 400, "not an encoded value"),
        ("POST", "/judge", {"json": {"code": "1", "tests": [{"$int": "zz"}]}}, 400, "not an encoded value"),
        ("POST", "/judge", {"json": {"code": "1", "tests": [{"stdin": "1"}], "shell": True}}, 400, "shell"),
        ("POST", "/machines", {"json": {"memory_mb": "much"}}, 400, "memory_mb is 'much'"),
        ("POST", "/machines", {"json": {"memory_mb": True}}, 400, "memory_mb"),
        ("POST", "/machines", {"json": {"lifetime_s": -1}}, 400, "lifetime_s is '-1'"),
        ("POST", "/machines", {"json": {"env": {"A": 1}}}, 400, "valid string"),
        ("POST", "/machines", {"json": {"image": "debian"}}, 400, "has no images"),
        ("GET", "/machines?limit=many", {}, 400, "limit"),
        ("GET", "/machines?limit=0", {}, 400, "limit"),
        ("GET", "/machines?cursor=!!", {}, 400, "cursor"),
        ("GET", "/machines?status=odd", {}, 400, "status"),
        ("DELETE", "/machines", {"json": {}}, 400, "nothing was chosen"),
        ("GET", "/machines/m-0", {}, 404, "no machine"),
        ("GET", "/nothing", {}, 404, "docs/reference"),
        ("PATCH", "/machines", {}, 405, "takes DELETE, GET, HEAD, POST"),
        ("POST", "/lease", {}, 400, "Mettle-Client"),
        ("POST", "/judge", {"data": io.BytesIO(bytes(5 << 20))}, 413, "4,194,304 bytes"),
    ],
)
async def test_garbage_is_one_typed_line_and_the_service_stays_healthy(
    api: ApiCaller, method: str, path: str, request_: dict[str, Any], status: int, words: str
) -> None:
    found, body = await api.ask(method, path, **request_)
    assert found == status, body
    assert words in body["error"]["message"]
    assert "\n" not in body["error"]["message"]
    assert (await api.ask("GET", "/status"))[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "request_", "words"),
    [
        ("POST", "/exec", {"json": {}}, "command"),
        ("POST", "/exec", {"json": {"command": [1]}}, "command"),
        ("POST", "/exec", {"json": {"command": "x", "stream": "maybe"}}, "stream"),
        ("POST", "/exec", {"json": {"command": "x", "stdin_base64": "!!"}}, "base64"),
        ("POST", "/exec", {"json": {"command": "x", "timeout_s": 0}}, "timeout_s"),
        ("POST", "/exec", {"json": {"command": "x", "max_output_bytes": 1 << 40}}, "max_output_bytes"),
        ("PUT", "/files", {"data": b"x"}, "path"),
        ("PUT", "/files?path=x&mode=9z", {"data": b"x"}, "octal"),
        ("POST", "/files", {"data": b"x"}, "x-mettle-files"),
        ("GET", "/files?path=x&max_bytes=y", {}, "max_bytes"),
        ("GET", "/jobs/7?wait_s=y", {}, "has no job '7'"),
    ],
)
async def test_garbage_for_a_machine_is_one_typed_line(
    api: ApiCaller, method: str, path: str, request_: dict[str, Any], words: str
) -> None:
    machine = await api.create()
    status, body = await api.ask(method, f"/machines/{machine}{path}", **request_)
    assert status in (400, 404), body
    assert words in body["error"]["message"]
    assert (await api.ask("POST", f"/machines/{machine}/exec", json={"command": "echo 1"}))[1]["stdout"] == "1\n"
    await api.ask("DELETE", f"/machines/{machine}")


@pytest.mark.parametrize(("path", "words"), [("/connect/999999", "no port"), ("/connect/80?timeout_s=x", "timeout_s")])
async def test_a_websocket_that_is_refused_says_why_in_a_header(api: ApiCaller, path: str, words: str) -> None:
    machine = await api.create()
    url, headers = f"{api.url}/api/v1/machines/{machine}{path}", {"Authorization": f"Bearer {api.token}"}
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await api.session.ws_connect(url, headers=headers)
    assert refused.value.status == 400
    assert refused.value.headers is not None
    assert words in json.loads(refused.value.headers["Mettle-Error"])["error"]["message"]
    await api.ask("DELETE", f"/machines/{machine}")


async def test_an_upload_that_is_cut_short_or_lies_leaves_nothing(api: ApiCaller) -> None:
    machine = await api.create()
    headers = {"Content-Type": "application/x-mettle-files"}

    def header(**about: Any) -> bytes:
        text = json.dumps(about).encode()
        return struct.pack(">I", len(text)) + text

    for data, words in (
        (b"\0\0", "middle of a file"),
        (b"\xff\xff\xff\xff", "at most"),
        (header(path="x", size=10, mode=420) + b"short", "middle of a file"),
        (header(path="x"), "cannot be read"),
        (header(path="x", size=-5, mode=420), "size below 0"),
        ((header(path="x", size=1, mode=420) + b"1") * 2, "twice"),
    ):
        status, body = await api.ask("POST", f"/machines/{machine}/files", data=data, headers=headers)
        assert status == 400, body
        assert words in body["error"]["message"]
    assert (await api.ask("GET", f"/machines/{machine}/entries"))[1]["entries"] == []
    assert not [name for name in os.listdir(api.home) if name.startswith("mettle-upload")]
    await api.ask("DELETE", f"/machines/{machine}")


async def test_files_over_the_limit_are_refused_with_or_without_a_length(api: ApiCaller) -> None:
    machine = await api.create()

    async def drip() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"x" * (1 << 20)

    for data in (io.BytesIO(bytes(9 << 20)), drip()):
        try:
            status, body = await api.ask("PUT", f"/machines/{machine}/files?path=big", data=data)
        except aiohttp.ClientError:
            continue  # it may be hung up on while it still sends
        assert (status, body["error"]["type"]) == (413, "too_large")
    assert (await api.ask("GET", f"/machines/{machine}/entries"))[1]["entries"] == []
    assert not [name for name in os.listdir(api.home) if name.startswith("mettle-upload")]
    await api.ask("DELETE", f"/machines/{machine}")


async def test_a_client_that_stops_sending_is_hung_up_on(api: ApiCaller) -> None:
    machine = await api.create()
    host, port = api.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"PUT /api/v1/machines/{machine}/files?path=x HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {api.token}\r\n"
    )
    writer.write(f"{head}Content-Length: 1000\r\n\r\nsome".encode())
    async with asyncio.timeout(100):
        answer = await reader.readline()
    assert b"408" in answer
    writer.close()
    assert (await api.ask("GET", f"/machines/{machine}/entries"))[1]["entries"] == []
    await api.ask("DELETE", f"/machines/{machine}")


async def test_a_client_that_takes_nothing_is_hung_up_on_and_its_command_ends(api: ApiCaller) -> None:
    machine = await api.create()
    host, port = api.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = json.dumps({"command": "yes", "timeout_s": 60, "stream": "chunks"}).encode()
    head = f"POST /api/v1/machines/{machine}/exec HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {api.token}\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await reader.readline()
    await wait_until(lambda: _runs(api, machine, "yes"))
    await wait_until(lambda: _runs_not(api, machine, "yes"))
    writer.close()
    await api.ask("DELETE", f"/machines/{machine}")


async def test_a_client_that_hangs_up_takes_its_command_along(api: ApiCaller) -> None:
    machine = await api.create()
    asking = asyncio.create_task(api.ask("POST", f"/machines/{machine}/exec", json={"command": "sleep 77"}))
    await wait_until(lambda: _runs(api, machine, "sleep"))
    asking.cancel()
    await wait_until(lambda: _runs_not(api, machine, "sleep"))
    await api.ask("DELETE", f"/machines/{machine}")


async def _runs(api: ApiCaller, machine: str, name: str) -> bool:
    _, shown = await api.ask("POST", f"/machines/{machine}/exec", json={"command": "cat /proc/[0-9]*/comm"})
    return name in shown["stdout"].splitlines()


async def _runs_not(api: ApiCaller, machine: str, name: str) -> bool:
    return not await _runs(api, machine, name)


async def _has_ended(api: ApiCaller, machine: str) -> bool:
    return bool((await api.ask("GET", f"/machines/{machine}"))[1]["status"] == "ended")


async def test_a_machine_whose_client_is_not_heard_of_ends(api: ApiCaller) -> None:
    leases = api.service.leases
    client = {"Mettle-Client": "c-1"}
    _, made = await api.ask("POST", "/machines", json={}, headers=client)
    _, news = await api.ask("POST", "/lease", json={}, headers=client)
    assert news["machines"] == [made["id"]]
    before, leases.lease_s = leases.lease_s, 0.3
    try:
        await wait_until(lambda: _has_ended(api, made["id"]))
    finally:
        leases.lease_s = before
    _, shown = await api.ask("GET", f"/machines/{made['id']}")
    assert "has not been heard of" in shown["why_ended"]
    _, news = await api.ask("POST", "/lease", json={}, headers=client)
    assert news["machines"] == []
    assert "not been heard of" in news["ended"][made["id"]]


async def test_an_abandoned_creation_ends(api: ApiCaller) -> None:
    client = {"Mettle-Client": "c-2"}
    _, made = await api.ask("POST", "/machines", json={}, headers={**client, "Idempotency-Key": "lost"})
    await api.ask("POST", "/lease", json={"abandoned": ["lost", "never"]}, headers=client)
    await wait_until(lambda: _has_ended(api, made["id"]))


async def test_one_hundred_megabytes_go_in_and_out(tmp_path: Path) -> None:
    token = make_token(tmp_path)
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        serving(tmp_path, max_body_mb=128) as (_, url),
        aiohttp.ClientSession(f"{url}", headers=headers) as session,
    ):
        async with session.post("/api/v1/machines", json={"disk_mb": 256, "memory_mb": 512}) as made:
            machine = f"/api/v1/machines/{(await made.json())['id']}"
        piece = os.urandom(1 << 20)

        async def body() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield piece

        async with session.put(f"{machine}/files?path=big", data=body()) as put:
            assert put.status == 201, await put.text()
        num_bytes = 0
        async with session.get(f"{machine}/files?path=big") as got:
            async for data in got.content.iter_any():
                num_bytes += len(data)
        assert num_bytes == 100 << 20
        order = {"command": "tail -c 1048576 big | sha256sum", "timeout_s": 60}
        async with session.post(f"{machine}/exec", json=order) as ran:
            import hashlib

            assert (await ran.json())["stdout"].split()[0] == hashlib.sha256(piece).hexdigest()
    assert not [name for name in os.listdir(tmp_path) if name.startswith("mettle-upload")]


async def test_a_full_disk_of_the_service_is_one_error_and_not_the_machines(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs to mount a small file system")
    import subprocess

    small = tmp_path / "small"
    small.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], check=False)  # noqa: ASYNC221
    if done.returncode:
        pytest.skip("cannot mount here")
    try:
        token = make_token(tmp_path)
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            serving(tmp_path, spool_dir=str(small)) as (_, url),
            aiohttp.ClientSession(url, headers=headers) as session,
        ):
            async with session.post("/api/v1/machines", json={}) as made:
                machine = f"/api/v1/machines/{(await made.json())['id']}"
            async with session.put(f"{machine}/files?path=big", data=io.BytesIO(bytes(3 << 20))) as put:
                assert put.status == 507
                assert (await put.json())["error"]["type"] == "no_space"
            async with session.put(f"{machine}/files?path=small", data=io.BytesIO(bytes(1 << 20))) as put:
                assert put.status == 201
            assert os.listdir(small) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)  # noqa: ASYNC221


async def test_a_full_disk_of_a_machine_is_an_error_of_the_machine(api: ApiCaller) -> None:
    machine = await api.create(disk_mb=4)
    answers = [
        await api.ask("PUT", f"/machines/{machine}/files?path={name}", data=io.BytesIO(bytes(3 << 20)))
        for name in ("first", "second")
    ]
    assert answers[0][0] == 201
    status, body = answers[1]
    assert (status, body["error"]["type"], body["error"]["errno"]) == (422, "os", errno.ENOSPC)
    await api.ask("DELETE", f"/machines/{machine}")
