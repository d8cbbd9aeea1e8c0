"""Bad input through the command line: one clear line, exit code 2, and no run is made."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stories import CONFIG, complaint, environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


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
