"""Of two adapters beside one base, one is not loaded in the engine: the table's cut by adapter names it."""

import dataclasses
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.trainer.conftest import ALONE, make_batch, make_group, new_run

from mettle.records.tasks import GroupRecord
from mettle.runs import sharing
from mettle.runs.adapter_watch import AdapterWatch
from mettle.storage.batches import write_batch
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.shards import BlockRef
from mettle.storage.share_dir import Membership, ShareDir
from mettle.trainer.config import LoraConfig, MismatchConfig, OptimConfig, TrainerConfig
from mettle.trainer.loop import StopFlag
from mettle.trainer.mismatch.tokens import choose
from mettle.trainer.policy import write_policy
from mettle.trainer.presets import PolicyConfig
from mettle.trainer.sharing import SharedTrainer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    mini = PolicyConfig(num_layers=2, hidden_size=32, mlp_size=48, num_heads=2, num_kv_heads=1, head_dim=16)
    return write_policy(tmp_path_factory.mktemp("base") / "model", mini)


@pytest.fixture
def share(tmp_path, base):
    found = ShareDir(tmp_path / "share")
    found.path.mkdir()
    found.model.symlink_to(base)
    return found


@pytest.fixture
def members(share, base):
    found = []
    for seed, name in enumerate("ab"):
        run_dir = new_run(
            RunDir(share.runs / name), base, shipped=0, max_steps=4, lora=LoraConfig(rank=4), seed=seed,
            optim=OptimConfig(lr=0.05), mismatch=MismatchConfig(interval=1),
        )  # fmt: skip
        found.append(Membership(name, run_dir.path, "1"))
        share.join(found[-1])
    return found


def ship(tenant, step, *, is_loaded):
    """The next batch of a run, whose log-probabilities are those of the network with its adapter, or of the base."""
    ledger, learner = tenant.trainer.ledger, tenant.trainer.learner
    rng = np.random.default_rng(step)
    (draw,) = ledger.draw_tasks([("words", f"uid-{step}", 0, step)])
    ledger.dispatch(draw.draw_id)
    ledger.record_scored(GroupRecord(draw, step - 1, ()), BlockRef("shard-00000.bin", 0, 1))
    batch = make_batch(make_group(rng), step=step, draw_ids=(draw.draw_id,))
    batch = dataclasses.replace(batch, versions=np.where(batch.loss_mask, step - 1, -1))
    logprobs, ends = batch.logprobs.copy(), np.cumsum(batch.sequence_lengths)
    learner.policy.adapters.use(learner.tenant.adapter if is_loaded else None)
    for each in choose(batch, len(ends), seed=0):
        told = learner.policy.logprobs_at(
            each.token_ids, each.places, each.experts, torch.from_numpy(each.temperatures)
        )
        logprobs[ends[each.number] - batch.sequence_lengths[each.number] + each.places] = told.detach().numpy()
    learner.policy.adapters.use(None)
    digest, _ = write_batch(tenant.trainer.run_dir.batches, dataclasses.replace(batch, logprobs=logprobs))
    num_tokens = len(batch.token_ids)
    ledger.ship(
        step, digest, batch.draw_ids, num_sequences=len(ends), num_tokens=num_tokens, staleness=(0.0, 0),
        orchestrator_state={},
    )  # fmt: skip


def train_step(trainer, step):
    for _ in range(50):
        trainer.turn()
        for tenant in trainer.tenants.values():
            tenant.trainer.settle()
        if all(tenant.step == step for tenant in trainer.tenants.values()):
            return
    raise AssertionError({name: tenant.step for name, tenant in trainer.tenants.items()})


def test_of_two_adapters_the_one_that_is_not_loaded_is_named(share, members, monkeypatch):
    monkeypatch.setattr("mettle.trainer.sharing.LOOK_S", 0.0)
    trainer = SharedTrainer(share, TrainerConfig(lora=LoraConfig()), ALONE, StopFlag())
    trainer.turn()
    assert trainer.tenants.keys() == {"a", "b"}
    watch = AdapterWatch()
    assert [watch.read(member) for member in members] == [None, None]
    told = []
    for step, not_loaded in ((1, ()), (2, ()), (3, ("b",))):
        for name, tenant in trainer.tenants.items():
            ship(tenant, step, is_loaded=name not in not_loaded)
        train_step(trainer, step)
        looks = [watch.read(member) for member in members]
        assert [look.step for look in looks] == [step, step]
        assert [watch.read(member) for member in members] == [None, None], "they are no news"
        told.append(watch.news())
    assert told[:2] == [None, None]
    kind, text = told[2]
    assert kind == "mismatch"
    assert text.startswith("engine and trainer disagree on 1 of 2 adapters: b (step 3, ")
    assert "adapter: the engine samples with the base alone: the adapter is not loaded" in text
    fact = watch.fact()
    assert fact["causes"] == {"b": "adapter"}
    (a, of_a, num_a), (b, of_b, num_b) = fact["table"]["adapter"]
    assert (a, b) == ("a", "b")
    assert of_a < 1e-5 < 2e-3 < of_b
    assert num_a == num_b > 0
    for tenant in trainer.tenants.values():
        tenant.close()


def test_what_shows_in_all_adapters_is_told_as_the_engines_and_once(members):
    watch = AdapterWatch()

    def found(cause, step, *which):
        for member in which:
            with closing(Ledger(RunDir(member.run_dir).ledger)) as ledger:
                ledger.journal.set_fact(
                    "mismatch", {"step": step, "mean_abs": 0.5, "num_tokens": 9, "cause": cause, "detail": "so"}
                )
            watch.read(member)
        return watch.news()

    assert found("temperature", 1, *members) == (
        "mismatch",
        "engine and trainer disagree on all 2 adapters: a (step 1, 0.5 nats on average): temperature: so;"
        " b (step 1, 0.5 nats on average): temperature: so",
    )
    assert found("temperature", 2, *members) is None
    assert found("", 3, members[0])[1].startswith("engine and trainer disagree on 1 of 2 adapters: b (step 2,")
    assert found("", 4, *members) == ("mismatch_gone", "engine and trainer agree again on all adapters")
    assert found("", 5, *members) is None


def test_a_share_keeps_the_table_and_tells_of_it(members, share):
    with closing(Ledger(RunDir(members[0].run_dir).ledger)) as ledger:
        found = {"step": 7, "mean_abs": 0.5, "num_tokens": 9, "cause": "adapter", "detail": "so"}
        ledger.journal.set_fact("mismatch", found)
    ledger, events, lines = Ledger(share.as_run.ledger), [], []
    supervisor = SimpleNamespace(record=lambda write: write(), event=lambda *told: events.append(told))
    there = SimpleNamespace(_adapters=AdapterWatch(), _ledger=ledger, _supervisor=supervisor, _tell=lines.append)
    for member in (*members, *members):
        sharing._Share._compare(there, member)
    assert ledger.journal.fact("mismatch") == {"table": {"adapter": [["a", 0.5, 9]]}, "causes": {"a": "adapter"}}
    assert ledger.journal.metric("mismatch/adapter/a") == [(7, 0.5)]
    assert lines == [events[0][1]]
    assert [kind for kind, _ in events] == ["mismatch"]
    ledger.close()


def test_a_run_that_cannot_be_read_is_left_to_its_own_supervisor(tmp_path):
    assert AdapterWatch().read(Membership("gone", tmp_path / "gone", "1")) is None
