"""Each rank reads its part of a model from the files, and no more.

    config ──► network without storage ──► cut among the ranks ──► room for the own part ──► slices of the files into it

Parts: `ModelFiles` (the tensors of a Hugging Face folder), `sources_of` (which of them make up each parameter),
`read_parts`, `bare_network`. A mixture's experts lie in the files one by one, and stacked in the network: a rank with
some of the experts, or some rows of each, reads those. Invariants: every parameter is filled, or `CannotCut` is raised
before one is; a file is mapped anew after `MAPPED_BYTES` of it were read, so what was copied does not stay mapped too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM

from mettle.errors import MettleError

MAPPED_BYTES = 2**26
"""Of a file that may be mapped at a time: 64 MiB, or one slice that is larger."""
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
Slices = tuple[slice, ...]


class CannotCut(MettleError):
    """These files, or this network, can only be read whole."""


class Piece(NamedTuple):
    """A tensor of the files in its place in a parameter: `at` in the stacked dimension (None where nothing is stacked),
    `row` in the next one."""

    name: str
    at: int | None = None
    row: int = 0


@dataclass(frozen=True, slots=True)
class TensorInFile:
    """Where a tensor lies, and what it is."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


class ModelFiles:
    """The safetensors of a folder. Raises: CannotCut when there are none."""

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, TensorInFile] = {}
        self._open: tuple[Path, Any] | None = None
        self._num_read = 0
        try:
            for path in _files(folder):
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        lying = file.get_slice(name)
                        self.tensors[name] = TensorInFile(path, tuple(lying.get_shape()), str(lying.get_dtype()))
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise CannotCut(f"{folder}: {error}") from error

    def read(self, name: str, slices: Slices) -> Tensor:
        """A part of a tensor; copy it before the next one is read."""
        path = self.tensors[name].path
        if self._open is None or self._open[0] != path or self._num_read > MAPPED_BYTES:
            self._open, self._num_read = None, 0  # unmaps
            self._open = path, safe_open(path, framework="pt")
        part: Tensor = self._open[1].get_slice(name)[slices]
        self._num_read += part.nbytes
        return part

    def holds_only(self, dtype: torch.dtype) -> bool:
        """Whether every number is stored in `dtype`."""
        names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
        return {names.get(tensor.dtype) for tensor in self.tensors.values()} == {dtype}

    def close(self) -> None:
        """Let the file go."""
        self._open = None


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        return [folder / WHOLE]
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def bare_network(folder: Path, dtype: torch.dtype) -> Any:
    """The network of a model directory, without storage; nothing of its weights is read."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    network.tie_weights()
    return network


def sources_of(network: Any, files: ModelFiles) -> dict[str, list[Piece]]:
    """Of each of the network's parameters and stored buffers, by name, the tensors of the files that make it up.

    Raises: CannotCut when one is missing, of another shape, or converted in another way than by stacking.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, rename_source_key

    conversions = get_model_conversion_mapping(network)
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    renamings: Any = [each for each in conversions if not isinstance(each, WeightConverter)]
    wanted = dict(network.state_dict())
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    stacked: dict[str, dict[str, list[str]]] = {}
    found: dict[str, list[Piece]] = {}
    for name in files.tensors:
        target, pattern = rename_source_key(name, renamings, converters, network.base_model_prefix, wanted)
        if pattern is None:
            found[target] = [Piece(name)]
        else:
            stacked.setdefault(target, {}).setdefault(pattern, []).append(name)
    for target, groups in stacked.items():
        converter = by_pattern[next(iter(groups))]
        kinds = [(type(each), getattr(each, "dim", None)) for each in converter.operations]
        if kinds not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
            raise CannotCut(f"{target} is converted by {', '.join(kind.__name__ for kind, _ in kinds)}")
        found[target] = list(_stacked(files, [groups.get(each, []) for each in converter.source_patterns]))
    tied = set(network.all_tied_weights_keys)
    for name, tensor in wanted.items():
        if name not in found and name not in tied:
            raise CannotCut(f"no tensor is {name}")
        if name in found and (shape := _shape_of(files, found[name])) != tuple(tensor.shape):
            raise CannotCut(f"{name} is {shape} in the files and {tuple(tensor.shape)} in the network")
    return {name: pieces for name, pieces in found.items() if name in wanted}


