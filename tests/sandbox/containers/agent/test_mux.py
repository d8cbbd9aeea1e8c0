"""Channels of one stream: in order, within their windows, and unmoved by what an agent cannot have sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.sandbox.containers.agent.mux import CREDIT, DATA, MAX_DATA_BYTES, PING, WINDOW_BYTES, Mux, MuxChannel


class Kept(MuxChannel):
    """Keeps what comes, and takes it when it is told to."""

    def __init__(self, mux: Mux, number: int) -> None:
        super().__init__(mux, number)
        self.data = bytearray()
        self.is_over = self.is_reset = False

    def on_data(self, data: bytes) -> None:
        self.data += data

    def on_end(self) -> None:
        self.is_over = True

    def on_reset(self) -> None:
        self.is_reset = True


class Pair:
    """Two ends, and what is on its way between them."""

    def __init__(self) -> None:
        self.inward, self.outward = bytearray(), bytearray()
        self.accepted: list[Kept] = []
        self.owner = Mux(self.inward.extend)
        self.agent = Mux(self.outward.extend, self._accept)

    def _accept(self, mux: Mux, number: int) -> MuxChannel:
        self.accepted.append(Kept(mux, number))
        return self.accepted[-1]

    def open(self) -> Kept:
        channel = self.owner.open(Kept)
        assert isinstance(channel, Kept)
        return channel

    def carry(self, step: int = 1 << 20) -> None:
        """Deliver everything, in pieces."""
        while self.inward or self.outward:
            for held, mux in ((self.inward, self.agent), (self.outward, self.owner)):
                piece = bytes(held[:step])
                del held[:step]
                mux.feed(piece)


@given(st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=300)), max_size=30), st.integers(1, 50))
def test_each_channel_brings_its_bytes_in_order_however_the_stream_is_cut(
    writes: list[tuple[int, bytes]], step: int
) -> None:
    pair = Pair()
    channels = [pair.open() for _ in range(3)]
    for channel in channels:
        channel.send(b"begun")  # a channel is open from its first byte on
    for number, data in writes:
        assert channels[number].send(data) == len(data)
    for channel in channels:
        channel.end()
    pair.carry(step)
    for number, arrived in enumerate(pair.accepted):
        assert arrived.data == b"begun" + b"".join(data for to, data in writes if to == number)
        assert arrived.is_over


def test_who_does_not_take_stops_its_own_writer_and_nobody_elses() -> None:
    pair = Pair()
    slow, quick = pair.open(), pair.open()
    assert slow.send(bytes(WINDOW_BYTES + 10)) == WINDOW_BYTES
    assert slow.send(b"more") == 0
    assert quick.send(b"well") == 4
    pair.carry()
    assert [len(channel.data) for channel in pair.accepted] == [WINDOW_BYTES, 4]
    pair.accepted[0].took(WINDOW_BYTES)
    pair.carry()
    assert slow.send(b"more") == 4


def test_a_channel_ends_each_way_apart_and_is_forgotten() -> None:
    pair = Pair()
    ours = pair.open()
    ours.send(b"asked")
    ours.end()
    pair.carry()
    [theirs] = pair.accepted
    assert theirs.is_over
    assert not ours.is_over
    theirs.send(b"answered")
    theirs.end()
    pair.carry()
    assert ours.data == b"answered"
    assert not pair.owner.channels
    assert not pair.agent.channels


def test_a_reset_ends_both_ways_and_late_bytes_are_nobodys() -> None:
    pair = Pair()
    ours = pair.open()
    ours.send(b"asked")
    pair.carry()
    [theirs] = pair.accepted
    theirs.send(b"on its way")
    ours.reset()
    pair.carry()
    assert theirs.is_reset
    assert not pair.owner.channels
    assert len(pair.accepted) == 1


@pytest.mark.parametrize(
    "frame",
    [
        bytes([9, 0, 0, 0, 1, 0, 0, 0, 0]),
        bytes([DATA, 0, 0, 0, 1]) + (MAX_DATA_BYTES + 1).to_bytes(4, "big"),
        (bytes([DATA, 0, 0, 0, 1]) + MAX_DATA_BYTES.to_bytes(4, "big") + bytes(MAX_DATA_BYTES))
        * (WINDOW_BYTES // MAX_DATA_BYTES + 1),
    ],
    ids=["no kind", "too long", "beyond the window"],
)
def test_what_no_agent_sends_is_refused(frame: bytes) -> None:
    pair = Pair()
    pair.open()
    with pytest.raises(ValueError, match=r"frame of kind|more than it was allowed"):
        pair.owner.feed(frame)


def test_the_owner_alone_opens_channels() -> None:
    pair = Pair()
    pair.owner.feed(bytes([DATA, 0, 0, 0, 7, 0, 0, 0, 1]) + b"x")
    pair.owner.feed(bytes([CREDIT, 0, 0, 0, 7, 0, 0, 0, 1]))
    assert not pair.owner.channels


def test_a_sign_of_life_is_answered() -> None:
    pair = Pair()
    pair.owner.send(PING, 0)
    pair.agent.feed(bytes(pair.inward))
    assert pair.outward == bytes([PING]) + bytes(8)
