"""What goes wrong between a pool and a Docker daemon, and what must be true afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from fakes.docker_daemon import Container, FakeDocker
from pydantic import ValidationError

from mettle.cli import main
from mettle.errors import SandboxError, UserError
from mettle.sandbox import MachineConfig, MachineLost, SandboxConfig, StdioTest, open_judge, open_machines
from mettle.sandbox.containers.docker.client import find_address
from mettle.sandbox.containers.docker.config import DockerConfig
from mettle.sandbox.containers.errors import (
    ControlPlaneAway,
    ControlPlaneError,
    ImageMissing,
    MachineOutOfMemory,
    MachineRemoved,
)
from mettle.sandbox.containers.owners import EXPIRES, MARK, PROCESS, Owner, is_leftover

pytestmark = [pytest.mark.usefixtures("_needs_isolation"), pytest.mark.asyncio]
SOURCES = Path(__file__).parents[5] / "src"


@pytest_asyncio.fixture
async def daemon() -> AsyncIterator[FakeDocker]:
    async with FakeDocker() as fake:
        yield fake


def config_for(daemon: FakeDocker, require: str = "ns", **docker: object) -> SandboxConfig:
    settings = {"host": daemon.url, "warm": 0, "patience_s": 5.0, **docker}
    return SandboxConfig(backend="docker", docker=DockerConfig(**settings), require=require)  # type: ignore[arg-type]


def newest(daemon: FakeDocker) -> Container:
    return max(daemon.running, key=lambda container: container.created)


async def test_a_missing_image_is_pulled_once_and_pinned_by_what_is_in_it(daemon: FakeDocker) -> None:
    async with open_machines(config_for(daemon)) as machines:
        made = await asyncio.gather(*(machines.create() for _ in range(3)))
        [image] = daemon.images.values()
        assert daemon.faults.num("POST /v1.43/images/create") == 1
        assert {container.body["Image"] for container in daemon.running} == {image["Id"]}
        assert {container.labels["mettle.image"] for container in daemon.running} == set(image["RepoDigests"])
        assert (await made[0].exec("echo $FROM_IMAGE")).stdout == "yes\n"
    assert not daemon.containers


async def test_an_image_that_nobody_has_is_named(daemon: FakeDocker) -> None:
    with pytest.raises(ImageMissing, match=r"'nobody/has:it'.*manifest unknown"):
        await open_machines(config_for(daemon, image="nobody/has:it")).__aenter__()
    with pytest.raises(ImageMissing, match="pull is 'never'"):
        await open_machines(config_for(daemon, pull="never")).__aenter__()
    async with open_machines(config_for(daemon)) as machines:
        with pytest.raises(UserError, match="other/image"):
            await machines.create(MachineConfig(image="other/image"))
        assert (await (await machines.create()).exec("echo well")).stdout == "well\n"


async def test_no_daemon_is_one_clear_error_in_time(tmp_path: Path) -> None:
    docker = DockerConfig(host=f"unix://{tmp_path}/none.sock", patience_s=0.3)
    with pytest.raises(ControlPlaneAway, match=r"no Docker daemon answers at unix://.*none\.sock"):
        await open_machines(SandboxConfig(backend="docker", docker=docker)).__aenter__()


async def test_a_restart_of_the_daemon_loses_machines_and_not_the_pool(daemon: FakeDocker) -> None:
    async with open_machines(config_for(daemon, warm=1)) as machines:
        machine = await machines.create()
        running = asyncio.create_task(machine.exec("sleep 60", timeout_s=60))
        await asyncio.sleep(0.2)
        await daemon.stop()
        with pytest.raises(MachineLost, match="has ended"):
            await running
        creating = asyncio.create_task(machines.create())
        await asyncio.sleep(0.3)
        await daemon.start()
        assert (await (await creating).exec("echo again")).stdout == "again\n"


async def test_a_creation_whose_answer_is_lost_makes_one_container(daemon: FakeDocker) -> None:
    async with open_machines(config_for(daemon)) as machines:
        daemon.faults.plan("POST", "/containers/create", 0, is_after=True)
        machine = await machines.create()
        assert (await machine.exec("echo one")).stdout == "one\n"
        assert len(daemon.containers) == 1


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_daemon_is_waited_for(daemon: FakeDocker, status: int) -> None:
    async with open_machines(config_for(daemon)) as machines:
        daemon.faults.plan("POST", "/containers/create", status, headers={"Retry-After": "1"})
        started = time.monotonic()
        await machines.create()
        assert time.monotonic() - started >= 1.0


async def test_an_error_of_the_daemon_is_told_and_leaves_nothing(daemon: FakeDocker) -> None:
    async with open_machines(config_for(daemon)) as machines:
        daemon.faults.plan("POST", "/containers/create", 500, "no space left on device")
        with pytest.raises(ControlPlaneError, match=r"500: no space left on device"):
            await machines.create()
        daemon.faults.plan("POST", "/start$", 500, "cgroup exploded")
        with pytest.raises(SandboxError, match="cgroup exploded"):
            await machines.create()
        daemon.faults.plan("POST", "/attach$", 404, "No such container")
        with pytest.raises(ControlPlaneError, match="attach: 404"):
            await machines.create()
        assert not daemon.containers
        assert (await (await machines.create()).exec("echo well")).stdout == "well\n"


async def test_an_image_without_python_says_what_it_needs(daemon: FakeDocker) -> None:
    with pytest.raises(SandboxError, match=r"no agent started .*status 127.*sandbox\.docker\.interpreter"):
        await open_machines(config_for(daemon, interpreter="no-such-python")).__aenter__()
    assert not daemon.containers


async def test_what_became_of_a_container_has_a_type(daemon: FakeDocker) -> None:
    async with open_machines(config_for(daemon)) as machines:
        machine = await machines.create()
        running = asyncio.create_task(machine.exec("sleep 60", timeout_s=60))
        await asyncio.sleep(0.2)
        await daemon.end_for_memory(newest(daemon))
        with pytest.raises(MachineOutOfMemory, match="lack of memory"):
            await running
        with pytest.raises(MachineOutOfMemory, match="lack of memory"):
            await machine.exec("true")
        machine, container = await machines.create(), newest(daemon)
        await daemon._end(container)
        daemon.containers.pop(container.id)
        with pytest.raises(MachineRemoved, match="somebody else"):
            await machine.exec("sleep 1")
        machine = await machines.create()
        process = newest(daemon).process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(MachineLost, match="ended with status 137"):
            await machine.exec("sleep 5")


async def test_a_lost_container_is_no_verdict_on_the_code_that_did_not_end_it(daemon: FakeDocker) -> None:
    async with open_judge(config_for(daemon).model_copy(update={"warm": 0})) as judge:
        judging = asyncio.create_task(judge.judge("import time; time.sleep(1); print(1)", [StdioTest("", "1")]))
        while not judge._remote.cells:  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await daemon._end(newest(daemon))
        assert (await judging).has_passed


async def test_a_cancelled_creation_leaves_nothing(daemon: FakeDocker) -> None:
    async with open_machines(config_for(daemon)) as machines:
        for pause_s in (0.0, 0.002, 0.01, 0.05, 0.1):
            task = asyncio.create_task(machines.create())
            await asyncio.sleep(pause_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not daemon.containers


async def test_every_protection_is_asked_for_by_name(daemon: FakeDocker) -> None:
    async with open_machines(config_for(daemon)) as machines:
        await machines.create(MachineConfig(memory_mb=100, disk_mb=50, max_processes=20))
        body = newest(daemon).body
        host = body["HostConfig"]
        assert (body["User"], body["NetworkDisabled"], host["NetworkMode"]) == ("1000:1000", True, "none")
        assert (host["ReadonlyRootfs"], host["CapDrop"], host["Privileged"]) == (True, ["ALL"], False)
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        assert host["Mounts"][0]["ReadOnly"] is True
        assert host["Memory"] == host["MemorySwap"] == (100 + 50 + 64 + 64) << 20
        assert (host["PidsLimit"], host["NanoCpus"], host["IpcMode"]) == (36, 10**9, "private")
        assert all("nosuid" in options and "size=" in options for options in host["Tmpfs"].values())
        assert "Runtime" not in host


async def test_isolation_is_what_was_found_inside_and_not_what_was_asked_for(daemon: FakeDocker) -> None:
    daemon.gives_seccomp = False
    with pytest.raises(UserError, match=r"isolation 'ns' .* gives 'ns-noseccomp' .*seccomp: no filter is in force"):
        await open_machines(config_for(daemon)).__aenter__()
    async with open_machines(config_for(daemon, require="ns-noseccomp")) as machines:
        assert machines.isolation.grade == "ns-noseccomp"
        assert "docker 25.0.0" in machines.isolation.lines()[0]
    daemon.gives_seccomp = True
    with pytest.raises(UserError, match=r"isolation 'kernel' .* gives 'ns' .*own kernel: the host's kernel is shared"):
        await open_machines(config_for(daemon, require="kernel")).__aenter__()
    assert not daemon.containers


async def test_podman_is_asked_for_owned_files_in_its_own_words(daemon: FakeDocker) -> None:
    daemon.is_podman = True
    async with open_machines(config_for(daemon)) as machines:
        machine = await machines.create()
        options = [text.split(",") for text in newest(daemon).body["HostConfig"]["Tmpfs"].values()]
        assert all("U" in words and not any("id=" in word for word in words) for words in options)
        assert (await machine.exec("touch /work/it && echo made")).stdout == "made\n"
        assert "podman 25.0.0" in machines.isolation.user


async def test_the_doctor_looks_into_a_container(
    daemon: FakeDocker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "service.toml"
    file.write_text(f'[sandbox]\nbackend = "docker"\n[sandbox.docker]\nhost = "{daemon.url}"\nwarm = 0\n')
    doctor = ["sandbox", "doctor", "--config", str(file)]
    assert await asyncio.to_thread(main.run, doctor) == 0
    assert "grade: tests ns, machines ns" in capsys.readouterr().out
    assert await asyncio.to_thread(main.run, [*doctor, "--require", "kernel"]) == 1
    assert "not met: machines: " in capsys.readouterr().out
    assert not daemon.containers
    file.write_text(f'[sandbox]\nbackend = "docker"\n[sandbox.docker]\nhost = "{daemon.url}x"\npatience_s = 0.1\n')
    assert await asyncio.to_thread(main.run, doctor) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no Docker daemon answers" in error
    assert "set sandbox.docker.host" in error


async def test_gvisor_is_used_where_the_daemon_lists_it(daemon: FakeDocker) -> None:
    daemon.runtimes["runsc"] = {"path": "runsc"}
    async with open_machines(config_for(daemon)) as machines:
        await machines.create()
        assert newest(daemon).body["HostConfig"]["Runtime"] == "runsc"
        assert machines.isolation.grade == "ns"  # the fake's kernel is the host's, whatever the runtime is called
    with pytest.raises(UserError, match="no runtime 'kata'; it has runc, runsc"):
        await open_machines(config_for(daemon, runtime="kata")).__aenter__()


async def test_warm_containers_are_used_once_and_made_again(daemon: FakeDocker) -> None:
    async with open_machines(config_for(daemon, warm=2)) as machines:
        while len(daemon.running) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        waiting = {container.id for container in daemon.running}
        made = await machines.create()
        assert made.container.id in waiting  # type: ignore[attr-defined]
        other = await machines.create(MachineConfig(memory_mb=1024))
        assert other.container.id not in waiting  # type: ignore[attr-defined]
        while len(daemon.running) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert not daemon.containers


OWNER_SCRIPT = """
import asyncio, sys
from mettle.sandbox import SandboxConfig, open_machines
from mettle.sandbox.containers.docker.config import DockerConfig
async def main():
    config = SandboxConfig(backend="docker", docker=DockerConfig(host=sys.argv[1], warm=1))
    async with open_machines(config) as machines:
        machine = await machines.create()
        print("ready", flush=True)
        await machine.exec("sleep 600", timeout_s=600)
