"""What is chosen where a person has not."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from mettle.inference.config import InferenceConfig, ServeConfig

MODEL = Path("model")


@pytest.mark.parametrize(("cores", "in_a_run", "alone"), [(1, 1, 1), (2, 1, 1), (4, 1, 3), (8, 3, 7), (64, 8, 8)])
def test_threads_are_chosen_from_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, in_a_run: int, alone: int
) -> None:
    monkeypatch.setattr("mettle.inference.config.usable_cores", lambda: cores)
    assert (InferenceConfig(model=MODEL).threads, ServeConfig(model=MODEL).threads) == (in_a_run, alone)
    assert InferenceConfig(model=MODEL, num_threads=5).threads == 5


def test_a_level_that_logging_does_not_know_is_refused() -> None:
    assert InferenceConfig(model=MODEL, log_level="debug").log_level == "debug"
    with pytest.raises(ValidationError, match="there is no level 'chatty'; there are DEBUG, INFO"):
        InferenceConfig(model=MODEL, log_level="chatty")
