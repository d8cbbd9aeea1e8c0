"""A run directory from a config: everything a process needs to start, and nothing that depends on who starts it."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from mettle.config import Loaded
from mettle.envs import load_environment
from mettle.envs.environment import Environment
from mettle.envs.packages.arguments import check_arguments
from mettle.envs.packages.loading import resolve_environment
from mettle.errors import UserError
from mettle.runs.cluster.launcher import check_room
from mettle.runs.cluster.placement import REPLICA, replica_name, worker_place_names
from mettle.runs.cluster.sandboxes import service_settings, write_settings
from mettle.runs.config import RunConfig
from mettle.runs.demonstrations import write_demonstrations
from mettle.runs.devices import check_devices
from mettle.runs.fit import check_fit, check_services, check_teacher
from mettle.runs.network import check_network
from mettle.runs.ports import LOOPBACK, is_port_free
from mettle.runs.remaking import can_be_made_again, clear
from mettle.storage.files import write_atomic, write_json
from mettle.storage.ledger import Ledger
from mettle.storage.ledger_copy import copy_ledger
from mettle.storage.run_dir import RunDir

MIN_FREE_BYTES = 256 * 2**20
"""A run is refused on a disk with less than this."""


def new_run_name(config: RunConfig) -> str:
    """`reverse-text-tiny-1120-214702`: environment, model, time."""
    env = config.orchestrator.envs[0].id.split("/")[-1].split("@")[0]
    model = config.model.path.name if config.model.path is not None else config.model.preset
    return f"{env}-{model}-{time.strftime('%m%d-%H%M%S')}"


def create_run(loaded: Loaded[RunConfig], path: Path) -> RunDir:
    """Make the run directory at `path`.

    Raises: UserError when there is a run already, when an environment does not load, or when the disk is nearly full.
    """
    config = loaded.config
    run_dir = RunDir(path.resolve())
    check_run(loaded, path)
    given = _given_demonstrations(config)
    env = _load_for_warm_up(config) if config.warm_up.enabled else None
    if run_dir.ledger.exists():
        clear(run_dir)
    run_dir.path.mkdir(parents=True, exist_ok=True)
    write_configs(run_dir, loaded)
    if env is not None:
        _write_demonstrations(run_dir, config, env, given)
    if has_policy(config):
        assert config.model.path is not None, "a run in a share has the share's base"
        run_dir.model.unlink(missing_ok=True)  # of a making that was killed
        run_dir.model.symlink_to(config.model.path.resolve(), target_is_directory=True)
    with new_ledger(run_dir) as aside, closing(Ledger(aside)) as ledger:
        write_facts(run_dir, config, ledger)
    return run_dir


@contextmanager
def new_ledger(run_dir: RunDir) -> Iterator[Path]:
    """Where to write the ledger of a run that is made. It is the run's after the block, whole: a folder without one is
    no run, so that where the making was killed it can be made again."""
    aside = run_dir.ledger.with_name(f".{run_dir.ledger.name}")
    _remove(aside)
    yield aside
    copy_ledger(aside, run_dir.ledger)
    _remove(aside)


def _remove(database: Path) -> None:
    """With its log."""
    for file in database.parent.glob(f"{database.name}*"):
        file.unlink()


def has_policy(config: RunConfig) -> bool:
    """Whether the policy that the run begins with is there as it is, so that no process has to make it. A cluster's
    processes look for it themselves: it may be on their hosts alone."""
    is_here = config.model.path is not None and not config.warm_up.enabled and config.deployment.engine == "local"
    return is_here or config.deployment.share is not None


def check_run(loaded: Loaded[RunConfig], path: Path) -> None:
    """Raises: UserError when no run of this config can be made at `path`, where one that has failed before it did
    anything would give way. Nothing is made."""
    config = loaded.config
    run_dir = RunDir(path.resolve())
    if run_dir.ledger.exists() and not can_be_made_again(run_dir):
        raise UserError(f"there is a run at {path} already; `mettle rl resume {path}` continues it")
    check_config(config)
    check_fit(config)
    check_teacher(config)
    check_services(config)
    config.tracking.check()
    _check_port(config)
    _check_place(path)
    if config.deployment.engine == "ray":
        check_variables(config)
        service_settings(config.deployment.ray.sandbox_config)
        check_room(config)


def check_config(config: RunConfig) -> None:
    """Raises: UserError for what no run of this config can be trained with on this machine, be it new or resumed.
    Nothing of an environment runs for that, and torch is not imported."""
    _check_environments(config)
    _check_engine(config)
    check_devices(config)
    check_network(config)


def check_variables(config: RunConfig) -> None:
    """Raises: UserError for a variable that workers on nodes are to get and that is not set here."""
    if missing := [name for name in config.deployment.ray.worker_variables if name not in os.environ]:
        raise UserError(
            f"deployment.ray.worker_variables names {', '.join(missing)}, which this environment does not set; set it,"
            " or leave it out"
        )


def _check_environments(config: RunConfig) -> None:
    """A name that nothing answers to, and an argument that it does not take, are told before anything is made. None of
    their code is run for that."""
    named = [(spec.id, spec.args) for spec in (*config.orchestrator.envs, *config.orchestrator.eval.envs)]
    probe = config.warm_up.sft.probe
    if config.warm_up.enabled and probe.env is not None:
        named.append((probe.env, probe.env_args))
    for env_id, args in named:
        check_arguments(env_id, resolve_environment(env_id), args)


def _check_engine(config: RunConfig) -> None:
    """What an engine that is not Mettle's needs here: vLLM's interpreter, the keys of servers that run already."""
    engine = config.inference
    if engine.vllm is not None and config.deployment.engine == "local" and not engine.vllm.python.exists():
        raise UserError(f"inference.vllm.python is {engine.vllm.python}, and there is no such file")
    if engine.remote is not None and not os.environ.get(engine.remote.admin_key_env):
        raise UserError(
            f"{engine.remote.admin_key_env} is not set: it holds the admin key of the servers in inference.remote"
        )


def _check_port(config: RunConfig) -> None:
    port = config.deployment.hub_port
    if config.deployment.hub and not is_port_free(port):
        raise UserError(
            f"port {port} on {LOOPBACK} is in use: give the run page another one (deployment.hub_port), or 0 for any"
        )


def _check_place(path: Path) -> None:
    place = path.resolve()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise UserError(f"cannot make a run in {path}: {place} is a file; choose another place with --dir")
    if not os.access(place, os.W_OK):
        raise UserError(f"cannot make a run in {path}: {place} is not writable; choose another place with --dir")
    free = shutil.disk_usage(place).free
    if free < MIN_FREE_BYTES:
        raise UserError(
            f"only {free / 2**20:.0f} MiB are free at {place}, and a run wants {MIN_FREE_BYTES / 2**20:.0f};"
            " free some space or choose another place with --dir"
        )


def write_configs(run_dir: RunDir, loaded: Loaded[RunConfig]) -> None:
    """Write the resolved config, and each process's part of it."""
    config = loaded.config
    dump = config.model_dump(mode="json")
    model = str(run_dir.model)
    write_atomic(run_dir.path / "run.toml", loaded.render().encode())
    write_json(run_dir.path / "sources.json", loaded.sources)
    write_json(run_dir.config("run"), dump)
    write_json(run_dir.config("trainer"), {**dump["trainer"], "model": model})
    places = [str(run_dir.endpoint(name)) for name in worker_place_names(config)]
    write_json(run_dir.config("orchestrator"), {**dump["orchestrator"], "model": model, "worker_places": places})
    inference = {**dump["inference"], "model": model}
    if inference["outside"] is not None:
        inference["outside"] = {**inference["outside"], "folder": str(run_dir.outside)}
    if config.deployment.engine == "ray":  # in front of engines that the cluster places
        write_json(run_dir.config(REPLICA), {**inference, "replicas": 1, "outside": None})
        names = [replica_name(number) for number in range(config.inference.replicas)]
        remote = {"ready_files": [str(run_dir.endpoint(name)) for name in names]}
        inference |= {"engine": "remote", "replicas": 1, "vllm": None, "remote": remote}
    write_json(run_dir.config("inference"), inference)
    if config.deployment.ray.num_sandbox_services:
        write_settings(run_dir, config.deployment.ray)
    write_json(run_dir.config("sft"), dump["warm_up"]["sft"])
    write_json(
        run_dir.config("policy"),
        {"path": dump["model"]["path"], "preset": dump["model"]["preset"], "seed": config.seed},
    )


