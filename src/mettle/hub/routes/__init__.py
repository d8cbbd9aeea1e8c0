"""The routes of a Hub with accounts: what programs ask, and the pages for people."""

from __future__ import annotations

from fastapi import FastAPI


def include_routes(app: FastAPI) -> None:
    """Add them to an application. They stand before the pages of runs, whose addresses are more general."""
    from mettle.hub.routes import account_api, account_pages, package_index, registry_api, registry_pages, team_pages

    for module in (account_api, account_pages, team_pages, registry_api, package_index, registry_pages):
        app.include_router(module.router)
