"""`mettle eval import`: logs of other programs as evaluations here."""

from __future__ import annotations

from pathlib import Path

import click

from mettle.cli.terminal import json_option, print_json, print_next
from mettle.errors import UserError
from mettle.wording import count, printable


@click.command("import")
@click.argument("logs", metavar="FILE...", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "-o", "--output-dir", type=click.Path(path_type=Path), help="Folder of evaluations.  [default: outputs/evals]"
)
@click.option("--score", "scorer", default="", help="Score that is the reward.  [default: the log's first]")
@click.option("--push", "is_push", is_flag=True, help="Push each to the Hub in use, too.")
@click.option("--env", "environment", help="With --push: environment of the Hub, as owner/name.")
@click.option("--name", help="With --push: name of the evaluation. [default: task and model]")
@click.option("--public", is_flag=True, help="With --push: whoever reaches the Hub sees it.")
@json_option
def import_(
    logs: tuple[Path, ...], output_dir: Path | None, scorer: str, is_push: bool, environment: str | None,
    name: str | None, public: bool, is_json: bool,
) -> None:  # fmt: skip
    """Take in logs of Inspect (`.eval` or `.json`): samples, messages, scores, tokens, errors.

    They are listed, viewed, compared, exported and pushed as other evaluations are. The same log again replaces what it
    left.

    \b
    mettle eval import logs/2026-11-20T10-00-00_gsm8k_x.eval
    mettle eval import logs/*.eval --score match --push --env ann/gsm8k
    """
    from mettle.cli.eval_hub import push_evaluation, tell_push
    from mettle.evals.imported import import_inspect_log
    from mettle.evals.places import remember_place

    if not is_push and (environment or name or public):
        raise UserError("--env, --name and --public are of what is pushed; add --push")
    told = []
    for log in logs:
        folder = output_dir or Path("outputs") / "evals"
        done = import_inspect_log(log, folder, scorer)
        remember_place(folder)
        told.append({"log": str(log), "path": str(done.path), "num_rollouts": done.num_rollouts, "score": done.scorer})
        if not is_json:
            click.echo(f"{done.path}: {count(done.num_rollouts, 'rollout')}, the reward is {printable(done.scorer)}")
            if done.status != "success":
                click.echo(f"note: {log}: Inspect says {printable(done.status)}; what it has is here", err=True)
        if is_push:
            pushed = push_evaluation(done.path, environment, name, public)
            told[-1]["evaluation_id"] = pushed["evaluation_id"]
            if not is_json:
                tell_push(pushed, is_json=False)
    if is_json:
        print_json(told)
    elif not is_push:
        print_next(f"mettle eval view {told[-1]['path']}")
