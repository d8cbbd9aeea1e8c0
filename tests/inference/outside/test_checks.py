"""What an answer must be, without any engine."""

import math
import random

import pytest

from mettle.inference.engine.protocol import Choice, GenerationRequest, Redraw, RedrawnToken
from mettle.inference.outside.checks import (
    AuditBounds,
    WorkFault,
    audit_fault,
    audit_request,
    chosen_for_audit,
    form_fault,
)
from mettle.records.sampling import SamplingParams

END = 9


def asked(n: int = 1, **params: object) -> GenerationRequest:
    settings = {"max_tokens": 4, **params}
    return GenerationRequest("r", [1, 2], SamplingParams(**settings), n=n)  # type: ignore[arg-type]


def said(*token_ids: int, reason: str = "length", stop: str | None = None, logprob: float = -1.0) -> Choice:
    return Choice(0, list(token_ids), [logprob] * len(token_ids), finish_reason=reason, stop=stop)  # type: ignore[arg-type]


def fault(choices: list[Choice], request: GenerationRequest | None = None) -> WorkFault | None:
    return form_fault(
        request or asked(), choices, vocab_size=10, max_model_len=16, eos_token_ids=frozenset({END}),
        decode_text=lambda ids: "".join(chr(97 + i) for i in ids),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "request_"),
    [
        (said(1, 2, 3, 4), asked()),
        (said(1, END, reason="stop"), asked()),
        (said(1, END, 2, 3), asked(ignore_eos=True)),
        (said(1, 5, reason="stop"), asked(stop_token_ids=(5,))),
        (said(1, 2, reason="stop", stop="bc"), asked(stop=("bc",))),
        (said(*[1] * 14), asked(max_tokens=None)),
        (said(0, 8, 0, 8), asked()),
        (said(1, 2, 3, 4, logprob=1e-3), asked()),
    ],
)
def test_an_end_that_the_request_has_is_one(choice: Choice, request_: GenerationRequest) -> None:
    assert fault([choice], request_) is None


@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ([], "0 completions"),
        ([said(1, 2, 3, 4)] * 2, "2 completions"),
        ([said()], "has 0 tokens"),
        ([said(1, 2, 3, 10)], "in no vocabulary"),
        ([said(1, 2, 3, -1)], "in no vocabulary"),
        ([said(1, 2, 3, 4, logprob=math.nan)], "a logprob that is none"),
        ([said(1, 2, 3, 4, logprob=-math.inf)], "a logprob that is none"),
        ([said(1, 2, 3, 4, logprob=0.5)], "a logprob that is none"),
        ([said(1, 2, 3, 4, logprob=0.0015)], "a logprob that is none"),
        ([said(1, 2, 3)], "ended by length after 3 tokens: no end is there"),
        ([said(1, 2, 3, 4, reason="stop")], "ended by stop after 4 tokens: length"),
        ([said(1, 2, 3, END)], "ended by length after 4 tokens: stop"),
        ([said(END, 2, 3, 4)], "goes on after its end at token 1 of 4"),
        ([said(1, 2, 3, 4, 5)], "goes on after its end at token 4 of 5"),
        ([said(1, END, reason="stop", stop="b")], "stop"),
    ],
)
def test_what_could_not_have_been_sampled_is_told(choices: list[Choice], why: str) -> None:
    found = fault(choices)
    assert found is not None
    assert found.kind == "form"
    assert why in found.text


def test_completions_are_those_that_were_asked_for_in_their_order() -> None:
    first, second = said(1, 2, 3, 4), said(4, 3, 2, 1)
    second.index = 1
    assert fault([first, second], asked(2)) is None
    for choices in ([second, first], [first, first], [first]):
        found = fault(choices, asked(2))
        assert found is not None
        assert "where 2 were asked for" in found.text


@pytest.mark.parametrize("seed", [0, 7])
def test_a_completion_is_drawn_again_by_the_noise_that_was_its_own(seed: int) -> None:
    choice = said(5, 6)
    choice.index = 1
    params = SamplingParams(max_tokens=4, seed=seed, temperature=0.6)
    asked_of_it = audit_request("a", GenerationRequest("r", [1, 2, 3], params, n=2), choice)
    assert (list(asked_of_it.prompt_ids), asked_of_it.params.max_tokens) == ([1, 2, 3, 5, 6], 0)
    assert asked_of_it.redraw == Redraw(seed, 1, 3, 0.6)
    with_seeds = GenerationRequest("r", [1, 2, 3], params, n=2, seeds=(11, 12))
    assert audit_request("a", with_seeds, choice).redraw == Redraw(12, 0, 3, 0.6)


def test_numbers_just_at_a_bound_are_within_it() -> None:
    assert audit_fault(said(1, 2), redrawn((-1.25, 0.0), (-1.25, 5.0)), AuditBounds(0.25)) is None
    one_far = [(-6.0, 0.0), *[(-1.0, 0.0)] * 19]
    assert audit_fault(said(*[1] * 20), redrawn(*one_far), AuditBounds(0.25)) is None


def redrawn(*pairs: tuple[float, float]) -> list[RedrawnToken]:
    return [RedrawnToken(*pair) for pair in pairs]


def test_numbers_within_the_bound_are_honest() -> None:
    assert audit_fault(said(1, 2), redrawn((-1.0001, 0.0), (-1.0, 0.0001)), AuditBounds(1e-3)) is None


@pytest.mark.parametrize(
    ("again", "kind", "why"),
    [
        (redrawn((-1.01, 0.0), (-1.01, 0.0)), "logprobs", "0.01 off on average"),
        (redrawn((-1.03, 0.0), *[(-1.0, 0.0)] * 40), "logprobs", "0.03 at most"),
        (redrawn((math.nan, 0.0), (-1.0, 0.0)), "logprobs", "nan"),
        (
            redrawn((-1.0, 0.0), (-1.0, 0.5)),
            "tokens",
            "1 of 2 tokens are not those that the seed draws, the first at 1",
        ),
        (redrawn((-1.0, 0.0), (-1.0, math.nan)), "tokens", "1 of 2"),
    ],
)
def test_other_logprobs_and_other_tokens_are_told_apart(again: list[RedrawnToken], kind: str, why: str) -> None:
    found = audit_fault(said(*[1] * len(again)), again, AuditBounds(1e-3))
    assert found is not None
    assert found.kind == kind
    assert why in found.text


@pytest.mark.parametrize(("share", "number"), [(1.0, 8), (0.5, 4), (0.3, 3), (0.01, 1)])
def test_at_least_one_completion_is_checked_and_all_are_as_likely(share: float, number: int) -> None:
    rng = random.Random(0)
    drawn = [chosen_for_audit(8, share, rng) for _ in range(400)]
    assert {len(set(chosen)) for chosen in drawn} == {number}
    counts = [sum(place in chosen for chosen in drawn) / 400 for place in range(8)]
    assert min(counts) > 0.6 * number / 8
