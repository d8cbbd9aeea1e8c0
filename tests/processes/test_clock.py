"""Times of day that differ by what has passed between them, whoever sets the host's clock."""

import time

from mettle.processes.clock import steady_time


def test_it_is_the_time_of_day_and_goes_on_when_the_hosts_clock_is_set_back(monkeypatch):
    assert abs(steady_time() - time.time()) < 3600
    before = steady_time()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0.0 <= steady_time() - before < 3600
