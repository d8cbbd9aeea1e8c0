"""What a file of weights says of itself, and files that are none."""

import json

import pytest

from mettle.errors import UserError
from mettle.storage.headers import shapes_in, tensors_of


def file_of(path, header, claimed=None):
    data = json.dumps(header).encode()
    path.write_bytes((len(data) if claimed is None else claimed).to_bytes(8, "little") + data)
    return path


def test_tensors_are_read_by_name_with_type_and_shape(tmp_path):
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3]},
        "b": {"dtype": "BF16", "shape": []},
    }
    assert tensors_of(file_of(tmp_path / "one.safetensors", header)) == {"a": ("F32", (2, 3)), "b": ("BF16", ())}
    file_of(tmp_path / "two.safetensors", {"c": {"dtype": "I8", "shape": [4]}})
    assert shapes_in(tmp_path) == {"a": (2, 3), "b": (), "c": (4,)}


@pytest.mark.parametrize(
    "data",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n",
        b"",
        b"\xff\xff\xff\x7f\x00\x00\x00\x00{}",
        b"\x02\x00\x00\x00\x00\x00\x00\x00[]",
        b'\x07\x00\x00\x00\x00\x00\x00\x00{"a":1}',
        b"\x40\x00\x00\x00\x00\x00\x00\x00" + b'{"a":{"dtype":"F32"',
    ],
    ids=["pointer", "empty", "huge", "list", "no entry", "cut off"],
)
def test_a_file_that_is_none_is_told_in_a_line(tmp_path, data):
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    with pytest.raises(UserError, match="cannot be read as safetensors: ") as told:
        tensors_of(file)
    assert "\n" not in str(told.value)
