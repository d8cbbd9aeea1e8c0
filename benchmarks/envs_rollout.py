"""What the environment library costs beside an installed verifiers: same environment, same model, same run.

Each cell is a process of its own (`envs_workload.py`), first under this Python with Mettle, then under `--peer-python`
with verifiers. Scenarios: `single` and `tools` (five model turns) with 64, 512 and 2,048 rollouts in flight, against a
mock client that answers after 50 ms, over real HTTP against a server in another process that does the same, and there
through a caller's own `AsyncOpenAI`;
`tokens` (memory of five turns of 2,000 new prompt ids); `import`; `size` (the library with all that it needs). The
number that matters is CPU-ms per rollout; `lag` is how late the event loop wakes a sleeping task.

Run: `python benchmarks/envs_rollout.py --peer-python /path/to/python [--only mock] [--repeats 3] [--json FILE]`.
With `--json`, cells are merged into the file, so that a long comparison may be run in pieces.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LATENCY_S = 0.05
IN_FLIGHT = (64, 512, 2048)
SIZE_CODE = """
import importlib.metadata as m, json, re, sys
seen, waiting = {}, list(sys.argv[1:])
while waiting:
    name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
    if name in seen: continue
    try: dist = m.distribution(name)
    except m.PackageNotFoundError: continue
    files = [dist.locate_file(f) for f in dist.files or []]
    seen[name] = sum(f.stat().st_size for f in files if f.is_file() and "__pycache__" not in str(f))
    waiting += [re.match(r"[A-Za-z0-9._-]+", r)[0] for r in dist.requires or [] if "extra ==" not in r]
