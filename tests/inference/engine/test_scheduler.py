"""Continuous batching: who is in the batch changes nothing for a seeded request, and everybody is served."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_families import CONFIGS
from policies import END, make_model, picked_logprobs, tiny_config
from schedulers import CPU, Heard, ask, make_scheduler, sampled

from mettle.errors import ServiceError
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.local import run_requests
from mettle.inference.engine.matrices import Matrix
from mettle.inference.engine.protocol import Generation, GenerationRequest, RequestRefused
from mettle.inference.engine.scheduler import Scheduler
from mettle.inference.engine.weights import fuse
from mettle.records.sampling import SamplingParams

prompts = st.lists(st.integers(0, 255), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=prompts, others=st.lists(st.tuples(prompts, st.integers(1, 3), st.integers(1, 9)), max_size=5))
def test_company_in_the_batch_does_not_change_a_seeded_request(
    model: Any, prompt: list[int], others: list[tuple[list[int], int, int]]
) -> None:
    mine = ask("mine", prompt, n=2, seed=7, ignore_eos=True)
    (alone,) = run_requests(make_scheduler(model), [mine])
    company = [ask(str(i), p, n=n, max_tokens=m) for i, (p, n, m) in enumerate(others)]
    together = run_requests(make_scheduler(model), [*company, mine])[-1]
    for ours, theirs in zip(alone.choices, together.choices, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == theirs.logprobs


def test_what_waits_is_served_when_everything_that_runs_ends_at_once(model: Any) -> None:
    full = [ask(str(i), [i], n=n, max_tokens=3, ignore_eos=True) for i, n in enumerate((1, 3, 3))]
    served = run_requests(make_scheduler(model), [*full, ask("last", [5], n=2, ignore_eos=True)])
    assert [generation.request_id for generation in served] == ["0", "1", "2", "last"]


def test_choices_of_a_seeded_request_differ_and_repeat(model: Any) -> None:
    request = ask("a", [1, 2, 3], n=4, seed=3, ignore_eos=True)
    first = run_requests(make_scheduler(model), [request])[0]
    second = run_requests(make_scheduler(model, seed=99), [request])[0]
    assert [c.token_ids for c in first.choices] == [c.token_ids for c in second.choices]
    assert len({tuple(c.token_ids) for c in first.choices}) == 4


def test_a_groups_prompt_is_computed_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    original = Decoder.prefill
    monkeypatch.setattr(
        Decoder, "prefill", lambda self, ids, *more: shapes.append(tuple(ids.shape)) or original(self, ids, *more)
    )
    run_requests(make_scheduler(model), [ask("a", [1, 2, 3], n=4), ask("b", [1, 2, 3], n=2), ask("c", [9])])
    assert shapes == [(2, 3)]


def test_requests_join_between_steps_and_slots_are_reused(model: Any) -> None:
    scheduler, heard = make_scheduler(model, max_slots=4), Heard()
    for i in range(12):
        scheduler.add(ask(str(i), [i + 1] * (i + 1), max_tokens=2 + 3 * i, ignore_eos=True), heard)
        scheduler.step()
        assert scheduler.num_running <= 4
    while scheduler.step():
        pass
    assert sorted(g.request_id for g in heard.generations) == sorted(str(i) for i in range(12))
    for generation in heard.generations:
        i, choice = int(generation.request_id), generation.choices[0]
        assert (len(choice.token_ids), choice.finish_reason) == (2 + 3 * i, "length")
        expected = picked_logprobs(model, [*([i + 1] * (i + 1)), *choice.token_ids])[i:]
        assert torch.allclose(expected, torch.tensor(choice.logprobs), atol=1e-4)


def test_prompts_beyond_the_prefill_budget_take_turns(model: Any) -> None:
    scheduler = make_scheduler(model, max_prefill_tokens=10)
    requests = [ask(str(i), [i + 1] * 6, max_tokens=3, ignore_eos=True) for i in range(3)]
    requests.append(ask("long", [1] * 50, max_tokens=3, ignore_eos=True))
    for request, generation in zip(requests, run_requests(scheduler, requests), strict=True):
        ids = [*request.prompt_ids, *generation.choices[0].token_ids]
        expected = picked_logprobs(model, ids)[len(request.prompt_ids) - 1 :]
        assert torch.allclose(expected, torch.tensor(generation.choices[0].logprobs), atol=1e-4)


def test_an_end_token_ends_and_is_part_of_the_completion(model: Any) -> None:
    generation = run_requests(make_scheduler(model, eos_token_ids=range(264)), [ask("a", [1], n=2)])[0]
    assert [(len(c.token_ids), c.finish_reason) for c in generation.choices] == [(1, "stop")] * 2
    ignoring = run_requests(make_scheduler(model, eos_token_ids=range(264)), [ask("a", [1], ignore_eos=True)])[0]
    assert (len(ignoring.choices[0].token_ids), ignoring.choices[0].finish_reason) == (8, "length")


def test_a_requests_own_stop_tokens_hold_even_when_eos_is_ignored(model: Any) -> None:
    request = ask("a", [1], ignore_eos=True, stop_token_ids=tuple(range(264)))
    assert run_requests(make_scheduler(model, eos_token_ids=[END]), [request])[0].choices[0].finish_reason == "stop"


def test_a_stop_string_across_tokens_ends_the_choice(model: Any) -> None:
    text = "".join
    scheduler = make_scheduler(model, decode_text=lambda ids: text(chr(0x100 + i) for i in ids))
    plain = run_requests(scheduler, [ask("a", [1], seed=1, ignore_eos=True, max_tokens=12)])[0].choices[0]
    stop = "".join(chr(0x100 + i) for i in plain.token_ids[4:6])
    stopped = run_requests(scheduler, [ask("b", [1], seed=1, ignore_eos=True, max_tokens=12, stop=(stop,))])[0]
    assert stopped.choices[0].token_ids == plain.token_ids[:6]
    assert (stopped.choices[0].finish_reason, stopped.choices[0].stop) == ("stop", stop)


def test_prompt_logprobs_and_scoring_without_sampling(model: Any) -> None:
    prompt = [4, 8, 15, 16, 23, 42]
    request = GenerationRequest("a", prompt, SamplingParams(max_tokens=0), prompt_logprobs=True)
    scheduler = make_scheduler(model)
    (generation,) = run_requests(scheduler, [request])
    assert generation.prompt_logprobs is not None
    assert generation.prompt_logprobs[0] is None
    found = torch.tensor([v for v in generation.prompt_logprobs if v is not None])
    assert torch.allclose(found, picked_logprobs(model, prompt), atol=1e-4)
    assert (generation.choices[0].token_ids, generation.choices[0].finish_reason) == ([], "length")


@pytest.mark.parametrize("top", [0, 1, 2])
def test_a_prompts_tokens_have_as_many_alternatives_as_are_wanted(model: Any, top: int) -> None:
    prompt = [4, 8, 15, 16, 23]
    request = GenerationRequest("a", prompt, SamplingParams(max_tokens=0), prompt_logprobs=True, top_logprobs=top)
    beside = GenerationRequest("b", prompt, SamplingParams(max_tokens=0), prompt_logprobs=True, top_logprobs=3)
    scheduler = make_scheduler(model)
    found, more = run_requests(scheduler, [request, beside])
    assert more.prompt_top_logprobs is not None
    assert [len(one) for one in more.prompt_top_logprobs] == [0, 3, 3, 3, 3]
    expected = None if top == 0 else [one[:top] for one in more.prompt_top_logprobs]
    assert found.prompt_top_logprobs == expected


def test_the_experts_of_a_token_are_those_that_its_last_position_took() -> None:
    scheduler = make_scheduler(make_model(CONFIGS["qwen3_moe"]))
    scheduler.limits = replace(scheduler.limits, is_recording_experts=True)
    prompt = [4, 8, 15]
    (whole,) = run_requests(scheduler, [ask("a", prompt, n=2, seed=1, max_tokens=5, ignore_eos=True)])
    for choice in whole.choices:
        assert len(choice.experts) == 5
        told = [ask(str(i), [*prompt, *choice.token_ids[:i]], max_tokens=1) for i in range(5)]
        for taken, alone in zip(choice.experts, run_requests(scheduler, told), strict=True):
            assert taken.tolist() == alone.choices[0].experts[0].tolist()


def test_top_logprobs_come_with_every_token(model: Any) -> None:
    request = GenerationRequest(
        "a", [1, 2], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True), top_logprobs=3
    )
    choice = run_requests(make_scheduler(model), [request])[0].choices[0]
    assert [len(top) for top in choice.top_logprobs] == [3] * 4
    assert [top[0].token_id for top in choice.top_logprobs] == choice.token_ids


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_a_support_of_one_token_is_greedy(model: Any, limit: dict[str, float]) -> None:
    greedy = run_requests(make_scheduler(model), [ask("a", [1, 2], temperature=0.0, ignore_eos=True)])[0]
    cut = run_requests(make_scheduler(model), [ask("a", [1, 2], ignore_eos=True, **limit)])[0]
    assert cut.choices[0].token_ids == greedy.choices[0].token_ids
    assert cut.choices[0].logprobs == [0.0] * 8


def test_rows_with_different_sampling_share_a_batch(model: Any) -> None:
    requests = [
        ask("greedy", [1, 2], temperature=0.0, ignore_eos=True),
        ask("cold", [1, 2], temperature=0.5, seed=1, ignore_eos=True),
        ask("cut", [1, 2], top_k=2, seed=1, ignore_eos=True),
        ask("plain", [1, 2], seed=1, ignore_eos=True),
    ]
    together = run_requests(make_scheduler(model), requests)
    for request, generation in zip(requests, together, strict=True):
        alone = run_requests(make_scheduler(model), [request])[0]
        assert generation.choices[0].token_ids == alone.choices[0].token_ids


def test_an_abort_keeps_what_was_sampled_and_frees_the_slot(model: Any) -> None:
    scheduler, heard = make_scheduler(model, max_slots=2), Heard()
    scheduler.add(ask("a", [1], max_tokens=50, ignore_eos=True), heard)
    scheduler.add(ask("b", [2], max_tokens=50, ignore_eos=True), heard)
    scheduler.add(ask("c", [3], max_tokens=5, ignore_eos=True), heard)
    for _ in range(3):
        scheduler.step()
    scheduler.abort("a")
    scheduler.abort("nobody")
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    while scheduler.step():
        pass
    assert {g.request_id: (g.choices[0].finish_reason, len(g.choices[0].token_ids)) for g in heard.generations} == {
        "a": ("abort", 4),
        "b": ("length", 50),
        "c": ("length", 5),
    }
    for generation, prompt in zip(sorted(heard.generations, key=lambda g: g.request_id), [1, 2, 3], strict=True):
        choice = generation.choices[0]
        expected = picked_logprobs(model, [prompt, *choice.token_ids])
        assert torch.allclose(expected, torch.tensor(choice.logprobs), atol=1e-4)


def test_a_swap_under_running_requests_keeps_their_kv_and_marks_their_tokens(model: Any, other_model: Any) -> None:
    scheduler, heard = make_scheduler(model), Heard()
    prompt = [3, 1, 4]
    scheduler.add(ask("a", prompt, n=2, max_tokens=12, ignore_eos=True), heard)
    for _ in range(5):
        scheduler.step()
    shape = scheduler.decoder.shape
    fused = fuse(shape, other_model.state_dict(), CPU, torch.float32)
    scheduler.swap(scheduler.decoder.with_weights(fused), 1)
    while scheduler.step():
        pass
    for choice in heard.generations[0].choices:
        assert choice.versions == [0] * 6 + [1] * 6
        replayed = replay(model, other_model, prompt, choice.token_ids, choice.versions)
        assert torch.allclose(replayed, torch.tensor(choice.logprobs), atol=1e-4)
        one_version = picked_logprobs(other_model, [*prompt, *choice.token_ids])[len(prompt) + 5 :]
        assert not torch.allclose(one_version, torch.tensor(choice.logprobs[6:]), atol=1e-2)


def replay(model: Any, other: Any, prompt: list[int], token_ids: list[int], versions: list[int]) -> torch.Tensor:
    """Token by token through transformers, each under its version's weights over the keys and values left so far."""
    found = []
    with torch.no_grad():
        output = model(torch.tensor([prompt]), use_cache=True)
        for position, token_id in enumerate(token_ids):
            found.append(torch.log_softmax(output.logits[0, -1], -1)[token_id])
            if position + 1 < len(token_ids):
                current = (model, other)[versions[position + 1]]
                output = current(torch.tensor([[token_id]]), past_key_values=output.past_key_values, use_cache=True)
    return torch.stack(found)


