"""`mettle data generate`: training data from rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mettle.cli.arguments import json_object
from mettle.cli.terminal import going_on, json_option, print_json, print_next, print_table
from mettle.errors import ServiceError, UserError
from mettle.runs.program import program

if TYPE_CHECKING:
    from mettle.synthesis.dataset import Written
    from mettle.synthesis.generate import Task


@click.command()
@click.argument("env_id", metavar="[ENV]", required=False)
@click.option("--from", "results", type=click.Path(path_type=Path), metavar="RESULTS", help="Take a saved evaluation.")
@click.option("-o", "--output-dir", type=click.Path(path_type=Path), help="Where the set goes.  [default: data/ENV]")
@click.option("-m", "--model", help="A model directory, a named endpoint, or a model at -b.")
@click.option("-b", "--api-base-url", help="OpenAI-compatible endpoint, as http://127.0.0.1:8000/v1.")
@click.option("-p", "--provider", help="Who serves the model: openai, anthropic, openrouter, ollama, ...")
@click.option("-k", "--api-key-var", help="Environment variable that holds the endpoint's key.")
@click.option("-e", "--endpoints-path", help="File of named endpoints.  [default: configs/endpoints.toml]")
@click.option("-n", "--num-tasks", type=click.IntRange(min=-1), default=100, show_default=True, help="-1 for all.")
@click.option("-r", "--rollouts", type=click.IntRange(min=1), default=4, show_default=True, help="Of each task.")
@click.option("-c", "--max-concurrent", type=click.IntRange(min=1), help="Rollouts at a time.  [default: 32]")
@click.option("-t", "--max-tokens", type=click.IntRange(min=1), help="Longest answer, in tokens.")
@click.option("-T", "--temperature", type=click.FloatRange(min=0.0), help="0 always takes the likeliest token.")
@click.option("-S", "--sampling-args", help="More sampling arguments, as JSON.")
@click.option("-a", "--env-args", help="Arguments of the environment, as JSON.")
@click.option("--max-retries", type=click.IntRange(min=0), help="Of a failed rollout.  [default: 3]")
@click.option("--split", type=click.Choice(["train", "eval"]), default="train", show_default=True, help="Rows to use.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the order and the split.")
@click.option("--min-reward", type=float, help="Least reward that is kept.  [default: what passes]")
@click.option("--best", type=click.IntRange(min=1), default=1, show_default=True, help="Rollouts to keep of each task.")
@click.option(
    "--near", type=click.FloatRange(0.1, 1.01), default=0.8, show_default=True,
    help="Share of three-word runs that makes a near copy; 1.01 keeps near copies.",
)  # fmt: skip
@click.option(
    "--reasoning", type=click.Choice(["keep", "strip"]), default="keep", show_default=True, help="The model's thoughts."
)
@click.option("--keep-truncated", is_flag=True, help="Keep rollouts that were cut off.")
@click.option(
    "--held-out", type=click.FloatRange(0.0, 0.9), default=0.1, show_default=True, help="Share of tasks set aside."
)
@click.option("-f", "--format", "formats", default="jsonl", show_default=True, help="jsonl, parquet, or jsonl,parquet.")
@json_option
def generate(env_id: str | None, results: Path | None, output_dir: Path | None, is_json: bool, **options: Any) -> None:
    """Make a set for supervised fine-tuning of good rollouts. The same command again continues after a kill.

    \b
    mettle data generate gsm8k -m big -n 500 -r 8 --min-reward 1
    mettle data generate --from outputs/evals/gsm8k--big/0a1b2c3d
    """
    from mettle.synthesis.generate import ROLLOUTS, build
    from mettle.synthesis.selection import Rules

    if (env_id is None) == (results is None):
        raise UserError("say either which environment to run, or with --from which saved evaluation to take")
    if results is None and options["model"] is None:
        raise UserError("say which model with -m: a model directory, an endpoint's id, or a model at -b or -p")
    folder = output_dir or Path("data") / (env_id or "from-results").rpartition("/")[2].partition("@")[0]
    formats = [name.strip() for name in options["formats"].split(",") if name.strip()]
    if results is None:
        _run(str(env_id), folder, options, is_json=is_json)
    written = build(
        results or folder / ROLLOUTS,
        folder,
        options["min_reward"],
        lambda least: Rules(
            least, options["best"], options["near"], options["reasoning"], options["held_out"],
            options["keep_truncated"], options["seed"],
        ),
        formats,
    )  # fmt: skip
    if is_json:
        print_json({"path": str(folder), **written.summary})
    else:
        _print(written)


def _run(env_id: str, folder: Path, options: Mapping[str, Any], *, is_json: bool) -> None:
    from mettle.cli.local_server import serving
    from mettle.envs.prepared import prepare
    from mettle.evals.spec import checked, spec_from
    from mettle.synthesis.generate import Task

    given: dict[str, Any] = {"env_id": env_id, "save_results": False}
    for name in (
        "model", "api_base_url", "provider", "api_key_var", "endpoints_path", "max_concurrent", "max_tokens",
        "temperature", "max_retries",
    ):  # fmt: skip
        if options[name] is not None:
            given[name] = options[name]
    for name in ("sampling_args", "env_args"):
        if options[name] is not None:
            given[name] = json_object(options[name], f"--{name.replace('_', '-')}")
    spec = spec_from([dict(checked(name, value) for name, value in given.items())])
    task = Task(options["num_tasks"], options["rollouts"], options["split"], options["seed"])
    with ExitStack() as servers:
        prepared = prepare(spec, serving(servers))
        servers.enter_context(going_on(f"the same `{program()} data generate` runs what is missing in {folder}"))
        results = asyncio.run(_rollouts(prepared, task, folder, is_quiet=is_json))
    stats = results.stats
    if stats.reward is None:
        first = next(iter(stats.errors.by_cause.values()), None)
        raise ServiceError(f"no rollout of {stats.num_rollouts} has a reward; {first.first_message if first else ''}")


async def _rollouts(prepared: Any, task: Task, folder: Path, *, is_quiet: bool) -> Any:
    from mettle.cli.progress import Progress
    from mettle.synthesis.generate import generate_rollouts

    async with Progress([prepared.tally], is_quiet=is_quiet):
        return await generate_rollouts(prepared, task, folder, prepared.tally.start)


def _print(written: Written) -> None:
    summary = written.summary
    rows: list[tuple[str, str]] = []
    for side in ("train", "held_out"):
        found = summary[side]
        rows.append((side.replace("_", " "), f"{found['chats']} chats of {found['tasks']} tasks"))
    rows.append(("rollouts", f"{summary['num_rollouts']} of {summary['num_tasks']} tasks"))
    rows += [(f"left out: {reason}", str(num)) for reason, num in summary["left_out"].items()]
    rows.append(("tasks without a row", str(summary["num_tasks_without_a_row"])))
    rows.append(("saved in", str(written.path)))
    print_table(("", ""), rows, title=f"{summary['source']['environment']} by {summary['source']['model']}")
    if "train.jsonl" in written.files:
        print_next(f"mettle data inspect {written.path / 'train.jsonl'}")
    else:
        print_next(f"mettle data inspect {written.path / written.files[0]}")
