"""A plan measures the real thing in a scratch folder, and says what a person needs."""

from pathlib import Path

import pytest

from mettle.errors import UserError
from mettle.runs.launch import load_run_config
from mettle.runs.plan import plan, plan_lines
from mettle.runs.quickstart import config_files


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.nightly  # in one process: `trainer/test_plan.py`
@pytest.mark.timeout(600)
def test_the_quickstart_with_adapters_is_planned():
    overrides = ["--model.lora.rank", "4", "--max_steps", "50", "--trainer.scheduler.warmup_steps", "5"]
    found = plan(load_run_config(config_files(is_hard=False), overrides))
    assert found["measured"]["max_tokens"] == 8192
    assert found["measured"]["micro_rollouts"] == found["measured"]["num_sequences"] == 256
    assert found["step_s"] >= max(found["train_s"], found["sample_s"])
    assert 2e8 < found["memory_bytes"] < 4e9
    lines = plan_lines(found)
    assert [line.split()[0] for line in lines[-2:]] == ["memory", "measured"]
    assert 0 < found["measured"]["cpu_share"] <= 1
    with pytest.raises(UserError, match="no linear module of this model is called 'qkv'"):
        plan(load_run_config(config_files(is_hard=False), ["--model.lora.target_modules", '["qkv"]']))


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(Exception, match="it said nothing"):
        plan(load_run_config(config_files(is_hard=False), []))
    assert list(Path(tmp_path).iterdir()) == []
