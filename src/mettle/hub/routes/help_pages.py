"""The Hub's own pages about itself: how to use it from a terminal and from programs, and what it was started with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import HTMLResponse

import mettle
from mettle.hub.access import Admin, LabHere
from mettle.hub.lab import Lab
from mettle.hub.pages import page
from mettle.hub.routes.addresses import root_of
from mettle.hub.routes.looking import looking
from mettle.hub.training_service.offers import shown_services
from mettle.storage.blobs import BlobStore

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, dependencies=[Depends(looking)])


@dataclass(frozen=True, slots=True)
class ShownRoute:
    """A route for programs: the first line of what it says of itself."""

    method: str
    path: str
    words: str


@router.get("/docs")
def docs_page(request: Request, lab: LabHere) -> HTMLResponse:
    """For whoever reaches the Hub: commands with its own address in them, and every route for programs."""
    groups = _routes(request.app)
    services = shown_services(lab.folder, lab.train_offers, root_of(request))
    return page("docs.html", root=root_of(request), groups=groups, version=mettle.__version__, services=services)


@router.get("/settings")
def settings_page(request: Request, lab: LabHere, caller: Admin) -> HTMLResponse:
    """For admins: what the server was started with. What opens something is not among it."""
    return page("settings.html", settings=_settings(request, lab))


@lru_cache(maxsize=4)
def _routes(app: FastAPI) -> dict[str, list[ShownRoute]]:
    """By the first word of the address under the API."""
    found: dict[str, list[ShownRoute]] = {}
    for path, methods in sorted(app.openapi()["paths"].items()):
        group = path.removeprefix("/api/v1").strip("/").partition("/")[0]
        for method, told in methods.items():
            words = str(told.get("description") or told.get("summary") or "").partition("\n")[0]
            found.setdefault(group, []).append(ShownRoute(method.upper(), path, words))
    return found


def _settings(request: Request, lab: Lab) -> list[tuple[str, str]]:
    sandboxes, engines = request.app.state.sandboxes, request.app.state.engines
    provider = lab.provider
    services = shown_services(lab.folder, lab.train_offers, root_of(request))
    return [
        ("Release of Mettle", mettle.__version__),
        ("Folder of the Hub", str(lab.folder)),
        ("Database", "SQLite, in the folder" if lab.database.is_sqlite else "PostgreSQL"),
        ("Schema of the database", lab.database.newest_schema()),
        ("Wheels and sources", "a folder" if type(lab.blobs) is BlobStore else "an object store"),
        ("Models that runs can start from", str(lab.models)),
        ("Runs of this machine", "shown to whoever reaches it" if lab.are_runs_open else "for people with an account"),
        ("Package index for other names", lab.upstream_index or "none: a name that nobody has is not found"),
        ("What checks of pushes reach", ", ".join(lab.check_reach) or "nothing"),
        ("Silence of a joined machine", f"{lab.lease_s:g} s before its work is given to another"),
        ("Sign-in through a provider", provider.config.issuer if provider is not None else "none: passwords alone"),
        ("Sandboxes of one person", "none" if sandboxes is None else f"up to {sandboxes.config.quota.max_machines}"),
        (
            "Training services",
            "; ".join(f"{each.address} ({each.state})" for each in services) or "none: no train_models",
        ),
        ("Models served at a time", "none" if engines is None else str(engines.max_engines)),
    ]
