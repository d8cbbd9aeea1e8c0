"""A safetensors file written straight from the tensors' memory and hashed in another thread meanwhile.

The bytes are those of `safetensors.torch.save_file`, after which the file would have to be read again for its digest.
Invariant: the digest is that of the bytes that were handed to the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
PIECE_BYTES = 16 * 2**20


def write_weights(state: Mapping[str, Tensor], path: Path) -> str:
    """Write `state` to `path`; returns the sha256 of the file. The tensors are floating, contiguous and on the CPU."""
    order = sorted(state, key=lambda name: (-state[name].element_size(), _NAMES[state[name].dtype], name))
    pieces: list[bytes | memoryview] = [_header(state, order)]
    pieces += (piece for name in order for piece in _pieces(state[name]))
    with ThreadPoolExecutor(1) as hasher, path.open("wb") as file:
        # Both sides let go of the interpreter's lock for a piece as long as this.
        digest = hasher.submit(_digest, pieces)
        for piece in pieces:
            file.write(piece)
        return digest.result()


def _header(state: Mapping[str, Tensor], order: Sequence[str]) -> bytes:
    about: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = state[name]
        start, end = end, end + tensor.nbytes
        about[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(about, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    if tensor.numel():
        whole = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(whole), PIECE_BYTES):
            yield whole[start : start + PIECE_BYTES]


def _digest(pieces: Sequence[bytes | memoryview]) -> str:
    total = hashlib.sha256()
    for piece in pieces:
        total.update(piece)
    return total.hexdigest()
