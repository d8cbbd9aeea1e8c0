"""A share from run configs: what runs beside one base must agree on, and the folder that they are trained from.

Parts: `check_members`, `create_share`, `join_config`. What the engine and the trainer are for all runs (the base,
`[inference]`, types, threads, the page) is one for a share; all else is each run's own. Invariant: a file that does not
fit is refused before anything is made, in one line that names it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mettle.config import Loaded
from mettle.errors import UserError
from mettle.runs.config import NOT_IN_A_SHARE, RunConfig
from mettle.runs.create import check_run, create_run
from mettle.storage.files import write_json
from mettle.storage.ledger import Ledger
from mettle.storage.share_dir import ShareDir

COMMON = (
    "trainer.dtype", "trainer.device", "trainer.activation_checkpointing", "trainer.num_threads",
    "deployment.hub", "deployment.hub_port",
)  # fmt: skip
"""Fields of one process or page, beside all of `[inference]`, which the runs of a share have in common."""
OWN_OF_ENGINE = ("model", "seed")
"""Fields of `[inference]` that do not count here: the base is the share's, and each request brings a seed."""


VERSIONS_KEPT = "inference.max_adapter_versions"


@dataclass(frozen=True, slots=True)
class NamedRun:
    """A run's config, what to call it in complaints, and its name, which is its adapter's."""

    source: str
    name: str
    loaded: Loaded[RunConfig]


def check_members(runs: Sequence[NamedRun], base: Path) -> None:
    """Raises: UserError for the first run that cannot be trained beside the others on `base`."""
    if not (base / "config.json").exists():
        raise UserError(f"--base-model {base} is not a model directory: it has no config.json")
    first, seen = runs[0], dict[str, str]()
    for run in runs:
        if run.name in seen:
            raise UserError(
                f"{run.source}: its name {run.name!r} is that of {seen[run.name]}, too; give one another `name`"
            )
        seen[run.name] = run.source
        _check_alone(run, base)
        _check_common(run, common_settings(first.loaded.config), first.source)
    most = first.loaded.config.inference.max_adapters
    if len(runs) > most:
        raise UserError(f"{len(runs)} runs, and inference.max_adapters is {most}: raise it, or share in two parts")


def create_share(runs: Sequence[NamedRun], base: Path, path: Path) -> ShareDir:
    """Make the folder of a share at `path`, with a directory for each run.

    Raises: UserError, and then nothing is made.
    """
    share = ShareDir(path.resolve())
    if (share.path / "share.json").exists():
        raise UserError(f"there is a share at {path} already; `mettle rl resume {path}` continues it")
    check_members(runs, base)
    joined = [(run, join_config(run, share)) for run in runs]
    for run, loaded in joined:
        try:
            check_run(with_base(loaded, base), share.runs / run.name)
        except UserError as error:
            raise UserError(f"{run.source}: {error}") from error
    with _kept_whole(share, [share.runs / run.name for run in runs]):
        share.runs.mkdir(parents=True, exist_ok=True)
        share.model.symlink_to(base.resolve(), target_is_directory=True)
        _write_processes(share, runs[0])
        for run, loaded in joined:
            create_run(with_base(loaded, base), share.runs / run.name)
        ledger = Ledger(share.as_run.ledger)
        try:
            ledger.journal.set_fact("name", share.path.name)
        finally:
            ledger.close()
        share.write_about(
            {
                "base": str(base.resolve()),
                "common": common_settings(runs[0].loaded.config),
                "runs": [run.name for run in runs],
            }
        )
    return share


@contextmanager
def _kept_whole(share: ShareDir, runs: Sequence[Path]) -> Iterator[None]:
    """Where the block is left early, what it has made of the share and of `runs` is removed, so that the same command
    makes the share again."""
    made = [path for path in runs if not path.exists()]
    if share.model.is_symlink():  # of a making that was killed
        share.model.unlink()
    try:
        yield
    except BaseException:
        (share.path / "share.json").unlink(missing_ok=True)
        if share.model.is_symlink():
            share.model.unlink()
        for path in made:
            shutil.rmtree(path, ignore_errors=True)
        raise


