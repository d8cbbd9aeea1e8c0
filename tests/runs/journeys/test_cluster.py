"""A run on several Ray nodes of this host, with real processes: nodes, engines and the head are lost under it."""

import importlib.util
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from ray_nodes import RayNodes
from stories import CONFIG, STEPS, Run, complaint, published

from mettle.processes.beats import read_beats
from mettle.processes.child import descendants, process_state
from mettle.processes.liveness import is_worker
from mettle.sandbox import SandboxConfig, probe

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: pip install -e '.[ray]'"),
]
ON_RAY = CONFIG.replace("hub = false", 'hub = false\nengine = "ray"\n\n[deployment.ray]\nhead_loss_s = 10')
PLACED = ON_RAY.replace("env_workers = 0", "env_workers = 2") + "num_worker_places = 2\ncpus_for_owner = 0\n"
SANDBOXED = PLACED.replace("num_worker_places = 2", "num_worker_places = 1\nnum_sandbox_services = 2")
needs_isolation = pytest.mark.skipif(not probe(SandboxConfig()).is_at_least("ns"), reason="this host isolates no code")
TWO = ("--inference.replicas", "2", "--deployment.num-trainer-ranks", "2")


@pytest.fixture
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    with RayNodes(*request.param) as found:
        monkeypatch.setenv("RAY_ADDRESS", found.address)
        yield found


def places(run: Run) -> dict[str, str]:
    """The newest place of each process: `trainer` of both ranks."""
    events = run.read(lambda ledger: [event.message for event in ledger.journal.events(kind="place")], [])
    told = [message.split(" runs on ") for message in events if " runs on " in message]
    return dict(told)


def node_of(place: str) -> str:
    return place.rpartition("/")[2]


@pytest.mark.parametrize("nodes", [(2, 3, 3)], indirect=True)
def test_a_run_goes_on_when_a_node_with_a_rank_is_lost_and_when_an_engine_is_killed(
    tmp_path: Path, nodes: RayNodes
) -> None:
    run = Run(tmp_path, *TWO, text=ON_RAY)
    try:
        run.wait_for(published(2))
        first = places(run)
        owner, second = (node_of(place) for place in first["trainer"].split(", "))
        assert owner != second, "there is room for one rank on the owner's node"
        nodes.kill(second)
        run.wait_for(published(5))
        assert node_of(places(run)["trainer"].split(", ")[1]) != second
        pids = run.read(lambda ledger: {p.name: p.pid for p in ledger.journal.processes()}, {})
        os.kill(pids["replica-0"], signal.SIGKILL)
        assert run.end() == 0, run.said()
        run.check_accounts()
        restarts = run.read(lambda ledger: {p.name: p.restarts for p in ledger.journal.processes()}, {})
        assert restarts["trainer"] >= 1
        assert restarts["orchestrator"] == 0
    finally:
        run.close()


@pytest.mark.parametrize("nodes", [(2, 1)], indirect=True)
def test_an_engine_whose_node_is_lost_comes_back_when_another_node_joins(tmp_path: Path, nodes: RayNodes) -> None:
    run = Run(tmp_path, text=ON_RAY)
    try:
        run.wait_for(published(1))
        nodes.kill(node_of(places(run)["replica-0"]))
        at = run.read(lambda ledger: ledger.newest_version().weights.version, 0)
        nodes.add(1)
        assert run.end() == 0, run.said()
        run.check_accounts()
        assert at < run.steps
        assert node_of(places(run)["replica-0"]) == nodes.ids[-1][:6]
    finally:
        run.close()


