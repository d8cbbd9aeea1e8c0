"""Environments in processes of their own: what comes back, and what happens when one dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest

import mettle.envs as vf
from mettle.clients.config import ClientConfig
from mettle.clients.endpoint_clients import AnthropicMessagesClient, OpenAIResponsesClient
from mettle.envs.rows import Rows
from mettle.envs.workers.endpoints import ClientCache, client_spec
from mettle.envs.workers.environment import WorkerEnvironment, worker_spec
from mettle.envs.workers.pool import WorkerPool
from mettle.envs.workers.spawn import Spawned, WorkerDied, WorkerSpec
from mettle.errors import UserError
from mettle.processes.beats import BEATS_FOLDER, read_beats

pytestmark = pytest.mark.usefixtures("troubled")


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until(is_so, limit_s=100.0):
    """What other processes do can only be looked at again."""
    async with asyncio.timeout(limit_s):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_an_evaluation_in_workers_is_the_evaluation_without(endpoint):
    env = vf.load_environment("troubled")
    here = await env.evaluate(endpoint.url, "m", rollouts_per_example=2, state_columns=["note"])
    there = await env.evaluate(
        endpoint.url, "m", rollouts_per_example=2, state_columns=["note", "handle"], num_workers=2
    )
    assert len(there["outputs"]) == 8
    assert there["metadata"]["avg_reward"] == here["metadata"]["avg_reward"] == 1.0
    assert there["metadata"]["version_info"] == here["metadata"]["version_info"]
    mine, theirs = (min(results["outputs"], key=lambda row: row["example_id"]) for results in (here, there))
    for row in (mine, theirs):
        row.pop("timing")
    assert theirs.pop("handle").startswith("<object object")
    assert mine == theirs
    json.dumps(there["outputs"])


async def test_a_worker_that_is_still_loading_has_work(tmp_path, monkeypatch):
    """So whoever watches it can say where it hangs."""
    wait, beats = tmp_path / "wait", tmp_path / "beats"
    wait.touch()
    monkeypatch.setenv("TROUBLED_WAITS", str(wait))
    monkeypatch.setenv(BEATS_FOLDER, str(beats))
    spawning = asyncio.create_task(asyncio.to_thread(Spawned, WorkerSpec("troubled", {"fails": "waits"})))
    await until(lambda: any(beat.has_work for beat in read_beats(beats).values()), limit_s=60.0)
    wait.unlink()
    (await spawning).end()


async def test_states_come_back_with_their_tokens_and_shared_messages(endpoint):
    async with WorkerPool(WorkerSpec("troubled"), 1) as pool:
        env = WorkerEnvironment(pool)
        (state,) = await env.run_group([{"prompt": "q", "answer": "fine", "example_id": 3}], endpoint.url, "m")
    first, second = state["trajectory"]
    assert (state["reward"], state["metrics"], state["example_id"]) == (1.0, {"fits": 1.0, "num_turns": 2.0}, 3)
    assert second["tokens"].previous is first["tokens"]
    assert (first["tokens"]["completion_ids"], first["tokens"]["completion_logprobs"]) == ([7, 8], [-0.5, -0.25])
    assert second["prompt"][0] is first["prompt"][0] is state["prompt"][0]
    assert isinstance(second["completion"][0], vf.AssistantMessage)
    assert dict(state["usage"]) == {"input_tokens": 10.0, "output_tokens": 2.0}
    assert (state["pid"] == os.getpid(), state["note"], "handle" in state) == (False, {"seen": [1]}, False)
    assert state["timing"].generation.duration > 0
    assert state["client"] == endpoint.url
    assert not is_alive(state["pid"])


async def test_a_worker_killed_in_the_middle_of_its_rollouts_loses_no_group(endpoint):
    env = vf.load_environment("troubled", num_rows=12)
    endpoint.answers.clear()
    async with WorkerPool(worker_spec(env), 2, first_wait_s=0.01) as pool:
        remote = WorkerEnvironment(pool)
        rows = [dict(row) for row in env.get_dataset()]
        groups = [asyncio.create_task(remote.run_group([row] * 2, endpoint.url, "m")) for row in rows]
        await endpoint.until_asked(24)
        victim = max(pool.stats, key=lambda worker: worker.num_running).pid
        os.kill(victim, signal.SIGKILL)
        endpoint.answers.set()
        states = [state for states in await asyncio.gather(*groups) for state in states]
        assert pool.num_deaths == 1
        assert victim not in {worker.pid for worker in pool.stats}
    assert [state["example_id"] for state in states] == [i for i in range(12) for _ in range(2)]
    assert all(state["error"] is None and state["reward"] == 1.0 for state in states)


async def test_every_worker_killed_is_replaced(endpoint):
    endpoint.answers.clear()
    async with WorkerPool(WorkerSpec("troubled"), 1, first_wait_s=0.01) as pool:
        group = asyncio.create_task(WorkerEnvironment(pool).run_group([{"prompt": "q"}], endpoint.url, "m"))
        await endpoint.until_asked(1)
        os.kill(pool.stats[0].pid, signal.SIGKILL)
        await endpoint.until_asked(2)
        endpoint.answers.set()
        (state,) = await group
    assert state["error"] is None


async def test_a_group_that_kills_every_worker_fails_with_a_typed_error_and_others_go_on(endpoint):
    async with WorkerPool(WorkerSpec("troubled"), 1, max_attempts=2, first_wait_s=0.01) as pool:
        env = WorkerEnvironment(pool)
        states = await env.run_group([{"prompt": "q", "info": {"trouble": "die"}}] * 2, endpoint.url, "m")
        assert [type(state["error"]) for state in states] == [WorkerDied] * 2
        assert "ended with exit code 7; the group's 2 workers all died" in str(states[0]["error"])
        assert (states[0]["reward"], states[0]["stop_condition"]) == (None, "has_error")
        (after,) = await env.run_group([{"prompt": "q"}], endpoint.url, "m")
        assert after["error"] is None


async def test_a_blocked_event_loop_is_measured_and_in_the_end_a_death(endpoint):
    async with WorkerPool(WorkerSpec("troubled"), 1, max_attempts=1, blocked_s=0.6) as pool:
        env = WorkerEnvironment(pool)
        (state,) = await env.run_group([{"prompt": "q", "info": {"trouble": "block"}}], endpoint.url, "m")
        assert "event loop blocked for 0.6 s" in str(state["error"])


async def test_a_stopped_process_is_silent_and_replaced(endpoint):
    endpoint.answers.clear()
    async with WorkerPool(WorkerSpec("troubled"), 1, silence_s=1.2, first_wait_s=0.01) as pool:
        group = asyncio.create_task(WorkerEnvironment(pool).run_group([{"prompt": "q"}], endpoint.url, "m"))
        await endpoint.until_asked(1)
        os.kill(pool.stats[0].pid, signal.SIGSTOP)
        await endpoint.until_asked(2)
        endpoint.answers.set()
        assert (await group)[0]["error"] is None
        assert pool.num_deaths == 1


async def test_a_worker_ends_with_the_process_that_started_it(endpoint):
    code = "from mettle.envs.workers.spawn import *; import os; print(Spawned(WorkerSpec('troubled')).pid, flush=True); os.kill(os.getpid(), 9)"
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout)
    await until(lambda: not is_alive(pid))


async def test_a_cancelled_group_is_cancelled_in_its_worker_too(endpoint):
    endpoint.answers.clear()
    async with WorkerPool(WorkerSpec("troubled"), 1) as pool:
        group = asyncio.create_task(WorkerEnvironment(pool).run_group([{"prompt": "q"}], endpoint.url, "m"))
        await endpoint.until_asked(1)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        await until(lambda: pool._workers[0]._beat.get("num_running") == 0)
        assert pool.stats[0].num_running == 0


@pytest.mark.parametrize(
    ("trouble", "kind", "chain"),
    [("raise", vf.SandboxError, "SandboxError"), ("own", vf.Error, "EnvironmentFault -> KeyError")],
)
async def test_an_error_keeps_its_class_its_boundary_and_its_causes(endpoint, trouble, kind, chain):
    async with WorkerPool(WorkerSpec("troubled"), 1) as pool:
        row = {"prompt": "q", "info": {"trouble": trouble}}
        (state,) = await WorkerEnvironment(pool).run_group([row], endpoint.url, "m")
    assert isinstance(state["error"], kind)
    assert (str(vf.ErrorChain(state["error"])), state["reward"]) == (chain, None)
    assert "in a worker process" in state["error"].__notes__[0]


async def test_settings_reach_the_workers_that_are_there_and_those_to_come(endpoint):
    async with WorkerPool(WorkerSpec("troubled"), 1, first_wait_s=0.01) as pool:
        await pool.set(max_turns=1)
        env = WorkerEnvironment(pool)
        (state,) = await env.run_group([{"prompt": "q"}], endpoint.url, "m")
        os.kill(state["pid"], signal.SIGKILL)
        (again,) = await env.run_group([{"prompt": "q"}], endpoint.url, "m")
    assert len(state["trajectory"]) == len(again["trajectory"]) == 1
    assert state["pid"] != again["pid"]


def test_rows_and_facts_come_from_a_worker_without_an_event_loop():
    pool = WorkerPool(WorkerSpec("troubled", {"num_rows": 2500}), 1)
    env = WorkerEnvironment(pool)
    rows = env.get_dataset()
    assert isinstance(rows, Rows)
    assert (len(rows), rows[2499]["example_id"], rows[2499]["answer"]) == (2500, 2499, "fine")
    assert (env.env_version, env.timeout_seconds, env.requires_group_rollouts) == ("0.3.0", None, False)
    assert "troubled" not in sys.modules
    pid = pool._first.pid
    asyncio.run(env.teardown())
    assert not is_alive(pid)


def test_what_cannot_work_is_said_before_anything_starts():
    with pytest.raises(UserError, match=r"cannot be loaded: .*no-such-env"):
        Spawned(WorkerSpec("no-such-env"))
    with pytest.raises(UserError, match="cannot be loaded: failed to load environment 'troubled': ValueError: bad"):
        Spawned(WorkerSpec("troubled", {"fails": "bad"}))
    with pytest.raises(WorkerDied, match="ended with exit code 3 while it loaded"):
        Spawned(WorkerSpec("troubled", {"fails": "exit"}))
    with pytest.raises(UserError, match="made in code and has none"):
        worker_spec(vf.SingleTurnEnv(dataset=[{"question": "q"}]))
    with pytest.raises(UserError, match="cannot take over a object"):
        client_spec(object())
    odd = WorkerPool(WorkerSpec("troubled", {"trouble": "odd rows"}), 1)
    with pytest.raises(
        UserError, match=r"train rows of .* cannot come from a worker process: TypeError.*`workers = 0`"
    ):
        odd.rows("train")
    asyncio.run(odd.close())


async def test_a_pool_that_cannot_start_says_so_to_whoever_waits(endpoint):
    async with WorkerPool(WorkerSpec("troubled"), 1, first_wait_s=0.001) as pool:
        pool.spec = WorkerSpec("troubled", {"fails": "bad"})
        os.kill(pool.stats[0].pid, signal.SIGKILL)
        (state,) = await WorkerEnvironment(pool).run_group([{"prompt": "q"}], endpoint.url, "m")
    assert "no worker for troubled can be started" in str(state["error"])


@pytest.mark.parametrize("given", ["https://api.anthropic.com", ClientConfig(api_base_url="https://api.anthropic.com")])
def test_a_client_is_described_by_its_kind_and_without_its_key(monkeypatch, given):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-secret")
    spec = client_spec(AnthropicMessagesClient(given))
    assert spec["config"]["client_type"] == "anthropic_messages"
    assert "sk-secret" not in repr(spec)
    assert isinstance(ClientCache().client(spec), AnthropicMessagesClient)
    assert client_spec(OpenAIResponsesClient("http://127.0.0.1:1/v1"))["config"]["client_type"] == "openai_responses"
