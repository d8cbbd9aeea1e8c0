"""`mettle eval`: measure a model on an environment, and look at what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mettle.cli.arguments import json_object
from mettle.cli.eval_check import check
from mettle.cli.groups import NounGroup
from mettle.cli.terminal import json_option
from mettle.errors import UserError

RESUME_NEWEST = ""


@click.group(cls=NounGroup)
def evaluations() -> None:
    """Measure a model on an environment, and look at the results."""


@evaluations.command("run")
@click.argument("what", metavar="ENV|FILE.toml", required=False)
@click.option("-m", "--model", help="A model directory, a named endpoint, or a model at -b or -p.")
@click.option("-b", "--api-base-url", help="OpenAI-compatible endpoint, as http://127.0.0.1:8000/v1.")
@click.option("-p", "--provider", help="Who serves the model: openai, anthropic, openrouter, ollama, ...")
@click.option("-k", "--api-key-var", help="Environment variable that holds the endpoint's key.")
@click.option("-e", "--endpoints-path", help="File of named endpoints.  [default: configs/endpoints.toml]")
@click.option("--api-client-type", help="chat, completions, responses, anthropic or tokens.  [default: chat]")
@click.option("--tokenizer", help="Model directory whose tokenizer --api-client-type tokens uses.")
@click.option("--header", "headers", multiple=True, help="Header of each request, as 'Name: value'; repeatable.")
@click.option(
    "--header-from-state", "headers_from_state", multiple=True,
    help="Header of a rollout's requests, as 'Name: key' of its state (trajectory_id, task, ...); repeatable.",
)  # fmt: skip
@click.option("-n", "--num-examples", type=click.IntRange(min=-1), help="Tasks, -1 for all.  [default: 5]")
@click.option("-r", "--rollouts-per-example", type=click.IntRange(min=1), help="Rollouts of each task.  [default: 3]")
@click.option("-c", "--max-concurrent", type=click.IntRange(min=1), help="Rollouts at a time.  [default: 32]")
@click.option("-w", "--num-workers", help="Processes to run rollouts in, or auto.  [default: 0, this process]")
@click.option("-t", "--max-tokens", type=click.IntRange(min=1), help="Longest answer, in tokens.")
@click.option("-T", "--temperature", type=click.FloatRange(min=0.0), help="0 always takes the likeliest token.")
@click.option("-S", "--sampling-args", help="More sampling arguments, as JSON; they outweigh -t and -T.")
@click.option("-a", "--env-args", help="Arguments of the environment, as JSON.")
@click.option("-x", "--extra-env-kwargs", help="Settings of the environment once it is made, as JSON.")
@click.option("--env-dir-path", help="Another folder that environments are in.")
@click.option("-C", "--state-columns", help="State keys to save with each rollout, separated by commas.")
@click.option("-o", "--output-dir", help="Where to save.  [default: outputs/evals]")
@click.option(
    "-s/ ", "--save-results/--no-save-results", default=None, help="Save results as they come.  [default: saved]"
)
@click.option(
    "-R", "--resume", is_flag=False, flag_value=RESUME_NEWEST, metavar="[PATH]",
    help="Continue the evaluation saved in PATH, or the newest one like this.",
)  # fmt: skip
@click.option("-i", "--independent-scoring", is_flag=True, help="Score each rollout by itself, not with its group.")
@click.option("--max-retries", type=click.IntRange(min=0), help="Of a request and of a rollout.  [default: 3]")
@click.option("--timeout", type=click.FloatRange(min=0.0), help="Seconds that a rollout may take.")
@click.option("--shuffle", is_flag=True, help="Take tasks in a random order.")
@click.option("--shuffle-seed", type=click.IntRange(min=0), help="Seed of that order.  [default: 0]")
@click.option("-d", "--disable-tui", "is_plain", is_flag=True, help="Lines instead of the live display.")
@json_option
def run(what: str | None, is_json: bool, is_plain: bool, **options: Any) -> None:
    """Measure a model on an environment, or run the evaluations of a TOML file.

    \b
    mettle eval run reverse-text -m runs/my-run/policy -n 20
    mettle eval run reverse-text -m gpt-5-mini -p openai -n 50 -r 4
    mettle eval run configs/eval/nightly.toml --resume
    """
    from mettle.cli.evaluation import evaluate

    for name in ("sampling_args", "env_args", "extra_env_kwargs"):
        options[name] = json_object(options[name], f"--{name.replace('_', '-')}")
    resume = options.pop("resume")
    if resume is not None:
        options.update({"resume": True} if resume == RESUME_NEWEST else {"resume_path": resume})
    evaluate(what, _settings(options), is_json=is_json, is_plain=is_plain)


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    """What was said on the command line, as settings of an evaluation; what was not said is not there."""
    from mettle.evals.spec import checked

    said = {name: value for name, value in options.items() if value is not None and value is not False}
    said = {name: value for name, value in said.items() if value not in ((), {})}
    if options["save_results"] is False:
        said["save_results"] = False
    return dict(checked(name, value) for name, value in said.items())


@evaluations.command()
@click.argument("path", type=click.Path(path_type=Path), required=False)
@click.option("-i", "--rollout", "index", type=click.IntRange(min=0), help="Show this rollout whole.")
@click.option("-n", "--num-rows", default=50, type=click.IntRange(min=1), help="Rows to list.  [default: 50]")
@click.option("--plain", "is_plain", is_flag=True, help="Print instead of opening the browser.")
@json_option
def view(path: Path | None, index: int | None, num_rows: int, is_plain: bool, is_json: bool) -> None:
    """Look at saved evaluations. All of them, the rollouts of one, or one rollout.

    In a terminal this opens a browser (it needs `mettle-lab[tui]`); anywhere else, and with --plain, it prints.
    """
    from mettle.cli.browser import open_browser
    from mettle.cli.results import view_evaluation, view_evaluations, view_rollout

    if not is_plain and not is_json and open_browser(path, index):
        return
    if path is None:
        if index is not None:
            raise UserError("name the evaluation that the rollout is of: `mettle eval view PATH -i 0`")
        view_evaluations(num_rows, is_json=is_json)
    elif index is None:
        view_evaluation(path, num_rows, is_json=is_json)
    else:
        view_rollout(path, index, is_json=is_json)


@evaluations.command()
@click.argument("before", metavar="A", type=click.Path(path_type=Path))
@click.argument("after", metavar="B", type=click.Path(path_type=Path))
@click.option("-n", "--num-tasks", default=10, type=click.IntRange(min=0), help="Flipped tasks to list.  [default: 10]")
@json_option
def compare(before: Path, after: Path, num_tasks: int, is_json: bool) -> None:
    """Say what changed from evaluation A to evaluation B, task by task, and how sure that is."""
    from mettle.cli.results import compare_evaluations

    compare_evaluations(before, after, num_tasks, is_json=is_json)


@evaluations.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write.  [default: beside the results]")
@click.option(
    "-f", "--format", "kind", type=click.Choice(["html", "csv", "parquet"]),
    help="What to write; the ending of -o says it too.  [default: html]",
)  # fmt: skip
@click.option("--num-rollouts", type=click.IntRange(min=0), help="Conversations in the page.  [default: all]")
@json_option
def export(path: Path, output: Path | None, kind: str | None, num_rollouts: int | None, is_json: bool) -> None:
    """Write an evaluation as one page for a browser, or as a table.

    \b
    mettle eval export outputs/evals/gsm8k--mine/0a1b2c3d -o report.html
    """
    from mettle.cli.results import export_evaluation

    export_evaluation(path, output, kind, num_rollouts, is_json=is_json)


evaluations.add_command(check)
