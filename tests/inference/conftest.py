"""Fixtures: tiny policies, in memory and on disk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent))  # for `policies`; pytest's importlib mode leaves sys.path alone

from policies import make_model, save_policy, tiny_config


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return make_model(tiny_config())


@pytest.fixture(scope="session")
def other_model() -> PreTrainedModel:
    return make_model(tiny_config(), seed=1)


@pytest.fixture(scope="session")
def policy_folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(model, tmp_path_factory.mktemp("policy"))
