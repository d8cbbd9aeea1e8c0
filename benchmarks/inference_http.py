"""What HTTP costs an inference server: CPU-ms of its process per request, and requests a second, with the mock engine.

The engine answers from memory, so what is left is the connection, the route, the body, the answer. Cells:
`/v1/generate` with a short prompt, with a long one and eight long choices, and the orchestrator's usual one between
them; a chat, whole and streamed. `--against SRC` runs the servers of another checkout's `src` as well, in turns with
this one's, and prints the median of the ratios of neighbours, which a busy machine disturbs least; it needs nothing
else of that checkout. The number that matters is CPU-ms per request of `generate small` and `generate group`.

Run: `python benchmarks/inference_http.py [--against /path/to/src] [--json FILE]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

NUM_REPEATS = 25
CONCURRENCY = 32
CHAT = {"messages": [{"role": "user", "content": "How many legs has a spider?"}], "max_tokens": 64}
CELLS: dict[str, tuple[str, dict[str, Any], int]] = {
    "generate small": ("generate", {"prompt_ids": [65] * 32, "n": 1, "max_tokens": 32, "temperature": 1.0}, 640),
    "generate group": ("generate", {"prompt_ids": [65] * 256, "n": 8, "max_tokens": 128, "temperature": 1.0}, 128),
    "generate large": ("generate", {"prompt_ids": [65] * 4096, "n": 8, "max_tokens": 2048}, 32),
    "chat": ("chat/completions", CHAT, 320),
    "chat stream": ("chat/completions", {**CHAT, "stream": True}, 64),
}

SERVER = """
import asyncio, sys
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from mettle.clients.renderer import Renderer
from mettle.inference import server, service
from mettle.inference.bridge import Bridge
from mettle.inference.engine.limits import Limits
from mettle.inference.engine.mock import MockEngine

try:
    from mettle.web.server import bind
except ImportError:
    from mettle.inference.server import bind

def tokenizer(folder):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}")

async def main():
    folder = Path(sys.argv[1])
    tokenizer(folder)
    engine = MockEngine(lambda prompt, choice: [65] * 4096, limits=Limits(1024, 8192), max_queue=4096)
    Service = getattr(service, "ModelService", None) or service.Service
    served = Service(Bridge(engine), Renderer.from_directory(folder), "policy")
    Server = getattr(server, "InferenceServer", None) or server.Server
    running = Server(served, bind("127.0.0.1", 0))
    await running.start()
    print(running.base_url, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


class ServerProcess:
    """An inference server of the package in `source`."""

    def __init__(self, source: Path, folder: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SERVER, folder]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.base_url = self.process.stdout.readline().strip()
        assert self.base_url, f"the server of {source} did not start"

    async def measure(self, route: str, body: dict[str, Any], num: int) -> tuple[float, float]:
        """(CPU-ms per request, requests a second)."""
        data = json.dumps(body).encode()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

            async def ask(times: int) -> None:
                for _ in range(times):
                    async with http.post(f"{self.base_url}/{route}", data=data) as answer:
                        assert answer.status == 200, await answer.text()
                        await answer.read()

            await asyncio.gather(*(ask(1) for _ in range(CONCURRENCY)))
            before, started = cpu_s(self.process.pid), time.perf_counter()
            await asyncio.gather(*(ask(max(1, num // CONCURRENCY)) for _ in range(CONCURRENCY)))
            seconds, used = time.perf_counter() - started, cpu_s(self.process.pid) - before
        asked = max(1, num // CONCURRENCY) * CONCURRENCY
        return used / asked * 1e3, asked / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the src folder of another checkout")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sources = {"this": Path(__file__).resolve().parents[1] / "src"}
    if arguments.against is not None:
        sources["other"] = arguments.against.resolve()
    found: dict[str, dict[str, list[tuple[float, float]]]] = {name: {cell: [] for cell in CELLS} for name in sources}
    with tempfile.TemporaryDirectory() as folder:
        servers = {name: ServerProcess(source, folder) for name, source in sources.items()}
        for repeat in range(NUM_REPEATS):
            for cell, (route, body, num) in CELLS.items():
                for name in sorted(servers, reverse=bool(repeat % 2)):
                    found[name][cell].append(asyncio.run(servers[name].measure(route, body, num)))
        for server in servers.values():
            server.process.kill()
            server.process.wait()
    rows = {cell: {name: summary(found[name][cell]) for name in sources} for cell in CELLS}
    for cell, row in rows.items():
        line = "  ".join(f"{name} {s['cpu_ms']:.3f} ms {s['requests_per_s']:.0f}/s" for name, s in row.items())
        if "other" in row:
            pairs = zip(found["this"][cell], found["other"][cell], strict=True)
            row["cpu_ratio"] = round(statistics.median(ours[0] / theirs[0] for ours, theirs in pairs), 3)
            line += f"  ratio {row['cpu_ratio']:.2f}"
        print(f"{cell:<16} {line}")
    if arguments.json is not None:
        about = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
        arguments.json.write_text(json.dumps({**about, "repeats": NUM_REPEATS, "cells": rows}, indent=1) + "\n")


def summary(measured: list[tuple[float, float]]) -> dict[str, float]:
    """Medians, and the least and most of what matters."""
    costs = sorted(cost for cost, _ in measured)
    rate = statistics.median(rate for _, rate in measured)
    median = round(statistics.median(costs), 4)
    return {"cpu_ms": median, "min": round(costs[0], 4), "max": round(costs[-1], 4), "requests_per_s": round(rate, 1)}


if __name__ == "__main__":
    main()
