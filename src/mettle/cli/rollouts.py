"""`mettle rl rollouts RUN [ROLLOUT]`: what the policy said while it trained, and what it was credited with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from mettle.cli.terminal import console, find_run, json_option, print_json, print_next, print_table
from mettle.errors import UserError
from mettle.wording import DASH, count, duration, figure, format_reward, printable

if TYPE_CHECKING:
    from mettle.hub.models import RolloutDetail, ShownRollout
    from mettle.storage.ledger import Ledger
    from mettle.storage.run_dir import RunDir

SORTS = ("newest", "oldest", "reward", "-reward", "tokens", "duration", "advantage")


@click.command()
@click.argument("run")
@click.argument("rollout", required=False)
@click.option("--step", type=int, help="Those of this step: of its batch, or of its evaluation.")
@click.option("--env", "env_id", help="Those of this environment.")
@click.option("--kind", type=click.Choice(["train", "eval"]), help="Sampled for training or for an evaluation.")
@click.option("--words", default="", help="Those whose answer or error has all these words.")
@click.option("--min-reward", type=float, help="Those that earned at least this.")
@click.option("--errors", "is_error", is_flag=True, help="Those that failed.")
@click.option("--sort", type=click.Choice(SORTS), default="newest", show_default=True, help="Which come first.")
@click.option("-n", "--num-rows", type=click.IntRange(1), default=20, show_default=True, help="How many.")
@click.option("--tokens", "with_tokens", is_flag=True, help="With ROLLOUT: each sampled token and its logprob.")
@json_option
def rollouts(run: str, rollout: str | None, num_rows: int, *, with_tokens: bool, is_json: bool, **chosen: Any) -> None:
    """List the rollouts of a run, or show one: its conversation, reward, advantage and siblings.

    \b
    mettle rl rollouts RUN --step 12 --sort reward
    mettle rl rollouts RUN t2681-0 --tokens
    """
    if with_tokens and rollout is None:
        raise UserError("--tokens is of one rollout: name it, as `mettle rl rollouts RUN ROLLOUT --tokens`")
    from mettle.storage.ledger import Ledger
    from mettle.storage.run_dir import RunDir

    run_dir = RunDir.existing(find_run(run))
    ledger = Ledger(run_dir.ledger, is_read_only=True)
    try:
        if rollout is None:
            _list(run, run_dir, ledger, chosen, num_rows, is_json=is_json)
        else:
            _show(run, run_dir, ledger, rollout, with_tokens=with_tokens, is_json=is_json)
    finally:
        ledger.close()


def _list(run: str, run_dir: RunDir, ledger: Ledger, chosen: dict[str, Any], num_rows: int, *, is_json: bool) -> None:
    from mettle.hub.rollouts import RolloutFilter, add_prompts, find_rollouts

    found = find_rollouts(ledger.database, RolloutFilter(**chosen), 1, num_rows)
    add_prompts(run_dir, ledger.database, found)
    if is_json:
        print_json({"run": run, **found.model_dump()})
        return
    if not found.rollouts:
        click.echo(_none_of(run, run_dir, ledger, chosen))
        print_next(f"mettle rl logs {run}")
        return
    columns = ("rollout", "step", "reward", "advantage", "tokens", "asked", "answered")
    rows = [
        (
            row.rollout_id, DASH if row.step is None else str(row.step), format_reward(row.reward),
            format_reward(row.advantage), row.num_tokens, printable(row.prompt), _answered(row),
        )
        for row in found.rollouts
    ]  # fmt: skip
    print_table(columns, rows)
    if found.total > len(rows):
        click.echo(f"{len(rows)} of {found.total}; -n {found.total} shows all")
    print_next(f"mettle rl rollouts {run} {rows[0][0]}")


def _none_of(run: str, run_dir: RunDir, ledger: Ledger, chosen: dict[str, Any]) -> str:
    """Why a list is empty: a run without rollouts, or a condition that none meets."""
    total = ledger.database.value("SELECT count(*) FROM rollouts")
    if not total:
        return f"run {run} has no rollouts yet"
    given = " ".join(
        f"--{'errors' if name == 'is_error' else name.removesuffix('_id').replace('_', '-')}"
        + ("" if value is True else f" {value}")
        for name, value in chosen.items()
        if value not in (None, False, "") and name != "sort"
    )
    return f"none of the {count(total, 'rollout')} of run {run} is meant by {given}"


def _answered(row: ShownRollout) -> str:
    if row.error_kind is not None:
        return f"{row.error_kind}: {printable(row.error or row.excerpt)}"
    return printable(row.excerpt) + (" (cut)" if row.is_truncated else "")


def _show(run: str, run_dir: RunDir, ledger: Ledger, name: str, *, with_tokens: bool, is_json: bool) -> None:
    from mettle.hub.rollouts import open_rollout
    from mettle.records.tasks import content_of

    detail = open_rollout(run_dir, ledger.database, _meant(run, ledger, name))
    if detail is None:
        raise UserError(f"rollout {name} of run {run} is in the ledger and not in its shard")
    if is_json:
        print_json({"run": run, **detail.model_dump()})
        return
    screen = console()
    for message in detail.messages:
        screen.print(f"[bold]{message.get('role', 'text')}[/bold]")
        screen.print(printable(content_of(message)), markup=False)
        screen.print()
    print_table(("", ""), _facts(detail))
    if with_tokens:
        _print_tokens(detail)
    others = [each for each in detail.siblings if each.rollout_id != detail.row.rollout_id]
    if others:
        click.echo()
        rows = [
            (each.rollout_id, format_reward(each.reward), format_reward(each.advantage), each.num_tokens)
            for each in others
        ]
        print_table(("sibling", "reward", "advantage", "tokens"), rows)
        print_next(f"mettle rl rollouts {run} {others[0].rollout_id}")


def _meant(run: str, ledger: Ledger, name: str) -> str:
    """The rollout that a name or its beginning means.

    Raises: UserError when it means none, or several.
    """
    rows = ledger.database.rows(
        "SELECT rollout_id FROM rollouts WHERE substr(rollout_id, 1, ?) = ? ORDER BY rollout_id = ? DESC LIMIT 2",
        (len(name), name, name),
    )
    if not rows or not name:
        raise UserError(f"run {run} has no rollout {name!r}; `mettle rl rollouts {run}` lists them")
    if len(rows) > 1 and rows[0][0] != name:
        raise UserError(f"several rollouts of run {run} begin with {name!r}: {rows[0][0]} and {rows[1][0]}")
    return str(rows[0][0])


def _facts(detail: RolloutDetail) -> list[tuple[str, str]]:
    row = detail.row
    told: list[tuple[str, Any]] = [
        ("rollout", row.rollout_id),
        ("task", f"{row.env_id} {row.uid or ''}".rstrip()),
        ("step", "not in a batch" if row.step is None else row.step),
        ("reward", row.reward),
        ("advantage", row.advantage),
        *row.metrics.items(),
    ]
    if detail.answer:
        told.append(("expected", printable(detail.answer)))
    versions = (
        f"v{row.version_min}" if row.version_min == row.version_max else f"v{row.version_min} to v{row.version_max}"
    )
    told += [("stopped by", row.stop_condition), ("truncated", row.is_truncated), ("sampled by", versions)]
    told += [("tokens", row.num_tokens), ("turns", row.num_turns), ("time", duration(row.duration_s))]
    if row.error_kind is not None:
        told.append(("error", f"{row.error_kind}: {printable(row.error or '')}"))
    return [(name, figure(value)) for name, value in told]


def _print_tokens(detail: RolloutDetail) -> None:
    click.echo()
    rows = [
        (turn, repr(text), identity, f"{logprob:.4f}", f"v{version}")
        for turn, each in enumerate(detail.turns)
        for identity, text, logprob, version in zip(
            each.tokens.ids, each.tokens.texts, each.tokens.logprobs, each.tokens.versions, strict=True
        )
    ]
    print_table(("turn", "token", "id", "logprob", "version"), rows)
