"""The supervisor against real child processes: crashes, refusals, kills, stops."""

import os
import signal
import subprocess
import textwrap
import time

import pytest

from mettle.errors import StorageError, UserError
from mettle.processes.beats import Beat, Heartbeat
from mettle.processes.liveness import AWAITED, Fault, worker_name
from mettle.processes.managed import ProcessSpec
from mettle.runs.costs import settle, settle_last, totals
from mettle.runs.lock import RunLock, supervisor_pid
from mettle.runs.supervisor import Supervisor
from mettle.runs.watchdog import Report
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir


@pytest.fixture
def run(tmp_path, monkeypatch):
    modules = tmp_path / "modules"
    modules.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{modules}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    ledger = Ledger(run_dir.ledger)

    def spec(name, code, **options):
        (modules / f"{name}_module.py").write_text(textwrap.dedent(code))
        return ProcessSpec(name, f"{name}_module", (str(run_dir.path),), **options)

    yield run_dir, ledger, spec
    ledger.close()


def drive(supervisor, *, until=lambda: False, limit_s=300.0):
    deadline = time.monotonic() + limit_s
    for _ in supervisor.ticks():
        assert time.monotonic() < deadline, "the run did not end in time"
        if until():
            supervisor.stop()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


FOREVER = "import time\nwhile True: time.sleep(0.05)"


def test_the_run_ends_with_its_main_process_and_leaves_none_behind(run):
    run_dir, ledger, spec = run
    supervisor = Supervisor(run_dir, ledger, [spec("main", "pass"), spec("side", FOREVER)], main="main")
    drive(supervisor)
    assert supervisor.failure is None
    assert {p.name: p.state for p in ledger.journal.processes()} == {"main": "done", "side": "stopped"}
    assert not alive(supervisor.process("side").pid)
    assert supervisor.costs.figures()["peak_memory_bytes"] > 2**20


