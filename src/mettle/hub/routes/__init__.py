"""The routes of a Hub with accounts: what programs ask, and the pages for people."""

from __future__ import annotations

from fastapi import FastAPI


def include_routes(app: FastAPI) -> None:
    """Add them to an application. They stand before the pages of runs, whose addresses are more general."""
    from mettle.hub.routes import account_api, account_pages, team_pages

    for router in (account_api.router, account_pages.router, team_pages.router):
        app.include_router(router)
