"""`model_dump(include=, exclude=)`, as pydantic has them."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from mettle.records.fields import selected


class Inner(BaseModel):
    """A field with fields."""

    x: int = 1
    y: int | None = None


class Outer(BaseModel):
    """A record as authors write them."""

    a: int = 1
    b: str = "b"
    inner: Inner = Inner()
    many: list[Inner] = [Inner(x=1), Inner(x=2)]


@pytest.mark.parametrize(
    "fields",
    [
        {"include": {"a"}},
        {"include": {"a", "inner"}},
        {"include": {"inner": {"x"}}},
        {"exclude": {"b"}},
        {"exclude": {"inner": {"y"}, "a": True}},
        {"exclude": {"inner": ...}},
        {"include": {"many": {0}}},
        {"include": {"many": {"__all__": {"x"}}}},
        {"exclude": {"many": {"__all__": {"y"}}}},
        {"exclude": {"many": {-1: True}}},
        {"include": {"a", "b"}, "exclude": {"b"}},
        {"include": set()},
        {"exclude": {"nobody"}},
        {},
    ],
    ids=lambda fields: repr({k: sorted(v, key=str) if isinstance(v, set) else v for k, v in fields.items()}),
)
def test_fields_are_chosen_as_pydantic_chooses_them(fields):
    assert selected(Outer().model_dump(), **fields) == Outer().model_dump(**fields)
