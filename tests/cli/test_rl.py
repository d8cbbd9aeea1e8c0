"""`mettle rl` and `mettle config`: what is read from a run's folder, and how arguments are taken apart."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.cli.logs import follow, tail
from mettle.cli.rl import split_arguments
from mettle.runs.lock import RunLock
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir


def test_list_shows_runs_and_names_the_next_command(mettle, run_dir):
    ended = mettle("rl", "list")
    assert ended.code == 0
    assert re.search(r"^words +finished +0/3 ", ended.out, re.MULTILINE)
    assert ended.out.splitlines()[-1] == f"next: mettle rl metrics {run_dir}"


def test_list_as_json(mettle, run_dir):
    (row,) = mettle("rl", "list", "--json").json
    assert (row["run"], row["state"], row["max_steps"]) == ("words", "finished", 3)


def test_a_run_whose_supervisor_still_writes_its_policy_is_finishing(mettle, run_dir):
    with RunLock(RunDir(run_dir)):
        assert [row["state"] for row in mettle("rl", "list", "--json").json] == ["finishing"]
    assert [row["state"] for row in mettle("rl", "list", "--json").json] == ["finished"]


def test_list_of_an_empty_folder_says_how_to_begin(mettle):
    ended = mettle("rl", "list")
    assert ended.code == 0
    assert ended.out == "no runs in runs\nnext: mettle quickstart\n"


def test_metrics_shows_the_newest_of_each(mettle, run_dir):
    ended = mettle("rl", "metrics", run_dir)
    assert re.search(r"^reward/mean +3 +0\.75 +3$", ended.out, re.MULTILINE)


def test_a_run_may_be_named_instead_of_its_path(mettle, run_dir):
    assert mettle("rl", "metrics", "words").code == 0


def test_metrics_by_name_are_step_by_step(mettle, run_dir):
    lines = mettle("rl", "metrics", "words", "--name", "reward/*").out.splitlines()
    assert [line.split() for line in lines] == [["step", "reward/mean"], ["1", "0.25"], ["2", "0.5"], ["3", "0.75"]]


def test_metrics_as_json(mettle, run_dir):
    found = mettle("rl", "metrics", "words", "--json").json
    assert found["metrics"]["reward/mean"] == [[1, 0.25], [2, 0.5], [3, 0.75]]


def test_an_unknown_metric_names_those_there_are(mettle, run_dir):
    ended = mettle("rl", "metrics", "words", "--name", "rewrd")
    assert (ended.code, ended.err) == (2, "error: run words has no metric rewrd; it has loss/mean, reward/mean\n")


def test_logs_of_all_processes_are_in_the_order_of_time(mettle, run_dir):
    lines = mettle("rl", "logs", "words").out.splitlines()
    assert [line.split()[1:] for line in lines] == [
        ["trainer", "at", "1", "step=1"], ["orchestrator", "at", "2", "step=1"],
        ["trainer", "at", "3", "step=1"], ["orchestrator", "at", "4", "step=1"],
    ]  # fmt: skip


def test_logs_of_one_process_the_newest_lines(mettle, run_dir):
    lines = mettle("rl", "logs", "words", "trainer", "-n", "1").out.splitlines()
    assert len(lines) == 1
    assert "at 3" in lines[0]


def test_logs_as_json_name_their_process(mettle, run_dir):
    entries = [json.loads(line) for line in mettle("rl", "logs", "words", "--json").out.splitlines()]
    assert [entry["process"] for entry in entries] == ["trainer", "orchestrator", "trainer", "orchestrator"]


def test_raw_logs_are_what_the_process_printed(mettle, run_dir):
    assert mettle("rl", "logs", "words", "trainer", "--raw").out == "trainer      Traceback: the cause\n"


def test_a_process_without_a_log_names_those_there_are(mettle, run_dir):
    ended = mettle("rl", "logs", "words", "trainr")
    assert ended.code == 2
    assert "no log of a process 'trainr'" in ended.err
    assert "there are orchestrator, trainer" in ended.err


def test_stop_of_a_run_that_is_not_running_says_so(mettle, run_dir):
    ended = mettle("rl", "stop", "words")
    assert (ended.code, ended.out) == (0, "words was not running\nnext: mettle rl metrics words\n")


def test_resume_of_a_finished_run_is_refused(mettle, run_dir):
    ended = mettle("rl", "resume", "words")
    assert ended.code == 2
    assert "is finished" in ended.err


SUPERVISOR = """
import signal, sys
from pathlib import Path
from mettle.runs.lock import RunLock
from mettle.storage.run_dir import RunDir
with RunLock(RunDir(Path(sys.argv[1]))):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    print("running", flush=True)
    signal.pause()
