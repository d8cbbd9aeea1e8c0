"""Services and clients that are killed, go away and come back, refuse, or give too little."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable
from pathlib import Path

import pytest
from owners import ENVIRONMENT, is_alive

from mettle.errors import SandboxError, UserError
from mettle.runs.ports import free_port
from mettle.sandbox import Machine, MachineConfig, MachineLost, SandboxConfig, StdioTest, open_judge, open_machines
from mettle.sandbox.service.client.client import ServiceClient
from mettle.sandbox.service.client.machine import RemoteMachine
from mettle.sandbox.service.faults import NoService, QuotaExceeded, ServiceLost, TokenRefused
from mettle.sandbox.zygote import watch
from serving import make_token, service_process, serving, wait_until

pytestmark = pytest.mark.usefixtures("_needs_isolation")

CLIENT = """
import asyncio, sys
from mettle.sandbox import MachineConfig, SandboxConfig, open_machines
async def main():
    async with open_machines(SandboxConfig(backend="remote", urls=(sys.argv[1],), token_env="MSB_TOKEN")) as machines:
        for _ in range(2):
            machine = await machines.create()
            await machine.start("sleep 300")
        print(*(machine.id for machine in machines.machines), flush=True)
        await asyncio.sleep(300)
asyncio.run(main())
"""


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    made = make_token(tmp_path)
    monkeypatch.setenv("MSB_TOKEN", made)
    return made


def remote(*urls: str, start_timeout_s: float = 5.0) -> SandboxConfig:
    return SandboxConfig(backend="remote", urls=urls, token_env="MSB_TOKEN", start_timeout_s=start_timeout_s)


async def raised(work: Awaitable[object]) -> BaseException | None:
    try:
        await work
    except Exception as error:
        return error
    return None


@pytest.mark.usefixtures("token")
async def test_a_killed_service_is_one_clear_error_and_leaves_no_process(tmp_path: Path) -> None:
    async with service_process(tmp_path) as (process, url), open_machines(remote(url)) as machines:
        machine = await machines.create()
        running = asyncio.create_task(machine.exec("sleep 300", timeout_s=300))
        job = await machine.start("sleep 300")
        connection = await machine.listen()
        await wait_until(lambda: asyncio.sleep(0, len(watch.descendants(process.pid)) > 4))
        family = watch.descendants(process.pid)
        process.kill()
        error = await raised(running)
        assert type(error) is ServiceLost
        assert url in str(error)
        assert "\n" not in str(error)
        for attempt in (machine.exec("true"), machine.download("x"), machine.snapshot(), machine.start("true")):
            assert isinstance(await raised(attempt), ServiceLost)
        await wait_until(lambda: asyncio.sleep(0, not any(is_alive(pid) for pid in family)))
        connection.close()
        assert type(await raised(machines.create())) is NoService
        assert job.poll() is None, "nobody knows what became of it"


@pytest.mark.usefixtures("token")
async def test_machines_of_a_killed_client_end_with_its_lease(tmp_path: Path) -> None:
    async with serving(tmp_path, lease_s=1.5) as (service, url):
        now = [time.monotonic()]
        service.leases.clock = lambda: now[0]

        async def is_heard_of() -> bool:
            return any(lease.heard == now[0] for lease in service.leases._known.values())

        async def is_given_up() -> bool:
            now[0] += 1.0
            return service.register.num_running == 0

        client = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", CLIENT, url],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": ENVIRONMENT["PYTHONPATH"]},
        )
        with client:
            assert client.stdout is not None
            ids = (await asyncio.to_thread(client.stdout.readline)).decode().split()
            assert len(ids) == 2
            for _ in range(3):
                now[0] += 1.0
                await wait_until(is_heard_of)
            assert service.register.num_running == 2, "a client that is there keeps its machines beyond the lease"
            client.kill()
        await wait_until(is_given_up)
        async with ServiceClient(url, "MSB_TOKEN") as other:
            assert "has not been heard of" in (await other.show(ids[0]))["why_ended"]


@pytest.mark.usefixtures("token")
async def test_a_port_that_a_client_listens_at_has_no_name_on_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "client").mkdir()
    async with serving(tmp_path) as (_, url), open_machines(remote(url)) as machines:
        machine = await machines.create()
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        with await machine.listen(9000) as listener:
            assert os.listdir(folder) == []
            call = "import socket; print(socket.create_connection(('127.0.0.1', 9000)).recv(9).decode())"
            caller = asyncio.create_task(machine.exec(["python3", "-c", call]))
            loop = asyncio.get_running_loop()
            accepted, _ = await loop.sock_accept(listener)
            with accepted:
                await loop.sock_sendall(accepted, b"dear")
            assert (await caller).stdout == "dear\n"


@pytest.mark.usefixtures("token")
async def test_machines_of_a_closed_pool_end_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, url):
        async with open_machines(remote(url)) as machines:
            made = await machines.create()
            job = await made.start("sleep 300")
            assert service.register.num_running == 1
        assert service.register.num_running == 0
        assert isinstance(await raised(job.wait()), MachineLost)
        with pytest.raises(MachineLost, match="its pool was closed"):
            await made.exec("true")
        with pytest.raises(UserError, match="async with"):
            await machines.create()


@pytest.mark.usefixtures("token")
async def test_work_goes_to_the_service_that_is_left_when_one_dies(tmp_path: Path) -> None:
    async with service_process(tmp_path) as (first, url), serving(tmp_path) as (service, other):
        config = remote(url, other)
        async with open_judge(config) as judge, open_machines(config) as machines:
            made = [await machines.create() for _ in range(4)]
            by_url = {machine.connection.url for machine in made if isinstance(machine, RemoteMachine)}
            assert by_url == {url, other}, "the less busy of two is taken"
            slow = [judge.judge("import time; time.sleep(1); print(1)", [StdioTest("", "1")]) for _ in range(4)]
            judging = [asyncio.create_task(one) for one in slow]
            await wait_until(lambda: asyncio.sleep(0, service.num_judging > 0))
            assert service.num_judging < 4
            first.kill()
            results = await asyncio.gather(*judging)
            assert all(result.has_passed for result in results), "a judgement is done again elsewhere"
            lost = [machine for machine in made if isinstance(machine, RemoteMachine) and machine.connection.url == url]
            kept = [machine for machine in made if machine not in lost]
            assert isinstance(await raised(lost[0].exec("true")), ServiceLost)
            assert (await kept[0].exec("echo kept")).stdout == "kept\n"
            again = await machines.create()
            assert isinstance(again, RemoteMachine)
            assert again.connection.url == other
            assert (await judge.judge("print(1)", [StdioTest("", "1")])).has_passed


@pytest.mark.usefixtures("token")
async def test_a_service_that_comes_back_is_used_again_and_its_old_machines_are_known_to_be_gone(
    tmp_path: Path,
) -> None:
    async with (
        service_process(tmp_path, port=free_port()) as (process, url),
        open_machines(remote(url, start_timeout_s=100.0)) as machines,
    ):
        machine = await machines.create()
        process.kill()
        await asyncio.to_thread(process.wait)
        creating = asyncio.create_task(machines.create())
        await asyncio.sleep(0.3)
        assert not creating.done(), "it is waited for a while"
        async with service_process(tmp_path, port=int(url.rpartition(":")[2])):
            assert (await (await creating).exec("echo back")).stdout == "back\n"
            await wait_until(lambda: asyncio.sleep(0, not machine.is_alive))
            with pytest.raises(MachineLost, match="started anew"):
                await machine.exec("true")


@pytest.mark.usefixtures("token")
async def test_a_service_that_is_told_to_end_finishes_what_it_does(tmp_path: Path) -> None:
    async with service_process(tmp_path, grace_s=60.0) as (process, url), open_machines(remote(url)) as machines:
        machine = await machines.create()
        running = asyncio.create_task(machine.exec("touch begun; sleep 1; echo done"))
        await machine.exec("while [ ! -e begun ]; do sleep 0.02; done")
        family = watch.descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(100):
            while (error := await raised(machine.exec("true"))) is None:
                pass
        assert isinstance(error, SandboxError), "nothing new is taken"
        assert (await running).stdout == "done\n"
        assert await asyncio.to_thread(process.wait, 100) == 0
        await wait_until(lambda: asyncio.sleep(0, not any(is_alive(pid) for pid in family)))


async def test_a_wrong_token_is_the_callers_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_token(tmp_path)
    async with serving(tmp_path) as (_, url):
        for wrong in ("nonsense", ""):
            monkeypatch.setenv("MSB_TOKEN", wrong)
            with pytest.raises(TokenRefused):
                async with open_machines(remote(url)):
                    pass


@pytest.mark.usefixtures("token")
async def test_a_service_that_isolates_less_than_is_required_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, sandbox={"backend": "unsafe"}) as (_, url):
        for opened in (open_machines(remote(url)), open_judge(remote(url))):
            with pytest.raises(UserError, match=r"gives isolation 'none' \(backend unsafe\).*require is 'ns'"):
                async with opened:
                    pass


async def test_over_quota_is_said_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSB_TOKEN", make_token(tmp_path, "two", max_machines=2))
    async with serving(tmp_path) as (_, url), open_machines(remote(url)) as machines:
        made = [await machines.create(MachineConfig(disk_mb=8)) for _ in range(2)]
        with pytest.raises(QuotaExceeded, match="max_machines 2"):
            await machines.create()
        await made[0].delete()
        await machines.create()


async def test_more_judgements_than_the_quota_wait_their_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSB_TOKEN", make_token(tmp_path, "two", max_judging=2))
    async with serving(tmp_path) as (service, url), open_judge(remote(url)) as judge:
        asked = [judge.judge(f"print({number})", [StdioTest("", str(number))]) for number in range(12)]
        assert all(result.has_passed for result in await asyncio.gather(*asked))
        assert service.num_judging == 0


async def test_a_service_that_is_not_there_is_one_clear_error() -> None:
    with pytest.raises(NoService, match=r"http://127.0.0.1:1 cannot be reached: .*refused"):
        async with open_judge(remote("http://127.0.0.1:1", start_timeout_s=0.5)):
            pass
    with pytest.raises(UserError, match="not the address"):
        async with open_judge(remote("ftp://example")):
            pass


async def test_something_else_at_the_address_is_said() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\nhi")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ServiceLost, match="not one of a sandbox service"):
            async with open_judge(remote(f"http://127.0.0.1:{port}", start_timeout_s=0.5)):
                pass


@pytest.mark.usefixtures("token")
async def test_a_machine_made_for_a_caller_who_left_ends(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, url), open_machines(remote(url)) as machines:
        may_go_on, make = asyncio.Event(), service.register.pool.create

        async def make_slowly(config: MachineConfig | None = None) -> Machine:
            await may_go_on.wait()
            return await make(config)

        service.register.pool.create = make_slowly  # type: ignore[method-assign]
        creating = asyncio.create_task(machines.create())
        await wait_until(lambda: asyncio.sleep(0, service.register.num_making == 1))
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        may_go_on.set()
        await wait_until(lambda: asyncio.sleep(0, service.register.num_making == 0))
        await wait_until(lambda: asyncio.sleep(0, service.register.num_running == 0))


@pytest.mark.usefixtures("token")
async def test_commands_one_after_the_other_use_one_connection_and_log_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as (_, url), open_machines(remote(url)) as machines:
        machine = await machines.create()
        assert isinstance(machine, RemoteMachine)
        await machine.exec("true")
        connector = machine.connection._session.connector
        assert connector is not None
        for _ in range(20):
            await machine.exec("true")
            async for _ in machine.stream("true"):
                pass
        num_kept = sum(len(kept) for kept in connector._conns.values())
        assert 1 <= num_kept <= 2, "one for work and one for the lease"
        stream = machine.stream("yes")
        async for _ in stream:
            break
        await stream.aclose()
        await machine.exec("true")
        await asyncio.sleep(0.2)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
