"""The JSON API under /api/v1: read-only, typed, described by /api/v1/openapi.json."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Query, Request

import mettle
from mettle.hub import evaluations, models
from mettle.hub.catalog import RunCatalog
from mettle.hub.evaluations import EvaluationFilter, EvaluationOrder, OpenEvaluation, card_of
from mettle.hub.logs import log_names, read_tail
from mettle.hub.metrics import align
from mettle.hub.reader import RunReader
from mettle.hub.rollouts import PAGE_SIZE, RolloutFilter, SortKey, add_prompts, find_rollouts, open_rollout
from mettle.hub.summary import evaluations_of, processes_of, summarise, vitals_of, waits_of

router = APIRouter(
    prefix="/api/v1",
    responses={404: {"model": models.ProblemDetails}, 503: {"model": models.ProblemDetails}},
)

StepAfter = Annotated[int, Query(description="only steps after this one; ask again with the last step you have")]


def catalog_of(request: Request) -> RunCatalog:
    """The catalog of this server."""
    catalog: RunCatalog = request.app.state.catalog
    return catalog


PUSHED_ID = re.compile(r"c[a-z0-9]{24}")
"""The name of what was pushed or submitted to a Hub with accounts; no folder of a run or evaluation is called so."""


def open_run(request: Request, name: str, catalog: Annotated[RunCatalog, Depends(catalog_of)]) -> RunReader:
    """The reader of the run in the path: in the folder of runs, or hosted."""
    open_hosted: Callable[[Request, str], RunReader] | None = request.app.state.open_hosted
    if open_hosted is not None and PUSHED_ID.fullmatch(name):
        return open_hosted(request, name)
    return catalog.open(name)


Run = Annotated[RunReader, Depends(open_run)]


PageNumber = Annotated[int, Query(ge=1)]


def chosen_rollouts(
    words: Annotated[str, Query(description="words that the conversation, answer or error holds")] = "",
    task: str = "",
    cause: Annotated[str, Query(description="only rollouts that failed there")] = "",
    min_reward: float | None = None,
    max_reward: float | None = None,
    errors: Annotated[bool, Query(description="only rollouts that failed")] = False,
    truncated: Annotated[bool, Query(description="only rollouts that were cut off")] = False,
    sort: EvaluationOrder = "ended",
) -> EvaluationFilter:
    """The filter in the query."""
    return EvaluationFilter(words, task, cause, min_reward, max_reward, errors, truncated, sort)


Chosen = Annotated[EvaluationFilter, Depends(chosen_rollouts)]


@router.get("/runs")
def list_runs(catalog: Annotated[RunCatalog, Depends(catalog_of)]) -> models.Runs:
    """The runs in the folder, those that are live first, then the newest."""
    return models.Runs(runs=catalog.cards())


@router.get("/runs/{name}")
def read_run(run: Run) -> models.RunSummary:
    """The headline of a run."""
    with run.lock:
        return summarise(run)


@router.get("/runs/{name}/metrics/names")
def list_metrics(run: Run) -> models.MetricNames:
    """The metrics that a run has recorded."""
    with run.lock:
        run.refresh()
        return models.MetricNames(names=run.metrics.names)


@router.get("/runs/{name}/metrics")
def read_metrics(
    run: Run,
    metric: Annotated[list[str], Query(description="a metric's name; may be given several times")],
    after_step: StepAfter = -1,
) -> models.Metrics:
    """Recorded metrics as columns over one axis of steps."""
    with run.lock:
        run.refresh()
        unknown = [m for m in metric if m not in run.metrics.columns]
        if unknown:
            raise HTTPException(404, f"The run has no metric named {unknown[0]!r}.")
        steps, columns = align((m, run.metrics.after(m, after_step)) for m in metric)
    return models.Metrics(steps=steps, columns=columns)


@router.get("/runs/{name}/evals")
def list_evals(run: Run) -> models.Evaluations:
    """Evaluations on held-out tasks, oldest first."""
    return models.Evaluations(evals=evaluations_of(run))


@router.get("/evaluations")
def list_evaluations(catalog: Annotated[RunCatalog, Depends(catalog_of)]) -> models.EvaluationCards:
    """The evaluations that were run by themselves, those that are live first, then the newest."""
    own = catalog.evaluations.own()
    return models.EvaluationCards(evaluations=[card_of(name, entry) for name, entry in own.items()])


def open_own(request: Request, name: str, catalog: Annotated[RunCatalog, Depends(catalog_of)]) -> OpenEvaluation:
    """The evaluation in the path: of this machine's store, or pushed."""
    open_pushed: Callable[[Request, str], OpenEvaluation] | None = request.app.state.open_pushed
    if open_pushed is not None and PUSHED_ID.fullmatch(name):
        return open_pushed(request, name)
    return catalog.evaluations.open(name)


def open_of_run(run: Run, eval_id: int, catalog: Annotated[RunCatalog, Depends(catalog_of)]) -> OpenEvaluation:
    """The evaluation of a run in the path."""
    return catalog.evaluations.open_at(run.run_dir.path, eval_id)


OwnEvaluation = Annotated[OpenEvaluation, Depends(open_own)]
RunEvaluation = Annotated[OpenEvaluation, Depends(open_of_run)]


