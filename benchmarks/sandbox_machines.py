"""What does a machine cost: to make, to run a command in, and to keep idle, many at once?

Samples of a command in a machine and of a plain subprocess are interleaved, so that a busy host slows both; the
ratio is what to compare.

    python benchmarks/sandbox_machines.py [--machines 500] [--samples 100] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from mettle.sandbox import Machine, MachinePool, SandboxConfig
from mettle.sandbox.zygote import watch

TRUE = ["/bin/true"]


async def timed(action: Callable[[], Awaitable[Any]]) -> float:
    started = time.perf_counter()
    await action()
    return (time.perf_counter() - started) * 1000


def summary(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    p50, p95 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.95)]
    return {"n": len(ordered), "min_ms": ordered[0], "p50_ms": p50, "p95_ms": p95}


async def run_plainly() -> None:
    process = await asyncio.create_subprocess_exec(*TRUE)
    await process.wait()


async def move_a_file(machine: Machine) -> None:
    await machine.upload("file", b"x" * 1000)
    await machine.download("file")


def proportional_mb(pids: list[int]) -> float:
    return sum(watch.proportional_bytes(pids).values()) / (1 << 20)


async def main(num_machines: int, num_samples: int) -> dict[str, Any]:
    async with MachinePool(SandboxConfig()) as pool:
        template = pool.template_pid
        assert template is not None
        machines: list[Machine] = []

        async def create() -> None:
            machines.append(await pool.create())

        created = [await timed(create) for _ in range(num_machines)]
        idle_mb = proportional_mb(watch.descendants(template)) / num_machines
        started = time.perf_counter()
        results = await asyncio.gather(*(machine.exec("echo $((6 * 7))") for machine in machines))
        all_at_once_s = time.perf_counter() - started
        assert all(result.stdout == "42\n" for result in results)
        first = machines[0]
        variants: dict[str, Callable[[], Awaitable[Any]]] = {
            "subprocess /bin/true": run_plainly,
            "exec /bin/true in a machine": lambda: first.exec(TRUE),
            "exec sh -c true in a machine": lambda: first.exec("true"),
            "upload and download 1 kB": lambda: move_a_file(first),
        }
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(num_samples):
            for name, action in variants.items():
                times[name].append(await timed(action))
        started = time.perf_counter()
        await asyncio.gather(*(machine.delete() for machine in machines))
        return {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
            "python": platform.python_version(),
            "load_average": os.getloadavg()[0],
            "isolation": pool.isolation.grade,
            "latency": {"create": summary(created), **{name: summary(samples) for name, samples in times.items()}},
            "num_machines": num_machines,
            "idle_mb_each": idle_mb,
            "all_exec_at_once_s": all_at_once_s,
            "all_deleted_s": time.perf_counter() - started,
        }


def show(found: dict[str, Any]) -> None:
    lines = [f"{found['machine']}, load {found['load_average']:.1f}, isolation {found['isolation']}"]
    lines.append(f"{'':32}{'min ms':>9}{'p50 ms':>9}{'p95 ms':>9}")
    for name, row in found["latency"].items():
        lines.append(f"{name:32}{row['min_ms']:9.2f}{row['p50_ms']:9.2f}{row['p95_ms']:9.2f}")
    lines.append(f"{found['num_machines']} at once: {found['idle_mb_each']:.1f} MB each while idle")
    lines.append(f"a command in each: {found['all_exec_at_once_s']:.2f} s; all deleted: {found['all_deleted_s']:.2f} s")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", type=int, default=500)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    measured = asyncio.run(main(arguments.machines, arguments.samples))
    show(measured)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n")
