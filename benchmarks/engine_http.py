"""How many tokens a second do the embedded engine and vLLM on a CPU serve over HTTP, and for how much processor time?

Both servers serve the same random model in float32, with one thread a tensor operation, and answer the same client at
`/v1/completions`: 20 tokens in, `--new` sampled at temperature 1 with their log-probabilities, no end token. They are
up together and measured by turns, so that the ratio of neighbours holds on a busy machine; processor time is that of a
server with all of its processes. vLLM is eager, which is how an engine starts whose weights change; `--compiled` asks
for its other mode, which compiles for minutes.

    python benchmarks/engine_http.py --vllm PYTHON [--sizes 0.4M 10M 0.5B] [--rounds 3] [--new 64] [--json FILE]

The numbers that matter are the ratios, ours to vLLM's: of tokens a second (more is better), of CPU-seconds (less is).
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp

from mettle.processes.child import descendants, process_cpu_s
from mettle.trainer.policy import write_policy
from mettle.trainer.presets import PolicyConfig

SIZES: Final = {
    "0.4M": PolicyConfig(),
    "10M": PolicyConfig(num_layers=6, hidden_size=384, mlp_size=1024, num_heads=6, num_kv_heads=3, head_dim=64),
    "0.5B": PolicyConfig(num_layers=32, hidden_size=1024, mlp_size=3072, num_heads=16, num_kv_heads=8, head_dim=128),
}
PROMPT: Final = 20
MAX_MODEL_LEN: Final = 256
SLOTS: Final = 256
START_S: Final = 900.0


class Cell(NamedTuple):
    """What one measurement found."""

    tokens_per_s: float
    cpu_ms_per_token: float


class HttpEngine:
    """A server process that answers at `url`."""

    def __init__(self, name: str, command: Sequence[str], port: int, environment: dict[str, str], log: Path) -> None:
        self.name, self.url, self._log = name, f"http://127.0.0.1:{port}/v1", log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, stdout=output, stderr=output
            )

    async def ready(self) -> float:
        """Wait until it answers; the seconds that this took."""
        began = time.monotonic()
        async with aiohttp.ClientSession() as http:
            while True:
                assert self.process.poll() is None, f"{self.name} ended: {self._log.read_text()[-2000:]}"
                assert time.monotonic() - began < START_S, f"{self.name} did not start"
                try:
                    async with http.get(f"{self.url}/models") as answer:
                        if answer.status == 200:
                            return time.monotonic() - began
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.25)

    def cpu_s(self) -> float:
        """Processor time of it and of all that it has started."""
        return sum(process_cpu_s(pid) for pid in (self.process.pid, *descendants(self.process.pid)))

    async def measure(self, concurrency: int, num_requests: int, num_new: int) -> Cell:
        """Ask from `concurrency` clients, each with its own share of the requests, one after another."""
        body: dict[str, Any] = {
            "model": "policy", "max_tokens": num_new, "temperature": 1.0, "ignore_eos": True, "logprobs": 0,
            "return_token_ids": True,
        }  # fmt: skip
        timeout = aiohttp.ClientTimeout(total=START_S)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:

            async def ask(client: int) -> None:
                for number in range(num_requests // concurrency):
                    first = (client * 31 + number * 7) % 200  # each its own prompt: nothing is to be had from a cache
                    prompt = [(first + 13 * place) % 250 for place in range(PROMPT)]
                    async with http.post(f"{self.url}/completions", json={**body, "prompt": prompt}) as answer:
                        found = await answer.json()
                        assert answer.status == 200, found
                        assert len(found["choices"][0]["token_ids"]) == num_new, found

            before, began = self.cpu_s(), time.perf_counter()
            await asyncio.gather(*(ask(client) for client in range(concurrency)))
            seconds, used = time.perf_counter() - began, self.cpu_s() - before
        tokens = num_requests // concurrency * concurrency * num_new
        return Cell(tokens / seconds, used / tokens * 1e3)

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def embedded(model: Path, folder: Path, port: int) -> HttpEngine:
    config = folder / "inference.json"
    settings = {
        "model": str(model), "port": port, "max_slots": SLOTS, "max_model_len": MAX_MODEL_LEN, "num_threads": 1,
        "device": "cpu", "log_level": "WARNING",
    }  # fmt: skip
    config.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "mettle.inference", "--config", str(config)]
    return HttpEngine("embedded", command, port, {}, folder / "embedded.log")


def vllm(python: Path, model: Path, folder: Path, port: int, *, is_compiled: bool) -> HttpEngine:
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "policy",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN),
        "--max-num-seqs", str(SLOTS), "--disable-log-stats", "--disable-uvicorn-access-log",
        *([] if is_compiled else ["--enforce-eager"]),
    ]  # fmt: skip
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    }  # fmt: skip
    return HttpEngine("vllm", command, port, environment, folder / "vllm.log")


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def compare(size: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All loads with one model."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = write_policy(folder / "model", SIZES[size])
        ours = embedded(model, folder, free_port())
        theirs = vllm(arguments.vllm, model, folder, free_port(), is_compiled=arguments.compiled)
        engines = [ours, theirs]
        try:
            started = dict(
                zip([e.name for e in engines], await asyncio.gather(*(e.ready() for e in engines)), strict=True)
            )
            print(f"{size}: up after " + ", ".join(f"{name} {s:.0f} s" for name, s in started.items()), flush=True)
            rows = {}
            for load in arguments.loads:
                requests = max(load, min(128, load * arguments.times))
                for engine in engines:  # what is computed once
                    await engine.measure(min(load, 8), min(load, 8), 4)
                found: dict[str, list[Cell]] = {engine.name: [] for engine in engines}
                for number in range(arguments.rounds):
                    for engine in engines[:: -1 if number % 2 else 1]:
                        found[engine.name].append(await engine.measure(load, requests, arguments.new))
                rows[str(load)] = row = summary(found, requests)
                print(f"{size:>5} {load:>4} in flight: {told(row)}", flush=True)
            return {"seconds_to_start": {name: round(s, 1) for name, s in started.items()}, "loads": rows}
        finally:
            for engine in engines:
                engine.end()


def summary(found: dict[str, list[Cell]], requests: int) -> dict[str, Any]:
    """Medians, and those of the ratios of neighbours."""
    pairs = list(zip(found["embedded"], found["vllm"], strict=True))
    speed = sorted(ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs)
    cost = sorted(ours.cpu_ms_per_token / theirs.cpu_ms_per_token for ours, theirs in pairs)
    engines = {
        name: {
            "tokens_per_s": round(statistics.median(cell.tokens_per_s for cell in cells), 1),
            "cpu_ms_per_token": round(statistics.median(cell.cpu_ms_per_token for cell in cells), 4),
        }
        for name, cells in found.items()
    }
    return {
        "requests": requests,
        **engines,
        "speed_ratio": [round(value, 2) for value in (speed[0], statistics.median(speed), speed[-1])],
        "cpu_ratio": [round(value, 2) for value in (cost[0], statistics.median(cost), cost[-1])],
    }


def told(row: dict[str, Any]) -> str:
    parts = [
        f"{name} {row[name]['tokens_per_s']:,.0f} tokens/s {row[name]['cpu_ms_per_token']:.3f} CPU-ms a token"
        for name in ("embedded", "vllm")
    ]
    return "; ".join([*parts, f"speed x{row['speed_ratio'][1]:.2f}, processor time x{row['cpu_ratio'][1]:.2f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="the interpreter of an environment that has vLLM")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.4M", "10M"])
    parser.add_argument("--loads", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--times", type=int, default=4, help="requests of each client, up to 128 of all")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sizes = {size: asyncio.run(compare(size, arguments)) for size in arguments.sizes}
    if arguments.json is not None:
        about = {
            "machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version(),
            "load_average": [round(value, 1) for value in os.getloadavg()], "rounds": arguments.rounds,
            "prompt": PROMPT, "new": arguments.new, "is_vllm_compiled": arguments.compiled,
        }  # fmt: skip
        arguments.json.write_text(json.dumps({**about, "sizes": sizes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
