"""Processes on nodes as the supervisor sees them, with the agent's words spoken by the test."""

import os
import signal
import time

import pytest

from mettle.processes.beats import Beat, Wait, encode_beat, read_beats
from mettle.processes.liveness import FROZEN, diagnose
from mettle.processes.managed import ManagedProcess, ProcessSpec
from mettle.runs.cluster.launcher import RayLauncher
from mettle.runs.cluster.placement import NodeBundle, Placement
from mettle.runs.config import RayConfig
from mettle.storage.run_dir import RunDir


class SpokenCluster:
    """Keeps what is told to the agent, and says what the test has it say."""

    def __init__(self, **config):
        self.config = RayConfig(**config)
        self.owner_address = "10.0.0.1"
        self.told = []
        self.lost = None
        self.on_word = None

    def tell(self, word):
        self.told.append(word)


PLACEMENT = Placement(
    {
        "trainer": (NodeBundle("trainer", 1, 0, is_pinned=True), NodeBundle("trainer-1", 1, 0)),
        "replica-0": (NodeBundle("replica-0", 1, 0),),
        "replica-1": (NodeBundle("replica-1", 1, 0),),
        "workers-0": (NodeBundle("workers-0", 1, 0),),
        "workers-1": (NodeBundle("workers-1", 1, 0),),
        "sandboxes-0": (NodeBundle("sandboxes-0", 1, 0),),
        "sandboxes-1": (NodeBundle("sandboxes-1", 1, 0),),
    }
)


def make(tmp_path, **config):
    run_dir = RunDir(tmp_path)
    for folder in (run_dir.beats, run_dir.logs, run_dir.endpoint("x").parent):
        folder.mkdir()
    cluster = SpokenCluster(**config)
    return cluster, RayLauncher(cluster, PLACEMENT, run_dir)


def running(name, life, *hosts, pid=1):
    return {"name": name, "life": life, "state": "running", "pid": pid, "places": [{"host": host} for host in hosts]}


def test_the_ranks_are_one_process_with_a_member_on_each_node_and_the_warm_up_takes_the_trainers_place(tmp_path):
    cluster, launcher = make(tmp_path)
    process = launcher.process(ProcessSpec("trainer", "mettle.trainer", ("run",)))
    process.start()
    (word,) = cluster.told
    assert [member["name"] for member in word["members"]] == ["trainer", "trainer-1"]
    warm_up = launcher.process(ProcessSpec("sft", "mettle.trainer.sft", ("run",)))
    warm_up.start()
    assert cluster.told[1]["pool"] == word["pool"] == "trainer"
    assert isinstance(launcher.process(ProcessSpec("orchestrator", "m", ())), ManagedProcess)


def test_an_end_of_an_earlier_life_is_not_this_ones(tmp_path):
    cluster, launcher = make(tmp_path)
    process = launcher.process(ProcessSpec("replica-0", "mettle.inference", ()))
    process.start()
    cluster.on_word(running("replica-0", 1, "a"))
    cluster.on_word({"name": "replica-0", "life": 1, "state": "ended", "code": -9, "line": "its node is gone"})
    assert process.exit_code() == -9
    process.start()
    cluster.on_word({"name": "replica-0", "life": 1, "state": "ended", "code": -9, "line": ""})
    assert process.exit_code() is None
    assert [news.text for news in launcher.news()] == [
        "replica-0 runs on a", "replica-0 on a is lost: its node is gone",
    ]  # fmt: skip


def test_without_room_a_process_gives_up_in_one_line_but_an_engine_waits_while_another_answers(tmp_path):
    cluster, launcher = make(tmp_path, wait_for_room_s=0.001)
    ready = launcher.run_dir.endpoint("replica-0")
    first = launcher.process(ProcessSpec("replica-0", "mettle.inference", (), ready_file=ready))
    second = launcher.process(ProcessSpec("replica-1", "mettle.inference", ()))
    trainer = launcher.process(ProcessSpec("trainer", "mettle.trainer", ()))
    for process in (first, second, trainer):
        process.start()
    cluster.on_word(running("replica-0", 1, "a"))
    ready.write_text('{"base_url": "http://a/v1"}')
    time.sleep(0.01)
    assert second.exit_code() is None
    assert trainer.exit_code() == 3
    assert "no node of the Ray cluster has had room for trainer (1 CPU, on the owner), trainer-1" in trainer.last_line()
    ready.unlink()
    assert second.exit_code() == 3


def test_with_its_head_gone_every_process_of_the_cluster_cannot_go_on(tmp_path):
    cluster, launcher = make(tmp_path)
    process = launcher.process(ProcessSpec("replica-0", "mettle.inference", ()))
    process.start()
    cluster.on_word(running("replica-0", 1, "a"))
    cluster.lost = "the head of the Ray cluster is gone"
    assert process.exit_code() == 3
    assert process.last_line() == cluster.lost


