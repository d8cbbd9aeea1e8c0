"""What does a run gain and cost on 1, 2 and 4 Ray nodes of this host, and what does the loss of a node cost it?

    python benchmarks/cluster_nodes.py [--steps 12] [--nodes 1 2 4] [--json FILE]

Starts clusters of real Ray nodes (`tests/runs/ray_nodes.py`) one after the other and trains one small run on each, with
as many engines as nodes, then once more on two nodes, the second of which is killed in the middle. Told are: seconds
from the command to the first batch, steps an hour from then on and their ratio to one node's, the part of that time in
which trainer and engines used no processor, and memory (proportional, so that shared pages count once) of the run and
of Ray. All nodes share this host's cores: where there are fewer than processes the ratio says what a cluster costs, not
what it gains.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/runs"))  # for `ray_nodes` and `stories`

from ray_nodes import RayNodes
from stories import CONFIG, Run, published, shipped

from mettle.processes.beats import read_beats
from mettle.processes.child import descendants, process_cpu_s, process_memory_bytes
from mettle.runs.cluster.placement import rank_name
from mettle.storage.ledger import Ledger

LAYOUTS = {1: (4,), 2: (3, 3), 4: (3, 2, 2, 2)}
"""Cores of each node, as Ray counts them."""
ON_RAY = CONFIG.replace("hub = false", 'hub = false\nengine = "ray"')
LOOK_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4], choices=sorted(LAYOUTS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [train(number, arguments.steps) for number in arguments.nodes]
    first = rows[0]["steps_per_hour"]
    for row in rows:
        row["ratio"] = row["steps_per_hour"] / first
        print(line(row), flush=True)
    whole = next((row["total_s"] for row in rows if row["nodes"] == 2), None)
    rows.append(train(2, arguments.steps, is_killed=True))
    rows[-1]["lost_s"] = None if whole is None else rows[-1]["total_s"] - whole
    print(line(rows[-1]))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"load": os.getloadavg()[0], "rows": rows}, indent=1) + "\n")


def line(row: dict[str, Any]) -> str:
    """A row for a terminal."""
    if row["is_killed"]:
        lost = "" if row["lost_s"] is None else f", {row['lost_s']:.0f} s more than undisturbed"
        return (
            f"{row['nodes']} nodes, one killed: {'recovered' if row['is_finished'] else 'not recovered'}, "
            f"{row['num_lost']} tasks lost, {row['num_twice']} trained twice{lost}"
        )
    return (
        f"{row['nodes']} nodes: first batch after {row['start_s']:.0f} s, {row['steps_per_hour']:.0f} steps/h "
        f"({row['ratio']:.2f}), idle: trainer {row['trainer_idle']:.0%}, engines {row['engines_idle']:.0%}; "
        f"memory: run {row['run_mb']:.0f} MB, Ray {row['ray_mb']:.0f} MB"
    )


def train(number: int, steps: int, *, is_killed: bool = False) -> dict[str, Any]:
    """One run on a cluster of its own."""
    with RayNodes(*LAYOUTS[number]) as nodes, tempfile.TemporaryDirectory(prefix="cluster-nodes-") as folder:
        os.environ["RAY_ADDRESS"] = nodes.address
        ray_mb = _memory_mb([nodes.pid, *descendants(nodes.pid)])
        began = time.monotonic()
        run = Run(Path(folder), "--inference.replicas", str(number), steps=steps, text=ON_RAY)
        try:
            run.wait_for(shipped(1))
            start_s = time.monotonic() - began
            seen = watch(run, (lambda: nodes.kill(nodes.ids[1])) if is_killed else None, published(steps // 3))
            code = run.end()
            total_s = time.monotonic() - began
            accounts = run.read(lambda ledger: _accounts(ledger, steps), {})
            if code:
                print(run.said(), file=sys.stderr)
        finally:
            run.close()
    return {
        "nodes": number, "is_killed": is_killed, "is_finished": code == 0, "start_s": start_s, "total_s": total_s,
        "ray_mb": ray_mb, **seen, **accounts,
    }  # fmt: skip


def watch(run: Run, kill: Any, is_time: Any) -> dict[str, float]:
    """Processor time and memory of a run's processes until it ends; `kill` is called once, when it is time."""
    began, before, last, most = time.monotonic(), {}, {}, 0.0
    while run.process.poll() is None:
        if kill is not None and run.read(is_time, False):
            kill()
            kill = None
        # Of a process that the cluster places the ledger has no pid; its beat is brought here, and the host is one.
        pids = {name: beat.pid for name, beat in read_beats(run.run_dir.beats).items()}
        now = {name: process_cpu_s(pid) for name, pid in pids.items()}
        before |= {name: used for name, used in now.items() if name not in before}
        last |= {name: max(used, last.get(name, 0.0)) for name, used in now.items()}
        most = max(most, _memory_mb([run.process.pid, *pids.values()]))
        time.sleep(LOOK_S)
    span = time.monotonic() - began
    engines = [name for name in last if name.startswith("replica-")]
    used = {name: last[name] - before[name] for name in last}
    return {
        "trainer_idle": 1 - used[rank_name(0)] / span,
        "engines_idle": 1 - sum(used[name] for name in engines) / (span * len(engines)),
        "run_mb": most,
    }


def _accounts(ledger: Ledger, steps: int) -> dict[str, Any]:
    times = [batch.trained_at for batch in ledger.batches() if batch.trained_at is not None]
    counts = ledger.task_counts()
    return {
        "steps_per_hour": 3600 * (len(times) - 1) / max(1e-9, times[-1] - times[0]),
        "num_steps": len(times),
        "num_lost": sum(n for name, n in counts.items() if name.split(":")[0] not in ("trained", "dropped")),
        "num_twice": ledger.database.value(
            "SELECT count(*) FROM (SELECT uid FROM tasks WHERE state = 'trained' GROUP BY uid, epoch"
            " HAVING count(*) > 1)"
        ),
    }


def _memory_mb(pids: list[int]) -> float:
    return sum(map(process_memory_bytes, pids)) / 1e6


if __name__ == "__main__":
    main()
