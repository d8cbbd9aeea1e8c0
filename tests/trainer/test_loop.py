"""The loop: batches to versions, stops, resumes, retention."""

import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.conftest import ship_batch
from transformers import AutoModelForCausalLM

from mettle.errors import StorageError
from mettle.inference.engine.architecture import read_shape
from mettle.inference.engine.canary import check_canary
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.protocol import WeightsRejected
from mettle.inference.engine.weights import fuse, read_state
from mettle.processes.beats import Heartbeat
from mettle.records.versions import WeightVersion
from mettle.storage.batches import batch_path, read_batch
from mettle.storage.ledger import Ledger
from mettle.storage.ledger_copy import copy_of
from mettle.storage.trained_logprobs import TrainedLogprobs, logprobs_path
from mettle.storage.weights import base_digest_of, model_digest, read_canary, read_version
from mettle.trainer import logprob_writer
from mettle.trainer.config import LoraConfig
from mettle.trainer.loop import StopFlag


def test_each_batch_makes_a_version(make_run, train_here, ledger_of):
    run_dir = make_run()
    assert train_here(run_dir) == 3
    ledger = ledger_of(run_dir)
    assert [row.weights.version for row in ledger.versions()] == [0, 1, 2, 3]
    digests = [read_version(run_dir.version(version)).digest for version in range(4)]
    assert len(set(digests)) == 4
    assert [row.weights.digest for row in ledger.versions()] == digests
    assert ledger.task_counts() == {"trained": 9}
    assert [row.trainings for row in ledger.batches()] == [1, 1, 1]


def test_the_trainers_logprobs_stand_beside_each_batch(make_run, train_here, ledger_of):
    run_dir = make_run(interval=1)
    train_here(run_dir)
    rows = [row for row in ledger_of(run_dir).batches() if batch_path(run_dir.batches, row.digest).exists()]
    assert rows[-1].step == 3, "what the newest checkpoint but one would replay is kept"
    for row in rows:
        batch = read_batch(run_dir.batches, row.digest)
        kept = TrainedLogprobs.read(run_dir.batches, row.digest)
        model = AutoModelForCausalLM.from_pretrained(run_dir.model)
        model.load_state_dict(load_file(run_dir.version(row.step - 1) / "model.safetensors"), strict=False)
        model.tie_weights()
        ends = np.cumsum(batch.sequence_lengths)
        for start, end in zip(ends - batch.sequence_lengths, ends, strict=True):
            ids = torch.from_numpy(batch.token_ids[start:end]).long()
            with torch.no_grad():
                logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
            found = kept.of(batch.token_ids[start:end])
            is_trained = batch.loss_mask[start:end] & (batch.rl_weights[start:end] != 0)
            np.testing.assert_array_equal(np.isfinite(found), is_trained)
            np.testing.assert_allclose(found[1:][is_trained[1:]], logprobs[is_trained[1:]], atol=1e-5)


def test_logprobs_that_cannot_be_kept_fail_no_step(make_run, train_here, monkeypatch, caplog):
    def refuse(*_):
        raise StorageError("no space left")

    monkeypatch.setattr(logprob_writer, "write_trained_logprobs", refuse)
    assert train_here(make_run(max_steps=1, shipped=1)) == 1
    assert "log-probabilities were not kept" in caplog.text


def test_v0_is_the_model_directory(make_run, train_here):
    run_dir = make_run(max_steps=1, shipped=1)
    train_here(run_dir)
    start, published = (
        load_file(run_dir.model / "model.safetensors"),
        load_file(run_dir.version(0) / "model.safetensors"),
    )
    assert start.keys() == published.keys()
    assert all(torch.equal(start[name], published[name]) for name in start)


def test_the_canary_holds_the_published_policys_logprobs(make_run, train_here):
    run_dir = make_run(max_steps=1, shipped=1)
    train_here(run_dir)
    for version in (0, 1):
        model = AutoModelForCausalLM.from_pretrained(run_dir.model)
        weights = load_file(run_dir.version(version) / "model.safetensors")
        assert not model.load_state_dict(weights, strict=False).unexpected_keys
        model.tie_weights()
        canary = read_canary(run_dir.version(version))
        with torch.no_grad():
            logits = model(torch.from_numpy(canary.token_ids).long()).logits
        scored = logits.log_softmax(-1)[:, :-1].gather(-1, torch.from_numpy(canary.token_ids).long()[:, 1:, None])
        counted = np.arange(canary.token_ids.shape[1])[None] < canary.lengths[:, None]
        counted[:, 0] = False
        np.testing.assert_allclose(scored.squeeze(-1).numpy()[counted[:, 1:]], canary.logprobs[counted], atol=1e-5)
        assert not canary.logprobs[~counted].any()
        assert counted.sum() > 10


