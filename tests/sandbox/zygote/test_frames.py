"""Frames arrive whole, and one over the limit is not read."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mettle.sandbox.zygote import frames


@given(st.dictionaries(st.text(), st.integers()), st.binary(max_size=1000))
@settings(deadline=None)
def test_a_frame_arrives_as_it_was_sent(header: dict[str, int], payload: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frames.encode(header, payload))
        assert frames.receive(theirs) == (header, payload)
        ours.sendall(frames.encode(header, payload)[:-1])
        ours.shutdown(socket.SHUT_WR)
        assert frames.receive(theirs) is None


def test_a_frame_over_the_limit_is_refused_unread() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frames.PREFIX.pack(2, 1 << 31))
        with pytest.raises(ValueError, match="over the limit"):
            frames.receive(theirs, 1 << 20)
