"""The real client of sandboxes and the real service, in processes that can be frozen, killed and lost with their node."""

import asyncio
import random
import tempfile
from pathlib import Path

import pytest

from mettle.envs.sandboxes.shared import SANDBOX_ENV
from mettle.errors import SandboxError
from mettle.runs.cluster.sandboxes import client_settings, write_settings
from mettle.runs.config import RayConfig
from mettle.runs.simulation.host import HostLoop, Life, SimulatedHost, until
from mettle.runs.simulation.sandboxes import SandboxUsers, SimulatedBackend, run_service
from mettle.sandbox.machines.endings import MachineLost
from mettle.sandbox.service.config import ServiceConfig
from mettle.sandbox.service.faults import ServiceLost, TokenRefused
from mettle.sandbox.service.tokens import TOKEN_ENV
from mettle.storage.run_dir import RunDir

TOKEN = "a token that is long enough"
NAMES = ("sandboxes-0", "sandboxes-1")


class Scene:
    """Services on nodes of their own, and a worker that makes sandboxes there."""

    def __init__(self, root, *, token=TOKEN):
        self.run_dir = RunDir(root)
        self.run_dir.endpoint("x").parent.mkdir(parents=True)
        write_settings(self.run_dir, RayConfig(num_sandbox_services=len(NAMES)))
        self.host = SimulatedHost(self.run_dir, asyncio.get_running_loop())
        self.users = SandboxUsers(self.host, random.Random(0))
        self.backends, self.services = {}, {}
        for name in NAMES:
            self.start(name)
        config = client_settings(ServiceConfig(), [self.run_dir.endpoint(name) for name in NAMES])
        environment = {SANDBOX_ENV: config.model_dump_json(), config.token_env: token}
        self.worker = Life(self.host, "worker", wait_for_ever, environment=environment)

    def start(self, name):
        """A life of a service, as a launcher and its supervisor start it again."""
        self.run_dir.endpoint(name).unlink(missing_ok=True)
        backend = self.backends[name] = SimulatedBackend()

        async def serve(life):
            await asyncio.sleep(1.0)
            return await run_service(life, backend)

        self.services[name] = Life(self.host, name, serve, node=name, environment={TOKEN_ENV: TOKEN})

    def lose(self, name):
        """With its node, of which nobody hears any more."""
        self.services[name].is_cut_off = True
        self.services[name].end(-9)

    async def create(self):
        return await self.worker.ask(self.users.create())

    def where(self, machine):
        return next(name for name, backend in self.backends.items() if machine.id in {one.id for one in backend.made})

    @property
    def now(self):
        return self.host.now()


async def wait_for_ever(life):
    await asyncio.Event().wait()
    return 0


def played(story, **options):
    """Play a story on a virtual clock; no process may have died of something that it did not expect."""

    async def play(root):
        scene = Scene(root, **options)
        try:
            async with asyncio.timeout(5000):
                await story(scene)
        finally:
            await scene.users.close(scene.worker)
            for life in list(scene.host.lives.values()):
                life.end(-9)  # one that is frozen would keep the loop from ending
        assert scene.host.errors == []

    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=HostLoop) as runner:
        runner.run(play(Path(folder)))


async def create_at(scene, name):
    """A machine at a service of that name."""
    while scene.where(machine := await scene.create()) != name:
        pass
    return machine


async def run(scene, machine):
    return await scene.worker.ask(machine.exec("true", timeout_s=None))


def test_machines_are_made_at_the_service_that_has_the_least_to_do():
    async def story(scene):
        made = [await scene.create() for _ in range(10)]
        assert [[scene.where(one) for one in made].count(name) for name in NAMES] == [5, 5]
        for machine in made:
            if scene.where(machine) == NAMES[0]:
                await scene.worker.ask(machine.delete())
        await asyncio.sleep(2.0)  # the services say how busy they are
        assert {scene.where(await scene.create()) for _ in range(4)} == {NAMES[0]}

    played(story)


def test_with_a_killed_service_its_machines_are_lost_and_new_ones_are_made_at_the_other():
    async def story(scene):
        lost, kept = await create_at(scene, NAMES[0]), await create_at(scene, NAMES[1])
        running = asyncio.create_task(run(scene, lost))
        await asyncio.sleep(0.05)
        scene.services[NAMES[0]].end(-9)
        with pytest.raises(SandboxError):
            await running
        assert (await run(scene, kept)).exit_code == 0
        assert {scene.where(await scene.create()) for _ in range(4)} == {NAMES[1]}
        with pytest.raises(SandboxError):
            await run(scene, lost)

    played(story)


