"""`mettle.RLTrainer`: a run from Python, in the same words as its config file.

It writes the config that `mettle rl init` writes, lays the caller's settings over it, and drives the run as
`mettle rl run` does: the same processes, the same run directory, the same page.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mettle.config import Loaded, load_config
from mettle.errors import UserError
from mettle.runs.config import RunConfig
from mettle.runs.create import create_run, new_run_name
from mettle.runs.first_config import write_first_config
from mettle.runs.launch import RUNS_FOLDER, RunOutcome, drive, is_finished, resume
from mettle.runs.remaking import can_be_made_again
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir


class RLTrainer:
    """Trains `model`, a folder in the Hugging Face layout, on the environment `env` with reinforcement learning.

    Adapters are trained unless `is_full`. Further keywords are tables and fields of a run's config, as in
    `RLTrainer("reverse-text", "models/tiny", max_steps=50, orchestrator={"batch_size": 32})`; `env_args` go to the
    environment. `directory` is the run's own, new under `runs/` when left out; one that holds a run is continued.

    Raises: UserError when the environment, the model or a setting will not do, before anything is written.
    """

    def __init__(
        self,
        env: str,
        model: str | Path,
        *,
        env_args: Mapping[str, Any] | None = None,
        is_full: bool = False,
        directory: str | Path | None = None,
        is_quiet: bool = False,
        **settings: Any,
    ) -> None:
        with tempfile.TemporaryDirectory(prefix="mettle-config-") as scratch:
            path = write_first_config(env, Path(model), Path(scratch) / "run.toml", is_full=is_full)
            given = dict(_dotted(settings))
            if env_args:
                given["orchestrator.envs.0.args"] = dict(env_args)
            self.loaded: Loaded[RunConfig] = load_config(RunConfig, [path], given)
        self.directory = Path(directory or RUNS_FOLDER / (self.config.name or new_run_name(self.config)))
        self._is_quiet = is_quiet

    @property
    def config(self) -> RunConfig:
        """The resolved config of a run that begins."""
        return self.loaded.config

    def train(self) -> RunOutcome:
        """Train to the end, or from where the run in the directory was cut off; returns what came of it.

        A run that is finished is not begun again; one that failed before it did anything is made anew. Raises:
        UserError, ServiceError when it cannot go on.
        """
        if not (self.directory / "run.db").exists() or can_be_made_again(RunDir(self.directory.resolve())):
            return drive(create_run(self.loaded, self.directory), is_quiet=self._is_quiet)
        if is_finished(self.directory):
            raise UserError(f"the run in {self.directory} is finished: take another `directory`")
        return resume(self.directory, is_quiet=self._is_quiet)

    def metric(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric of the run, as `mettle rl metrics` names it."""
        ledger = Ledger(RunDir.existing(self.directory).ledger, is_read_only=True)
        try:
            return ledger.journal.metric(name)
        finally:
            ledger.close()


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """The leaves of nested tables under dotted names; lists and empty tables are leaves."""
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            found += _dotted(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", str(value) if isinstance(value, Path) else value))
    return found
