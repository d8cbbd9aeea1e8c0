"""Evaluations from the command line: prepare, run, show, summarise.

Parts: `evaluate`. Invariant: the results folders are known before the first rollout, so that whatever interrupts the
evaluations, the message names the command that continues them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from mettle.cli.eval_hosted import submit_evaluations
from mettle.cli.local_server import serving
from mettle.cli.options import print_config, split_words, with_words
from mettle.cli.progress import EvalProgress
from mettle.cli.terminal import console, going_on, print_json, print_next, print_table
from mettle.config import Loaded
from mettle.config.layers import ConfigLayer, tree_layer
from mettle.config.loader import check_needed, load_levels
from mettle.config.options import Given, own_names
from mettle.envs.packages.eval_defaults import package_defaults
from mettle.envs.prepared import EvalOutcome, Prepared, prepare, run_prepared, saved_settings
from mettle.errors import ServiceError, StorageError, UserError
from mettle.evals.plan import EvalFile, read_plan
from mettle.evals.report import Stats, plain
from mettle.evals.slots import Slots
from mettle.evals.spec import EvalSpec
from mettle.evals.targets import Served
from mettle.runs.program import program
from mettle.wording import between, duration, figure, format_reward, usd


def evaluate(
    words: Sequence[str],
    given: Given,
    *,
    is_json: bool,
    is_plain: bool = False,
    is_dry_run: bool = False,
    hosted: tuple[bool] | None = None,
) -> None:
    """Run what a person asked for: an environment, TOML files of evaluations, or what a saved one still lacks.

    Raises: UserError for a request that cannot be met, ServiceError when not one rollout came to a reward.
    """
    files, names = split_words(words)
    given = with_words(given, "env_id", names)
    loaded = read_plan(files, given, package_defaults) if files else [_one(given)]
    if is_dry_run:
        print_config(EvalFile.of(loaded), is_json=is_json)
        return
    specs = [one.config for one in loaded]
    if hosted is not None:
        submit_evaluations(specs, is_overridden=hosted[0], is_json=is_json)
        return
    with ExitStack() as servers:
        prepared = _prepare_all(specs, serving(servers))
        servers.enter_context(going_on(_how_to_go_on(" ".join(map(str, files)), given, prepared)))
        outcomes = asyncio.run(_run(prepared, is_quiet=is_json, is_plain=is_plain))
    _report(outcomes, is_file=bool(files), is_json=is_json)
    for outcome in outcomes:
        _raise_failure(outcome)


def _one(given: Given) -> Loaded[EvalSpec]:
    said = own_names(EvalSpec, given.layer)
    given.override(EvalSpec, said)
    path = said.tree.get("resume")
    saved = ConfigLayer()
    if isinstance(path, str):
        saved = tree_layer(saved_settings(Path(path)), path)
    hows = {
        "env_id": "say which environment: `mettle eval run ENV -m MODEL`; `mettle env list` names them",
        "model": "say which model with -m: a model directory, an endpoint's id, or a model at -b or -p",
    }
    known = check_needed(EvalSpec, [saved], given, (), hows)
    if known.get("api_base_url") and known["model"] != saved.tree.get("model"):
        for name in ("api_base_url", "provider"):  # Where the saved model answers says nothing about another.
            saved.tree.pop(name, None)
    return load_levels(EvalSpec, [package_defaults(str(known["env_id"])), saved], given)


def _prepare_all(specs: Sequence[EvalSpec], serve: Callable[[Path], Served]) -> list[Prepared]:
    prepared = []
    for spec in specs:
        try:
            prepared.append(prepare(spec, serve))
        except UserError as error:
            raise UserError(f"{spec.title}: {error}" if len(specs) > 1 else str(error)) from error
    return prepared


async def _run(prepared: Sequence[Prepared], *, is_quiet: bool, is_plain: bool) -> list[EvalOutcome]:
    slots = Slots(max(one.spec.max_concurrent for one in prepared))
    async with EvalProgress([one.tally for one in prepared], is_quiet=is_quiet, is_plain=is_plain):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run_prepared(one, slots)) for one in prepared]
        return [task.result() for task in tasks]


def _how_to_go_on(files: str, given: Given, prepared: Sequence[Prepared]) -> str:
    path = prepared[0].path
    if path is None:
        return "nothing was saved"
    if files:
        again = " with the same options" if given else ""
        return f"`{program()} eval run {files} --resume`{again} runs what is missing"
    again = " with the same --header" if prepared[0].spec.headers else ""
    return f"`{program()} eval run --resume {path}`{again} runs what is missing"


def _raise_failure(outcome: EvalOutcome) -> None:
    path = outcome.prepared.path
    if outcome.error is not None:
        if isinstance(outcome.error, StorageError) and path is not None:
            how = f"make room, then `{program()} eval run --resume {path}` goes on"
            raise StorageError(f"{outcome.error}; {how}") from outcome.error
        raise outcome.error
    assert outcome.results is not None, "an evaluation without an error has results"
    stats = outcome.results.stats
    if stats.reward is None:
        raise ServiceError(f"no rollout of {stats.num_rollouts} has a reward; {_first_failure(stats)}")


def _first_failure(stats: Stats) -> str:
    for cause, failed in stats.errors.by_cause.items():
        name = next(iter(failed.types))
        return f"the first failed with {name} ({cause}): {failed.first_message or 'the environment gave none'}"
    return "there was nothing to run"


def _report(outcomes: Sequence[EvalOutcome], *, is_file: bool, is_json: bool) -> None:
    if is_json:
        documents = [_document(outcome) for outcome in outcomes]
        if is_file:
            print_json({"evaluations": documents})
        elif outcomes[0].error is None and documents[0]["stats"]["reward"] is not None:
            print_json(documents[0])
        return
    done = [outcome for outcome in outcomes if outcome.results is not None and outcome.results.stats.reward is not None]
    if len(outcomes) > 1:
        _print_table(outcomes)
    elif done:
        _print_summary(done[0])
    if not done:
        return
    paths = [str(outcome.prepared.path) for outcome in done if outcome.prepared.path is not None]
    if len(paths) > 1 and len({outcome.prepared.spec.env_id for outcome in done}) == 1:
        print_next(f"mettle eval compare {' '.join(paths)}")
    elif paths:
        print_next(f"mettle eval view {paths[0]}" if len(paths) == 1 else "mettle eval view")


def _document(outcome: EvalOutcome) -> dict[str, Any]:
    prepared = outcome.prepared
    head = {"path": str(prepared.path) if prepared.path else None, "title": prepared.spec.title}
    if outcome.results is None:
        return {**head, "error": str(outcome.error)}
    stats = plain(outcome.results.stats)
    interval = stats["reward"]["interval"] if stats["reward"] else None
    return {**head, **outcome.results["metadata"], "interval": interval, "stats": stats}


def _print_table(outcomes: Sequence[EvalOutcome]) -> None:
    columns = ("evaluation", "model", "reward", "95 % interval", "pass@k", "failed", "tokens out", "cost")
    rows: list[tuple[Any, ...]] = []
    for outcome in outcomes:
        prepared, results = outcome.prepared, outcome.results
        if results is None:
            rows.append((prepared.spec.title, prepared.target.model, f"stopped: {outcome.error}", *[""] * 5))
            continue
        stats = results.stats
        passed = " ".join(f"{k}: {found.mean:.3g}" for k, found in stats.pass_at_k.items())
        reward, tokens = stats.reward, stats.tokens
        rows.append(
            (
                prepared.spec.title, prepared.target.model, format_reward(reward.mean) if reward else None,
                between(reward.interval) if reward else None, passed,
                f"{stats.errors.num} of {stats.num_rollouts}", f"{tokens.output:,.0f}" if tokens else None,
                usd(stats.cost.total_usd) if stats.cost else None,
            )
        )  # fmt: skip
    print_table(columns, rows)
    for outcome in outcomes:
        if outcome.prepared.path is not None:
            click.echo(f"{outcome.prepared.spec.title}: {outcome.prepared.path}")


def _print_summary(outcome: EvalOutcome) -> None:
    assert outcome.results is not None, "only an evaluation that ended is summarised"
    metadata, stats = outcome.results["metadata"], outcome.results.stats
    rows = summary_rows(stats)
    rows.append(("time", f"{duration(metadata['time'])}{_timing(stats)}"))
    if outcome.prepared.path is not None:
        rows.append(("saved in", str(outcome.prepared.path)))
    print_table(("", ""), rows, title=f"{metadata['env_id']} with {metadata['model']}")
    if stats.errors.num:
        console().print(_first_failure(stats), markup=False)


def summary_rows(stats: Stats) -> list[tuple[str, str]]:
    """What an evaluation came to, as names and texts."""
    rows = [("reward", _with_interval(stats.reward))]
    rows += [(name, _with_interval(found)) for name, found in stats.metrics.items()]
    threshold = f"; {' + '.join(stats.pass_on or ('reward',))} of {figure(stats.pass_threshold)} or more"
    for name, table in (("pass@", stats.pass_at_k), ("pass^", stats.pass_all_k)):
        for k, found in table.items():
            if not (name == "pass^" and k == "1"):
                rows.append((f"{name}{k}", _with_interval(found) + threshold))
                threshold = ""
    few = "; few tasks tell little: more tasks narrow the interval, more rollouts of each hardly"
    rows.append(("rollouts", f"{stats.num_rollouts} of {stats.num_tasks} tasks{few if stats.num_tasks < 20 else ''}"))
    rows.append(("failed", _failures(stats)))
    if stats.truncation_rate:
        rows.append(("truncated", f"{stats.truncation_rate:.1%}"))
    if stats.groups.share_without_variance is not None:
        rows.append(("tasks without spread", f"{stats.groups.share_without_variance:.0%}"))
    if stats.tokens:
        read, written = stats.tokens.input_per_rollout, stats.tokens.output_per_rollout
        spread = f"(median {written.p50:,.0f}, p99 {written.p99:,.0f})"
        rows.append(("tokens", f"{read.mean:,.0f} in, {written.mean:,.0f} out a rollout {spread}"))
    if stats.cost:
        rows.append(("cost", usd(stats.cost.total_usd)))
    return rows


def _with_interval(found: Stats) -> str:
    bounds = f" (95 % interval {between(found.interval)})" if found.interval else ""
    return f"{format_reward(found.mean)}{bounds}"


def _failures(stats: Stats) -> str:
    if not stats.errors.num:
        return "none"
    causes = [f"{cause} {found.num}" for cause, found in stats.errors.by_cause.items()]
    return f"{stats.errors.num}, {stats.errors.rate:.1%} ({', '.join(causes)})"


def _timing(stats: Stats) -> str:
    total = stats.timing.total_s
    return f"; a rollout {duration(total.p50)} (median), {duration(total.p99)} (p99)" if total else ""
