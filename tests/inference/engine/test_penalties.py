"""Biases and penalties move logits as their definitions say, each row's own, and the log-probabilities with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from policies import reference_logprobs
from schedulers import ask, make_scheduler, sampled

from mettle.inference.engine.local import run_requests
from mettle.inference.engine.protocol import Choice, RequestRefused

PROMPT = [9, 8, 9, 7]


def expected(
    model: Any, choice: Choice, *, presence: float = 0, frequency: float = 0, repetition: float = 1
) -> list[float]:
    """Log-probabilities from transformers' logits, moved token by token in plain Python."""
    found = []
    raw = reference_logprobs(model, [*PROMPT, *choice.token_ids])[len(PROMPT) - 1 :]
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *choice.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    assert torch.allclose(torch.log_softmax(logits, -1), raw, atol=1e-4)
    for place, token_id in enumerate(choice.token_ids):
        before = choice.token_ids[:place]
        row = logits[place].tolist()
        for token in {*PROMPT, *before}:
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        for token in set(before):
            row[token] -= presence + frequency * before.count(token)
        found.append(float(torch.log_softmax(torch.tensor(row), -1)[token_id]))
    return found


@pytest.mark.parametrize(
    "penalties", [{"presence": 1.5}, {"frequency": 0.7}, {"repetition": 1.3}, {"presence": -1, "repetition": 0.8}]
)
def test_penalties_are_those_of_their_definitions(model: Any, penalties: dict[str, float]) -> None:
    named = {f"{name}_penalty": value for name, value in penalties.items()}
    request = ask("a", PROMPT, max_tokens=40, seed=1, ignore_eos=True, **named)
    plain = ask("b", PROMPT, max_tokens=60, seed=2, ignore_eos=True)
    (found, _) = run_requests(make_scheduler(model), [request, plain])
    choice = found.choices[0]
    assert torch.allclose(torch.tensor(choice.logprobs), torch.tensor(expected(model, choice, **penalties)), atol=1e-4)


def test_neighbours_of_a_penalised_row_are_sampled_as_alone(model: Any) -> None:
    plain = ask("a", PROMPT, seed=1, ignore_eos=True)
    moved = ask("b", PROMPT, seed=1, ignore_eos=True, frequency_penalty=2.0, logit_bias=((3, 50.0),))
    alone = [run_requests(make_scheduler(model), [request])[0] for request in (plain, moved)]
    together = run_requests(make_scheduler(model), [plain, moved])
    assert [sampled(one) for one in together] == [sampled(one) for one in alone]
    assert sampled(alone[0]) != sampled(alone[1])


def test_penalties_outlive_a_change_of_the_batch_and_of_the_memory(model: Any) -> None:
    requests = [
        ask(str(i), PROMPT, max_tokens=140 + 5 * i, seed=i, ignore_eos=True, frequency_penalty=0.5) for i in range(6)
    ]
    alone = [run_requests(make_scheduler(model), [request])[0] for request in requests]
    scheduler = make_scheduler(model, kv_cache_bytes=(2 * 224 + 32) * make_scheduler(model).memory.sizes.token_bytes)
    together = run_requests(scheduler, requests)
    assert scheduler.totals.preempted > 0
    assert [sampled(one) for one in together] == [sampled(one) for one in alone]


def test_a_bias_forces_and_forbids_tokens(model: Any) -> None:
    forced = ask("a", PROMPT, max_tokens=6, ignore_eos=True, logit_bias=((5, 100.0),))
    greedy = ask("b", PROMPT, max_tokens=1, temperature=0.0, ignore_eos=True)
    scheduler = make_scheduler(model)
    first, second = run_requests(scheduler, [forced, greedy])
    assert first.choices[0].token_ids == [5] * 6
    best = second.choices[0].token_ids[0]
    (other,) = run_requests(
        scheduler, [ask("c", PROMPT, max_tokens=1, temperature=0.0, ignore_eos=True, logit_bias=((best, -100.0),))]
    )
    assert other.choices[0].token_ids[0] != best


def test_a_bias_for_a_token_that_there_is_not_is_refused(model: Any) -> None:
    with pytest.raises(RequestRefused, match="from 0 to 263") as caught:
        make_scheduler(model).check(ask("a", [1], logit_bias=((264, 1.0),)))
    assert caught.value.parameter == "logit_bias"
