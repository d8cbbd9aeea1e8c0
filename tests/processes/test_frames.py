"""Messages between a process and its children: nothing is lost, nothing but data is made, garbage is refused."""

from __future__ import annotations

import asyncio
import math
import socket
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.errors import ServiceError
from mettle.processes import frames

text = st.text(st.characters(exclude_categories=()), max_size=20)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(text.filter(lambda key: key != "arrays"), plain, max_size=4),
    st.lists(st.lists(st.floats()), max_size=3),
)
def test_a_frame_comes_back_as_it_was(message, floats):
    arrays = [array("d", numbers) for numbers in floats]
    frame = frames.encode(message, arrays)
    lengths = frames.HEADER.unpack(frame[:8])
    found = frames.decode(frame[8 : 8 + lengths[0]], frame[8 + lengths[0] :])
    assert [list(map(math.isnan, numbers)) for numbers in found.pop("arrays")] == [
        list(map(math.isnan, a)) for a in arrays
    ]
    assert found == message


@pytest.mark.parametrize(
    ("body", "numbers", "complaint"),
    [
        (b"[]", b"", "no object"),
        (b"{", b"", "cannot be read"),
        (b"{}", b"", "arrays"),
        (b'{"arrays": [["u", 1]]}', b"abcd", "typecode"),
        (b'{"arrays": [["i", 3]]}', b"abcd", "3 numbers at 0 of 4 bytes"),
        (b'{"arrays": [["i", -1]]}', b"abcd", "-1 numbers"),
        (b"\xff\xfe", b"", "cannot be read"),
    ],
)
def test_garbage_is_refused(body, numbers, complaint):
    with pytest.raises(ServiceError, match=complaint):
        frames.decode(body, numbers)


@pytest.mark.parametrize("text", ["\ud83d\ude00", "a\ud800", "\U0001f600", "\u2028\x00\r\n"])
def test_text_arrives_as_the_code_points_that_it_had(text):
    frame = frames.encode({"text": text, text: 1})
    size, _ = frames.HEADER.unpack(frame[: frames.HEADER.size])
    found = frames.decode(frame[frames.HEADER.size :][:size], b"")
    assert [found["text"], found[text]] == [text, 1]
    assert len(found["text"]) == len(text)


def test_a_frame_that_is_too_large_is_refused_on_both_sides(monkeypatch):
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 100)
    with pytest.raises(ServiceError, match="above the limit of 100"):
        frames.encode({"text": "x" * 200})
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.sendall(frames.HEADER.pack(200, 0))
        with pytest.raises(ServiceError, match="above the limit of 100"):
            frames.receive(theirs)


async def test_half_a_frame_is_the_other_sides_end():
    mine, theirs = socket.socketpair()
    mine.sendall(frames.encode({"a": 1}) + frames.encode({"b": 2})[:-3])
    mine.close()
    reader, writer = await asyncio.open_unix_connection(sock=theirs)
    assert (await frames.read_frame(reader))["a"] == 1
    assert await frames.read_frame(reader) is None
    writer.close()
    mine, theirs = socket.socketpair()
    mine.sendall(frames.encode({"b": 2})[:-3])
    mine.close()
    with theirs:
        assert frames.receive(theirs) is None


def test_an_object_is_not_sent():
    with pytest.raises(TypeError):
        frames.encode({"x": object()})
