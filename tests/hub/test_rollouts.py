"""What the algorithm said of sampled tokens stands at the tokens, on the page as in the API."""

import numpy as np
import pytest
from tests.hub.conftest import write_finished

from mettle.hub.conversation import shown_messages
from mettle.hub.models import ShownRollout
from mettle.hub.rollouts import detail_of, sampled_credit
from mettle.records.tasks import RolloutRecord, Turn


def turn(num, num_prompt=2):
    return Turn(
        0, np.arange(num_prompt, dtype=np.int32), np.arange(num, dtype=np.int32), np.zeros(num, np.float32),
        np.zeros(num, np.int32),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        (None, {}),
        ({"advantages": 0.5}, {"advantages": [0.5, 0.5], "rl_weights": [1.0, 1.0]}),
        ({"advantages": (0.0, 0.25)}, {"advantages": [0.25, 0.25], "rl_weights": [1.0, 1.0]}),
        (
            {"advantages": (0.0, np.array([9, 1, -1], np.float32)), "rl_weights": (0.0, np.array([0, 0, 2], np.float32))},
            {"advantages": [1.0, -1.0], "rl_weights": [0.0, 2.0]},
        ),
        ({"ce_weights": 1.0}, {"ce_weights": [1.0, 1.0]}),
    ],
)  # fmt: skip
def test_credit_of_any_grain_is_told_for_each_sampled_token(credit, expected):
    assert sampled_credit(credit, 1, turn(2)) == expected


def detail(credit):
    record = RolloutRecord(
        "r", 1.0, {}, [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], (turn(3),), credit=credit
    )  # fmt: skip
    row = {name: None for name in ShownRollout.model_fields}
    row |= {
        "rollout_id": "r", "kind": "train", "env_id": "e", "position": 0, "metrics": {}, "num_turns": 1,
        "num_tokens": 3, "version_min": 0, "version_max": 0, "is_truncated": False, "duration_s": 0.1, "created_at": 0.0,
        "excerpt": "", "prompt": "",
    }  # fmt: skip
    return detail_of(record, ShownRollout(**row), [], None)


def test_a_token_without_any_weight_is_in_no_loss():
    weights = np.array([1, 0, 1], np.float32)
    tokens = detail({"advantages": 0.5, "rl_weights": (weights,)}).turns[0].tokens
    assert tokens.is_trained == [True, False, True]
    shown = [
        each
        for message in shown_messages(detail({"advantages": 0.5, "rl_weights": (weights,)}))
        for each in message.tokens()
    ]
    assert [(each.advantage, each.is_trained) for each in shown] == [(0.5, True), (0.5, False), (0.5, True)]


def test_nothing_is_said_of_tokens_that_nobody_gave_credit():
    tokens = detail(None).turns[0].tokens
    assert (tokens.advantages, tokens.is_trained) == (None, None)


async def test_the_page_has_places_for_what_is_known_of_a_token(browse, tmp_path):
    write_finished(tmp_path / "run", steps=2, groups=2)
    client = browse(tmp_path)
    listed = (await client.get("/api/v1/runs/run/rollouts?step=1")).json()["rollouts"]
    html = (await client.get(f"/runs/run/rollouts/{listed[0]['rollout_id']}")).text
    for fact in ("a", "m", "lp", "v"):
        assert f'data-fact="{fact}"' in html