def test_weights_that_give_nan_fail_the_request_and_do_not_poison_the_slot(model: Any) -> None:
    scheduler, heard = make_scheduler(model), Heard()
    good = scheduler.decoder
    weights = fuse(good.shape, model.state_dict(), CPU, torch.float32)
    broken = replace(weights.layers[0], qkv=Matrix(torch.full(weights.layers[0].qkv.shape, torch.nan)))
    scheduler.swap(good.with_weights(replace(weights, layers=(broken, *weights.layers[1:]))), 1)
    scheduler.add(ask("a", [1] * 40, n=3), heard)
    while scheduler.step():
        pass
    assert [type(error) for error in heard.errors] == [ServiceError]
    assert (scheduler.num_running, len(scheduler.memory.prefixes)) == (0, 0)
    scheduler.swap(good, 2)
    (generation,) = run_requests(scheduler, [ask("b", [1, 2], n=3, ignore_eos=True)])
    for choice in generation.choices:
        expected = picked_logprobs(model, [1, 2, *choice.token_ids])[1:]
        assert torch.allclose(expected, torch.tensor(choice.logprobs), atol=1e-4)


@pytest.mark.parametrize(
    ("request_", "parameter", "code"),
    [
        (ask("a", []), "prompt_ids", None),
        (ask("a", [264]), "prompt_ids", None),
        (ask("a", [-1]), "prompt_ids", None),
        (ask("a", [1] * 200), "prompt_ids", "context_length_exceeded"),
        (ask("a", [1], n=9), "n", None),
        (ask("a", [1], stop=("x",)), "stop", None),
    ],
)
def test_what_can_never_run_is_refused(
    model: Any, request_: GenerationRequest, parameter: str, code: str | None
) -> None:
    with pytest.raises(RequestRefused) as caught:
        make_scheduler(model).check(request_)
    assert (caught.value.parameter, caught.value.code) == (parameter, code)