def test_with_every_service_gone_at_once_a_new_machine_waits_for_one_that_comes_back_elsewhere():
    async def story(scene):
        lost = await scene.create()
        for name in NAMES:
            scene.services[name].end(-9)
            scene.run_dir.endpoint(name).unlink()  # as the supervisor does
        await asyncio.sleep(5.0)
        creating = asyncio.create_task(scene.create())
        await asyncio.sleep(5.0)
        assert not creating.done()
        scene.start(NAMES[1])
        assert scene.where(await creating) == NAMES[1]
        with pytest.raises(MachineLost, match="is gone"):
            await run(scene, lost)
        scene.services[NAMES[1]].end(-9)
        scene.run_dir.endpoint(NAMES[1]).unlink()
        with pytest.raises(ServiceLost, match="none says where it is"):
            await scene.create()

    played(story)


def test_a_service_that_comes_back_and_does_not_answer_is_the_services_fault():
    async def story(scene):
        await scene.create()
        for name in NAMES:
            scene.services[name].end(-9)
            scene.run_dir.endpoint(name).unlink()
        scene.start(NAMES[0])
        await until(scene.run_dir.endpoint(NAMES[0]).exists, 0.01)
        scene.services[NAMES[0]].freeze()
        await asyncio.sleep(2.0)
        with pytest.raises(ServiceLost):
            await scene.create()

    played(story)


def test_a_service_whose_node_is_lost_without_a_word_is_missed_within_half_a_minute():
    async def story(scene):
        machine = await create_at(scene, NAMES[0])
        running = asyncio.create_task(run(scene, machine))
        await asyncio.sleep(0.05)
        scene.lose(NAMES[0])
        lost_at = scene.now
        with pytest.raises(ServiceLost):
            await running
        assert scene.now - lost_at < 30.0
        began = scene.now
        assert scene.where(await scene.create()) == NAMES[1]
        await scene.worker.ask(machine.delete())
        assert scene.now - began < 1.0, "what is known to be gone is waited for"

    played(story)


def test_a_machine_that_ended_while_its_service_was_frozen_ends_there_when_that_goes_on():
    async def story(scene):
        machine = await create_at(scene, NAMES[0])
        kept = await create_at(scene, NAMES[0])
        scene.services[NAMES[0]].freeze()
        await asyncio.sleep(40.0)
        await scene.worker.ask(machine.delete())
        scene.services[NAMES[0]].go_on()
        await asyncio.sleep(5.0)
        there = {one.id: one for one in scene.backends[NAMES[0]].made}
        assert not there[machine.id].is_alive
        assert there[kept.id].is_alive
        assert (await run(scene, kept)).exit_code == 0

    played(story)


def test_a_worker_that_begins_while_one_service_is_frozen_does_not_wait_for_that():
    async def story(scene):
        await asyncio.sleep(2.0)
        scene.services[NAMES[0]].freeze()
        began = scene.now
        assert scene.where(await scene.create()) == NAMES[1]
        assert scene.now - began < 6.0
        scene.services[NAMES[0]].go_on()
        await asyncio.sleep(30.0)
        assert scene.where(await scene.create()) == NAMES[0], "it is taken when it answers"

    played(story)


def test_machines_of_a_killed_worker_end_with_its_lease_and_no_sooner():
    async def story(scene):
        machine = await scene.create()
        await asyncio.sleep(300.0)
        (there,) = [one for backend in scene.backends.values() for one in backend.made]
        assert there.is_alive
        assert machine.id == there.id
        scene.worker.end(-9)
        await asyncio.sleep(50.0)
        assert there.is_alive
        await asyncio.sleep(15.0)
        assert "has not been heard of for 60 s" in there.why_ended

    played(story)


def test_another_token_than_the_runs_is_refused():
    async def story(scene):
        with pytest.raises(TokenRefused):
            await scene.create()

    played(story, token="the token of somebody else")


def test_a_frozen_service_takes_connections_and_answers_when_it_goes_on():
    async def story(scene):
        machine = await create_at(scene, NAMES[0])
        scene.services[NAMES[0]].freeze()
        running = asyncio.create_task(run(scene, machine))
        await asyncio.sleep(8.0)
        assert not running.done()
        scene.services[NAMES[0]].go_on()
        assert (await running).exit_code == 0

    played(story)


def test_who_asks_a_lost_node_waits_for_ever():
    async def story(scene):
        await asyncio.sleep(2.0)
        scene.lose(NAMES[0])
        loop, path = scene.host.loop, f"/{scene.services[NAMES[0]].pid}"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000.0):
                await loop.create_unix_connection(asyncio.Protocol, path)
        scene.services[NAMES[1]].end(-9)
        with pytest.raises(ConnectionRefusedError):
            await loop.create_unix_connection(asyncio.Protocol, f"/{scene.services[NAMES[1]].pid}")

    played(story)
