"""What a person may submit: the field's body and its TOML, models and environments that are offered, and no more."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mettle.hub.training.submission import Submission, as_toml, offered_models, run_config
from mettle.web.problems import HttpError

TOML = """
model = "tiny"
max_steps = 3
batch_size = 32
rollouts_per_example = 8
[sampling]
max_tokens = 8
[[env]]
id = "mettle/reverse-text"
args = { reward = "ratio" }
"""
BODY = {
    "model": {"name": "tiny"}, "environments": [{"id": "reverse-text", "args": {"reward": "ratio"}}], "max_steps": 3,
    "batch_size": 32, "rollouts_per_example": 8, "max_tokens": 8, "secrets": [], "name": "mine",
}  # fmt: skip


def submitted(**changes):
    return Submission.model_validate({**BODY, **changes})


def test_the_fields_body_and_its_toml_say_the_same(tmp_path):
    configs = [
        run_config(asked, offered_models(tmp_path))[0]
        for asked in (submitted(), Submission.model_validate(tomllib.loads(TOML)))
    ]
    assert configs[0] == configs[1]
    assert configs[0]["orchestrator"]["sampling"] == {"max_tokens": 8}
    assert configs[0]["orchestrator"]["envs"] == [{"id": "reverse-text", "args": {"reward": "ratio"}}]


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer": {"optim": {"lr": 1}}}, {"run_config": {"x": 1}}, {"sampling": {"extra": 1}}, {"eval": {"odd": 1}},
        {"checkpoint_id": "x"}, {"deployment": {"hub": True}}, {"loss": "opd"},
        {"wandb": {"mode": "offline"}}, {"monitoring": {"other": {"x": 1}}}, {"compute_size": "H100"}, {"buffer": {"x": 1}},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_what_would_change_the_result_and_is_not_offered_is_refused(changes):
    with pytest.raises(ValidationError, match="not offered for hosted runs here"):
        submitted(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "../../etc"}, "is not offered here; there are tiny"),
        ({"environments": [{"id": "bob/none"}]}, "is not installed on the Hub's machine"),
        ({"environments": [{"id": "json"}]}, "is no environment on the Hub's machine"),
        ({"environments": [{"id": "reverse-text@9.9"}]}, "not 9.9"),
        ({"batch_size": 33}, "batch_size"),
        ({"temperature": -1.0}, "temperature"),
    ],
    ids=["model", "environment", "any module", "version", "sizes", "temperature"],
)
def test_what_cannot_run_is_refused_before_it_is_queued(tmp_path, changes, words):
    with pytest.raises(HttpError, match=words) as refused:
        run_config(submitted(**changes), offered_models(tmp_path))
    assert refused.value.status == 422


def test_tracking_elsewhere_is_refused_where_its_package_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("mettle.runs.tracking.find_spec", lambda name: None)
    with pytest.raises(HttpError, match="is not installed on the Hub's machine") as refused:
        run_config(submitted(monitoring={"wandb": {"project": "x"}}), offered_models(tmp_path))
    assert refused.value.param == "wandb"


def test_tracking_elsewhere_needs_its_key_among_the_secrets(hub, monkeypatch):
    monkeypatch.setattr("mettle.runs.tracking.find_spec", lambda name: object())
    bob, body = hub.with_token("bob"), {**BODY, "wandb": {"project": "x", "entity": "us"}}
    refused = bob.post("/api/v1/rft/runs", json=body)
    assert (refused.status_code, refused.json()["param"]) == (422, "wandb")
    assert (
        hub.signed_in("bob").form("/secrets/bob", action="secret", name="WANDB_API_KEY", value="x").status_code == 303
    )
    run = bob.post("/api/v1/rft/runs", json=body).json()["run"]
    assert run["runConfig"]["tracking"] == {"wandb": {"project": "x", "entity": "us"}}


def test_models_are_the_directories_that_hold_one(tmp_path):
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    assert [each.name for each in offered_models(tmp_path)] == ["tiny", "big"]
    config = run_config(submitted(model="big", lora_alpha=16), offered_models(tmp_path))[0]
    assert config["model"] == {"path": str(tmp_path / "big"), "lora": {"alpha": 16}}
    assert "warm_up" not in config


values = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), values, max_size=4))
def test_any_config_is_written_as_toml_that_reads_back(config):
    assert tomllib.loads(as_toml(config)) == config
