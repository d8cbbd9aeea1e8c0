"""Runs while vLLM samples: each version of an adapter loaded, proven and unloaded, whole weights by collective; with the
real package and with its stand-in.

The real one wants METTLE_TEST_VLLM, the interpreter of an environment that has it (docs/how-to/serve-with-vllm.md).
"""

import json
import os
import sys
from pathlib import Path

import pytest
from stories import Run

from mettle.processes.child import import_path

STAND_IN = Path(__file__).parents[2] / "inference" / "vllm" / "stand_in"
VLLM_ENV = "METTLE_TEST_VLLM"
STEPS = 6


def settings_of(engine: str) -> list[str]:
    if engine == "vllm":
        vllm = {"python": os.environ[VLLM_ENV], "args": ["--enforce-eager"]}
    else:
        path = os.pathsep.join([str(STAND_IN), import_path()])
        vllm = {"python": sys.executable, "environment": {"PYTHONPATH": path}}
    found = ["--inference.engine", "vllm", "--inference.max_model_len", "64", "--inference.max_slots", "64"]
    return [*found, *(part for name, value in vllm.items() for part in (f"--inference.vllm.{name}", _toml(value)))]


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {json.dumps(item)}" for name, item in value.items()) + " }"
    return value if isinstance(value, str) else json.dumps(value)


engines = pytest.mark.parametrize(
    "engine",
    [
        "vllm-stand-in",
        pytest.param(
            "vllm", marks=pytest.mark.skipif(not os.environ.get(VLLM_ENV), reason=f"{VLLM_ENV} names no interpreter")
        ),
    ],
)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@engines
def test_each_version_of_a_run_s_adapter_is_proven_on_vllm_and_old_ones_go(tmp_path: Path, engine: str) -> None:
    run = Run(tmp_path, *settings_of(engine), "--model.lora.rank", "4", "--trainer.optim.lr", "1e-2", steps=STEPS)
    try:
        assert run.end(1000.0) == 0, run.said()
        run.check_accounts()
        versions = run.read(lambda ledger: ledger.versions(), [])
        served = [row for row in versions if row.acked_at is not None]
        assert served[-1].weights.version >= STEPS - 1
        assert all(row.weights.kind == "lora" for row in served)
        assert all(row.canary is not None and row.canary.mean_abs_diff < 1e-5 for row in served)
    finally:
        run.close()
    if engine == "vllm":
        said = (run.run_dir.logs / "vllm.out").read_text()
        loaded, unloaded = said.count("POST /v1/load_lora_adapter"), said.count("POST /v1/unload_lora_adapter")
        assert loaded >= len(served)
        assert unloaded >= loaded - 2  # the newest stays, and one may have been asked for until the end


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@engines
def test_whole_weights_come_to_vllm_by_collective(tmp_path: Path, engine: str) -> None:
    run = Run(tmp_path, *settings_of(engine), "--trainer.weight_broadcast", "gloo", steps=STEPS)
    try:
        assert run.end(1000.0) == 0, run.said()
        run.check_accounts()
        served = [row for row in run.read(lambda ledger: ledger.versions(), []) if row.acked_at is not None]
        assert all(row.canary is not None and row.canary.mean_abs_diff < 1e-5 for row in served)
    finally:
        run.close()
    said = [json.loads(line) for line in (run.run_dir.logs / "trainer.log").read_text().splitlines()]
    sent = {line["version"] for line in said if line["message"] == "broadcast weights"}
    # The last one may come after the trainer's end, and is then read from its file.
    assert {f"v{row.weights.version}" for row in served if row.weights.version < STEPS} <= sent
