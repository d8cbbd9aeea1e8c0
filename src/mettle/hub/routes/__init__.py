"""The routes of a Hub with accounts: what programs ask, and the pages for people."""

from __future__ import annotations

from fastapi import FastAPI

from mettle.hub.catalog import RunCatalog


def include_routes(app: FastAPI) -> None:
    """Add them to an application. They stand before the pages of runs, whose addresses are more general."""
    from mettle.hub.routes import (
        account_api,
        account_pages,
        actions_api,
        chat_pages,
        help_pages,
        hosted_evals_api,
        hosted_evals_pages,
        machines_api,
        machines_pages,
        models_api,
        oidc_pages,
        package_index,
        registry_api,
        registry_pages,
        results_api,
        results_pages,
        sandboxes_pages,
        secrets_api,
        secrets_pages,
        team_pages,
        training_api,
        training_pages,
        training_service_api,
        usage_api,
        usage_pages,
    )

    api = (
        account_api,
        registry_api,
        actions_api,
        results_api,
        hosted_evals_api,
        secrets_api,
        training_api,
        usage_api,
        machines_api,
        models_api,
        training_service_api,
    )
    pages = (
        account_pages,
        oidc_pages,
        team_pages,
        registry_pages,
        results_pages,
        hosted_evals_pages,
        secrets_pages,
        training_pages,
        usage_pages,
        machines_pages,
        sandboxes_pages,
        chat_pages,
        help_pages,
        package_index,
    )
    app.state.open_pushed = results_pages.open_pushed
    app.state.open_hosted = training_api.open_hosted
    app.state.hosted = RunCatalog(app.state.lab.folder / "runs")

    for module in (*api, *pages):
        app.include_router(module.router)
