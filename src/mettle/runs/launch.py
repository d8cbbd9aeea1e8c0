"""Run, resume, stop and list runs: what the command line calls."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mettle.config import Loaded, load_config
from mettle.envs.sandboxes.shared import SANDBOX_ENV
from mettle.errors import MettleError, ServiceError, UserError
from mettle.log import setup_logging
from mettle.processes.fork_server import ForkServer
from mettle.processes.importer import Importer
from mettle.processes.managed import ProcessSpec
from mettle.runs.cluster.actor import HOST_MARK
from mettle.runs.cluster.launcher import Cluster, RayLauncher
from mettle.runs.cluster.placement import (
    REPLICA,
    SANDBOXES,
    placement_of,
    replica_name,
    sandbox_service_names,
    worker_place_names,
)
from mettle.runs.cluster.sandboxes import client_settings
from mettle.runs.config import RunConfig
from mettle.runs.costs import settle, settle_last
from mettle.runs.create import check_config, create_run, new_run_name
from mettle.runs.export import export_policy
from mettle.runs.keys import run_keys
from mettle.runs.launcher import IMPORTS, Launcher, LocalLauncher
from mettle.runs.lock import RunLock, supervisor_host, supervisor_pid
from mettle.runs.membership import membership
from mettle.runs.mending import mend_batches, mend_ledger
from mettle.runs.ports import free_port, is_port_free
from mettle.runs.progress import RunProgress
from mettle.runs.remaking import has_failed_early
from mettle.runs.shares import NamedRun, check_joining, join_config, with_base
from mettle.runs.stored import mend_config, read_run_config
from mettle.runs.summary import summarise
from mettle.runs.supervisor import StopSignals, Supervisor
from mettle.runs.tracking import Mirror, make_trackers
from mettle.sandbox.service.config import ServiceConfig
from mettle.sandbox.service.tokens import TOKEN_ENV
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.share_dir import ShareDir
from mettle.trainer.ranks import ENVIRONMENT, LAUNCHER, launcher_arguments
from mettle.web.keys import API_KEY_ENV, WORKERS_KEY_ENV

RUNS_FOLDER = Path("runs")
STOP_TIMEOUT_S = 60.0
RUN_TOKEN_ENV = "METTLE_RUN_SANDBOX_TOKEN"
"""Of the run's own sandbox services, beside the one that an environment may have for others."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended: its directory, its summary, whether a person stopped it, and where its page was."""

    run_dir: RunDir
    summary: dict[str, Any]
    is_stopped: bool
    page: str | None = None


def load_run_config(files: Sequence[Path], overrides: Sequence[str] = ()) -> Loaded[RunConfig]:
    """Read and check a run's config."""
    return load_config(RunConfig, files, overrides)


def run(
    loaded: Loaded[RunConfig], path: Path | None = None, *, is_quiet: bool = False, begun: Importer | None = None
) -> RunOutcome:
    """Make a run at `path` (or under `runs/`) and train it to its end."""
    return drive(create(loaded, path), is_quiet=is_quiet, begun=begun)


def create(loaded: Loaded[RunConfig], path: Path | None = None) -> RunDir:
    """Make a run at `path` (or under `runs/`) that nobody has started."""
    name = loaded.config.name or (path.name if path is not None else new_run_name(loaded.config))
    if loaded.config.deployment.share is not None:
        loaded = _placed(loaded, name)
    return create_run(loaded, path or RUNS_FOLDER / name)


def _placed(loaded: Loaded[RunConfig], name: str) -> Loaded[RunConfig]:
    """The config of a run that joins a share, which must be running.

    Raises: UserError when it does not fit there.
    """
    assert loaded.config.deployment.share is not None
    share = ShareDir(loaded.config.deployment.share.resolve())
    named = NamedRun(str(name), name, loaded)
    check_joining(named, share)
    if supervisor_pid(share.as_run) is None:
        raise UserError(f"the share at {share.path} is not running; `mettle rl resume {share.path}` starts it")
    if any(member.name == name for member in share.members()):
        raise UserError(f"the share at {share.path} has a run {name!r} already; give this one another name")
    return with_base(join_config(named, share), Path(share.about()["base"]))


def resume(path: Path, *, is_quiet: bool = False, begun: Importer | None = None) -> RunOutcome:
    """Continue the run at `path` from what its ledger and its newest complete checkpoint say."""
    run_dir = RunDir.existing(path)
    with RunLock(run_dir):
        mend_ledger(run_dir)
    if is_finished(path):
        raise UserError(f"run {run_dir.name} is finished; `mettle rl metrics {path}` shows its figures")
    check_config(read_run_config(run_dir))
    return drive(run_dir, is_quiet=is_quiet, begun=begun)


