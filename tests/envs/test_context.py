"""Conversations longer than their window: what is cut, what stays, and what is trained of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mettle.envs as vf
from mettle.envs.context import ContextWindow, estimate_for, turns_of
from mettle.envs.rollout_record import record_of_state
from mettle.envs.state import new_state
from mettle.orchestrator.samples import rollout_samples
from mettle.records.messages import ResponseTokens, messages_from

ROWS = [{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "answer": ""}]


def characters(message):
    """A token is a character."""
    return len(message["content"] or "")


def conversation(num_turns, result="r" * 50):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    for turn in range(num_turns):
        calls = [{"id": f"c{turn}", "name": "look", "arguments": "{}"}]
        messages.append({"role": "assistant", "content": f"a{turn}", "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": result})
    return messages_from(messages)


def state_of(messages):
    return new_state({"prompt": [dict(message) for message in messages[:2]], "example_id": 0}, None, "m", {}, [])


def test_a_conversation_that_fits_is_sent_as_it_is():
    messages = conversation(3)
    assert ContextWindow(1000, count=characters).fit(messages, state_of(messages)) is messages


def test_old_tool_results_are_cut_before_any_turn_is_left_out():
    messages = conversation(4, "r" * 500)
    before = [dict(message) for message in messages]
    seen = ContextWindow(1700, count=characters, cut_result_to=10).fit(messages, state_of(messages))
    assert [m["role"] for m in seen] == [m["role"] for m in messages]
    results = [m["content"] for m in seen if m["role"] == "tool"]
    assert results[0] == results[1] == "r" * 10 + " [490 characters left out]"
    assert results[2:] == ["r" * 500] * 2
    assert messages == before


def test_then_the_oldest_turns_are_left_out_whole():
    messages = conversation(40)
    seen = ContextWindow(400, count=characters, cut_result_to=10, refill=0.5).fit(messages, state_of(messages))
    assert [m["content"] for m in seen[:2]] == ["s", "q"]
    assert seen[-1] is messages[-1]
    assert sum(map(characters, seen)) <= 200
    called = [call["id"] for m in seen for call in m.get("tool_calls") or []]
    assert called == [m["tool_call_id"] for m in seen if m["role"] == "tool"]


def test_a_result_that_was_cut_is_not_cut_again():
    messages = conversation(6, "r" * 500)
    window = ContextWindow(1200, count=characters, cut_result_to=10)
    state = state_of(messages)
    once = window.fit(messages, state)
    assert window._cut(once[3]) is once[3]


@given(st.integers(0, 30), st.integers(0, 400), st.integers(10, 3000), st.integers(0, 5), st.floats(0.1, 1.0))
def test_whatever_is_left_out_the_prompt_and_the_pairing_stay(num_turns, length, budget, keep, refill):
    messages = conversation(num_turns, "r" * length)
    window = ContextWindow(budget, count=characters, keep_last_turns=keep, refill=refill, cut_result_to=5)
    seen = window.fit(messages, state_of(messages))
    assert seen[:2] == messages[:2]
    assert [call["id"] for m in seen for call in m.get("tool_calls") or []] == [
        m["tool_call_id"] for m in seen if m["role"] == "tool"
    ]
    assert len(turns_of(seen[2:])) >= min(keep, num_turns)
    assert sum(map(characters, seen)) <= max(budget, sum(map(characters, messages)))


def test_tokens_are_estimated_by_what_the_endpoint_counted():
    messages = conversation(1)
    state = state_of(messages)
    assert estimate_for(state)(vf.UserMessage(content="x" * 400)) == 4 + 100 + 1
    usage = vf.Usage(prompt_tokens=58, completion_tokens=1)
    state["trajectory"].append({"prompt": [vf.UserMessage(content="x" * 108)], "response": vf.Response(usage=usage)})
    assert estimate_for(state)(vf.UserMessage(content="x" * 400)) == 4 + 200 + 1


def test_a_window_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="max_tokens >= 1"):
        ContextWindow(0)


class Chatty(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "tell me more"}]


def ids(messages):
    return [ord(c) for m in messages for c in f"<{m['role']}>{m['content']}"]


def token_model(scripted):
    """Says its turn's number; a token is a character."""
    turns = iter(range(100))

    def say(prompt):
        text = f"turn {next(turns)}"
        sampled = [ord(c) for c in text]
        tokens = ResponseTokens(
            [*ids(prompt), *ids([{"role": "assistant", "content": ""}])],
            sampled,
            [-1.0] * len(sampled),
            [0] * len(sampled),
        )
        return {"content": text, "tokens": tokens}

    return scripted(say)


async def test_a_rewritten_conversation_branches_and_each_branch_trains_what_the_model_saw(scripted):
    window = ContextWindow(60, count=characters, keep_last_turns=1, refill=0.5)
    env = Chatty(dataset=ROWS, max_turns=6, context=window, rubric=vf.Rubric([lambda completion: 1.0]))
    client = token_model(scripted)
    state = await env.run_rollout(env.get_dataset()[0], client, "m")
    assert [m["content"] for m in state["completion"] if m["role"] == "assistant"] == [f"turn {i}" for i in range(6)]
    assert len(state["completion"]) == 11
    assert min(len(call["prompt"]) for call in client.calls[3:]) < 6
    record = record_of_state(state, "r", temperature=1.0, is_for_training=True)
    samples = rollout_samples(
        record.__class__(**{**{f: getattr(record, f) for f in record.__slots__}, "advantage": 1.0}),
        draw_id=0,
        seq_len=10_000,
    )
    assert len(samples) > 1
    assert sum(int(sample.loss_mask.sum()) for sample in samples) == sum(
        len(turn.completion_ids) for turn in record.turns
    )
    seen = ["".join(map(chr, ids(call["prompt"]))) for call in client.calls]
    for sample in samples:
        text = "".join(map(chr, sample.token_ids))
        starts = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask.astype(int)])) == 1)
        for start in starts:
            assert text[:start].removesuffix("<assistant>") in seen


async def test_an_environment_without_a_window_keeps_no_second_history(scripted):
    env = Chatty(dataset=ROWS, max_turns=3)
    state = await env.run_rollout(env.get_dataset()[0], scripted("x"), "m")
    assert "history" not in state
