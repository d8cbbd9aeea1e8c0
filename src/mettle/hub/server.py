"""Serving the Hub: says when it is ready, stops on a signal."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING

from mettle.errors import UserError
from mettle.evals.entries import find_evaluations
from mettle.hub.app import create_app
from mettle.hub.catalog import RunCatalog
from mettle.hub.config import HubConfig
from mettle.processes.beats import Heartbeat
from mettle.storage.files import write_json
from mettle.web.doors import allowed_hosts, is_loopback
from mettle.web.server import HttpServer, bind, on_signals, url_of

if TYPE_CHECKING:
    from fastapi import FastAPI

    from mettle.hub.background import Part
    from mettle.hub.lab import Lab
    from mettle.hub.serving.engines import ModelEngines
    from mettle.hub.training_service.offers import ServiceOffer

_GRACE_S = 2.0
_BREATH_S = 0.002


def serve_hub(config: HubConfig, on_ready: Callable[[str, str | None], None]) -> None:
    """Serve a Hub with accounts until a signal ends the process.

    `on_ready` is called with the address, and with that of the first admin's link where there is no admin yet.
    Raises: UserError when the port is taken or a setting is wrong, StorageError when the disk or database refuses.
    """
    from mettle.hub.background import BackgroundWork
    from mettle.hub.lab import open_lab
    from mettle.hub.oidc.provider import OidcProvider

    offers = _training_offers(config)
    are_open = is_loopback(config.host) if config.open_runs is None else config.open_runs
    listener = bind(config.host, config.port)
    lab = open_lab(
        config.data,
        blobs=config.blobs,
        database=config.database,
        are_runs_open=are_open,
        upstream_index=config.upstream_index,
        models=config.models,
        check_reach=tuple(config.check_reach),
        lease_s=config.lease_s,
        train_offers=offers,
        provider=OidcProvider(config.oidc) if config.oidc.issuer else None,
    )
    worker = BackgroundWork(
        lab, is_checking=config.check_pushes, is_working=config.work_here, more=lambda: _training_services(config, lab)
    )
    secret = None

    def ready(url: str) -> None:
        worker.start()
        on_ready(url, None if secret is None else f"{url}/join/{secret}")

    try:
        secret = lab.first_link()
        asyncio.run(_serve(config, listener, ready, lab))
    finally:
        worker.close()
        lab.close()


def serve(config: HubConfig, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve the read-only page of runs until a signal ends the process; it knows no people.

    `on_ready` is called with the address once requests are answered.
    Raises: UserError when the folder is missing or the port is taken.
    """
    if not config.runs.is_dir() and not find_evaluations(config.workspace):
        raise UserError(f"no folder {config.runs}, and no evaluations: name a folder of runs, or one run directory")
    asyncio.run(_serve(config, bind(config.host, config.port), on_ready))


async def _serve(
    config: HubConfig, listener: socket.socket, on_ready: Callable[[str], None] | None, lab: Lab | None = None
) -> None:
    over = asyncio.Event()
    port = listener.getsockname()[1]
    base_url = url_of(config.host, port)
    sandboxes = None
    if lab is not None and config.sandboxes:
        from mettle.hub.sandboxes import HubSandboxes

        sandboxes = HubSandboxes(lab, config.host, config.sandbox, config.quota)
    engines = _engines(config, lab)
    app = create_app(
        config.runs, workspace=config.workspace, allowed_hosts=allowed_hosts(config.host), lab=lab, sandboxes=sandboxes,
        engines=engines,
    )  # fmt: skip
    server = HttpServer(app, listener, has_websockets=sandboxes is not None)
    async with AsyncExitStack() as stack:
        stack.enter_context(on_signals(over.set))
        heart = stack.enter_context(Heartbeat.of_run("hub"))
        stack.enter_context(_warming_up(app.state.catalog, is_wanted=lab is not None))
        if engines is not None:
            await stack.enter_async_context(engines)
        stack.push_async_callback(_close_proxy, app)
        await server.start()
        gc.freeze()  # What is there now stays: a collection that looks at all of it takes longer than a page.
        gc.enable()  # whoever starts a Hub may have turned it off until now
        heart.tick_with(asyncio.get_running_loop())
        try:
            if config.ready_file is not None:
                address = {"base_url": base_url, "host": config.host, "port": port}
                write_json(config.ready_file, {**address, "pid": os.getpid()})
            if on_ready is not None:
                on_ready(base_url)
            await over.wait()
        finally:
            if sandboxes is not None:
                await sandboxes.close()
            await server.stop(_GRACE_S)


def _engines(config: HubConfig, lab: Lab | None) -> ModelEngines | None:
    """What answers for models; None where nobody has an account, or the operator wants none."""
    if lab is None or not config.served_models:
        return None
    from mettle.hub.serving.engines import ModelEngines

    return ModelEngines(lab.folder / "served", max_engines=config.served_models, idle_s=config.served_idle_s)


async def _close_proxy(app: FastAPI) -> None:
    """Let go of the connections to training services, where there was a request for one."""
    proxy = getattr(app.state, "training_proxy", None)
    if proxy is not None:
        await proxy.close()


def _training_offers(config: HubConfig) -> tuple[ServiceOffer, ...]:
    """Raises: UserError for a model that is not there, and where what the service needs is not installed."""
    if not config.train_models:
        return ()
    from mettle.extras import install_line
    from mettle.hub.training_service.offers import offers_of
    from mettle.trainer.service.config import missing_packages

    if missing := missing_packages():
        raise UserError(
            f"train_models: {', '.join(missing)} is not installed here; `{install_line('service')}` brings it"
        )
    return offers_of(config.models, config.train_models)


def _training_services(config: HubConfig, lab: Lab) -> list[Part]:
    """Asked by the one server of a folder that does what is done between requests."""
    if not lab.train_offers:
        return []
    from mettle.hub.training_service.supervisor import TrainingServices

    is_for_others = not is_loopback(config.host)
    return [TrainingServices(lab, lab.train_offers, config.train, is_for_others=is_for_others)]


@contextmanager
def _warming_up(catalog: RunCatalog, *, is_wanted: bool) -> Iterator[None]:
    """While it is open, what lists show of the runs is read beside the requests, with a breath after each run."""
    over = threading.Event()
    thread = threading.Thread(target=catalog.warm_up, args=(lambda: over.wait(_BREATH_S),), name="warm-up", daemon=True)
    if is_wanted:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if is_wanted:
            thread.join()
