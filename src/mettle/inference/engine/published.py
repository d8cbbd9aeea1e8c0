"""What was published on disk, read and made ready to serve: whole weights, and adapters.

Invariant: what comes out of here is complete and fits the model, and `prove` has compared it with its publisher's own
log-probabilities wherever these came along; else it is `WeightsRejected`, in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from mettle.errors import StorageError, UserError
from mettle.inference.engine.adapter_files import merged_state, read_adapter
from mettle.inference.engine.adapters import AdapterWeights, NotByRow, fit_adapter
from mettle.inference.engine.canary import check_canary
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.protocol import WeightsRejected
from mettle.inference.engine.weights import read_state
from mettle.records.versions import CanaryCheck
from mettle.storage.weights import base_digest_of, model_digest, read_canary, read_version


class PublishedPolicy(NamedTuple):
    """A version of the policy: a decoder, and the adapter of its rows where it is the base's. `is_base` says so."""

    decoder: Decoder
    adapter: AdapterWeights | None = None
    is_base: bool = False


class PublishedAdapter(NamedTuple):
    """An adapter's weights, and the version that they are."""

    version: int
    weights: AdapterWeights


def load_published(
    folder: Path,
    version: int,
    base: Path | None,
    make: Callable[[Mapping[str, Tensor]], Decoder],
    base_decoder: Decoder | None = None,
) -> PublishedPolicy:
    """A published version, ready to serve; `make` makes a decoder of a state dict.

    An adapter is kept beside the base, which is `base_decoder` or else read from `base`, and costs its own size. Only
    what no row can have of its own (a mixture's routers, a model of transformers' own forward) is added to a copy of
    the base's weights.
    Raises: WeightsRejected when the folder is not a complete publication of `version`, or does not fit the model.
    """
    try:
        published = read_version(folder)
        if published.kind == "lora" and base is None:
            raise WeightsRejected(f"{folder} holds an adapter, and this engine was started without its base")
        if published.version != version:
            raise WeightsRejected(f"{folder} holds version {published.version}, not {version}")
        if published.kind == "lora":
            assert base is not None
            if base_digest_of(folder) != model_digest(base):
                raise WeightsRejected(f"{folder} holds an adapter of another base than {base}")
            return _beside_base(folder, base, make, base_decoder)
        return PublishedPolicy(make(read_state(folder)))
    except (StorageError, UserError, KeyError, ValueError) as error:
        raise WeightsRejected(f"version {version} is not served: {error}") from error


def _beside_base(
    folder: Path, base: Path, make: Callable[[Mapping[str, Tensor]], Decoder], base_decoder: Decoder | None
) -> PublishedPolicy:
    file = read_adapter(folder)
    decoder = base_decoder or make(read_state(base))
    try:
        if decoder.forward_of == "mettle":
            adapter = fit_adapter(decoder.shape, file, decoder.device, decoder.dtype)
            return PublishedPolicy(decoder, adapter, is_base=True)
    except NotByRow:
        pass
    return PublishedPolicy(make(merged_state(read_state(base), file)))


def load_adapter(
    folder: Path, version: int | None, next_version: int, decoder: Decoder, base: Path | None
) -> PublishedAdapter:
    """The adapter in a folder, made ready for `decoder`, and its version.

    A folder that was published says its version, which is `version` where that is given; any other PEFT folder gets
    `next_version`.
    Raises: WeightsRejected when it is no adapter, is of another base, or is more than plain LoRA.
    """
    if decoder.forward_of != "mettle":
        kind = decoder.shape.model_type
        raise WeightsRejected(f"no adapters are served of {kind!r}, which goes through transformers' own forward")
    what = "the adapter" if version is None else f"version {version} of the adapter"
    try:
        number = next_version
        if version is not None or (folder / "manifest.json").exists():
            published = read_version(folder)
            if published.kind != "lora":
                raise WeightsRejected(f"{folder} holds {published.kind!r} weights, and no adapter")
            if version not in (None, published.version):
                raise WeightsRejected(f"{folder} holds version {published.version}, not {version}")
            if base is not None and base_digest_of(folder) != model_digest(base):
                raise WeightsRejected(f"{folder} holds an adapter of another base than {base}")
            number = published.version
        file = read_adapter(folder)
        return PublishedAdapter(number, fit_adapter(decoder.shape, file, decoder.device, decoder.dtype))
    except (StorageError, UserError, KeyError, ValueError) as error:
        raise WeightsRejected(f"{what} is not served: {error}") from error


def prove(
    decoder: Decoder, folder: Path, version: int, tolerance: float, adapter: AdapterWeights | None = None
) -> CanaryCheck | None:
    """Check the canary of a published version against a decoder; None when it was published without one."""
    try:
        canary = read_canary(folder)
    except (OSError, KeyError, ValueError) as error:
        raise WeightsRejected(f"the canary of version {version} cannot be read: {error}") from error
    return None if canary is None else check_canary(decoder, canary, version, tolerance, adapter)
