"""What happens to the host is told once, and a clock that is set is told from a supervisor that stood still."""

import pytest

from mettle.runs.host import LOW_DISK_BYTES, HostWatch
from mettle.runs.machine import ThisMachine


class Host(ThisMachine):
    """Both clocks and the disk, as a test wants them."""

    def __init__(self, path):
        self.seconds, self.date, self.free = 100.0, 1e9, 2**40
        self.watch = HostWatch(path, self)

    def now(self):
        return self.seconds

    def wall(self):
        return self.date

    def free_bytes(self, path):
        return self.free

    def after(self, seconds, *, jump_s=0.0):
        self.seconds += seconds
        self.date += seconds + jump_s
        return [(news.kind, news.text) for news in self.watch.look()]


@pytest.fixture
def host(tmp_path):
    made = Host(tmp_path)
    assert made.after(0.0) == []
    return made


@pytest.mark.parametrize(("jump_s", "words"), [(86400, "set 86400 s ahead"), (-7200, "set 7200 s back")])
def test_a_clock_that_is_set_is_told_once(host, jump_s, words):
    assert host.after(1.0) == []
    ((kind, text),) = host.after(1.0, jump_s=jump_s)
    assert (kind, words in text) == ("clock_jump", True)
    assert host.after(1.0) == []


def test_small_corrections_of_the_clock_are_no_news(host):
    assert [host.after(1.0, jump_s=s) for s in (0.5, -0.5, 3.0)] == [[], [], []]


def test_a_supervisor_that_did_not_run_says_for_how_long(host):
    ((kind, text),) = host.after(60.0)
    assert (kind, "did not run for 60 s" in text) == ("gap", True)
    assert host.after(1.0) == []


def test_a_disk_that_fills_is_told_each_time_it_does(host):
    told = []
    for free in (2**40, LOW_DISK_BYTES - 1, 0, 2**40, 10):
        host.free = free
        told += host.after(1.0)
    assert [kind for kind, _ in told] == ["disk_low", "disk_low"]
    assert "only 32 MiB are free" in told[0][1]
