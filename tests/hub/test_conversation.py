"""Turns of tokens stand beside the messages that they became."""

from mettle.hub.conversation import shown_messages, text_of
from mettle.hub.models import RolloutDetail, ShownRollout, TokenColumns, TurnDetail


def detail(roles, num_turns):
    turns = [
        TurnDetail(
            prefix_length=0, num_prompt_tokens=1, temperature=1.0, prompt_text="", tokens=TokenColumns(
                ids=[i], texts=[f"turn-{i}"], logprobs=[-0.1], versions=[0])
        ) for i in range(num_turns)
    ]  # fmt: skip
    row = ShownRollout.model_construct(rollout_id="r")
    messages = [{"role": role, "content": f"m{i}"} for i, role in enumerate(roles)]
    return RolloutDetail.model_construct(
        row=row, messages=messages, turns=turns, answer="", siblings=[], is_decoded=True
    )


def test_turns_belong_to_the_last_assistant_messages():
    shown = shown_messages(detail(["user", "assistant", "user", "assistant", "tool", "assistant"], 2))
    assert [m.turn.tokens.texts[0] if m.turn else None for m in shown] == [None, None, None, "turn-0", None, "turn-1"]


def test_turns_without_a_message_are_shown_after_the_rest():
    shown = shown_messages(detail(["user", "assistant"], 3))
    assert [(m.role, m.turn.tokens.texts[0] if m.turn else None) for m in shown] == [
        ("user", None), ("assistant", "turn-2"), ("sampled", "turn-0"), ("sampled", "turn-1"),
    ]  # fmt: skip


def test_contents_of_every_shape_are_text():
    assert text_of(None) == ""
    assert text_of([{"type": "text", "text": "a"}, {"type": "image_url"}, "b"]) == "a\n[image_url]\nb"
    assert text_of({"x": 1}) == '{"x": 1}'
