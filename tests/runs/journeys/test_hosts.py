"""Runs on hosts that are apart: each with a network namespace of its own, with delays, partitions and kills."""

import importlib.util
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from outside_stories import OPEN, OutsideStory
from ray_hosts import RayHosts, ray_hosts
from stories import CONFIG, Run, published
from stories import STEPS as SMALL_STEPS
from tests.namespaces import Host, end_processes, identity, network, processes_in

from mettle.inference.outside.roster import read_roster
from mettle.processes.beats import read_beats
from mettle.processes.liveness import is_worker

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: pip install -e '.[ray]'")
DELAY_S = 0.05
STEPS = 150
SHORT_S = 4.0
FAR = OPEN.replace("max_tokens = 6", "max_tokens = 32").replace("lease_s = 5", 'lease_s = 3\nhost = "10.77.0.1"')
ON_RAY = CONFIG.replace(
    "hub = false",
    'hub = false\nengine = "ray"\nnum_trainer_ranks = 2\n\n[deployment.ray]\nhead_loss_s = 10\nwait_for_room_s = 20',
)

WORKERS_FAR = (
    ON_RAY.replace("num_trainer_ranks = 2\n", "")
    .replace("env_workers = 0", "env_workers = 2")
    .replace(
        "head_loss_s = 10", "head_loss_s = 10\ncpus_for_owner = 0\nnum_worker_places = 1\ncpus_per_worker_place = 1.5"
    )
)


def test_workers_far_away_are_cut_off_and_killed_and_every_task_is_trained_once_or_dropped(
    tmp_path: Path, forked: None
) -> None:
    with network(run=0.0, ann=DELAY_S, bob=DELAY_S, cat=DELAY_S) as hosts:
        with hosts["run"].inside():
            story = OutsideStory(tmp_path, text=FAR, steps=STEPS)
        try:
            processes = {}
            for name in ("ann", "bob", "cat"):
                with hosts[name].inside():
                    processes[name] = story.send(name, "--relay", f"http://{hosts[name].address}:7300")
            for name in processes:
                story.worked(name)
            story.busy("bob")
            hosts["bob"].cut()
            story.busy("ann")
            os.kill(processes["ann"].pid, signal.SIGKILL)
            story.run.wait_for(lambda _: story.state("ann") == story.state("bob") == "gone")
            before = story.sampled("bob")
            hosts["bob"].heal()
            story.run.wait_for(lambda _: story.sampled("bob") > before)
            assert story.run.end() == 0, story.run.said()
            story.run.check_accounts()
            for name in ("bob", "cat"):
                assert processes[name].wait(120.0) == 0
                assert processes[name].stdout is not None
                said = processes[name].stdout.read()
                (relayed,) = re.findall(r"([0-9]+) pieces of them from other workers", said)
                assert int(relayed) > 0, said
            assert all(worker.refused == 0 for worker in read_roster(story.run.run_dir.outside))
        finally:
            story.close()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[dict[str, Host], RayHosts]]:
    """Two hosts, the second .005 s away, each a node of a Ray cluster with room for half of a run with two ranks."""
    with network(head=0.0, far=0.005) as hosts, ray_hosts() as ray:
        ray.add(hosts["head"], 2)
        ray.add(hosts["far"], 2)
        for name, value in ray.environment.items():
            monkeypatch.setenv(name, value)
        yield hosts, ray


Cluster = tuple[dict[str, Host], RayHosts]


def wait_until_empty(host: Host) -> None:
    """What a cluster runs on a host ends by itself when it has missed its head."""
    deadline = time.monotonic() + 300.0
    while left := processes_in([identity(host.namespace)]):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def workers_of(run: Run) -> set[int]:
    """The pids of the environments' workers that beat now."""
    return {beat.pid for name, beat in read_beats(run.run_dir.beats).items() if is_worker(name)}


@needs_ray
@pytest.mark.parametrize(("text", "steps"), [(ON_RAY, SMALL_STEPS), (WORKERS_FAR, 10 * SMALL_STEPS)])
def test_a_run_on_two_hosts_goes_on_after_a_partition_that_the_cluster_outlasts(
    tmp_path: Path, cluster: Cluster, text: str, steps: int
) -> None:
    hosts, _ = cluster
    with hosts["head"].inside():
        run = Run(tmp_path, text=text, steps=steps)
    try:
        run.wait_for(published(2))
        if text is WORKERS_FAR:
            run.wait_for(lambda _: len(workers_of(run)) == 2)  # steps can be done before the second has started
            assert workers_of(run) <= set(processes_in([identity(hosts["far"].namespace)]))
        hosts["far"].cut()
        time.sleep(SHORT_S)
        hosts["far"].heal()
        assert run.end() == 0, run.said()
        run.check_accounts()
        restarts = run.read(lambda ledger: {p.name: p.restarts for p in ledger.journal.processes()}, {})
        assert set(restarts.values()) == {0}, restarts
        assert run.read(lambda ledger: list(ledger.journal.events(kind="worker_died")), None) == []
    finally:
        run.close()


@needs_ray
def test_a_run_whose_other_host_stays_away_ends_in_one_line_and_goes_on_when_it_is_back(
    tmp_path: Path, cluster: Cluster
) -> None:
    hosts, ray = cluster
    with hosts["head"].inside():
        run = Run(tmp_path, text=ON_RAY)
    try:
        run.wait_for(published(2))
        hosts["far"].cut()
        assert run.end() == 3, run.said()
        assert "no node of the Ray cluster has had room" in run.said().rstrip().splitlines()[-1]
        wait_until_empty(hosts["far"])
        hosts["far"].heal()
        ray.add(hosts["far"], 2)
        with hosts["head"].inside():
            run.resume()
        assert run.end() == 0, run.said()
        run.check_accounts()
    finally:
        run.close()


@needs_ray
def test_a_run_whose_owner_and_head_are_lost_with_their_host_goes_on_at_another(
    tmp_path: Path, cluster: Cluster
) -> None:
    hosts, _ = cluster
    with hosts["head"].inside():
        run = Run(tmp_path, text=ON_RAY)
    try:
        run.wait_for(published(2))
        end_processes([identity(hosts["head"].namespace)])
        assert run.end() == -signal.SIGKILL
        wait_until_empty(hosts["far"])
        with ray_hosts() as other:
            other.add(hosts["far"], 4)
            run._environment.update(other.environment)
            with hosts["far"].inside():
                run.resume()
            assert run.end() == 0, run.said()
        run.check_accounts()
    finally:
        run.close()