def test_a_process_killed_with_kill_9_is_started_again(run):
    run_dir, ledger, spec = run
    code = """
        import os, pathlib, signal, sys
        mark = pathlib.Path(sys.argv[1]) / "been-here"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    supervisor = Supervisor(run_dir, ledger, [spec("main", code)], main="main")
    drive(supervisor)
    assert supervisor.failure is None
    (row,) = ledger.journal.processes()
    assert (row.state, row.restarts) == ("done", 1)
    (event,) = ledger.journal.events(kind="restart")
    assert "main was ended by SIGKILL" in event.message


@pytest.mark.parametrize("code", [2, 3])
def test_a_process_that_says_it_cannot_go_on_is_not_started_again(run, code):
    run_dir, ledger, spec = run
    script = f"import sys; print('disk full while writing weights', file=sys.stderr); sys.exit({code})"
    supervisor = Supervisor(run_dir, ledger, [spec("main", script), spec("side", FOREVER)], main="main")
    drive(supervisor)
    assert supervisor.failure == "disk full while writing weights"
    assert ledger.journal.fact("state") == "failed"
    assert not alive(supervisor.process("side").pid)


def test_on_a_full_disk_the_last_words_are_written_into_what_was_kept_free_when_no_process_is_left(run, monkeypatch):
    run_dir, ledger, spec = run
    supervisor = Supervisor(run_dir, ledger, [spec("main", FOREVER), spec("side", FOREVER)], main="main")
    reserve, lived = run_dir.path / "reserve", []

    def writing(write):
        def write_if_there_is_room(*words, **more):
            if reserve.exists():
                raise StorageError("no space left while writing run.db")
            lived.extend(name for name in ("main", "side") if alive(supervisor.process(name).pid))
            return write(*words, **more)

        return write_if_there_is_room

    for name in ("event", "record_process", "set_fact"):
        monkeypatch.setattr(ledger.journal, name, writing(getattr(ledger.journal, name)))
    drive(supervisor)
    assert (supervisor.failure, supervisor.failure_code) == ("no space left while writing run.db", 2)
    assert ledger.journal.fact("state") == "failed"
    (event,) = ledger.journal.events(kind="failed")
    assert "no space left" in event.message
    assert {p.name: p.state for p in ledger.journal.processes()} == {"main": "stopped", "side": "stopped"}
    assert lived == [], "whoever still ran could have taken the room"


def test_a_process_starts_only_after_what_it_needs(run):
    run_dir, ledger, spec = run
    ready = run_dir.path / "server.json"
    first = "import pathlib, sys, time; time.sleep(0.3); (pathlib.Path(sys.argv[1]) / 'made').touch()"
    server = f"""
        import pathlib, sys, time
        assert (pathlib.Path(sys.argv[1]) / 'made').exists()
        time.sleep(0.3)
        pathlib.Path({str(ready)!r}).write_text('{{"port": 1}}')
        time.sleep(60)
    """
    main = f"import pathlib; assert pathlib.Path({str(ready)!r}).exists()"
    specs = [
        spec("main", main, after=("server",)),
        spec("server", server, ready_file=ready, is_service=True, after=("first",)),
        spec("first", first),
    ]
    supervisor = Supervisor(run_dir, ledger, specs, main="main")
    drive(supervisor)
    assert supervisor.failure is None
    assert all(p.restarts == 0 for p in ledger.journal.processes())


def test_a_process_that_crashes_where_the_disk_is_full_is_not_started_again(run, monkeypatch):
    run_dir, ledger, spec = run
    monkeypatch.setattr("mettle.runs.host.LOW_DISK_BYTES", 2**62)
    script = "import time; time.sleep(2.5); raise RuntimeError('the writer failed')"
    supervisor = Supervisor(run_dir, ledger, [spec("main", script)], main="main")
    drive(supervisor, limit_s=60.0)
    assert "the writer failed" in supervisor.failure
    assert "free some space and resume" in supervisor.failure
    assert ledger.journal.processes()[0].restarts == 0
    assert [event.kind for event in ledger.journal.events()] == ["disk_low", "failed"]


def test_restarts_have_a_limit(run):
    run_dir, ledger, spec = run
    supervisor = Supervisor(run_dir, ledger, [spec("main", "raise SystemExit(1)")], main="main", max_restarts=2)
    drive(supervisor)
    assert "2 restarts" in supervisor.failure
    assert ledger.journal.processes()[0].restarts == 2


def test_a_service_that_ends_well_is_started_again_and_a_stalled_one_is_replaced(run):
    run_dir, ledger, spec = run
    waiter = """
        import pathlib, sys, time
        from mettle.processes.beats import Heartbeat
        mark = pathlib.Path(sys.argv[1]) / "answered"
        with Heartbeat.of_run("trainer") as heart:
            with heart.waiting("trainer", "batch", "orchestrator", "orchestrator ships step 1", budget_s=0.6):
                while not mark.exists(): time.sleep(0.02)
    """
    # The first life hangs, the second answers: only a watchdog that ends the first gets the run to its end.
    orchestrator = """
        import pathlib, sys, time
        first = pathlib.Path(sys.argv[1]) / "first-life"
        if not first.exists():
            first.touch()
            time.sleep(60)
        (pathlib.Path(sys.argv[1]) / "answered").touch()
        time.sleep(60)
    """
    specs = [spec("trainer", waiter), spec("orchestrator", orchestrator)]
    drive(Supervisor(run_dir, ledger, specs, main="trainer"))
    kinds = [event.kind for event in ledger.journal.events()]
    assert "stall" in kinds
    assert "recovery" in kinds
    assert {p.name: p.restarts for p in ledger.journal.processes()} == {"trainer": 0, "orchestrator": 1}


def test_restarts_of_long_ago_do_not_count(run, monkeypatch):
    run_dir, ledger, spec = run
    monkeypatch.setattr("mettle.runs.supervisor.RESTART_WINDOW_S", 0.0)
    monkeypatch.setattr("mettle.runs.supervisor.QUICK_CRASH_S", 0.0)
    code = """
        import pathlib, sys
        marks = pathlib.Path(sys.argv[1]) / "lives"
        with marks.open("a") as file: file.write("x")
        sys.exit(1 if len(marks.read_text()) < 5 else 0)
    """
    supervisor = Supervisor(run_dir, ledger, [spec("main", code)], main="main", max_restarts=2)
    drive(supervisor)
    assert supervisor.failure is None
    assert ledger.journal.processes()[0].restarts == 4


def test_the_supervisor_does_not_wait_for_a_process_that_is_frozen_in_a_transaction(run, monkeypatch):
    run_dir, ledger, spec = run
    monkeypatch.setattr("mettle.processes.liveness.TOLD_S", 0.6)
    monkeypatch.setattr("mettle.processes.liveness.STOPPED_RESTART_S", 1.5)
    frozen = """
        import os, pathlib, signal, sys, time
        from mettle.processes.beats import Heartbeat
        from mettle.storage.ledger import Ledger
        run = pathlib.Path(sys.argv[1])
        with Heartbeat.of_run("trainer"):
            if not (run / "second-life").exists():
                (run / "second-life").touch()
                ledger = Ledger(run / "run.db")
                with ledger.database.transaction():
                    time.sleep(1.0)
                    os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.5)
    """
    supervisor = Supervisor(run_dir, ledger, [spec("trainer", frozen)], main="trainer")
    drive(supervisor)
    assert supervisor.failure is None
    assert "is stopped by a signal" in supervisor.notes[0]
    told = [(event.kind, event.data.get("process")) for event in ledger.journal.events()]
    assert told == [("stall", "trainer"), ("recovery", "trainer"), ("restart", "trainer")]


def test_the_address_of_a_server_that_was_killed_goes_with_it(run):
    run_dir, ledger, spec = run
    ready, stale = run_dir.endpoint("server"), run_dir.endpoint("stale")
    stale.parent.mkdir()
    stale.write_text('{"port": 1, "pid": 1}')
    server = f"""
        import os, pathlib, signal
        pathlib.Path({str(ready)!r}).write_text('{{"port": 1}}')
        os.kill(os.getpid(), signal.SIGKILL)
    """
    main = "import time; time.sleep(0.5)"
    specs = [spec("server", server, ready_file=ready, is_service=True), spec("main", main)]
    drive(Supervisor(run_dir, ledger, specs, main="main"))
    assert not ready.exists()
    assert not stale.exists()


def test_the_figures_of_a_run_count_all_of_its_lives(run):
    run_dir, ledger, _ = run
    journal = ledger.journal
    assert totals(run_dir, journal)["wall_s"] is None
    assert settle_last(run_dir, ledger) == (1, "")
    figures = {"life": 1.0, "wall_s": 100.0, "cpu_s": 30.0, "peak_memory_bytes": 5.0}
    heart = Heartbeat(run_dir.beats / "supervisor.beat")
    heart.figures = lambda: figures
    heart.__enter__()  # the supervisor is killed: its beat stays behind
    so_far = {"wall_s": 100.0, "cpu_s": 30.0, "peak_memory_bytes": 5}
    assert totals(run_dir, journal) == so_far  # a run that nobody resumes has its figures, too
    life, death = settle_last(run_dir, ledger)
    assert (life, death) == (2, f"the supervisor (pid {os.getpid()}) was killed 100 s after its start")
    assert totals(run_dir, journal) == so_far
    assert (journal.fact("wall_s"), journal.fact("cpu_s"), journal.fact("supervisor_deaths")) == (100.0, 30.0, 1)
    settle(ledger, {**figures, "life": 2.0})
    assert settle_last(run_dir, ledger) == (3, "")  # the beat of a life that is settled counts no more
    assert (journal.fact("wall_s"), journal.fact("supervisor_deaths")) == (200.0, 1)
    heart.__exit__()


def test_the_processor_time_of_a_killed_process_counts_with_that_of_its_workers(run):
    """A worker of a process that is killed is waited for by nobody of the run."""
    run_dir, ledger, spec = run
    worker = """
        import os, time
        from mettle.processes.beats import Heartbeat
        with Heartbeat.of_run(f"worker-x-{os.getpid()}"):
            while time.process_time() < 1.5: pass
            open(os.environ["METTLE_BEATS"] + "/busy", "w").close()
            time.sleep(60)
    """
    spec("busy", worker)
    main = """
        import os, pathlib, signal, subprocess, sys, time
        mark = pathlib.Path(os.environ["METTLE_BEATS"]) / "busy"
        if mark.exists(): sys.exit(0)
        worker = subprocess.Popen([sys.executable, "-m", "busy_module"])
        while not mark.exists(): time.sleep(0.05)
        time.sleep(2.5)  # the supervisor looks once a second
        worker.kill()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    supervisor = Supervisor(run_dir, ledger, [spec("main", main)], main="main")
    drive(supervisor, limit_s=60.0)
    assert supervisor.failure is None
    assert supervisor.costs.figures()["cpu_s"] >= 1.5


