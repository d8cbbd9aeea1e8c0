"""Envelopes and messages of the command session, as other implementations write and read them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.errors import UserError
from mettle.sandbox.service import connect_rpc
from mettle.sandbox.service.connect_rpc import StartRequest, read_start

# What `connectrpc` 0.11 sends for: cmd /bin/bash, args -c "echo hi", envs A=b, cwd /tmp, stdin false, a session's uuid.
SEEN = bytes.fromhex("0000000030") + (
    b"\x0a\x26\x0a\x09/bin/bash\x12\x02-c\x12\x07echo hi\x1a\x06\x0a\x01A\x12\x01b\x22\x04/tmp\x20\x00\x2a\x04uuid"
)


def test_a_request_is_read_and_unknown_fields_are_passed_over():
    assert len(SEEN) == 5 + 0x30
    wanted = StartRequest(("/bin/bash", "-c", "echo hi"), {"A": "b"}, "/tmp")
    assert read_start(SEEN) == wanted
    more = b"\x49" + bytes(8) + b"\x55" + bytes(4) + b"\x78\x05"
    assert read_start(b"\x00" + (0x30 + len(more)).to_bytes(4, "big") + SEEN[5:] + more) == wanted


@pytest.mark.parametrize("wrong", [b"", SEEN[:-1], b"\x01" + SEEN[1:], bytes(5), b"\x00\x00\x00\x00\x02\x0a\x00"])
def test_what_is_no_request_is_refused(wrong):
    with pytest.raises(UserError):
        read_start(wrong)


@given(st.binary(max_size=60))
def test_no_message_breaks_the_reader(message):
    with contextlib.suppress(UserError):
        read_start(b"\x00" + len(message).to_bytes(4, "big") + message)


def test_what_is_sent_is_what_the_clients_read():
    assert connect_rpc.started(300) == b"\x00\x00\x00\x00\x07\x0a\x05\x0a\x03\x08\xac\x02"
    assert connect_rpc.output("stderr", b"x") == b"\x00\x00\x00\x00\x07\x0a\x05\x12\x03\x12\x01x"
    assert connect_rpc.ended(-1)[5:].startswith(b"\x0a\x16\x1a\x14\x08\x01\x10\x01\x1a\x0e")
    assert connect_rpc.last() == b"\x02\x00\x00\x00\x02{}"
