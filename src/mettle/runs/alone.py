"""One process of a run in this terminal: for a debugger, for another scheduler, or to see what it alone prints.

`mettle rl create FILES` makes a run that nobody starts, and `mettle rl start RUN PROCESS` becomes one of its processes;
the others are started the same way, in any order. Nobody restarts them, watches over them or ends them: that is what
`mettle rl resume RUN` does, which goes on from where they stopped. Invariant: a run has a supervisor or processes that
were started alone, never both, and of each process one.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import NoReturn

from mettle.errors import UserError
from mettle.processes.beats import BEATS_FOLDER
from mettle.processes.child import THREAD_ENVIRONMENT, import_path, python_module
from mettle.processes.managed import ProcessSpec
from mettle.processes.ready_file import ReadyFile
from mettle.runs.launch import is_finished, process_specs
from mettle.runs.lock import supervisor_pid
from mettle.runs.stored import read_run_config
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir


def processes_of(run_dir: RunDir) -> dict[str, ProcessSpec]:
    """The processes that a run needs from where it is now, by name, those first that others wait for.

    Raises: UserError for a run that is finished, or that a cluster places.
    """
    if is_finished(run_dir.path):
        raise UserError(f"run {run_dir.name} is finished; `mettle rl metrics {run_dir.path}` shows its figures")
    config = read_run_config(run_dir)
    if config.deployment.engine != "local":
        raise UserError(f"the processes of run {run_dir.name} are placed by a cluster; `mettle rl resume` starts them")
    ledger = Ledger(run_dir.ledger, is_read_only=True)
    try:
        is_warm = bool(ledger.journal.fact("is_warm"))
    finally:
        ledger.close()
    return {spec.name: spec for spec in process_specs(run_dir, config, is_warm=is_warm)}


def start_alone(run_dir: RunDir, name: str) -> NoReturn:
    """Become a process of the run.

    Raises: UserError when there is no such process, when its policy is not made yet, when the run has a supervisor or
    this process already.
    """
    specs = processes_of(run_dir)
    if name not in specs:
        raise UserError(f"run {run_dir.name} needs no process {name!r} now; it needs {', '.join(specs)}")
    spec = specs[name]
    if spec.after:
        raise UserError(
            f"{name} needs what {spec.after[0]} makes; `mettle rl start {run_dir.path} {spec.after[0]}` first"
        )
    # Held by whatever this process becomes, until it ends.
    _hold(run_dir.path / "supervisor.lock", fcntl.LOCK_SH, run_dir, name)
    _hold(run_dir.path / f"{name}.lock", fcntl.LOCK_EX, run_dir, name)
    ReadyFile(spec.ready_file).prepare()
    own = {"PYTHONPATH": import_path(), BEATS_FOLDER: str(run_dir.beats)}
    command = python_module(spec.module, *spec.arguments)
    os.execve(command[0], command, {**os.environ, **THREAD_ENVIRONMENT, **spec.environment, **own})


def _hold(path: Path, kind: int, run_dir: RunDir, name: str) -> None:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        pid = supervisor_pid(run_dir)
        who = f"run {run_dir.name} is already running (pid {pid})" if pid else f"{name} is started already"
        raise UserError(f"{who}; one of them can be there") from None
    os.set_inheritable(handle, True)
