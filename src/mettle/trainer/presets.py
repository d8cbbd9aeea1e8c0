"""Policies that Mettle can make from nothing: their shapes, and the special tokens of Mettle's own tokenizer.

Importable without torch. `policy` turns a `PolicyConfig` into a model directory.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mettle.errors import UserError

NUM_BYTES = 256
SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
"""Ids 256 to 261, in this order; skipped when text is decoded."""
THINK_TOKENS = ("<think>", "</think>")
"""Ids 262 and 263; ordinary text when decoded, so that reasoning can be told from the answer."""
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS) + len(THINK_TOKENS)
PAD_TOKEN_ID = NUM_BYTES
END_TOKEN_ID = NUM_BYTES + 1


class PolicyConfig(BaseModel):
    """A policy of the Qwen3 architecture over bytes, with tied embeddings and random weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_layers: int = Field(default=3, ge=1)
    """Decoder layers."""
    hidden_size: int = Field(default=96, ge=8)
    """Width of the residual stream."""
    mlp_size: int = Field(default=256, ge=8)
    """Width inside the gated MLP."""
    num_heads: int = Field(default=4, ge=1)
    """Query heads."""
    num_kv_heads: int = Field(default=2, ge=1)
    """Key and value heads; each serves num_heads / num_kv_heads query heads."""
    head_dim: int = Field(default=32, ge=8)
    """Size of a head. 32 is the smallest that vLLM serves on a CPU."""
    max_positions: int = Field(default=1024, ge=16)
    """Longest conversation in tokens."""
    rope_theta: float = Field(default=100.0, gt=0)
    """Base of the rotary position embedding. 100 spends most frequencies on distances of 1 to 500 bytes."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""
    seed: int = 0
    """Seed of the initial weights; the same config gives the same bytes."""

    @model_validator(mode="after")
    def _heads_divide(self) -> PolicyConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        return self


class InitialPolicyConfig(BaseModel):
    """Where a run's initial policy comes from: RUN/config/policy.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path | None = None
    """A model directory in the Hugging Face layout; None makes `preset`."""
    preset: str = "tiny"
    """A shape from `PRESETS`."""
    seed: int = 0
    """Seed of the weights that are made."""


PRESETS: dict[str, PolicyConfig] = {
    "tiny": PolicyConfig(),
    "small": PolicyConfig(num_layers=4, hidden_size=128, mlp_size=384),
}
"""`tiny` has 357,984 parameters and learns on one CPU core in minutes; `small` has about 0.9 million."""


def preset(name: str) -> PolicyConfig:
    """The preset called `name`."""
    try:
        return PRESETS[name]
    except KeyError:
        raise UserError(f"there is no policy preset {name!r}; there are {', '.join(sorted(PRESETS))}") from None
