"""Commands whose options are made from fields: each field once, each flag once, and what they hand on."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import click
import pytest

from mettle.cli.main import cli, run
from mettle.cli.options import FIELD, ConfigCommand
from mettle.config.options import asked_fields


def config_commands(group: click.Group = cli, path: str = "mettle") -> Iterator[tuple[str, ConfigCommand]]:
    context = click.Context(group, info_name=path)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from config_commands(command, f"{path} {name}")
        elif isinstance(command, ConfigCommand):
            yield f"{path} {name}", command


COMMANDS = dict(config_commands())


def test_the_commands_that_are_configured_are_these():
    assert set(COMMANDS) >= {
        "mettle eval run", "mettle gepa run", "mettle data generate", "mettle env test", "mettle inference serve",
        "mettle hub serve",
    }  # fmt: skip


@pytest.mark.parametrize("path", COMMANDS)
def test_every_field_is_an_option_exactly_once_and_no_flag_means_two_things(path):
    command = COMMANDS[path]
    fields = [asked.name for asked in asked_fields(command.model) if not asked.option.is_argument]
    options = [param.name.removeprefix(FIELD) for param in command.params if param.name.startswith(FIELD)]
    assert Counter(options) == Counter(fields) == Counter(set(fields))
    flags = [flag for param in command.params for flag in (*param.opts, *param.secondary_opts) if flag.strip()]
    assert [flag for flag, num in Counter(flags).items() if num > 1] == []


@pytest.mark.parametrize("path", COMMANDS)
def test_every_option_says_what_it_means(path):
    assert [param.name for param in COMMANDS[path].params if isinstance(param, click.Option) and not param.help] == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("eval run e -m m --dry-run -n 7 -t 5", 'num_examples = 7 +# --num-examples'),
        ("eval run e -m m --dry-run -t 5", "max_tokens = 5 +# --max-tokens"),
        ("eval run e -m m --dry-run --sampling.temperature 0.7", "temperature = 0.7 +# --sampling.temperature"),
        ("eval run e -m m --dry-run -R", "resume = true +# --resume"),
        ("eval run e -m m --dry-run --no-save-results", "save_results = false +# --save-results"),
        ("eval run e -m m --dry-run --header a:b --header c:d", 'headers = .*|a = "b" +# --header'),
        ('eval run e -m m --dry-run -a {"x":1}', "x = 1 +# --env-args"),
        ("eval run e -m m --dry-run -w auto", 'num_workers = "auto" +# --num-workers'),
        ("eval run e -m m --dry-run -C a,b", r'state_columns = \["a", "b"\] +# --state-columns'),
        ("gepa run e -m m --dry-run --no-save --env-dir-path .", 'env_dir_path = "." +# --env-dir-path'),
        ("gepa run e -m 42 --dry-run", 'model = "42" +# --model'),
        ("data generate e -m m --dry-run -f jsonl,parquet", r'formats = \["jsonl", "parquet"\] +# --format'),
        ("inference serve dir --dry-run --name x", 'served_model_name = "x" +# --name'),
    ],
)  # fmt: skip
def test_a_dry_run_prints_each_value_and_where_it_came_from(words, line, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "environments" / "e").mkdir(parents=True)
    (tmp_path / "environments" / "e" / "pyproject.toml").write_text('[project]\nname = "e"\nversion = "1"\n')
    assert run(words.split()) == 0, capsys.readouterr().err
    import re

    assert re.search(f"^({line})$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("eval run e -m m --num-exampels 3", "No such option '--num-exampels'"),
        ("eval run e -m m --jsn", "No such option '--jsn'"),
        ("eval run e -m m -Q", "No such option '-Q'"),
        ("eval run e f -m m", "unexpected 'f' after 'e'"),
        ("eval run e -m m --sampling.temperature hot", "--sampling.temperature: sampling_args.temperature"),
        ("eval run e -m m --sampling..t 1", "is not a key"),
        ("eval run e -m m -n many", '--num-examples: num_examples = "many": input should be a valid integer'),
        ("eval run e -m m -r 0", "--rollouts-per-example: rollouts_per_example = 0: input should be greater"),
        ("eval run e -m m -a [1]", "--env-args '[1]' is no JSON object"),
        ("eval run e -m m --shuffle.x 1", "nothing inside"),
        ("gepa run e -m m -B x", '--max-calls: max_calls = "x": input should be a valid integer'),
        (
            "data generate e -m m --reasoning drop",
            "--reasoning: reasoning = \"drop\": input should be 'keep' or 'strip'",
        ),
        ("env test", "Missing argument 'NAME'"),
        ("hub serve here", "unexpected 'here': config files end with .toml"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "environments" / "e").mkdir(parents=True)
    (tmp_path / "environments" / "e" / "pyproject.toml").write_text('[project]\nname = "e"\nversion = "1"\n')
    assert run(words.split()) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_group_lists_its_commands_without_their_models():
    code = (
        "import sys\n"
        "from mettle.cli.main import run\n"
        "for noun in ('eval', 'gepa', 'data', 'inference', 'hub'):\n"
        "    assert run([noun, '--help']) == 0\n"
        "sys.exit(str([n for n in ('pydantic', 'numpy', 'asyncio', 'mettle.config') if n in sys.modules] or 0))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() in ("", "0")