@pytest.mark.parametrize("nodes", [(3, 3)], indirect=True)
def test_without_its_head_a_run_ends_in_one_line_and_goes_on_in_another_cluster(
    tmp_path: Path, nodes: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, *TWO, text=ON_RAY)
    try:
        run.wait_for(published(2))
        pids = run.read(lambda ledger: [p.pid for p in ledger.journal.processes() if p.state == "running"], [])
        nodes.kill(nodes.ids[0])
        assert run.end() == 3
        assert "head of the Ray cluster" in run.said()
        assert run.said().rstrip().splitlines()[-1].startswith("error: ")
        deadline = time.monotonic() + 100.0  # those of the other node end with it, when it has missed its head
        while any(process_state(pid) for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        with RayNodes(5) as others:
            run._environment["RAY_ADDRESS"] = others.address
            run.resume()
            assert run.end() == 0, run.said()
        run.check_accounts()
    finally:
        run.close()


@pytest.mark.parametrize("nodes", [(2, 1)], indirect=True)
def test_a_cluster_without_room_is_refused_before_anything_is_made(tmp_path: Path, nodes: RayNodes) -> None:
    config = tmp_path / "run.toml"
    config.write_text(ON_RAY)
    said = complaint(tmp_path, "rl", "run", config, "--dir", tmp_path / "run", *TWO)
    assert "the Ray cluster has no room for replica-0 (1 CPU) once 3 others are placed" in said
    assert "(the owner) 2 CPU" in said
    assert not (tmp_path / "run").exists()


def workers_of(run: Run) -> dict[str, int]:
    """The environments' workers that beat now, by name, with their pids."""
    return {name: beat.pid for name, beat in read_beats(run.run_dir.beats).items() if is_worker(name)}


def deaths(run: Run) -> list[str]:
    return run.read(lambda ledger: [event.message for event in ledger.journal.events(kind="worker_died")], [])


@pytest.mark.parametrize("nodes", [(1, 2, 3)], indirect=True)
def test_environments_workers_run_on_other_nodes_and_are_replaced_when_they_or_their_node_are_lost(
    tmp_path: Path, nodes: RayNodes
) -> None:
    run = Run(tmp_path, text=PLACED, steps=STEPS * 60)  # a node that is lost is missed after a hundred steps
    try:
        run.wait_for(published(2))
        first = places(run)
        owner = node_of(first["trainer"])
        assert nodes.ids[0].startswith(owner)
        assert {owner, node_of(first["workers-0"]), node_of(first["workers-1"])} == {one[:6] for one in nodes.ids}
        run.wait_for(lambda _: len(workers_of(run)) == 2)  # steps can be done before the second has started
        workers = workers_of(run)
        assert sorted(re.sub("-[0-9]+$", "", name) for name in workers) == [
            "worker-ascii-share-workers-0", "worker-ascii-share-workers-1",
        ]  # fmt: skip
        orchestrator = run.read(lambda ledger: {p.name: p.pid for p in ledger.journal.processes()}, {})["orchestrator"]
        assert not set(workers.values()) & set(descendants(orchestrator))
        victim = workers[min(workers)]
        os.kill(victim, signal.SIGKILL)
        run.wait_for(
            lambda _: any(f"worker {victim} in workers-0 was ended by SIGKILL" in said for said in deaths(run))
        )
        at = run.read(lambda ledger: ledger.newest_version().weights.version, 0)
        run.wait_for(published(at + 2))
        lost = next(name for name in ("workers-0", "workers-1") if node_of(first[name]) == nodes.ids[1][:6])
        nodes.kill(nodes.ids[1])
        run.wait_for(lambda _: any(f"in {lost} is gone with its place" in said for said in deaths(run)))
        run.wait_for(lambda _: node_of(places(run)[lost]) == nodes.ids[2][:6])
        run.wait_for(lambda _: len({name.rpartition("-")[0] for name in workers_of(run)}) == 2)
        assert run.end() == 0, run.said()
        run.check_accounts()
        restarts = run.read(lambda ledger: {p.name: p.restarts for p in ledger.journal.processes()}, {})
        assert restarts["orchestrator"] == restarts["trainer"] == 0
        assert restarts[lost] >= 1
    finally:
        run.close()


@needs_isolation
@pytest.mark.parametrize("nodes", [(1, 2, 4)], indirect=True)
def test_sandboxes_are_made_on_the_nodes_and_elsewhere_when_one_is_lost(
    tmp_path: Path, nodes: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    monkeypatch.setenv("METTLE_TEST_SEEN", str(seen))
    text = SANDBOXED.replace('id = "ascii-share"', 'id = "in-a-sandbox"')
    run = Run(tmp_path, text=text, steps=STEPS * 6)

    def urls() -> set[str]:
        return {unquote(path.name) for path in seen.iterdir()}

    try:
        run.wait_for(lambda _: len(urls()) == 2)
        run.wait_for(published(2))
        first = places(run)
        assert node_of(first["sandboxes-0"]) != node_of(first["sandboxes-1"])
        lost = next(name for name in ("sandboxes-0", "sandboxes-1") if node_of(first[name]) == nodes.ids[1][:6])
        nodes.kill(nodes.ids[1])
        run.wait_for(lambda _: node_of(places(run)[lost]) == nodes.ids[2][:6])
        run.wait_for(lambda _: len(urls()) == 3)
        assert run.end() == 0, run.said()
        run.check_accounts()
        failed = run.read(lambda ledger: ledger.database.rows("SELECT DISTINCT error_kind FROM rollouts"), [])
        assert {row["error_kind"] for row in failed} <= {None, "sandbox", "infra"}
    finally:
        run.close()


@pytest.mark.parametrize("nodes", [(2, 1)], indirect=True)
def test_a_cluster_without_room_for_workers_is_refused_before_anything_is_made(tmp_path: Path, nodes: RayNodes) -> None:
    config = tmp_path / "run.toml"
    config.write_text(PLACED)
    said = complaint(tmp_path, "rl", "run", config, "--dir", tmp_path / "run")
    assert "the Ray cluster has no room for workers-1 (1 CPU) once 3 others are placed" in said
    assert not (tmp_path / "run").exists()
