"""A ticker goes on after steps that fail, and ends in its own thread."""

import logging
import threading

from mettle.errors import StorageError
from mettle.processes.ticker import Ticker


def test_steps_that_fail_are_told_and_made_again(caplog):
    done, errors = threading.Event(), [StorageError("the disk is full"), OSError("no route"), ValueError("a mistake")]

    def step():
        if errors:
            raise errors.pop(0)
        done.set()

    ticker = Ticker("leases", step, tick_s=0.001)
    with caplog.at_level(logging.WARNING):
        ticker.start()
        assert done.wait(60)
        ticker.close()
    own = [each for each in caplog.records if each.name == "mettle.processes.ticker"]  # other threads may warn as well
    assert [(each.levelname, each.message) for each in own] == [
        ("WARNING", "leases: waiting"), ("WARNING", "leases: waiting"), ("ERROR", "leases: a step failed"),
    ]  # fmt: skip


def test_the_end_comes_in_the_thread_of_the_steps():
    where = []
    begun = threading.Event()

    def step():
        where.append(threading.current_thread().name)
        begun.set()

    ticker = Ticker(
        "beats", step, tick_s=0.001, at_end=lambda: where.append(f"end in {threading.current_thread().name}")
    )
    ticker.start()
    assert begun.wait(60)
    ticker.close()
    ticker.close()
    assert where[-1] == "end in beats"
    assert set(where[:-1]) == {"beats"}


def test_one_that_was_never_started_is_closed_without_a_word():
    ticker = Ticker("beats", lambda: None, tick_s=1.0)
    ticker.close()


def test_run_ticks_in_the_thread_that_calls():
    seen = []

    def step():
        seen.append(threading.current_thread())
        ticker.stop()

    ticker = Ticker("beats", step, tick_s=0.001)
    ticker.run()
    assert seen == [threading.current_thread()]
