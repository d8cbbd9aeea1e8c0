"""A run's sandboxes on a node: the service of `mettle sandbox serve`, with the run's token, as a process of the run.

`python -m mettle.runs.cluster.sandboxes NAME --config FILE --host ADDRESS --ready-file FILE`: it beats, and says in its
ready file where it listens. Parts: `service_settings` (what a run gives its services), `client_settings` (what it gives
its environments), `main`. Invariant: with the process, every machine of it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mettle.config.loader import load_config
from mettle.errors import MettleError, UserError
from mettle.processes.beats import Gauge, Heartbeat
from mettle.runs.cluster.placement import SANDBOXES
from mettle.runs.config import RayConfig
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.service.config import ServiceConfig
from mettle.storage.files import write_json
from mettle.storage.run_dir import RunDir

OWN_FIELDS = frozenset({
    "host", "port", "unix", "tls_cert", "tls_key", "public_url", "tokens_file", "idle_exit_s",
})  # fmt: skip
"""What the run says of its services itself."""


def service_settings(file: Path | None) -> ServiceConfig:
    """The settings of a run's services. Raises: UserError for a file that says what only the run can."""
    config = load_config(ServiceConfig, [file] if file else []).config
    if taken := sorted(OWN_FIELDS & config.model_fields_set):
        raise UserError(
            f"{file}: {', '.join(taken)} of a run's sandbox services is the run's own: they listen on their nodes, and"
            " know its token; leave it out"
        )
    if config.sandbox.backend == "remote":
        raise UserError(
            f"{file}: sandbox.backend 'remote' is a service elsewhere; name what the nodes run sandboxes on"
        )
    return config


def write_settings(run_dir: RunDir, ray: RayConfig) -> None:
    """What each service of the run begins with."""
    settings = service_settings(ray.sandbox_config)
    write_json(run_dir.config(SANDBOXES), settings.model_dump(mode="json", exclude_unset=True))


def client_settings(service: ServiceConfig, ready_files: Sequence[Path]) -> SandboxConfig:
    """What the run's environments make sandboxes with. The token goes as plainly as all else between nodes."""
    changes = {"backend": "remote", "urls": (), "url_files": tuple(ready_files), "plain_http": True}
    return SandboxConfig.model_validate({**service.sandbox.model_dump(), **changes})


def main(given: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM."""
    # Whoever starts a run asks for the settings alone, on a cluster or not.
    from mettle.sandbox.service.server import serve

    parser = argparse.ArgumentParser(prog="python -m mettle.runs.cluster.sandboxes")
    parser.add_argument("name")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    arguments = parser.parse_args(given)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        config = ServiceConfig.model_validate_json(arguments.config.read_bytes())
        config = config.model_copy(update={"host": arguments.host, "port": 0})

        def on_ready(url: str) -> None:
            write_json(arguments.ready_file, {"url": url, "pid": os.getpid()})

        with Heartbeat.of_run(arguments.name, unit="sandboxes") as heart:
            heart.gauge = lambda: Gauge(0, has_work=False)
            asyncio.run(serve(config, on_ready))
    except MettleError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