def _stacked(files: ModelFiles, groups: Sequence[Sequence[str]]) -> Iterator[Piece]:
    """One number after the other, and of each number a piece of every group, row below row."""
    ordered = [sorted(names, key=_natural) for names in groups]
    if len({len(names) for names in ordered}) != 1:
        raise CannotCut(f"of what {groups[0][:1]} is stacked with, some is missing")
    for at, names in enumerate(zip(*ordered, strict=True)):
        row = 0
        for name in names:
            yield Piece(name, at, row)
            row += files.tensors[name].shape[0]


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers in a name by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _shape_of(files: ModelFiles, pieces: Sequence[Piece]) -> tuple[int, ...]:
    shapes = [files.tensors[piece.name].shape for piece in pieces]
    if pieces[0].at is None:
        return shapes[0]
    number = 1 + max(piece.at or 0 for piece in pieces)
    rows = max(piece.row + shape[0] for piece, shape in zip(pieces, shapes, strict=True))
    return (number, rows, *shapes[0][1:])


@torch.no_grad()
def read_parts(parameters: Mapping[str, Tensor], sources: Mapping[str, list[Piece]], files: ModelFiles) -> None:
    """Fill this rank's part of each parameter. What has no source is tied to another one, and left to it."""
    try:
        for name, parameter in parameters.items():
            if name in sources:
                fill_part(parameter, sources[name], files)
    finally:
        files.close()


def fill_part(parameter: Tensor, pieces: Sequence[Piece], files: ModelFiles) -> None:
    """Read this rank's part of one parameter into the place that it has."""
    local, begins = own_part(parameter)
    if not local.numel():
        return
    for piece in pieces:
        shape = files.tensors[piece.name].shape
        room, at = local, begins
        if piece.at is not None:
            if not begins[0] <= piece.at < begins[0] + len(local):
                continue
            room, at = local[piece.at - begins[0]], (begins[1] - piece.row, *begins[2:])
        _copy(room, at, piece.name, shape, files)


def own_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What this rank has of a parameter, and where in the whole it begins."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), (0,) * parameter.ndim
    _, begins = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    with torch.no_grad():
        return parameter.to_local(), tuple(begins)


def _copy(room: Tensor, at: tuple[int, ...], name: str, shape: tuple[int, ...], files: ModelFiles) -> None:
    """Copy what of a tensor falls into `room`, whose first number stands at `at` of that tensor."""
    into, of = [], []
    for begin, size, length in zip(at, room.shape, shape, strict=True):
        start, stop = max(0, begin), min(length, begin + size)
        if start >= stop:
            return
        of.append(slice(start, stop))
        into.append(slice(start - begin, stop - begin))
    room[tuple(into)].copy_(files.read(name, tuple(of)))


def restore_buffers(network: Any, device: torch.device) -> None:
    """Give the buffers that are in no file what the model's author computes them from.

    Raises: CannotCut where the author's own initialisation leaves one open.
    """
    for module in network.modules():
        own = {name: buffer for name, buffer in module.named_buffers(recurse=False)}
        lost = {name: buffer for name, buffer in own.items() if name in module._non_persistent_buffers_set}
        for name, buffer in lost.items():
            # Whatever is not computed anew is seen by it.
            value = torch.full(buffer.shape, float("nan")) if buffer.is_floating_point() else None
            if value is None:
                raise CannotCut(f"{type(module).__name__}.{name} is no number that could be missed")
            setattr(module, name, value.to(device=device, dtype=buffer.dtype))
        if lost:
            network._init_weights(module)
        if any(not torch.isfinite(getattr(module, name)).all() for name in lost):
            raise CannotCut(f"{type(module).__name__} does not say what its buffers are")
