"""Which base models the setting offers, and which process a state leads to."""

import os

import pytest

from mettle.errors import UserError
from mettle.hub.training_service.offers import ServiceState, offers_of, read_state, write_state


@pytest.fixture
def models(tmp_path):
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return tmp_path


def test_a_model_is_offered_under_its_own_name_or_another(models):
    small, large = offers_of(models, ["small", "large=Qwen/Qwen3-8B"])
    assert (small.name, small.model_name, small.path) == ("small", "small", models / "small")
    assert (large.name, large.model_name) == ("large", "Qwen/Qwen3-8B")


@pytest.mark.parametrize("entries", [["none"], ["../small"], [""], ["small", "small=other"], ["small/"]])
def test_what_is_not_there_is_refused_by_name(models, entries):
    with pytest.raises(UserError, match="train_models"):
        offers_of(models, entries)


def test_a_state_leads_to_no_process_that_has_ended(tmp_path):
    assert read_state(tmp_path, "small").words == "starting"
    write_state(tmp_path, "small", ServiceState("http://127.0.0.1:1", "key", os.getpid()))
    assert read_state(tmp_path, "small").is_ready
    write_state(tmp_path, "small", ServiceState("http://127.0.0.1:1", "key", 2**22 + 1))
    assert not read_state(tmp_path, "small").is_ready
    write_state(tmp_path, "small", ServiceState(why="it has no tokenizer"))
    assert read_state(tmp_path, "small").words == "not ready: it has no tokenizer"
