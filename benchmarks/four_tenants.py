"""What do four runs on one base cost beside one run alone: in time, in memory, and where does it go?

    python benchmarks/four_tenants.py DIR [--size tiny|medium|half] [--steps 12] [--json FILE]

Trains one run by itself (`mettle rl run`), then four of its kind in a share (`mettle rl share`), of the same length,
with the same cores. Every process of either is looked at twice a second: its processor time, and its proportional share
of memory, in which a page that several processes map counts once. Four separate runs in the memory of the share (1.4
times that of one) are as many at a time as fit, which is one: they run one after another, each with its own start, so
their throughput is that of the one measured. The numbers that matter: the throughput of the four to that of one at a
time (from start to end, which is what four runs take, and from the first batch on), the memory of the four to that of
one, and processor seconds a step by process. Nothing is compared by the mismatch monitor, which puts other weights into
the network and lets nobody else train meanwhile. Ratios of one round on the same machine; the load is told.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from half_billion import ENVIRONMENT
from half_billion import prepare as prepare_half

from mettle.storage.ledger import Ledger

NUM_TENANTS = 4
MEDIUM = {
    "num_layers": 14, "hidden_size": 768, "mlp_size": 2304, "num_heads": 12, "num_kv_heads": 6, "head_dim": 64,
    "max_positions": 512,
}  # fmt: skip
"""100 million parameters: what hangs on the size shows, in a sixth of the time."""
KINDS_OF_MEMORY = ("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem")
SAMPLE_S = 0.5
MEMORY_SHARE = 50
"""Looking at memory, for which the kernel walks every page, waits this many times as long as it took."""
TICKS = os.sysconf("SC_CLK_TCK")
CONFIG = """
max_steps = {steps}
seed = {seed}
model = {{ lora = {{ rank = 16, alpha = 32 }} }}

[orchestrator]
batch_size = {batch}
group_size = 8
max_lag = 1
max_staleness = 2
sampling = {{ max_tokens = 12 }}
envs = [{{ id = "lowercase" }}]
eval = {{ num_examples = 0 }}

[trainer]
dtype = "{dtype}"
optim = {{ lr = 1e-3, weight_decay = 0.0 }}
mismatch = {{ interval = 0 }}
checkpoint = {{ interval = 25 }}

[inference]
max_slots = 128
max_model_len = 64

