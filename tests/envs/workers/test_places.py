"""Workers in places apart from their pool: spread over them, lost with them, replaced elsewhere; strangers get nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from mettle.envs.workers.environment import WorkerEnvironment
from mettle.envs.workers.handshake import NotKnown, enter
from mettle.envs.workers.place import main
from mettle.envs.workers.places import WorkerPlaces
from mettle.envs.workers.pool import WorkerPool
from mettle.envs.workers.spawn import Spawned, WorkerDied, WorkerSpec
from mettle.errors import UserError
from mettle.processes.beats import BEATS_FOLDER, read_beats
from mettle.processes.child import process_state
from mettle.processes.frames import receive, send
from mettle.processes.managed import ManagedProcess, ProcessSpec, wait_ready
from mettle.web.keys import WORKERS_KEY_ENV

pytestmark = pytest.mark.usefixtures("troubled", "forked")
KEY = "the key of this run"


class Nodes:
    """Places as the nodes of a cluster run them, each a process that can be lost and started again."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.files = [folder / f"workers-{index}.json" for index in range(number)]
        self.processes: dict[str, ManagedProcess] = {}

    def start(self, *names: str) -> None:
        for name in names:
            ready = self.folder / f"{name}.json"
            spec = ProcessSpec(
                name, "mettle.envs.workers.place", (name, "--host", "127.0.0.1", "--ready-file", str(ready)),
                ready_file=ready, environment={WORKERS_KEY_ENV: KEY, BEATS_FOLDER: str(self.folder / "beats")},
            )  # fmt: skip
            self.processes[name] = ManagedProcess(spec, self.folder / f"{name}.out")
            self.processes[name].start()
        for name in names:
            wait_ready(self.processes[name])

    def lose(self, name: str) -> None:
        process = self.processes.pop(name)
        process.signal(signal.SIGKILL)
        process.wait(60.0)
        process.remove_ready_file()

    def places(self, **options: float) -> WorkerPlaces:
        return WorkerPlaces(self.files, KEY, **options)


@pytest.fixture
def nodes(tmp_path, request):
    made = Nodes(tmp_path, getattr(request, "param", 2))
    yield made
    for process in made.processes.values():
        process.end(grace_s=0.0)


def where(pool):
    return sorted(worker._spawned._process.where for worker in pool._workers)


async def until(is_so, limit_s=100.0):
    async with asyncio.timeout(limit_s):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_the_workers_of_a_pool_are_spread_and_run_its_rollouts(nodes, endpoint):
    nodes.start("workers-0", "workers-1")
    async with WorkerPool(WorkerSpec("troubled"), 2, home=nodes.places().home(2)) as pool:
        await until(lambda: len(pool.stats) == 2)
        assert where(pool) == ["workers-0", "workers-1"]
        env = WorkerEnvironment(pool)
        groups = [env.run_group([{"prompt": "q", "answer": "fine"}], endpoint.url, "m") for _ in range(4)]
        states = [states[0] for states in await asyncio.gather(*groups)]
        assert [state["reward"] for state in states] == [1.0] * 4
        assert states[0]["trajectory"][0]["tokens"]["completion_logprobs"] == [-0.5, -0.25]
        beats = {beat.name: beat.pid for beat in read_beats(nodes.folder / "beats").values()}
        for worker in pool._workers:
            assert beats[f"worker-troubled-{worker._spawned._process.where}-{worker.pid}"] == worker.pid
        pids = [worker.pid for worker in pool.stats]
    await until(lambda: not any(map(process_state, pids)))


async def test_a_worker_killed_in_its_place_is_a_death_with_its_signal_and_is_replaced(nodes, endpoint):
    nodes.start("workers-0")
    told = []
    endpoint.answers.clear()
    home = nodes.places().home(1)
    async with WorkerPool(WorkerSpec("troubled"), 1, first_wait_s=0.01, on_death=told.append, home=home) as pool:
        group = asyncio.create_task(WorkerEnvironment(pool).run_group([{"prompt": "q"}], endpoint.url, "m"))
        await endpoint.until_asked(1)
        victim = pool.stats[0].pid
        os.kill(victim, signal.SIGKILL)
        await endpoint.until_asked(2)
        endpoint.answers.set()
        assert (await group)[0]["error"] is None
        assert told == [f"worker {victim} in workers-0 was ended by SIGKILL (troubled); its groups are run again"]


async def test_groups_of_a_lost_place_are_run_again_elsewhere_and_its_workers_come_back_with_it(nodes, endpoint):
    nodes.start("workers-0", "workers-1")
    told = []
    endpoint.answers.clear()
    # One attempt: a place that is lost is none.
    spec, home = WorkerSpec("troubled"), nodes.places().home(2)
    async with WorkerPool(spec, 2, max_attempts=1, first_wait_s=0.01, on_death=told.append, home=home) as pool:
        await until(lambda: len(pool.stats) == 2)
        env = WorkerEnvironment(pool)
        rows = [{"prompt": "q", "example_id": number, "answer": "fine"} for number in range(6)]
        groups = [asyncio.create_task(env.run_group([row], endpoint.url, "m")) for row in rows]
        await endpoint.until_asked(6)
        pids = [w.pid for w in pool._workers if w._spawned._process.where == "workers-1"]
        nodes.lose("workers-1")
        await until(lambda: told)
        await until(lambda: not any(map(process_state, pids)))
        endpoint.answers.set()
        states = [states[0] for states in await asyncio.gather(*groups)]
        assert [(state["example_id"], state["error"]) for state in states] == [(number, None) for number in range(6)]
        assert "in workers-1 is gone with its place" in told[0]
        assert where(pool) == ["workers-0"]
        nodes.start("workers-1")
        await until(lambda: where(pool) == ["workers-0", "workers-1"])


