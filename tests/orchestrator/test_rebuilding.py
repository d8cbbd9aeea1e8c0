"""Batches made again from shards and ledger, and what becomes of a run whose files are damaged."""

import json

import pytest

from mettle.errors import StorageError
from mettle.orchestrator.config import OrchestratorConfig
from mettle.orchestrator.rebuilding import rebuild_batch
from mettle.orchestrator.simulator import SimulatedWorld, simulate
from mettle.processes.virtual_time import run_virtually
from mettle.runs.mending import mend_batches, mend_ledger
from mettle.storage.batches import batch_path, read_batch
from mettle.storage.ledger import Ledger
from mettle.storage.ledger_copy import LedgerCopier, copy_ledger, copy_of, damage_of_ledger
from mettle.storage.run_dir import RunDir

OPTIONS = {"max_steps": 4, "batch_size": 8, "group_size": 4, "envs": [{"id": "words"}], "eval": {"num_examples": 0}}


@pytest.fixture
def run(tmp_path):
    """A finished run of four steps without a checkpoint, its ledger open."""
    options = OrchestratorConfig.model_validate(OPTIONS)
    run_dir = RunDir(tmp_path / "run")
    run_virtually(simulate(run_dir.path, options, SimulatedWorld(equal_rate=0.3, error_rate=0.1)))
    run_dir.config("orchestrator").parent.mkdir()
    run_dir.config("orchestrator").write_text(json.dumps(OPTIONS))
    ledger = Ledger(run_dir.ledger)
    yield run_dir, ledger, options
    ledger.close()


def test_every_batch_is_made_again_to_the_last_bit(run):
    run_dir, ledger, options = run
    for row in ledger.batches():
        assert (
            rebuild_batch(run_dir, ledger, options, row.step).draw_ids
            == read_batch(run_dir.batches, row.digest).draw_ids
        )


@pytest.mark.parametrize("damage", ["a flipped byte", "cut short", "gone"])
def test_a_damaged_batch_is_made_whole_before_the_run_goes_on(run, damage):
    run_dir, ledger, _ = run
    path = batch_path(run_dir.batches, ledger.batch(2).digest)
    whole = path.read_bytes()
    middle = len(whole) // 2
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(
            whole[:middle] + (bytes([whole[middle] ^ 1]) + whole[middle + 1 :] if "byte" in damage else b"")
        )
    assert mend_batches(run_dir, ledger) == [2]
    assert path.read_bytes() == whole
    assert [event.kind for event in ledger.journal.events() if "step 2" in event.message] == ["mended"]
    assert mend_batches(run_dir, ledger) == []


def test_what_cannot_be_made_again_says_so_and_what_to_do(run):
    run_dir, ledger, _ = run
    batch_path(run_dir.batches, ledger.batch(3).digest).unlink()
    for shard in run_dir.rollouts.glob("*.bin"):
        shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(StorageError, match=r"step 3: .*cannot go past step 2.*--model.path"):
        mend_batches(run_dir, ledger)


def damage(run_dir, kind):
    data = bytearray(run_dir.ledger.read_bytes())
    if kind == "gone":
        run_dir.ledger.unlink()
    elif kind == "no database":
        run_dir.ledger.write_bytes(b"x" * len(data))
    else:
        for page in range(1, len(data) // 4096):
            data[page * 4096 : page * 4096 + 64] = b"\xff" * 64
        run_dir.ledger.write_bytes(bytes(data))


@pytest.mark.parametrize("kind", ["gone", "no database", "pages"])
def test_a_damaged_ledger_is_restored_as_of_its_copy(run, kind, capsys):
    run_dir, ledger, _ = run
    copy_ledger(run_dir.ledger, copy_of(run_dir.ledger))
    before = [(row.step, row.digest) for row in ledger.batches()]
    ledger.journal.set_fact("later", 1)
    ledger.close()
    (run_dir.checkpoints / "step-9").mkdir(parents=True)
    damage(run_dir, kind)
    assert damage_of_ledger(run_dir.ledger) is not None
    mend_ledger(run_dir)
    assert "restored as of step 4" in capsys.readouterr().err
    assert damage_of_ledger(run_dir.ledger) is None
    restored = Ledger(run_dir.ledger)
    assert [(row.step, row.digest) for row in restored.batches()] == before
    assert restored.journal.fact("later") is None
    restored.close()
    assert [path.name[:14] for path in run_dir.checkpoints.iterdir()] == ["unknown-step-9"]
    mend_ledger(run_dir)
    assert capsys.readouterr().err == ""


def test_a_damaged_ledger_without_a_whole_copy_says_what_to_do(run):
    run_dir, ledger, _ = run
    ledger.close()
    damage(run_dir, "pages")
    with pytest.raises(
        StorageError, match=r"run.db is damaged .*run.db.copy cannot take its place: it is gone.*new run"
    ):
        mend_ledger(run_dir)
    copy_of(run_dir.ledger).write_bytes(b"x" * 8192)
    with pytest.raises(StorageError, match="not a database"):
        mend_ledger(run_dir)


def test_copies_cost_a_bounded_share_of_the_time(run, monkeypatch):
    run_dir, _, _ = run
    now, made = [0.0], []

    def copy(path, final):
        made.append(now[0])
        now[0] += 2.0

    monkeypatch.setattr("mettle.storage.ledger_copy.copy_ledger", copy)
    copier = LedgerCopier(run_dir.ledger, clock=lambda: now[0])
    for step in range(1, 301):
        copier.copy(step)
        now[0] += 1.0
    assert made == [0.0, 102.0, 204.0]
    assert copier.step < 300
