"""What can be asked of a list of rollouts."""

from __future__ import annotations

import pytest

from mettle.errors import UserError
from mettle.evals.facts import RolloutFacts
from mettle.tui.filters import parse_filter

ROLLOUTS = {
    "solved": RolloutFacts(1, 1.0, output_tokens=100.0, num_turns=1, stop_condition="answered", metrics={"format reward": 1.0, "style": 0.2}),
    "partly": RolloutFacts(2, 0.25, output_tokens=2000.0, num_turns=5, stop_condition="max_turns_reached", is_truncated=True),
    "failed": RolloutFacts("x7", None, cause="timeout", error_type="RolloutTimeout", error_message="took 60 s"),
}  # fmt: skip


def passing(source: str) -> list[str]:
    wanted = parse_filter(source, ["style", "format reward"])
    return [name for name, facts in ROLLOUTS.items() if wanted.accepts(facts)]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("", ["solved", "partly", "failed"]),
        ("reward<0.5", ["partly"]),
        ("reward < 0.5", ["partly"]),
        ("reward>=.25 tokens<=100", ["solved"]),
        ("reward!=1", ["partly"]),
        ("!reward<0.5", ["solved", "failed"]),
        ("error", ["failed"]),
        ("-error", ["solved", "partly"]),
        ("ok !truncated", ["solved"]),
        ("passed", ["solved"]),
        ("failed", ["partly"]),
        ("error:Timeout", ["failed"]),
        ('error:"60 s"', ["failed"]),
        ("stop:max_turns", ["partly"]),
        ("task:x7", ["failed"]),
        ("task:1", ["solved"]),
        ("task>1", ["partly"]),
        ("turns==5", ["partly"]),
        ("style<0.5", ["solved"]),
    ],
)
def test_terms_all_hold(source, names):
    assert passing(source) == names


def test_texts_are_left_to_a_look_at_the_conversation():
    wanted = parse_filter("text:\"so, \\\"it's\" !text:foo 'bar baz' error")
    assert [(term.text, term.is_absent) for term in wanted.texts] == [
        ("so, \"it's", False),
        ("foo", True),
        ("bar baz", False),
    ]
    assert len(wanted.predicates) == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("rewrad<0.5", "no figure 'rewrad'; did you mean 'reward'?"),
        ("reward<low", "reward is compared with a number, not with 'low'"),
        ("truncatd", "no word 'truncatd'; did you mean 'truncated'?"),
        ("zebra", 'to look for it: text:"zebra"'),
        ("color:red", "no name 'color'; there are text, error, stop, task"),
        ('text:"open', "close the quotation mark"),
        ("text:", "text: needs something to look for"),
    ],
)
def test_what_is_not_understood_is_refused_with_what_there_is(source, message):
    with pytest.raises(UserError) as refused:
        parse_filter(source)
    assert message in str(refused.value)
