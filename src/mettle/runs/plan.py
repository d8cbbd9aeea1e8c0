"""`mettle rl plan`: what a run will take, measured beforehand in a scratch folder; and whether its weights fit at all.

The measuring is `mettle.trainer.plan`, in a process of its own. Invariant: what cannot fit is refused before any weight
is read.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mettle.config import Loaded
from mettle.errors import ServiceError, UserError
from mettle.processes.host import free_memory_bytes, usable_cores
from mettle.runs.cluster.launcher import check_room
from mettle.runs.config import RunConfig
from mettle.runs.create import check_config, write_configs
from mettle.runs.fit import check_fit
from mettle.runs.preflight import GIB
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.trainer.ranks import RANK_EFFICIENCY
from mettle.wording import duration


def plan(loaded: Loaded[RunConfig]) -> dict[str, Any]:
    """The plan as plain values.

    Raises: UserError when the model does not fit this machine or the config does not fit the model.
    """
    check_config(loaded.config)
    check_fit(loaded.config)
    places = check_room(loaded.config) if loaded.config.deployment.engine == "ray" else {}
    with tempfile.TemporaryDirectory(prefix="mettle-plan-") as scratch:
        run_dir = RunDir(Path(scratch).resolve() / "run")
        run_dir.path.mkdir()
        write_configs(run_dir, loaded)
        Ledger(run_dir.ledger).close()
        command = [sys.executable, "-m", "mettle.trainer.plan", str(run_dir.path)]
        # In a session of its own, as a run's processes are: Linux may share its cores among sessions before processes.
        done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1].removeprefix("mettle.trainer.plan: ")
            raise (UserError if done.returncode == UserError.exit_code else ServiceError)(last)
        found: dict[str, Any] = json.loads((run_dir.path / "plan.json").read_text())
    return found | {
        "available_bytes": free_memory_bytes(),
        "cores": usable_cores(),
        "max_steps": loaded.config.max_steps,
        "groups": {name: getattr(loaded.config.trainer, name) for name in GROUPS},
        "placement": {process: node.name for process, node in places.items()},
    }


GROUPS = {
    "num_replicas": "{} copies of the weights",
    "context_parallel": "{} ranks to a sequence",
    "expert_parallel": "{} ranks to a layer's experts",
}
"""How trainer ranks may stand to each other, by the trainer's field for it."""


def _rank_lines(found: dict[str, Any]) -> list[str]:
    seen = found["measured"]
    if seen["num_ranks"] == 1:
        return []
    told = [text.format(found["groups"][name]) for name, text in GROUPS.items() if found["groups"][name] > 1]
    cores = "" if seen["num_at_once"] == seen["num_ranks"] else f", {seen['num_at_once']} at a time on these cores"
    return [
        f"ranks      {', '.join([str(seen['num_ranks']), *told])}; one was measured, and {RANK_EFFICIENCY:.0%} of the"
        f" ideal speed-up is assumed{cores}"
    ]


def plan_lines(found: dict[str, Any]) -> list[str]:
    """The plan for a terminal."""
    seen = found["measured"]
    sampled = seen["num_sequences"] / seen["decode_token_s"]
    tokens = (seen["prompt_tokens"] + seen["completion_tokens"]) * seen["micro_rollouts"]
    available = found["available_bytes"]
    memory = f"{found['memory_bytes'] / GIB:.1f} GiB at the peak"
    if available is not None:
        fits = "fits in" if found["memory_bytes"] <= available else "does NOT fit in"
        memory += f", {fits} the {available / GIB:.1f} that are available"
    placed = ", ".join(f"{process} on {node}" for process, node in found["placement"].items())
    return [
        *([f"placement  {placed} (as the cluster is now)"] if placed else []),
        f"rollout    {seen['prompt_tokens']:.0f} tokens in, {seen['completion_tokens']:.0f} out,"
        f" reward {seen['reward']:.3f} (of two)",
        f"sampling   {duration(found['sample_s'])} a batch,"
        f" {sampled * found['quiet_step_s'] / found['step_s']:,.0f} tokens/s in {seen['num_sequences']} sequences",
        f"training   {duration(found['train_s'])} a batch,"
        f" {tokens / seen['micro_step_s'] * found['quiet_step_s'] / found['step_s']:,.0f} tokens/s,"
        f" micro batches of at most {seen['max_tokens']:,} tokens",
        *_rank_lines(found),
        f"weights    published in {duration(found['publish_s'])},"
        f" loaded by the engine in {duration(found['update_s'])}",
        _step_line(found),
        f"memory     {memory}",
        f"measured   at a load of {seen['load']:.1f} on {found['cores']} cores, with a core for {seen['cpu_share']:.0%}"
        f" of the time{'; the seconds above the step are those of such a load' if _is_loaded(found) else ''}",
    ]


LOADED_SHARE = 0.95
"""A machine that does a step in less of the time with nothing else to do is told to be in use."""


def _is_loaded(found: dict[str, Any]) -> bool:
    return bool(found["step_s"] > found["quiet_step_s"] / LOADED_SHARE)


def _step_line(found: dict[str, Any]) -> str:
    step, run = duration(found["quiet_step_s"]), duration(found["quiet_run_s"])
    if not _is_loaded(found):
        return f"step       {step}; {found['max_steps']} steps about {run}"
    return (
        f"step       {step} to {duration(found['step_s'])}; {found['max_steps']} steps {run} to"
        f" {duration(found['run_s'])}: others are using this machine's cores, and the first figure is without them, the"
        " second with as many as now"
    )
