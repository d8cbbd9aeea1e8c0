"""`mettle env push` and what follows it, against a Hub in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.hub.lab_writer import HubWriter, InProcess

from mettle.cli import account
from mettle.clients import hub as client_module

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "my-task"
version = "0.1.0"
description = "A task."
readme = "README.md"
keywords = ["text"]

[tool.hatch.build.targets.wheel]
include = ["my_task.py"]
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub that every client of this process reaches; bob is signed in, and ./environments has my-task."""
    made = HubWriter(tmp_path / "hub")
    for slug in ("bob", "eve"):
        made.person(slug)
    made.team("robots", "bob")
    transport = InProcess(made.anonymous())

    class Here(client_module.HubClient):
        def __init__(self, context):
            super().__init__(context, transport=transport)

    monkeypatch.setattr(account, "HubClient", Here)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("METTLE_HUB_URL", "http://hub.test")
    monkeypatch.setenv("METTLE_API_KEY", made.token("bob"))
    monkeypatch.chdir(tmp_path)
    folder = Path("environments/my_task")
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "README.md").write_text("# My task\n")
    (folder / "my_task.py").write_text("def load_environment(): ...\n")
    (folder / ".env").write_text("SECRET=1\n")
    yield made
    made.close()


def test_a_push_is_listed_looked_at_pulled_and_deleted(mettle, hub):
    pushed = mettle("env", "push", "my-task")
    assert pushed.code == 0, pushed.err
    assert "pushed bob/my-task@0.1.0 to http://hub.test/environments/bob/my-task" in pushed.out
    again = mettle("env", "push", "my-task")
    assert (again.code, again.err.count("\n")) == (2, 1)
    assert "already exists" in again.err
    assert json.loads(mettle("env", "list", "--hub", "--json").out)[0]["name"] == "my-task"
    assert "0.1.0" in mettle("env", "info", "bob/my-task").out
    assert json.loads(mettle("env", "versions", "bob/my-task", "--json").out)[0]["version"] == "0.1.0"
    listed = mettle("env", "inspect", "bob/my-task").out
    assert "README.md" in listed
    assert ".env" not in listed
    assert mettle("env", "inspect", "bob/my-task", "README.md").out == "# My task\n"
    assert mettle("env", "pull", "bob/my-task", "--target", "pulled").code == 0
    assert Path("pulled/my_task.py").read_text() == Path("environments/my_task/my_task.py").read_text()
    assert mettle("env", "pull", "bob/my-task", "--target", "pulled").code == 2
    assert mettle("env", "star", "bob/my-task").code == 0
    assert mettle("env", "fork", "bob/my-task", "--team", "robots").out.splitlines()[0].endswith("as robots/my-task")
    assert mettle("env", "yank", "bob/my-task").code == 2
    assert mettle("env", "yank", "bob/my-task@0.1.0", "--reason", "wrong").code == 0
    assert mettle("env", "delete", "bob/my-task", "--yes").code == 0
    assert mettle("env", "info", "bob/my-task").code == 2


def test_a_visibility_is_obeyed_for_what_is_there_already(mettle, hub):
    assert mettle("env", "push", "my-task").code == 0
    assert hub.anonymous().get("/api/v1/environmentshub/bob/my-task/versions").status_code == 404
    assert mettle("env", "push", "my-task", "--auto-bump", "--visibility", "public").code == 0
    assert 'version = "0.1.1"' in Path("environments/my_task/pyproject.toml").read_text()
    assert hub.anonymous().get("/api/v1/environmentshub/bob/my-task/versions").status_code == 200


def test_who_is_not_signed_in_hears_it_before_anything_is_built(mettle, hub, monkeypatch):
    monkeypatch.setattr("mettle.envs.packages.archive.pack", lambda *a: pytest.fail("it was built"))
    monkeypatch.setenv("METTLE_API_KEY", "mtl_wrong")
    assert "this token opens nothing" in mettle("env", "push", "my-task").err
    monkeypatch.delenv("METTLE_API_KEY")
    assert mettle("env", "push", "my-task").err.startswith("error: not signed in at http://hub.test")


