"""What the proxy costs per call of an agent: CPU-ms of our side, as a ratio to an HTTP server that says a fixed thing.

An agent program in another process talks over the loopback; the model is a mock, so what is left is the proxy: HTTP,
the dialect, recognising the conversation, the trajectory step, the answer. Cells: each dialect, whole and streamed, ten
turns of a growing conversation; `chat 2k` adds 2,000 characters a turn. The bare server reads the same bodies and
answers with fixed bytes, in the same run. The number that matters is CPU-ms per call.

Run: `python benchmarks/agent_proxy.py [--rollouts 40] [--json FILE]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

import mettle.envs as vf
from mettle.envs.cli_agent_env import CliAgentEnv
from mettle.envs.proxy.recorder import Recorder
from mettle.envs.proxy.server import ProxyServer

NUM_TURNS = 10
NUM_REPEATS = 3
CONCURRENCY = 40
SAID = "I have looked at it and the answer is four."
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
CELLS = {
    "chat": ("chat", False, 40),
    "chat stream": ("chat", True, 40),
    "messages": ("messages", False, 40),
    "messages stream": ("messages", True, 40),
    "responses": ("responses", False, 40),
    "responses stream": ("responses", True, 40),
    "chat 2k": ("chat", False, 2000),
}


class Mock(vf.Client):
    """Always says the same."""

    async def get_response(self, prompt: Any, model: str, *_: Any, **__: Any) -> vf.Response:
        message = vf.ResponseMessage(content=SAID, finish_reason="stop", is_truncated=False)
        usage = vf.Usage(prompt_tokens=100, completion_tokens=10, total_tokens=110)
        return vf.Response(id="r", created=0, model=model, usage=usage, message=message)


def bodies(dialect: str, is_stream: bool, num_characters: int) -> list[bytes]:
    """The requests of a conversation."""
    made, history = [], []
    for turn in range(NUM_TURNS):
        history.append({"role": "user", "content": f"{turn} " + "x" * num_characters})
        key = "input" if dialect == "responses" else "messages"
        body = {"model": "m", "max_tokens": 100, "stream": is_stream, key: list(history)}
        made.append(json.dumps(body).encode())
        history.append({"role": "assistant", "content": SAID})
    return made


def play(orders: Any, done: Any) -> None:
    """The agents, in a process of their own: plays (url, secrets, bodies) as it is told."""

    async def rollout(http: aiohttp.ClientSession, url: str, secret: str, requests: list[bytes]) -> None:
        for body in requests:
            async with http.post(url, data=body, headers={"x-api-key": secret}) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

    async def everybody(url: str, secrets: list[str], requests: list[bytes]) -> None:
        connector = aiohttp.TCPConnector(limit=CONCURRENCY)
        async with aiohttp.ClientSession(connector=connector) as http:
            await asyncio.gather(*(rollout(http, url, secret, requests) for secret in secrets))

    while (order := orders.get()) is not None:
        asyncio.run(everybody(*order))
        done.put(True)


async def spent_on(orders: Any, done: Any, order: tuple[str, list[str], list[bytes]]) -> float:
    """CPU-ms of this process per call while the agents play."""
    start = time.process_time()
    orders.put(order)
    await asyncio.to_thread(done.get)
    return (time.process_time() - start) * 1000 / (len(order[1]) * len(order[2]))


async def run_proxy(orders: Any, done: Any, cell: tuple[str, bool, int], num_rollouts: int) -> float:
    """CPU-ms per call through the proxy."""
    env = CliAgentEnv("true", dataset=[{"question": "q"}], rubric=vf.Rubric())
    proxy = ProxyServer()
    listener = await proxy.listen()
    states, secrets = [], []
    for _ in range(num_rollouts):
        state = await env.init_state(env.get_dataset()[0], Mock(), "m")
        recorder = Recorder(env, state)
        recorder.session = proxy.open(recorder, "m")
        states.append(state)
        secrets.append(recorder.session.secret)
    url = f"http://127.0.0.1:{listener.port}{PATHS[cell[0]]}"
    spent = await spent_on(orders, done, (url, secrets, bodies(*cell)))
    assert all(len(state["trajectory"]) == NUM_TURNS for state in states), "each call is a step"
    await proxy.close()
    return spent


async def run_bare(orders: Any, done: Any, cell: tuple[str, bool, int], num_rollouts: int) -> float:
    """CPU-ms per call of a server that reads the body and answers with fixed bytes."""
    fixed = json.dumps({"choices": [{"message": {"content": SAID}}]}).encode()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        return web.Response(body=fixed, content_type="application/json")

    server = web.Server(handle, access_log=None)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/"
    spent = await spent_on(orders, done, (url, ["x"] * num_rollouts, bodies(*cell)))
    listening.close()
    await server.shutdown(0.1)
    return spent


def measure(num_rollouts: int) -> dict[str, dict[str, float]]:
    """Every cell next to its bare server, repeated."""
    context = multiprocessing.get_context("spawn")
    orders, done = context.Queue(), context.Queue()
    agents = context.Process(target=play, args=(orders, done), daemon=True)
    agents.start()
    table = {}
    for name, cell in CELLS.items():
        bare, proxied = [], []
        for _ in range(NUM_REPEATS):
            bare.append(asyncio.run(run_bare(orders, done, cell, num_rollouts)))
            proxied.append(asyncio.run(run_proxy(orders, done, cell, num_rollouts)))
        median = statistics.median(proxied)
        table[name] = {
            "min": min(proxied),
            "median": median,
            "max": max(proxied),
            "bare": statistics.median(bare),
            "ratio_to_bare": median / statistics.median(bare),
        }
    orders.put(None)
    agents.join(timeout=10)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    table = measure(arguments.rollouts)
    print(f"{'CPU-ms per call':<18} {'min':>7} {'median':>7} {'max':>7} {'bare':>7} {'ratio':>6}")
    for name, row in table.items():
        cells = " ".join(f"{row[key]:7.3f}" for key in ("min", "median", "max", "bare"))
        print(f"{name:<18} {cells} {row['ratio_to_bare']:6.1f}")
    if arguments.json:
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        about = {"machine": platform.machine(), "python": platform.python_version(), "rollouts": arguments.rollouts}
        about |= {"turns": NUM_TURNS, "repeats": NUM_REPEATS, "peak_rss_mb": round(peak_mb, 1)}
        arguments.json.write_text(json.dumps({**about, "cpu_ms_per_call": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