def _given_demonstrations(config: RunConfig) -> bytes | None:
    """The chats of the file that the config names. They become part of the run, which may outlive the file."""
    path = config.warm_up.demonstrations
    if path is None or not config.warm_up.enabled:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"warm_up.demonstrations {str(path)!r}: {error.strerror}; `mettle data generate` makes such a file"
        ) from error


def _load_for_warm_up(config: RunConfig) -> Environment:
    """The run's first environment. The others are loaded too: what they refuse would be told after a warm-up."""
    loaded: dict[str, Environment] = {}
    wanted = config.orchestrator
    for spec in (*wanted.envs, *(wanted.eval_envs if wanted.eval.num_examples != 0 else ())):
        key = f"{spec.id}?{json.dumps(spec.args, sort_keys=True, default=str)}"
        if key not in loaded:
            loaded[key] = load_environment(spec.id, **spec.args)
    return next(iter(loaded.values()))


def _write_demonstrations(run_dir: RunDir, config: RunConfig, env: Environment, given: bytes | None) -> None:
    path = run_dir.path / "sft" / "demonstrations.jsonl"
    if given is not None:
        write_atomic(path, given)
    else:
        write_demonstrations(path, env, env_id=config.orchestrator.envs[0].id)


def write_facts(run_dir: RunDir, config: RunConfig, ledger: Ledger) -> None:
    """Say in the journal what the run is to be."""
    facts = {
        "name": run_dir.name,
        "state": "preparing",
        "created_at": time.time(),
        "max_steps": config.max_steps,
        "seed": config.seed,
        "envs": [spec.id for spec in config.orchestrator.envs],
        "model": str(config.model.path) if config.model.path else config.model.preset,
        "algorithm": config.orchestrator.algorithm,
        "batch_size": config.orchestrator.batch_size,
        "group_size": config.orchestrator.group_size,
    }
    if config.deployment.share is not None:
        facts["share"] = str(config.deployment.share)
    if has_policy(config):
        facts["is_warm"] = True
    for key, value in facts.items():
        ledger.journal.set_fact(key, value)
