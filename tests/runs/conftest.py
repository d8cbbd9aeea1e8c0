"""What the tests of whole runs share is in `stories`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `stories`; pytest's importlib mode leaves sys.path alone

from stories import CONFIG


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path
