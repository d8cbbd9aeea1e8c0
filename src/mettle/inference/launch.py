"""The engine that a config asks for: in this process, or beside it.

Parts: `open_engine`. torch is imported for an embedded engine alone, and only when it starts; what speaks to engines
elsewhere (`mettle.inference.elsewhere`) is imported where there are some.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from mettle.errors import UserError
from mettle.inference.config import InferenceConfig
from mettle.inference.engine.protocol import SamplingEngine
from mettle.inference.engine.sequences import DecodeText
from mettle.inference.hooks import EngineHooks, OnDeath

_DEFAULT_MODEL_LEN: Final = 4096


def open_engine(
    config: InferenceConfig,
    *,
    eos_token_ids: tuple[int, ...] = (),
    decode_text: DecodeText | None = None,
    on_death: OnDeath | None = None,
    logs: Path | None = None,
) -> SamplingEngine:
    """Start what the config asks for; `logs` is a folder for what child processes write.

    Raises: UserError, ServiceError.
    """
    told = EngineHooks(eos_token_ids, decode_text, on_death, logs)
    own = _open_own(config, told)
    if config.outside is None:
        return own
    from mettle.inference.elsewhere import with_outside

    return with_outside(config, config.outside, own, told)


def _open_own(config: InferenceConfig, told: EngineHooks) -> SamplingEngine:
    if config.engine == "remote" or config.replicas > 1:
        from mettle.inference.elsewhere import open_replicas

        return open_replicas(config, told)
    if config.engine == "vllm":
        return _vllm(config, told)
    from mettle.inference.engine.embedded import start_engine

    return start_engine(config, eos_token_ids=told.eos_token_ids, decode_text=told.decode_text, on_death=told.on_death)


def _vllm(config: InferenceConfig, told: EngineHooks) -> SamplingEngine:
    from mettle.inference.vllm.engine import VllmEngine

    settings = read_model_settings(config.model)
    positions = int(settings.get("max_position_embeddings") or _DEFAULT_MODEL_LEN)
    wanted = config.max_model_len or min(positions, _DEFAULT_MODEL_LEN)
    return VllmEngine(
        config,
        max_model_len=wanted,
        vocab_size=int(settings["vocab_size"]),
        eos_token_ids=told.eos_token_ids,
        decode_text=told.decode_text,
        on_death=told.on_death,
        log=told.logs / "vllm.out" if told.logs else None,
    )


def read_model_settings(model: Path) -> dict[str, Any]:
    """The model's config.json. Raises: UserError when it cannot be read, or says no vocabulary."""
    try:
        found = json.loads((model / "config.json").read_text())
        settings: dict[str, Any] = {**found, **found.get("text_config", {})}
        int(settings["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"no model in {model}: config.json: {type(error).__name__}: {error}") from error
    return settings
