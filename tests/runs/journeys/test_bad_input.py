"""Bad input through the command line: one clear line, exit code 2, and nothing lost.

Each story is a person's mistake, or a machine's, in processes of its own. "Nothing lost" is checked by going on: the
run is resumed to its end and its accounts hold.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stories import CONFIG, STEPS, Run, environment, published

from mettle.storage.run_dir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run that has begun, long enough to be caught in the middle."""
    started = Run(tmp_path, steps=60)
    yield started
    started.close()


def mettle(folder: Path, *arguments: object, limit_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    """One command in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "mettle.cli", *(str(argument) for argument in arguments)],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=limit_s,
    )  # fmt: skip


def complaint(folder: Path, *arguments: object) -> str:
    """The line with which a command refuses; it must be the only one, with exit code 2."""
    done = mettle(folder, *arguments)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr.strip()


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


# Before a run is made


def refused(config: Path, *overrides: object) -> str:
    line = complaint(config.parent, "rl", "run", config, "--dir", "made", *overrides)
    assert not (config.parent / "made").exists(), "a run was made of a config that is wrong"
    return line


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_key(config):
    config.write_text(CONFIG.replace("lr = 1e-4", "lrr = 1e-4"))
    line = next(n for n, text in enumerate(config.read_text().splitlines(), start=1) if text.startswith("lrr"))
    assert refused(config).startswith(f"error: {config}:{line}: unknown key 'trainer.optim.lrr'")
    assert "did you mean 'lr'?" in refused(config)


def test_an_unknown_override_is_named_with_the_nearest_key(config):
    line = refused(config, "--orchestrator.grup-size", 8)
    assert "--orchestrator.grup-size" in line
    assert "did you mean 'group_size'?" in line


def test_a_group_of_one_has_nothing_to_compare(config):
    line = refused(config, "--orchestrator.group_size", 1)
    assert "--orchestrator.group_size" in line
    assert "set group_size to at least 2" in line


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.9), ("top_k", 5), ("min_p", 0.1)])
def test_a_sampler_that_truncates_cannot_train(config, key, value):
    line = refused(config, f"--orchestrator.sampling.{key}", value)
    assert f"--orchestrator.sampling.{key}" in line
    assert "importance ratio is biased" in line


def test_a_missing_environment_is_told_with_what_was_searched_and_the_nearest_name(config):
    line = refused(config, "--orchestrator.envs.0.id", "asci-share")
    assert "no environment 'asci-share'" in line
    assert str(Path(__file__).parents[1] / "environments") in line
    assert "did you mean 'ascii-share'?" in line


def test_a_missing_environment_of_an_evaluation_is_told_as_early(config):
    config.write_text(CONFIG + '\n[[orchestrator.eval.envs]]\nid = "reverse-txt"\n')
    assert "did you mean 'reverse-text'?" in refused(config)


def test_no_steps_are_no_run(config):
    assert "max_steps = 0" in refused(config, "--max-steps", 0)
    assert refused(config, "--max-steps", 0).startswith("error: --max-steps: ")
    assert "--steps" in complaint(config.parent, "quickstart", "--steps", 0)


def test_a_model_path_without_a_model_is_named(config, tmp_path):
    line = refused(config, "--model.path", tmp_path)
    assert line.startswith("error: --model.path: ")
    assert f"{str(tmp_path)!r} holds no model: it has no config.json" in line


def test_a_missing_config_file_is_named(tmp_path):
    assert complaint(tmp_path, "rl", "run", "nowhere.toml") == "error: no config file nowhere.toml"


def test_a_missing_run_is_told_for_every_command(tmp_path):
    for command in ("resume", "stop", "logs", "metrics"):
        assert "no run at nowhere" in complaint(tmp_path, "rl", command, "nowhere")


def test_a_run_page_on_a_port_in_use_is_refused_before_a_run_is_made(config):
    with taken_port() as port:
        line = refused(config, "--deployment.hub", "--deployment.hub-port", port)
    assert f"port {port} on 127.0.0.1 is in use" in line
    assert "deployment.hub_port" in line


def test_a_hub_on_a_port_in_use_names_it(tmp_path):
    with taken_port() as port:
        line = complaint(tmp_path, "hub", "serve", "--runs", ".", "--port", port)
    assert f"port {port} on 127.0.0.1 is in use; give another with --port" in line


def test_an_inference_server_on_a_port_in_use_names_it(tmp_path):
    made = subprocess.run(
        [sys.executable, "-c", "from mettle.trainer.policy import write_policy; from mettle.trainer.presets import preset;"
         "from pathlib import Path; write_policy(Path('policy'), preset('tiny'))"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    with taken_port() as port:
        line = complaint(tmp_path, "inference", "serve", "policy", "--port", port)
    assert f"port {port} on 127.0.0.1 is in use; give another with --port" in line


# While a run goes


@pytest.mark.slow
def test_a_reward_that_always_raises_ends_the_run_and_is_quoted(tmp_path):
    run = Run(tmp_path, "--orchestrator.envs.0.id", "raises")
    try:
        assert run.end() == 2
        assert "environment 'raises' failed every rollout" in run.complaint()
        assert "the judge has a headache" in run.complaint()
        assert run.read(lambda ledger: ledger.journal.fact("state"), None) == "failed"
    finally:
        run.close()


@pytest.mark.slow
def test_a_reward_that_raises_for_some_rollouts_costs_those_and_no_run(tmp_path):
    run = Run(tmp_path, "--orchestrator.envs.0.id", "raises", "--orchestrator.envs.0.args.every", "5")
    try:
        assert run.end() == 0, run.said()
        run.check_accounts()
        errored = run.read(
            lambda ledger: ledger.database.rows("SELECT * FROM rollouts WHERE error_kind IS NOT NULL"), []
        )
        assert len(errored) > STEPS
        assert {row["error_kind"] for row in errored} == {"judge"}
        assert all(row["reward"] is None for row in errored)
    finally:
        run.close()


@pytest.mark.slow
def test_a_run_that_is_running_is_left_alone_and_can_be_stopped_from_elsewhere(run, tmp_path):
    run.wait_for(published(1))
    assert "is already running" in complaint(tmp_path, "rl", "resume", run.path)
    assert "there is a run at" in complaint(tmp_path, "rl", "run", "run.toml", "--dir", run.path)
    stopped = mettle(tmp_path, "rl", "stop", run.path)
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert f"next: mettle rl resume {run.path}" in stopped.stdout
    assert run.end() == 130
    assert f"`mettle rl resume {run.path}` continues the run" in run.said()
    again = mettle(tmp_path, "rl", "stop", run.path)
    assert (again.returncode, "was not running" in again.stdout) == (0, True)
    run.resume()
    assert run.end() == 0, run.said()
    run.check_accounts()
    assert "is finished" in complaint(tmp_path, "rl", "resume", run.path)
    assert "there is a run at" in complaint(tmp_path, "rl", "run", "run.toml", "--dir", run.path)
    run.check_accounts()


@pytest.mark.slow
def test_after_ctrl_c_the_way_on_is_told_and_works(run):
    run.wait_for(published(2))
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    last = run.said().splitlines()[-1]
    assert last == f"stopped; `mettle rl resume {run.path}` continues the run"
    assert run.read(lambda ledger: ledger.journal.fact("state"), None) == "stopped"
    run.resume()
    assert run.end() == 0, run.said()
    run.check_accounts()


def stop_after(run: Run, version: int) -> list[Path]:
    """Stop the run when there is a checkpoint of `version`; returns the checkpoints, the newest first."""
    run.wait_for(lambda _: (run.run_dir.checkpoints / f"step-{version}" / "manifest.json").exists())
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 130, run.said()
    found = [path for path in run.run_dir.checkpoints.glob("step-*")]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def cut_short(checkpoint: Path) -> Path:
    largest = max(checkpoint.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return largest


@pytest.mark.slow
def test_a_checkpoint_cut_short_is_passed_over_and_the_run_goes_on_from_an_older_one(tmp_path):
    run = Run(tmp_path, "--trainer.checkpoint.interval", "2")
    try:
        newest, older = stop_after(run, 6)[:2]
        cut_short(newest)
        run.resume()
        assert run.end() == 0, run.said()
        run.check_accounts()
        messages = run.read(lambda ledger: [event.message for event in ledger.journal.events()], [])
        assert any(f"checkpoint {newest.name} is passed over" in m and "bytes instead of" in m for m in messages)
        assert any(f"resumed from v{older.name.removeprefix('step-')};" in message for message in messages)
    finally:
        run.close()


@pytest.mark.slow
def test_without_a_whole_checkpoint_or_the_batches_since_the_run_says_so_and_touches_nothing(tmp_path):
    run = Run(tmp_path, "--trainer.checkpoint.interval", "2")
    try:
        checkpoints = stop_after(run, 6)
        for checkpoint in checkpoints:
            cut_short(checkpoint)
        before = run.read(lambda ledger: (ledger.task_counts(), ledger.newest_version()), None)
        run.resume()
        assert run.end() == 2, run.said()
        line = run.complaint()
        assert "cannot resume run: the newest state is the initial policy (no complete checkpoint)" in line
        assert "the batch of step 1 that must be trained again from there is gone" in line
        after = run.read(lambda ledger: (ledger.task_counts(), ledger.newest_version()), None)
        assert after[0].get("trained") == before[0].get("trained")
        assert after[1].weights == before[1].weights
        assert all(checkpoint.exists() for checkpoint in checkpoints)
    finally:
        run.close()


# A disk that is really full


class SmallDisk:
    """A tmpfs in a mount namespace of its own, which a process holds open. Its size changes while it is in use."""

    def __init__(self, folder: Path, size: str) -> None:
        self._place = folder / "disk"
        self._place.mkdir()
        script = f'mount -t tmpfs -o size={size} tmpfs "{self._place}" && echo mounted && exec sleep 1000'
        self._holder = subprocess.Popen(
            ["unshare", "-rm", "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "mounted\n":
            _, said = self._holder.communicate()
            pytest.skip(f"this host mounts nothing in a user namespace: {said.strip()}")
        enter = ["nsenter", "-t", str(self._holder.pid), "-U", "-m", "--preserve-credentials"]
        self.prefix = (*enter, f"--wd={Path.cwd()}") if os.getuid() else ("nsenter", "-t", str(self._holder.pid), "-m")
        self.inside = self._place
        self.seen = Path(f"/proc/{self._holder.pid}/root") / self._place.relative_to("/")

    def resize(self, size: str) -> None:
        subprocess.run(
            [*self.prefix, "mount", "-t", "tmpfs", "-o", f"remount,size={size}", "tmpfs", str(self.inside)], check=True
        )

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("a small disk needs unshare and nsenter (util-linux)")
    made = SmallDisk(tmp_path, "400m")
    yield made
    made.close()


def test_a_disk_with_too_little_space_is_refused_at_the_start(disk, config):
    disk.resize("4m")
    command = [
        *disk.prefix,
        sys.executable,
        "-m",
        "mettle.cli",
        "rl",
        "run",
        str(config),
        "--dir",
        str(disk.inside / "r"),
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "only 4 MiB are free" in done.stderr
    assert not (disk.seen / "r").exists()


@pytest.mark.slow
@pytest.mark.parametrize("size", ["3m", "7m", "12m"])
def test_a_full_disk_ends_a_run_with_one_line_and_nothing_lost(disk, tmp_path, size):
    run = Run(tmp_path, prefix=disk.prefix, at=disk.inside)
    try:
        # SQLite follows the link from outside, out of the namespace again; so the ledger is read from a copy, later.
        while not (disk.seen / "run" / "supervisor.lock").exists():
            assert run.process.poll() is None, run.said()
            time.sleep(0.05)
        disk.resize(size)
        assert run.end() == 2, run.said()
        assert "no space left" in run.complaint()
        assert "free some space" in run.complaint()
        disk.resize("400m")
        run.resume()
        assert run.end() == 0, run.said()
        shutil.copytree(disk.seen / "run", tmp_path / "copy", symlinks=True)
        run.check_accounts(RunDir(tmp_path / "copy"))
    finally:
        run.close()
