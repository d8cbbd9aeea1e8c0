"""Evaluations from a TOML file: what is stronger than what, sweeps, and mistakes by file and line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mettle.config.layers import tree_layer
from mettle.config.loader import load_levels
from mettle.config.options import Given, fields_of, own_names
from mettle.config.overrides import parse_overrides
from mettle.envs.packages.eval_defaults import package_defaults
from mettle.errors import UserError
from mettle.evals.plan import EvalFile, read_plan
from mettle.evals.spec import EvalSpec


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Write a file of evaluations and read it; two environments are in the folder."""
    monkeypatch.chdir(tmp_path)
    for name, table in {
        "words": "[tool.verifiers.eval]\nnum_examples = 7\nrollouts_per_example = 2\n",
        "sums": "",
    }.items():
        folder = tmp_path / "environments" / name
        folder.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n{table}')

    def read(text, *tokens):
        (tmp_path / "e.toml").write_text(text)
        given = Given(overrides=tuple(parse_overrides(tokens)))
        return [loaded.config for loaded in read_plan([tmp_path / "e.toml"], given, package_defaults)]

    return read


def test_each_eval_is_stronger_than_what_is_said_for_all_and_that_than_the_environment(plan):
    first, second, third = plan(
        """
        model = "m"
        num_examples = 3
        [sampling]
        temperature = 0.5
        top_p = 0.9
        [[eval]]
        env_id = "words"
        [[eval]]
        id = "words"
        num_examples = 1
        args = {level = 2}
        sampling = {temperature = 0.1}
        [[eval]]
        env_id = "sums"
        model = "other"
        """
    )
    assert (first.num_examples, first.rollouts_per_example, first.model) == (3, 2, "m")
    assert (second.num_examples, second.env_args) == (1, {"level": 2})
    assert second.sampling_args == {"temperature": 0.1, "top_p": 0.9}, "tables merge key by key"
    assert (third.rollouts_per_example, third.model) == (3, "other"), "the built-in default"


def test_the_command_line_is_stronger_than_the_file(plan):
    (spec,) = plan(
        'model = "m"\n[[eval]]\nenv_id = "words"\nnum_examples = 1\ntemperature = 1.0',
        "--num-examples", "9", "--model", "x",
    )  # fmt: skip
    assert (spec.num_examples, spec.model) == (9, "x")
    (spec,) = plan('model = "m"\n[[eval]]\nenv_id = "words"\nsampling = {temperature = 1.0}', "--temperature", "0.0")
    assert spec.sampling_args == {"temperature": 0.0}


def test_within_one_level_sampling_arguments_outweigh_the_short_forms():
    given = {"env_id": "e", "model": "m", "temperature": 0.1, "max_tokens": 5, "sampling_args": {"temperature": 1}}
    spec = load_levels(EvalSpec, [own_names(EvalSpec, tree_layer(given, "test"))]).config
    assert spec.sampling_args == {"temperature": 1, "max_tokens": 5}


def test_an_ablation_is_one_evaluation_for_each_combination(plan):
    specs = plan(
        """
        model = "m"
        [[ablation]]
        env_id = "words"
        num_examples = 2
        [ablation.sweep]
        temperature = [0.0, 1.0]
        env_args.level = [1, 2, 3]
        """
    )
    assert [(s.sampling_args["temperature"], s.env_args["level"]) for s in specs] == [
        (t, level) for t in (0.0, 1.0) for level in (1, 2, 3)
    ]
    assert specs[1].title == "words temperature=0.0 level=2"
    assert {s.num_examples for s in specs} == {2}
    by_model = plan('[[ablation]]\nenv_id = "words"\n[ablation.sweep]\nmodel = ["a", "b"]')
    assert [s.model for s in by_model] == ["a", "b"]


def test_shuffling_without_a_seed_can_be_resumed(plan):
    (spec,) = plan('model = "m"\n[[eval]]\nenv_id = "words"\nshuffle = true')
    assert spec.shuffle_seed == 0


def test_files_beside_the_file_are_found_from_anywhere(plan, tmp_path):
    (tmp_path / "endpoints.toml").write_text("")
    (spec,) = plan('model = "m"\nendpoints_path = "endpoints.toml"\n[[eval]]\nenv_id = "words"')
    assert spec.endpoints_path == str(tmp_path / "endpoints.toml")


