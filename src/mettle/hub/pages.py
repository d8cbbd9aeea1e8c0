"""The HTML pages. Rendered on the server and readable without scripts; scripts add charts, live figures and keys.

The overview is made of fragments (`FRAGMENTS`). A live page asks for `live.json` and replaces the fragments whose text
has changed, so that each is written in one place, its template.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse
from jinja2 import Environment, FileSystemLoader, select_autoescape
from starlette.responses import Response

from mettle.errors import StorageError
from mettle.hub import filters
from mettle.hub.api import Run, catalog_of
from mettle.hub.causes import causes_of
from mettle.hub.conversation import shown_messages
from mettle.hub.evaluations import card_of
from mettle.hub.logs import log_names, read_tail
from mettle.hub.metrics import align, thin
from mettle.hub.models import RolloutDetail, RunSummary
from mettle.hub.pipeline import pipeline_of
from mettle.hub.provenance import read_settings
from mettle.hub.reader import RunReader
from mettle.hub.rollouts import (
    ORDERS,
    RolloutFilter,
    SortKey,
    add_prompts,
    environments_of,
    find_rollouts,
    open_rollout,
    steps_with_rollouts,
)
from mettle.hub.series import REWARD, WARM_UP_LARGE, charts_of, columns_after, warm_up_columns, warm_up_now
from mettle.hub.summary import evaluations_of, processes_of, summarise, vitals_of, waits_of
from mettle.hub.viewer import viewer
from mettle.inference.outside.roster import OutsideWorker, read_roster

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

FOLDER = Path(__file__).parent
FRAGMENTS = ("header", "headline", "tiles", "pipeline", "outside", "causes", "accounts", "events")
SHOWN_EVENTS = 12
RUNS_A_PAGE = 50


@router.get("/")
def runs_page(request: Request, number: Annotated[int, Query(alias="page", ge=1, le=100_000)] = 1) -> HTMLResponse:
    """The list of runs, a page of it."""
    catalog = catalog_of(request)
    own = catalog.evaluations.own() if number == 1 else {}
    cards = [card_of(name, entry) for name, entry in list(own.items())[:RUNS_A_PAGE]]
    runs, total = catalog.page_of_cards(number, RUNS_A_PAGE)
    return page(
        "runs.html", runs=runs, total=total, number=number, num_pages=max(1, -(-total // RUNS_A_PAGE)),
        evaluations=cards, num_evaluations=len(own), base="/evaluations",
        root=str(catalog.root),
    )  # fmt: skip


@router.get("/runs/{name}")
def overview_page(run: Run) -> HTMLResponse:
    """A run at a glance."""
    with run.lock:
        context = overview(run)
        live = live_state(run, context, after=-1)
        stage = "warming" if is_warming(context["s"]) else "training"
        charts = charts_of(run.metrics, is_warming=stage == "warming")
    large = [REWARD, *([WARM_UP_LARGE] if stage == "warming" else [])]
    specs = [asdict(chart) for chart in (*large, *charts)]
    return page(
        "run.html", tab="overview", **context, stage=stage, large_charts=large, charts=charts, specs=specs, live=live
    )


@router.get("/runs/{name}/live.json")
def live_json(run: Run, after_step: int = -1, change: int = -1) -> JSONResponse:
    """What has changed on the overview since `change`; the columns of the charts after a step."""
    with run.lock:
        if run.refresh() == change and run.fact("state") in ("finished", "failed", "stopped"):
            return JSONResponse({"change": change, "is_live": False})
        context = overview(run)
        answer = live_state(run, context, after_step)
        answer["fragments"] = {name: templates().get_template(f"_{name}.html").render(**context) for name in FRAGMENTS}
    return JSONResponse(answer)


@router.get("/runs/{name}/rollouts")
def rollouts_page(
    request: Request,
    run: Run,
    step: str = "",
    kind: str = "",
    env: str = "",
    draw: str = "",
    eval_id: Annotated[str, Query(alias="eval")] = "",
    min_reward: str = "",
    errors: str = "",
    words: str = "",
    sort: SortKey = "newest",
    page_number: Annotated[int, Query(alias="page")] = 1,
) -> HTMLResponse:
    """Rollouts as a table."""
    chosen = RolloutFilter(
        _whole("step", step), kind or None, env or None, _whole("draw", draw), _whole("eval", eval_id),
        decimal_of("min_reward", min_reward), bool(errors), words, sort,
    )  # fmt: skip
    found = find_rollouts(run.database, chosen, page_number)
    add_prompts(run.run_dir, run.database, found)
    kept = [(k, v) for k, v in request.query_params.multi_items() if v and k not in ("page", "step")]
    context = {
        "run_name": run.run_dir.name, "run_title": run.title,
        "found": found, "chosen": chosen, "orders": list(ORDERS), "query": query_of(kept),
        "query_with_step": query_of([*kept, *([("step", step)] if step else [])]),
        "span": steps_with_rollouts(run.database, "eval" if kind == "eval" else "train"),
        "environments": environments_of(run.database),
    }  # fmt: skip
    is_part = request.headers.get("hx-request") == "true"
    return page("_rollouts.html" if is_part else "rollouts.html", tab="rollouts", **context)


@router.get("/runs/{name}/rollouts/{rollout_id:path}")
def rollout_page(run: Run, rollout_id: str) -> HTMLResponse:
    """One rollout opened."""
    detail = open_rollout(run.run_dir, run.database, rollout_id)
    if detail is None:
        raise HTTPException(404, f"The run has no rollout named {rollout_id!r}.")
    base, row = f"/runs/{quote(run.run_dir.name, safe='')}/rollouts", detail.row
    step = "" if row.step is None else f" of step {row.step}"
    query = "" if row.step is None else f"?step={row.step}" + ("&kind=eval" if row.kind == "eval" else "")
    return rollout_of(
        detail, base, [s.rollout_id for s in detail.siblings], (f"Rollouts{step}", base + query),
        tab="rollouts", run_name=run.run_dir.name, run_title=run.title,
    )  # fmt: skip


def rollout_of(
    detail: RolloutDetail, base: str, names: Sequence[object], back: tuple[str, str], **context: Any
) -> HTMLResponse:
    """One rollout as a page. `names` are what the rollouts of its group have in addresses under `base`."""
    links = [f"{base}/{quote(str(name), safe='')}" for name in names]
    here = next((i for i, s in enumerate(detail.siblings) if s.rollout_id == detail.row.rollout_id), 0)
    return page(
        "rollout.html", detail=detail, row=detail.row, messages=shown_messages(detail), links=links, back=back,
        previous=here - 1 if here > 0 else None, following=here + 1 if here + 1 < len(links) else None,
        limits=filters.HEAT_LIMITS, has_ratios=any(turn.tokens.trainer_logprobs for turn in detail.turns), **context,
    )  # fmt: skip


@router.get("/runs/{name}/metrics")
def metrics_page(run: Run) -> HTMLResponse:
    """Every recorded metric as a small chart."""
    with run.lock:
        run.refresh()
        names = run.metrics.names
        table = run.metrics
        steps, columns = run.kept(
            "metrics", lambda: thin(*align((name, table.after(name, -(2**60))) for name in names))
        )
        newest = {name: run.metrics.newest((name,)) for name in names}
    return page(
        "metrics.html", tab="metrics", run_name=run.run_dir.name, run_title=run.title, names=names, newest=newest,
        data={"steps": steps, "columns": columns},
    )  # fmt: skip


@router.get("/runs/{name}/config")
def config_page(run: Run) -> HTMLResponse:
    """The resolved config and where each value came from."""
    settings = read_settings(run.run_dir.path)
    return page("config.html", tab="config", run_name=run.run_dir.name, run_title=run.title, settings=settings)


@router.get("/runs/{name}/logs")
def logs_page(run: Run) -> HTMLResponse:
    """The logs there are; opens the first."""
    names = log_names(run.run_dir.logs)
    preferred = [n for n in ("orchestrator.log", "trainer.log") if n in names] or names
    return _logs(run, preferred[0] if preferred else None, "", "", is_part=False)


@router.get("/runs/{name}/logs/{log}")
def log_page(request: Request, run: Run, log: str, level: str = "", words: str = "") -> HTMLResponse:
    """The end of a log. A process is found by its name alone as well."""
    names = log_names(run.run_dir.logs)
    found = next((n for n in (log, f"{log}.log", f"{log}.out") if n in names), None)
    if found is None:
        raise HTTPException(404, f"The run has no log named {log!r}.")
    return _logs(run, found, level, words, is_part=request.headers.get("hx-request") == "true")


def _logs(run: RunReader, log: str | None, level: str, words: str, *, is_part: bool) -> HTMLResponse:
    entries: list[dict[str, Any]] = []
    is_cut = False
    if log is not None:
        entries, is_cut = read_tail(
            run.run_dir.logs, log, max_lines=400, level=level or None, words=words, hidden=run.hidden
        )
    return page(
        "_log.html" if is_part else "logs.html", tab="logs", run_name=run.run_dir.name, run_title=run.title, log=log,
        level=level, words=words, names=log_names(run.run_dir.logs), entries=entries, is_cut=is_cut,
    )  # fmt: skip


def overview(run: RunReader) -> dict[str, Any]:
    """What the fragments of the overview are rendered from."""
    summary = summarise(run)
    processes, waits, vitals = processes_of(run), waits_of(run), vitals_of(run)
    newest = run.database.value("SELECT max(event_id) FROM events") or 0
    events = run.journal.events(after_id=max(0, newest - SHOWN_EVENTS), limit=SHOWN_EVENTS)
    return {
        "run_name": summary.name,
        "run_title": run.title,
        "s": summary,
        "pairs": [(b, next((f for f in summary.finals if f.env_id == b.env_id), None)) for b in summary.baselines],
        "pipeline": pipeline_of(summary, processes, waits, vitals),
        "causes": causes_of(run.steps, run.metrics, waits if summary.is_live else []),
        "outside": _workers_of(run),
        "warm_up": warm_up_now(run.metrics),
        "events": list(reversed(events)),
    }


def _workers_of(run: RunReader) -> list[OutsideWorker]:
    try:
        return read_roster(run.run_dir.outside)
    except StorageError:  # the events tell what became of them
        return []


def live_state(run: RunReader, context: dict[str, Any], after: int) -> dict[str, Any]:
    """The part of the overview that scripts draw."""

    def drawn() -> tuple[list[int], dict[str, list[float | None]]]:
        return thin(*columns_after(run.steps, run.metrics, after))

    steps, columns = run.kept("overview", drawn) if after < 0 else drawn()
    warm_steps, warm_columns = thin(*warm_up_columns(run.metrics))
    evals = [e for e in evaluations_of(run) if e.mean is not None and math.isfinite(e.mean)]
    return {
        "change": run.change,
        "revision": run.revision,
        "is_live": context["s"].is_live,
        "steps": steps,
        "columns": columns,
        "evals": [[e.step, e.mean, e.ci_low, e.ci_high, e.env_id] for e in evals],
        "max_steps": context["s"].max_steps,
        "is_warming": is_warming(context["s"]),
        "warm_up": {"steps": warm_steps, "columns": warm_columns} if context["s"].step == 0 or after < 0 else None,
    }


def is_warming(summary: RunSummary) -> bool:
    """True until the first policy version is served: the supervised warm-up is all there is to see."""
    return summary.is_live and summary.acked_version is None and not summary.baselines


def page(template: str, **context: Any) -> HTMLResponse:
    """A rendered page."""
    return HTMLResponse(templates().get_template(template).render(viewer=viewer.get(), **context))


def error_page(request: Request, status: int, title: str, detail: str) -> Response:
    """A calm page for what went wrong."""
    html = templates().get_template("error.html").render(title=title, detail=detail, status=status, viewer=viewer.get())
    return HTMLResponse(html, status_code=status)


@lru_cache(maxsize=1)
def templates() -> Environment:
    """The templates, with the filters of `filters`."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=select_autoescape(default=True),
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(filters.FILTERS)
    environment.filters["part"] = lambda value: quote(str(value), safe="")
    environment.globals.update(asset=asset, versions=filters.versions)
    return environment


@lru_cache(maxsize=64)
def asset(name: str) -> str:
    """The address of a static file, with a digest so that browsers may keep it."""
    digest = hashlib.sha256((FOLDER / "static" / name).read_bytes()).hexdigest()[:12]
    return f"/static/{name}?v={digest}"


def query_of(pairs: list[tuple[str, str]]) -> str:
    """The query of an address."""
    return "&".join(f"{quote(key)}={quote(value)}" for key, value in pairs)


def _whole(name: str, text: str) -> int | None:
    if not text.strip():
        return None
    try:
        return int(text)
    except ValueError:
        raise HTTPException(422, f"{name} is a whole number, not {text!r}.") from None


def decimal_of(name: str, text: str) -> float | None:
    """A number in a form; None for an empty field."""
    if not text.strip():
        return None
    try:
        return float(text)
    except ValueError:
        raise HTTPException(422, f"{name} is a number, not {text!r}.") from None
