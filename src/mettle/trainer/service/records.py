"""What the service keeps of each noun: sessions, models, operations, samplers, checkpoints. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

INFLIGHT = ":inflight"
"""The end of the name of a model's one sampler that later saves change."""
State = Literal["waiting", "done", "failed", "cancelled"]
Kind = Literal[
    "create_model", "forward", "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler",
    "save_weights_external", "load_weights", "unload_model", "sample", "refused",
]  # fmt: skip
CheckpointKind = Literal["training", "sampler", "external"]
SEGMENTS: Mapping[CheckpointKind, str] = {
    "training": "weights",
    "sampler": "sampler_weights",
    "external": "external_weights",
}


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Which LoRA a model is: its rank and the parts of the base that it changes. The scale is alpha / rank."""

    rank: int
    seed: int
    is_attention: bool = True
    is_mlp: bool = True
    is_unembedding: bool = True
    alpha: float = 32.0


@dataclass(frozen=True, slots=True)
class ClientSession:
    """One client program. It lives by its heartbeat."""

    session_id: str
    owner: str
    created_at: float
    last_seen_at: float
    ended_at: float | None
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """One training run: an adapter with its optimiser. The state on disk is that after `snapshot_seq`."""

    model_id: str
    session_id: str
    owner: str
    base_model: str
    spec: AdapterSpec
    metadata: Mapping[str, Any]
    created_at: float
    last_request_at: float
    last_seq: int
    snapshot_seq: int
    snapshot: str


@dataclass(frozen=True, slots=True)
class Operation:
    """A request that was accepted. `model_id` and `seq_id` are "" and -1 for a sample, which has no order."""

    request_id: str
    kind: Kind
    owner: str
    session_id: str
    model_id: str
    seq_id: int
    body: bytes
    digest: bytes
    created_at: float = 0.0
    state: State = "waiting"
    num_samples: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an operation: a result (JSON, or protobuf of a pass or a sample), or an error with its category."""

    state: State
    kind: Kind
    result: bytes = b""
    category: str = ""
    error: str = ""
    num_tokens: int = 0
    """That it has read and written, which is what is counted of it."""


@dataclass(frozen=True, slots=True)
class OwnerTokens:
    """What an owner's operations have read and written in all, `since` the first of them."""

    owner: str
    since: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampling session: weights to sample with. `folder` is "" for the base, and for weights not saved yet."""

    sampler_id: str
    session_id: str
    owner: str
    base_model: str
    model_path: str
    folder: str
    created_at: float
    version: int = 0

    @property
    def is_inflight(self) -> bool:
        """Whether a later save changes what it samples with; `version` then counts the saves."""
        return self.sampler_id.endswith(INFLIGHT)


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """Weights under a name. `path` is what clients call it."""

    path: str
    model_id: str
    owner: str
    kind: CheckpointKind
    name: str
    folder: str
    num_bytes: int
    created_at: float
    expires_at: float | None
    is_public: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    spec: AdapterSpec | None = None
    base_model: str = ""

    @property
    def checkpoint_id(self) -> str:
        """The last two parts of its path."""
        return f"{SEGMENTS[self.kind]}/{self.name}"
