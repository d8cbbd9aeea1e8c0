"""The page of runs beside each other."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import HTMLResponse

from mettle.hub.api import catalog_of, open_run
from mettle.hub.pages import page
from mettle.hub.run_comparison import MAX_RUNS, compare_runs, differing_settings, overlay

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@router.get("/compare-runs")
def compare_runs_page(
    request: Request, r: Annotated[list[str], Query(max_length=100, default_factory=list)]
) -> HTMLResponse:
    """Runs by name, those of this machine and hosted ones that are the caller's."""
    names = list(dict.fromkeys(r))
    if not 2 <= len(names) <= MAX_RUNS:
        raise HTTPException(422, f"Choose from two to {MAX_RUNS} runs on the list; {len(names)} are chosen.")
    catalog = catalog_of(request)
    runs = compare_runs([open_run(request, name, catalog) for name in names])
    data = {"charts": overlay(runs), "runs": [{"steps": run.steps, "columns": run.columns} for run in runs]}
    return page(
        "compare_runs.html", runs=runs, data=data, settings=differing_settings([run.settings for run in runs]),
        num_settings=len({key for run in runs for key in run.settings}),
    )  # fmt: skip
