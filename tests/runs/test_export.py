"""The exported policy is the initial model's directory with the newest weights."""

import pytest

from mettle.errors import UserError
from mettle.runs.export import export_policy, find_version, write_model
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.weights import publish_weights


@pytest.fixture
def run(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.model.mkdir()
    (run_dir.model / "config.json").write_text("{}")
    (run_dir.model / "model.safetensors").write_bytes(b"old")
    ledger = Ledger(run_dir.ledger)
    yield run_dir, ledger
    ledger.close()


def test_the_newest_weights_are_exported_with_the_models_own_files(run):
    run_dir, ledger = run
    for version in (0, 1):
        data = f"v{version}".encode()
        ledger.publish(publish_weights(run_dir.weights, version, lambda path, data=data: path.write_bytes(data)))
    policy = export_policy(run_dir, ledger)
    assert (policy / "model.safetensors").read_bytes() == b"v1"
    assert (policy / "config.json").read_text() == "{}"
    assert export_policy(run_dir, ledger) == policy


def test_a_run_without_weights_has_no_policy_to_export(run):
    with pytest.raises(UserError, match="no weights yet"):
        export_policy(*run)


def test_any_version_on_disk_is_written_elsewhere_and_one_that_is_not_names_those_that_are(run, tmp_path_factory):
    run_dir, _ = run
    for version in (0, 3, 4):
        data = f"v{version}".encode()
        publish_weights(run_dir.weights, version, lambda path, data=data: path.write_bytes(data))
    (run_dir.weights / "v5").mkdir()  # one that is being removed
    folder = tmp_path_factory.mktemp("out") / "third"
    write_model(run_dir, find_version(run_dir, 3), folder)
    assert (folder / "model.safetensors").read_bytes() == b"v3"
    assert (folder / "config.json").read_text() == "{}"
    assert find_version(run_dir).version == 4
    with pytest.raises(UserError, match=r"has no version v2 on disk any more; it has v0, v3, v4"):
        find_version(run_dir, 2)
    with pytest.raises(UserError, match="has no adapter: it trains all weights"):
        find_version(run_dir, kind="lora")
