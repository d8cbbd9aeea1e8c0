"""However torch tells that the disk is full, it is a `StorageError` that names the checkpoint."""

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from mettle.errors import StorageError
from mettle.storage.checkpoints import newest_checkpoint, write_checkpoint
from mettle.trainer import checkpoint


class Alone:
    class world:
        size = 1

    class tenant:
        is_base = True


def test_a_write_that_torch_calls_short_is_a_full_disk(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise CheckpointException("", {0: (RuntimeError("unexpected pos 704 vs 598"), None)})

    monkeypatch.setattr("torch.distributed.checkpoint.state_dict_saver.save", fail)
    monkeypatch.setattr(checkpoint, "_state", lambda learner, step: {})
    with pytest.raises(StorageError, match=r"no space left.*free some space"):
        write_checkpoint(tmp_path, 3, lambda folder: checkpoint.save_learner(folder, Alone, 3), {})
    assert newest_checkpoint(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
