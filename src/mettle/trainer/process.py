"""The trainer as a process: arguments, logging, signals, exit codes."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import torch

from mettle.log import setup_logging
from mettle.processes.beats import Gauge, Heartbeat
from mettle.processes.collector import quiet_collector
from mettle.processes.orphans import tie_to_thread
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.trainer.broadcast import broadcasting
from mettle.trainer.config import TrainerConfig, read_config
from mettle.trainer.loop import StopFlag, Trainer
from mettle.trainer.program import guarded
from mettle.trainer.world import join_world

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Run the trainer of the run directory named in `arguments`; returns the exit code."""
    return guarded("mettle.trainer", arguments, train)


def train(run_dir: RunDir) -> None:
    """Train until the run is over or SIGTERM; a step that has begun is finished."""
    config = read_config(run_dir.config("trainer"), TrainerConfig)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        tie_to_thread(
            os.getppid()
        )  # torchrun's ranks have sessions of their own, and would outlive it when it is killed
    setup_torch(config.num_threads, config.seed)
    stop = StopFlag()
    stop_on_signals(stop)
    with join_world(config.device) as world:
        setup_logging(run_dir.logs / "trainer.log" if world.is_main else None, is_terminal=sys.stderr.isatty())
        ledger = Ledger(run_dir.ledger) if world.is_main else None
        try:
            name = "trainer" if world.is_main else f"trainer-{world.rank}"
            with Heartbeat.of_run(name, unit="micro batches") as heart:
                if not world.is_main:  # it stands in a collective while rank 0 waits, and knows nothing of that
                    heart.gauge = lambda: Gauge(0, has_work=False)
                kind = config.weight_broadcast if world.is_main else "file"
                with broadcasting(run_dir.weights, kind, config.weight_broadcast_host):
                    trainer = Trainer(run_dir, config, world, ledger, stop, heart)
                    with quiet_collector():
                        step = trainer.run()
            logger.info("trainer is done", extra={"step": step, "max_steps": config.max_steps})
        finally:
            if ledger is not None:
                ledger.close()


def setup_torch(num_threads: int, seed: int) -> None:
    """Threads and random state."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(seed)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def stop_on_signals(stop: StopFlag) -> None:
    """SIGTERM and SIGINT ask for the end of the step instead of ending the process in the middle of a write."""

    def ask(number: int, frame: FrameType | None) -> None:
        stop.is_set = True

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)
