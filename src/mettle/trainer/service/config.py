"""What a training service is started with. Imports without torch."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mettle.log import checked_level

NEEDED: Final = ("protobuf", "zstandard", "torch", "starlette", "uvicorn")


class ServiceLimits(BaseModel):
    """What a service takes of each key and of its machine, whichever base model it serves."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    max_models: int = Field(default=64, ge=1)
    """Models that one key may have in sessions that live."""

    max_waiting: int = Field(default=4096, ge=1)
    """Operations of one key that may wait; further ones get status 429 and are sent again by the client."""

    max_waiting_bytes: int = Field(default=1 << 30, ge=1 << 20)
    """Bytes that the operations of one key may hold while they wait."""

    max_stored_bytes: int = Field(default=50 << 30, ge=1 << 20)
    """Bytes of one key's checkpoints; a save beyond it fails."""

    max_rank: int = Field(default=256, ge=1)
    """Largest LoRA rank."""

    max_adapters: int = Field(default=64, ge=1)
    """Adapters to sample with that are in memory at a time, beside one copy of the base."""

    max_samplers: int = Field(default=4, ge=1)
    """Merged copies of the base in memory at a time: for adapters that no row of a batch can have, as of routers."""

    max_sequences: int = Field(default=64, ge=1)
    """Sequences that are sampled at a time with the same weights."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Longest sequence, in tokens; by default what the model allows, at most 4,096."""

    pass_tokens: int = Field(default=2048, ge=1)
    """Tokens of one forward and backward pass, padding included; between two passes other tenants have their turn."""

    gap_s: float = Field(default=120.0, gt=0)
    """Seconds that an operation waits for one with a smaller number that does not come."""

    session_s: float = Field(default=600.0, gt=0)
    """Seconds without a heartbeat after which a session has ended: its samples are cancelled, its memory freed."""

    keep_results_s: float = Field(default=3600.0, ge=0)
    """Seconds that results are kept after the end of their session."""

    poll_s: float = Field(default=20.0, gt=0, le=40)
    """Seconds that a question for a result is held open until there is one."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU when there is one."""

    num_threads: int = Field(default=1, ge=1)
    """Threads of one tensor operation, in training and in sampling each."""


class TrainServeConfig(ServiceLimits):
    """One service: a base model that many adapters are trained on."""

    base_model: Path
    """Directory of the base model in Hugging Face layout: config.json, safetensors, tokenizer.json."""

    name: str | None = None
    """The name that clients ask for, as `org/model`; by default the directory's last two parts. Clients load the
    tokenizer by it: where it is no name that they can look up, a folder of that name under their working directory."""

    data: Path = Path("training-service")
    """Directory of the service's database, states and checkpoints; a service that is started again goes on from it."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = Field(default=8100, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""

    keys: Path | None = None
    """File of keys, a line each: `tml-...` and a name. Needed where others reach the service. Without it every key that
    begins with `tml-` is a tenant of its own."""

    log_level: Annotated[str, AfterValidator(checked_level)] = "INFO"
    """Least severe level that is logged to standard error."""

    @property
    def model_name(self) -> str:
        """The name that clients ask for."""
        return self.name or "/".join(self.base_model.resolve().parts[-2:])


def missing_packages() -> list[str]:
    """What the service needs and is not installed here."""
    missing = []
    for name in NEEDED:
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(name)
    return missing
