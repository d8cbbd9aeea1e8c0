"""What `evaluate` gives back, in a notebook."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from mettle.errors import UserError
from mettle.evals.generated import GenerateOutputs


def row(task, reward, said="a"):
    return {
        "example_id": task, "prompt": [{"role": "user", "content": "q"}], "reward": reward,
        "completion": [{"role": "assistant", "content": said}], "answer": "1", "metrics": {"right": reward},
        "timing": {"total": 2.0}, "stop_condition": "done",
    }  # fmt: skip


@pytest.fixture
def results():
    outputs = [row(task, float(task % 2), f"<b>{task}</b>") for task in range(12)]
    metadata = {"env_id": "toy", "model": "<m>", "rollouts_per_example": 1, "pass_threshold": 0.5, "time": 3.0}
    return GenerateOutputs(outputs=outputs, metadata=metadata)


def test_a_notebook_shows_figures_and_rollouts_as_text(results):
    shown = results._repr_html_()
    assert "toy with &lt;m&gt;" in shown
    assert "0.500 (95 % interval" in shown
    assert "&lt;b&gt;3&lt;/b&gt;" in shown
    assert "<b>3" not in shown
    assert "2 more rollouts" in shown


def test_a_frame_has_a_row_a_rollout(results, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    frame = results.to_dataframe()
    assert len(frame) == 12
    assert frame[1]["reward"] == frame[1]["metric.right"] == 1.0
    assert frame[1]["example_id"] == 1


def test_without_pandas_it_says_what_is_missing(results, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="needs pandas, which is not installed: pip install pandas"):
        results.to_dataframe()
