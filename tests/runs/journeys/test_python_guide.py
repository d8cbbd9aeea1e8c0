"""The loop in the how-to of training from Python, word for word, against an engine in a process of its own."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
    config, ready = tmp_path / "inference.json", tmp_path / "ready.json"
    config.write_text(json.dumps({"model": str(model), "max_model_len": 128}))
    monkeypatch.setenv(ADMIN_KEY_ENV, "secret")
    command = [sys.executable, "-m", "mettle.inference", "--config", str(config), "--ready-file", str(ready)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 100
        while not ready.exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "the server was not ready in time"
            time.sleep(0.02)
        yield model, json.loads(ready.read_text())["base_url"]
    finally:
        process.kill()
        process.communicate()


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
