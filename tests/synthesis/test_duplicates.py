"""Copies and near copies are found."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mettle.synthesis.duplicates import Seen

TEXT = "first we add the two numbers then we carry the one and so the sum of both is exactly {} as was asked"


def test_copies_are_found_whatever_their_case_and_spacing_and_near_copies_by_their_runs():
    seen = Seen(0.8)
    assert seen.verdict("q", TEXT.format("seven")) is None
    assert seen.verdict(" Q ", TEXT.format("seven").upper().replace(" ", "  ")) == "copy"
    assert seen.verdict("q", TEXT.format("seven") + " thanks") == "near copy"
    assert seen.verdict("another question altogether", TEXT.format("seven")) is None
    assert seen.verdict("q", "7") is None
    assert seen.verdict("q", "8") is None, "short answers that differ say different things"
    assert Seen(1.01).verdict("q", TEXT) is None


words = st.lists(st.sampled_from(["a", "b", "c", "d", "e", "f", "g", "h"]), min_size=8, max_size=30)


@settings(max_examples=60, deadline=None)
@given(st.lists(words, min_size=2, max_size=8))
def test_no_two_kept_texts_are_near_copies_beyond_doubt_and_all_copies_are_found(texts):
    seen, kept = Seen(0.5), []
    for text in texts:
        verdict = seen.verdict("q", " ".join(text))
        if text in kept:
            assert verdict == "copy"
        elif verdict is None:
            kept.append(text)
        else:
            runs = {tuple(text[i : i + 3]) for i in range(len(text) - 2)}
            others = [{tuple(o[i : i + 3]) for i in range(len(o) - 2)} for o in kept]
            assert any(len(runs & other) / len(runs | other) >= 0.5 for other in others)
