"""Compressed bodies: unpacked up to a limit."""

from __future__ import annotations

from contextlib import suppress

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from mettle.errors import UserError
from mettle.trainer.service.wire.bodies import unpacked


def test_a_body_is_unpacked():
    body = b"tokens" * 100
    assert unpacked(zstandard.compress(body), "zstd", max_bytes=600) == body
    assert unpacked(body, "", max_bytes=1) is body


def test_a_bomb_is_refused_before_it_fills_the_memory():
    with pytest.raises(UserError, match="1,000 bytes"):
        unpacked(zstandard.compress(bytes(1 << 26)), "zstd", max_bytes=1000)


@given(st.binary(max_size=60), st.sampled_from(["zstd", "gzip", "x" * 99]))
def test_any_bytes_are_a_body_or_one_line(body, encoding):
    with suppress(UserError):
        assert len(unpacked(body, encoding, max_bytes=100)) <= 100
