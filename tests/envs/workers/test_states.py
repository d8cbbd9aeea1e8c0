"""What crosses between processes: a rollout's state is the same on both sides, and sent once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import mettle.envs as vf
from mettle.envs.state import State, TrajectoryStep, new_state
from mettle.envs.workers.states import error_from, state_from, wired_error, wired_state
from mettle.errors import RolloutTimeout
from mettle.processes import frames
from mettle.records.messages import ResponseTokens

text = st.text(st.characters(exclude_categories=()), max_size=20)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


def sent(state):
    arrays = []
    frame = frames.encode({"state": wired_state(state, arrays)}, arrays)
    lengths = frames.HEADER.unpack(frame[:8])
    found = frames.decode(frame[8 : 8 + lengths[0]], frame[8 + lengths[0] :])
    return state_from(found["state"], found["arrays"]), len(frame)


def test_a_mask_is_sent_too():
    state = new_state({"prompt": "q"}, None, "m", {}, [])
    tokens = ResponseTokens(
        prompt_ids=[1], prompt_mask=[0], completion_ids=[2, 3], completion_mask=[1, 0], completion_logprobs=[-1.0, 0.0]
    )
    state["trajectory"].append(TrajectoryStep(prompt=[], completion=[], response=None, tokens=tokens))
    found, _ = sent(state)
    assert found["trajectory"][0]["tokens"]["completion_mask"] == [1, 0]


ids = st.lists(st.integers(0, 2**31 - 1), max_size=12)


@given(st.lists(st.tuples(ids, ids, st.integers(0, 12), st.booleans()), max_size=5))
def test_tokens_read_the_same_on_the_other_side_whatever_was_shared_rewritten_or_left_out(turns):
    state = new_state({"prompt": "q"}, None, "m", {}, [])
    whole, before = [], None
    for added, completion, kept, is_kept in turns:
        prompt = [*whole[:kept], *added]
        tokens = ResponseTokens(prompt, completion, [-0.5] * len(completion), [3] * len(completion), previous=before)
        if is_kept:
            state["trajectory"].append(TrajectoryStep(prompt=[], completion=[], response=None, tokens=tokens))
        whole, before = prompt + completion, tokens
    found, _ = sent(state)
    assert [dict(step["tokens"]) for step in found["trajectory"]] == [dict(s["tokens"]) for s in state["trajectory"]]


def test_a_conversation_is_sent_once_however_many_steps_saw_it():
    said = [vf.UserMessage(content="x" * 1000) for _ in range(20)]
    state = new_state({"prompt": said[:1]}, None, "m", {}, [])
    for turn in range(1, 20):
        state["trajectory"].append(
            TrajectoryStep(prompt=said[:turn], completion=[said[turn]], response=None, tokens=None)
        )
    found, size = sent(state)
    assert size < 30_000
    assert [len(step["prompt"]) for step in found["trajectory"]] == list(range(1, 20))
    assert found["trajectory"][5]["prompt"] == said[:6]


def test_a_state_made_by_hand_is_sent_too():
    state = State(input={"example_id": 1}, trajectory=[], timing=vf.RolloutTiming(), completion="text")
    found, _ = sent(state)
    assert (found["example_id"], found["completion"], found["error"]) == (1, "text", None)


class TheirOwn(vf.Error):
    kind = "sandbox"


def test_errors_keep_name_boundary_and_causes():
    try:
        try:
            raise ValueError("inner")
        except ValueError as error:
            raise TheirOwn("outer") from error
    except TheirOwn as error:
        found = error_from(wired_error(error))
    assert (type(found).__name__, str(found), found.kind) == ("TheirOwn", "outer", "sandbox")
    assert str(vf.ErrorChain(found)) == "TheirOwn -> ValueError"
    assert isinstance(error_from(wired_error(RolloutTimeout("late"))), RolloutTimeout)
