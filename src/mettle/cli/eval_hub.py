"""`mettle eval push|list|samples`: evaluations at a Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mettle.cli.account import hub_client
from mettle.cli.terminal import find_run, json_option, print_json, print_next, print_table
from mettle.errors import UserError
from mettle.wording import between, figure


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--env", "environment", help="Environment of the Hub that was evaluated, as owner/name. [default: its own word]"
)
@click.option("--name", help="Name of the evaluation. [default: environment and model]")
@click.option("--public", is_flag=True, help="Whoever reaches the Hub sees it. [default: oneself, or the team]")
@json_option
def push(path: Path, environment: str | None, name: str | None, public: bool, is_json: bool) -> None:
    """Push the results of an evaluation. A folder of this or another framework, or a run.

    \b
    mettle eval push outputs/evals/reverse-text--tiny/1a2b3c4d --public
    """
    tell_push(push_evaluation(path, environment, name, public), is_json=is_json)


def push_evaluation(path: Path, environment: str | None, name: str | None, is_public: bool) -> dict[str, Any]:
    """Push the results of an evaluation; what the Hub says of it."""
    from mettle.evals.reader import EvaluationReader

    with hub_client() as client:
        client.whoami()
        reader = EvaluationReader(find_run(str(path)))
        if not len(reader):
            raise UserError(f"{path} has no rollouts to push")
        entry, metadata = reader.entry, dict(reader.metadata)
        team = client.context.team
        teams = client.teams() if team else []
        done: dict[str, Any] = client.push_evaluation(
            name or f"{entry.env_id} {entry.model}", environment or entry.env_id, reader.rows(), model=entry.model,
            metadata={key: value for key, value in metadata.items() if key != "stats"}, is_public=is_public,
            framework=metadata.get("framework") or "mettle",
            team_id=next((t["teamId"] for t in teams if t["slug"] == team), None),
        )  # fmt: skip
    return done


def tell_push(done: dict[str, Any], *, is_json: bool) -> None:
    """Say what was pushed."""
    if is_json:
        print_json(done)
        return
    interval = between((done["ci_low"], done["ci_high"])) if done["ci_low"] is not None else "no interval"
    click.echo(f"pushed {done['total_samples']} samples, mean reward {figure(done['avg_score'])} ({interval})")
    click.echo(f"{done['viewer_url']}")
    print_next(f"mettle eval samples {done['evaluation_id']}")


@click.command("pushed")
@click.option("--env", "environment", help="Only those of this environment.")
@click.option("-n", "--num", default=20, show_default=True, type=click.IntRange(1, 100), help="How many.")
@json_option
def list_pushed(environment: str | None, num: int, is_json: bool) -> None:
    """List the evaluations at the Hub, the newest first."""
    with hub_client(needs_token=False) as client:
        found = client.get("/evaluations/", environment_name=environment, limit=num)["evaluations"]
    if is_json:
        print_json(found)
    elif not found:
        click.echo("nothing was pushed yet")
    else:
        rows = [
            (e["evaluation_id"], e["environment_names"][0], e["model_name"], e["avg_score"], e["status"].lower())
            for e in found
        ]
        print_table(("id", "environment", "model", "reward", ""), rows)


@click.command()
@click.argument("evaluation_id")
@click.option("-n", "--num", default=100, show_default=True, type=click.IntRange(1, 1000), help="How many.")
@click.option("--page", default=1, show_default=True, type=click.IntRange(min=1), help="Which page.")
def samples(evaluation_id: str, num: int, page: int) -> None:
    """Print the samples of an evaluation at the Hub, as JSON."""
    with hub_client(needs_token=False) as client:
        print_json(client.get(f"/evaluations/{evaluation_id}/samples", limit=num, page=page))
