"""The pages of evaluations: at a glance, their rollouts as a table, one rollout. Those of a run have the run's address.

A page of an evaluation that is still running asks for itself every three seconds and replaces what has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from mettle.evals.estimator import mean_of
from mettle.hub.api import PUSHED_ID, OwnEvaluation, Run, RunEvaluation, catalog_of
from mettle.hub.evaluations import (
    EvaluationFilter,
    EvaluationOrder,
    OpenEvaluation,
    card_of,
    find_rollouts,
    is_live,
    open_rollout,
)
from mettle.hub.models import EvaluationCard
from mettle.hub.pages import decimal_of, page, query_of, rollout_of

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

SETTINGS = (
    "kind", "step", "num_examples", "rollouts_per_example", "base_url", "date", "max_concurrent", "pass_threshold",
    "shuffle", "shuffle_seed",
)  # fmt: skip


@router.get("/runs/{name}/evals")
def evaluations_page(request: Request, run: Run) -> HTMLResponse:
    """The evaluations of a run, the newest first."""
    name = run.run_dir.name
    entries = catalog_of(request).evaluations.entries(run.run_dir.path)
    cards = [card_of(str(entry.eval_id), entry) for entry in reversed(entries) if entry.eval_id is not None]
    return page(
        "evaluations.html", tab="evals", run_name=name, evaluations=cards, base=_run_base(name, None),
        compared=_ends(name, cards) if request.app.state.lab is not None else "",
    )  # fmt: skip


@router.get("/evaluations/{name}")
def evaluation_page(name: str, found: OwnEvaluation) -> HTMLResponse:
    """An evaluation at a glance."""
    return _overview(found, f"/evaluations/{quote(name, safe='')}", **_crumb(name, found))


@router.get("/runs/{name}/evals/{eval_id}")
def eval_page(name: str, eval_id: int, found: RunEvaluation) -> HTMLResponse:
    """An evaluation of a run at a glance."""
    return _overview(found, _run_base(name, eval_id), run_name=name)


@router.get("/evaluations/{name}/rollouts")
def evaluation_rollouts_page(
    request: Request, name: str, found: OwnEvaluation, words: str = "", task: str = "", cause: str = "",
    min_reward: str = "", max_reward: str = "", errors: str = "", truncated: str = "", sort: EvaluationOrder = "ended",
    page_number: Annotated[int, Query(alias="page")] = 1,
) -> HTMLResponse:  # fmt: skip
    """The rollouts of an evaluation as a table."""
    chosen = _chosen(words, task, cause, min_reward, max_reward, errors, truncated, sort)
    base = f"/evaluations/{quote(name, safe='')}"
    return _rollouts(request, found, chosen, page_number, base, **_crumb(name, found))


@router.get("/runs/{name}/evals/{eval_id}/rollouts")
def eval_rollouts_page(
    request: Request, name: str, eval_id: int, found: RunEvaluation, words: str = "", task: str = "", cause: str = "",
    min_reward: str = "", max_reward: str = "", errors: str = "", truncated: str = "", sort: EvaluationOrder = "ended",
    page_number: Annotated[int, Query(alias="page")] = 1,
) -> HTMLResponse:  # fmt: skip
    """The rollouts of an evaluation of a run as a table."""
    chosen = _chosen(words, task, cause, min_reward, max_reward, errors, truncated, sort)
    return _rollouts(request, found, chosen, page_number, _run_base(name, eval_id), run_name=name)


@router.get("/evaluations/{name}/rollouts/{index}")
def evaluation_rollout_page(name: str, index: int, found: OwnEvaluation) -> HTMLResponse:
    """One rollout of an evaluation."""
    return _rollout(found, index, f"/evaluations/{quote(name, safe='')}", **_crumb(name, found))


@router.get("/runs/{name}/evals/{eval_id}/rollouts/{index}")
def eval_rollout_page(name: str, eval_id: int, index: int, found: RunEvaluation) -> HTMLResponse:
    """One rollout of an evaluation of a run."""
    return _rollout(found, index, _run_base(name, eval_id), run_name=name)


def _ends(run: str, cards: Sequence[EvaluationCard]) -> str:
    """The query that sets the run's first evaluation on its tasks beside its last; empty where there is one alone."""
    measured = [card for card in cards if card.mean is not None and card.kind != "probe"]
    ends = [measured[-1], measured[0]] if len(measured) > 1 else []
    return query_of([("e", f"runs/{run}/evals/{card.eval_id}") for card in ends])