def drive(
    run_dir: RunDir,
    *,
    is_quiet: bool = False,
    on_page: Callable[[str], None] | None = None,
    twin: ForkServer | None = None,
    begun: Importer | None = None,
) -> RunOutcome:
    """Supervise a run to its end, its failure, or a person's wish to stop.

    `on_page` is called once with the address of the run page when it answers. `twin` forks an orchestrator, and `begun`
    (see `head_start`) what needs torch.
    """
    with RunLock(run_dir):
        setup_logging(run_dir.logs / "supervisor.log", is_terminal=False)
        ledger = Ledger(run_dir.ledger)
        try:
            config = mend_config(run_dir, ledger.journal)
            mend_batches(run_dir, ledger)
            with _places(run_dir, config, twin, begun) as launcher:
                return _supervise(run_dir, ledger, config, launcher, is_quiet=is_quiet, on_page=on_page)
        finally:
            ledger.close()


@contextmanager
def _places(run_dir: RunDir, config: RunConfig, twin: ForkServer | None, begun: Importer | None) -> Iterator[Launcher]:
    """This machine, or what the run takes of a cluster. Raises: UserError when the cluster has no room."""
    # With several ranks or another engine there are not two processes here that would share what is imported.
    is_alone = config.deployment.share is None and config.deployment.num_trainer_ranks == 1
    is_shared = config.deployment.engine == "local" and is_alone and config.inference.engine == "embedded"
    if begun is not None and not is_shared:
        begun.close()
    if config.deployment.engine == "local":
        imports = IMPORTS if is_shared else ()
        yield LocalLauncher(run_dir.logs, imports, twin=twin, begun=begun if is_shared else None)
        return
    placement = placement_of(config)
    with Cluster(config.deployment.ray, run_dir.logs / "cluster.out") as cluster:
        cluster.reserve(placement)
        yield RayLauncher(cluster, placement, run_dir)


def stop(path: Path) -> bool:
    """End a run cleanly and wait for that. False when it was not running."""
    run_dir = RunDir.existing(path)
    pid = supervisor_pid(run_dir)
    if pid is None:
        return False
    if (host := supervisor_host(run_dir)) != socket.gethostname():
        raise UserError(f"run {run_dir.name} runs on {host}: type `mettle rl stop {path}` there")
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while supervisor_pid(run_dir) is not None:
        if time.monotonic() > deadline:
            raise ServiceError(f"run {run_dir.name} (pid {pid}) has not ended in {STOP_TIMEOUT_S:.0f} s")
        time.sleep(0.1)
    return True


def is_finished(path: Path) -> bool:
    """True when nothing is left to do in the run at `path`."""
    ledger = Ledger(RunDir.existing(path).ledger, is_read_only=True)
    try:
        return bool(ledger.journal.fact("state") == "finished")
    finally:
        ledger.close()


def list_runs(folder: Path = RUNS_FOLDER) -> list[dict[str, Any]]:
    """The runs in a folder, newest first; one that cannot be read is listed with what is wrong."""
    found = []
    for ledger_path in sorted(folder.glob("*/run.db")):
        run_dir = RunDir(ledger_path.parent.resolve())
        try:
            found.append(_describe(run_dir))
        except MettleError as error:
            found.append({"run": run_dir.name, "run_dir": str(run_dir.path), "state": "damaged", "error": str(error)})
    return sorted(found, key=lambda row: row.get("created_at") or 0.0, reverse=True)


def live_state(state: str, *, is_supervised: bool) -> str:
    """What to call a run whose ledger says `state`: without a supervisor nothing is running, whatever it says, and with
    one the last step is trained, but its policy is not written yet."""
    if is_supervised:
        return "finishing" if state == "finished" else state
    return "interrupted" if state in ("running", "preparing", "stopping") else state


