"""Who comes to a place without a proof costs it no thread, is ended in time, and keeps nobody else out."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
from types import SimpleNamespace

import pytest

from mettle.envs.workers.entrance import Entrance
from mettle.envs.workers.handshake import NONCE_BYTES, NotKnown, enter
from mettle.envs.workers.place import WorkerPlace
from mettle.processes.frames import receive, send
from mettle.processes.readiness import is_readable

KEY = "the key of this run"
SOON_S = 0.02
"""How long an entrance here sleeps at most before it looks at the test's clock."""


class Opened:
    """An entrance at work in a thread, the connections that it has let in, and a clock that stands still."""

    def __init__(self, **limits):
        self.now = 0.0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.let_in = queue.Queue()
        self.entrance = Entrance(self.listener, KEY, clock=lambda: self.now, **limits)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        for connection in self.entrance.let_in():
            self.let_in.put(connection)

    def stranger(self):
        """Somebody who has connected, and been taken: the place's nonce is there."""
        made = socket.create_connection(self.address, timeout=60.0)
        assert len(made.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES
        return made

    def close(self):
        self.entrance.close()
        self._thread.join()


@pytest.fixture
def opened():
    with contextlib.ExitStack() as stack:

        def make(**limits):
            return stack.enter_context(contextlib.closing(Opened(**limits)))

        yield make


def is_ended(connection):
    """Waits until the place has hung up."""
    with contextlib.suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


def test_who_has_the_key_is_let_in_with_what_it_says_next(opened):
    place = opened()
    with socket.create_connection(place.address, timeout=60.0) as known:
        enter(known, KEY, 60.0)
        send(known, {"do": "start"})
        assert known.gettimeout() == 60.0
        with place.let_in.get(timeout=60.0) as connection:
            connection.setblocking(True)
            assert receive(connection)["do"] == "start"


def test_a_byte_now_and_then_buys_no_time(opened):
    place = opened(prove_s=10.0)
    with place.stranger() as slow:
        for place.now in (0.0, 6.0, 9.0):
            slow.send(b"x")
        with socket.create_connection(place.address, timeout=60.0) as known:
            enter(known, KEY, 60.0)  # the place has looked since then
        assert not is_readable(slow)
        place.now = 10.0
        slow.send(b"x")
        assert is_ended(slow)


def test_who_says_nothing_is_ended_while_nothing_else_happens(opened):
    place = opened(prove_s=SOON_S)
    with place.stranger() as silent:
        place.now = SOON_S
        assert is_ended(silent)


def test_when_there_is_no_room_the_oldest_go_and_who_belongs_to_the_run_gets_in(opened):
    place = opened(max_waiting=3, prove_s=1e6, full_s=SOON_S)
    strangers = []
    for place.now in (0.0, 0.0, SOON_S / 2):
        strangers.append(place.stranger())
    with socket.create_connection(place.address, timeout=60.0) as known:
        place.now = SOON_S
        enter(known, KEY, 60.0)
        place.let_in.get(timeout=60.0).close()
        assert [is_ended(each) for each in strangers[:2]] == [True, True]
        assert not is_readable(strangers[2]), "with room again, there is time"
    for each in strangers:
        each.close()


def test_nobody_is_taken_while_there_is_no_room(opened):
    place = opened(max_waiting=1, prove_s=1e6, full_s=1e6)
    with place.stranger() as first, socket.create_connection(place.address, timeout=60.0) as second:
        first.send(b"x" * 2 * NONCE_BYTES)  # no proof, so the place ends it, and has room
        assert is_ended(first)
        assert len(second.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES


def test_who_hangs_up_before_the_proof_leaves_room(opened):
    place = opened(max_waiting=1, prove_s=1e6, full_s=1e6)
    for _ in range(5):
        place.stranger().close()


def test_an_entrance_that_closes_ends_who_waits_and_lets_nobody_in(opened):
    place = opened()
    with place.stranger() as waiting:
        place.close()
        assert is_ended(waiting)
        with pytest.raises(OSError):  # noqa: PT011
            socket.create_connection(place.address, timeout=60.0)


def test_strangers_cost_a_place_no_thread():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        place = WorkerPlace(listener, KEY, "workers-0")
        serving = threading.Thread(target=place.serve)
        serving.start()
        before = threading.active_count()
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stranger = stack.enter_context(socket.create_connection(address, timeout=60.0))
                assert len(stranger.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES
            assert threading.active_count() == before
        place.drain()
        serving.join()


def test_a_place_that_takes_its_time_over_its_own_proof_is_left(monkeypatch):
    """A byte at a time, each well within the limit."""
    now = itertools.count(0.0, 4.0)
    monkeypatch.setattr("mettle.envs.workers.handshake.time", SimpleNamespace(monotonic=lambda: next(now)))
    ours, theirs = socket.socketpair()

    class Dripping(socket.socket):
        def recv(self, size, *flags):
            return super().recv(1, *flags)

    with theirs, Dripping(fileno=ours.detach()) as slow:
        theirs.send(b"x" * NONCE_BYTES)
        with pytest.raises(TimeoutError, match="did not prove in time"):
            enter(slow, KEY, 10.0)


def test_a_wrong_key_is_no_proof(opened):
    place = opened()
    with socket.create_connection(place.address, timeout=60.0) as stranger, pytest.raises(NotKnown):
        enter(stranger, "another key", 60.0)
    assert place.let_in.empty()
