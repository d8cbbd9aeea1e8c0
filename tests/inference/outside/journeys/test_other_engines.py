"""Workers from outside beside engines that sample elsewhere: behind ready files, as a cluster's, and in vLLM.

The auditor is the embedded engine whatever the run's own is, so an honest answer counts and a wrong one bans.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from houses import PROMPT, OpenHouse
from served import KEYS, served

from mettle.clients.renderer import Renderer
from mettle.inference.config import InferenceConfig, RemoteServers, VllmSettings
from mettle.inference.engine.embedded import start_engine
from mettle.inference.engine.protocol import Choice, GenerationRequest
from mettle.processes.child import import_path
from mettle.records.sampling import SamplingParams

STAND_IN = Path(__file__).parents[2] / "vllm" / "stand_in"
SETTINGS = {"max_slots": 16, "seed": 0, "num_threads": 1}


@pytest.fixture(params=["behind ready files", "vllm"])
async def house(
    request: pytest.FixtureRequest, policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[OpenHouse]:
    async with AsyncExitStack() as stack:
        if request.param == "vllm":
            environment = {"PYTHONPATH": os.pathsep.join([str(STAND_IN), import_path()])}
            vllm = VllmSettings(python=Path(sys.executable), environment=environment)
            config = InferenceConfig(model=policy_folder, engine="vllm", vllm=vllm, max_slots=16, seed=0)
        else:
            monkeypatch.setenv("METTLE_REMOTE_ADMIN_KEY", KEYS.admin)
            monkeypatch.setenv("METTLE_REMOTE_API_KEY", KEYS.api)
            remote = RemoteServers(ready_files=tuple(tmp_path / f"replica-{number}.json" for number in range(2)))
            renderer = Renderer.from_directory(policy_folder)
            for path in remote.ready_files:
                engine = start_engine(InferenceConfig(model=policy_folder, **SETTINGS))
                stack.callback(engine.close)
                url = await asyncio.to_thread(stack.enter_context, served(engine, renderer))
                path.write_text(json.dumps({"base_url": url}))
            config = InferenceConfig(model=policy_folder, engine="remote", remote=remote, **SETTINGS)
        opened = await OpenHouse.beside(config, tmp_path / "outside")
        stack.push_async_callback(opened.close)
        yield opened


async def test_an_honest_worker_counts_and_serves_what_is_served(
    house: OpenHouse, versions: Path, tmp_path: Path
) -> None:
    working = house.worker(tmp_path / "ann")
    await house.served(working)
    first = await house.ask()
    await asyncio.to_thread(house.engine.update_weights, versions / "v2", 2)
    house.named()[0].room = 0
    await house.served(working)
    second = await house.ask()
    assert [set(choice.versions) for choice in (*first.choices, *second.choices)] == [{0}, {0}, {2}, {2}]
    (ann,) = house.named()
    assert (ann.taken, ann.sampled, ann.checked, ann.refused) == (4, 4, 4, 0)


async def test_a_liar_is_banned_at_its_first_answer_and_the_own_engine_answers(
    house: OpenHouse, tmp_path: Path
) -> None:
    async def lie(request: GenerationRequest) -> list[Choice]:
        honest = await working.sampled(request)
        return [Choice(c.index, [*c.token_ids[:-1], PROMPT[0]], c.logprobs, finish_reason="length") for c in honest]

    working = house.worker(tmp_path / "ann", sample=lie)
    await house.served(working)
    found = await house.bridge.generate(GenerationRequest("r", PROMPT, SamplingParams(max_tokens=6), n=2, seeds=(5, 6)))
    assert all("worker" not in choice.replica for choice in found.choices)
    (ann,) = house.named()
    assert (ann.state, ann.refused) == ("banned", 2)
