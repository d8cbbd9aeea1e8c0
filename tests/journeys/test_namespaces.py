"""Hosts of the tests' own network: who reaches whom, after how long, and what is left behind."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.namespaces import Host, network

LEFT_BEHIND = f"""
import subprocess, sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.namespaces import network
with network(one=0.01) as hosts, hosts["one"].inside():
    print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
    time.sleep(1000)
"""


@contextmanager
def conversation(one: Host, other: Host) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    with other.inside(), socket.create_server((other.address, 0)) as listener:
        listener.settimeout(60.0)
        with one.inside(), socket.create_connection(listener.getsockname()[:2], 60.0) as near:
            far, _ = listener.accept()
            with far:
                yield near, far


def arrives(near: socket.socket, far: socket.socket, limit_s: float) -> bool:
    near.sendall(b"x")
    far.settimeout(limit_s)
    try:
        return far.recv(1) == b"x"
    except TimeoutError:
        return False


def test_hosts_reach_each_other_and_the_tests_namespace_stays_as_it_was() -> None:
    before = socket.if_nameindex()
    with network(one=0.0, two=0.0) as hosts:
        with conversation(hosts["one"], hosts["two"]) as ends:
            assert arrives(*ends, 60.0)
        assert socket.if_nameindex() == before
        with hosts["one"].inside():
            assert [name for _, name in socket.if_nameindex()] == ["lo", "eth0"]
            with pytest.raises(OSError, match="unreachable"):
                socket.create_connection(("192.0.2.1", 80), 1.0)
    assert socket.if_nameindex() == before


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_a_host_that_was_cut_off_gets_afterwards_what_was_sent_to_it(delay_s: float) -> None:
    with network(one=delay_s, two=0.0) as hosts, conversation(hosts["one"], hosts["two"]) as (near, far):
        hosts["one"].cut()
        assert not arrives(near, far, 0.5)
        hosts["one"].heal()
        far.settimeout(60.0)
        assert far.recv(1) == b"x"
        assert arrives(far, near, 60.0)


def test_a_word_and_its_answer_take_both_delays_twice() -> None:
    with network(one=0.05, two=0.02) as hosts, conversation(hosts["one"], hosts["two"]) as (near, far):
        began = time.monotonic()
        assert arrives(near, far, 60.0)
        assert arrives(far, near, 60.0)
        assert time.monotonic() - began >= 0.14


def test_large_messages_come_whole_over_a_delayed_way() -> None:
    sent = os.urandom(2_000_000)
    with network(one=0.01, two=0.0) as hosts, conversation(hosts["one"], hosts["two"]) as (near, far):
        near.settimeout(60.0)
        far.settimeout(60.0)
        child = os.fork()
        if child == 0:
            near.sendall(sent)
            os._exit(0)
        came = b""
        while len(came) < len(sent):
            came += far.recv(1 << 20)
        os.waitpid(child, 0)
    assert came == sent


def test_a_process_that_still_runs_on_a_host_is_killed_at_the_end() -> None:
    with network(one=0.0) as hosts, hosts["one"].inside():
        process = subprocess.Popen(["sleep", "1000"])
    assert process.wait(60.0) == -signal.SIGKILL


def test_nothing_runs_on_the_hosts_of_tests_that_were_killed() -> None:
    # the first network has the test skipped where there can be none
    with network(one=0.0), subprocess.Popen([sys.executable, "-c", LEFT_BEHIND], stdout=subprocess.PIPE) as tests:
        assert tests.stdout is not None
        left = os.pidfd_open(int(tests.stdout.readline()))
        tests.kill()
        poll = select.poll()
        poll.register(left)
        assert poll.poll(60_000.0), "a process outlived the tests that started it"
        os.close(left)
