"""The loop in the how-to of training from Python, word for word, against an engine in a process of its own."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from tests.inference.started import started

from mettle.trainer.policy import write_policy
from mettle.trainer.presets import PolicyConfig
from mettle.web.keys import ADMIN_KEY_ENV

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked")]

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "train-from-python.md"
(LOOP,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
MINI = PolicyConfig(num_layers=2, hidden_size=32, mlp_size=48, num_heads=2, num_kv_heads=1, head_dim=16, init_std=0.4)


@pytest.fixture
def served(tmp_path, monkeypatch):
    """(folder, base URL) of a policy behind the embedded engine."""
    model = write_policy(tmp_path / "model", MINI)
    monkeypatch.setenv(ADMIN_KEY_ENV, "secret")
    with started(tmp_path, model=model, max_model_len=128) as (_, endpoint):
        yield model, endpoint["base_url"]


def test_the_parts_train_a_policy_and_the_engine_serves_each_version(served, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, url = served
    text = LOOP.replace('"http://127.0.0.1:8000/v1", Path("models/tiny"), 20', f'"{url}", Path("{model}"), 2')
    assert text != LOOP
    names = {"__name__": "guide"}
    exec(compile(text, str(GUIDE), "exec"), names)
    curve = asyncio.run(names["train"]())
    assert len(curve) == 2
    assert all(0 < reward < 1 for reward in curve)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["v1", "v2"]

    async def version() -> int:
        engine = names["ServerClient"](lambda: url, "secret")
        try:
            return int((await engine.health())["version"])
        finally:
            await engine.close()

    assert asyncio.run(version()) == 2