"""


def test_a_run_that_is_running_is_left_alone_and_can_be_stopped(mettle, run_dir):
    """A stand-in holds its lock; a real run is stopped by `runs/journeys/test_interruptions.py`, nightly."""
    ledger = Ledger(run_dir / "run.db")
    ledger.journal.set_fact("state", "running")
    ledger.close()
    command = [sys.executable, "-c", SUPERVISOR, str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "running\n"
        resumed = mettle("rl", "resume", "words")
        assert (resumed.code, resumed.err.count("\n")) == (2, 1)
        assert f"is already running (pid {supervisor.pid})" in resumed.err
        assert supervisor.poll() is None
        stopped = mettle("rl", "stop", "words")
        assert (stopped.code, stopped.out) == (0, "stopped words\nnext: mettle rl resume words\n")
        assert supervisor.wait(60) == 130


@pytest.mark.parametrize("verb", ["metrics", "logs", "resume", "stop"])
def test_a_run_that_is_not_there_is_the_users_mistake(mettle, verb):
    ended = mettle("rl", verb, "nowhere")
    assert ended.code == 2
    assert ended.err.startswith("error: no run at nowhere")
    assert ended.err.count("\n") == 1


def test_run_without_a_file_says_how(mettle):
    ended = mettle("rl", "run", "--max-steps", "3")
    assert ended.code == 2
    assert "name a config file" in ended.err


@pytest.mark.parametrize(
    ("words", "files", "overrides"),
    [
        (["a.toml", "@b.toml"], ["a.toml", "b.toml"], []),
        (["@", "a.toml", "--x.y", "1"], ["a.toml"], ["--x.y", "1"]),
        (["a.toml", "--x", "-1", "--no-y"], ["a.toml"], ["--x", "-1", "--no-y"]),
    ],
)
def test_files_come_first_then_overrides(words, files, overrides):
    found = split_arguments(words)
    assert ([str(file) for file in found[0]], found[1]) == (files, overrides)


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('max_steps = 5\n[[orchestrator.envs]]\nid = "reverse-text"\n')
    return path


def test_dry_run_prints_a_config_that_loads_back_with_its_sources(mettle, config_file, tmp_path):
    ended = mettle("rl", "run", config_file, "--trainer.optim.lr", "3e-6", "--dry-run")
    assert ended.code == 0
    assert re.search(r"^max_steps = 5 +# .*run\.toml:1$", ended.out, re.MULTILINE)
    assert re.search(r"^lr = 3e-06 +# --trainer\.optim\.lr$", ended.out, re.MULTILINE)
    again = tmp_path / "again.toml"
    again.write_text(ended.out)
    first = mettle("config", "show", config_file, "--trainer.optim.lr", "3e-6", "--json").json
    assert mettle("config", "show", again, "--json").json["config"] == first["config"]
    assert not (tmp_path / "runs").exists()


def test_config_show_names_the_source_of_each_value(mettle, config_file):
    out = mettle("config", "show", config_file, "--seed", "3").out
    assert re.search(r"^max_steps +5 +.*run\.toml:1$", out, re.MULTILINE)
    assert re.search(r"^seed +3 +--seed$", out, re.MULTILINE)
    assert re.search(r"^trainer\.seed +3 +derived$", out, re.MULTILINE)
    assert re.search(r"^trainer\.optim\.lr +\S+ +default$", out, re.MULTILINE)


def test_an_unknown_key_is_refused_with_file_line_and_nearest_key(mettle, config_file):
    config_file.write_text(config_file.read_text() + "\n[trainer.optim]\nlrr = 1e-5\n")
    ended = mettle("rl", "run", config_file)
    assert ended.code == 2
    assert re.match(r"error: .*run\.toml:6: unknown key 'trainer\.optim\.lrr'.*; did you mean 'lr'\?\n$", ended.err)


def test_a_group_of_one_is_refused(mettle, config_file):
    ended = mettle("rl", "run", config_file, "--orchestrator.group-size", "1", "--dry-run")
    assert ended.code == 2
    assert "group_size" in ended.err
    assert ended.err.count("\n") == 1


def test_hosted_fields_without_a_counterpart_are_refused(mettle, config_file):
    config_file.write_text("trajectory_strategy = 'interleaved'\n" + config_file.read_text())
    ended = mettle("rl", "run", config_file, "--dry-run")
    assert ended.code == 2
    assert "trajectory_strategy is not offered, and would change the result" in ended.err
    assert ended.err.count("\n") == 1


def test_following_shows_new_lines_and_new_processes(run_dir):
    folder = run_dir / "logs"
    trainer = folder / "trainer.log"
    lines = follow(folder, None, {path: path.stat().st_size for path in folder.glob("*.log")}, is_raw=False)
    with trainer.open("a") as file:
        file.write("half a ")
    with (folder / "hub.log").open("w") as file:
        file.write("first\n")
    assert next(lines) == (folder / "hub.log", "first")
    with trainer.open("a") as file:
        file.write("line\n")
    assert next(lines) == (trainer, "half a line")


@given(
    st.lists(st.text(st.characters(codec="ascii", exclude_characters="\r\n\x0b\x0c\x1c\x1d\x1e"), max_size=900)),
    st.integers(1, 9),
)
def test_a_tail_is_the_end_of_the_whole(tmp_path_factory, lines, count):
    path = tmp_path_factory.mktemp("tail") / "x.log"
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    assert tail(path, path.stat().st_size, count) == lines[-count:]


def test_export_writes_a_version_where_nothing_is_yet(mettle, run_dir):
    from mettle.storage.weights import publish_weights

    (run_dir / "model").mkdir()
    (run_dir / "model" / "config.json").write_text("{}")
    publish_weights(run_dir / "weights", 3, lambda path: path.write_bytes(b"weights"))
    ended = mettle("rl", "export", "words", "policy")
    assert ended.out.splitlines()[0] == "wrote v3 of words to policy"
    assert mettle("rl", "export", "words", "policy").err == (
        "error: policy is there already; name a folder that is not\n"
    )
    assert mettle("rl", "export", "words", "other", "--version", "2").code == 2
