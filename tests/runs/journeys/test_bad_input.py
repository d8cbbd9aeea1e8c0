"""Bad input through the command line: one clear line, exit code 2, and no run is made.

A command is run in this process, where nothing has to be started for it; one is run as a person does.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stories import CONFIG, ENVIRONMENTS, complaint

from mettle.cli import main
from mettle.trainer.policy import write_policy
from mettle.trainer.presets import preset

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def complain(tmp_path, monkeypatch, capsys) -> Callable[..., str]:
    """The line with which a command refuses in the test's folder; it must be the only one, with exit code 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("METTLE_ENVIRONMENTS", str(ENVIRONMENTS))

    def run(*arguments: object) -> str:
        capsys.readouterr()
        code = main.run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert (code, out) == (2, ""), err
        assert err.count("\n") == 1, err
        assert err.startswith("error: ")
        return err.strip()

    return run


@pytest.fixture
def refused(config, complain) -> Callable[..., str]:
    """The line with which `rl run` refuses the config with these overrides; no run is made."""

    def run(*overrides: object) -> str:
        line = complain("rl", "run", config, "--dir", "made", *overrides)
        assert not (config.parent / "made").exists(), "a run was made of a config that is wrong"
        return line

    return run


def test_a_command_refuses_as_a_process_as_it_does_here(config, complain):
    words = ("rl", "run", config, "--dir", "made", "--orchestrator.group_size", 1)
    assert complaint(config.parent, *words) == complain(*words)


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_key(config, refused):
    config.write_text(CONFIG.replace("lr = 1e-4", "lrr = 1e-4"))
    line = next(n for n, text in enumerate(config.read_text().splitlines(), start=1) if text.startswith("lrr"))
    assert refused().startswith(f"error: {config}:{line}: unknown key 'trainer.optim.lrr'")
    assert "did you mean 'lr'?" in refused()


def test_an_unknown_override_is_named_with_the_nearest_key(refused):
    line = refused("--orchestrator.grup-size", 8)
    assert "--orchestrator.grup-size" in line
    assert "did you mean 'group_size'?" in line


def test_a_group_of_one_has_nothing_to_compare(refused):
    line = refused("--orchestrator.group_size", 1)
    assert "--orchestrator.group_size" in line
    assert "set group_size to at least 2" in line


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.9), ("top_k", 5), ("min_p", 0.1)])
def test_a_sampler_that_truncates_cannot_train(key, value, refused):
    line = refused(f"--orchestrator.sampling.{key}", value)
    assert f"--orchestrator.sampling.{key}" in line
    assert "importance ratio is biased" in line


def test_a_missing_environment_is_told_with_what_was_searched_and_the_nearest_name(refused):
    line = refused("--orchestrator.envs.0.id", "asci-share")
    assert "no environment 'asci-share'" in line
    assert str(Path(__file__).parents[1] / "environments") in line
    assert "did you mean 'ascii-share'?" in line


def test_a_missing_environment_of_an_evaluation_is_told_as_early(config, refused):
    config.write_text(CONFIG + '\n[[orchestrator.eval.envs]]\nid = "reverse-txt"\n')
    assert "did you mean 'reverse-text'?" in refused()


def test_an_argument_that_an_environment_does_not_take_is_told_before_anything_is_made(config, refused):
    line = refused("--orchestrator.envs.0.args.num_trian", 3)
    assert "ascii-share takes no argument 'num_trian'" in line
    config.write_text(CONFIG + '\n[[orchestrator.eval.envs]]\nid = "reverse-text"\nargs = { num_evil = 3 }\n')
    assert "did you mean 'num_eval'?" in refused()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--orchestrator.envs.0.args.num_train", "many"], "argument num_train is of type int, and not 'many'"),
        (["--model.lora.target_modules", '["q_porj"]'], "is called 'q_porj'; did you mean 'q_proj'?"),
        (["--trainer.expert_parallel", 2, "--deployment.num_trainer_ranks", 2], "and this model is dense: set it to 1"),
        (["--inference.max_model_len", 4096], "max_model_len is 4096, and the model has 1024 positions"),
        (["--inference.served_model_name", "mine"], "is not what requests ask for"),
        (["--trainer.model", "/model"], "trainer.model '/model' would be ignored"),
    ],
)
def test_what_no_process_of_a_run_could_do_is_told_before_there_is_one(refused, overrides, said):
    assert said in refused(*overrides)


def test_a_gpu_that_is_not_there_is_told_before_a_run_is_made(refused, monkeypatch):
    monkeypatch.setattr("mettle.runs.devices.drivers_of_torch", list)
    for table in ("trainer", "inference"):
        assert f"{table}.device 'cuda' was asked for, and torch sees no GPU here" in refused(
            f"--{table}.device", "cuda"
        )


def test_what_the_warm_up_measures_with_is_looked_at_too(refused):
    probe = ("--warm_up.enabled", "true", "--warm_up.sft.probe.env")
    assert "did you mean 'reverse-text'?" in refused(*probe, "reverse-txt")
    assert "takes no argument 'num_trian'" in refused(
        *probe, "reverse-text", "--warm_up.sft.probe.env_args.num_trian", 3
    )


def test_a_teacher_that_does_not_answer_is_told_before_anything_is_made(config, refused):
    config.write_text(CONFIG + '\n[orchestrator.services.reference]\nbase_url = "http://127.0.0.1:9/v1"\nmodel = "m"\n')
    assert "service 'reference' cannot be asked" in refused("--orchestrator.algorithm", "reference_kl")


def test_no_steps_are_no_run(refused, complain):
    assert "max_steps = 0" in refused("--max-steps", 0)
    assert refused("--max-steps", 0).startswith("error: --max-steps: ")
    assert "--steps" in complain("quickstart", "--steps", 0)


def test_a_model_path_without_a_model_is_named(config, tmp_path, refused):
    line = refused("--model.path", tmp_path)
    assert line.startswith("error: --model.path: ")
    assert f"{str(tmp_path)!r} holds no model: it has no config.json" in line


def test_a_missing_config_file_is_named(complain):
    assert complain("rl", "run", "nowhere.toml") == "error: no config file nowhere.toml"


def test_a_missing_run_is_told_for_every_command(complain):
    for command in ("resume", "stop", "logs", "metrics"):
        assert "no run at nowhere" in complain("rl", command, "nowhere")


def test_a_run_page_on_a_port_in_use_is_refused_before_a_run_is_made(refused):
    with taken_port() as port:
        line = refused("--deployment.hub", "--deployment.hub-port", port)
    assert f"port {port} on 127.0.0.1 is in use" in line
    assert "deployment.hub_port" in line


def test_a_hub_on_a_port_in_use_names_it(complain):
    with taken_port() as port:
        line = complain("hub", "serve", "--runs", ".", "--port", port)
    assert f"port {port} on 127.0.0.1 is in use; give another with --port" in line


def test_an_inference_server_on_a_port_in_use_names_it(tmp_path, complain):
    write_policy(tmp_path / "policy", preset("tiny"))
    with taken_port() as port:
        line = complain("inference", "serve", "policy", "--port", port)
    assert f"port {port} on 127.0.0.1 is in use; give another with --port" in line
