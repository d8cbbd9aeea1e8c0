"""An honest worker's work is used, and is what the run's own engine would have sampled."""

import asyncio
import dataclasses
from pathlib import Path

from houses import PROMPT, OpenHouse

from mettle.inference.engine.protocol import Choice, GenerationRequest
from mettle.records.sampling import SamplingParams


async def test_what_a_worker_samples_is_what_the_own_engine_samples(house: OpenHouse, tmp_path: Path) -> None:
    alone = await house.ask()
    working = house.worker(tmp_path / "ann")
    await house.served(working)
    house.num_requests = 0
    outside = await house.ask()
    assert [choice.token_ids for choice in outside.choices] == [choice.token_ids for choice in alone.choices]
    (ann,) = house.named()
    assert (ann.taken, ann.sampled, ann.checked, ann.refused) == (2, 2, 2, 0)


async def test_a_new_version_is_fetched_before_anything_is_sampled_under_it(
    house: OpenHouse, versions: Path, tmp_path: Path
) -> None:
    working = house.worker(tmp_path / "ann")
    await house.served(working)
    await asyncio.to_thread(house.engine.update_weights, versions / "v2", 2)
    house.named()[0].room = 0
    await house.served(working)
    found = await house.ask()
    assert all(set(choice.versions) == {2} for choice in found.choices)
    assert house.named()[0].sampled == 2
    assert (tmp_path / "ann" / "weights" / "v2" / "manifest.json").exists()


async def test_what_needs_the_own_engine_stays_there(house: OpenHouse, tmp_path: Path) -> None:
    working = house.worker(tmp_path / "ann")
    await house.served(working)
    await house.ask(top_p=0.5)
    scored = GenerationRequest("s", PROMPT, SamplingParams(max_tokens=0), prompt_logprobs=True)
    await house.bridge.generate(scored)
    assert house.named()[0].taken == 0


async def test_the_likeliest_tokens_are_an_answer_that_is_checked_without_a_seed(
    house: OpenHouse, tmp_path: Path
) -> None:
    alone = await house.ask(temperature=0.0)
    working = house.worker(tmp_path / "ann")
    await house.served(working)
    outside = await house.ask(temperature=0.0)
    assert [choice.token_ids for choice in outside.choices] == [choice.token_ids for choice in alone.choices]
    (ann,) = house.named()
    assert (ann.sampled, ann.checked, ann.refused) == (2, 2, 0)


async def test_who_draws_where_the_likeliest_token_is_wanted_is_banned(house: OpenHouse, tmp_path: Path) -> None:
    async def draw(request: GenerationRequest) -> list[Choice]:
        params = dataclasses.replace(request.params, temperature=1.0)
        return await working.sampled(dataclasses.replace(request, params=params))

    working = house.worker(tmp_path / "ann", sample=draw)
    await house.served(working)
    found = await house.ask(temperature=0.0)
    assert {choice.replica for choice in found.choices} == {""}
    (ann,) = house.named()
    assert (ann.state, ann.refused) == ("banned", 2)
    assert "tokens are not those that the seed draws" in ann.reason


async def test_who_waits_for_work_is_woken_by_a_new_version(house: OpenHouse, versions: Path) -> None:
    woken = asyncio.Event()
    loop = asyncio.get_running_loop()
    end = house.engine.wake_with(lambda: loop.call_soon_threadsafe(woken.set))
    await asyncio.to_thread(house.engine.update_weights, versions / "v1", 1)
    await woken.wait()
    end()
