"""Descriptors of any number are asked whether they have something to read."""

import socket

import pytest

from mettle.processes.readiness import is_readable

pytestmark = pytest.mark.usefixtures("many_descriptors")


def test_a_descriptor_above_those_of_select_is_readable_when_something_came_and_when_its_other_end_is_gone():
    ours, theirs = socket.socketpair()
    with ours:
        assert not is_readable(ours)
        assert not is_readable(ours.fileno(), 0.001)
        theirs.send(b"x")
        assert is_readable(ours, None)
        ours.recv(1)
        assert not is_readable(ours, -1.0), "a time that is over is none, and not one without end"
        theirs.close()
        assert is_readable(ours, None)