def test_a_completion_ends_where_the_context_does(model: Any) -> None:
    (generation,) = run_requests(
        make_scheduler(model), [GenerationRequest("a", [1] * 190, SamplingParams(ignore_eos=True))]
    )
    assert (len(generation.choices[0].token_ids), generation.choices[0].finish_reason) == (10, "length")


def test_token_events_tell_the_same_story_as_the_generation(model: Any) -> None:
    scheduler, heard = make_scheduler(model), Heard()
    request = GenerationRequest("a", [1], SamplingParams(max_tokens=5, ignore_eos=True), n=2, has_token_events=True)
    scheduler.add(request, heard)
    while scheduler.step():
        pass
    for choice in heard.generations[0].choices:
        mine = [event for event in heard.events if event.choice == choice.index]
        assert [event.token_id for event in mine] == choice.token_ids
        assert [event.finish_reason for event in mine] == [None] * 4 + ["length"]


def test_bfloat16_samples_near_float32(model: Any) -> None:
    requests = [ask("a", [1, 2, 3], n=4, max_tokens=20, ignore_eos=True), ask("b", [5], max_tokens=9, ignore_eos=True)]
    for request, generation in zip(
        requests, run_requests(make_scheduler(model, dtype=torch.bfloat16), requests), strict=True
    ):
        for choice in generation.choices:
            expected = picked_logprobs(model, [*request.prompt_ids, *choice.token_ids])[len(request.prompt_ids) - 1 :]
            difference = (expected - torch.tensor(choice.logprobs)).abs().mean()
            assert 0 < difference < 0.1


