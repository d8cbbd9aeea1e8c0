"""One cell of `envs_rollout.py`: one library, one scenario, in a process of its own; prints one JSON line.

It runs under any Python that has the library, Mettle or verifiers, and uses only what both have: so the very same
environment, reward, mock model and HTTP server are measured. Scenarios: `single` (one turn, exact match and a format
metric), `tools` (four tool calls and an answer: five model turns), `tokens` (five turns that each add 2,000 prompt ids;
memory), `import` (what importing the library and `SingleTurnEnv` costs), `bare` (the mock under a semaphore, no
library).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import logging
import os
import resource
import sys
import time
from typing import Any

QUESTION = "Please read this question with care and answer it with one number only. " * 5
ANSWER = "<think>so</think><answer>4</answer>"
LATENCY_S = 0.05
NEW_IDS_PER_TURN = 2000
vf: Any = None


def make_client(num_calls: int, latency_s: float, new_ids: int = 0) -> Any:
    """A model without a network: `num_calls` tool calls and then an answer."""

    class Mock(vf.Client):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            pass

        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any = None, tools: Any = None, **_: Any
        ) -> Any:
            await asyncio.sleep(latency_s)
            turn = sum(message["role"] == "assistant" for message in prompt)
            call = vf.ToolCall(id=f"c{turn}", name="add", arguments='{"a": 1, "b": 2}')
            message = vf.ResponseMessage(
                content=ANSWER,
                reasoning_content=None,
                tool_calls=[call] if turn < num_calls else None,
                finish_reason="stop",
                is_truncated=False,
                tokens=tokens_of(turn, new_ids) if new_ids else None,
            )
            usage = vf.Usage(prompt_tokens=100, reasoning_tokens=0, completion_tokens=10, total_tokens=110)
            return vf.Response(id="r", created=0, model=model, usage=usage, message=message)

        def setup_client(self, config: Any) -> None: ...
        async def to_native_tool(self, tool: Any) -> Any: ...
        async def to_native_prompt(self, messages: Any) -> Any: ...
        async def get_native_response(self, *args: Any, **kwargs: Any) -> Any: ...
        async def raise_from_native_response(self, response: Any) -> None: ...
        async def from_native_response(self, response: Any) -> Any: ...
        async def close(self) -> None: ...

    return Mock()


def tokens_of(turn: int, new_ids: int) -> Any:
    """The ids of a turn as they come out of a JSON answer: the whole prompt, every time."""
    prompt = json.loads(json.dumps(list(range(1000, 1000 + new_ids * (turn + 1)))))
    completion, logprobs = list(range(1000, 1010)), [-0.5] * 10
    if "mettle" in vf.__name__:
        return vf.ResponseTokens(prompt, completion, logprobs)
    return vf.ResponseTokens(
        prompt_ids=prompt,
        prompt_mask=[0] * len(prompt),
        completion_ids=completion,
        completion_mask=[1] * 10,
        completion_logprobs=logprobs,
    )


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def make_env(num_calls: int, num_rows: int) -> Any:
    """An environment of the scenario."""
    from datasets import Dataset

    parser = vf.XMLParser(["think", "answer"])

    async def correct(completion: Any, answer: str, parser: Any) -> float:
        return float(parser.parse_answer(completion) == answer)

    rubric = vf.Rubric(funcs=[correct, parser.get_format_reward_func()], weights=[1.0, 0.0], parser=parser)
    fields = {
        "eval_dataset": Dataset.from_list([{"question": QUESTION, "answer": "4"}] * num_rows),
        "system_prompt": "Answer in XML.",
        "parser": parser,
        "rubric": rubric,
    }
    return vf.ToolEnv(tools=[add], **fields) if num_calls else vf.SingleTurnEnv(**fields)


async def sample_lag(samples: list[float], every_s: float = 0.002) -> None:
    """How late the loop wakes this task up, again and again (seconds)."""
    while True:
        due = time.perf_counter() + every_s
        await asyncio.sleep(every_s)
        samples.append(max(0.0, time.perf_counter() - due))


def lag_figures(samples: list[float]) -> dict[str, float]:
    """Lag in ms at a random moment of the run: a stall of 1 s is seen by all who would have woken up in it."""
    ordered = sorted(samples)
    total = sum(ordered) or 1e-9

    def by_time(share: float) -> float:
        passed = 0.0
        for lag in ordered:
            passed += lag
            if passed >= share * total:
                return lag * 1000
        return ordered[-1] * 1000

    plain = {f"lag_ms_p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] * 1000 for p in (50, 99)}
    return {**plain, "lag_ms_max": ordered[-1] * 1000, "lag_ms_p99_by_time": by_time(0.99)}


def rss_mib(peak: bool = False) -> float:
    """Resident memory now, or at its highest."""
    if peak:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


async def measured(work: Any) -> dict[str, float]:
    """CPU, wall and loop lag of a coroutine."""
    lags: list[float] = []
    sampler = asyncio.create_task(sample_lag(lags))
    await asyncio.sleep(0.02)
    lags.clear()
    cpu, wall = time.process_time(), time.perf_counter()
    await work
    figures = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    await asyncio.sleep(0)
    sampler.cancel()
    return figures | lag_figures(lags or [0.0])


async def run_evaluation(args: argparse.Namespace) -> dict[str, float]:
    """`env.evaluate` with so many groups of one in flight."""
    num_calls = 4 if args.scenario == "tools" else 0
    env = make_env(num_calls, args.num)
    if args.sdk:
        from openai import AsyncOpenAI

        sdk = AsyncOpenAI(base_url=args.url, api_key="none", timeout=600)
        client = vf.OpenAIChatCompletionsClient(sdk)
    elif args.url:
        os.environ["BENCH_KEY"] = "none"
        config = vf.ClientConfig(api_base_url=args.url, api_key_var="BENCH_KEY")
        client = vf.OpenAIChatCompletionsClient(config)
    else:
        client = make_client(num_calls, args.latency)
    # verifiers draws a progress bar unless it is given a callback; Mettle draws none in the library.
    quiet: dict[str, Any] = {"on_progress": lambda *_: None} if vf.__name__ == "verifiers" else {}
    await env.evaluate(client, "m", num_examples=min(32, args.num), max_concurrent=32, **quiet)
    before = rss_mib()
    results: dict[str, Any] = {}

    async def work() -> None:
        results.update(await env.evaluate(client, "m", max_concurrent=args.concurrency, **quiet))

    figures = await measured(work())
    await client.close()
    rewards = [output["reward"] for output in results["outputs"]]
    assert rewards == [1.0] * args.num, "the mock answers right"
    return figures | {"growth_mib": rss_mib(peak=True) - before, "peak_mib": rss_mib(peak=True)}


async def run_tokens(args: argparse.Namespace) -> dict[str, float]:
    """Memory of rollouts of five turns with tokens, all of them kept."""
    env = make_env(4, 1)
    client = make_client(4, 0.0, NEW_IDS_PER_TURN)
    row = env.get_eval_dataset()[0]
    await env.rollout(dict(row), client, "m", {})
    before = rss_mib()
    states = []

    async def work() -> None:
        for _ in range(args.num):
            states.append(await env.rollout(dict(row), client, "m", {}))

    figures = await measured(work())
    assert len(states[-1]["trajectory"]) == 5
    assert len(states[-1]["trajectory"][-1]["tokens"]["prompt_ids"]) == 5 * NEW_IDS_PER_TURN
    return figures | {"mib_per_rollout": (rss_mib() - before) / args.num, "peak_mib": rss_mib(peak=True)}


async def run_bare(args: argparse.Namespace) -> dict[str, float]:
    """The mock alone, under a semaphore."""
    client, semaphore = make_client(0, args.latency), asyncio.Semaphore(args.concurrency)

    async def rollout() -> None:
        async with semaphore:
            await client.get_response([{"role": "user", "content": QUESTION}], "m")

    async def work() -> None:
        await asyncio.gather(*(rollout() for _ in range(args.num)))

    return await measured(work())


def main() -> None:
    """Measure one cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=["mettle.envs", "verifiers"], required=True)
    parser.add_argument("--scenario", choices=["single", "tools", "tokens", "import", "bare"], required=True)
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--latency", type=float, default=LATENCY_S)
    parser.add_argument("--url", default="")
    parser.add_argument("--sdk", action="store_true", help="talk to --url through an AsyncOpenAI object")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    global vf
    cpu, wall, before = time.process_time(), time.perf_counter(), rss_mib()
    vf = importlib.import_module(args.library)
    _ = vf.SingleTurnEnv
    figures = {
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "growth_mib": rss_mib() - before,
    }
    runs = {"single": run_evaluation, "tools": run_evaluation, "tokens": run_tokens, "bare": run_bare}
    if args.scenario != "import":
        figures = asyncio.run(runs[args.scenario](args))
        figures["cpu_ms_per_rollout"] = figures["cpu_s"] / args.num * 1000
        figures["rollouts_per_s"] = args.num / figures["wall_s"]
    print(json.dumps(figures), file=sys.stdout)


if __name__ == "__main__":
    main()
