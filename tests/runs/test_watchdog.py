"""The watchdog tells a stall once, ends who stands still once, and counts no time in which it did not look."""

from hypothesis import given
from hypothesis import strategies as st

from mettle.processes.beats import Beat, Wait
from mettle.runs.watchdog import Watchdog, wait_graph


def at(now, *, trainer_at=None, pid=3, **fields):
    """A run at a time, in which the trainer beat last at `trainer_at` and the orchestrator waits for it since 0."""
    wait = Wait("orchestrator", "weights", "trainer", "trainer publishes v1", 0.0, 1800.0)
    return {
        "orchestrator": Beat("orchestrator", 2, now, waits=(wait,)),
        "trainer": Beat("trainer", pid, now if trainer_at is None else trainer_at, **fields),
    }


def watch(watchdog, start, end, *, state="T", **fields):
    """(seconds, report) of what is told when it looks once a second."""
    found = []
    for now in range(start, end + 1):
        reports = watchdog.check(at(float(now), **fields), float(now), state_of=lambda pid: state)
        found += [(now, report) for report in reports]
    return found


def test_a_process_stopped_by_a_signal_is_named_after_10_s_and_ended_after_20():
    found = watch(Watchdog(), 0, 60, trainer_at=0.0)
    assert [(now, r.kind, r.fault.process) for now, r in found] == [
        (10, "stall", "trainer"),
        (20, "recovery", "trainer"),
    ]
    assert "trainer (pid 3) is stopped by a signal: no sign of life for 10 s" in found[0][1].text
    assert "orchestrator waits 10 s for trainer (trainer publishes v1)" in found[0][1].text


def test_a_process_that_beats_is_left_alone():
    assert watch(Watchdog(), 0, 100) == []


def test_one_that_goes_on_by_itself_is_told_as_well():
    watchdog = Watchdog()
    watch(watchdog, 0, 15, trainer_at=0.0)
    ((now, report),) = watch(watchdog, 16, 40)
    assert (now, report.kind) == (16, "recovered")
    assert report.text == "trainer (pid 3) goes on after 15 s (frozen)"


def test_its_successor_is_another_process_which_may_freeze_too():
    watchdog = Watchdog()
    assert len(watch(watchdog, 0, 35, trainer_at=0.0)) == 2
    assert [r.kind for _, r in watch(watchdog, 36, 100, trainer_at=36.0, pid=4)] == ["stall", "recovery"]


def test_a_supervisor_that_was_stopped_itself_blames_nobody_for_that():
    watchdog = Watchdog()
    watch(watchdog, 0, 5)
    # Everybody was frozen for an hour and is awake again, the watchdog first.
    assert watch(watchdog, 3600, 3603, trainer_at=5.0) == []
    assert watch(watchdog, 3604, 3640) == []


def test_the_wait_graph_names_the_whole_way_and_the_time():
    beats = at(40.0)
    beats["trainer"] = Beat(
        "trainer", 3, 40.0, waits=(Wait("trainer", "batch", "orchestrator", "step 2", 30.0, 600.0),)
    )
    assert wait_graph(beats, 40.0) == [
        "orchestrator waits 40 s for trainer -> orchestrator (trainer publishes v1)",
        "trainer waits 10 s for orchestrator -> trainer (step 2)",
    ]


@given(st.lists(st.integers(0, 300), min_size=2, max_size=40, unique=True))
def test_whenever_it_looks_each_process_is_told_and_ended_at_most_once(times):
    watchdog = Watchdog()
    kinds = []
    for now in sorted(times):
        kinds += [r.kind for r in watchdog.check(at(float(now), trainer_at=0.0), float(now), state_of=lambda pid: "T")]
    assert kinds.count("recovery") <= 1
    assert "recovery" not in kinds or "stall" in kinds
