"""`mettle gepa run` as a person meets it: flags, files, kills and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mettle.cli import main

pytest.importorskip("gepa")

SOURCE = Path(__file__).resolve().parents[3] / "src"
SMALL = ("-B", "160", "-n", "12", "-N", "12", "--num-test", "12", "--max-retries", "0")


@pytest.fixture
def mettle(workplace: Path, capsys: Any) -> Any:
    """Run `mettle` with these words; the exit code and what it printed."""

    def run(*words: object) -> Any:
        capsys.readouterr()
        code = main.run([str(word) for word in words])
        return code, capsys.readouterr()

    return run


def test_a_run_prints_the_difference_with_its_error_and_what_comes_next(mettle, endpoint):
    code, said = mettle(
        "gepa", "run", "three-kinds", "-m", "worker", "-M", "writer", "-b", endpoint.url, *SMALL, "-o", "here"
    )
    assert code == 0, said.err
    assert "before, 12 held-out rows" in said.out
    assert "difference" in said.out
    assert "+1.000 (95 % interval +0.469 to +1.000, p = 0.0005)" in said.out
    assert "rule join" in said.out
    assert said.out.rstrip().endswith("eval run here/evaluate.toml")
    code, said = mettle("eval", "run", "here/evaluate.toml", "-n", "6", "-r", "1", "--json")
    assert code == 0, said.err
    assert json.loads(said.out)["evaluations"][0]["avg_reward"] == 1.0


def test_json_holds_the_figures(mettle, endpoint):
    code, said = mettle(
        "gepa", "run", "three-kinds", "-m", "worker", "-M", "writer", "-b", endpoint.url, *SMALL, "--json"
    )
    assert code == 0, said.err
    document = json.loads(said.out)
    assert document["held_out"]["difference"]["mean"] == 1.0
    assert document["best_score"] == 1.0
    assert (Path(document["path"]) / "best_prompt.txt").read_text() == document["best_prompt"]
    assert said.err == ""


def test_a_file_says_what_to_run_and_flags_win_over_it(mettle, endpoint, workplace):
    (workplace / "gepa.toml").write_text(
        f"""
model = "worker"
reflection_model = "writer"
api_base_url = "{endpoint.url}"
tui = true

[[env]]
env_id = "three-kinds"
env_args = {{num_rows = 30}}

[gepa]
max_calls = 999
num_train = 9
num_val = 9
num_test = 0
minibatch_size = 2
perfect_score = 1.0
state_columns = ["answer"]
max_concurrent = 2
seed = 3