def process_specs(run_dir: RunDir, config: RunConfig, *, is_warm: bool) -> list[ProcessSpec]:
    """The processes of a run. The page comes first, so that the warm-up can be watched."""
    path = str(run_dir.path)
    specs: list[ProcessSpec] = []
    prepared: tuple[str, ...] = ()
    if has_own_page(run_dir, config):
        # Chosen here, so that a page that is started again keeps its address.
        port = config.deployment.hub_port
        if port == 0 or not is_port_free(port):  # one that somebody else has taken must not keep a run from going on
            port = free_port()
        hub = ("--runs", path, "--port", str(port), "--ready-file", str(run_dir.endpoint("hub")))
        specs.append(ProcessSpec("hub", "mettle.hub", hub, ready_file=run_dir.endpoint("hub"), is_service=True))
    if not is_warm:
        name, module = ("sft", "mettle.trainer.sft") if config.warm_up.enabled else ("policy", "mettle.trainer.initial")
        specs.append(ProcessSpec(name, module, (path,)))
        prepared = (name,)
    if config.deployment.share is not None:
        keys = run_keys(ShareDir(config.deployment.share).as_run).environment()
        return [*specs, ProcessSpec("orchestrator", "mettle.orchestrator", (path,), environment=keys)]
    sandboxes, told = _sandbox_specs(run_dir, config)
    places = _worker_place_specs(run_dir, config, told)
    inference = (
        "--config", str(run_dir.config("inference")), "--ready-file", str(run_dir.endpoint("inference")),
        "--log-file", str(run_dir.logs / "inference.log"),
        *(("--host", HOST_MARK) if places else ()),  # workers on other nodes ask it
    )  # fmt: skip
    keys = run_keys(run_dir).environment()
    replicas = _replica_specs(run_dir, config, keys, prepared) if config.deployment.engine == "ray" else []
    first = (replicas[0].name,) if replicas else ()
    theirs = {f"METTLE_REMOTE_{name.removeprefix('METTLE_')}": key for name, key in keys.items()} if replicas else {}
    specs += [
        *replicas,
        *places,
        *sandboxes,
        ProcessSpec(
            "inference", "mettle.inference", inference, ready_file=run_dir.endpoint("inference"), is_service=True,
            after=(*prepared, *first), environment={**keys, **theirs},
            ready_timeout_s=config.inference.start_timeout_s,
        ),
        _trainer_spec(path, config, prepared),
        ProcessSpec("orchestrator", "mettle.orchestrator", (path,), after=prepared, environment={**keys, **told}),
    ]  # fmt: skip
    return specs


def has_own_page(run_dir: RunDir, config: RunConfig) -> bool:
    """A run that a share has started is on the share's page."""
    share = config.deployment.share
    return config.deployment.hub and (share is None or run_dir.path.parent != ShareDir(share).runs)


def _replica_specs(
    run_dir: RunDir, config: RunConfig, keys: dict[str, str], after: tuple[str, ...]
) -> list[ProcessSpec]:
    """The engines that a cluster places, each of which listens on the address of its node."""
    names = [replica_name(number) for number in range(config.inference.replicas)]
    return [
        ProcessSpec(
            name, "mettle.inference",
            (
                "--config", str(run_dir.config(REPLICA)), "--host", HOST_MARK,
                "--ready-file", str(run_dir.endpoint(name)), "--log-file", str(run_dir.logs / f"{name}.log"),
            ),
            ready_file=run_dir.endpoint(name), is_service=True, after=after, environment=keys,
            ready_timeout_s=config.inference.start_timeout_s,
        )
        for name in names
    ]  # fmt: skip


def _sandbox_specs(run_dir: RunDir, config: RunConfig) -> tuple[list[ProcessSpec], dict[str, str]]:
    """The sandbox services on nodes, and what tells environments of them."""
    names = sandbox_service_names(config)
    if not names:
        return [], {}
    settings, token = run_dir.config(SANDBOXES), {TOKEN_ENV: run_keys(run_dir).sandboxes}
    files = [run_dir.endpoint(name) for name in names]
    client = client_settings(ServiceConfig.model_validate_json(settings.read_bytes()), files)
    specs = [
        ProcessSpec(
            name, "mettle.runs.cluster.sandboxes",
            (name, "--config", str(settings), "--host", HOST_MARK, "--ready-file", str(file)),
            ready_file=file, is_service=True, environment=token,
        )
        for name, file in zip(names, files, strict=True)
    ]  # fmt: skip
    told = client.model_copy(update={"token_env": RUN_TOKEN_ENV}).model_dump_json()
    return specs, {SANDBOX_ENV: told, RUN_TOKEN_ENV: token[TOKEN_ENV]}


