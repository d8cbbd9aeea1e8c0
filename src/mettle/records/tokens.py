"""What is known of a token, declared once; everything that carries tokens is a view of the declaration.

Parts: `TokenRow` (the columns, each with type, fill value and meaning), `Sample` (one sequence of a rollout),
`Batch` (the sequences of one optimiser step, end to end). The trainer's targets derive from `TokenRow` too, first
as arrays and then as tensors, and batch files hold one array a column. So a new column is one line here, whoever fills
it (an algorithm, or `orchestrator/samples.py`) and whoever reads it (a loss).

Everything is flat, without padding: how sequences are laid out for a device is the trainer's business. Invariant: all
columns of one object have the same length. Legend: N tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

Ints = TypeVar("Ints")
Floats = TypeVar("Floats")
Bools = TypeVar("Bools")


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """`fill` is the value of a token that nobody says anything else of. `is_credit`: algorithms may return it.

    A column that `is_wide` has W numbers a token, [N, W]; W is 0 where nobody recorded them.
    """

    dtype: type[np.generic]
    fill: float
    meaning: str
    is_credit: bool = False
    is_wide: bool = False


def _known(dtype: type[np.generic], fill: float, meaning: str) -> dict[str, TokenColumn]:
    return {"column": TokenColumn(dtype, fill, meaning)}


def _wide(dtype: type[np.generic], fill: float, meaning: str) -> dict[str, TokenColumn]:
    return {"column": TokenColumn(dtype, fill, meaning, is_wide=True)}


def _list(dtype: type[np.generic], fill: float, meaning: str) -> dict[str, TokenColumn]:
    return {"column": TokenColumn(dtype, fill, meaning, is_credit=True, is_wide=True)}


def _credit(meaning: str) -> dict[str, TokenColumn]:
    return {"column": TokenColumn(np.float32, 0.0, meaning, is_credit=True)}


@dataclass(frozen=True, slots=True)
class TokenRow(Generic[Ints, Floats, Bools]):
    """The columns, held as whatever arrays or tensors a view uses. A weight of 0: no member of that loss component."""

    token_ids: Ints = field(metadata=_known(np.int32, 0, "the token"))
    loss_mask: Bools = field(metadata=_known(np.bool_, 0, "True where the policy sampled it"))
    logprobs: Floats = field(metadata=_known(np.float32, 0, "the sampler's natural-log probability of it"))
    versions: Ints = field(metadata=_known(np.int32, -1, "the policy version that sampled it; -1 where none did"))
    temperatures: Floats = field(metadata=_known(np.float32, 1, "the temperature that it was sampled at"))
    experts: Ints = field(
        metadata=_wide(
            np.int16, -1, "the experts, layer by layer, that the engine's routers chose when they predicted it"
        )
    )
    advantages: Floats = field(metadata=_credit("how much better than expected it was; > 0 makes it likelier"))
    rl_weights: Floats = field(metadata=_credit("weight in the policy-gradient component"))
    ce_weights: Floats = field(metadata=_credit("weight in the cross-entropy component"))
    ref_kl_weights: Floats = field(metadata=_credit("weight in the component that pulls towards a reference"))
    ref_logprobs: Floats = field(metadata=_credit("the reference model's natural-log probability of it"))
    distill_weights: Floats = field(metadata=_credit("weight in the component that fits a teacher's distribution"))
    teacher_ids: Ints = field(metadata=_list(np.int32, 0, "the tokens that a teacher would likeliest have put here"))
    teacher_logprobs: Floats = field(
        metadata=_list(np.float32, -np.inf, "the teacher's natural-log probabilities of those; -inf where it has none")
    )


COLUMNS: dict[str, TokenColumn] = {f.name: f.metadata["column"] for f in fields(TokenRow)}
_FILLS = tuple((name, column.dtype, column.fill, column.is_wide) for name, column in COLUMNS.items())
_columns_of = attrgetter(*COLUMNS)
WIDE_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.is_wide and column.is_credit)
"""Of those that an algorithm may fill, the lists."""
CREDIT_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.is_credit)
"""What an algorithm may say of a token."""


class SampledBy(NamedTuple):
    """Tokens `start` to `stop` of a sample or a batch were sampled by this replica of the engine."""

    start: int
    stop: int
    replica: str


@dataclass(frozen=True, slots=True)
class Sample(TokenRow[IntArray, FloatArray, BoolArray]):
    """One token sequence: prompt and sampled tokens interleaved as they were seen by the model.

    `replicas` has the tokens of which an engine of several says that it sampled them, in order.
    """

    draw_id: int = -1
    rollout_id: str = ""
    replicas: tuple[SampledBy, ...] = ()

    def __post_init__(self) -> None:
        _check_lengths(self)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among the sampled tokens; -1 when none was sampled."""
        sampled = self.versions[self.loss_mask]
        return int(sampled.min()) if sampled.size else -1


