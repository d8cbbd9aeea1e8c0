"""Context parallelism: the tokens of a pass over several ranks, for sequences that are too long for one.

    columns of a pass   0 1 | 2 3 | 4 5 | 6 7        two ranks, so four pieces
    rank 0              0 1 |           | 6 7        the first and the last
    rank 1                  | 2 3 | 4 5 |            the second and the last but one

Every rank computes its own columns, all but attention without a word to the others. Attention asks its own queries of
everybody's keys and values, which a DTensor gathers and whose gradients it adds up again. A causal query looks at what
is before it, so a rank with one early piece and one late one has as much to compute as any other.

torch has a ring for this (`torch.distributed.tensor.experimental.context_parallel`). It knows CUDA's kernels alone,
takes no mask, and so neither runs on a CPU nor shares a prompt; docs/explanation/training.md has more of the choice.

Parts: `ContextGroup` (`cut` a layout, `whole` the results of the ranks), `attend`. Invariant: with what `whole` gives
every rank computes the loss of the whole pass, and the gradient that reaches its own tokens is theirs alone; the sum
over the ranks is the gradient of the pass.
Legend: B rows, T columns of the pass, t = T / ranks own columns, N heads, D head size, K targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from mettle.errors import UserError
from mettle.trainer.layout import Index, Layout, Targets

NAME = "mettle-context"
"""Of the attention, as transformers knows it."""
PIECES = 2
"""Of each rank: an early one and a late one."""
SEQUENCE = 2
"""The dimension of the tokens in queries, keys and values [B, N, t, D]."""


@dataclass(frozen=True, slots=True)
class OwnColumns:
    """What of a pass is this rank's: the layout of its columns, and its targets' places [k] among the pass's K. `whole`
    has the columns of all ranks, padded so that each has equally many."""

    layout: Layout
    columns: Index
    whole: Layout
    places: Index
    num_targets: int


class ContextGroup:
    """The ranks that share sequences, seen from one of them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self._attention_alone = ""

    def join(self, network: Any) -> None:
        """Let a transformers network attend so. Called before it computes."""
        AttentionInterface.register(NAME, partial(attend, self))
        self._attention_alone = network.config._attn_implementation
        network.config._attn_implementation = NAME

    @contextmanager
    def apart(self, network: Any) -> Iterator[None]:
        """Within the block each rank computes whole sequences of its own."""
        network.config._attn_implementation = self._attention_alone
        try:
            yield
        finally:
            network.config._attn_implementation = NAME

    def cut(self, layout: Layout) -> OwnColumns:
        """This rank's part of a pass, which every rank of the group has whole."""
        num_rows, width = layout.token_ids.shape
        padded = -(-width // (PIECES * self.size)) * PIECES * self.size
        columns = self.columns(padded)
        own_of = np.full(padded, -1, np.int64)  # [T] -> [t]
        own_of[columns] = np.arange(len(columns))
        at = own_of[layout.sources % width]
        places = np.flatnonzero(at >= 0)
        sources = layout.sources[places] // width * len(columns) + at[places]
        targets = Targets(**{name: getattr(layout.targets, name)[places] for name in Targets.__dataclass_fields__})

        def padded_to(array: Index, filler: int) -> Index:
            room = np.full((num_rows, padded), filler, np.int64)
            room[:, :width] = array
            return room

        whole = replace(
            layout,
            token_ids=padded_to(layout.token_ids, 0),
            positions=padded_to(layout.positions, 0),
            segments=None if layout.segments is None else padded_to(layout.segments, -1),
        )

        def own(array: Index) -> Index:
            return np.ascontiguousarray(array[:, columns])

        layout = replace(
            whole,
            token_ids=own(whole.token_ids),
            positions=own(whole.positions),
            segments=None if whole.segments is None else own(whole.segments),
            sources=sources,
            targets=targets,
            order=layout.order[places],
        )
        return OwnColumns(layout, columns, whole, places, len(at))

    def columns(self, width: int) -> Index:
        """The columns [t] of this rank in a pass of `width`, a multiple of the pieces of all ranks."""
        pieces = np.arange(width).reshape(PIECES * self.size, -1)
        return np.concatenate([pieces[self.rank], pieces[-1 - self.rank]])

    def whole(self, own_k: Tensor, own: OwnColumns) -> Tensor:
        """[K] of all ranks. The gradient goes to this rank's own alone."""
        places_k = torch.from_numpy(own.places).to(own_k.device)
        alone_K = own_k.new_zeros(own.num_targets).index_copy(0, places_k, own_k)
        told_K = alone_K.detach().clone()
        torch.distributed.all_reduce(told_K, group=self._mesh.get_group())
        return told_K.index_copy(0, places_k, own_k)

    def gathered(self, tensor_BNtD: Tensor) -> Tensor:
        """[B, N, T, D] in the order of the columns; its gradient is summed over the ranks and cut again."""
        cut = DTensor.from_local(tensor_BNtD, self._mesh, [Shard(SEQUENCE)], run_check=False)
        whole_BNTD: Tensor = cut.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        # As the ranks have them: 0, last, 1, last but one, ...
        pieces = whole_BNTD.chunk(PIECES * self.size, SEQUENCE)
        return torch.cat([*pieces[::PIECES], *pieces[1::PIECES][::-1]], SEQUENCE)


def refuse_attention(kinds: set[str]) -> None:
    """Raises: UserError for a model with layers of another kind: these would know of their own rank's tokens alone."""
    if kinds != {"full_attention"}:
        told = ", ".join(sorted(kinds)) or "a kind that its config does not tell"
        raise UserError(
            f"trainer.context_parallel is for models of full attention, and this one has layers of {told}: set it to 1"
        )


def attend(
    group: ContextGroup,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """This rank's queries [B, N, t, D] over all keys and values, which have fewer heads; [B, t, N, D] as transformers
    wants it."""
    repeats = query.shape[1] // key.shape[1]
    keys, values = (group.gathered(tensor).repeat_interleave(repeats, 1) for tensor in (key, value))
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scaling}
    if attention_mask is not None:
        found = scaled_dot_product_attention(query, keys, values, attn_mask=attention_mask, **options)
        return found.transpose(1, 2).contiguous(), None
    parts = []
    for number, piece in zip((group.rank, 2 * group.size - 1 - group.rank), query.chunk(PIECES, SEQUENCE), strict=True):
        length = piece.shape[SEQUENCE]
        end = (number + 1) * length  # what comes after the piece is not looked at
        bias = causal_lower_right(length, end)
        before = (piece, keys[:, :, :end], values[:, :, :end])
        parts.append(scaled_dot_product_attention(*before, attn_mask=bias, **options))
    return torch.cat(parts, SEQUENCE).transpose(1, 2).contiguous(), None