def _worker_place_specs(run_dir: RunDir, config: RunConfig, told: dict[str, str]) -> list[ProcessSpec]:
    """The places for environments' workers: each listens on the address of its node and knows who may ask it."""
    keys = run_keys(run_dir)
    given = {name: os.environ[name] for name in config.deployment.ray.worker_variables if name in os.environ}
    environment = {**given, **told, API_KEY_ENV: keys.api, WORKERS_KEY_ENV: keys.workers}
    return [
        ProcessSpec(
            name, "mettle.envs.workers.place", (name, "--host", HOST_MARK, "--ready-file", str(run_dir.endpoint(name))),
            ready_file=run_dir.endpoint(name), is_service=True, environment=environment,
        )
        for name in worker_place_names(config)
    ]  # fmt: skip


def _trainer_spec(path: str, config: RunConfig, after: tuple[str, ...]) -> ProcessSpec:
    ranks = config.deployment.num_trainer_ranks
    if ranks == 1 or config.deployment.engine == "ray":  # there each rank is a process that the cluster places
        return ProcessSpec("trainer", "mettle.trainer", (path,), after=after)
    arguments = (*launcher_arguments(ranks), "-m", "mettle.trainer", path)
    return ProcessSpec("trainer", LAUNCHER, arguments, after=after, environment=ENVIRONMENT)


def _supervise(
    run_dir: RunDir,
    ledger: Ledger,
    config: RunConfig,
    launcher: Launcher,
    *,
    is_quiet: bool,
    on_page: Callable[[str], None] | None,
) -> RunOutcome:
    journal = ledger.journal
    is_warm = bool(journal.fact("is_warm"))
    specs = process_specs(run_dir, config, is_warm=is_warm)
    life, death = settle_last(run_dir, ledger)
    supervisor = Supervisor(
        run_dir, ledger, specs, main="orchestrator", max_restarts=config.deployment.max_restarts, life=life,
        launcher=launcher,
    )  # fmt: skip
    if death:
        supervisor.notes.append(death)
    journal.set_fact("state", "running")
    journal.set_fact("finished_at", None)
    journal.set_fact("failure", None)
    journal.set_fact("started_at", journal.fact("started_at") or time.time())
    title = f"Mettle {run_dir.name}"
    # A connection of its own: the supervisor's may wait for a writer while this one reads.
    reader = Ledger(run_dir.ledger, is_read_only=True)
    try:
        with (
            StopSignals(supervisor.stop) as signals,
            Mirror(run_dir, make_trackers(config.tracking, run_dir, config.model_dump(mode="json"))),
            membership(run_dir, config, supervisor) as look_at_share,
            RunProgress(reader, config.max_steps, title=title, is_quiet=is_quiet, notes=supervisor.notes) as show,
        ):
            for _ in supervisor.ticks():
                look_at_share()
                if show.page is None and has_own_page(run_dir, config):
                    show.page = page_address(supervisor, run_dir)
                    if show.page is not None and on_page is not None:
                        on_page(show.page)
                show.update()
    finally:
        reader.close()
    settle(ledger, supervisor.costs.figures())
    journal.set_fact("finished_at", time.time())
    journal.set_fact("failure", supervisor.failure)
    if supervisor.failure is not None:
        journal.set_fact("state", "failed")
        is_mistake = supervisor.failure_code == UserError.exit_code
        how = "continues the run"
        if is_mistake and has_failed_early(run_dir, ledger):
            how = "tries again, and `mettle rl run` with other settings makes the run anew, as it has done nothing yet"
        raise (UserError if is_mistake else ServiceError)(
            f"{supervisor.failure} (logs in {run_dir.logs}; `mettle rl resume {run_dir.path}` {how})"
        )
    if signals.is_interrupted:
        journal.set_fact("state", "stopped")
    else:
        export_policy(run_dir, ledger, is_merged=config.deployment.share is None)
    return RunOutcome(run_dir, summarise(ledger, run_dir.path), signals.is_interrupted, show.page)


def page_address(supervisor: Supervisor, run_dir: RunDir) -> str | None:
    """Where the run page is, once it is there."""
    endpoint = supervisor.process("hub").endpoint()
    if endpoint is None:
        return None
    return f"http://{endpoint['host']}:{endpoint['port']}/runs/{run_dir.name}"


def _describe(run_dir: RunDir) -> dict[str, Any]:
    ledger = Ledger(run_dir.ledger, is_read_only=True)
    try:
        journal = ledger.journal
        summary = summarise(ledger, run_dir.path)
        summary["state"] = live_state(str(summary["state"]), is_supervised=supervisor_pid(run_dir) is not None)
        for key in ("created_at", "max_steps", "envs", "model"):
            summary[key] = journal.fact(key)
        return summary
    finally:
        ledger.close()