def test_a_stubborn_process_is_ended_all_the_same(run, monkeypatch):
    run_dir, ledger, spec = run
    monkeypatch.setattr("mettle.runs.supervisor.STOP_GRACE_S", 0.3)
    script = "import pathlib, signal, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    script += "(pathlib.Path(sys.argv[1]) / 'deaf').touch()\n" + FOREVER
    supervisor = Supervisor(run_dir, ledger, [spec("main", script)], main="main")
    drive(supervisor, until=(run_dir.path / "deaf").exists)
    assert not alive(supervisor.process("main").pid)
    assert ledger.journal.fact("state") == "stopping"


def test_one_supervisor_a_run(run):
    run_dir, _, _ = run
    with RunLock(run_dir):
        assert supervisor_pid(run_dir) == os.getpid()
        with pytest.raises(UserError, match="already running"):
            RunLock(run_dir).__enter__()
    assert supervisor_pid(run_dir) is None
    with RunLock(run_dir):
        pass


def test_a_worker_of_another_node_is_not_taken_for_a_process_of_this_one(run):
    """Their pids are apart, and the same number may be anybody's here."""
    run_dir, ledger, spec = run
    supervisor = Supervisor(run_dir, ledger, [spec("main", "pass")], main="main")
    name = worker_name("words", 7, "workers-0")
    with subprocess.Popen(["sleep", "600"]) as neighbour:
        fault = Fault(name, neighbour.pid, AWAITED, 999.0, "", 10.0)
        supervisor._end_stalled(Report("recovery", fault, ""), Beat(name, neighbour.pid, 0.0, host="far/1"))
        assert neighbour.poll() is None
        supervisor._end_stalled(Report("recovery", fault, ""), Beat(name, neighbour.pid, 0.0))
        assert neighbour.wait(100.0) == -signal.SIGKILL
