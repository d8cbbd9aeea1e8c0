"""`python -m mettle.orchestrator RUN_DIR`: the orchestrator's process.

Exit codes: 0 finished or stopped by SIGTERM, 2 the user's mistake, 3 cannot go on. Anything else is a crash, after
which the process may simply be started again.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from mettle.clients.renderer import Renderer
from mettle.errors import MettleError, ServiceError, StorageError, UserError
from mettle.log import setup_logging
from mettle.orchestrator.config import OrchestratorConfig
from mettle.orchestrator.loop import Orchestrator
from mettle.orchestrator.server import EndpointFile, HttpPolicyServer
from mettle.orchestrator.services import HttpModel, HttpServices, OwnModel
from mettle.orchestrator.telling import tell, watch_supervisor
from mettle.processes.beats import Gauge, Heartbeat
from mettle.processes.collector import quiet_collector
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.share_dir import ShareDir
from mettle.web.keys import Keys

logger = logging.getLogger(__name__)

EXIT_USER = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one orchestrator to its end; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1:
        print("usage: python -m mettle.orchestrator RUN_DIR", file=sys.stderr)
        return EXIT_USER
    run_dir = RunDir(Path(given[0]).resolve())
    keys = Keys.from_environment()
    try:
        config = read_config(run_dir)
        setup_logging(run_dir.logs / "orchestrator.log")
        # While environments load nothing is in flight, so there is nothing to put back.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        ledger = Ledger(run_dir.ledger, is_blocking=False)
        try:
            with Heartbeat.of_run("orchestrator", unit="rollouts") as heart:
                heart.is_writing = lambda: ledger.database.is_writing
                asyncio.run(orchestrate(config, run_dir, ledger, keys, heart))
        finally:
            ledger.close()
    except (MettleError, BaseExceptionGroup) as raised:
        error = first_error(raised)
        if not isinstance(error, UserError | ServiceError | StorageError):
            raise
        print(f"mettle orchestrator: {error}", file=sys.stderr)
        logger.error("%s", error)
        return error.exit_code
    return 0


def read_config(run_dir: RunDir) -> OrchestratorConfig:
    """The resolved configuration of the run. Raises: UserError naming the field that is wrong."""
    path = run_dir.config("orchestrator")
    try:
        return OrchestratorConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; is {run_dir.path} a run directory?") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {where}: {first['msg']}") from error


async def orchestrate(
    config: OrchestratorConfig, run_dir: RunDir, ledger: Ledger, keys: Keys, heart: Heartbeat
) -> None:
    """Until the run is finished, or SIGTERM or SIGINT asks for the end."""
    last = ledger.last_batch()
    if ledger.journal.fact("state") == "finished" and (last.step if last else 0) >= config.max_steps:
        logger.info("the run is finished already")
        return
    from mettle.envs.workers.places import WorkerPlaces
    from mettle.orchestrator.environments import EnvironmentSource

    if config.share is None:
        endpoint = EndpointFile(run_dir.endpoint("inference"))
        engine = HttpPolicyServer(endpoint, keys.admin)
    else:
        endpoint = EndpointFile(ShareDir(config.share).endpoint)
        engine = HttpPolicyServer(endpoint, keys.admin, adapter=config.served_model_name)
    telling: set[asyncio.Task[None]] = set()

    def tell_death(text: str) -> None:
        task = asyncio.get_running_loop().create_task(tell(ledger, "worker_died", text))
        telling.add(task)
        task.add_done_callback(telling.discard)

    model_dir = Path(config.model) if config.model else run_dir.model
    heart.gauge = lambda: Gauge(0, has_work=True)  # loading environments is work, too, and may hang
    places = WorkerPlaces(config.worker_places, keys.workers) if config.worker_places else None
    source = EnvironmentSource(config, endpoint, model_dir, on_death=tell_death, places=places)
    services = HttpServices(
        {name: HttpModel(name, **made.model_dump()) for name, made in config.services.items()},
        policy=OwnModel(endpoint, config.served_model_name),
        renderer=Renderer.from_directory(model_dir),
    )
    try:
        if config.services:
            await services.check_vocabularies(Renderer.from_directory(model_dir).encode)
        orchestrator = Orchestrator(config, run_dir, ledger, source, engine, services=services, heart=heart)
        watching = asyncio.create_task(watch_supervisor(ledger, run_dir))
        try:
            with quiet_collector():
                await run_until_signalled(orchestrator, ledger)
        finally:
            watching.cancel()
    finally:
        await source.close()
        await engine.close()
        await services.close()


async def run_until_signalled(orchestrator: Orchestrator, ledger: Ledger) -> None:
    """Run; a signal cancels it cleanly, which loses nothing."""
    running = asyncio.create_task(orchestrator.run())
    stopped: list[str] = []

    def stop(name: str) -> None:
        stopped.append(name)
        running.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, signal.Signals(number).name)
    try:
        await running
    except asyncio.CancelledError:
        if not stopped:
            raise
        logger.info("stopped by %s", stopped[0])
        await tell(ledger, "stopped", f"stopped by {stopped[0]}; tasks in flight were put back")


def first_error(raised: BaseException) -> BaseException:
    """The first error inside groups of errors; one that is no `MettleError` goes before the others."""
    while isinstance(raised, BaseExceptionGroup):
        raised = next((e for e in raised.exceptions if not isinstance(e, MettleError)), raised.exceptions[0])
    return raised


if __name__ == "__main__":
    sys.exit(main())
