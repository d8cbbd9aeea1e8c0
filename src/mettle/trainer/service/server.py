"""The service on a socket: everything made, started, tidied and stopped.

Parts: `serving`, `serve`. Invariant: what was accepted before goes on before the first request is answered; a stop
loses nothing, for what waits is in the database.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import torch
from transformers.utils.logging import disable_progress_bar

from mettle.clients.renderer import Renderer
from mettle.errors import MettleError, UserError
from mettle.storage.claim import FolderClaim
from mettle.trainer.service.access import HubOwners, Signer, TenantKeys
from mettle.trainer.service.config import TrainServeConfig
from mettle.trainer.service.core import LoraCore
from mettle.trainer.service.folders import WeightFolders
from mettle.trainer.service.models import ResidentModels
from mettle.trainer.service.operations import Operations
from mettle.trainer.service.routes import futures, sampling, sessions, training, weights
from mettle.trainer.service.samplers import SamplerPool
from mettle.trainer.service.sampling import SampleRunner
from mettle.trainer.service.scoring import PromptScores
from mettle.trainer.service.service import TrainingService, Waiters
from mettle.trainer.service.store import Store
from mettle.trainer.service.worker import TrainingWorker
from mettle.web.app import WebApp, routed
from mettle.web.doors import Door, allowed_hosts, is_loopback
from mettle.web.keys import Keys
from mettle.web.problems import HttpError
from mettle.web.server import HttpServer, bind, on_signals, url_of

logger = logging.getLogger(__name__)

ROUTES: Final[list[Any]] = [
    *sessions.ROUTES, *training.ROUTES, *futures.ROUTES, *sampling.ROUTES, *weights.ROUTES,
]  # fmt: skip
NO_KEYS: Final = Keys()
_TIDY_S: Final = 30.0
_HANDLERS_S: Final = 1.0


def as_answer(error: Exception) -> HttpError | None:
    """A mistake is a 400, which clients do not send again."""
    return HttpError(400, str(error)) if isinstance(error, UserError) else None


@asynccontextmanager
async def serving(config: TrainServeConfig, hub: Keys = NO_KEYS, *, is_for_others: bool = False) -> AsyncIterator[str]:
    """The service answers at the address that the block is given.

    With the keys of a `hub` that alone is answered, and says who asks; `is_for_others`: its clients are not on this
    machine.
    Raises: UserError when the model, the keys or the address cannot be used, or another service has the data.
    """
    if config.keys is None and not is_loopback(config.host):
        raise UserError(
            f"whoever reaches {config.host} could train here: give the keys with --keys FILE "
            "(`mettle train key NAME` writes a line for it)"
        )
    keys = HubOwners(hub.api) if hub.api else TenantKeys.read(config.keys)
    claim = FolderClaim(config.data)
    store = Store(config.data / "service.db")
    try:
        listener = bind(config.host, config.port)
        address = url_of(*listener.getsockname()[:2])
        torch.set_num_threads(config.num_threads)
        core = await asyncio.to_thread(_load, config)
        service = _assembled(config, store, core, keys, is_for_others=is_for_others)
        app = WebApp(routed(ROUTES), door=Door(allowed_hosts(config.host), hub), as_error=as_answer, service=service)
        http = HttpServer(app, listener)
        service.worker.start()
        for operation in store.waiting():
            if operation.kind == "sample":
                service.runner.add(operation)
        await http.start()
        tidying = asyncio.create_task(_tidy(service), name="tidy")
        logger.info("serving", extra={"model": config.model_name, "url": address})
        try:
            yield address
        finally:
            tidying.cancel()
            await http.stop(_HANDLERS_S)
            await service.runner.close()
            await asyncio.to_thread(service.worker.close)
            await service.pool.close()
    finally:
        store.database.close()
        claim.release()


async def serve(
    config: TrainServeConfig, on_ready: Callable[[str], None], hub: Keys = NO_KEYS, *, is_for_others: bool = False
) -> None:
    """Serve until a signal."""
    stopped = asyncio.Event()
    with on_signals(stopped.set):
        async with serving(config, hub, is_for_others=is_for_others) as address:
            on_ready(address)
            await stopped.wait()


def _load(config: TrainServeConfig) -> LoraCore:
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise UserError("device is 'cuda' and torch finds no GPU here; use 'cpu' or 'auto'")
    disable_progress_bar()
    device = torch.device("cuda" if has_gpu and config.device != "cpu" else "cpu")
    return LoraCore(config.base_model, device, pass_tokens=config.pass_tokens, max_length=config.max_model_len)


def _assembled(
    config: TrainServeConfig, store: Store, core: LoraCore, keys: TenantKeys | HubOwners, *, is_for_others: bool
) -> TrainingService:
    states, folders = WeightFolders(config.data / "states"), WeightFolders(config.data / "weights")
    states.sweep(store.snapshots())
    folders.sweep(store.folders_in_use())
    waiters = Waiters()
    models = ResidentModels(store, core, states)
    worker = TrainingWorker(store, models, Operations(models, folders, config), config, waiters.tell)
    pool = SamplerPool(core, config, folders, Renderer.from_directory(config.base_model))
    service = TrainingService(
        config, store, worker, pool, waiters, keys, Signer(config.data / "secret"), folders, max_length=core.max_length,
        is_for_others=is_for_others,
    )  # fmt: skip
    service.runner = SampleRunner(
        store, pool, PromptScores(core, worker, folders), service.folder_to_sample, waiters.tell,
        max_running=config.max_sequences,
    )  # fmt: skip
    return service


async def _tidy(service: TrainingService) -> None:
    while True:
        await asyncio.sleep(_TIDY_S)
        with suppress(MettleError):  # a full disk must not end the tidying
            await service.tidy()
