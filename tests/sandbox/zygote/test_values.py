"""Values cross with their types, and bytes that are no value are refused."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from plain_values import plain

from mettle.sandbox.zygote import values


def same(a: Any, b: Any) -> bool:
    """Equal, with equal types at every depth, and nan the same as nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@given(plain)
@settings(deadline=None)
def test_a_value_comes_back_with_its_types(value: Any) -> None:
    assert same(values.decode(values.encode(value)), value)


@given(st.binary(max_size=200) | plain.map(lambda value: values.encode(value)[:-1]))
@settings(deadline=None)
def test_bytes_that_are_no_value_are_refused_and_nothing_else_happens(data: bytes) -> None:
    try:
        values.decode(data)
    except values.UnencodableValue:
        return
    assert same(values.decode(values.encode(values.decode(data))), values.decode(data))