asyncio.run(main())
"""


async def test_an_owner_that_is_killed_leaves_nothing_that_runs_and_the_next_one_removes_the_rest(
    daemon: FakeDocker,
) -> None:
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER_SCRIPT, daemon.url, stdout=-1, env={**os.environ, "PYTHONPATH": str(SOURCES)}
    )
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"ready\n"
    owner.kill()
    await owner.wait()
    async with asyncio.timeout(100):
        while daemon.running:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert daemon.containers
    async with open_machines(config_for(daemon)) as machines:
        assert not daemon.containers
        await machines.create()


async def test_only_what_belongs_to_nobody_is_swept() -> None:
    ours = Owner.of_this_process()
    assert not is_leftover(ours.labels(60), "running", 1e6)
    assert not is_leftover(ours.labels(60), "exited", 1e6)
    dead = {**ours.labels(60), PROCESS: ours.process.rpartition("/")[0] + "/1"}
    assert is_leftover(dead, "running", 0)
    elsewhere = {**ours.labels(60), PROCESS: "other-host/boot/pid:[1]/1/1"}
    assert not is_leftover(elsewhere, "running", 1e6)
    assert is_leftover(elsewhere, "exited", 1e6)
    assert not is_leftover(elsewhere, "created", 1)
    assert is_leftover({**elsewhere, EXPIRES: "1"}, "running", 1)
    assert not is_leftover({MARK: "1"}, "running", 1e6)


async def test_a_daemon_elsewhere_is_not_spoken_to_without_tls() -> None:
    with pytest.raises(UserError, match="without TLS"):
        find_address(DockerConfig(host="tcp://10.0.0.5:2375"), {})
    with pytest.raises(UserError, match="must be unix"):
        find_address(DockerConfig(host="ssh://me@there"), {})
    with pytest.raises(UserError, match=r"has no usable ca\.pem"):
        find_address(
            DockerConfig(), {"DOCKER_HOST": "tcp://x:2376", "DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": "/no"}
        )
    assert find_address(DockerConfig(), {}).path == "/var/run/docker.sock"
    with pytest.raises(ValidationError, match="imagee"):
        SandboxConfig.model_validate({"backend": "docker", "docker": {"imagee": "x"}})


async def test_a_backend_without_images_refuses_one() -> None:
    async with open_machines(SandboxConfig(backend="unsafe")) as machines:
        with pytest.raises(UserError, match=r"has no images, and a machine of 'alpine'"):
            await machines.create(MachineConfig(image="alpine"))