def _overview(found: OpenEvaluation, base: str, **crumbs: Any) -> HTMLResponse:
    with found.lock:
        entry, metadata = found.entry, found.reader.metadata
        context = {
            "card": card_of(base.rpartition("/")[2], entry), "stats": found.stats, "histogram": found.histogram(),
            "is_live": is_live(entry), "settings": _settings(metadata), "path": entry.name,
            "tasks": _hardest(found), "num_broken": found.reader.num_broken,
        }  # fmt: skip
    return page("evaluation.html", tab=_tab(crumbs, "overview"), base=base, **context, **crumbs)


def _rollouts(
    request: Request, found: OpenEvaluation, chosen: EvaluationFilter, number: int, base: str, **crumbs: Any
) -> HTMLResponse:
    rows = find_rollouts(found, chosen, number)
    kept = [(key, value) for key, value in request.query_params.multi_items() if value and key != "page"]
    context = {
        "card": card_of(base.rpartition("/")[2], found.entry), "found": rows, "chosen": chosen, "base": base,
        "query": query_of(kept), "causes": list(found.stats["errors"]["by_cause"]),
    }  # fmt: skip
    is_part = request.headers.get("hx-request") == "true"
    name = "_evaluation_rollouts.html" if is_part else "evaluation_rollouts.html"
    return page(name, tab=_tab(crumbs, "rollouts"), **context, **crumbs)


def _rollout(found: OpenEvaluation, index: int, base: str, **crumbs: Any) -> HTMLResponse:
    detail, members = open_rollout(found, index)
    back = (f"Rollouts of {found.entry.env_id} with {found.entry.model}", f"{base}/rollouts")
    return rollout_of(detail, f"{base}/rollouts", members, back, tab=_tab(crumbs, "rollouts"), **crumbs)


def _hardest(found: OpenEvaluation, most: int = 8) -> list[tuple[str, float, int]]:
    """The tasks with the lowest mean reward: (task, mean, rollouts)."""
    tasks: dict[str, list[float]] = {}
    for facts in found.reader.facts:
        if facts.reward is not None:
            tasks.setdefault(str(facts.example_id), []).append(facts.reward)
    means = [(task, mean_of(rewards), len(rewards)) for task, rewards in tasks.items()]
    return sorted(means, key=lambda each: each[1])[:most]


def _settings(metadata: dict[str, Any]) -> list[tuple[str, str]]:
    told = [(name.replace("_", " "), str(metadata[name])) for name in SETTINGS if metadata.get(name) is not None]
    for table in ("sampling_args", "env_args"):
        values = metadata.get(table)
        told += [(str(name), str(value)) for name, value in values.items()] if isinstance(values, dict) else []
    return told


def _chosen(
    words: str, task: str, cause: str, low: str, high: str, errors: str, truncated: str, sort: EvaluationOrder
) -> EvaluationFilter:
    bounds = decimal_of("min_reward", low), decimal_of("max_reward", high)
    return EvaluationFilter(words.strip(), task.strip(), cause, *bounds, bool(errors), bool(truncated), sort)


def _crumb(name: str, found: OpenEvaluation) -> dict[str, str]:
    """What the bar says; of a pushed one its words, for its name is an id."""
    told = {"evaluation_name": name}
    if PUSHED_ID.fullmatch(name):
        told["evaluation_title"] = f"{found.entry.env_id} with {found.entry.model}"
    return told


def _tab(crumbs: dict[str, Any], name: str) -> str:
    """The tab that is open: those of an evaluation, or the evaluations of a run."""
    return "evals" if "run_name" in crumbs else name


def _run_base(name: str, eval_id: int | None) -> str:
    base = f"/runs/{quote(name, safe='')}/evals"
    return base if eval_id is None else f"{base}/{eval_id}"
