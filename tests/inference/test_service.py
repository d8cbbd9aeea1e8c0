"""What requests are called."""

from __future__ import annotations

from mettle.inference.service import counted_ids


def test_names_of_requests_differ_within_a_server_and_between_two() -> None:
    here, there = counted_ids(), counted_ids()
    names = [new_id() for _ in range(300) for new_id in (here, there)]
    assert len(set(names)) == 600
    assert {len(name) for name in names} == {32}
    assert all(set(name) <= set("0123456789abcdef") for name in names)
