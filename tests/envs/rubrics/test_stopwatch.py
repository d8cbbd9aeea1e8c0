"""A call is held to what it does, and not to what the host does meanwhile."""

import resource
import threading
import time
from types import SimpleNamespace

import pytest

from mettle.envs.rubrics import stopwatch
from mettle.envs.rubrics.function import NUM_TRIED, RewardFunction

pytestmark = pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="no such figures on this system")


def held(call):
    before, started = stopwatch.used(), time.perf_counter()
    call()
    wall_s = time.perf_counter() - started
    return wall_s, stopwatch.held_s(wall_s, before)


def test_a_call_that_sleeps_is_held_to_all_of_its_time():
    wall_s, held_s = held(lambda: time.sleep(0.01))
    assert held_s == wall_s >= 0.01


def test_a_call_that_waits_for_another_thread_is_held_to_all_of_its_time():
    released = threading.Event()

    def waits():
        threading.Timer(0.01, released.set).start()
        released.wait(30)

    wall_s, held_s = held(waits)
    assert held_s == wall_s >= 0.01


def host(monkeypatch, *, num_waits):
    """A host on which each call takes a quarter of a second, of which two milliseconds are its own."""
    figures = [0.0, 0]
    clock = [100.0]

    def getrusage(_):
        return SimpleNamespace(ru_utime=figures[0], ru_stime=0.0, ru_nvcsw=figures[1])

    def call():
        clock[0] += 0.25
        figures[0] += 0.002
        figures[1] += num_waits
        return 1.0

    monkeypatch.setattr(stopwatch.resource, "getrusage", getrusage)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    return call


@pytest.mark.parametrize(("num_waits", "expected"), [(0, 0.002), (1, 0.25)])
def test_what_the_host_gave_to_others_is_nobodys_fault(monkeypatch, num_waits, expected):
    wall_s, held_s = held(host(monkeypatch, num_waits=num_waits))
    assert (wall_s, held_s) == (0.25, pytest.approx(expected))


@pytest.mark.parametrize(("num_waits", "place"), [(0, "loop"), (1, "thread")])
def test_a_function_leaves_the_loop_for_what_it_does_and_not_for_what_the_host_does(monkeypatch, num_waits, place):
    call = host(monkeypatch, num_waits=num_waits)
    function = RewardFunction(lambda: call(), None)
    function.place = "loop"
    for _ in range(NUM_TRIED):
        function.begin()
        assert function.start({}) == 1.0
        if function.place == "thread":
            break
    assert function.place == place
    assert function.stats()["max_ms"] == pytest.approx(250)


def test_a_short_call_is_asked_nothing_more(monkeypatch):
    before = stopwatch.used()
    monkeypatch.setattr(stopwatch.resource, "getrusage", lambda _: pytest.fail("it takes a microsecond"))
    assert stopwatch.held_s(0.0005, before) == 0.0005
