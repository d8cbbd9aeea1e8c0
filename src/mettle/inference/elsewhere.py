"""Engines in other processes: child processes, other servers, workers from outside.

Parts: `open_replicas`, `with_outside`; `launch_replica` (a server of ours as a child, which ends with this process).
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Final

from mettle.errors import ProviderError, ServiceError, UserError
from mettle.inference.config import InferenceConfig, RemoteServers
from mettle.inference.engine.protocol import SamplingEngine
from mettle.inference.hooks import EngineHooks
from mettle.inference.outside.auditor import Auditor
from mettle.inference.outside.checks import AUDIT_TOLERANCES, AuditBounds
from mettle.inference.outside.config import OutsideConfig
from mettle.inference.outside.engine import OutsideEngine
from mettle.inference.outside.roster import Roster
from mettle.inference.remote import RemoteEngine
from mettle.inference.replicated import ReplicaAwaited, ReplicatedEngine, Serving
from mettle.processes.child import THREAD_ENVIRONMENT
from mettle.processes.managed import ManagedProcess, ProcessSpec, wait_ready
from mettle.web.keys import Keys

START_TIMEOUT_S: Final = 300.0
_REFUSED: Final = 2


def with_outside(
    config: InferenceConfig, outside: OutsideConfig, own: SamplingEngine, told: EngineHooks
) -> SamplingEngine:
    """The engine, and workers from outside before it. Raises: UserError."""
    if outside.folder is None:
        raise UserError("inference.outside.folder is not set: invitations and the list of workers are kept there")

    def open_auditor(serving: Serving) -> SamplingEngine:
        from mettle.inference.engine.embedded import start_engine

        settings: dict[str, object] = {
            "engine": "embedded", "replicas": 1, "remote": None, "vllm": None, "outside": None,
            "weights": serving.weights, "version": serving.version, "kv_cache_share": config.kv_cache_share / 4,
            "max_model_len": own.status().max_model_len,
        }  # fmt: skip
        return start_engine(config.model_copy(update=settings), eos_token_ids=told.eos_token_ids)

    return OutsideEngine(
        own,
        Auditor(open_auditor),
        outside,
        Roster(outside.folder),
        Serving(config.weights, config.version),
        bounds=AuditBounds(outside.tolerance or AUDIT_TOLERANCES[config.dtype]),
        eos_token_ids=told.eos_token_ids,
        decode_text=told.decode_text,
    )


def open_replicas(config: InferenceConfig, told: EngineHooks) -> SamplingEngine:
    """Several engines as one, or servers that others have started. Raises: UserError, ServiceError."""
    if config.engine == "remote":
        assert config.remote is not None, "the config was checked"
        keys = _remote_keys(config.remote)
        starts = [partial(_connect, url, keys) for url in config.remote.urls]
        starts += [partial(_connect_by_file, path, keys) for path in config.remote.ready_files]
    else:
        folder = told.logs or Path(tempfile.mkdtemp(prefix="mettle-replicas-"))
        starts = [partial(launch_replica, config, folder, number) for number in range(config.replicas)]
    return ReplicatedEngine(starts, Serving(config.weights, config.version), on_death=told.on_death)


def launch_replica(config: InferenceConfig, folder: Path, number: int, serving: Serving) -> SamplingEngine:
    """Start a server with the same model on a port of its own, closed to all but this process by its keys.

    Raises: UserError when it refuses its settings, ServiceError when it does not come up.
    """
    name = f"inference-{number}"
    settings: dict[str, object] = {
        "replicas": 1,
        "port": 0,
        "host": "127.0.0.1",
        "weights": serving.weights,
        "version": serving.version,
        "outside": None,
    }
    if config.engine == "embedded":  # they share what one engine would have taken
        settings["num_threads"] = max(1, config.threads // config.replicas)
    own = config.model_copy(update=settings)
    config_file, ready_file = folder / f"{name}.json", folder / f"{name}.ready.json"
    folder.mkdir(parents=True, exist_ok=True)
    config_file.write_text(own.model_dump_json())
    keys = Keys.new()
    arguments = ("--config", str(config_file), "--ready-file", str(ready_file))
    spec = ProcessSpec(
        name,
        "mettle.inference",
        (*arguments, "--log-file", str(folder / f"{name}.log")),
        ready_file=ready_file,
        ready_timeout_s=max(START_TIMEOUT_S, config.start_timeout_s),
        environment={**{n: os.environ[n] for n in THREAD_ENVIRONMENT if n in os.environ}, **keys.environment()},
    )
    process = ManagedProcess(spec, folder / f"{name}.out")
    try:
        process.start()
        endpoint = wait_ready(process)
        return RemoteEngine(endpoint["base_url"], admin_key=keys.admin, api_key=keys.api, process=process)
    except BaseException as error:
        is_refused = process.exit_code() == _REFUSED
        process.end()
        if isinstance(error, ServiceError) and is_refused:
            raise UserError(process.last_line()) from None
        raise


def _connect(url: str, keys: Keys, serving: Serving) -> SamplingEngine:
    engine = RemoteEngine(url, admin_key=keys.admin, api_key=keys.api)
    if serving.weights is None and (found := engine.status().version) != serving.version:
        engine.close()
        raise UserError(f"the server at {url} serves version {found}, and this one is to begin with {serving.version}")
    return engine


def _connect_by_file(path: Path, keys: Keys, serving: Serving) -> SamplingEngine:
    """The server whose address stands in a file. One that is ahead is taken as it is: its tokens say their version, and
    whoever hands out weights begins with the newest."""
    try:
        url = str(json.loads(path.read_text())["base_url"])
    except (OSError, ValueError, KeyError) as error:
        raise ReplicaAwaited(f"no server has said where it answers in {path}: {error}") from error
    try:
        return RemoteEngine(url, admin_key=keys.admin, api_key=keys.api)
    except ProviderError as error:  # its file is removed when it is known to be gone
        raise ReplicaAwaited(f"the server at {url} does not answer: {error}") from error


def _remote_keys(remote: RemoteServers) -> Keys:
    admin = os.environ.get(remote.admin_key_env, "")
    if not admin:
        raise UserError(f"{remote.admin_key_env} is not set: it holds the admin key of the servers in inference.remote")
    return Keys(os.environ.get(remote.api_key_env, ""), admin)
