"""A run's engine with a door, on the tiny policies of this room, and workers that join it in this process."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `policies`
sys.path.insert(0, str(Path(__file__).parent))  # for `houses`

from houses import OpenHouse
from policies import publish


@pytest.fixture(scope="session")
def versions(model: PreTrainedModel, other_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`v1` and `v2`, which are different models."""
    root = tmp_path_factory.mktemp("versions")
    publish(model, root, 1)
    publish(other_model, root, 2)
    return root


@pytest.fixture
async def house(policy_folder: Path, tmp_path: Path) -> AsyncIterator[OpenHouse]:
    opened = await OpenHouse.open(policy_folder, tmp_path / "outside")
    yield opened
    await opened.close()
