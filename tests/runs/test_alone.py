"""One process of a run, started by hand: which there are, and who may be there at once."""

from __future__ import annotations

import fcntl
import os

import pytest

from mettle.config import load_config
from mettle.errors import UserError
from mettle.runs import alone, launch
from mettle.runs.config import RunConfig
from mettle.runs.lock import RunLock
from mettle.storage.ledger import Ledger


@pytest.fixture
def made(tmp_path):
    """A run of a policy made from nothing that nobody has started."""

    def make(**overrides):
        loaded = load_config(RunConfig, [], {"orchestrator.envs": [{"id": "reverse-text"}], **overrides})
        return launch.create(loaded, tmp_path / "run")

    return make


@pytest.fixture
def becomes(monkeypatch):
    """What a process would become; the locks that it holds are given back at the end."""
    before = set(os.listdir("/proc/self/fd"))
    seen = []
    monkeypatch.setattr(os, "execve", lambda *call: seen.append(call))
    yield seen
    for number in set(os.listdir("/proc/self/fd")) - before:
        if os.path.realpath(f"/proc/self/fd/{number}").endswith(".lock"):
            os.close(int(number))


@pytest.fixture
def mini_folder(tmp_path):
    """A model directory as far as a run that is made looks."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def make_warm(run_dir):
    ledger = Ledger(run_dir.ledger)
    ledger.journal.set_fact("is_warm", True)
    ledger.close()


def test_a_run_names_its_processes_and_what_is_to_be_made_first(made, becomes):
    run_dir = made()
    assert list(alone.processes_of(run_dir)) == ["hub", "policy", "inference", "trainer", "orchestrator"]
    with pytest.raises(UserError, match=r"trainer needs what policy makes; `mettle rl start \S+/run policy` first"):
        alone.start_alone(run_dir, "trainer")
    with pytest.raises(UserError, match="needs no process 'sampler' now; it needs hub, policy, inference"):
        alone.start_alone(run_dir, "sampler")
    make_warm(run_dir)
    assert list(alone.processes_of(run_dir)) == ["hub", "inference", "trainer", "orchestrator"]
    assert becomes == []


def test_a_policy_that_is_there_is_linked_and_needs_no_process(made, mini_folder):
    run_dir = made(**{"model.path": str(mini_folder)})
    assert list(alone.processes_of(run_dir)) == ["hub", "inference", "trainer", "orchestrator"]
    assert run_dir.model.resolve() == mini_folder


def test_a_policy_that_is_there_and_warmed_up_is_made_by_a_process(made, mini_folder):
    run_dir = made(**{"model.path": str(mini_folder), "warm_up.enabled": True})
    assert "sft" in alone.processes_of(run_dir)
    assert not run_dir.model.exists()


def test_a_process_has_what_its_supervisor_would_give_it_and_no_ready_file_of_another(made, becomes):
    run_dir = made()
    make_warm(run_dir)
    stale = run_dir.endpoint("inference")
    stale.parent.mkdir(exist_ok=True)
    stale.write_text('{"url": "http://127.0.0.1:1"}')
    alone.start_alone(run_dir, "inference")
    ((program, command, environment),) = becomes
    assert command[:3] == [program, "-m", "mettle.inference"]
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["METTLE_BEATS"] == str(run_dir.beats)
    assert set(alone.processes_of(run_dir)["inference"].environment.items()) <= set(environment.items())
    assert not stale.exists()


def test_there_is_one_of_each_and_no_supervisor_beside_them(made, becomes):
    run_dir = made()
    make_warm(run_dir)
    alone.start_alone(run_dir, "trainer")
    alone.start_alone(run_dir, "orchestrator")
    with pytest.raises(UserError, match="trainer is started already"):
        alone.start_alone(run_dir, "trainer")
    with pytest.raises(UserError, match="processes of run run were started alone and still run; end them first"):
        RunLock(run_dir).__enter__()


def test_beside_a_supervisor_none_is_started(made, becomes):
    run_dir = made()
    make_warm(run_dir)
    with RunLock(run_dir), pytest.raises(UserError, match=rf"run run is already running \(pid {os.getpid()}\)"):
        alone.start_alone(run_dir, "trainer")
    alone.start_alone(run_dir, "trainer")
    # The lock passes to what the process becomes.
    held = [
        number
        for number in os.listdir("/proc/self/fd")
        if "trainer.lock" in os.path.realpath(f"/proc/self/fd/{number}")
    ]
    assert [fcntl.fcntl(int(number), fcntl.F_GETFD) & fcntl.FD_CLOEXEC for number in held] == [0]


def test_of_a_finished_run_nothing_is_started(made, becomes):
    run_dir = made()
    ledger = Ledger(run_dir.ledger)
    ledger.journal.set_fact("state", "finished")
    ledger.close()
    with pytest.raises(UserError, match=r"run run is finished; `mettle rl metrics \S+/run` shows its figures"):
        alone.start_alone(run_dir, "trainer")
    assert becomes == []
