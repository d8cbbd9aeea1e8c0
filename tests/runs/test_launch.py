"""A run is made whole or not at all; what its processes on a cluster are told, and which secrets they have."""

import json
from contextlib import closing

import pytest

from mettle.envs.sandboxes.shared import SANDBOX_ENV
from mettle.errors import UserError
from mettle.orchestrator.config import OrchestratorConfig
from mettle.runs.create import check_config, check_variables, create_run, write_configs
from mettle.runs.keys import run_keys
from mettle.runs.launch import RUN_TOKEN_ENV, load_run_config, process_specs, resume
from mettle.sandbox import SandboxConfig
from mettle.sandbox.service.tokens import TOKEN_ENV
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.web.keys import ADMIN_KEY_ENV, API_KEY_ENV, WORKERS_KEY_ENV

TEXT = """
[[orchestrator.envs]]
id = "reverse-text"

[deployment]
hub = false
"""
ON_NODES = """
engine = "ray"

[deployment.ray]
num_worker_places = 2
worker_variables = ["JUDGE_KEY"]
num_sandbox_services = 1
"""


def specs(folder, text):
    file = folder / "run.toml"
    file.write_text(text)
    loaded = load_run_config([file])
    run_dir = RunDir(folder / "run")
    run_dir.path.mkdir()
    write_configs(run_dir, loaded)
    return run_dir, {spec.name: spec for spec in process_specs(run_dir, loaded.config, is_warm=True)}


def test_what_runs_on_nodes_finds_the_run_and_has_no_more_of_its_secrets_than_it_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "judge")
    run_dir, found = specs(tmp_path, TEXT + ON_NODES)
    keys = run_keys(run_dir)
    assert set(found) == {
        "replica-0", "workers-0", "workers-1", "sandboxes-0", "inference", "trainer", "orchestrator",
    }  # fmt: skip
    for place in (found["workers-0"], found["workers-1"]):
        environment = dict(place.environment)
        assert environment[API_KEY_ENV] == keys.api
        assert environment[WORKERS_KEY_ENV] == keys.workers
        assert environment["JUDGE_KEY"] == "judge"
        assert ADMIN_KEY_ENV not in environment
        assert keys.admin not in environment.values()
        assert place.arguments[:3] == (place.name, "--host", "{host}")
    assert dict(found["sandboxes-0"].environment) == {TOKEN_ENV: keys.sandboxes}
    assert keys.sandboxes != keys.workers != keys.admin
    assert found["inference"].arguments[-2:] == ("--host", "{host}")
    for name in ("workers-0", "orchestrator"):
        told = SandboxConfig.model_validate_json(found[name].environment[SANDBOX_ENV])
        assert (told.backend, told.url_files) == ("remote", (run_dir.endpoint("sandboxes-0"),))
        assert found[name].environment[told.token_env] == keys.sandboxes
        assert told.token_env == RUN_TOKEN_ENV
    orchestrator = OrchestratorConfig.model_validate(json.loads(run_dir.config("orchestrator").read_text()))
    assert orchestrator.worker_places == (run_dir.endpoint("workers-0"), run_dir.endpoint("workers-1"))


def test_without_a_cluster_nothing_of_it_is_told(tmp_path):
    run_dir, found = specs(tmp_path, TEXT)
    assert set(found) == {"inference", "trainer", "orchestrator"}
    assert "--host" not in found["inference"].arguments
    assert SANDBOX_ENV not in found["orchestrator"].environment
    assert not run_dir.config("sandboxes").exists()


def test_a_variable_that_is_not_set_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    file = tmp_path / "run.toml"
    file.write_text(TEXT + ON_NODES)
    with pytest.raises(UserError, match=r"worker_variables names JUDGE_KEY, which this environment does not set"):
        check_variables(load_run_config([file]).config)


def test_what_another_engine_needs_here_is_looked_for(tmp_path, monkeypatch):
    (file := tmp_path / "run.toml").write_text(TEXT)
    vllm = ["--inference.engine", "vllm", "--inference.vllm.python", str(tmp_path / "no-python")]
    with pytest.raises(UserError, match=r"inference\.vllm\.python is .*no-python, and there is no such file"):
        check_config(load_run_config([file], vllm).config)
    monkeypatch.delenv("METTLE_REMOTE_ADMIN_KEY", raising=False)
    remote = ["--inference.engine", "remote", "--inference.remote.urls", '["http://127.0.0.1:9/v1"]']
    with pytest.raises(UserError, match="METTLE_REMOTE_ADMIN_KEY is not set: it holds the admin key"):
        check_config(load_run_config([file], remote).config)
    monkeypatch.setenv("METTLE_REMOTE_ADMIN_KEY", "k")
    check_config(load_run_config([file], remote).config)


def test_a_run_whose_making_was_killed_is_none_and_is_made_again(tmp_path, monkeypatch):
    file, model = tmp_path / "run.toml", tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    file.write_text(TEXT)
    loaded = load_run_config([file], ["--model.path", str(model)])
    monkeypatch.setattr("mettle.runs.create.check_run", lambda *_: None)
    seen = []

    def killed(run_dir, config, ledger):
        seen.append(list(run_dir.path.glob("*run.db")))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mettle.runs.create.write_facts", killed)
        with pytest.raises(KeyboardInterrupt):
            create_run(loaded, tmp_path / "run")
    assert seen == [[tmp_path / "run" / ".run.db"]]
    with pytest.raises(UserError, match="no run at"):
        RunDir.existing(tmp_path / "run")
    run_dir = create_run(loaded, tmp_path / "run")
    assert [path.name for path in run_dir.path.glob("*run.db*")] == ["run.db"]
    assert run_dir.model.resolve() == model
    with closing(Ledger(run_dir.ledger, is_read_only=True)) as ledger:
        assert ledger.journal.fact("state") == "preparing"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("trainer", "device", "cuda"), "device 'cuda' was asked for"),
        (("trainer", "lora", {"target_modules": ["q_porj"]}), "no linear module of this model is called 'q_porj'"),
        (("orchestrator", "envs", [{"id": "reverse-text", "args": {"seed": "s"}}]), "seed is of type int, and not 's'"),
    ],
)
def test_a_run_that_goes_on_is_looked_at_like_a_new_one(tmp_path, change, said, monkeypatch):
    monkeypatch.setattr("mettle.runs.launch.drive", lambda *_, **__: pytest.fail("it was started"))
    monkeypatch.setattr("mettle.runs.devices.drivers_of_torch", list)
    (file := tmp_path / "run.toml").write_text(TEXT)
    run_dir = create_run(load_run_config([file]), tmp_path / "run")
    table, key, value = change
    tree = json.loads(run_dir.config("run").read_text())
    tree[table][key] = value
    run_dir.config("run").write_text(json.dumps(tree))
    with pytest.raises(UserError, match=said):
        resume(run_dir.path)