print(json.dumps({"size_mib": sum(seen.values()) / 2**20, "packages": len(seen)}))
"""


@dataclass(frozen=True)
class Cell:
    """One question to both libraries."""

    scenario: str
    transport: str = "mock"
    concurrency: int = 0
    num: int = 0

    @property
    def name(self) -> str:
        """How it is called in tables and with `--only`."""
        return " ".join(filter(None, [self.scenario, self.transport, str(self.concurrency or "")]))


def cells() -> Iterator[Cell]:
    """Every question."""
    for concurrency in IN_FLIGHT:
        yield Cell("single", "mock", concurrency, 4096)
    for concurrency in IN_FLIGHT:
        yield Cell("tools", "mock", concurrency, 2048)
    for concurrency in IN_FLIGHT:
        yield Cell("single", "http", concurrency, max(512, concurrency))
    for concurrency in IN_FLIGHT:
        yield Cell("tools", "http", concurrency, max(128, concurrency))
    yield Cell("single", "sdk", 64, 512)
    yield Cell("tools", "sdk", 64, 128)
    yield Cell("tokens", num=100)
    yield Cell("import", "")
    yield Cell("size", "")


def serve(ports: Any) -> None:
    """A chat endpoint: four tool calls where the request has tools, then an answer."""
    from aiohttp import web

    answer = "<think>so</think><answer>4</answer>"

    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(LATENCY_S)
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": answer}
        if body.get("tools") and turn < 4:
            function = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
            message["tool_calls"] = [{"id": f"c{turn}", "type": "function", "function": function}]
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        about = {"id": "r", "object": "chat.completion", "created": 1, "model": "m"}
        return web.json_response({**about, "choices": [choice], "usage": usage})

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        ports.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


def measure(cell: Cell, python: str, library: str, url: str) -> dict[str, float]:
    """One cell under one library."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent / "src"), "TQDM_DISABLE": "1"}
    if cell.scenario == "size":
        project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
        roots = ["verifiers"] if library == "verifiers" else project["dependencies"]
        command = [python, "-c", SIZE_CODE, *(root.split(">=")[0] for root in roots)]
    else:
        command = [python, str(HERE / "envs_workload.py"), "--library", library, "--scenario", cell.scenario]
        command += ["--num", str(cell.num), "--concurrency", str(cell.concurrency)]
        command += ["--url", url] if cell.transport in ("http", "sdk") else []
        command += ["--sdk"] if cell.transport == "sdk" else []
    done = subprocess.run(command, env=environ, cwd="/tmp", capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{cell.name} under {library} failed:\n{done.stderr[-3000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    if cell.scenario == "size" and library != "verifiers":
        own = sum(path.stat().st_size for path in (HERE.parent / "src").rglob("*") if "__pycache__" not in str(path))
        figures["size_mib"] += own / 2**20
    return figures


def spread(runs: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Each figure's smallest, middle and largest value over the repeats."""
    return {
        name: {"min": min(values), "median": statistics.median(values), "max": max(values), "n": len(values)}
        for name in runs[0]
        if (values := [run[name] for run in runs])
    }


SHOWN = {
    "cpu_ms_per_rollout": "CPU-ms",
    "rollouts_per_s": "per s",
    "growth_mib": "MiB",
    "lag_ms_p50": "lag p50",
    "lag_ms_p99": "lag p99",
    "mib_per_rollout": "MiB each",
    "cpu_s": "CPU-s",
    "size_mib": "MiB",
}
SHOWN_FOR = {
    "tokens": ("mib_per_rollout", "cpu_ms_per_rollout"),
    "import": ("cpu_s", "growth_mib"),
    "size": ("size_mib",),
}
USUAL = ("cpu_ms_per_rollout", "rollouts_per_s", "growth_mib", "lag_ms_p50", "lag_ms_p99")


def show(name: str, found: dict[str, dict[str, dict[str, float]]]) -> None:
    """One line per figure: ours, theirs, and how many times more theirs is."""
    for figure in SHOWN_FOR.get(name.split()[0], USUAL):
        values = {library: figures[figure]["median"] for library, figures in found.items()}
        ours, theirs = values["mettle"], values.get("verifiers")
        ratio = f"{theirs / ours:>9.1f}x" if theirs and ours else ""
        print(f"{name:<18}{SHOWN[figure]:<10}{ours:>12.3f}{theirs or 0:>12.3f}{ratio}", flush=True)


TABLE_HEAD = """| in flight | CPU-ms | | rollouts/s | | loop lag p99, ms | |
|---|---|---|---|---|---|---|
| | Mettle | verifiers | Mettle | verifiers | Mettle | verifiers |"""


def table(found: dict[str, dict[str, dict[str, dict[str, float]]]]) -> str:
    """The cells of rollouts as the page on environments shows them (medians)."""
    lines = [TABLE_HEAD]
    for cell in cells():
        if cell.concurrency and cell.name in found:
            pairs = [
                f"{found[cell.name][library][figure]['median']:{form}}"
                for figure, form in (("cpu_ms_per_rollout", ".2f"), ("rollouts_per_s", ".0f"), ("lag_ms_p99", ".0f"))
                for library in ("mettle", "verifiers")
            ]
            lines.append(f"| {cell.name} | " + " | ".join(pairs) + " |")
    return "\n".join(lines)


def describe(peer_python: str | None) -> dict[str, Any]:
    """What was measured, and on what."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    about = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
    about["commit"] = done.stdout.strip()
    if peer_python:
        code = "import importlib.metadata as m; print(m.version('verifiers'))"
        asked = subprocess.run([peer_python, "-c", code], capture_output=True, text=True, check=True)
        about["peer"] = f"verifiers {asked.stdout.strip()}"
    return about


def main() -> None:
    """Measure, print a table, merge into JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", help="a Python with verifiers installed; without it only Mettle is measured")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of a JSON file and measure nothing")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())["cells"]))
        return
    libraries = [("mettle", sys.executable, "mettle.envs")]
    if args.peer_python:
        libraries.append(("verifiers", args.peer_python, "verifiers"))
    ports: Any = multiprocessing.get_context("spawn").Queue()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(ports,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{ports.get(timeout=60)}/v1"
    result = {**describe(args.peer_python), "latency_ms": LATENCY_S * 1000, "cells": {}}
    if args.json and args.json.is_file():
        result["cells"] = json.loads(args.json.read_text()).get("cells", {})
    print(f"{'cell':<18}{'figure':<10}{'mettle':>12}{'verifiers':>12}{'ratio':>10}")
    for cell in cells():
        if args.only not in cell.name:
            continue
        found = {
            name: spread([measure(cell, python, library, url) for _ in range(args.repeats)])
            for name, python, library in libraries
        }
        result["cells"][cell.name] = found
        show(cell.name, found)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    server.terminate()


if __name__ == "__main__":
    main()
