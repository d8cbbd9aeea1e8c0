"""Prompts in chunks and from known prefixes: the same bits, less work, and what runs goes on meanwhile."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policies import make_model, picked_logprobs, tiny_config
from schedulers import CPU, Heard, ask, make_scheduler, sampled

from mettle.inference.engine.attention import BLOCK
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.local import run_requests
from mettle.inference.engine.protocol import GenerationRequest, Redraw, RequestRefused
from mettle.inference.engine.weights import fuse
from mettle.records.sampling import SamplingParams

SIZES: dict[str, Any] = {"max_position_embeddings": 1024}
MODELS = {
    "two queries of a kv head": tiny_config(**SIZES),
    "four queries of a kv head": tiny_config(num_attention_heads=4, num_key_value_heads=1, **SIZES),
}


@pytest.fixture(scope="module", params=list(MODELS))
def long_model(request: pytest.FixtureRequest) -> Any:
    return make_model(MODELS[request.param])


def tokens(seed: int, length: int) -> list[int]:
    return [(seed * 37 + i * i * 13 + i * 7) % 256 for i in range(length)]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(1, 300),
    chunk=st.sampled_from([1, 33, 64, 100, 8192]),
    known=st.integers(0, 300),
    others=st.lists(st.integers(1, 200), max_size=3),
)
def test_cuts_known_prefixes_and_company_change_nothing(
    long_model: Any, length: int, chunk: int, known: int, others: list[int]
) -> None:
    mine = ask("mine", tokens(1, length), n=2, seed=5, max_tokens=6, ignore_eos=True)
    (alone,) = run_requests(make_scheduler(long_model, max_model_len=400), [mine])
    scheduler = make_scheduler(long_model, max_model_len=400, max_prefill_tokens=chunk)
    run_requests(scheduler, [ask("before", [*tokens(1, known)[:length], 9], max_tokens=1)])
    company = [ask(str(i), tokens(i, n), max_tokens=9) for i, n in enumerate(others)]
    together = run_requests(scheduler, [*company, mine])[-1]
    assert sampled(together) == sampled(alone)


def test_what_runs_goes_on_while_a_long_prompt_is_computed(long_model: Any) -> None:
    scheduler, heard = make_scheduler(long_model, max_model_len=1000, max_prefill_tokens=64), Heard()
    short = GenerationRequest(
        "short", [1, 2], SamplingParams(max_tokens=50, seed=1, ignore_eos=True), has_token_events=True
    )
    scheduler.add(short, heard)
    scheduler.step()
    scheduler.add(ask("long", tokens(3, 640), max_tokens=2, ignore_eos=True), heard)
    for _ in range(9):
        scheduler.step()
    assert len(heard.events) == 11, "a token a step"
    assert scheduler.num_running == 2
    scheduler.abort("long")
    assert heard.generations[0].choices[0].token_ids == []
    assert (scheduler.num_running, scheduler.memory.promised) == (1, 0)
    while scheduler.step():
        pass
    assert len(heard.events) == 50


@pytest.mark.parametrize("length", [1, 32, 33, 128, 130, 300])
def test_what_follows_a_prompt_is_the_same_whether_its_own_tokens_are_scored(long_model: Any, length: int) -> None:
    """Scoring wants every row of the last layer, sampling the last one alone."""
    plain = ask("plain", tokens(1, length), seed=5, max_tokens=4, ignore_eos=True)
    scored = GenerationRequest("scored", plain.prompt_ids, plain.params, prompt_logprobs=True)
    found = [run_requests(make_scheduler(long_model, max_model_len=400), [one])[0] for one in (plain, scored)]
    assert sampled(found[0]) == sampled(found[1])


def test_log_probabilities_of_a_prompt_in_chunks_are_those_of_the_whole(long_model: Any) -> None:
    request = GenerationRequest("a", tokens(2, 150), SamplingParams(max_tokens=0), prompt_logprobs=True)
    (whole,) = run_requests(make_scheduler(long_model), [request])
    scheduler = make_scheduler(long_model, max_prefill_tokens=32)
    for _ in range(2):  # the second time its prefix is known, and the log-probabilities are wanted all the same
        assert run_requests(scheduler, [request])[0].prompt_logprobs == whole.prompt_logprobs
    assert whole.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == 150


def test_a_turn_computes_only_what_no_prompt_held_before(long_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    original = Decoder.prefill
    monkeypatch.setattr(
        Decoder, "prefill", lambda self, ids, *more: computed.append(ids.numel()) or original(self, ids, *more)
    )
    scheduler = make_scheduler(long_model, max_model_len=1000)
    prompt: list[int] = []
    for turn in range(5):
        prompt += tokens(turn, 90)
        (answer,) = run_requests(scheduler, [ask(str(turn), prompt, max_tokens=40, seed=1, ignore_eos=True)])
        prompt += answer.choices[0].token_ids
    # Turn k begins with turn k - 1's prompt, of which the full pages of 32 tokens are known.
    starts = [0, *((90 + 130 * turn) // 32 * 32 for turn in range(4))]
    assert computed == [90 + 130 * turn - start for turn, start in enumerate(starts)]
    assert scheduler.totals.prefix_hit_tokens == sum(starts)
    assert scheduler.totals.prompt_tokens == sum(90 + 130 * turn for turn in range(5))


def test_where_sampled_tokens_are_reused_a_turn_computes_its_new_ones_alone(long_model: Any) -> None:
    scheduler = make_scheduler(long_model, max_model_len=1000, is_reusing_sampled=True)
    prompt: list[int] = []
    for turn in range(5):
        before, known = scheduler.totals.prefix_hit_tokens, len(prompt)
        prompt += tokens(turn, 90)
        (answer,) = run_requests(scheduler, [ask(str(turn), prompt, max_tokens=41, seed=1, ignore_eos=True)])
        # All but the answer's last token have keys and values, in full pages of 32.
        assert scheduler.totals.prefix_hit_tokens - before == max(0, known - 1) // 32 * 32
        expected = picked_logprobs(long_model, [*prompt, *answer.choices[0].token_ids])[len(prompt) - 1 :]
        assert torch.allclose(expected, torch.tensor(answer.choices[0].logprobs), atol=1e-4)
        prompt += answer.choices[0].token_ids


def test_what_two_versions_sampled_is_not_reused(long_model: Any) -> None:
    scheduler = make_scheduler(long_model, is_reusing_sampled=True)
    scheduler.add(ask("a", tokens(1, 40), max_tokens=60, ignore_eos=True), Heard())
    for _ in range(9):
        scheduler.step()
    scheduler.swap(scheduler.decoder, 1)
    while scheduler.step():
        pass
    assert len(scheduler.memory.prefixes) == 0


def test_no_version_reads_what_another_computed() -> None:
    config = MODELS["two queries of a kv head"]
    long_model = make_model(config)
    scheduler = make_scheduler(long_model)
    request = ask("a", tokens(1, 100), seed=1, ignore_eos=True)
    run_requests(scheduler, [request])
    assert len(scheduler.memory.prefixes) == 3
    good = scheduler.decoder
    state = make_model(config, seed=1).state_dict()
    scheduler.swap(good.with_weights(fuse(good.shape, state, CPU, good.dtype)), 1)
    assert (len(scheduler.memory.prefixes), scheduler.memory.prefixes.num_bytes) == (0, 0)
    (found,) = run_requests(scheduler, [request])
    fresh = make_scheduler(long_model)
    fresh.swap(scheduler.decoder, 1)
    assert sampled(found) == sampled(run_requests(fresh, [request])[0])


def test_a_prompt_under_way_while_the_weights_change_is_nobody_elses_prefix(long_model: Any) -> None:
    scheduler = make_scheduler(long_model, max_prefill_tokens=32)
    scheduler.add(ask("a", tokens(1, 100), max_tokens=2), Heard())
    scheduler.step()
    scheduler.swap(scheduler.decoder, 1)
    while scheduler.step():
        pass
    assert len(scheduler.memory.prefixes) == 0


def redraw_of(request_id: str, prompt: list[int], said: list[int], seed: int, temperature: float) -> GenerationRequest:
    redraw = Redraw(seed, 0, len(prompt), temperature)
    params = SamplingParams(max_tokens=0)
    return GenerationRequest(request_id, [*prompt, *said], params, redraw=redraw)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_what_was_drawn_is_drawn_again_however_its_prompt_is_cut(long_model: Any, temperature: float) -> None:
    prompt = tokens(1, 40)
    request = ask("a", prompt, seed=7, max_tokens=60, ignore_eos=True, temperature=temperature)
    (found,) = run_requests(make_scheduler(long_model), [request])
    (choice,) = found.choices
    other = [*choice.token_ids[:30], (choice.token_ids[30] + 1) % 200, *choice.token_ids[31:]]
    for size in (16, 8192):
        scheduler = make_scheduler(long_model, max_prefill_tokens=size)
        asked = [
            redraw_of("right", prompt, choice.token_ids, 7, temperature),
            redraw_of("other seed", prompt, choice.token_ids, 8, temperature),  # the same prompt, computed once
            redraw_of("other token", prompt, other, 7, temperature),
        ]
        right, seed, token = (one.redrawn or [] for one in run_requests(scheduler, asked))
        assert [len(one) for one in (right, seed, token)] == [60, 60, 60]
        assert max(one.shortfall for one in right) < 1e-4
        apart = [abs(one.logprob - said) for one, said in zip(right, choice.logprobs, strict=True)]
        assert max(apart) < 1e-4
        assert sum(one.shortfall > 0.01 for one in seed) > 20
        assert max(one.shortfall for one in token[:30]) < 1e-4
        assert token[30].shortfall > 1e-3


@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 7])
def test_what_is_drawn_again_behind_a_known_prompt_is_the_same_and_that_is_not_computed_again(
    long_model: Any, length: int
) -> None:
    prompt, said = tokens(1, length), tokens(2, 40)
    alone, known = make_scheduler(long_model), make_scheduler(long_model)
    run_requests(known, [GenerationRequest("prompt", prompt, SamplingParams(max_tokens=0))])
    (fresh,) = run_requests(alone, [redraw_of("a", prompt, said, 7, 1.0)])
    (found,) = run_requests(known, [redraw_of("a", prompt, said, 7, 1.0)])
    assert found.redrawn == fresh.redrawn
    assert (alone.totals.prefix_hit_tokens, known.totals.prefix_hit_tokens) == (0, (length - 1) // BLOCK * BLOCK)
    again = dataclasses.replace(redraw_of("b", prompt, said, 7, 1.0), prompt_logprobs=True)
    (scored,) = run_requests(known, [again])
    assert scored.redrawn == fresh.redrawn
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == length + 40, "whoever wants all of them has them"


def test_only_tokens_after_the_first_are_drawn_again(model: Any) -> None:
    scheduler = make_scheduler(model)
    for redraw in (Redraw(1, 0, 0), Redraw(1, 0, 9)):
        request = GenerationRequest("a", [1, 2, 3], SamplingParams(max_tokens=0), redraw=redraw)
        with pytest.raises(RequestRefused, match="a redraw is of tokens after the first"):
            scheduler.check(request)
