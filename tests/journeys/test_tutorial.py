"""The tutorial from data to training is run as it stands, only with less training."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.forking import forked_command

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorials" / "from-data-to-training.md"
SHORTER = (
    " --max-steps 2 --warm_up.sft.target_reward 0 --warm_up.sft.probe.first_step 10 --warm_up.sft.probe.num_prompts 8"
    " --orchestrator.batch_size 32 --orchestrator.group_size 8 --orchestrator.eval.num_examples 4 --orchestrator.filter_zero_advantages false"
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]


def commands():
    """The indented lines of the page."""
    return re.findall(r"^    (\S.*)$", PAGE.read_text(), re.MULTILINE)


@pytest.fixture
def shell(tmp_path, forked):
    """Runs lines in one folder after the other, with `mettle` on the path."""
    shim = tmp_path / "bin" / "mettle"
    shim.parent.mkdir()
    path = f"{shim.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "HOME": str(tmp_path)}
    state = tmp_path / "state"

    def run(line):
        # Where a line leaves the shell, and what it sets, is there for the next one.
        script = f'cd "$(cat {state}.cwd)"; . {state}.env\n{line}\ncode=$?; pwd > {state}.cwd; set | grep ^POLICY= > {state}.env; exit $code'
        return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=1000)

    (tmp_path / "work").mkdir()
    Path(f"{state}.cwd").write_text(str(tmp_path / "work"))
    Path(f"{state}.env").write_text("")
    with forked_command(shim):
        yield run


def test_every_command_of_the_tutorial_works(shell):
    lines = commands()
    assert len(lines) >= 14
    said = {}
    for line in lines:
        asked = line + SHORTER if line.startswith("mettle rl run") else line
        done = shell(asked)
        # A policy that has hardly trained may well fail the check of its evaluation: that is what the check is for.
        assert done.returncode == 0 or line.startswith("mettle eval check"), (asked, done.stdout, done.stderr)
        said[line] = done.stdout
    assert "numeric, confidence 96% (measured on labelled columns)" in said["mettle data inspect questions.jsonl"]
    assert "sums 0.1.0: pass" in said["mettle env check sums"]
    assert "40 tasks in both" in next(text for line, text in said.items() if line.startswith("mettle eval compare"))
