"""`mettle gepa`: optimise a system prompt by reflection on scored rollouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from mettle.cli.arguments import json_object
from mettle.cli.groups import NounGroup
from mettle.cli.terminal import json_option
from mettle.errors import UserError

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

TABLES = ("sampling_args", "env_args", "extra_env_kwargs")


@click.group(cls=NounGroup)
def gepa() -> None:
    """Optimise a system prompt by reflection on scored rollouts."""


def _model_options(command: CommandT) -> CommandT:
    for option in reversed(
        (
            click.option("-m", "--model", help="A model directory, a named endpoint, or a model at -b."),
            click.option("-M", "--reflection-model", help="Model that rewrites prompts.  [default: the model]"),
            click.option("-b", "--api-base-url", help="OpenAI-compatible endpoint, as http://127.0.0.1:8000/v1."),
            click.option("--provider", help="Who serves the models: openai, anthropic, openrouter, ollama, ..."),
            click.option("-k", "--api-key-var", help="Environment variable that holds the endpoint's key."),
            click.option("-e", "--endpoints-path", help="File of named endpoints.  [default: configs/endpoints.toml]"),
            click.option("--header", "headers", multiple=True, help="Header of each request, 'Name: value'."),
            click.option("-t", "--max-tokens", type=click.IntRange(min=1), help="Longest answer, in tokens."),
            click.option("-T", "--temperature", type=click.FloatRange(min=0.0), help="Of the model, not of -M."),
            click.option("-S", "--sampling-args", help="More sampling arguments of the model, as JSON."),
            click.option(
                "-c", "--max-concurrent", type=click.IntRange(min=1), help="Rollouts at a time.  [default: 32]"
            ),
            click.option("--max-retries", type=click.IntRange(min=0), help="Of a failed rollout.  [default: 3]"),
        )
    ):
        command = option(command)
    return command


def _search_options(command: CommandT) -> CommandT:
    for option in reversed(
        (
            click.option(
                "-B", "--max-calls", type=click.IntRange(min=1), help="Rollouts to search with.  [default: 500]"
            ),
            click.option("-n", "--num-train", type=click.IntRange(min=1), help="Rows to learn from.  [default: 100]"),
            click.option("-N", "--num-val", type=click.IntRange(min=1), help="Rows to choose by.  [default: 50]"),
            click.option(
                "--num-test", type=click.IntRange(min=0), help="Held-out rows, before and after.  [default: 50]"
            ),
            click.option(
                "--test-rollouts", type=click.IntRange(min=1), help="Rollouts of each of those.  [default: 1]"
            ),
            click.option("--minibatch-size", type=click.IntRange(min=1), help="Rows of one reflection.  [default: 3]"),
            click.option("--perfect-score", type=float, help="Reward that needs no reflection.  [default: 1]"),
            click.option("--state-columns", help="State keys to show to the reflection, separated by commas."),
            click.option(
                "--tool-descriptions", is_flag=True, default=None, help="Rewrite the tools' descriptions, too."
            ),
            click.option("--seed-prompt", help="Prompt to start from, or @FILE.  [default: the environment's]"),
            click.option("--seed", type=click.IntRange(min=0), help="Of rows and search.  [default: 0]"),
        )
    ):
        command = option(command)
    return command


@gepa.command("run")
@click.argument("what", metavar="ENV|FILE.toml", required=False)
@_model_options
@_search_options
@click.option("-a", "--env-args", help="Arguments of the environment, as JSON.")
@click.option("-x", "--extra-env-kwargs", help="Settings of the loaded environment, as JSON.")
@click.option("-p", "--env-dir-path", help="Folder of environments to look in first.")
@click.option("-o", "--run-dir", help="Where to save.  [default: outputs/gepa, beside the environment]")
@click.option("--resume", type=click.Path(path_type=Path), metavar="DIR", help="Continue the run saved here.")
@click.option("--no-save", is_flag=True, help="Keep nothing on disk.")
@click.option("-u", "--tui", is_flag=True, hidden=True, help="A terminal gets the live display anyway.")
@click.option("--plain", is_flag=True, help="Lines, even on a terminal.")
@json_option
def run(
    what: str | None, resume: Path | None, no_save: bool, tui: bool, plain: bool, is_json: bool, **options: Any
) -> None:
    """Optimise the system prompt of an environment, and say what that is worth on rows the search never saw.

    \b
    mettle gepa run gsm8k -m small -M big -B 500
    mettle gepa run configs/gepa/gsm8k.toml
    mettle gepa run --resume outputs/gepa/gsm8k--small/0a1b2c3d
    """
    from mettle.cli.optimisation import optimise

    given = {name: _value(name, value) for name, value in options.items() if value not in (None, ())}
    if no_save:
        given["save_results"] = False
    optimise(what, resume, given, is_json=is_json, is_plain=plain)


def _value(name: str, value: Any) -> Any:
    if name in TABLES:
        return json_object(value, f"--{name.replace('_', '-')}")
    if name == "seed_prompt" and value.startswith("@"):
        try:
            return Path(value[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--seed-prompt {value}: {error}") from error
    if name == "headers":
        return list(value)
    return value