def test_short_and_long_sequences_have_slots_of_their_lengths() -> None:
    model = make_model(tiny_config(max_position_embeddings=600))
    scheduler = make_scheduler(model, max_slots=40, max_model_len=600)
    assert scheduler.memory.slots.num_bytes == 0
    requests = [ask(str(i), [i + 1], max_tokens=10, ignore_eos=True) for i in range(39)]
    requests.append(ask("long", [7] * 300, max_tokens=10, ignore_eos=True))
    for request, generation in zip(requests, run_requests(scheduler, requests), strict=True):
        ids = [*request.prompt_ids, *generation.choices[0].token_ids]
        expected = picked_logprobs(model, ids)[len(request.prompt_ids) - 1 :]
        assert torch.allclose(expected, torch.tensor(generation.choices[0].logprobs), atol=1e-4)
    backed = sum(one.num_bytes for one in scheduler.memory.slots.classes)
    assert backed == (39 * 128 + 320) * scheduler.memory.sizes.token_bytes


def test_what_was_done_is_counted(model: Any) -> None:
    scheduler, heard = make_scheduler(model), Heard()
    scheduler.add(ask("a", [1, 2, 3], n=2, max_tokens=4, ignore_eos=True), heard)
    scheduler.add(ask("b", [5], max_tokens=2, ignore_eos=True), heard)
    assert (scheduler.num_waiting, scheduler.num_running) == (3, 0)
    scheduler.add(ask("gone", [6, 7]), heard)
    scheduler.abort("gone")
    steps = 1
    while scheduler.step():
        steps += 1
    totals = scheduler.totals
    assert (totals.prompt_tokens, totals.sampled_tokens) == (4, 2 * 4 + 2)
    assert (totals.prefix_hit_tokens, totals.preempted, scheduler.memory.promised) == (0, 0, 0)
    assert (totals.requests, totals.aborted, totals.steps) == (3, 1, steps)
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["waits", "a prompt of several", "samples"])
def test_who_hears_of_an_abort_finds_all_given_back(model: Any, steps: int) -> None:
    found = []

    class Looks(Heard):
        def on_finish(self, generation: Generation) -> None:
            super().on_finish(generation)
            found.append((scheduler.num_running, scheduler.num_waiting, scheduler.has_begun))

    scheduler, heard = make_scheduler(model, max_prefill_tokens=4), Looks()
    scheduler.add(ask("r", [1, 2, 3, 4, 5, 6], n=2, max_tokens=100, ignore_eos=True), heard)
    for _ in range(steps):
        scheduler.step()
    scheduler.abort("r")
    assert found == [(0, 0, False)]
    assert [choice.finish_reason for choice in heard.generations[0].choices] == ["abort"] * 2


