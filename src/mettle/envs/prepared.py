"""Evaluations from specs to results: find the model, load the environment, choose the folder, run side by side.

Parts: `Prepared` (everything is known and nothing has run), `prepare`, `saved_settings` (what a resumed folder says),
`run_prepared`, `EvalOutcome`. Invariants: a mistake in any spec shows before the first rollout of any; evaluations
share one bound on rollouts; one that fails leaves the others running.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mettle.clients.base import Client
from mettle.clients.factory import client_from
from mettle.config import nearest
from mettle.envs.packages.loading import load_environment
from mettle.errors import UserError
from mettle.evals.entries import entries_or_problem
from mettle.evals.folder import new_results_path
from mettle.evals.generated import GenerateOutputs
from mettle.evals.places import remember_place
from mettle.evals.reader import EvaluationReader
from mettle.evals.resume import check_same
from mettle.evals.slots import Slots
from mettle.evals.spec import EvalSpec
from mettle.evals.tally import Tally
from mettle.evals.targets import Served, Target, find_target


@dataclass(slots=True)
class Prepared:
    """One evaluation, ready to run. `path` is None when nothing is to be saved."""

    spec: EvalSpec
    env: Any
    target: Target
    client: Client
    path: Path | None
    tally: Tally


@dataclass(slots=True)
class EvalOutcome:
    """How one evaluation ended: with results, or with the error that ended it."""

    prepared: Prepared
    results: GenerateOutputs | None = None
    error: Exception | None = None


def prepare(spec: EvalSpec, serve: Callable[[Path], Served]) -> Prepared:
    """Find everything that `spec` names; `serve` makes a model directory answer.

    Raises: UserError for whatever is not there or does not fit.
    """
    if spec.env_dir_path:
        _search_also(Path(spec.env_dir_path))
    env = load_environment(spec.env_id, **spec.env_args)
    _check_settings(spec, env)
    if spec.extra_env_kwargs:
        env.set_kwargs(**spec.extra_env_kwargs)
    if spec.timeout is not None:
        env.set_kwargs(timeout_seconds=spec.timeout)
    if spec.num_processes:
        _check_workers(spec, env)
    target = find_target(spec, serve)
    path = _path(spec, env, target) if spec.save_results else None
    return Prepared(spec, env, target, client_from(target.client), path, Tally(spec.title, target.price))


def saved_settings(path: Path) -> dict[str, Any]:
    """The settings of the evaluation saved in `path`, by their own names.

    Raises: UserError when there is none.
    """
    try:
        metadata = EvaluationReader(path).metadata
    except UserError as error:
        raise UserError(f"cannot resume from {path}: {error}") from None
    launch = metadata.get("launch")
    if isinstance(launch, dict):
        return {name: value for name, value in launch.items() if value is not None and name in EvalSpec.model_fields}
    names = {"env_id": "env_id", "model": "model", "env_args": "env_args", "base_url": "api_base_url"}
    names |= {name: name for name in ("rollouts_per_example", "shuffle", "shuffle_seed", "state_columns")}
    found = {mine: metadata[theirs] for theirs, mine in names.items() if metadata.get(theirs) is not None}
    if metadata.get("num_examples"):
        found["num_examples"] = metadata["num_examples"]
    sampling = {k: v for k, v in (metadata.get("sampling_args") or {}).items() if k not in ("n", "extra_body") or v}
    return {**found, "sampling_args": {k: v for k, v in sampling.items() if (k, v) != ("n", 1)}}


async def run_prepared(prepared: Prepared, slots: Slots) -> EvalOutcome:
    """Run one evaluation within `slots`, which several may share; how it ended."""
    spec, target, tally = prepared.spec, prepared.target, prepared.tally
    try:
        try:
            results = await prepared.env.evaluate(
                prepared.client,
                target.model,
                spec.sampling_args,
                num_examples=spec.num_examples,
                rollouts_per_example=spec.rollouts_per_example,
                shuffle=spec.shuffle,
                shuffle_seed=spec.shuffle_seed,
                max_concurrent=spec.max_concurrent,
                num_workers=spec.num_processes,
                independent_scoring=spec.independent_scoring,
                slots=slots,
                price=target.price,
                results_path=prepared.path,
                keep_outputs=False,
                state_columns=spec.state_columns,
                max_retries=spec.max_retries,
                extra_metadata={**({"name": spec.name} if spec.name else {}), "launch": spec.to_dict()},
                on_kept=tally.start,
                on_rollout=tally.add,
            )
        finally:
            await prepared.client.close()
            await prepared.env.teardown()
    except Exception as error:
        return EvalOutcome(prepared, error=error)
    finally:
        tally.finish()
    return EvalOutcome(prepared, results=results)


def _path(spec: EvalSpec, env: Any, target: Target) -> Path:
    if spec.resume_path is not None:
        return Path(spec.resume_path)
    env_id = str(getattr(env, "env_id", "") or spec.env_id)
    new = new_results_path(env_id, target.model, Path(spec.output_dir) if spec.output_dir else None)
    if spec.output_dir:
        remember_place(Path(spec.output_dir))
    return (_newest_like(spec, env, target, new.parent) if spec.resume else None) or new


def _newest_like(spec: EvalSpec, env: Any, target: Target, folder: Path) -> Path | None:
    """The newest evaluation with these settings, finished or not."""
    mine = {
        "env_id": env.env_id,
        "model": target.model,
        "rollouts_per_example": spec.rollouts_per_example,
        "shuffle": spec.shuffle,
        "shuffle_seed": spec.shuffle_seed,
        "num_examples": spec.num_examples if spec.num_examples > 0 else float("inf"),
        "env_args": env.env_args,
        "sampling_args": {**env.sampling_args, **spec.sampling_args},
    }
    saved = [entry for path in sorted(folder.glob("*")) if path.is_dir() for entry in entries_or_problem(path)]
    for entry in sorted(saved, key=lambda entry: entry.modified_at, reverse=True):
        try:
            if entry.problem is None:
                check_same(entry.path, entry.metadata, mine)
                return entry.path
        except UserError:
            continue
    return None


def _check_settings(spec: EvalSpec, env: Any) -> None:
    """Refuse settings that nothing reads: an attribute that the environment does not have would change nothing."""
    members = [env, *getattr(env, "envs", [])]
    for name in spec.extra_env_kwargs:
        if any(hasattr(each, name) or hasattr(each, f"set_{name}") for each in members):
            continue
        known = [word for word in vars(env) if not word.startswith("_")]
        close = nearest(name, known)
        hint = f"did you mean {close!r}?" if close else f"it has {', '.join(sorted(known))}"
        raise UserError(f"{spec.env_id} has no setting {name!r} (--extra-env-kwargs); {hint}")


def _check_workers(spec: EvalSpec, env: Any) -> None:
    """Refuse what a worker process would not get to know."""
    from mettle.envs.workers.environment import CARRIED_SETTINGS, worker_spec

    worker_spec(env)
    lost = [name for name in spec.extra_env_kwargs if name not in CARRIED_SETTINGS]
    if lost:
        raise UserError(
            f"worker processes would not get {lost[0]!r}; give it to load_environment with --env-args, or use "
            f"--num-workers 0 (they get {', '.join(CARRIED_SETTINGS)})"
        )


def _search_also(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"no folder of environments {folder}")
    known = os.environ.get("METTLE_ENVIRONMENTS")
    os.environ["METTLE_ENVIRONMENTS"] = os.pathsep.join([str(folder), *([known] if known else [])])
