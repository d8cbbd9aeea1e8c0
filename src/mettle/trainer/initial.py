"""The initial policy of a run: `RUN/model`, made from a preset or linked from a model that is there.

`python -m mettle.trainer.initial RUN_DIR` reads RUN/config/policy.json. Invariant: a model that stands in RUN/model
is left alone, so that a second call, or one after a kill, changes nothing.
"""

from __future__ import annotations

import json
import logging
import sys

from mettle.processes.beats import Heartbeat
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.trainer.config import read_config
from mettle.trainer.presets import InitialPolicyConfig, preset
from mettle.trainer.program import guarded

logger = logging.getLogger(__name__)


def ensure_initial_policy(run_dir: RunDir) -> None:
    """Make RUN/model if it is not there."""
    if (run_dir.model / "config.json").exists():
        return
    config = read_config(run_dir.config("policy"), InitialPolicyConfig)
    if config.path is not None:
        run_dir.model.symlink_to(config.path.resolve(), target_is_directory=True)
        return
    from mettle.trainer.policy import write_policy

    write_policy(run_dir.model, preset(config.preset).model_copy(update={"seed": config.seed}))
    logger.info("made a policy", extra={"preset": config.preset, "seed": config.seed})


def prepare(run_dir: RunDir) -> None:
    """Make the initial policy and say so in the journal."""
    with Heartbeat.of_run("policy"):
        ensure_initial_policy(run_dir)
    ledger = Ledger(run_dir.ledger)
    try:
        model = json.loads((run_dir.model / "config.json").read_text())
        ledger.journal.event("trainer", "policy", f"the policy is a {model.get('model_type')} model")
        ledger.journal.set_fact("is_warm", True)
    finally:
        ledger.close()


if __name__ == "__main__":
    sys.exit(guarded("mettle.trainer.initial", sys.argv[1:], prepare))