def test_an_abort_while_a_prompt_is_computed_gives_back_what_was_set_aside(model: Any) -> None:
    scheduler, heard = make_scheduler(model, max_prefill_tokens=10), Heard()
    scheduler.add(ask("a", [1] * 50), heard)
    scheduler.step()
    assert (scheduler.num_running, scheduler.memory.promised > 0) == (1, True)
    scheduler.abort("a")
    assert (scheduler.num_running, scheduler.memory.promised) == (0, 0)
    assert heard.generations[0].choices[0].token_ids == []
    assert not scheduler.step()


def admitted(scheduler: Scheduler, *requests: GenerationRequest) -> int:
    """Sequences that run after the first step."""
    for request in requests:
        scheduler.add(request, Heard())
    scheduler.step()
    return scheduler.num_running


@pytest.mark.parametrize(("counts", "running"), [((4, 4), 8), ((4, 5), 4), ((8,), 8), ((3, 3, 3), 6), ((7, 2, 1), 7)])
def test_as_many_are_admitted_as_there_are_slots_and_nobody_overtakes(
    model: Any, counts: tuple[int, ...], running: int
) -> None:
    requests = [ask(str(i), [i + 1], n=n, max_tokens=9, ignore_eos=True) for i, n in enumerate(counts)]
    assert admitted(make_scheduler(model), *requests) == running


@pytest.mark.parametrize(
    ("prompts", "running"),
    [
        ([[1] * 5, [2] * 5], 2),
        ([[1] * 5, [2] * 6], 1),
        ([[1] * 10, [2]], 1),
        ([[1] * 50, [2]], 1),
        ([[1] * 5, [1] * 5, [1] * 5, [2] * 5], 4),
        ([[1] * 5, [2] * 5, [3]], 2),
    ],
)
def test_new_prompts_keep_to_the_tokens_of_a_prefill_and_equal_ones_count_once(
    model: Any, prompts: list[list[int]], running: int
) -> None:
    requests = [ask(str(i), prompt, max_tokens=9, ignore_eos=True) for i, prompt in enumerate(prompts)]
    assert admitted(make_scheduler(model, max_prefill_tokens=10), *requests) == running


def test_a_step_says_whether_there_is_more_to_do(model: Any) -> None:
    scheduler, heard = make_scheduler(model, max_slots=1), Heard()
    assert not scheduler.step()
    for name in ("a", "b"):
        scheduler.add(ask(name, [1], max_tokens=2, ignore_eos=True), heard)
    assert not scheduler.step(is_admitting=False)
    assert scheduler.num_waiting == 2
    assert scheduler.step()
    assert scheduler.num_waiting == 1
    assert not scheduler.step(is_admitting=False), "what waits does not count"
    assert not scheduler.step(), "it computed the prompt, sampled both tokens, and nothing is left"
    assert [generation.request_id for generation in heard.generations] == ["a", "b"]


