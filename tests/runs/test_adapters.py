"""Adapters are found by run and by folder, and what there is not is said."""

import json

import pytest

from mettle.errors import UserError
from mettle.runs.adapters import base_of, find_adapter, list_adapters
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.weights import AdapterNotes, publish_weights

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.fixture
def run_dir(tmp_path):
    """A run with two versions of an adapter, and one beside it that trains all weights."""
    made = RunDir(tmp_path / "runs" / "one")
    full = RunDir(tmp_path / "runs" / "two")
    for run in (made, full):
        run.model.mkdir(parents=True)
        Ledger(run.ledger).close()
    for version in (3, 12):
        publish_weights(
            made.weights, version, lambda path: path.write_bytes(b"x" * 9), adapter=AdapterNotes(CONFIG, "d")
        )
    publish_weights(full.weights, 1, lambda path: path.write_bytes(b"y"))
    return made


def test_the_newest_of_each_run_is_listed(run_dir):
    (found,) = list_adapters(run_dir.path.parent)
    assert (found["run"], found["version"], found["versions"], found["rank"], found["bytes"]) == (
        "one",
        12,
        [3, 12],
        4,
        9,
    )


def test_a_run_a_version_and_a_folder_name_an_adapter(run_dir):
    assert find_adapter(run_dir.path) == run_dir.version(12)
    assert find_adapter(run_dir.path, 3) == run_dir.version(3) == find_adapter(run_dir.version(3))
    with pytest.raises(UserError, match="no adapter v4 on disk any more; it has v3, v12"):
        find_adapter(run_dir.path, 4)
    with pytest.raises(UserError, match="has no adapter: it trains all weights"):
        find_adapter(run_dir.path.parent / "two")
    with pytest.raises(UserError, match="has no versions"):
        find_adapter(run_dir.version(3), 3)


def test_the_base_is_said_or_known(run_dir, tmp_path):
    adapter = run_dir.version(3)
    assert base_of(run_dir.path, adapter, tmp_path) == tmp_path
    assert base_of(run_dir.path, adapter, None) == run_dir.model
    with pytest.raises(UserError, match=r"the base of .* is not known \(it names none\); say it with --base DIR"):
        base_of(adapter, adapter, None)
    (run_dir.model / "config.json").write_text("{}")
    (adapter / "adapter_config.json").write_text(json.dumps(CONFIG | {"base_model_name_or_path": str(run_dir.model)}))
    assert base_of(adapter, adapter, None) == run_dir.model