@dataclass(frozen=True, slots=True)
class Batch(TokenRow[IntArray, FloatArray, BoolArray]):
    """One optimiser step: S sequences laid end to end.

    Step n trains on v{n-1} and makes v{n}; steps count from 1. `draw_ids` are the task draws inside, `staleness` the
    (mean, max) over sampled tokens of (step - 1) - version. `replicas` is that of the samples, over the batch's tokens.
    """

    sequence_lengths: IntArray
    step: int
    draw_ids: tuple[int, ...]
    staleness: tuple[float, int] = (0.0, 0)
    replicas: tuple[SampledBy, ...] = ()

    def __post_init__(self) -> None:
        _check_lengths(self)
        if int(self.sequence_lengths.sum()) != len(self.token_ids):
            raise ValueError(f"sequence_lengths sum to {int(self.sequence_lengths.sum())}, not {len(self.token_ids)}")


def filled(length: int, given: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Every column over `length` tokens: as given, in its declared type, and its fill value where nothing is given."""
    found: dict[str, NDArray[Any]] = {}
    for name, dtype, fill, is_wide in _FILLS:
        value = given.get(name)
        if value is not None:
            found[name] = np.asarray(value, dtype)
        elif is_wide:
            found[name] = np.empty((length, 0), dtype)
        elif fill:  # `np.full` takes four times as long
            found[name] = np.empty(length, dtype)
            found[name].fill(fill)
        else:
            found[name] = np.zeros(length, dtype)
    return found


def end_to_end(rows: Iterable[TokenRow[IntArray, FloatArray, BoolArray]]) -> dict[str, Any]:
    """Every column of the rows, one row after the other."""
    found = list(rows)
    return {
        name: np.concatenate(
            _alike([getattr(row, name) for row in found], column)
            if column.is_wide
            else [getattr(r, name) for r in found]
        )
        for name, column in COLUMNS.items()
    }


def _alike(arrays: list[NDArray[Any]], column: TokenColumn) -> list[NDArray[Any]]:
    """Arrays [N, W] of one W: where nothing is recorded, that is said of each token. Lists of credit are filled up.

    Raises: ValueError when two have different widths otherwise, for then they are of different models.
    """
    widths = {array.shape[1] for array in arrays} - {0}
    if column.is_credit:
        most = max(widths, default=0)
        return [array if array.shape[1] == most else _filled_up(array, most, column) for array in arrays]
    if len(widths) > 1:
        raise ValueError(f"sequences of one batch have {' and '.join(map(str, sorted(widths)))} experts a token")
    width = max(widths, default=0)
    return [
        array if array.shape[1] == width else np.full((len(array), width), column.fill, column.dtype)
        for array in arrays
    ]


def _filled_up(array: NDArray[Any], width: int, column: TokenColumn) -> NDArray[Any]:
    return np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=column.fill)


def _check_lengths(record: Sample | Batch) -> None:
    shape = record.token_ids.shape
    for (name, column), array in zip(COLUMNS.items(), _columns_of(record), strict=True):
        if (array.shape[:1] if column.is_wide else array.shape) != shape:
            raise ValueError(f"{type(record).__name__}.{name} has shape {array.shape}, token_ids has {shape}")
