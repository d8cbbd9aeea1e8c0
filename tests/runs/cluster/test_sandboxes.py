"""A run's sandbox services: what they and its environments are told, and machines that go on when one is lost."""

import asyncio
import json
import os
import signal

import pytest

from mettle.envs.rubrics.code_rubric import CodeRubric
from mettle.envs.sandboxes.shared import SANDBOX_ENV, default_sandbox
from mettle.errors import SandboxError, UserError
from mettle.processes.managed import ManagedProcess, ProcessSpec, wait_ready
from mettle.runs.cluster.placement import placement_of
from mettle.runs.cluster.sandboxes import client_settings, service_settings
from mettle.runs.config import RunConfig
from mettle.sandbox import MachineConfig, SandboxConfig, StdioTest, open_judge, open_machines, probe
from mettle.sandbox.service.tokens import TOKEN_ENV

TOKEN = "a token of more than sixteen characters"
needs_isolation = pytest.mark.skipif(
    not probe(SandboxConfig()).is_at_least("ns"), reason="this host cannot isolate code; services refuse it, too"
)


def write(path, text):
    path.write_text(text)
    return path


def test_a_services_file_says_what_it_isolates_and_nothing_of_where_it_listens(tmp_path):
    settings = service_settings(write(tmp_path / "a.toml", "lease_s = 5\n[sandbox]\nwarm = 1\n"))
    assert (settings.lease_s, settings.sandbox.warm) == (5.0, 1)
    client = client_settings(settings, [tmp_path / "one.json"])
    assert (client.backend, client.url_files, client.plain_http, client.warm) == (
        "remote", (tmp_path / "one.json",), True, 1,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"port, unix of a run's sandbox services is the run's own"):
        service_settings(write(tmp_path / "b.toml", 'port = 1\nunix = "/tmp/x"\n'))
    with pytest.raises(UserError, match="'remote' is a service elsewhere"):
        service_settings(write(tmp_path / "c.toml", '[sandbox]\nbackend = "remote"\nurls = ["http://a:1"]\n'))


def test_services_are_placed_apart_and_refused_where_there_is_no_cluster():
    def config(engine, **ray):
        orchestrator = {"envs": [{"id": "reverse-text"}]}
        return RunConfig.model_validate({"orchestrator": orchestrator, "deployment": {"engine": engine, "ray": ray}})

    pools = placement_of(config("ray", num_sandbox_services=2, cpus_per_sandbox_service=4)).pools
    assert [str(pools[f"sandboxes-{n}"][0]) for n in (0, 1)] == ["sandboxes-0 (4 CPU)", "sandboxes-1 (4 CPU)"]
    with pytest.raises(ValueError, match=r"deployment\.ray\.num_sandbox_services is of deployment.engine 'ray'"):
        config("local", num_sandbox_services=1)
    with pytest.raises(ValueError, match="sandbox_config is of services on nodes, and there are none"):
        config("ray", sandbox_config="a.toml")


def test_environments_take_what_the_run_says_unless_they_say_something_themselves(monkeypatch, tmp_path):
    told = SandboxConfig(backend="remote", url_files=(tmp_path / "a.json",))
    assert default_sandbox() == SandboxConfig()
    monkeypatch.setenv(SANDBOX_ENV, told.model_dump_json())
    own = SandboxConfig(memory_mb=64)
    assert [default_sandbox(), default_sandbox(SandboxConfig()), default_sandbox(own)] == [told, told, own]
    assert CodeRubric().sandbox == told
    assert CodeRubric(sandbox=own).sandbox == own


class Services:
    """As the nodes of a cluster run them."""

    def __init__(self, folder, number):
        self.folder = folder
        self.files = [folder / f"sandboxes-{index}.json" for index in range(number)]
        self.config = write(folder / "config.json", json.dumps({"lease_s": 20, "sandbox": {"warm": 0}}))
        self.processes = {}

    def start(self, *numbers):
        for number in numbers:
            name, ready = f"sandboxes-{number}", self.files[number]
            arguments = (name, "--config", str(self.config), "--host", "127.0.0.1", "--ready-file", str(ready))
            spec = ProcessSpec(
                name, "mettle.runs.cluster.sandboxes", arguments, ready_file=ready, environment={TOKEN_ENV: TOKEN}
            )
            self.processes[number] = ManagedProcess(spec, self.folder / f"{name}.out")
            self.processes[number].start()
        for number in numbers:
            wait_ready(self.processes[number])

    def lose(self, number):
        process = self.processes.pop(number)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60.0)
        process.remove_ready_file()

    def of(self, machine):
        return next(n for n, f in enumerate(self.files) if f.exists() and machine.connection.url in f.read_text())


@pytest.fixture
def services(tmp_path, forked, monkeypatch):
    monkeypatch.setenv(TOKEN_ENV, TOKEN)
    made = Services(tmp_path, 2)
    yield made
    for process in made.processes.values():
        process.end(grace_s=5.0)


async def until(is_so, limit_s=100.0):
    async with asyncio.timeout(limit_s):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@needs_isolation
async def test_machines_are_spread_and_those_of_a_lost_service_are_lost_and_made_elsewhere(services):
    services.start(0, 1)
    config = client_settings(service_settings(None), services.files)
    small = MachineConfig(memory_mb=64, disk_mb=8)
    async with open_machines(config) as machines:
        await until(lambda: len([m for m in machines._fleet.members if m.is_there]) == 2)
        made = [await machines.create(small) for _ in range(4)]
        assert sorted(map(services.of, made)) == [0, 0, 1, 1]
        lost = [machine for machine in made if services.of(machine) == 1]
        running = asyncio.create_task(lost[0].exec(["sleep", "600"]))
        services.lose(1)
        with pytest.raises(SandboxError):
            await running
        await until(lambda: not any(machine.is_alive for machine in lost))
        with pytest.raises(SandboxError, match="is gone"):
            await lost[1].exec(["true"])
        again = [await machines.create(small) for _ in range(2)]
        assert {services.of(machine) for machine in again} == {0}
        services.start(1)  # on another port, as on another node
        await until(lambda: len([m for m in machines._fleet.members if m.is_there]) == 2)
        assert services.of(await machines.create(small)) == 1
        assert all(machine.is_alive for machine in made if machine not in lost)


@needs_isolation
async def test_code_is_judged_in_the_services_and_goes_on_in_those_that_are_left(services):
    services.start(0, 1)
    config = client_settings(service_settings(None), services.files)
    async with open_judge(config) as judge:
        for lost in (None, 0):
            if lost is not None:
                services.lose(lost)
            result = await judge.judge("print(input())", [StdioTest(stdin="5", expected="5")])
            assert result.has_passed


@needs_isolation
async def test_a_pool_waits_for_the_first_service_and_says_so_when_none_comes(services):
    config = client_settings(service_settings(None), services.files)
    starting = asyncio.ensure_future(open_machines(config).__aenter__())
    services.start(0)
    await (await starting).close()
    services.lose(0)
    with pytest.raises(SandboxError, match="no sandbox service has said where it is"):
        await open_machines(config.model_copy(update={"start_timeout_s": 0.1})).__aenter__()
