"""`python -m mettle.trainer`: exit codes, signals, one line for what a person did wrong."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mettle.processes.beats import BEATS_FOLDER, read_beats, waits_of
from mettle.storage.ledger import Ledger
from mettle.storage.weights import read_version
from mettle.trainer.config import LoraConfig
from mettle.trainer.process import main

pytestmark = pytest.mark.usefixtures("forked")

SOURCE = Path(__file__).parents[2] / "src"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


def start(run_dir):
    command = [sys.executable, "-m", "mettle.trainer", str(run_dir)]
    environment = {**ENVIRONMENT, BEATS_FOLDER: str(run_dir / "beats")}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def finish(run_dir):
    process = start(run_dir)
    _, errors = process.communicate(timeout=1000)
    return process.returncode, errors


def wait_until(process, condition):
    for _ in range(30_000):
        if condition():
            return
        assert process.poll() is None, process.communicate()[1]
        try:
            process.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("the trainer did not get there")


def test_the_config_imports_without_torch():
    code = "import sys, mettle.trainer.config, mettle.trainer.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT).returncode == 0


def test_a_mistake_is_one_line_and_exit_code_2(make_run, tmp_path, capsys, monkeypatch):
    """Found before anything is set up, so that it needs no process of its own."""
    for name in ("", "mettle"):  # an earlier test's handlers write to its own, closed output
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    assert main([str(tmp_path / "nowhere")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    run_dir = make_run(shipped=1, max_steps=1)
    run_dir.config("trainer").write_text('{"max_stepz": 3}')
    assert main([str(run_dir.path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "max_stepz" in line
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "usage: python -m mettle.trainer RUN_DIR" in capsys.readouterr().err


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_replay_without_its_batches_is_one_line_for_a_person(make_run):
    run_dir = make_run(shipped=1, max_steps=1)
    for path in run_dir.batches.glob("*.npz"):
        path.unlink()
    code, errors = finish(run_dir.path)
    assert code == 2, errors
    assert len(errors.splitlines()) == 1
    assert "is gone" in errors


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_sigterm_ends_a_waiting_trainer_with_0_and_a_checkpoint(make_run):
    run_dir = make_run(shipped=1, max_steps=9, interval=50)
    process = start(run_dir.path)
    ledger = Ledger(run_dir.ledger)
    wait_until(process, lambda: waits_of(read_beats(run_dir.beats)))
    process.send_signal(signal.SIGTERM)
    assert process.wait(400) == 0
    process.communicate()
    assert read_beats(run_dir.beats) == {}
    assert (run_dir.checkpoints / "step-1" / "manifest.json").exists()
    ledger.close()


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("lora", [None, pytest.param(LoraConfig(rank=4), marks=pytest.mark.nightly)])
def test_a_process_killed_with_sigkill_resumes_to_the_same_bytes(make_run, lora):
    whole, killed = (make_run(name, shipped=6, max_steps=6, interval=4, lora=lora) for name in ("whole", "killed"))
    assert finish(whole.path) == (0, "")
    process = start(killed.path)
    wait_until(process, lambda: (killed.version(2) / "manifest.json").exists())
    process.kill()
    process.communicate()
    assert finish(killed.path)[0] == 0
    digests = [[read_version(run.version(version)).digest for version in range(7)] for run in (whole, killed)]
    assert digests[0] == digests[1]
