"""A run whose two engines get each version by collective, one broadcast for both, and every account holds."""

import json
from pathlib import Path

import pytest
from stories import Run


@pytest.mark.nightly
def test_two_replicas_get_their_versions_by_collective(tmp_path: Path) -> None:
    run = Run(tmp_path, "--inference.replicas", "2", "--trainer.weight_broadcast", "gloo", steps=4)
    try:
        assert run.end() == 0, run.said()
        run.check_accounts()
    finally:
        run.close()
    lines = [json.loads(line) for line in (run.run_dir.logs / "trainer.log").read_text().splitlines()]
    sent = [line for line in lines if line["message"] == "broadcast weights"]
    assert {line["version"] for line in sent} >= {"v1", "v2", "v3"}
    assert sum(line["acknowledged"] for line in sent) >= 6
    assert not [line for line in lines if "broadcast failed" in line["message"]]
