"""Choices that keep to a grammar: beside free ones, over preemptions, within bounds whoever wrote it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policies import END, make_model, save_tokenizer, tiny_config
from schedulers import Heard, ask, make_scheduler, sampled

from mettle.inference.bodies import ChatBody, GenerateBody
from mettle.inference.engine.grammars import MAX_TEXT, Grammars
from mettle.inference.engine.local import run_requests
from mettle.inference.engine.protocol import GenerationRequest, RequestRefused
from mettle.inference.engine.scheduler import Scheduler
from mettle.inference.remote import wire_request
from mettle.records.sampling import Constraint, SamplingParams, other_distribution

PROMPT = [5, 17, 200, 3]
MODEL = make_model(tiny_config())


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return Grammars(folder / "tokenizer.json", 264, [END])


@pytest.fixture
def make(grammars: Grammars) -> Callable[..., Scheduler]:
    def make(**more: Any) -> Scheduler:
        return make_scheduler(MODEL, eos_token_ids=(END,), grammars=grammars, **more)

    return make


def text_of(token_ids: list[int]) -> str:
    return bytes(token for token in token_ids if token < 256).decode(errors="replace")


def test_rows_keep_to_their_own_grammars_and_free_rows_are_left_alone(make: Callable[..., Scheduler]) -> None:
    free = ask("free", PROMPT, 2, seed=5, max_tokens=20)
    kept = [
        ask(name, PROMPT, 2, seed=5, max_tokens=20, constraint=constraint)
        for name, constraint in {
            "regex": Constraint("regex", "[xy]{4}"),
            "choice": Constraint("choice", '["one", "two"]'),
            "grammar": Constraint("grammar", 'start: "a" start "b" | "c"'),
        }.items()
    ]
    found = dict(zip(("regex", "choice", "grammar", "free"), run_requests(make(), [*kept, free]), strict=True))
    texts = {name: [text_of(choice.token_ids) for choice in answer.choices] for name, answer in found.items()}
    assert all(len(text) == 4 and set(text) <= set("xy") for text in texts["regex"])
    assert set(texts["choice"]) <= {"one", "two"}
    for text in texts["grammar"]:
        depth = text.count("a")
        assert text == "a" * depth if len(text) == 20 else text == "a" * depth + "c" + "b" * depth
    assert all(c.finish_reason == "stop" and c.token_ids[-1] == END for c in found["regex"].choices)
    assert sampled(found["free"]) == sampled(run_requests(make(), [free])[0])
    (alone,) = run_requests(make(), [kept[0]])
    assert sampled(alone) == sampled(found["regex"])


def test_logprobs_are_those_of_the_cut_distribution(make: Callable[..., Scheduler]) -> None:
    params = SamplingParams(max_tokens=1, constraint=Constraint("choice", '["k", "m"]'))
    (one,) = run_requests(make(), [GenerationRequest("a", PROMPT, params, top_logprobs=3)])
    (first, second, third) = one.choices[0].top_logprobs[0]
    assert {first.token_id, second.token_id} == {ord("k"), ord("m")}
    assert np.exp(first.logprob) + np.exp(second.logprob) == pytest.approx(1.0, abs=1e-5)
    assert third.logprob == -torch.inf


def test_a_preempted_choice_goes_on_in_its_grammar(make: Callable[..., Scheduler]) -> None:
    requests = [
        ask(str(i), PROMPT * 8, seed=i, max_tokens=160, constraint=Constraint("regex", "([a-m][n-z]){75}"))
        for i in range(4)
    ]
    roomy = make(max_model_len=256)
    expected = [sampled(one) for one in run_requests(roomy, requests)]
    tight = make(max_model_len=256, kv_cache_bytes=3 * 256 * roomy.memory.sizes.token_bytes)
    assert [sampled(one) for one in run_requests(tight, requests)] == expected
    assert tight.totals.preempted > 0
    for ((token_ids, _),) in expected:
        text = text_of(token_ids)
        assert all(("a" <= c <= "m") == (i % 2 == 0) for i, c in enumerate(text))


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint("regex", "(a"), "unclosed group"),
        (Constraint("json", '{"type": "nope"}'), "Invalid type"),
        (Constraint("json", '{"not": {"type": "string"}}'), "Unimplemented"),
        (Constraint("json", '{"$ref": "http://127.0.0.1:9/x"}'), "does not fetch"),
        (Constraint("grammar", "start: missing"), "unknown name"),
        (Constraint("regex", "a" * (MAX_TEXT + 1)), "may have 65,536"),
    ],
    ids=["regex", "type", "not", "remote", "name", "long"],
)
def test_a_grammar_that_cannot_be_kept_to_is_refused_before_the_engine_hears_of_it(
    make: Callable[..., Scheduler], constraint: Constraint, message: str
) -> None:
    scheduler = make()
    with pytest.raises(RequestRefused, match=message) as caught:
        scheduler.check(ask("a", PROMPT, constraint=constraint))
    assert caught.value.parameter == "structured_outputs"
    assert "\n" not in str(caught.value)


def test_a_grammar_that_reaches_a_bound_fails_its_own_request_alone(
    make: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mettle.inference.engine.grammars._LIMITS", {"step_max_items": 60, "max_items_in_row": 60})
    scheduler, heard, other = make(), Heard(), Heard()
    ambiguous = Constraint("grammar", 'start: e\ne: e e e | e e | "a" | "aa" | "aaa"')
    scheduler.add(ask("odd", PROMPT, 2, max_tokens=60, constraint=ambiguous), heard)
    scheduler.add(ask("fine", PROMPT, 2, seed=1), other)
    while scheduler.step():
        pass
    (error,) = heard.errors
    assert isinstance(error, RequestRefused)
    assert "the grammar is refused" in str(error)
    assert sampled(other.generations[0]) == sampled(run_requests(make(), [ask("fine", PROMPT, 2, seed=1)])[0])
    assert scheduler.num_running == 0


def test_without_the_package_or_a_tokenizer_the_request_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ask("a", PROMPT, constraint=Constraint("regex", "a", "guided_regex"))
    with pytest.raises(RequestRefused, match="keeps to no grammar"):
        make_scheduler(MODEL).check(request)
    bare = make_scheduler(MODEL, grammars=Grammars(tmp_path / "tokenizer.json", 264, [END]))
    with pytest.raises(RequestRefused, match="cannot be kept to with this model's tokenizer"):
        bare.check(request)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestRefused, match=r"lacks the package llguidance, which .*\[grammar\]"):
        bare.check(request)


@pytest.mark.parametrize("kind", ["json", "json_object", "regex", "choice", "grammar"])
def test_a_constraint_goes_over_the_wire_as_it_is(kind: Any) -> None:
    text = {"json": '{"type": "object"}', "choice": '["a", "b"]', "json_object": ""}.get(kind, "x")
    request = ask("a", PROMPT, constraint=Constraint(kind, text))
    read = GenerateBody.model_validate_json(json.dumps(wire_request(request)))
    assert read.params(8).constraint == request.params.constraint


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint("json_object", "", "response_format")),
        ({"guided_json": {"type": "array"}}, Constraint("json", '{"type": "array"}', "guided_json")),
        ({"guided_json": '{"type":"array"}'}, Constraint("json", '{"type": "array"}', "guided_json")),
        ({"guided_choice": ["a"]}, Constraint("choice", '["a"]', "guided_choice")),
        ({"structured_outputs": {"regex": "a+", "json": None}}, Constraint("regex", "a+")),
        ({"structured_outputs": {"json_object": True}}, Constraint("json_object")),
    ],
    ids=["none", "text", "object", "schema", "text schema", "choice", "regex", "structured object"],
)
def test_what_fields_ask_for(fields: dict[str, Any], expected: Constraint | None) -> None:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})
    assert body.constraint() == expected
    is_free = expected is None
    assert bool(other_distribution(fields)) != is_free, "refused in training, and only then"
    assert body.params(1).is_the_policys == is_free