[deployment]
hub = false
"""


class Watched:
    """A command and all processes below it: processor seconds, and proportional memory, by what they run."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.cpu_s: dict[int, float] = {}
        self.names: dict[int, str] = {}
        self.memory_bytes: dict[str, dict[str, int]] = {}
        self.peak_bytes = 0
        self._next_memory = 0.0
        paths = os.pathsep.join([str(folder.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        started = time.monotonic()
        with (folder / "output.txt").open("ab") as output:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
            while process.poll() is None:
                self._look(process.pid)
                time.sleep(SAMPLE_S)
        self.wall_s = time.monotonic() - started
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}; see {folder / 'output.txt'}")

    def _look(self, root: int) -> None:
        parents: dict[int, int] = {}
        cpu: dict[int, float] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                parents[int(entry.name)] = int(fields[1])
                cpu[int(entry.name)] = (int(fields[11]) + int(fields[12])) / TICKS
        below = [pid for pid in parents if _is_below(pid, root, parents)]
        for pid in below:
            # One that has ended, and waits to be asked, has no name any more: it keeps the last that it had.
            self.names[pid] = _name_of(pid) or self.names.get(pid, "?")
            self.cpu_s[pid] = cpu[pid]
        started = time.monotonic()
        if started >= self._next_memory:
            by_name: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(KINDS_OF_MEMORY, 0))
            for pid in below:
                for kind, number in _proportional_bytes(pid).items():
                    by_name[self.names[pid]][kind] += number
            total = sum(kinds["Pss"] for kinds in by_name.values())
            if total > self.peak_bytes:
                self.peak_bytes, self.memory_bytes = total, dict(by_name)
            self._next_memory = time.monotonic() + MEMORY_SHARE * (time.monotonic() - started)

    def cpu_by_name(self) -> dict[str, float]:
        """Processor seconds of all processes of a kind."""
        found: dict[str, float] = defaultdict(float)
        for pid, seconds in self.cpu_s.items():
            found[self.names[pid]] += seconds
        return dict(found)


def _is_below(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid not in (0, 1, root):
        pid = parents.get(pid, 0)
    return pid == root


def _name_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return ""
    return next((word for word in words if word.startswith("mettle.")), words[0].rpartition("/")[2])


def _proportional_bytes(pid: int) -> dict[str, int]:
    """The process's share: of all its memory, and of what is its own, a file's and shared memory."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    found = {line.partition(":")[0]: line.split() for line in lines}
    return {kind: int(found[kind][1]) * 1024 for kind in KINDS_OF_MEMORY if kind in found}


def prepare(folder: Path, size: str, steps: int) -> list[Path]:
    """The base, the environment and a config for each tenant in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if size == "half":
        prepare_half(folder, steps)
    elif size == "medium":
        prepare_half(folder, steps, MEDIUM)
    elif not (folder / "model").exists():
        from mettle.trainer.policy import write_policy
        from mettle.trainer.presets import preset

        write_policy(folder / "model", preset("tiny"))
    (folder / "lowercase.py").write_text(ENVIRONMENT)
    files = []
    for seed in range(NUM_TENANTS):
        files.append(folder / f"run{seed}.toml")
        dtype, batch = ("bfloat16", 16) if size != "tiny" else ("float32", 64)
        files[-1].write_text(CONFIG.format(steps=steps, seed=seed, dtype=dtype, batch=batch))
    return files


def trained_between(runs: Sequence[Path]) -> tuple[int, float]:
    """Steps trained, and the seconds from the first batch that was shipped to the last that was trained."""
    shipped, trained = [], []
    for run in runs:
        ledger = Ledger(run / "run.db", is_read_only=True)
        try:
            rows = ledger.batches()
            shipped += [row.shipped_at for row in rows]
            trained += [row.trained_at for row in rows if row.trained_at is not None]
        finally:
            ledger.close()
    return len(trained), max(trained) - min(shipped)


def figures(watched: Watched, runs: Sequence[Path]) -> dict[str, Any]:
    """What one of the two took."""
    steps, seconds = trained_between(runs)
    cpu = watched.cpu_by_name()
    return {
        "steps": steps,
        "wall_s": watched.wall_s,
        "steps_per_s": (steps - len(runs)) / seconds,  # the first batch of each run is shipped before the clock
        "steps_per_s_with_start": steps / watched.wall_s,
        "cpu_s": sum(cpu.values()),
        "cpu_s_by_process": dict(sorted(cpu.items(), key=lambda item: -item[1])),
        "peak_bytes": watched.peak_bytes,
        "peak_bytes_by_process": dict(sorted(watched.memory_bytes.items(), key=lambda item: -item[1]["Pss"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--size", choices=("tiny", "medium", "half"), default="tiny")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    files = [file.name for file in prepare(arguments.dir, arguments.size, arguments.steps)]
    for name in ("alone", "together"):
        shutil.rmtree(arguments.dir / name, ignore_errors=True)
    rl = [sys.executable, "-m", "mettle.cli", "rl"]
    before = os.getloadavg()[0]
    base = ["--model.path", "model"]
    alone = figures(Watched([*rl, "run", files[0], "--dir", "alone", *base], arguments.dir), [arguments.dir / "alone"])
    share = [*rl, "share", *files, "--base-model", "model", "--dir", "together"]
    runs = [arguments.dir / "together" / "runs" / Path(file).stem for file in files]
    together = figures(Watched(share, arguments.dir), runs)
    found = {
        "size": arguments.size,
        "load": [before, os.getloadavg()[0]],
        "cores": len(os.sched_getaffinity(0)),
        "alone": alone,
        "together": together,
        "throughput": together["steps_per_s"] / alone["steps_per_s"],
        "throughput_with_start": together["steps_per_s_with_start"] / alone["steps_per_s_with_start"],
        "cpu_a_step": (together["cpu_s"] / together["steps"]) / (alone["cpu_s"] / alone["steps"]),
        "memory": together["peak_bytes"] / alone["peak_bytes"],
    }
    print(json.dumps(found, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
