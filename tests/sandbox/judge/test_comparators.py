"""Values and outputs are compared as the rule says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_values import plain

from mettle.sandbox import StdioTest
from mettle.sandbox.judge.comparators import outputs_match, values_match


@given(plain)
@settings(deadline=None)
def test_a_value_matches_itself_unless_it_is_nan(value: Any) -> None:
    assert values_match(value, value, "typed", None) or "nan" in repr(value)


@pytest.mark.parametrize(
    ("value", "expected", "rule", "tolerance", "matches"),
    [
        (1, 1, "typed", None, True),
        (True, 1, "typed", None, False),
        (True, 1, "numeric", None, False),
        (1.0, 1, "typed", None, False),
        (1.0, 1, "numeric", None, True),
        ((1, [2]), [1, (2,)], "typed", None, True),
        ([1, 2], [1], "typed", None, False),
        (0.1 + 0.2, 0.3, "typed", None, False),
        (0.1 + 0.2, 0.3, "typed", 1e-9, True),
        (10**18 + 1, 10**18, "numeric", 1e-6, False),
        (float("nan"), float("nan"), "typed", 1.0, False),
        (float("inf"), float("inf"), "typed", None, True),
        (float("inf"), 1e308, "typed", 1.0, False),
        ({1: "a"}, {True: "a"}, "typed", None, False),
        ({"a": 1.0}, {"a": 1}, "numeric", None, True),
        ({1, 2}, {2, 1}, "typed", None, True),
        (10**400, 1.5, "numeric", 0.1, False),
        ("a", b"a", "typed", None, False),
    ],
)
def test_values_are_compared_by_type(value: Any, expected: Any, rule: Any, tolerance: Any, matches: bool) -> None:
    assert values_match(value, expected, rule, tolerance) is matches


@pytest.mark.parametrize(
    ("output", "expected", "rule", "matches"),
    [
        (b"1 2\n", b"1 2", "exact", False),
        (b"1 2 \r\n\n", b"1 2", "trim", True),
        (b"1  2\n", b"1 2", "trim", False),
        (b"1\n2", b"1 2", "tokens", True),
        (b"1.0", b"1", "tokens", False),
        (b"1.0000001", b"1.0", "floats", True),
        (b"1.1", b"1.0", "floats", False),
        (b"50000000000000001", b"50000000000000000", "floats", False),
        (b"50000000000000000.0", b"50000000000000001", "floats", False),
        (b"nan", b"1.0", "floats", False),
        (b"nan", b"nan", "floats", True),
        (b"1e999", b"1.0", "floats", False),
        (b"inf", b"1e308", "floats", False),
        (b"0x1", b"1.0", "floats", False),
        (b"1_0.0", b"10.0", "floats", False),
        (b"1.0 2.0", b"1.0", "floats", False),
        (b"", b"", "tokens", True),
    ],
)
def test_outputs_are_compared_by_the_rule(output: bytes, expected: bytes, rule: Any, matches: bool) -> None:
    assert outputs_match(output, expected, StdioTest(compare=rule)) is matches


@pytest.mark.parametrize(
    ("output", "expected", "rule", "matches"),
    [
        (b"\n 1 2 \n3\n", b"1 2\n3", {"compare": "lines"}, True),
        (b"1  2", b"1 2", {"compare": "lines"}, False),
        (b"1\n2", b"1 2", {"compare": "lines"}, False),
        (b"b\na\n", b"a\nb", {"compare": "lines", "any_order": True}, True),
        (b"b\na\na", b"a\nb\nb", {"compare": "lines", "any_order": True}, False),
        (b"b\na \n\n", b"a\nb", {"compare": "trim", "any_order": True}, True),
        (b"3 1\n2", b"1 2 3", {"any_order": True}, True),
        (b"3 1 1", b"1 3 3", {"any_order": True}, False),
        (b"YES\n", b"yes", {"ignore_case": True}, True),
        (b"YES\n", b"yes", {}, False),
        (b"Yes", b"yes\n", {"compare": "exact", "ignore_case": True}, False),
        (b"1.0 2\n3.50", b"1 2.00\n3.5", {"compare": "decimals"}, True),
        (b"1.0000001", b"1", {"compare": "decimals"}, False),
        (b"1 2", b"1\n2", {"compare": "decimals"}, False),
        (b"nan", b"NaN", {"compare": "decimals"}, False),
        (b"1_0", b"10", {"compare": "decimals"}, False),
        (b"1e3", b"1000", {"compare": "decimals"}, True),
        (b"1e99999999", b"1", {"compare": "decimals"}, False),
        (b"x 1.0", b"x 1", {"compare": "decimals"}, False),
        (b"100.5", b"100.0", {"compare": "floats", "abs_tolerance": 0, "rel_tolerance": 0.01}, True),
        (b"0.5", b"0.0", {"compare": "floats", "abs_tolerance": 0, "rel_tolerance": 0.01}, False),
        (b"0.5", b"0.0", {"compare": "floats", "abs_tolerance": 1}, True),
        (b"1e9", b"1.0", {"compare": "floats", "rel_tolerance": 0.999999}, False),
        (b"1.0", b"1.0", {"compare": "floats", "tolerance": 0}, True),
        (b"1e308", b"1e999", {"compare": "floats"}, False),
        (b"\xff\xfe", b"\xff\xfe", {"compare": "lines"}, True),
    ],
)
def test_rules_of_the_fields_benchmarks(output: bytes, expected: bytes, rule: dict[str, Any], matches: bool) -> None:
    assert outputs_match(output, expected, StdioTest(**rule)) is matches


@given(st.binary(max_size=60), st.sampled_from(["exact", "trim", "lines", "tokens", "floats", "decimals"]))
@settings(deadline=None)
def test_an_output_matches_itself_by_every_rule(output: bytes, rule: Any) -> None:
    assert outputs_match(output, output, StdioTest(compare=rule))
    assert outputs_match(output.upper(), output, StdioTest(compare=rule, ignore_case=True))
