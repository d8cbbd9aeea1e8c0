"""Weights by collective: all that want a version get its bytes in one broadcast, and the file when that fails."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file
from tests.trainer.conftest import ALONE, make_learner

from mettle.errors import UserError
from mettle.inference.engine import broadcast as engine_side
from mettle.inference.engine.broadcast import ROOM, SENDER_FILE, receive, write_whole
from mettle.inference.engine.weights import read_state
from mettle.storage.weights import publish_weights
from mettle.trainer.broadcast import broadcasting
from mettle.trainer.config import LoraConfig, TrainerConfig
from mettle.trainer.publish import fixed_sequences, publish_version

STATE = {
    "whole": torch.arange(12.0).reshape(3, 4),
    "half": torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "scalar": torch.tensor(3.5),
    "none": torch.zeros(0, 4),
}


@pytest.fixture
def version(tmp_path):
    publish_weights(tmp_path, 1, lambda path: save_file(STATE, str(path)))
    return tmp_path / "v1"


def assert_whole(state):
    assert state is not None
    assert state.keys() == STATE.keys()
    for name, tensor in state.items():
        assert (tensor.dtype, tensor.shape) == (STATE[name].dtype, STATE[name].shape)
        assert torch.equal(tensor, STATE[name])


def test_engines_that_want_a_version_together_get_it_and_acknowledge_it(version, monkeypatch):
    monkeypatch.setattr("mettle.trainer.broadcast.GATHER_S", 0.5)
    at_once = threading.Barrier(3)

    def engine(folder):
        at_once.wait()
        return receive(folder)

    with broadcasting(version.parent, "gloo", "127.0.0.1") as sender, ThreadPoolExecutor(3) as engines:
        for state in engines.map(engine, [version] * 3):
            assert_whole(state)
        first = sender.num_rounds
        assert_whole(receive(version))  # one that is started later
    assert first < 3
    assert sender.num_acknowledged == 4
    assert not (version.parent / ROOM).exists()


def test_without_a_broadcast_the_file_is_read_at_once(version):
    assert receive(version) is None
    assert_whole(read_state(version))
    with broadcasting(version.parent, "file", "127.0.0.1") as sender:
        assert sender is None
        assert receive(version) is None


def test_a_publisher_that_was_killed_keeps_nobody_for_long(version, monkeypatch):
    monkeypatch.setattr(engine_side, "JOIN_S", 0.1)
    room = version.parent / ROOM
    room.mkdir()
    write_whole(room / SENDER_FILE, {"backend": "gloo"})
    assert_whole(read_state(version))
    assert [path.name for path in room.iterdir()] == [SENDER_FILE]
    with broadcasting(version.parent, "gloo", "127.0.0.1"):  # its successor
        assert_whole(receive(version))


def test_an_engine_that_dies_in_the_group_keeps_no_other_from_its_weights(version, monkeypatch):
    monkeypatch.setattr(engine_side, "GROUP_S", 1.0)
    with broadcasting(version.parent, "gloo", "127.0.0.1") as sender:
        write_whole(version.parent / ROOM / "want-dead.json", {"version": "v1"})  # and never joins
        assert_whole(read_state(version))  # from the file, if it stood in the same group
        monkeypatch.setattr(engine_side, "GROUP_S", 60.0)
        assert_whole(receive(version))
    assert sender.num_acknowledged >= 1


def test_a_version_that_is_not_there_is_not_waited_for_long(version, monkeypatch):
    monkeypatch.setattr(engine_side, "JOIN_S", 0.2)
    with broadcasting(version.parent, "gloo", "127.0.0.1"):
        assert receive(version.parent / "v2") is None
        monkeypatch.setattr(engine_side, "JOIN_S", 15.0)
        assert_whole(receive(version))


def test_what_a_trainer_publishes_arrives_to_the_last_bit(tmp_path, mini_model):
    learner = make_learner(mini_model)
    published = publish_version(tmp_path, 3, learner, fixed_sequences(264, 2))
    by_file = read_state(tmp_path / "v3")
    with broadcasting(tmp_path, "gloo", "127.0.0.1"):
        by_collective = receive(tmp_path / "v3")
    assert by_file.keys() == by_collective.keys()
    assert all(torch.equal(by_file[name], by_collective[name]) for name in by_file)
    assert (published.version, ALONE.size) == (3, 1)


def test_the_thread_ends_with_the_block(version):
    with broadcasting(version.parent, "gloo", "127.0.0.1"):
        assert any(thread.name == "weight-broadcast" for thread in threading.enumerate())
    assert not any(thread.name == "weight-broadcast" for thread in threading.enumerate())


def test_what_cannot_be_broadcast_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no GPU here"), broadcasting(tmp_path, "nccl", "127.0.0.1"):
        pass
    with pytest.raises(ValueError, match="adapters are a few hundred kB and go by file"):
        TrainerConfig(weight_broadcast="gloo", lora=LoraConfig())
