"""Which decoder computes a model: the engine's own for the families that it knows, else transformers' own forward."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mettle.errors import UserError
from mettle.inference.engine.architecture import shape_from_config
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.weights import fuse

logger = logging.getLogger(__name__)


def make_decoder(
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    max_length: int | None = None,
) -> Decoder:
    """A decoder of the model that a Hugging Face config (as a dict) describes, for `max_length` positions or all.

    Raises: UserError when neither can compute it, or the weights do not fit.
    """
    try:
        shape = shape_from_config(config)
    except UserError as error:
        return _transformers_decoder(config, state, device, dtype, error)
    length = shape.max_positions if max_length is None else min(max_length, shape.max_positions)
    return Decoder(shape, fuse(shape, state, device, dtype), length)


def _transformers_decoder(
    config: Mapping[str, Any], state: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype, why: UserError
) -> Decoder:
    # Imported here: most models need none of it.
    from mettle.inference.engine.transformers_decoder import TransformersDecoder

    if not config.get("model_type") or config.get("quantization_config"):
        raise why
    try:
        decoder = TransformersDecoder.of_state(config, state, device, dtype)
    except UserError as error:
        raise UserError(f"{why}; nor can it go through transformers' own forward: {error}") from error
    about = {"model_type": decoder.shape.model_type, "reason": str(why)}
    logger.warning("this model goes through transformers' own forward, which is slower", extra=about)
    return decoder
