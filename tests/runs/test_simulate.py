"""What a run would do on other numbers of devices: the times are measured, the rest is the real orchestrator."""

import json

import pytest

from mettle.cli.main import main
from mettle.errors import UserError
from mettle.orchestrator.config import OrchestratorConfig
from mettle.orchestrator.simulator import SimulatedWorld, simulate
from mettle.processes.virtual_time import run_virtually
from mettle.runs.simulate import RunTimes, fit_pace, layouts, measure, predict
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir


def config(**changes):
    values = {"max_steps": 12, "batch_size": 8, "group_size": 4, "envs": [{"id": "words"}], "eval": {"num_examples": 0}}
    return OrchestratorConfig.model_validate({**values, **changes})


def seen(**changes):
    values = {
        "train_s": 1.0, "publish_s": 0.0, "update_s": 0.0, "model_s": (1.0,), "other_s": (0.0,), "beside": (7.0,),
        "equal_rate": 0.0, "error_rate": 0.0, "num_steps": 10, "wall_s": 20.0, "tokens": 4.0,
    }  # fmt: skip
    return RunTimes(**{**values, **changes})


def test_a_run_bound_by_its_trainer_takes_the_trainers_time():
    found = predict(config(), seen(train_s=5.0), num_engines=1, num_ranks=1)
    assert found["step_s"] == pytest.approx(5.0, rel=0.05)
    assert found["trainer_idle"] < 0.05
    assert found["engines_idle"] > 0.5


def test_a_run_bound_by_a_slow_judge_gains_nothing_from_engines():
    slow = seen(train_s=0.01, other_s=(6.0,))
    one, four = (predict(config(), slow, num_engines=n, num_ranks=1) for n in (1, 4))
    assert four["step_s"] == pytest.approx(one["step_s"], rel=0.02)
    assert one["trainer_idle"] > 0.9


def test_engines_that_are_shared_by_fewer_rollouts_are_faster():
    crowded = seen(train_s=0.01, model_s=(2.0, 4.0, 8.0), beside=(1.0, 3.0, 7.0), other_s=(0.0,) * 3)
    pace = fit_pace(crowded, 1)
    assert (pace.base_s, pace.each_s) == (pytest.approx(0.0, abs=1e-9), pytest.approx(1.0))
    one, four = (predict(config(), crowded, num_engines=n, num_ranks=1) for n in (1, 4))
    assert four["step_s"] < 0.4 * one["step_s"]


def test_a_pace_is_never_negative_whatever_was_measured():
    for model_s, beside in (((8.0, 2.0), (1.0, 9.0)), ((1.0, 9.0), (0.0, 1.0)), ((3.0, 3.0), (2.0, 2.0))):
        pace = fit_pace(seen(model_s=model_s, beside=beside), 2)
        assert pace.base_s >= 0
        assert pace.each_s >= 0
        assert sum(pace.shares) / len(pace.shares) == pytest.approx(1.0)


def test_further_trainer_ranks_shorten_a_step_by_less_than_their_number():
    one, two = (predict(config(), seen(train_s=8.0), num_engines=1, num_ranks=n) for n in (1, 2))
    assert one["step_s"] / 2 < two["step_s"] < one["step_s"] / 1.5


def test_the_same_seed_gives_the_same_prediction_and_stays_within_the_staleness():
    slow = seen(model_s=(0.5, 3.0), beside=(7.0, 7.0), other_s=(0.0, 0.0), equal_rate=0.2)
    first, again = (predict(config(max_lag=1), slow, num_engines=1, num_ranks=1, seed=3) for _ in range(2))
    assert first == again
    assert 0 < first["staleness_max"] <= 2


@pytest.mark.parametrize(
    ("gpus", "ranks", "expected"),
    [(1, None, [(1, 1)]), (2, None, [(1, 1)]), (8, None, [(7, 1), (6, 2), (4, 4)]), (8, 2, [(6, 2)])],
)
def test_devices_are_divided_between_engines_and_trainer(gpus, ranks, expected):
    assert layouts(gpus, num_ranks=ranks) == expected


def test_a_trainer_that_takes_all_devices_is_refused():
    with pytest.raises(UserError, match="leave no engine of 4 GPUs"):
        layouts(4, num_ranks=4)


def a_run(folder, *, max_steps=12, **world):
    """A run whose every time is known."""
    run_virtually(simulate(folder, config(max_steps=max_steps), SimulatedWorld(**world)))
    with Ledger(RunDir(folder).ledger).database.transaction() as connection:
        for step in range(1, max_steps + 1):
            connection.execute(
                "INSERT OR REPLACE INTO metrics (name, step, value, at) VALUES ('time/step_s', ?, 2.0, 0)", (step,)
            )
        connection.execute("UPDATE rollouts SET duration_s = 1.0, model_s = 0.75")
    return folder


def test_the_times_of_a_run_are_read_from_its_ledger(tmp_path):
    found = measure(a_run(tmp_path / "run", train_s=2.0, rollout_s=0.2))
    assert found.train_s == 2.0
    assert set(found.model_s) == {0.75}
    assert set(found.other_s) == {0.25}
    assert found.num_steps == 11
    assert found.wall_s / found.num_steps == pytest.approx(2.0, rel=0.2)


def test_a_run_that_says_too_little_is_refused(tmp_path):
    with pytest.raises(UserError, match="take a run of at least 4"):
        measure(a_run(tmp_path / "run", max_steps=2))


def ended(arguments):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    return raised.value.code or 0


def test_the_command_line_says_it_in_five_lines_and_in_json(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    a_run(tmp_path / "run", train_s=2.0)
    (tmp_path / "run.toml").write_text(
        '[orchestrator]\nbatch_size = 8\ngroup_size = 4\nenvs = [{ id = "reverse-text" }]\n'
    )
    given = ["rl", "simulate", "run.toml", "--max_steps", "12", "--from", str(tmp_path / "run"), "--gpus", "512"]
    assert ended(given) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == ["measured", "layout", "predicted", "idle", "staleness"]
    assert ended([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted"]["num_engines"] > 400
