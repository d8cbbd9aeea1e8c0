"""`mettle eval`: measure a model on an environment, and look at what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from mettle.cli.eval_check import check
from mettle.cli.groups import NounGroup
from mettle.cli.terminal import json_option
from mettle.errors import UserError


@click.group(cls=NounGroup)
def evaluations() -> None:
    """Measure a model on an environment, and look at the results."""


@evaluations.command("run")
@click.argument("env_id", metavar="ENV")
@click.option("-m", "--model", required=True, help="A model directory, a named endpoint, or a model at -b.")
@click.option("-b", "--api-base-url", help="OpenAI-compatible endpoint, as http://127.0.0.1:8000/v1.")
@click.option("-k", "--api-key-var", help="Environment variable that holds the endpoint's key.")
@click.option("-n", "--num-examples", type=click.IntRange(min=-1), help="Tasks, -1 for all.  [default: 5]")
@click.option("-r", "--rollouts-per-example", type=click.IntRange(min=1), help="Rollouts of each task.  [default: 3]")
@click.option(
    "-c", "--max-concurrent", type=click.IntRange(min=1), default=32, show_default=True, help="Rollouts at a time."
)
@click.option("-t", "--max-tokens", type=click.IntRange(min=1), help="Longest answer, in tokens.")
@click.option("-T", "--temperature", type=click.FloatRange(min=0.0), help="0 always takes the likeliest token.")
@click.option("-S", "--sampling-args", help="More sampling arguments, as JSON.")
@click.option("-a", "--env-args", help="Arguments of the environment, as JSON.")
@click.option("-C", "--state-columns", help="State keys to save with each rollout, separated by commas.")
@click.option("-o", "--output-dir", type=click.Path(path_type=Path), help="Where to save.  [default: outputs/evals]")
@click.option("-R", "--resume", type=click.Path(path_type=Path), help="Continue the evaluation saved here.")
@click.option(
    "--max-retries", type=click.IntRange(min=0), default=3, help="Of a request and of a rollout.  [default: 3]"
)
@click.option("--shuffle", is_flag=True, help="Take tasks in a random order.")
@click.option("--shuffle-seed", type=int, help="Seed of that order.")
@json_option
def run(env_id: str, is_json: bool, **options: Any) -> None:
    """Measure a model on an environment.

    \b
    mettle eval run reverse-text -m runs/my-run/policy -n 20
    mettle eval run reverse-text -m gpt-5-mini -b https://api.openai.com/v1 -k OPENAI_API_KEY
    """
    from mettle.cli.evaluation import EvalRequest, evaluate

    options["sampling_args"] = _json_object(options["sampling_args"], "--sampling-args")
    options["env_args"] = _json_object(options["env_args"], "--env-args")
    columns = options.pop("state_columns")
    request = EvalRequest(
        env_id=env_id,
        state_columns=tuple(name.strip() for name in columns.split(",")) if columns else (),
        **options,
    )
    evaluate(request, is_json=is_json)


@evaluations.command()
@click.argument("path", type=click.Path(path_type=Path), required=False)
@click.option("-i", "--rollout", "index", type=click.IntRange(min=0), help="Show this rollout whole.")
@click.option("-n", "--num-rows", default=50, type=click.IntRange(min=1), help="Rows to list.  [default: 50]")
@json_option
def view(path: Path | None, index: int | None, num_rows: int, is_json: bool) -> None:
    """Look at saved evaluations. All of them, the rollouts of one, or one rollout."""
    from mettle.cli.results import view_evaluation, view_evaluations, view_rollout

    if path is None:
        if index is not None:
            raise UserError("name the evaluation that the rollout is of: `mettle eval view PATH -i 0`")
        view_evaluations(num_rows, is_json=is_json)
    elif index is None:
        view_evaluation(path, num_rows, is_json=is_json)
    else:
        view_rollout(path, index, is_json=is_json)


evaluations.add_command(check)


def _json_object(text: str | None, option: str) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"{option} {text!r} is not JSON ({error}); write it like '{{\"length\": 4}}'") from error
    if not isinstance(value, dict):
        raise UserError(f"{option} {text!r} is no JSON object; write it like '{{\"length\": 4}}'")
    return value
