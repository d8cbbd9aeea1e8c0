"""Preference losses: their derivatives against finite differences, and their values where one knows them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.errors import UserError
from mettle.trainer.preferences import DEFAULT_BETA, Pairs, PreferenceLoss


def pairs(seed, number=4):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, (2, number)).astype(float)
    sums = -rng.uniform(0.05, 2.0, (4, number)) * np.concatenate([lengths, lengths])
    return Pairs(*sums, *lengths)


FORMS = [*map(PreferenceLoss, DEFAULT_BETA), PreferenceLoss("dpo", 0.5, 0.1), PreferenceLoss("simpo", 1.0, margin=0.3)]


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f.name}-{f.strength}-{f.label_smoothing}")
@given(seed=st.integers(0, 10**6))
def test_derivatives_are_those_of_the_loss(form, seed):
    given_pairs = pairs(seed)
    found = form.of(given_pairs)
    for name, slopes in (("chosen", found.by_chosen), ("rejected", found.by_rejected)):
        for i in range(4):
            nudge = np.zeros(4)
            nudge[i] = 1e-6
            ends = [
                form.of(replace(given_pairs, **{name: getattr(given_pairs, name) + s * nudge})).loss for s in (1, -1)
            ]
            assert slopes[i] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f.name}-{f.strength}-{f.label_smoothing}")
def test_a_step_makes_the_chosen_answer_likelier_than_the_rejected_one(form):
    found = form.of(replace(pairs(0), reference_chosen=pairs(0).chosen, reference_rejected=pairs(0).rejected))
    assert (found.by_chosen < 0).all()
    assert (found.by_rejected > 0).all()


def test_at_the_reference_dpo_is_log_2_and_prefers_nothing():
    one = pairs(1)
    found = PreferenceLoss("dpo").of(replace(one, reference_chosen=one.chosen, reference_rejected=one.rejected))
    assert found.loss == pytest.approx(np.log(2))
    assert found.by_chosen == pytest.approx([-0.1 / 2 / 4] * 4)
    assert not found.margins.any()


def test_far_off_pairs_neither_overflow_nor_pull():
    far = Pairs(*np.array([[-1.0], [-5000.0], [-1.0], [-1.0], [3.0], [3.0]]))
    for name in ("dpo", "simpo", "orpo"):
        found = PreferenceLoss(name).of(far)
        assert np.isfinite([found.loss, *found.by_chosen, *found.by_rejected]).all()
        assert found.by_rejected == pytest.approx([0.0], abs=1e-9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "kto"}, "there are dpo, ipo, simpo, orpo"),
        ({"label_smoothing": 0.5}, "below .5, not 0.5"),
        ({"name": "ipo", "label_smoothing": 0.1}, "an option of dpo, not of ipo"),
        ({"beta": 0.0}, "above 0, not 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        PreferenceLoss(**options)