def test_the_embedded_engine_reproduces_every_canary_and_notices_a_stale_matrix(make_run, train_here):
    run_dir = make_run(max_steps=2, shipped=2)
    train_here(run_dir)
    shape = read_shape(run_dir.model)
    decoders = []
    for version in range(3):
        weights = fuse(shape, read_state(run_dir.version(version)), torch.device("cpu"), torch.float32)
        decoders.append(Decoder(shape, weights, 256))
        check = check_canary(decoders[-1], read_canary(run_dir.version(version)), version, 1e-3)
        assert check.mean_abs_diff < 1e-6
        assert check.num_tokens > 10
    with pytest.raises(WeightsRejected):
        check_canary(decoders[0], read_canary(run_dir.version(2)), 2, 1e-3)


def test_metrics_of_each_step_are_in_the_journal(make_run, train_here, ledger_of):
    run_dir = make_run(max_steps=2, shipped=2)
    train_here(run_dir)
    journal = ledger_of(run_dir).journal
    names = {
        "loss/total", "loss/rl", "loss/ce", "loss/ref_kl", "entropy/mean", "mismatch_kl/mean", "mismatch_kl/max",
        "masked/share", "optim/grad_norm", "optim/lr", "optim/skipped", "throughput/trainer_tokens_per_s",
        "time/step_s", "time/wait_for_batch_s", "time/publish_s", "memory/trainer_peak_bytes", "tokens/trained",
    }  # fmt: skip
    assert names <= set(journal.metric_names())
    assert [step for step, _ in journal.metric("loss/total")] == [1, 2]
    assert all(value > 0 for _, value in journal.metric("tokens/trained"))


def test_a_resumed_run_goes_on_from_its_checkpoint(make_run, train_here, ledger_of):
    whole, parted = make_run("whole", shipped=5, max_steps=5), make_run("parted", shipped=3, max_steps=5)
    train_here(whole)
    ledger = ledger_of(parted)
    ledger.journal.set_fact("state", "stopped")
    assert train_here(parted) == 3
    for step in (4, 5):
        ship_batch(parted, ledger, step)
    ledger.journal.set_fact("state", "running")
    assert train_here(parted) == 5
    assert [row.trainings for row in ledger.batches()] == [1, 1, 1, 1, 1]
    assert read_version(parted.version(5)).digest == read_version(whole.version(5)).digest


def test_a_version_that_is_there_already_is_left_alone(make_run, train_here, ledger_of):
    run_dir = make_run(shipped=2, max_steps=2, interval=5)
    train_here(run_dir)
    inode = (run_dir.version(2) / "model.safetensors").stat().st_ino
    assert train_here(run_dir) == 2
    assert (run_dir.version(2) / "model.safetensors").stat().st_ino == inode
    assert ledger_of(run_dir).newest_version().weights.version == 2


def test_a_damaged_published_folder_is_written_again(make_run, train_here):
    run_dir = make_run(shipped=2, max_steps=2, interval=5)
    train_here(run_dir)
    file = run_dir.version(2) / "model.safetensors"
    digest, data = read_version(run_dir.version(2)).digest, file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    train_here(run_dir)
    assert file.read_bytes() == data
    assert read_version(run_dir.version(2)).digest == digest


def test_a_checkpoint_cut_short_is_passed_over_with_a_warning(make_run, train_here, ledger_of):
    run_dir = make_run(shipped=4, max_steps=4, interval=2)
    train_here(run_dir)
    digest = read_version(run_dir.version(4)).digest
    broken = next((run_dir.checkpoints / "step-4" / "trainer").glob("*.pt"))
    broken.write_bytes(broken.read_bytes()[:-100])
    assert train_here(run_dir) == 4
    ledger = ledger_of(run_dir)
    warnings = [event.message for event in ledger.journal.events(kind="warning")]
    assert len(warnings) == 1
    assert "checkpoint step-4 is passed over" in warnings[0]
    assert "bytes instead of" in warnings[0]
    assert [row.trainings for row in ledger.batches()] == [1, 1, 2, 2]
    assert read_version(run_dir.version(4)).digest == digest


def test_a_batch_that_is_gone_but_needed_is_one_clear_line(make_run, train_here, ledger_of):
    run_dir = make_run(shipped=3, max_steps=3, interval=2)
    train_here(run_dir)
    for folder in run_dir.checkpoints.glob("step-*"):
        (folder / "manifest.json").unlink()
    with pytest.raises(StorageError, match=r"newest state is the initial policy .* batch of step 1 .* is gone"):
        train_here(run_dir)


def test_a_damaged_batch_is_refused(make_run, train_here, ledger_of):
    run_dir = make_run(shipped=1, max_steps=1)
    path = next(run_dir.batches.glob("*.npz"))
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match="damaged"):
        train_here(run_dir)
    assert ledger_of(run_dir).task_counts() == {"shipped": 3}


def test_retention_keeps_what_a_resume_or_an_engine_needs(make_run, train_here, ledger_of, monkeypatch):
    monkeypatch.setattr("mettle.storage.ledger_copy.SPACING", 0.0)
    run_dir = make_run(shipped=7, max_steps=7, interval=2, keep_versions=2)
    train_here(run_dir)
    rows = ledger_of(run_dir).batches()
    left = [row.step for row in rows if (run_dir.batches / f"{row.digest}.npz").exists()]
    assert sorted(path.name for path in run_dir.checkpoints.glob("step-*")) == ["step-6", "step-7"]
    assert left == [7]
    assert sorted(path.name for path in run_dir.weights.glob("v*")) == ["v0", "v6", "v7"]


