"""What the environment library costs per rollout: CPU-ms with a mock client, as a ratio to the bare mock.

Scenarios: `single` (one turn, exact match and a format metric), `tools` (four tool calls and an answer, five turns),
and `http` (one chat completion over the loopback against a server in another process, our side only). The bare mock
runs under a semaphore with no library, in the same process and run. The number that matters is CPU-ms per rollout.

Run: `python benchmarks/envs_rollout.py [--num 2000] [--json FILE]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import mettle.envs as vf

QUESTION = "Please read this question with care and answer it with one number only. " * 5
NUM_REPEATS = 3


class Mock(vf.Client):
    """Four tool calls and then an answer, or an answer at once."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any = None, tools: Any = None, **_: Any
    ) -> vf.Response:
        await asyncio.sleep(0)
        turn = sum(message["role"] == "assistant" for message in prompt)
        calls = (
            [vf.ToolCall(id=f"c{turn}", name="add", arguments='{"a": 1, "b": 2}')] if turn < self.num_calls else None
        )
        message = vf.ResponseMessage(
            content="<think>so</think><answer>4</answer>", tool_calls=calls, finish_reason="stop", is_truncated=False
        )
        usage = vf.Usage(prompt_tokens=100, completion_tokens=10, total_tokens=110)
        return vf.Response(id="r", created=0, model=model, usage=usage, message=message)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def make_env(num_calls: int, num_rows: int) -> vf.Environment:
    """An environment of the scenario."""
    parser = vf.XMLParser(["think", "answer"])

    async def correct(completion: Any, answer: str, parser: Any) -> float:
        return float(parser.parse_answer(completion) == answer)

    rubric = vf.Rubric([correct, parser.get_format_reward_func()], [1.0, 0.0], parser=parser)
    fields = {
        "eval_dataset": [{"question": QUESTION, "answer": "4"}] * num_rows,
        "system_prompt": "Answer in XML.",
        "parser": parser,
        "rubric": rubric,
    }
    return vf.ToolEnv(tools=[add], **fields) if num_calls else vf.SingleTurnEnv(**fields)


async def run_library(num_calls: int, num_rows: int, concurrency: int) -> float:
    """CPU-ms per rollout with the library."""
    env = make_env(num_calls, num_rows)
    start = time.process_time()
    results = await env.evaluate(Mock(num_calls), "mock", max_concurrent=concurrency)
    spent = time.process_time() - start
    assert results.metadata["avg_reward"] == 1.0, "the mock answers right"
    return spent / num_rows * 1000


async def run_bare(num_calls: int, num_rows: int, concurrency: int) -> float:
    """CPU-ms per rollout of the mock alone, under a semaphore."""
    client, semaphore = Mock(0), asyncio.Semaphore(concurrency)

    async def rollout() -> None:
        async with semaphore:
            for _ in range(num_calls + 1):
                await client.get_response([{"role": "user", "content": QUESTION}], "mock")

    start = time.process_time()
    await asyncio.gather(*(rollout() for _ in range(num_rows)))
    return (time.process_time() - start) / num_rows * 1000


def serve(ports: Any) -> None:
    """A chat completion endpoint that answers at once."""
    from aiohttp import web

    message = {"role": "assistant", "content": "<think>so</think><answer>4</answer>"}
    answer = {"id": "r", "model": "m", "choices": [{"index": 0, "finish_reason": "stop", "message": message}]}

    async def handle(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response(answer)

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


async def run_http(num_rows: int, concurrency: int, port: int) -> float:
    """CPU-ms per rollout over HTTP, on the client's side."""
    env = make_env(0, num_rows)
    client = vf.OpenAIChatCompletionsClient(f"http://127.0.0.1:{port}/v1")
    await env.evaluate(client, "m", num_examples=concurrency, max_concurrent=concurrency)
    start = time.process_time()
    await env.evaluate(client, "m", max_concurrent=concurrency)
    spent = time.process_time() - start
    await client.close()
    return spent / num_rows * 1000


def measure(num_rows: int, concurrency: int) -> dict[str, dict[str, float]]:
    """Every scenario, repeated."""
    ports: Any = multiprocessing.get_context("spawn").Queue()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(ports,), daemon=True)
    server.start()
    port = ports.get(timeout=60)
    rows: dict[str, list[float]] = {}
    for _ in range(NUM_REPEATS):
        for name, num_calls in (("single", 0), ("tools", 4)):
            rows.setdefault(f"bare {name}", []).append(asyncio.run(run_bare(num_calls, num_rows, concurrency)))
            rows.setdefault(name, []).append(asyncio.run(run_library(num_calls, num_rows, concurrency)))
        rows.setdefault("http", []).append(asyncio.run(run_http(num_rows, concurrency, port)))
    server.terminate()
    table = {}
    for name, values in rows.items():
        bare = rows.get(f"bare {name}")
        row = {"min": min(values), "median": statistics.median(values), "max": max(values)}
        table[name] = row | ({"ratio_to_bare": row["median"] / statistics.median(bare)} if bare else {})
    return table


def commit() -> str:
    """The commit that was measured."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> None:
    """Measure, print a table, write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = measure(args.num, args.concurrency)
    print(f"{'scenario':<14}{'min':>10}{'median':>10}{'max':>10}{'/ bare':>10}   CPU-ms per rollout")
    for name, row in table.items():
        ratio = f"{row['ratio_to_bare']:.1f}" if "ratio_to_bare" in row else ""
        print(f"{name:<14}{row['min']:>10.3f}{row['median']:>10.3f}{row['max']:>10.3f}{ratio:>10}")
    if args.json:
        machine = {"machine": platform.machine(), "python": platform.python_version(), "commit": commit()}
        result = {**machine, "num": args.num, "concurrency": args.concurrency, "cpu_ms_per_rollout": table}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