def test_everything_can_be_ended_or_failed_at_once(model: Any) -> None:
    scheduler, heard = make_scheduler(model, max_slots=2), Heard()
    for i in range(4):
        scheduler.add(ask(str(i), [i + 1], max_tokens=50, ignore_eos=True), heard)
    scheduler.step()
    scheduler.abort_all()
    assert sorted(g.request_id for g in heard.generations) == ["0", "1", "2", "3"]
    assert scheduler.totals.aborted == 4
    assert [len(g.choices[0].token_ids) for g in heard.generations] == [2, 2, 0, 0]
    for i in range(4):
        scheduler.add(ask(str(i), [i + 1], max_tokens=50, ignore_eos=True), heard)
    scheduler.step()
    scheduler.fail_all(ServiceError("the engine is gone"))
    assert len(heard.errors) == 4
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert not scheduler.step()


def test_weights_of_another_shape_are_no_swap(model: Any) -> None:
    other = make_scheduler(make_model(tiny_config(num_hidden_layers=1)))
    with pytest.raises(AssertionError, match="a swap keeps the model's shape"):
        make_scheduler(model).swap(other.decoder, 1)


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 100])
def test_a_long_prompt_is_scored_in_parts_that_make_the_whole(
    model: Any, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr("mettle.inference.engine.prompts._LOGIT_ROWS", rows)
    prompt = [4, 8, 15, 16, 23, 42]
    request = GenerationRequest("a", prompt, SamplingParams(max_tokens=0), prompt_logprobs=True)
    (generation,) = run_requests(make_scheduler(model), [request])
    assert generation.prompt_logprobs is not None
    found = torch.tensor([v for v in generation.prompt_logprobs if v is not None])
    assert torch.allclose(found, picked_logprobs(model, prompt), atol=1e-4)
    single = GenerationRequest("b", [7], SamplingParams(max_tokens=0), prompt_logprobs=True)
    assert run_requests(make_scheduler(model), [single])[0].prompt_logprobs == [None]


def test_seeds_of_their_own_take_the_place_of_one_seed(model: Any) -> None:
    def tokens(request: GenerationRequest) -> list[list[int]]:
        return [c.token_ids for c in run_requests(make_scheduler(model), [request])[0].choices]

    params = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    together = tokens(GenerationRequest("a", [1, 2], params, 2, seeds=(11, 12)))
    alone = [tokens(ask(str(seed), [1, 2], seed=seed, ignore_eos=True))[0] for seed in (11, 12)]
    assert together == alone


def computed_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the rows that each step of decoding computes."""
    rows: list[int] = []
    original = Decoder.decode

    def decode(self: Decoder, *given: Any) -> Any:
        found = original(self, *given)
        rows.append(len(found))
        return found

    monkeypatch.setattr(Decoder, "decode", decode)
    return rows


@pytest.mark.parametrize("temperature", [0.01, 0.05, 1.0])
def test_choices_that_have_said_the_same_so_far_are_computed_once_and_to_the_last_bit(
    model: Any, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    rows = computed_rows(monkeypatch)
    requests = [
        ask(str(i), [i + 1] * 5, n=6, seed=i, max_tokens=20, temperature=temperature, ignore_eos=True) for i in range(3)
    ]
    found = run_requests(make_scheduler(model, max_slots=18), requests)
    alike, rows[:] = list(rows), []
    monkeypatch.setattr("mettle.inference.engine.scheduler.WORTHWHILE", 0.0)
    expected = run_requests(make_scheduler(model, max_slots=18), requests)
    assert [sampled(one) for one in found] == [sampled(one) for one in expected]
    assert set(rows) == {18}
    said = [choice.token_ids for one in found for choice in one.choices]
    kinds = [len({(i // 6, *ids[:length]) for i, ids in enumerate(said)}) for length in range(1, 20)]
    assert alike == [number if number <= 0.75 * 18 else 18 for number in kinds]
    if temperature < 0.1:
        assert min(alike) <= 9


def test_three_kinds_of_four_rows_are_few_enough_to_be_computed_once(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = computed_rows(monkeypatch)
    requests = [ask(str(i), [i + 1] * 5, n=n, temperature=0.0, ignore_eos=True) for i, n in enumerate((2, 1, 1))]
    run_requests(make_scheduler(model), requests)
    assert rows == [3] * 7
