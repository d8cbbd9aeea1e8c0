"""The names of things in a run directory. Every room that touches a run goes through here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mettle.errors import UserError
from mettle.storage.ledger_copy import copy_of


@dataclass(frozen=True, slots=True)
class RunDir:
    """One run on disk.

    config/{trainer,orchestrator,inference}.json   resolved configs, one a process
    run.toml, sources.json                         the whole resolved config, and where each value came from
    run.db, run.db.copy                            the ledger, and its copy as of a checkpoint
    keys.json                                      the secrets of the run's inference server, for its own user (0600)
    model/                                         the initial policy v0 in the Hugging Face layout, with its tokenizer
    weights/v{n}/                                  published versions
    batches/{digest}.npz                           batches, content-addressed
    batches/{digest}.logprobs                      what the trainer thought of their tokens when it trained on them
    rollouts/shard-{k}.bin                         rollouts with tokens
    checkpoints/step-{n}/                          trainer/, orchestrator.json, manifest.json (last)
    outside/                                       invitations and list of the workers from outside, where they may come
    beats/{name}.beat                              signs of life of the processes that run now
    endpoints/{name}.json                          address and pid of each serving process, written when it is ready
    logs/{name}.log                                JSON lines; logs/{name}.out is what the process printed
    """

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def ledger(self) -> Path:
        return self.path / "run.db"

    @property
    def keys(self) -> Path:
        return self.path / "keys.json"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def batches(self) -> Path:
        return self.path / "batches"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def outside(self) -> Path:
        return self.path / "outside"

    @property
    def beats(self) -> Path:
        return self.path / "beats"

    def config(self, name: str) -> Path:
        """The resolved config of one process."""
        return self.path / "config" / f"{name}.json"

    @property
    def served_as(self) -> str:
        """The type in which the run's engine computes; float32 before there is a config."""
        try:
            return str(json.loads(self.config("inference").read_text())["dtype"])
        except (OSError, ValueError, KeyError, TypeError):
            return "float32"

    def endpoint(self, name: str) -> Path:
        """Where a serving process says that it is ready: {"base_url", "host", "port", "pid"}."""
        return self.path / "endpoints" / f"{name}.json"

    def version(self, version: int) -> Path:
        """The folder of a published policy version."""
        return self.weights / f"v{version}"

    @classmethod
    def existing(cls, path: Path) -> RunDir:
        """The run at `path`; a `UserError` when there is none."""
        run_dir = cls(path.resolve())
        if not run_dir.ledger.exists() and not copy_of(run_dir.ledger).exists():
            raise UserError(f"no run at {path}: it has no run.db; `mettle rl list` shows the runs there are")
        return run_dir
