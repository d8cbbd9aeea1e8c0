"""What the algorithm said of sampled tokens stands at the tokens, on the page as in the API."""

import numpy as np
import pytest
from tests.hub.conftest import write_finished

from mettle.hub.conversation import ShownToken, shown_messages
from mettle.hub.models import ShownRollout
from mettle.hub.rollouts import detail_of, sampled_credit
from mettle.orchestrator.batcher import ReadyGroup
from mettle.orchestrator.samples import rollout_samples
from mettle.orchestrator.shipping import assemble
from mettle.records.tasks import RolloutRecord, Turn
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.shards import read_group
from mettle.storage.trained_logprobs import write_trained_logprobs


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


async def test_the_ratio_of_trainer_and_sampler_stands_at_each_token_that_was_trained(browse, tmp_path):
    write_finished(tmp_path / "run", steps=2, groups=2)
    client = browse(tmp_path)
    row = (await client.get("/api/v1/runs/run/rollouts?step=1&kind=train")).json()["rollouts"][0]
    address = f"/runs/run/rollouts/{row['rollout_id']}"
    api = f"/api/v1{address}"
    assert (await client.get(api)).json()["turns"][0]["tokens"]["trainer_logprobs"] is None
    assert "data-r=" not in (html := (await client.get(address)).text)
    assert 'data-fact="r"' not in html, "where nothing is known nothing is said"

    run_dir = RunDir(tmp_path / "run")
    ledger = Ledger(run_dir.ledger, is_read_only=True)
    (ref,) = [ref for draw_id, ref in ledger.groups_of(1) if draw_id == row["draw_id"]]
    digest = ledger.batch(1).digest
    ledger.close()
    group = read_group(run_dir.rollouts, ref)
    samples = [sample for each in group.rollouts for sample in rollout_samples(each, draw_id=1, seq_len=4096)]
    batch = assemble(1, [ReadyGroup.of(1, samples)])
    members = np.flatnonzero(batch.loss_mask)[1:]  # the first sampled token of all was not trained
    sampled = batch.logprobs[members]
    write_trained_logprobs(run_dir.batches, digest, batch, members, sampled + np.float32(np.log(2)))

    tokens = (await client.get(api)).json()["turns"][0]["tokens"]
    pairs = list(zip(tokens["trainer_logprobs"], tokens["logprobs"], strict=True))
    is_first = group.rollouts[0].rollout_id == row["rollout_id"]
    assert (pairs[0][0] is None) == is_first
    np.testing.assert_allclose([a - b for a, b in pairs[1:]], np.log(2), rtol=1e-5)
    html = (await client.get(address)).text
    assert html.count('data-r="2" data-k="0.31"') == len(pairs) - is_first
    assert 'data-fact="r"' in html


@pytest.mark.parametrize(
    ("trainer", "ratio", "mismatch"), [(-1.0, 1.0, 0.0), (-900.0, 0.0, 898.0), (900.0, None, None)]
)
def test_ratio_and_mismatch_of_a_token(trainer, ratio, mismatch):
    token = ShownToken("a", 1, -1.0, 0, None, trainer_logprob=trainer)
    if ratio is None:
        assert np.isfinite([token.ratio, token.mismatch]).all(), "beyond all reckoning, and still a number"
        return
    assert (token.ratio, token.mismatch) == (pytest.approx(ratio), pytest.approx(mismatch))
    assert ShownToken("a", 1, -1.0, 0, None).ratio is None
