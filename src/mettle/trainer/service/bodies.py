"""The JSON bodies of requests that become operations, checked when their turn comes or before.

A training client counts its requests, so one that is wrong must still use up its number: it is accepted and fails by
its future. Parts: a class for each, `read_body_of`. Invariant: a body that is read is whole and in range.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from mettle.errors import UserError
from mettle.web.bodies import first_fault

B = TypeVar("B", bound=BaseModel)

MIN_TTL_S: Final = 3600
MAX_TTL_S: Final = 10 * 365 * 86_400
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def _safe_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("a name has letters, digits, '.', '_' and '-', at most 128, and no path")
    return name


Name = Annotated[str, AfterValidator(_safe_name)]
Ttl = Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S)]


class Body(BaseModel):
    """Fields of newer clients are passed over."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), allow_inf_nan=False)


class LoraBody(Body):
    """Which LoRA."""

    rank: int = Field(ge=1)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(Body):
    """Which optimiser a model is to have."""

    type: Literal["adamw"] = "adamw"


class CreateModelBody(Body):
    session_id: str
    model_seq_id: int = Field(ge=0, le=10**9)
    base_model: str
    lora_config: LoraBody
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerBody = OptimizerBody()


class AdamBody(Body):
    """torch.optim.AdamW's numbers, for one step."""

    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, ge=0)


class OptimStepBody(Body):
    adam_params: AdamBody | None = None
    optimizer_params: OptimizerBody | None = None


class SaveBody(Body):
    """A save of any kind. `path` is the name."""

    path: Name | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: int | None = Field(default=None, ge=0)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    age_encryption_recipients: list[str] | None = None


class LoadBody(Body):
    path: str
    optimizer: bool = False
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, le=10**9)
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerBody | None = None


class DrawBody(Body):
    """How a sample is drawn."""

    max_tokens: int | None = Field(default=None, ge=0)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)


class SampleBody(Body):
    prompt: dict[str, Any]
    sampling_params: DrawBody
    num_samples: int = Field(default=1, ge=1, le=1024)
    sampling_session_id: str | None = None
    seq_id: int | None = Field(default=None, ge=0)
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=1000)
    topk_sample_logprobs: int = Field(default=0, ge=0, le=1000)
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = Field(default=0, ge=0, le=100)
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    record_stability_info: bool | None = None


def read_body_of(kind: type[B], data: bytes | dict[str, Any]) -> B:
    """A body. Raises: UserError with the first thing that is wrong."""
    try:
        return kind.model_validate_json(data) if isinstance(data, bytes) else kind.model_validate(data)
    except ValidationError as error:
        field, message = first_fault(error.errors(include_url=False, include_input=False, include_context=False))
        raise UserError(f"{field}: {message}" if field else message) from None
