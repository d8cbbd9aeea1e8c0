"""The file is byte for byte that of safetensors, and so is its digest."""

import hashlib

import pytest
import torch
from safetensors.torch import save_file

from mettle.storage.files import sha256_file
from mettle.trainer import weight_writer
from mettle.trainer.weight_writer import write_weights

STATES = {
    "names and types": {
        "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "a.é": torch.ones(2, 2), "half": torch.ones(3).half(),
        "empty": torch.zeros(0, 4), "scalar": torch.tensor(3.0), "z": torch.randn(5, 7),
    },
    "one": {"w": torch.randn(1000, 33)},
    "none": {},
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("piece", [7, 2**24])
def test_it_writes_what_safetensors_writes(tmp_path, monkeypatch, name, piece):
    monkeypatch.setattr(weight_writer, "PIECE_BYTES", piece)
    save_file(STATES[name], tmp_path / "theirs", metadata={"format": "pt"})
    digest = write_weights(STATES[name], tmp_path / "ours")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert digest == sha256_file(tmp_path / "ours") == hashlib.sha256((tmp_path / "theirs").read_bytes()).hexdigest()
