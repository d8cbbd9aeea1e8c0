"""Checkpoints without a ledger: how often they are written, and whose training goes on from them."""

import pytest
from tests.trainer.conftest import make_learner

from mettle.errors import UserError
from mettle.trainer.saves import Saves, Unfinished


def test_the_state_is_saved_as_often_as_is_asked(mini_model, tmp_path):
    clock = [0.0]
    saves = Saves(tmp_path / "saves", make_learner(mini_model), 10.0, now=lambda: clock[0])
    kept = {}
    for step in range(1, 40):
        clock[0] += 1.0
        saves.save_if_due(step)
        kept[step] = sorted(path.name for path in (tmp_path / "saves").glob("*"))
    assert (kept[9], kept[10], kept[19], kept[20], kept[39]) == ([], ["step-10"], ["step-10"], ["step-20"], ["step-30"])


def test_a_state_that_takes_long_to_write_is_written_less_often(mini_model, tmp_path):
    clock = iter(range(0, 10_000, 2))  # each look at the clock is 2 s after the one before, and so is each write's end
    saves = Saves(tmp_path / "saves", make_learner(mini_model), 1.0, now=lambda: float(next(clock)))
    saved = set()
    for step in range(1, 60):
        saves.save_if_due(step)
        saved |= {path.name for path in (tmp_path / "saves").glob("*")}
    assert saved == {"step-1", "step-21", "step-41"}  # 2 s in 42


def test_only_what_was_begun_goes_on(tmp_path):
    unfinished = Unfinished(tmp_path / "out")
    with unfinished.begun({"lr": 1e-3, "lora": {"target_modules": ("a", "b")}}):
        pass
    with unfinished.begun({"lr": 1e-3, "lora": {"target_modules": ("a", "b")}}):
        pass
    with (
        pytest.raises(UserError, match=r"was begun with lr 0\.001, not 0\.002: ask for the same again.*or delete"),
        unfinished.begun({"lr": 2e-3, "lora": {"target_modules": ("a", "b")}}),
    ):
        pass


def test_one_process_at_a_time_trains_towards_a_folder(tmp_path):
    first, second = Unfinished(tmp_path / "out"), Unfinished(tmp_path / "out")
    with first.begun({}), pytest.raises(UserError, match="another process is training"), second.begun({}):
        pass
    with second.begun({}):
        second.remove()
    assert not list(tmp_path.iterdir())