def test_what_cannot_be_published_is_said_in_one_line(mettle, hub):
    assert "no environment package in nothing" in mettle("env", "push", "nothing").err
    Path("environments/my_task/README.md").write_text("\n")
    assert "needs a README.md" in mettle("env", "push", "my-task").err
    assert "write it like owner/name" in mettle("env", "pull", "my-task").err
    assert "there is no such" not in mettle("env", "fork", "bob/none").out


def test_what_a_version_changed_is_shown_by_file_and_line(mettle, hub):
    assert mettle("env", "push", "my-task").code == 0
    Path("environments/my_task/my_task.py").write_text("def load_environment(words=1): ...\n")
    assert mettle("env", "push", "my-task", "--auto-bump").code == 0
    shown = mettle("env", "diff", "bob/my-task@0.1.0", "0.1.1")
    assert shown.code == 0, shown.err
    assert "bob/my-task 0.1.0 to 0.1.1" in shown.out
    assert "-def load_environment(): ...\n+def load_environment(words=1): ..." in shown.out
    newest = mettle("env", "diff", "bob/my-task", "--json").json
    assert [each["path"] for each in newest["files"]] == ["my_task.py", "pyproject.toml"]
    assert "+++" not in mettle("env", "diff", "bob/my-task", "--stat").out
    assert "nothing differs" in mettle("env", "diff", "bob/my-task@0.1.1", "0.1.1").out
    assert mettle("env", "diff", "bob/my-task@0.1.0", "7.0").code == 2


def test_a_hosted_run_is_started_again_from_a_version(mettle, hub):
    body = {"model": "tiny", "environments": [{"id": "reverse-text"}], "max_steps": 4}
    run = hub.with_token("bob").post("/api/v1/rft/runs", json=body).json()["run"]
    assert "no version is on disk" in mettle("rl", "checkpoints", run["id"]).out
    (hub.lab.folder / "runs" / run["id"] / "weights" / "v2").mkdir(parents=True)
    assert "v2" in mettle("rl", "checkpoints", run["id"]).out
    made = mettle("rl", "restart", run["id"], "--step", "2", "--json").json
    assert (made["maxSteps"], made["name"].endswith("from v2")) == (2, True)
    assert mettle("rl", "restart", run["id"], "--step", "7").code == 2
    assert mettle("rl", "restart", run["id"]).code == 2
    assert mettle("rl", "restart", "../x").code == 2


def test_a_log_of_inspect_is_taken_in_viewed_and_pushed(mettle, hub):
    log = str(Path(__file__).parents[1] / "evals" / "data" / "sums.eval")
    taken = mettle("eval", "import", log)
    assert taken.code == 0, taken.err
    assert "6 rollouts, the reward is includes" in taken.out
    assert "sums" in mettle("eval", "list").out
    pushed = mettle("eval", "import", log, "--push", "--name", "sums of Inspect", "--public", "--json")
    assert pushed.code == 0, pushed.err
    (told,) = pushed.json
    page = hub.anonymous().get(f"/evaluations/{told['evaluation_id']}").text
    assert "mockllm/model" in page
    rollouts = hub.anonymous().get(f"/evaluations/{told['evaluation_id']}/rollouts/0").text
    assert "one and one" in rollouts
    assert "by length" in rollouts
    assert mettle("eval", "view", told["path"], "-i", "0").out.count("What is 1 + 1?") == 1
    assert mettle("eval", "import", log, "--public").code == 2
    assert mettle("eval", "import", "README.md").code == 2


def test_results_are_pushed_listed_and_read_back(mettle, hub, tmp_path):
    folder = tmp_path / "outputs" / "evals" / "words--m" / "1a2b"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps({"env_id": "words", "model": "m", "num_examples": 3}))
    rows = [{"example_id": i, "prompt": "p", "completion": "c", "reward": i / 2, "metrics": {}} for i in range(3)]
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pushed = mettle("eval", "push", str(folder), "--public", "--json")
    assert pushed.code == 0, pushed.err
    assert (pushed.json["total_samples"], pushed.json["avg_score"]) == (3, 0.5)
    assert "words" in mettle("eval", "pushed").out
    assert mettle("eval", "pushed", "--json").json[0]["model_name"] == "m"
    assert mettle("eval", "samples", pushed.json["id"]).json["samples"][2]["reward"] == 1.0
    assert mettle("eval", "push", str(tmp_path / "nothing")).code == 2