@pytest.mark.parametrize("age_s", [1.0, 300.0])
def test_beats_of_a_node_are_read_in_the_times_of_this_one(tmp_path, age_s):
    cluster, launcher = make(tmp_path)
    launcher.process(ProcessSpec("replica-0", "mettle.inference", ()))
    # Ages as negative times, and the pid of a process that exists here and is another.
    beat = Beat("replica-0", os.getpid(), -age_s, waits=(Wait("replica-0", "e", "t", "a", -age_s - 5.0, 60.0),))
    cluster.on_word(
        {"name": "replica-0", "member": "replica-0", "host": "a/123", "beats": [encode_beat(beat).decode()]}
    )
    now = time.monotonic()
    found = read_beats(launcher.run_dir.beats)["replica-0"]
    assert (found.host, found.pid) == ("a/123", os.getpid())
    assert now - found.at == pytest.approx(age_s, abs=0.5)
    assert now - found.waits[0].since == pytest.approx(age_s + 5.0, abs=0.5)
    faults = diagnose({"replica-0": found}, now, state_of=lambda pid: "T")
    assert [(fault.kind, "on a/123" in fault.text) for fault in faults] == ([(FROZEN, True)] if age_s > 10 else [])
    assert all("stopped by a signal" not in fault.text for fault in faults)


def test_who_has_ended_on_a_node_beats_no_more_and_a_place_takes_its_workers_along(tmp_path):
    cluster, launcher = make(tmp_path)
    launcher.process(ProcessSpec("workers-0", "mettle.envs.workers.place", ())).start()
    other = launcher.process(ProcessSpec("trainer", "mettle.trainer", ("run",)))
    other.start()

    def bring(process, member, *names):
        beats = [encode_beat(Beat(name, 1, -1.0)).decode() for name in names]
        cluster.on_word({"name": process, "member": member, "host": "a/1", "beats": beats})
        return set(read_beats(launcher.run_dir.beats))

    assert bring("workers-0", "workers-0", "workers-0", "worker-w-workers-0-7") == {"workers-0", "worker-w-workers-0-7"}
    assert bring("trainer", "trainer-1", "trainer-1") == {"workers-0", "worker-w-workers-0-7", "trainer-1"}
    assert bring("trainer", "trainer", "trainer") >= {"trainer-1", "trainer"}
    assert bring("workers-0", "workers-0", "workers-0") == {"workers-0", "trainer", "trainer-1"}
    bring("workers-0", "workers-0", "workers-0", "worker-w-workers-0-8")
    cluster.on_word({"name": "workers-0", "life": 1, "state": "ended", "code": -9, "line": ""})
    assert set(read_beats(launcher.run_dir.beats)) == {"trainer", "trainer-1"}


def test_what_stays_with_the_owner_listens_on_its_address_in_the_cluster(tmp_path):
    _, launcher = make(tmp_path)
    spec = ProcessSpec("inference", "mettle.inference", ("--host", "{host}"))
    assert launcher.process(spec).spec.arguments == ("--host", "10.0.0.1")


@pytest.mark.parametrize("kind", ["workers", "sandboxes"])
def test_a_place_for_workers_or_a_sandbox_service_waits_for_room_while_another_one_answers(tmp_path, kind):
    cluster, launcher = make(tmp_path, wait_for_room_s=0.001)
    ready = launcher.run_dir.endpoint(f"{kind}-0")
    first = launcher.process(ProcessSpec(f"{kind}-0", "module", (), ready_file=ready))
    second = launcher.process(ProcessSpec(f"{kind}-1", "module", ()))
    for process in (first, second):
        process.start()
    cluster.on_word(running(f"{kind}-0", 1, "a"))
    ready.write_text('{"host": "a"}')
    time.sleep(0.01)
    assert second.exit_code() is None
    ready.unlink()
    assert second.exit_code() == 3


def test_what_has_given_up_waiting_is_not_started_when_the_others_make_room_by_ending(tmp_path):
    cluster, launcher = make(tmp_path, wait_for_room_s=0.001)
    process = launcher.process(ProcessSpec("sandboxes-0", "module", ()))
    process.start()
    time.sleep(0.01)
    assert process.exit_code() == 3
    assert cluster.told[1:] == [{"do": "signal", "name": "sandboxes-0", "life": 1, "number": signal.SIGKILL}]
    said = process.last_line()
    cluster.on_word({"name": "sandboxes-0", "life": 1, "state": "ended", "code": -9, "line": "it waited for a place"})
    assert (process.exit_code(), process.last_line()) == (3, said)
