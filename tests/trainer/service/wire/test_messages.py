"""The messages: any bytes are a message or one line, and the numbers of the fields are those of the format."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.errors import UserError
from mettle.trainer.service.wire import messages


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_one_line(data):
    for kind in (messages.ForwardBackwardRequest, messages.ForwardBackwardOutput, messages.SampleResponse):
        with suppress(UserError):
            found = messages.parse(kind, data)
            assert messages.encode(messages.parse(kind, messages.encode(found))) == messages.encode(found)


def test_the_bytes_on_the_wire_are_those_of_the_format():
    """Written out by hand: a field's tag is its number times 8 plus its wire type."""
    by_hand = (
        b"\x0a\x01m"  # 1: model_id
        b"\x10\x07"  # 2: seq_id
        b"\x1a\x0a\x0a\x08\x0a\x06\x0a\x04\x05\x00\x00\x00"  # 3: a datum of a chunk of text with token 5
        b"\x22\x03ppo"  # 4: loss_fn
        b"\x30\x01"  # 6: forward_only
    )
    found = messages.parse(messages.ForwardBackwardRequest, by_hand)
    assert (found.model_id, found.seq_id, found.loss_fn, found.forward_only) == ("m", 7, "ppo", True)
    assert found.data[0].model_input[0].encoded_text.tokens == b"\x05\0\0\0"
    assert messages.encode(found) == by_hand


def test_unknown_fields_of_newer_clients_are_passed_over():
    assert messages.parse(messages.ForwardBackwardRequest, b"\x0a\x01m\xfa\x06\x02hi").model_id == "m"


def test_bytes_that_are_no_message_are_named():
    with pytest.raises(UserError, match="not a ForwardBackwardRequest message"):
        messages.parse(messages.ForwardBackwardRequest, b"\xff\xff\xff")