def test_the_checkpoint_that_the_ledgers_copy_belongs_to_outlives_retention(
    make_run, train_here, ledger_of, monkeypatch
):
    monkeypatch.setattr("mettle.storage.ledger_copy.SPACING", 1e9)
    run_dir = make_run(shipped=7, max_steps=7, interval=2)
    train_here(run_dir)
    assert sorted(path.name for path in run_dir.checkpoints.glob("step-*")) == ["step-2", "step-6", "step-7"]
    copy = Ledger(copy_of(run_dir.ledger), is_read_only=True)
    assert [row.step for row in copy.batches() if row.trainings] == [1, 2]
    copy.close()
    rows = ledger_of(run_dir).batches()
    assert [row.step for row in rows if (run_dir.batches / f"{row.digest}.npz").exists()] == [3, 4, 5, 6, 7]
    assert [row.step for row in rows if logprobs_path(run_dir.batches, row.digest).exists()] == [3, 4, 5, 6, 7]


def test_the_version_that_the_engines_serve_outlives_retention(make_run, train_here, ledger_of):
    run_dir = make_run(shipped=2, max_steps=6, keep_versions=2)
    ledger = ledger_of(run_dir)
    ledger.journal.set_fact("state", "stopped")
    train_here(run_dir)
    version = ledger.version(2).weights
    ledger.acknowledge(WeightVersion(2, version.path, version.digest), None, 1.0)
    for step in range(3, 7):
        ship_batch(run_dir, ledger, step)
    train_here(run_dir)
    assert run_dir.version(2).exists()
    assert not run_dir.version(1).exists()


def test_a_wait_is_named_and_ends_when_the_run_does(make_run, train_here, ledger_of):
    run_dir = make_run(shipped=0)
    ledger = ledger_of(run_dir)
    ended = []
    heart = Heartbeat(name="trainer")
    thread = threading.Thread(target=lambda: ended.append(train_here(run_dir, heart=heart)))
    thread.start()
    for _ in range(2000):
        waits = heart.waits
        if waits:
            break
        thread.join(0.01)
    assert (waits[0].owner, waits[0].edge, waits[0].target) == ("trainer", "batch", "orchestrator")
    assert waits[0].awaits == "orchestrator ships step 1"
    ledger.journal.set_fact("state", "stopping")
    thread.join(100)
    assert ended == [0]
    assert heart.waits == []


def test_a_batch_shipped_during_the_wait_is_trained(make_run, train_here, ledger_of):
    run_dir = make_run(shipped=0, max_steps=1)
    ledger = ledger_of(run_dir)
    heart = Heartbeat(name="trainer")
    thread = threading.Thread(target=lambda: train_here(run_dir, heart=heart))
    thread.start()
    while not heart.waits:
        thread.join(0.01)
    ship_batch(run_dir, ledger, 1)
    thread.join(100)
    assert ledger.newest_version().weights.version == 1


def test_a_request_to_stop_leaves_a_checkpoint(make_run, train_here, ledger_of, monkeypatch):
    run_dir = make_run(shipped=3, max_steps=3, interval=50)
    stop = StopFlag()
    recorded = Ledger.record_trained

    def record_and_stop(self, step, weights, draw_ids):
        stop.is_set = step == 2
        return recorded(self, step, weights, draw_ids)

    monkeypatch.setattr(Ledger, "record_trained", record_and_stop)
    assert train_here(run_dir, stop=stop) == 2
    assert (run_dir.checkpoints / "step-2" / "manifest.json").exists()
    assert train_here(run_dir) == 3
    assert [row.trainings for row in ledger_of(run_dir).batches()] == [1, 1, 1]


def test_leftovers_of_a_killed_trainer_are_removed(make_run, train_here):
    run_dir = make_run(shipped=1, max_steps=1)
    for folder in (run_dir.weights / ".v1.abc", run_dir.checkpoints / ".step-1.abc"):
        folder.mkdir(parents=True)
        (folder / "file").write_text("half")
    train_here(run_dir)
    assert not list(run_dir.weights.glob(".*"))
    assert not list(run_dir.checkpoints.glob(".*"))


def test_a_run_of_adapters_publishes_adapters_and_goes_on_from_a_checkpoint_bit_for_bit(make_run, train_here):
    lora = LoraConfig(rank=4, alpha=8)
    whole, parted = (make_run(name, shipped=5, max_steps=5, lora=lora) for name in ("whole", "parted"))
    train_here(whole)
    config = parted.config("trainer")
    config.write_text(config.read_text().replace('"max_steps": 5', '"max_steps": 3'))
    train_here(parted)
    config.write_text(config.read_text().replace('"max_steps": 3', '"max_steps": 5'))
    train_here(parted)
    digests = [[read_version(run.version(version)).digest for version in range(6)] for run in (whole, parted)]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 6
    folder = whole.version(5)
    assert read_version(folder).kind == "lora"
    assert {path.name for path in folder.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "canary.npz", "manifest.json"
    }  # fmt: skip
    assert base_digest_of(folder) == model_digest(whole.model)
