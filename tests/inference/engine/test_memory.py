"""Keys and values live within a budget: what is too much waits or begins again, and nobody fails for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from policies import make_model, tiny_config
from schedulers import CPU, Heard, ask, make_scheduler, sampled

from mettle.errors import UserError
from mettle.inference.engine.local import run_requests
from mettle.inference.engine.protocol import GenerationRequest
from mettle.inference.engine.scheduler import Scheduler
from mettle.inference.engine.weights import fuse

LONG: dict[str, Any] = {"max_slots": 64, "max_model_len": 1000}


@pytest.fixture(scope="module")
def long_model() -> Any:
    return make_model(tiny_config(max_position_embeddings=1024))


def token_bytes(model: Any) -> int:
    return make_scheduler(model).memory.sizes.token_bytes


def run_within(scheduler: Scheduler, requests: list[GenerationRequest]) -> tuple[list[Any], int]:
    """The generations in order, and the most bytes that were ever set aside."""
    heard, most = Heard(), 0
    for request in requests:
        scheduler.add(request, heard)
    while scheduler.step():
        most = max(most, scheduler.memory.used)
        slots = scheduler.memory.slots
        assert slots.num_bytes == sum(one.num_bytes for one in slots.classes)
    assert not heard.errors
    order = {request.request_id: i for i, request in enumerate(requests)}
    return sorted(heard.generations, key=lambda g: order[g.request_id]), most


def test_one_long_prompt_beside_many_short_sequences_stays_within_the_budget(long_model: Any) -> None:
    budget = 2600 * token_bytes(long_model)  # slots for all would take 40 * 128 + 1000 tokens
    requests = [ask(str(i), [i + 1] * 9, max_tokens=30, seed=i, ignore_eos=True) for i in range(40)]
    requests.insert(20, ask("long", [7] * 900, max_tokens=40, seed=99, ignore_eos=True))
    scheduler = make_scheduler(long_model, kv_cache_bytes=budget, **LONG)
    found, most = run_within(scheduler, requests)
    assert most <= budget
    roomy, _ = run_within(make_scheduler(long_model, **LONG), requests)
    assert [sampled(one) for one in found] == [sampled(one) for one in roomy]


def test_what_gives_up_its_memory_goes_on_as_if_it_had_not(long_model: Any) -> None:
    budget = 2100 * token_bytes(long_model)
    requests = [
        ask(str(i), [i + 1] * (60 + 20 * i), n=2, max_tokens=400, seed=i, temperature=0.9, ignore_eos=True)
        for i in range(4)
    ]
    scheduler = make_scheduler(long_model, kv_cache_bytes=budget, **LONG)
    found, most = run_within(scheduler, requests)
    roomy = make_scheduler(long_model, **LONG)
    expected, _ = run_within(roomy, requests)
    assert scheduler.totals.preempted > 0
    assert (most <= budget, roomy.totals.preempted) == (True, 0)
    pairs = [(a, b) for g, h in zip(found, expected, strict=True) for a, b in zip(g.choices, h.choices, strict=True)]
    assert [a.token_ids for a, _ in pairs] == [b.token_ids for _, b in pairs]
    # What was decoded one token at a time is computed again as a prompt: not every processor's products give those bits.
    assert max(float(np.abs(np.subtract(a.logprobs, b.logprobs)).max()) for a, b in pairs) < 1e-5
    assert [c.versions for g in found for c in g.choices] == [[0] * 400] * 8
    assert scheduler.totals.sampled_tokens == roomy.totals.sampled_tokens == 8 * 400
    assert scheduler.totals.prompt_tokens == roomy.totals.prompt_tokens


def test_the_younger_of_two_gives_way_once(long_model: Any) -> None:
    requests = [ask(str(i), [i + 1] * 100, max_tokens=60, seed=i, ignore_eos=True) for i in range(2)]
    # Room for both in slots of 128 tokens, and for one where one has outgrown its slot.
    tight = make_scheduler(long_model, kv_cache_bytes=460 * token_bytes(long_model), max_slots=2, max_model_len=220)
    found, _ = run_within(tight, requests)
    expected, _ = run_within(make_scheduler(long_model, max_slots=2, max_model_len=220), requests)
    assert [one.choices[0].token_ids for one in found] == [one.choices[0].token_ids for one in expected]
    assert (tight.totals.preempted, tight.totals.sampled_tokens) == (1, 120)


def test_choices_that_there_is_no_memory_for_start_later(long_model: Any) -> None:
    budget = 2100 * token_bytes(long_model)
    request = ask("a", [5] * 300, n=12, max_tokens=5, seed=3, ignore_eos=True)
    scheduler = make_scheduler(long_model, kv_cache_bytes=budget, **LONG)
    scheduler.add(request, Heard())
    scheduler.step()
    assert (scheduler.num_running, scheduler.num_waiting) == (5, 7)
    scheduler.abort("a")
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert scheduler.memory.promised == 0
    (found,), _ = run_within(scheduler, [request])
    (roomy,), _ = run_within(make_scheduler(long_model, **LONG), [request])
    assert sampled(found) == sampled(roomy)


def test_a_sequence_that_begins_again_under_new_weights_keeps_what_was_sampled(
    long_model: Any, other_model: Any
) -> None:
    scheduler = make_scheduler(long_model, kv_cache_bytes=2100 * token_bytes(long_model), **LONG)
    heard = Heard()
    for i in range(9):
        scheduler.add(ask(str(i), [i + 1] * 100, max_tokens=200, seed=i, ignore_eos=True), heard)
    while scheduler.num_running < 9:
        scheduler.step()
    scheduler.swap(
        scheduler.decoder.with_weights(fuse(scheduler.decoder.shape, other_model.state_dict(), CPU, torch.float32)), 1
    )
    while scheduler.step():
        pass
    assert scheduler.totals.preempted > 0
    for generation in heard.generations:
        versions = generation.choices[0].versions
        assert len(versions) == 200
        assert versions == sorted(versions)


def test_free_slots_and_old_prefixes_make_room(long_model: Any) -> None:
    budget = 2100 * token_bytes(long_model)
    scheduler = make_scheduler(long_model, kv_cache_bytes=budget, **LONG)
    for i in range(30):
        run_requests(scheduler, [ask(str(i), [i + 1] * 320, max_tokens=2, ignore_eos=True)])
        assert scheduler.memory.used <= budget
    assert scheduler.memory.prefixes.num_bytes > budget / 2


@pytest.mark.parametrize(("tokens", "is_enough"), [(2 * 1024, True), (2 * 1024 - 1, False)])
def test_a_model_of_which_one_sequence_does_not_fit_is_refused(long_model: Any, tokens: int, is_enough: bool) -> None:
    budget = tokens * token_bytes(long_model)
    if is_enough:
        run_within(make_scheduler(long_model, kv_cache_bytes=budget, **LONG), [ask("a", [1] * 990, max_tokens=10)])
        return
    with pytest.raises(UserError, match=r"kv_cache_bytes") as caught:
        make_scheduler(long_model, kv_cache_bytes=budget, **LONG)
    assert "max_model_len 1000 takes 1.0 MB" in str(caught.value)
    assert "max_model_len of at most 1,023" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_budget_is_a_share_of_free_memory_but_no_more_than_could_be_used(
    long_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mettle.inference.engine.memory.free_memory_mb", lambda: 16)
    assert make_scheduler(long_model, **LONG).memory.budget == 4 << 20
    monkeypatch.setattr("mettle.inference.engine.memory.free_memory_mb", lambda: 1 << 20)
    assert make_scheduler(long_model, **LONG).memory.budget == 2 * 65 * 1024 * token_bytes(long_model)


def test_what_goes_through_its_tokens_again_is_computed_by_itself(
    long_model: Any, other_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys and values are those of newer weights, however alike it is to others."""
    requests = [ask(str(i), [i + 1] * 100, n=3, max_tokens=200, temperature=0.0, ignore_eos=True) for i in range(3)]

    def run() -> list[Any]:
        scheduler = make_scheduler(long_model, kv_cache_bytes=2100 * token_bytes(long_model), **LONG)
        heard = Heard()
        for request in requests:
            scheduler.add(request, heard)
        for _ in range(30):
            scheduler.step()
        scheduler.swap(
            scheduler.decoder.with_weights(fuse(scheduler.decoder.shape, other_model.state_dict(), CPU, torch.float32)),
            1,
        )
        while scheduler.step():
            pass
        assert scheduler.totals.preempted > 0
        return sorted((one.request_id, sampled(one)) for one in heard.generations)

    found = run()
    monkeypatch.setattr("mettle.inference.engine.scheduler.WORTHWHILE", 0.0)
    assert found == run()
