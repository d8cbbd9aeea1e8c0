"""`mettle data generate`: training data from rollouts."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from mettle.cli.options import ConfigCommand, dry_run_option, print_config, split_words, with_words
from mettle.cli.terminal import going_on, json_option, print_json, print_next, print_table
from mettle.errors import ServiceError
from mettle.runs.program import program

if TYPE_CHECKING:
    from mettle.config.options import Given
    from mettle.synthesis.config import GenerateSpec
    from mettle.synthesis.dataset import Written


@click.command(
    cls=ConfigCommand, model="mettle.synthesis.config:GenerateSpec", metavar="[ENV|FILE.toml]... [--KEY.KEY VALUE]..."
)
@dry_run_option
@json_option
def generate(words: list[str], given: Given, is_dry_run: bool, is_json: bool) -> None:
    """Make a set for supervised fine-tuning of good rollouts. The same command again continues after a kill.

    \b
    mettle data generate grade-math -m big -n 500 -r 8 --min-reward 1
    mettle data generate --from outputs/evals/grade-math--big/0a1b2c3d
    """
    from mettle.synthesis.config import load_spec

    files, names = split_words(words)
    loaded = load_spec(files, with_words(given, "env_id", names))
    if is_dry_run:
        print_config(loaded, is_json=is_json)
        return
    from mettle.synthesis.generate import build

    wanted = loaded.config
    if wanted.results is None:
        _run(wanted, is_json=is_json)
    written = build(wanted)
    if is_json:
        print_json({"path": str(wanted.folder), **written.summary})
    else:
        _print(written)


def _run(wanted: GenerateSpec, *, is_json: bool) -> None:
    import asyncio

    from mettle.cli.local_server import serving
    from mettle.envs.prepared import prepare
    from mettle.evals.spec import unsaved_evaluation

    with ExitStack() as servers:
        prepared = prepare(unsaved_evaluation(wanted), serving(servers))
        servers.enter_context(going_on(f"the same `{program()} data generate` runs what is missing in {wanted.folder}"))
        results = asyncio.run(_rollouts(prepared, wanted, is_quiet=is_json))
    stats = results.stats
    if stats.reward is None:
        first = next(iter(stats.errors.by_cause.values()), None)
        raise ServiceError(f"no rollout of {stats.num_rollouts} has a reward; {first.first_message if first else ''}")


async def _rollouts(prepared: Any, wanted: GenerateSpec, *, is_quiet: bool) -> Any:
    from mettle.cli.progress import EvalProgress
    from mettle.synthesis.generate import generate_rollouts

    async with EvalProgress([prepared.tally], is_quiet=is_quiet):
        return await generate_rollouts(prepared, wanted, prepared.tally.start)


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