def test_settings_of_other_programs_are_accepted(plan):
    (spec,) = plan('model = "m"\ndisable_tui = true\nnum_workers = "auto"\n[[eval]]\nenv_id = "words"\nverbose = true')
    assert spec.env_id == "words"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('model = "m"\n[[eval]]\nenv_id = "words"\nnum_exampels = 3', "e.toml:4: unknown key 'num_exampels'; did you mean 'num_examples'?"),
        ('modl = "m"\n[[eval]]\nenv_id = "words"', "e.toml:1: unknown key 'modl'; did you mean 'model'?"),
        ('model = "m"\n[[eval]]\nenv_id = "words"\nnum_examples = "3"', 'e.toml:4: num_examples = "3": input should be a valid integer'),
        ('model = "m"\n[[eval]]\nenv_id = "words"\n[[eval]]\nmodel = "x"', "e.toml:4: eval.1 has no env_id; set env_id = NAME"),
        ('[[eval]]\nenv_id = "words"', "e.toml:1: eval.0 has no model; set model = NAME"),
        ('model = "m"', "e.toml has no [[eval]] and no [[ablation]]"),
        ('model = "m"\n[[evall]]\nenv_id = "words"', "e.toml:2: unknown key 'evall'; did you mean 'eval'?"),
        ('model = "m"\n[eval]\nenv_id = "words"', "e.toml:2: eval is written as [[eval]] tables"),
        ('model = "m"\n[[ablation]]\nenv_id = "words"', "an [[ablation]] has an [ablation.sweep] with lists of values"),
        ('model = "m"\n[[ablation]]\nenv_id = "words"\n[ablation.sweep]\ntemperature = 1.0', "e.toml:5: temperature = 1.0: a sweep is over a list"),
        ('model = "m"\n[[ablation]]\nenv_id = "words"\n[ablation.sweep]\ntemprature = [1.0]', "e.toml:5: unknown key 'temprature'; did you mean 'temperature'?"),
        ('model = "m"\n[[eval]]\nenv_id = "wrds"', "did you mean 'words'?"),
        ('model = = "m"', "e.toml:1: not valid TOML"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_file_line_and_nearest_key(plan, text, message):
    with pytest.raises(UserError) as raised:
        plan(text)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_reference_names_every_setting_that_has_another_name_or_comes_from_elsewhere():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "evaluations.md").read_text()
    section = page.partition("## Settings of an evaluation")[2]
    own = {*EvalSpec.model_fields, *EvalSpec.GROUPS}
    names = [name for name in fields_of(EvalSpec) if name not in own]
    assert [name for name in names if f"`{name}`" not in section] == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("timeout_minutes = 3", "e.toml:2: timeout_minutes = 3: ends an evaluation elsewhere; here timeout"),
        ("allow_sandbox_access = false", "e.toml:2: allow_sandbox_access = false: nothing here keeps an environment"),
        ('heartbeat_url = "x"', "e.toml:2: heartbeat_url = 'x': nothing here sends heartbeats"),
        ('id = "a"\nenv_id = "words"', "e.toml:2: id and env_id are the same setting; keep one"),
        ('headers = ["no colon"]', "e.toml:2: headers = ['no colon']: must be 'Name: value' lines, or a table"),
    ],
)
def test_what_would_change_a_result_and_does_nothing_here_is_refused(plan, line, message):
    with pytest.raises(UserError) as raised:
        plan(f'model = "m"\n{line}\n[[eval]]\nenv_id = "words"')
    assert message in str(raised.value)


def test_of_two_files_the_later_is_stronger_and_dotted_overrides_win(plan, tmp_path):
    plan('model = "m"\nsampling.top_p = 0.5\nheader = ["A: 1"]\n[[eval]]\nenv_id = "words"')
    (tmp_path / "mine.toml").write_text('model = "mine"\nheaders = {B = "2"}\n')
    given = Given(overrides=tuple(parse_overrides(["--sampling.temperature", "0.7", "--args.level", "3"])))
    (loaded,) = read_plan([tmp_path / "e.toml", tmp_path / "mine.toml"], given, package_defaults)
    assert (loaded.config.model, loaded.config.headers) == ("mine", {"A": "1", "B": "2"})
    assert loaded.config.sampling_args == {"top_p": 0.5, "temperature": 0.7}
    assert loaded.config.env_args == {"level": 3}
    assert loaded.sources["model"] == f"{tmp_path}/mine.toml:1"
    assert loaded.sources["sampling_args.top_p"] == f"{tmp_path}/e.toml:2"
    assert loaded.sources["sampling_args.temperature"] == "--sampling.temperature"
    assert loaded.sources["num_examples"].endswith("words/pyproject.toml:4")


def test_a_resolved_plan_loads_back_to_itself(plan, tmp_path):
    text = 'model = "m"\n[[ablation]]\nid = "words"\n[ablation.sweep]\ntemperature = [0.0, 1.0]\nargs.a = [[1, 2]]\n'
    first = plan(text)
    loaded = read_plan([tmp_path / "e.toml"], Given(), package_defaults)
    assert plan(EvalFile.of(loaded).render()) == first


def test_the_file_in_the_guide_can_be_read(plan, tmp_path):
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "evaluate-a-model.md").read_text()
    (text,) = re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)
    specs = plan(text.replace("gsm8k", "words").replace("reverse-text", "sums"))
    assert len(specs) == 1 + 3 * 2
    assert specs[-1].env_args == {"length": 8}


def test_a_mistake_in_an_environments_own_defaults_names_its_file(plan, tmp_path):
    manifest = tmp_path / "environments" / "sums" / "pyproject.toml"
    manifest.write_text('[project]\nname = "sums"\n[tool.mettle.eval]\nnum_exmples = 3\n')
    with pytest.raises(
        UserError, match=r"sums/pyproject.toml:4: unknown key 'num_exmples'; did you mean 'num_examples'"
    ):
        plan('model = "m"\n[[eval]]\nenv_id = "sums"')
