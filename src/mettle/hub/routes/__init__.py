"""The routes of a Hub with accounts: what programs ask, and the pages for people."""

from __future__ import annotations

from fastapi import FastAPI


def include_routes(app: FastAPI) -> None:
    """Add them to an application. They stand before the pages of runs, whose addresses are more general."""
    from mettle.hub.routes import (
        account_api,
        account_pages,
        package_index,
        registry_api,
        registry_pages,
        results_api,
        results_pages,
        team_pages,
    )

    api = (account_api, registry_api, results_api)
    pages = (account_pages, team_pages, registry_pages, results_pages, package_index)
    app.state.open_pushed = results_pages.open_pushed

    for module in (*api, *pages):
        app.include_router(module.router)
