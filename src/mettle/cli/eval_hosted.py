"""`mettle eval run --hosted`, `eval logs`, `eval stop`: evaluations that the Hub's machine runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from mettle.cli.account import hub_client
from mettle.cli.terminal import print_json, print_next
from mettle.errors import UserError

if TYPE_CHECKING:
    from mettle.evals.spec import EvalSpec

_SENT = (
    "num_examples", "rollouts_per_example", "env_args", "extra_env_kwargs", "max_concurrent", "max_retries",
    "independent_scoring", "shuffle", "shuffle_seed", "timeout", "state_columns", "api_client_type", "api_base_url",
    "api_key_var", "provider",
)  # fmt: skip
_NOT_SENT = ("headers", "headers_from_state", "endpoints_path", "tokenizer", "env_dir_path", "output_dir", "resume")


def submit_evaluations(specs: Sequence[EvalSpec], *, is_overridden: bool, is_json: bool) -> None:
    """Queue each. Raises: UserError for a setting that cannot be sent, or when the Hub refuses."""
    bodies = [_body(spec, is_overridden) for spec in specs]
    made: list[dict[str, Any]] = []
    with hub_client() as client:
        team = client.context.team
        teams = client.get("/user/teams")["data"] if team else []
        team_id = next((t["teamId"] for t in teams if t["slug"] == team), None)
        made = [client.post("/hosted-evaluations", {**body, "team_id": team_id}) for body in bodies]
    if is_json:
        print_json(made if len(made) > 1 else made[0])
        return
    for one in made:
        click.echo(f"queued {one['evaluation_id']}: {one['viewer_url']}")
    print_next(f"mettle eval logs {made[0]['evaluation_id']}")


def _body(spec: EvalSpec, is_overridden: bool) -> dict[str, Any]:
    told = spec.model_dump(mode="json")
    for name in _NOT_SENT:
        if told.get(name):
            raise UserError(f"{name.replace('_', '-')} is for evaluations of this machine; leave it out with --hosted")
    config = {name: told[name] for name in _SENT if told.get(name) is not None}
    return {
        "environment": spec.env_id, "inference_model": spec.model, "name": spec.name, "override_card": is_overridden,
        "eval_config": {**config, "sampling_args": told["sampling_args"]},
    }  # fmt: skip


@click.command("logs")
@click.argument("evaluation_id")
def logs(evaluation_id: str) -> None:
    """Print what a hosted evaluation writes."""
    with hub_client() as client:
        found = client.get(f"/hosted-evaluations/{evaluation_id}/logs")
        state = client.get(f"/evaluations/{evaluation_id}")["status"]
    if found["logs"]:
        click.echo(found["logs"], nl=not found["logs"].endswith("\n"))
    click.echo(f"{evaluation_id}: {state.lower()}" + (f": {found['error']}" if found["error"] else ""), err=True)


@click.command("stop")
@click.argument("evaluation_id")
def stop(evaluation_id: str) -> None:
    """End a hosted evaluation."""
    with hub_client() as client:
        client.ask("PATCH", f"/hosted-evaluations/{evaluation_id}/cancel")
    click.echo(f"{evaluation_id} is ended")
