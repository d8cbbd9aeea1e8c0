"""`mettle eval`: against an endpoint, saved, resumed, looked at."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mettle.envs.evaluation.facts import excerpt
from mettle.envs.evaluation.reader import EvaluationReader

ENVIRONMENT = """
import mettle.envs as vf


def correct(completion, answer, parser):
    return float((parser.parse_answer(completion) or "") == answer)


def load_environment(words="abc def ghi"):
    rows = [{"question": f"reverse {word}", "answer": word[::-1]} for word in words.split()]
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=vf.Rubric(funcs=[correct]))
"""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """An environment package under ./environments."""
    folder = tmp_path / "environments" / "mirror_words"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "mirror-words"\nversion = "0.1.0"\ndescription = "Mirrors."\n'
    )
    (folder / "mirror_words.py").write_text(ENVIRONMENT)
    return folder


def only_evaluation(folder: Path) -> Path:
    (path,) = (folder / "outputs" / "evals").glob("*/*")
    return path


def read_rollouts(folder: Path) -> list[dict]:
    return list(EvaluationReader(folder).rows())


def test_an_endpoint_is_measured_and_the_results_saved(mettle, environment, endpoint):
    ended = mettle("eval", "run", "mirror-words", "-m", "reverser", "-b", endpoint, "-n", "3", "-r", "2")
    assert ended.code == 0, ended.err
    assert re.search(r"^reward +1\.0000 \(95 % interval 0\.439 to 1\.000\)$", ended.out, re.MULTILINE)
    assert re.search(r"^pass@2 +1\.0000 \(95 % interval 0\.439 to 1\.000\)$", ended.out, re.MULTILINE)
    assert re.search(r"^rollouts +6 of 3 tasks$", ended.out, re.MULTILINE)
    assert re.search(r"^failed +none$", ended.out, re.MULTILINE)
    folder = only_evaluation(environment)
    assert ended.out.splitlines()[-1] == f"next: mettle eval view {folder.relative_to(environment.parents[1])}"
    rows = read_rollouts(folder)
    assert [row["reward"] for row in rows] == [1.0] * 6
    assert json.loads((folder / "metadata.json").read_text())["env_id"] == "mirror-words"


def test_the_summary_as_json(mettle, environment, endpoint):
    found = mettle("eval", "run", "mirror-words", "-m", "reverser", "-b", endpoint, "-n", "2", "-r", "1", "--json").json
    assert (found["avg_reward"], found["avg_error"], found["interval"][1]) == (1.0, 0.0, 1.0)
    assert found["stats"]["reward"]["interval"] == found["interval"]
    assert found["stats"]["tokens"]["output"] == 4.0
    assert found["stats"]["cost"] is None, "nobody said what a token costs"
    assert Path(found["path"]).is_dir()


@pytest.mark.e2e
def test_a_model_directory_is_measured_by_a_server_for_the_time_being(mettle, environment, model):
    ended = mettle("eval", "run", "mirror-words", "-m", model, "-n", "2", "-r", "2", "-t", "4", "--json")
    assert ended.code == 0, ended.err
    assert (ended.json["model"], ended.json["avg_error"]) == ("tiny", 0.0)
    assert len(read_rollouts(Path(ended.json["path"]))) == 4


def test_a_named_endpoint_stands_for_model_and_address(mettle, environment, endpoint, tmp_path):
    (tmp_path / "configs").mkdir()
    text = f'[[endpoint]]\nendpoint_id = "mine"\nmodel = "reverser"\nurl = "{endpoint}"\n'
    (tmp_path / "configs" / "endpoints.toml").write_text(text)
    found = mettle("eval", "run", "mirror-words", "-m", "mine", "-n", "1", "-r", "1", "--json").json
    assert (found["model"], found["base_url"]) == ("reverser", endpoint)


def test_an_endpoints_file_with_a_mistake_is_one_line(mettle, environment, tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "endpoints.toml").write_text('[[endpoint]]\nendpoint_id = "mine"\nurl = "x"\n')
    ended = mettle("eval", "run", "mirror-words", "-m", "mine")
    assert ended.code == 2
    assert "configs/endpoints.toml:1: endpoint.0 lacks model" in ended.err


def test_environment_arguments_and_output_folder(mettle, environment, endpoint, tmp_path):
    ended = mettle(
        "eval", "run", "mirror-words", "-m", "reverser", "-b", endpoint, "-a", '{"words": "one"}',
        "-o", "out", "-n", "-1",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    (folder,) = (tmp_path / "out").glob("*/*")
    assert len(read_rollouts(folder)) == 3, "one task, three rollouts by default"


def test_a_failed_rollout_has_no_reward_and_a_resume_tries_it_again(mettle, environment, endpoint):
    base = ("eval", "run", "mirror-words", "-m", "reverser", "-b", endpoint, "-r", "1", "--max-retries", "0")
    (environment / "mirror_words.py").write_text(
        ENVIRONMENT.replace('"abc def ghi"', '"abc def"').replace("float((", '1 / (answer != "cba") and float((')
    )
    ended = mettle(*base, "-n", "2", "--json")
    assert ended.code == 0, ended.err
    assert (ended.json["avg_reward"], ended.json["avg_error"]) == (1.0, 0.5)
    path = ended.json["path"]
    assert {row["reward"] for row in read_rollouts(Path(path))} == {1.0, None}
    assert "ZeroDivisionError" in mettle("eval", "view", path).out


def test_a_resumed_evaluation_runs_only_what_is_missing(mettle, environment, endpoint):
    first = mettle("eval", "run", "mirror-words", "-m", "reverser", "-b", endpoint, "-n", "2", "-r", "2", "--json").json
    rows = read_rollouts(Path(first["path"]))
    results = Path(first["path"]) / "results.jsonl"
    results.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]) + '{"cut sho')
    ended = mettle("eval", "run", "mirror-words", "-m", "reverser", "-b", endpoint, "--resume", first["path"], "--json")
    assert ended.code == 0, ended.err
    again = read_rollouts(Path(first["path"]))
    assert len(again) == 4
    assert [row["timing"] for row in again[:3]] == [row["timing"] for row in rows[:3]], "what was done is kept"


def test_when_every_rollout_fails_the_exit_code_says_so(mettle, environment, endpoint):
    ended = mettle(
        "eval", "run", "mirror-words", "-m", "x", "-b", endpoint, "-a", '{"words": "break"}', "-n", "1", "-r", "1",
        "--max-retries", "0",
    )  # fmt: skip
    assert ended.code == 3
    assert "no rollout of 1 has a reward" in ended.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("mirror-wrds", "-m", "x", "-b", "http://127.0.0.1:9/v1"), "did you mean 'mirror-words'?"),
        (("mirror-words", "-m", "x"), "no model directory and no endpoint"),
        (("mirror-words", "-m", "x", "-b", "nonsense"), "'nonsense' is no base URL"),
        (("mirror-words", "-m", "x", "-b", "http://127.0.0.1:9/v1", "-a", "{1"), "--env-args '{1' is not JSON"),
        (("mirror-words", "-m", "x", "-b", "http://127.0.0.1:9/v1", "-a", "[1]"), "is no JSON object"),
        (("mirror-words", "-m", "x", "-b", "http://127.0.0.1:9/v1", "-a", '{"wrds": 1}'), "takes no argument 'wrds'"),
        (("mirror-words", "-m", "x", "-b", "http://127.0.0.1:9/v1", "-R", "none"), "cannot resume from none"),
        (("mirror-words", "-m", "x", "-p", "opnai"), "did you mean 'openai'?"),
        (("mirror-words", "-m", "x", "-b", "http://127.0.0.1:9/v1", "--api-client-type", "chatt"), "did you mean 'chat'?"),
        (("mirror-words", "-m", "x", "-b", "http://127.0.0.1:9/v1", "--header", "nonsense"), "'Name: value' lines"),
        (("mirror-words", "-m", "x", "-b", "http://127.0.0.1:9/v1", "-n", "0"), "at least 1, or -1 for all"),
        (("mirror-words", "-m", "x", "-e", "none.toml"), "no config file none.toml"),
        (("mirror-words", "-m", "x", "-p", "openrouter"), "set the environment variable OPENROUTER_API_KEY"),
        (("nowhere.toml",), "no config file nowhere.toml"),
        (("mirror-words",), "say which model with -m"),
        ((), "say which environment"),
    ],
)
def test_what_cannot_be_run_is_one_line_and_exit_2(mettle, environment, words, message):
    ended = mettle("eval", "run", *words)
    assert ended.code == 2, ended.err
    assert message in ended.err
    assert ended.err.count("\n") == 1


def test_evaluations_are_listed_then_one_then_one_rollout(mettle, environment, endpoint):
    words = ("mirror-words", "-m", "reverser", "-b", endpoint, "-n", "2", "-r", "1", "-c", "1", "--json")
    path = mettle("eval", "run", *words).json["path"]
    listed = mettle("eval", "view")
    assert re.search(rf"^mirror-words +reverser +1 +0% +2 +1 .* {re.escape(path)}$", listed.out, re.MULTILINE)
    assert [row["path"] for row in mettle("eval", "view", "--json").json] == [path]
    one = mettle("eval", "view", path)
    assert re.search(r"^0 +0 +1 +max_turns_reached +2 +cba$", one.out, re.MULTILINE)
    rollout = mettle("eval", "view", path, "-i", "1")
    assert "reverse def" in rollout.out
    assert re.search(r"^expected +fed$", rollout.out, re.MULTILINE)
    assert mettle("eval", "view", path, "-i", "1", "--json").json["answer"] == "fed"
    beyond = mettle("eval", "view", path, "-i", "2")
    assert (beyond.code, beyond.err) == (2, f"error: {path} has rollouts 0 to 1, not 2\n")


def test_no_evaluations_says_how_to_begin(mettle):
    assert mettle("eval", "view").out.endswith("next: mettle eval run ENV -m MODEL\n")
    assert mettle("eval", "view", "nowhere").code == 2


def test_control_characters_of_a_model_do_not_reach_the_terminal(mettle, tmp_path):
    folder = tmp_path / "outputs" / "evals" / "e--m" / "00000000"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text('{"env_id": "e", "model": "m", "time_ms": 1500}')
    row = {"example_id": 0, "prompt": [], "completion": [{"role": "assistant", "content": "a\x1b[31mb"}], "reward": 0.0}
    (folder / "results.jsonl").write_text(json.dumps(row) + "\n")
    assert "\x1b" not in mettle("eval", "view", folder).out + mettle("eval", "view", folder, "-i", "0").out
    assert "1.5 s" in mettle("eval", "view").out, "older files have milliseconds"


def test_an_excerpt_is_the_last_thing_said_in_one_short_line():
    row = {
        "completion": [{"role": "assistant", "content": "first"}, {"role": "assistant", "content": "a\nb " + "x" * 99}]
    }
    assert excerpt(row).startswith("a b xxx")
    assert len(excerpt(row)) == 60
