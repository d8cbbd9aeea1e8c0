"""The watchdog tells a stall once, ends who stands still once, and counts no time in which it did not look."""

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.processes.beats import Beat, Gauge, Heartbeat, Questions, Wait
from mettle.processes.liveness import worker_name
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


def test_a_process_that_was_started_again_is_not_ended_for_the_wait_that_its_predecessor_caused():
    """The trainer beats and has no work; the orchestrator has waited for it since 0, for half of 1800 s at 900."""
    watchdog, ended = Watchdog(), []
    for now in range(2000):
        age_s = now if now < 950 else now - 950  # it was ended at about 900, and its successor starts at 950
        beats = at(float(now), pid=3 if now < 950 else 4)
        reports = watchdog.check(beats, float(now), age_of=lambda name, age_s=age_s: age_s)
        ended += [now for report in reports if report.kind == "recovery"]
    assert ended == [900, 1850]


def test_a_watchdog_that_hardly_runs_names_a_frozen_process_all_the_same():
    """On a host with far more to do than it can, each look comes late; what was seen before the gap still counts."""
    watchdog, told = Watchdog(), []
    for now in (0, 4, 11, 14, 21, 25, 32, 36, 43):
        told += [
            (now, r.kind) for r in watchdog.check(at(float(now), trainer_at=0.0), float(now), state_of=lambda p: "T")
        ]
    assert told == [(25, "stall")]


def test_the_wait_graph_names_the_whole_way_and_the_time():
    beats = at(40.0)
    beats["trainer"] = Beat(
        "trainer", 3, 40.0, waits=(Wait("trainer", "batch", "orchestrator", "step 2", 30.0, 600.0),)
    )
    assert wait_graph(beats, 40.0) == [
        "orchestrator waits 40 s for trainer -> orchestrator (trainer publishes v1)",
        "trainer waits 10 s for orchestrator -> trainer (step 2)",
    ]


def test_the_graph_has_waits_of_a_second_and_more_and_a_report_the_three_longest():
    beats = at(40.0, trainer_at=28.0)
    for i, since in enumerate((39.5, 39.0, 35.0, 30.0)):
        beats[f"other-{i}"] = Beat(f"other-{i}", 10 + i, 40.0, waits=(Wait(f"w{i}", "x", "hub", "it", since, 600.0),))
    assert [line.split()[0] for line in wait_graph(beats, 40.0)] == ["orchestrator", "w3", "w2", "w1"]
    watchdog = Watchdog()
    for now in range(28, 40):
        watchdog.check(at(float(now)), float(now))
    (report,) = watchdog.check(beats, 40.0, state_of=lambda pid: "T")
    assert report.text.count(" waits ") == 3


@given(st.lists(st.integers(0, 300), min_size=2, max_size=40, unique=True))
def test_whenever_it_looks_each_process_is_told_and_ended_at_most_once(times):
    watchdog = Watchdog()
    kinds = []
    for now in sorted(times):
        kinds += [r.kind for r in watchdog.check(at(float(now), trainer_at=0.0), float(now), state_of=lambda pid: "T")]
    assert kinds.count("recovery") <= 1
    assert "recovery" not in kinds or "stall" in kinds


WORKER = worker_name("words", 77)
BEHIND = {"inference": "", WORKER: "inference", "orchestrator": WORKER, "trainer": "orchestrator"}
"""Each has something to do while the one before it has."""


class SimulatedRun:
    """The beats of a run second by second, in which one process has a fault from some second on."""

    def __init__(self, victim, fault):
        self.victim, self.fault, self.now = victim, fault, 0.0
        self.hearts = {name: Heartbeat(name=name, clock=lambda: self.now) for name in BEHIND}
        self.done = dict.fromkeys(BEHIND, 0)
        self.moved = dict.fromkeys(BEHIND, 0.0)
        self.waits = ExitStack()
        self.beats = {}

    def second(self, *, is_broken):
        self.now += 1.0
        self.waits.close()
        for name, before in BEHIND.items():
            is_victim = is_broken and name == self.victim
            is_asked = not self._is_unasked(name, is_broken)
            if not is_victim and is_asked and (not before or self.now - self.moved[before] < 3.0):
                self.done[name] += 1
                self.moved[name] = self.now
            has_work = is_victim or (self.moved[name] == self.now if name == "trainer" else is_asked)
            self.hearts[name].gauge = (
                lambda name=name, has_work=has_work, is_paused=is_victim and self.fault == "paused": Gauge(
                    self.done[name], has_work, is_paused
                )
            )
            if not (is_victim and self.fault == "blocked"):
                self.hearts[name].tick()
        self._wait()
        for name, heart in self.hearts.items():
            if not (is_broken and name == self.victim and self.fault == "frozen"):
                self.beats[name] = heart.measure()
        return dict(self.beats)

    def _is_unasked(self, name, is_broken):
        """Who would ask it for something stands still."""
        askers = {"inference": (WORKER, "orchestrator"), WORKER: ("orchestrator",)}
        return is_broken and self.victim in askers.get(name, ())

    def _wait(self):
        """What they say of themselves, the victim too: it stopped while it waited, and says so for ever."""
        if self.now - self.moved["trainer"] > 1:
            budget_s, awaits = 600.0, "orchestrator ships step 2"
            self.waits.enter_context(
                self.hearts["trainer"].waiting("trainer", "batch", "orchestrator", awaits, budget_s=budget_s)
            )
        edge, target = (
            ("rollouts", "environments") if self.now - self.moved["orchestrator"] > 1 else ("weights", "trainer")
        )
        self.waits.enter_context(
            self.hearts["orchestrator"].waiting("orchestrator", edge, target, "more", budget_s=1800.0)
        )