def check_joining(run: NamedRun, share: ShareDir) -> None:
    """Raises: UserError when a run cannot be trained beside those that a share has."""
    about = share.about()
    _check_alone(run, Path(about["base"]))
    _check_common(run, about["common"], f"the share at {share.path}")


def join_config(run: NamedRun, share: ShareDir) -> Loaded[RunConfig]:
    """The run's config with its place: its adapter is known by its name."""
    config = run.loaded.config
    deployment = config.deployment.model_copy(update={"share": share.path})
    orchestrator = config.orchestrator.model_copy(update={"share": share.path, "served_model_name": run.name})
    changed = {"name": run.name, "deployment": deployment, "orchestrator": orchestrator}
    told = {
        key: "share" for key in ("name", "deployment.share", "orchestrator.share", "orchestrator.served_model_name")
    }
    return Loaded(config.model_copy(update=changed), {**run.loaded.sources, **told})


def with_base(loaded: Loaded[RunConfig], base: Path) -> Loaded[RunConfig]:
    """The run's config on the share's base."""
    config = loaded.config
    model = config.model.model_copy(update={"path": base.resolve()})
    return Loaded(config.model_copy(update={"model": model}), {**loaded.sources, "model.path": "share"})


def common_settings(config: RunConfig) -> dict[str, Any]:
    """What the runs of a share must agree on, by dotted key."""
    dump = config.model_dump(mode="json")
    engine = {f"inference.{k}": v for k, v in dump["inference"].items() if k not in OWN_OF_ENGINE}
    found = {key: dump[key.partition(".")[0]][key.partition(".")[2]] for key in COMMON}
    return json.loads(json.dumps({**found, **engine}))  # type: ignore[no-any-return]


def _check_alone(run: NamedRun, base: Path) -> None:
    config, source = run.loaded.config, run.source
    if config.model.lora is None:
        raise UserError(f"{source}: a share trains adapters; set one, as in `[model] lora = {{ rank = 16 }}`")
    if config.model.path is not None and config.model.path.resolve() != base.resolve():
        raise UserError(f"{source}: model.path is {config.model.path}, and the share's base {base}; leave it out")
    if "model.preset" in run.loaded.sources and config.model.path is None and _is_said(run, "model.preset"):
        raise UserError(
            f"{source}: model.preset makes a model of its own, and the share's base is {base}; leave it out"
        )
    if config.warm_up.enabled:
        raise UserError(
            f"{source}: warm_up changes the base, which others train on; warm the base up first (`mettle sft run`)"
        )
    if config.deployment.num_trainer_ranks > 1:
        raise UserError(f"{source}: deployment.num_trainer_ranks is 1 in a share, which has one trainer process")
    if config.inference.engine != "embedded" or config.inference.replicas > 1:
        raise UserError(f"{source}: a share has one embedded engine; leave inference.engine and inference.replicas out")
    if config.inference.outside is not None:
        raise UserError(f"{source}: inference.outside: {NOT_IN_A_SHARE}")
    if run.name == config.inference.served_model_name:
        raise UserError(f"{source}: {run.name!r} is what the base is called; give the run another `name`")


def _is_said(run: NamedRun, key: str) -> bool:
    return run.loaded.sources.get(key, "default") != "default"


def _check_common(run: NamedRun, common: Mapping[str, Any], whose: str) -> None:
    own = common_settings(run.loaded.config)
    for key, value in common.items():
        if own.get(key) != value:
            raise UserError(
                f"{run.source}: {key} is {own.get(key)!r}, and that of {whose} is {value!r}; runs that share have one"
                " trainer, engine and page"
            )


def _write_processes(share: ShareDir, run: NamedRun) -> None:
    dump = run.loaded.config.model_dump(mode="json")
    model = str(share.model)
    write_json(share.as_run.config("trainer"), {**dump["trainer"], "model": model})
    engine = {**dump["inference"], "model": model}
    if not _is_said(run, VERSIONS_KEPT):
        # Runs ask for the newest version alone, and each version is an adapter's memory, of every run.
        engine[VERSIONS_KEPT.partition(".")[2]] = 1
    write_json(share.as_run.config("inference"), engine)