@router.get("/evaluations/{name}")
def read_evaluation(name: str, found: OwnEvaluation) -> models.EvaluationDetail:
    """One evaluation with its statistics."""
    return _evaluation(name, found)


@router.get("/evaluations/{name}/rollouts")
def list_evaluation_rollouts(found: OwnEvaluation, chosen: Chosen, page: PageNumber = 1) -> models.EvaluationRollouts:
    """A page of the rollouts of an evaluation."""
    return evaluations.find_rollouts(found, chosen, page)


@router.get("/evaluations/{name}/rollouts/{index}")
def read_evaluation_rollout(found: OwnEvaluation, index: int) -> models.RolloutDetail:
    """One rollout of an evaluation with its messages, and its sampled tokens where they are known."""
    return evaluations.open_rollout(found, index)[0]


@router.get("/runs/{name}/evals/{eval_id}")
def read_eval(eval_id: int, found: RunEvaluation) -> models.EvaluationDetail:
    """One evaluation of a run with its statistics."""
    return _evaluation(str(eval_id), found)


@router.get("/runs/{name}/evals/{eval_id}/rollouts")
def list_eval_rollouts(found: RunEvaluation, chosen: Chosen, page: PageNumber = 1) -> models.EvaluationRollouts:
    """A page of the rollouts of an evaluation of a run."""
    return evaluations.find_rollouts(found, chosen, page)


@router.get("/runs/{name}/evals/{eval_id}/rollouts/{index}")
def read_eval_rollout(found: RunEvaluation, index: int) -> models.RolloutDetail:
    """One rollout of an evaluation of a run."""
    return evaluations.open_rollout(found, index)[0]


def _evaluation(name: str, found: OpenEvaluation) -> models.EvaluationDetail:
    with found.lock:
        hidden = ("launch", "stats")  # Settings to resume with, which may hold addresses, and figures of the end.
        metadata = {key: value for key, value in found.reader.metadata.items() if key not in hidden}
        return models.EvaluationDetail(card=card_of(name, found.entry), stats=dict(found.stats), metadata=metadata)


@router.get("/runs/{name}/events")
def list_events(
    run: Run,
    after_id: int = 0,
    kind: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> models.Events:
    """Events after an id, oldest first."""
    events = run.journal.events(after_id=after_id, kind=kind, limit=limit)
    return models.Events(events=[models.ShownEvent(**asdict(event)) for event in events])


@router.get("/runs/{name}/waits")
def list_waits(run: Run) -> models.ShownWaits:
    """Who waits for whom now."""
    return models.ShownWaits(waits=waits_of(run))


@router.get("/runs/{name}/vitals")
def list_vitals(run: Run) -> models.Vitals:
    """Which processes beat, what they have done, and which of them stands still."""
    return models.Vitals(vitals=vitals_of(run))


@router.get("/runs/{name}/processes")
def list_processes(run: Run) -> models.Processes:
    """The processes of a run."""
    return models.Processes(processes=processes_of(run))


@router.get("/runs/{name}/rollouts")
def list_rollouts(
    run: Run,
    step: int | None = None,
    kind: str | None = None,
    env: str | None = None,
    draw_id: int | None = None,
    eval_id: int | None = None,
    min_reward: float | None = None,
    errors: Annotated[bool, Query(description="only rollouts that failed")] = False,
    words: Annotated[str, Query(description="words of the answer's beginning, or of the error")] = "",
    sort: SortKey = "newest",
    page: Annotated[int, Query(ge=1)] = 1,
    page_size: Annotated[int, Query(ge=1, le=500)] = PAGE_SIZE,
) -> models.RolloutPage:
    """A page of rollouts."""
    chosen = RolloutFilter(step, kind, env, draw_id, eval_id, min_reward, errors, words, sort)
    found = find_rollouts(run.database, chosen, page, page_size)
    add_prompts(run.run_dir, run.database, found)
    return found


@router.get("/runs/{name}/rollouts/{rollout_id:path}")
def read_rollout(run: Run, rollout_id: str) -> models.RolloutDetail:
    """One rollout with its messages, its sampled tokens and its siblings."""
    detail = open_rollout(run.run_dir, run.database, rollout_id)
    if detail is None:
        raise HTTPException(404, f"The run has no rollout named {rollout_id!r}.")
    return detail


@router.get("/runs/{name}/logs")
def list_logs(run: Run) -> list[str]:
    """The log files of a run."""
    return log_names(run.run_dir.logs)


@router.get("/runs/{name}/logs/{log}")
def read_log(
    run: Run,
    log: str,
    lines: Annotated[int, Query(ge=1, le=5000)] = 200,
    level: str | None = None,
    words: str = "",
) -> models.LogTail:
    """The end of a log file."""
    if log not in log_names(run.run_dir.logs):
        raise HTTPException(404, f"The run has no log named {log!r}.")
    entries, is_cut = read_tail(run.run_dir.logs, log, max_lines=lines, level=level, words=words, hidden=run.hidden)
    return models.LogTail(name=log, lines=entries, is_cut=is_cut)


health_router = APIRouter()


@health_router.get("/health")
def health() -> models.Health:
    """The server answers."""
    return models.Health(status="ok", version=mettle.__version__)