@pytest.mark.parametrize(
    ("victim", "fault"),
    [*((victim, fault) for victim in BEHIND for fault in ("frozen", "blocked", "stuck")), ("inference", "paused")],
)
def test_at_default_budgets_each_fault_in_each_process_is_named_within_30_s_and_nobody_else_is(victim, fault):
    run, watchdog, told = SimulatedRun(victim, fault), Watchdog(), []
    for second in range(60 + 31):
        beats = run.second(is_broken=second >= 60)
        reports = watchdog.check(beats, run.now, state_of=lambda pid: "T")
        assert second >= 60 or not reports, reports
        told += [(second - 60, report) for report in reports if report.kind == "stall"]
    assert told, "nothing was told"
    assert {report.fault.process for _, report in told} == {victim}
    assert told[0][1].fault.kind == fault


def test_who_rolls_out_is_not_named_for_the_time_in_which_the_engine_stood_when_that_is_started_again():
    """The engine froze and was ended; until it beats again its workers still have the rollouts that it had."""
    watchdog, told = Watchdog(), []
    for now in range(60):
        beats = {
            "inference": Beat("inference", 5, min(now, 10.0), has_work=True, idle_s=min(now, 10.0), still_s=now),
            WORKER: Beat(WORKER, 77, float(now), unit="rollouts", has_work=True, idle_s=float(now), still_s=now),
        }
        if now >= 31:
            del beats["inference"]
        told += watchdog.check(beats, float(now), state_of=lambda pid: "T")
    assert {report.fault.process for report in told} == {"inference"}


def test_who_stands_in_front_of_a_clusters_engines_is_not_named_for_the_time_without_them():
    """None has room from 10 s to 400 s; from then on one is there, and the server in front of it answers nobody."""
    watchdog, told = Watchdog(), []
    for now in range(750):
        wait = Wait("orchestrator/updater", "inference", "inference", "engine answers /health", 10.0, 600.0)
        names = ["inference", *(["replica-0"] if now < 10 or now >= 400 else [])]
        beats = {name: Beat(name, 5, float(now)) for name in names}
        beats["orchestrator"] = Beat("orchestrator", 2, float(now), waits=(wait,) if now >= 10 else ())
        reports = watchdog.check(beats, float(now), age_of=lambda name: 1000.0)
        told += [(now, report.kind, report.fault.process) for report in reports]
    assert told == [(549, "stall", "inference"), (699, "recovery", "inference")]


@pytest.mark.parametrize(
    ("age_s", "named"), [(10.0, []), (449.0, []), (450.0, [("stall", "awaited")]), (1000.0, [("stall", "awaited")])]
)
def test_a_process_that_was_started_again_is_not_even_named_for_the_wait_that_its_predecessor_caused(age_s, named):
    """The orchestrator has waited 460 s of 1800 s, a share that is told, for a trainer that is 10 s old, or 1000 s."""
    watchdog, reports = Watchdog(), []
    for now in range(461):
        reports += watchdog.check(at(float(now)), float(now), age_of=lambda name: age_s)
    assert [(report.kind, report.fault.kind) for report in reports] == named


def asking(now, silent_s, num_open=1, *, answered_s=None):
    asked = Questions("judge j", num_open, silent_s, answered_s=answered_s)
    return {"worker-words-7": Beat("worker-words-7", 7, now, has_work=True, asked=(asked,))}


def test_a_judge_that_answers_nobody_is_told_once_never_ended_and_told_again_when_it_answers():
    watchdog, found = Watchdog(), []
    for now in range(400):
        num_open = 0 if 100 <= now < 110 else 1  # every question has failed, and nobody asks for a while
        found += watchdog.check(asking(now, float(now), num_open), float(now))
    assert [(r.kind, r.fault.process, r.fault.pid, r.fault.kind) for r in found] == [("stall", "judge j", 0, "silent")]
    (back,) = watchdog.check(asking(400.0, 0.0, 0, answered_s=0.5), 400.0)
    assert (back.kind, back.text) == ("recovered", "judge j answers again after 399 s")
    later = [r.kind for now in range(401, 440) for r in watchdog.check(asking(now, now - 401.0), float(now))]
    assert later == ["stall"]


def test_an_answer_from_before_the_silence_is_none():
    watchdog = Watchdog()
    for now in range(30):
        watchdog.check(asking(now, float(now), answered_s=now + 5.0), float(now))
    assert watchdog.check(asking(30.0, 29.0, 0, answered_s=35.0), 30.0) == []
