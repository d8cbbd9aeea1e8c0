"""`mettle eval`: against an endpoint, saved, resumed, looked at."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from mettle.evals.output import figures_of
from mettle.evals.reader import EvaluationReader

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


def only_published(folder: Path) -> Path:
    """As another program, or a release without a store, leaves its folder; the file of rows."""
    shutil.rmtree(folder / "rollouts")
    for file in folder.glob("run.db*"):
        file.unlink()
    return folder / "results.jsonl"


def read_rollouts(folder: Path) -> list[dict]:
    return list(EvaluationReader(folder).rows())


def test_an_endpoint_is_measured_and_the_results_saved(mettle, environment, endpoint):
    ended = mettle("eval", "run", "mirror-words", "-m", "reverser", "-b", endpoint, "-n", "3", "-r", "2")
    assert ended.code == 0, ended.err
    assert re.search(r"^reward +1\.000 \(95 % interval 0\.290 to 1\.000\)$", ended.out, re.MULTILINE)
    assert re.search(r"^pass@2 +1\.000 \(95 % interval 0\.290 to 1\.000\)$", ended.out, re.MULTILINE)
    assert re.search(r"^rollouts +6 of 3 tasks; few tasks tell little", ended.out, re.MULTILINE)
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
    assert "configs/endpoints.toml:1: endpoint.0.model is missing" in ended.err


def test_a_header_without_a_colon_is_named_as_it_was_typed(mettle, environment, endpoint):
    ended = mettle("eval", "run", "mirror-words", "-m", "reverser", "-b", endpoint, "--header-from-state", "X-Session")
    assert ended.code == 2
    assert "headers_from_state = 'X-Session': must be 'Name: value' lines" in ended.err


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
    results = only_published(Path(first["path"]))
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
        (
            ("mirror-words", "-m", "x", "-b", "http://127.0.0.1:9/v1", "-x", '{"max_seq_length": 3}'),
            "mirror-words has no setting 'max_seq_length' (--extra-env-kwargs); did you mean 'max_seq_len'?",
        ),
        (("mirror-words", "-m", "x"), "no model directory and no endpoint"),
        (("mirror-words", "-m", "x", "-b", "nonsense"), "'nonsense' is no base URL"),
        (("mirror-words", "-m", "x", "-b", "http://127.0.0.1:9/v1", "-a", "{1"), "--env-args '{1' is not JSON"),
        (("mirror-words", "-m", "x", "-b", "http://127.0.0.1:9/v1", "-a", "[1]"), "is no JSON object"),
        (("mirror-words", "-m", "x", "-b", "http://127.0.0.1:9/v1", "-a", '{"wrds": 1}'), "takes no argument 'wrds'"),
        (("mirror-words", "-m", "x", "-b", "http://127.0.0.1:9/v1", "-R", "none"), "cannot resume from none"),
        (("mirror-words", "-m", "x", "-p", "opnai"), "did you mean 'openai'?"),
        (
            ("mirror-words", "-m", "x", "-b", "http://127.0.0.1:9/v1", "--api-client-type", "chatt"),
            "did you mean 'chat'?",
        ),
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
    line = rf"^mirror-words +reverser +eval +1\.000 .* 0% +2 rollouts .* {re.escape(path)}$"
    assert re.search(line, listed.out, re.MULTILINE)
    assert [row["path"] for row in mettle("eval", "view", "--json").json] == [path]
    one = mettle("eval", "view", path)
    assert re.search(r"^0 +0 +1\.000 +max_turns_reached +2 +cba$", one.out, re.MULTILINE)
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
    assert figures_of(row).excerpt.startswith("a b xxx")
    assert len(figures_of(row).excerpt) == 60


def run_words(mettle, endpoint, *more) -> dict:
    ended = mettle("eval", "run", "mirror-words", "-m", "reverser", "-b", endpoint, *more, "--json")
    assert ended.code == 0, ended.err
    return ended.json


def test_headers_and_sampling_arguments_reach_the_endpoint(mettle, environment, endpoint, seen):
    more = (
        "-n",
        "1",
        "-r",
        "1",
        "--header",
        "X-Lab: seven",
        "-T",
        "0",
        "-t",
        "9",
        "-S",
        '{"max_tokens": 5, "top_k": 3}',
    )
    run_words(mettle, endpoint, *more)
    ((headers, body),) = seen
    assert headers["X-Lab"] == "seven"
    assert (body["temperature"], body["max_tokens"], body["top_k"]) == (0.0, 5, 3), "0 is a temperature"
    assert "seven" not in next(environment.glob("outputs/evals/*/*/metadata.json")).read_text(), "it may be a secret"


def test_settings_of_the_environment_and_a_time_limit(mettle, environment, endpoint):
    (environment / "mirror_words.py").write_text(
        ENVIRONMENT.replace("return float", "import time; time.sleep(0); return float")
    )
    found = run_words(mettle, endpoint, "-x", '{"pass_threshold": 2.0}', "--timeout", "30", "-n", "2", "-i")
    assert found["pass_at_k"]["1"] == 0.0
    assert found["launch"]["timeout"] == 30.0


@pytest.mark.e2e
def test_rollouts_may_run_in_processes_of_their_own(mettle, environment, endpoint, seen, tmp_path):
    (tmp_path / "configs").mkdir()
    one = f'[[endpoint]]\nendpoint_id = "mine"\nurl = "{endpoint}"\nmodel = '
    (tmp_path / "configs" / "endpoints.toml").write_text(f'{one}"a"\n{one}"b"\n')
    ended = mettle("eval", "run", "mirror-words", "-m", "mine", "-n", "3", "-r", "2", "-w", "1", "--json")
    assert ended.code == 0, ended.err
    assert (ended.json["avg_reward"], ended.json["stats"]["num_rollouts"]) == (1.0, 6)
    assert sorted(body["model"] for _, body in seen) == ["a"] * 3 + ["b"] * 3
    refused = mettle("eval", "run", "mirror-words", "-m", "mine", "-w", "1", "-x", '{"system_prompt": "x"}')
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "worker processes would not get 'system_prompt'" in refused.err


def test_an_evaluation_that_is_not_saved_leaves_nothing(mettle, environment, endpoint):
    found = run_words(mettle, endpoint, "--no-save-results", "-n", "1")
    assert found["path"] is None
    assert not (environment / "outputs").exists()


def test_prices_give_a_cost(mettle, environment, endpoint, tmp_path):
    (tmp_path / "prices.toml").write_text("[prices.reverser]\ninput_usd_per_mtok = 1e6\noutput_usd_per_mtok = 0\n")
    found = run_words(mettle, endpoint, "-e", "prices.toml", "-n", "2", "-r", "1")
    assert found["cost"] == {"input_usd": 10.0, "output_usd": 0.0, "total_usd": 10.0}
    ended = mettle("eval", "run", "mirror-words", "-m", "reverser", "-b", endpoint, "-e", "prices.toml", "-n", "2")
    assert re.search(r"^cost +\$30\.00$", ended.out, re.MULTILINE)


def test_endpoints_of_one_name_share_the_rollouts(mettle, environment, endpoint, seen, tmp_path):
    (tmp_path / "configs").mkdir()
    one = f'[[endpoint]]\nendpoint_id = "mine"\nurl = "{endpoint}"\nmodel = '
    (tmp_path / "configs" / "endpoints.toml").write_text(f'{one}"a"\n{one}"b"\n')
    found = mettle("eval", "run", "mirror-words", "-m", "mine", "-n", "3", "-r", "2", "--json").json
    assert found["model"] == "a"
    assert sorted(body["model"] for _, body in seen) == ["a"] * 3 + ["b"] * 3


def test_several_evaluations_from_one_file(mettle, environment, endpoint, tmp_path):
    text = f"""
    api_base_url = "{endpoint}"
    rollouts_per_example = 1
    [[eval]]
    env_id = "mirror-words"
    model = "first"
    [[ablation]]
    env_id = "mirror-words"
    model = "second"
    num_examples = 1
    [ablation.sweep]
    temperature = [0.0, 1.0]
    """
    (tmp_path / "e.toml").write_text(text)
    found = mettle("eval", "run", "e.toml", "--json").json["evaluations"]
    assert [(e["model"], e["num_examples"], e["title"]) for e in found] == [
        ("first", 3, "mirror-words"),
        ("second", 1, "mirror-words temperature=0.0"),
        ("second", 1, "mirror-words temperature=1.0"),
    ]
    assert [e["name"] for e in found[1:]] == [e["title"] for e in found[1:]]
    again = mettle("eval", "run", "e.toml", "--resume")
    assert again.code == 0, again.err
    assert "mirror-words temperature=1.0: " in again.out
    paths = {line.rpartition(": ")[2] for line in again.out.splitlines() if ": environments" in line}
    assert paths == {e["path"] for e in found}, "each evaluation found its own folder"


def test_a_mistake_in_one_evaluation_shows_before_any_runs(mettle, environment, endpoint, seen, tmp_path):
    (tmp_path / "e.toml").write_text(
        f'api_base_url = "{endpoint}"\nmodel = "m"\n[[eval]]\nenv_id = "mirror-words"\n'
        '[[eval]]\nenv_id = "mirror-words"\nargs = {wrds = 1}\n'
    )
    ended = mettle("eval", "run", "e.toml")
    assert (ended.code, seen) == (2, [])
    assert "mirror-words: mirror-words takes no argument 'wrds'" in ended.err


def test_a_saved_evaluation_is_continued_without_saying_again_what_it_was(mettle, environment, endpoint, seen):
    first = run_words(mettle, endpoint, "-n", "2", "-r", "2", "-a", '{"words": "ab cd ef"}', "-T", "0.5")
    results = only_published(Path(first["path"]))
    results.write_text("".join(results.read_text().splitlines(keepends=True)[:3]))
    seen.clear()
    again = mettle("eval", "run", "--resume", first["path"], "--json")
    assert again.code == 0, again.err
    assert len(seen) == 1
    assert again.json["path"] == first["path"]
    assert again.json["time"] > first["time"], "the time of both"
    more = mettle("eval", "run", "--resume", first["path"], "-n", "3", "--json").json
    assert (more["num_examples"], len(seen)) == (3, 3)
    other = mettle("eval", "run", "--resume", first["path"], "-T", "1.0")
    assert (other.code, other.err.count("\n")) == (2, 1)
    assert "its sampling_args.temperature is 0.5, this evaluation's is 1.0" in other.err


def test_resume_without_a_path_takes_the_newest_one_like_this(mettle, environment, endpoint, seen):
    first = run_words(mettle, endpoint, "-n", "2", "-r", "1")
    run_words(mettle, endpoint, "-n", "2", "-r", "1", "-T", "1.0")
    seen.clear()
    assert run_words(mettle, endpoint, "-n", "2", "-r", "1", "-R")["path"] == first["path"]
    assert seen == []
    assert run_words(mettle, endpoint, "-n", "2", "-r", "1", "-T", "0.3", "-R")["path"] != first["path"]


def test_two_evaluations_are_compared(mettle, environment, endpoint):
    first = run_words(mettle, endpoint, "-n", "3", "-r", "1", "-T", "0.5")
    second = run_words(mettle, endpoint, "-n", "3", "-r", "1")
    results = only_published(Path(second["path"]))
    rows = read_rollouts(results)
    results.write_text("".join(json.dumps({**row, "reward": float(row["example_id"] != 0)}) + "\n" for row in rows))
    ended = mettle("eval", "compare", first["path"], second["path"])
    assert ended.code == 0, ended.err
    assert ended.err == "note: sampling_args.temperature differs: 0.5 and None\n"
    assert re.search(r"^reward +1\.000 +0\.667 +-0\.333 +-0\.906 to 0\.636 +1$", ended.out, re.MULTILINE)
    assert "0 tasks rose, 1 fell, 2 stayed (sign test p = 1)" in ended.out
    assert "lost 1: 0 (1.00 to 0.00)" in ended.out
    assert "no clear difference: anything from -0.906 to +0.636 fits" in ended.out
    found = mettle("eval", "compare", first["path"], second["path"], "--json").json
    assert [task["example_id"] for task in found["lost"]] == [0]
    same = mettle("eval", "compare", first["path"], first["path"])
    assert "no clear difference: anything from -0.710 to +0.710 fits" in same.out


def test_an_evaluation_is_exported_in_four_forms(mettle, environment, endpoint, tmp_path):
    path = run_words(mettle, endpoint, "-n", "2", "-r", "1")["path"]
    ended = mettle("eval", "export", path)
    assert ended.code == 0, ended.err
    assert ended.out.startswith(f"wrote {path}/report.html (")
    assert "<!doctype html>" in (Path(path) / "report.html").read_text()
    assert mettle("eval", "export", path, "-o", "t.csv", "--json").json["num_rollouts"] == 2
    assert (tmp_path / "t.csv").read_text().count("mirror") == 0
    assert mettle("eval", "export", path, "-o", "t.parquet").code == 0
    assert mettle("eval", "export", path, "-o", "t.jsonl").out.startswith("wrote t.jsonl (")
    assert (tmp_path / "t.jsonl").read_text() == (Path(path) / "results.jsonl").read_text()
    assert not (tmp_path / "results.jsonl").exists()
    assert mettle("eval", "export", path, "-o", "folder", "-f", "jsonl").out.startswith("wrote folder/results.jsonl (")
    assert (tmp_path / "folder" / "metadata.json").exists()
    assert mettle("eval", "export", "nowhere").code == 2