async def test_a_place_that_stays_away_leaves_its_share_to_the_others(nodes, endpoint):
    nodes.start("workers-0")
    async with WorkerPool(WorkerSpec("troubled"), 2, home=nodes.places(spread_s=0.0).home(2)) as pool:
        await until(lambda: len(pool.stats) == 2)
        assert where(pool) == ["workers-0", "workers-0"]


async def test_who_waits_for_a_place_gets_the_first_and_none_when_the_pool_is_closed(nodes):
    home = nodes.places().home(1)
    starting = asyncio.create_task(asyncio.to_thread(Spawned, WorkerSpec("troubled"), home))
    nodes.start("workers-1")
    spawned = await starting
    assert spawned.about["env_version"] == "0.3.0"
    assert len(spawned.rows("train")) == 4
    spawned.end()
    nodes.lose("workers-1")
    waiting = asyncio.create_task(asyncio.to_thread(Spawned, WorkerSpec("troubled"), home))
    home.close()
    with pytest.raises(WorkerDied, match="pool was closed"):
        await waiting


async def test_a_place_lost_while_an_environment_loads_there_is_no_fault_of_the_environment(
    nodes, tmp_path, monkeypatch
):
    wait = tmp_path / "wait"
    wait.touch()
    monkeypatch.setenv("TROUBLED_WAITS", str(wait))
    nodes.start("workers-0")
    pool = WorkerPool(WorkerSpec("troubled", {"fails": "waits"}), 1, home=nodes.places().home(1))
    asking = asyncio.create_task(asyncio.to_thread(lambda: pool.about))
    await until(lambda: any(beat.has_work for beat in read_beats(nodes.folder / "beats").values()))
    nodes.lose("workers-0")
    wait.unlink()
    nodes.start("workers-1")
    assert (await asking)["env_version"] == "0.3.0"
    await pool.close()


async def test_a_worker_that_nothing_is_heard_of_is_let_go_at_once(nodes, endpoint):
    """Its host may be cut off: no end of the connection comes from there."""
    nodes.start("workers-0")
    home = nodes.places().home(1)
    endpoint.answers.clear()
    async with WorkerPool(WorkerSpec("troubled"), 1, silence_s=1.2, first_wait_s=0.01, home=home) as pool:
        group = asyncio.create_task(WorkerEnvironment(pool).run_group([{"prompt": "q"}], endpoint.url, "m"))
        await endpoint.until_asked(1)
        pid, place = pool.stats[0].pid, nodes.processes["workers-0"].pid
        for stopped in (place, pid):
            os.kill(stopped, signal.SIGSTOP)
        await until(lambda: pool.num_deaths == 1)
        for stopped in (pid, place):  # the place ends it as soon as it can
            os.kill(stopped, signal.SIGCONT)
        await endpoint.until_asked(2)
        endpoint.answers.set()
        assert (await group)[0]["error"] is None
        await until(lambda: not process_state(pid))


def test_without_the_key_nothing_is_started_and_nothing_is_told(nodes):
    nodes.start("workers-0")
    told = nodes.processes["workers-0"].endpoint()
    with socket.create_connection((told["host"], told["port"]), timeout=60.0) as stranger, pytest.raises(NotKnown):
        enter(stranger, "another key", 60.0)
    with socket.create_connection((told["host"], told["port"]), timeout=60.0) as known:
        enter(known, KEY, 60.0)
        send(known, {"do": "start", "cwd": "/"})
        assert set(receive(known)) == {"ticket", "byteorder", "arrays"}


def test_what_listens_in_a_place_s_stead_is_not_trusted_with_an_environment(nodes):
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connection,
        listener.accept()[0] as impostor,
    ):
        impostor.sendall(bytes(32) + bytes(32))
        with pytest.raises(NotKnown, match="no place of this run"):
            enter(connection, KEY, 60.0)


def test_an_environment_that_does_not_load_there_says_where(nodes):
    nodes.start("workers-0")
    with pytest.raises(UserError, match=r"environment 'troubled' cannot be loaded in workers-0: .*bad"):
        Spawned(WorkerSpec("troubled", {"fails": "bad"}), nodes.places().home(1))
    assert nodes.places().load.total() == 0


def test_a_worker_is_started_in_the_folder_of_its_owner(nodes, tmp_path, monkeypatch):
    nodes.start("workers-0")
    monkeypatch.chdir(tmp_path)
    spawned = Spawned(WorkerSpec("troubled"), nodes.places().home(1))
    assert Path(f"/proc/{spawned.pid}/cwd").resolve() == tmp_path.resolve()
    spawned.end()


def test_a_place_without_a_key_does_not_start(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv(WORKERS_KEY_ENV, raising=False)
    assert main(["workers-0", "--host", "127.0.0.1", "--ready-file", str(tmp_path / "ready")]) == 2
    assert "wants the run's key in METTLE_WORKERS_KEY" in capsys.readouterr().err
