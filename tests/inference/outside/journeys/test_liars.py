"""Liars with real engines: each kind is found, an honest worker never is, and sampling some finds at the stated rate."""

import random

import pytest
import torch
from liars import GROUP, KINDS, answers_before_found, found_in, group_request, liar_of, sampled, sharpened
from policies import END
from schedulers import make_scheduler
from transformers import PreTrainedModel

from mettle.inference.outside.checks import AUDIT_TOLERANCES, AuditBounds


def test_an_honest_worker_is_not_refused(model: PreTrainedModel) -> None:
    assert answers_before_found(model, "honest_answer", 0, 1.0, most=3) == 4


def test_an_honest_worker_in_bfloat16_is_within_its_bound(model: PreTrainedModel) -> None:
    there, here = (make_scheduler(model, eos_token_ids=(END,), dtype=torch.bfloat16) for _ in range(2))
    for number in range(4):
        request = group_request(0, number)
        choices, rng = sampled(there, request), random.Random(number)
        assert found_in(here, request, choices, 1.0, rng, AuditBounds(AUDIT_TOLERANCES["bfloat16"])) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_liar_is_found_at_its_first_answer(model: PreTrainedModel, kind: str) -> None:
    assert answers_before_found(model, kind, 0, 1 / GROUP, most=2) == 1


def test_tokens_that_are_wrong_are_told_from_logprobs_that_are(model: PreTrainedModel) -> None:
    liar, trusted = liar_of(model, 0), make_scheduler(model, eos_token_ids=(END,))
    request, found = group_request(0, 1), {}
    for kind in ("greedy", "changed_logprobs"):
        fault = found_in(trusted, request, getattr(liar, kind)(request), 1.0, random.Random(0))
        assert fault is not None
        found[kind] = fault.kind
    assert found == {"greedy": "tokens", "changed_logprobs": "logprobs"}


@pytest.mark.nightly
@pytest.mark.parametrize("is_sharp", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "one_in_eight"])
def test_every_kind_is_found_with_twenty_seeds(model: PreTrainedModel, kind: str, is_sharp: bool) -> None:
    policy = sharpened(model) if is_sharp else model
    found = [answers_before_found(policy, kind, seed, 1.0, most=20) for seed in range(20)]
    assert max(found) <= 20, found


@pytest.mark.nightly
def test_a_lie_in_one_of_eight_is_found_as_often_as_it_is_looked_at(model: PreTrainedModel) -> None:
    found = [answers_before_found(model, "one_in_eight", seed, 1 / GROUP) for seed in range(60)]
    mean = sum(found) / len(found)
    assert 8 / 1.5 < mean < 8 * 1.5, found  # geometric with p = 1/8: a mean of 8, of 60 within 1 of it
