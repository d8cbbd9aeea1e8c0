"""Signs of life: what the thread measures, what a reader sees, and what a full disk or a clock that jumps change."""

import os
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from mettle.processes.beats import FILE_BYTES, Beat, Gauge, Heartbeat, asking, read_beats, waits_of
from mettle.storage.database import Database


class Clock:
    now = 100.0

    def __call__(self):
        return self.now

    def go(self, seconds, heart=None, step=1.0):
        """Let time pass, with a beat every `step` where there is a heart."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            if heart is not None:
                heart.measure()


@pytest.fixture
def clock():
    return Clock()


def test_work_that_does_not_move_is_idle_and_waiting_for_somebody_is_not(clock):
    heart = Heartbeat(name="trainer", clock=clock)
    clock.go(30, heart)
    assert heart.measure().idle_s == 0.0  # nothing was begun yet
    heart.advance()
    clock.go(4, heart)
    assert heart.measure().idle_s == 3.0
    with heart.waiting("trainer", "batch", "orchestrator", "step 1", budget_s=60.0):
        clock.go(20, heart)
        beat = heart.measure()
    assert (beat.idle_s, beat.has_work, beat.waits[0].since) == (0.0, False, 134.0)
    assert (beat.waits[0].is_overdue(194.0), beat.waits[0].is_overdue(194.5)) == (False, True)
    clock.go(7, heart)
    assert heart.measure().idle_s == 7.0


def test_the_longest_time_between_two_moves_is_remembered(clock):
    heart = Heartbeat(name="trainer", clock=clock)
    for seconds in (1, 9, 2):
        heart.advance()
        clock.go(seconds, heart)
    heart.advance()
    assert heart.measure().longest_idle_s == 9.0


def test_a_loop_that_does_not_come_round_is_late_and_says_where_it_stands(clock):
    heart = Heartbeat(name="orchestrator", clock=clock)
    assert heart.measure().late_s == 0.0
    heart.tick()
    clock.go(4.25, heart)
    beat = heart.measure()
    assert beat.late_s == 4.0
    assert "test_beats.py" in beat.where
    heart.rest()
    assert heart.measure().late_s == 0.0


def test_a_pause_is_measured_and_is_no_idleness(clock):
    heart = Heartbeat(name="inference", clock=clock)
    gauge = Gauge(5, has_work=True)
    heart.gauge = lambda: gauge
    heart.measure()
    gauge = Gauge(5, has_work=True, is_paused=True)
    clock.go(12, heart)
    beat = heart.measure()
    assert (beat.paused_s, beat.idle_s) == (12.0, 0.0)
    assert beat.still_s == 12.0


def test_after_a_gap_in_which_the_whole_process_stood_the_measures_begin_anew(clock):
    heart = Heartbeat(name="orchestrator", clock=clock)
    heart.gauge = lambda: Gauge(1, has_work=True)
    heart.tick()
    heart.measure()
    clock.go(3600)
    beat = heart.measure()
    assert (beat.late_s, beat.idle_s) == (0.0, 0.0)


def test_a_reader_sees_the_newest_beat_until_the_process_ends(tmp_path):
    with Heartbeat(tmp_path / "trainer.beat", unit="steps") as heart:
        heart.advance(3)
        with heart.waiting("trainer", "batch", "orchestrator", "x" * 900, budget_s=5.0):
            heart.beat()
            beat = read_beats(tmp_path)["trainer"]
        assert (beat.pid, beat.progress, beat.unit) == (os.getpid(), 3, "steps")
        assert waits_of({"trainer": beat})[0].awaits == "x" * 200
        assert (tmp_path / "trainer.beat").stat().st_size == FILE_BYTES
    assert read_beats(tmp_path) == {}


def test_what_is_no_beat_is_passed_over(tmp_path):
    (tmp_path / "half.beat").write_text('{"name": "half", "pi')
    (tmp_path / "empty.beat").write_text("")
    assert read_beats(tmp_path) == {}


def test_a_folder_that_cannot_be_written_keeps_nobody_from_working(tmp_path):
    (tmp_path / "beats").write_text("a file where the folder should be")
    with Heartbeat(tmp_path / "beats" / "trainer.beat") as heart:
        heart.advance()
        assert isinstance(heart.beat(), Beat)


def test_the_thread_beats_while_the_main_thread_does_something_else(tmp_path):
    with Heartbeat(tmp_path / "trainer.beat"):
        first = read_beats(tmp_path)["trainer"].at
        deadline = time.monotonic() + 100
        while read_beats(tmp_path)["trainer"].at == first:
            assert time.monotonic() < deadline
            threading.Event().wait(0.05)
    assert "heartbeat" not in {thread.name for thread in threading.enumerate()}


def test_the_wall_clock_is_never_asked(monkeypatch, tmp_path):
    def jumped():
        raise AssertionError("a beat has nothing to do with the host's time")

    monkeypatch.setattr(time, "time", jumped)
    monkeypatch.setattr(time, "time_ns", jumped)
    with Heartbeat(tmp_path / "a.beat") as heart:
        heart.tick()
        heart.beat()


@contextmanager
def refused(heart):
    """A question that fails after the block."""
    with suppress(OSError), heart.asking("judge j"):
        yield
        raise OSError("refused")


def test_somebody_outside_of_the_run_is_silent_from_the_first_open_question_to_an_answer(clock):
    heart = Heartbeat(name="worker", clock=clock)

    def known():
        (asked,) = heart.measure().asked
        return asked.num_open, asked.silent_s, asked.longest_s, asked.answered_s

    assert heart.measure().asked == ()
    clock.go(50, heart)
    with heart.asking("judge j"):
        clock.go(4, heart)
        with refused(heart):
            clock.go(3, heart)
            assert known() == (2, 7.0, 0.0, None)
        clock.go(2, heart)
        assert known() == (1, 9.0, 0.0, None)  # a failure is no answer
    assert known() == (0, 0.0, 9.0, 0.0)
    clock.go(30, heart)
    assert known() == (0, 0.0, 9.0, 30.0)
    with refused(heart):
        clock.go(5, heart)
    clock.go(100, heart)  # nobody asks
    with heart.asking("judge j"):
        clock.go(1, heart)
        assert known() == (1, 6.0, 9.0, 136.0)


def test_who_waits_for_an_answer_from_outside_does_not_stand_still_itself(clock):
    heart = Heartbeat(name="worker", clock=clock)
    heart.advance()
    clock.go(3, heart)
    with heart.asking("judge j"):
        clock.go(60, heart)
        assert heart.measure().idle_s == 0.0
    clock.go(5, heart)
    assert heart.measure().idle_s == 5.0


def test_nobody_is_silent_to_a_process_that_could_not_hear_it(clock):
    """Whose loop is blocked, or that was stopped with its threads."""
    heart = Heartbeat(name="worker", clock=clock)
    with heart.asking("judge j"):
        heart.tick()
        clock.go(40, heart)  # the loop does not come round
        assert heart.measure().asked[0].silent_s <= 3.0
        heart.tick()
        clock.go(40)
        assert heart.measure().asked[0].silent_s <= 3.0


def test_what_is_asked_of_no_heart_is_asked_all_the_same():
    with asking("judge j"):
        pass
    with Heartbeat(name="worker") as heart, asking("judge j"):
        assert [asked.target for asked in heart.measure().asked] == ["judge j"]


def test_whom_a_process_asks_is_read_as_it_was_written(tmp_path):
    with Heartbeat(tmp_path / "worker.beat") as heart, heart.asking("judge j"):
        written = heart.beat()
        assert read_beats(tmp_path)["worker"].asked == written.asked
        assert written.asked[0].num_open == 1


def test_a_beat_says_that_its_process_is_in_the_middle_of_a_transaction(tmp_path, clock):
    database = Database(tmp_path / "run.db", ["CREATE TABLE t (x)"])
    heart = Heartbeat(name="orchestrator", clock=clock)
    assert not heart.measure().is_writing
    heart.is_writing = lambda: database.is_writing
    with database.transaction():
        assert heart.measure().is_writing
    assert not heart.measure().is_writing
    database.close()
    assert not heart.measure().is_writing