[execution]
sampling_args = {{max_tokens = 7}}
"""
    )
    code, said = mettle("gepa", "run", "gepa.toml", "-B", "40", "-o", "here", "--json")
    assert code == 0, said.err
    settings = json.loads(Path("here/run.json").read_text())
    assert (settings["max_calls"], settings["num_train"], settings["seed"]) == (40, 9, 3)
    assert settings["sampling_args"] == {"max_tokens": 7}
    assert settings["state_columns"] == ["answer"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('model = "m"\n[gepa]\nmax_call = 3\n', "gepa.toml:3: unknown key 'max_call'; did you mean 'max_calls'?"),
        (
            'model = "m"\n[gepa]\nmax_calls = 0\n',
            "gepa.toml:3: max_calls = 0: input should be greater than or equal to 1",
        ),
        ('model = "m"\n[gepaa]\nmax_calls = 3\n', "gepa.toml:2: unknown key 'gepaa'; did you mean 'gepa'?"),
        ('model = "m"\n[[env]]\nid="a"\n[[env]]\nid="b"\n', "gepa.toml:2: 2 environments; one run optimises"),
        ('[env]\nid = "a"\n', "say which model with -m"),
        ('model = "m"\n', "say which environment"),
    ],
)
def test_a_wrong_file_is_one_line_and_exit_2(mettle, workplace, text, complaint):
    (workplace / "gepa.toml").write_text(text)
    code, said = mettle("gepa", "run", "gepa.toml")
    assert code == 2
    assert complaint in said.err
    assert said.err.count("\n") == 1


def _start(url: str, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mettle.cli", "gepa", "run", *words]
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(SOURCE)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "at", [pytest.param(5, marks=pytest.mark.nightly), 40, pytest.param(75, marks=pytest.mark.nightly)]
)
def test_a_run_that_is_killed_goes_on_without_asking_anything_twice(mettle, endpoint, at):
    words = ("three-kinds", "-m", "worker", "-M", "writer", "-b", endpoint.url, *SMALL, "-c", "1")
    code, said = mettle("gepa", "run", *words, "-o", "whole", "--json")
    assert code == 0, said.err
    whole, asked = json.loads(said.out), sorted(endpoint.asked)
    endpoint.asked.clear()
    process: list[subprocess.Popen[bytes]] = []

    def kill(number: int) -> None:
        if number == at:
            process[0].kill()

    endpoint.on_request = kill
    process.append(_start(endpoint.url, *words, "-o", "here"))
    process[0].communicate(timeout=100)
    assert process[0].returncode == -signal.SIGKILL
    assert not Path("here/metadata.json").exists()
    in_flight = endpoint.asked[-1]
    endpoint.on_request = lambda number: None
    code, said = mettle("gepa", "run", "--resume", "here", "--json")
    assert code == 0, said.err
    again = json.loads(said.out)
    for name in ("best_prompt", "best_score", "num_candidates", "total_metric_calls", "held_out"):
        assert again[name] == whole[name]
    repeated = list(endpoint.asked)
    for request in asked:
        repeated.remove(request)
    assert repeated in ([], [in_flight]), "at most what was in flight is asked again"


@pytest.mark.slow
def test_ctrl_c_keeps_the_best_so_far_and_names_the_command_that_goes_on(mettle, endpoint):
    words = ("three-kinds", "-m", "worker", "-M", "writer", "-b", endpoint.url, *SMALL, "-c", "1", "-o", "here")
    process: list[subprocess.Popen[bytes]] = []

    def interrupt(number: int) -> None:
        if number == 70:
            process[0].send_signal(signal.SIGINT)

    endpoint.on_request = interrupt
    process.append(_start(endpoint.url, *words))
    _, err = process[0].communicate(timeout=100)
    assert process[0].returncode == 130
    last = err.decode().splitlines()[-1]
    assert last.startswith("stopped; the best prompt so far is in here; `")
    assert last.endswith("gepa run --resume here` goes on")
    best = Path("here/best_prompt.txt").read_text()
    assert "rule " in best
    metadata = json.loads(Path("here/metadata.json").read_text())
    assert metadata["best_score"] > metadata["start_score"]
    assert metadata["held_out"] is None


def test_the_display_is_one_line_that_changes_and_is_gone_at_the_end(capsys, monkeypatch):
    from mettle.cli.optimisation import Display
    from mettle.gepa.progress import SearchProgress

    monkeypatch.setenv("COLUMNS", "40")
    now = iter(range(100))
    display = Display(is_quiet=False, is_live=True, clock=lambda: float(next(now)))
    progress = SearchProgress(500, stage="search", num_calls=12, num_candidates=2, best_score=0.5, num_errors=1)
    display.show(progress)
    display.say("candidate 1 scores 0.5")
    said = capsys.readouterr().err
    assert said == "\rsearching, 0 rollouts, 12/500 calls, 2 \rcandidate 1 scores 0.5\n", (
        "click strips what moves the cursor"
    )
    display.close()
    assert capsys.readouterr().err == ""


def test_without_the_library_one_line_says_what_to_install(mettle, monkeypatch, endpoint):
    monkeypatch.setitem(sys.modules, "gepa", None)
    monkeypatch.delitem(sys.modules, "gepa", raising=False)

    class Absent:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "gepa":
                raise ModuleNotFoundError("No module named 'gepa'", name="gepa")

    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    code, said = mettle("gepa", "run", "three-kinds", "-m", "worker", "-b", endpoint.url)
    assert (code, said.err) == (
        2,
        "error: prompt optimisation needs the gepa library; pip install 'mettle-lab[gepa]'\n",
    )
