"""What requests ask, as pydantic models: of a JSON body, and of a query.

Invariant: a field that no model has is refused and named; null is a field left out, but where it means "no limit".
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import hashlib
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import HTTPConnection, Request

from mettle.errors import UserError
from mettle.sandbox.machines.commands import CommandSpec
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.service.long_bodies import SHORT_BYTES
from mettle.sandbox.service.state import holder_of, service_of
from mettle.web import bodies
from mettle.web.bodies import first_fault

M = TypeVar("M", bound=BaseModel)
Seconds = Annotated[float, Field(gt=0, lt=1e9)]
_DEFAULT: Final = MachineConfig()
_SHOWN: Final = 80


class RequestBody(BaseModel):
    """A JSON object of the service's own calls; a text is no number here, and a number no text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, fields: Any) -> Any:
        nullable = _nullable(cls)
        return {name: value for name, value in fields.items() if value is not None or name in nullable}


@functools.cache
def _nullable(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(name for name, field in model.model_fields.items() if type(None) in get_args(field.annotation))


class MachineBody(RequestBody):
    """A machine to make; the fields are those of `MachineConfig`."""

    memory_mb: int = _DEFAULT.memory_mb
    disk_mb: int = _DEFAULT.disk_mb
    max_processes: int = _DEFAULT.max_processes
    cpus: Seconds | None = _DEFAULT.cpus
    lifetime_s: Seconds | None = _DEFAULT.lifetime_s
    idle_s: Seconds | None = _DEFAULT.idle_s
    env: dict[str, str] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)
    image: Annotated[str, Field(min_length=1, max_length=300)] | None = None
    name: str = ""

    def config(self) -> MachineConfig:
        """Raises: UserError, also for what is wrong with the environment."""
        config = MachineConfig(**self.model_dump(exclude={"name"}))
        config.limits()
        return config


class SelectionBody(RequestBody):
    """Machines of a token: by `ids`, by `labels`, or all."""

    ids: list[str] = Field(default_factory=list)
    labels: dict[str, str] = Field(default_factory=dict)
    is_all: bool = Field(default=False, alias="all")


class LeaseBody(RequestBody):
    """`abandoned` are the keys of creations whose answer the client never got."""

    abandoned: list[str] = Field(default_factory=list)


class CommandBody(RequestBody):
    """A command; the fields are those of `Machine.exec`, with `stdin_base64` for any bytes."""

    command: str | list[str] = Field(default="")
    cwd: str = "/work"
    env: dict[str, str] = Field(default_factory=dict)
    stdin: str | None = None
    stdin_base64: str | None = None
    timeout_s: Seconds | None = 30.0
    max_output_bytes: int = Field(default=1 << 20, ge=0)
    stream: Literal["no", "result", "chunks"] = "no"

    def spec(self, max_output_mb: int) -> CommandSpec:
        """Raises: UserError."""
        if not self.command:
            raise UserError("command must be a string for `sh -c`, or a list of strings; it is empty")
        if self.max_output_bytes > max_output_mb << 20:
            raise UserError(f"max_output_bytes is {self.max_output_bytes}; it must be from 0 to {max_output_mb << 20}")
        return CommandSpec.make(self.command, self.cwd, self.env, self._stdin(), self.timeout_s, self.max_output_bytes)

    def _stdin(self) -> bytes | None:
        if self.stdin_base64 is None:
            return None if self.stdin is None else self.stdin.encode("utf-8", "surrogateescape")
        try:
            return base64.b64decode(self.stdin_base64, validate=True)
        except binascii.Error as error:
            raise UserError(f"stdin_base64 is not base64: {error}") from None


class JobBody(CommandBody):
    """A command in the background, which nothing ends unless it is told."""

    timeout_s: Seconds | None = None
    stream: Literal["no"] = "no"


def _minutes(value: Any) -> Any:
    if value == 0:
        raise ValueError("must be negative for infinite or at least 1")
    return value


Amount = Annotated[float, Field(gt=0, le=1e6)]
Minutes = Annotated[int, BeforeValidator(_minutes)]


class PrimeBody(RequestBody):
    """Of the `prime` clients, which may send fields that mean nothing here."""

    model_config = ConfigDict(extra="ignore", strict=True)


class PrimeSandboxBody(PrimeBody):
    """A sandbox to make."""

    name: str = "sandbox"
    docker_image: str = Field(default="", max_length=300)
    start_command: str = ""
    cpu_cores: Amount = 1.0
    memory_gb: Amount = 1.0
    disk_size_gb: Amount = 10.0
    timeout_minutes: Minutes | None = 60
    idle_timeout_minutes: Minutes | None = None
    environment_vars: dict[str, str] = Field(default_factory=dict)
    secrets: dict[str, str] = Field(default_factory=dict)
    labels: list[str] = Field(default_factory=list)
    idempotency_key: str = ""
    vm: bool = False


class PrimePortBody(PrimeBody):
    """A port to open to others."""

    port: int
    name: str | None = None
    protocol: str = "HTTP"


class PrimeSelectionBody(PrimeBody):
    """Sandboxes, by `sandbox_ids` or `labels`."""

    sandbox_ids: list[str] = Field(default_factory=list)
    labels: list[str] = Field(default_factory=list)


class PrimeCommandBody(PrimeBody):
    """A shell command."""

    command: str = ""
    working_dir: str = ""
    env: dict[str, str] = Field(default_factory=dict)
    timeout: Seconds | None = 300.0


class Query(BaseModel):
    """What stands behind the question mark; all of it is text there."""

    model_config = ConfigDict(extra="ignore")

    @classmethod
    def read(cls, connection: HTTPConnection) -> Self:
        """Raises: UserError that names the field."""
        return _checked(cls, dict(connection.query_params))


async def read_body(request: Request, model: type[M]) -> M:
    """The JSON body. Raises: UserError that names the field, HttpError for a body that is none or too long."""
    return _checked(model, await read_fields(request))


async def read_fields(request: Request) -> dict[str, Any]:
    """The JSON body as it came; no body is an empty object."""
    return (await read_digested(request)).fields


class ReadBody(NamedTuple):
    """A JSON object, the hash of its bytes, and whether it is so long that it is to be handled in a thread."""

    fields: dict[str, Any]
    digest: str
    is_long: bool


async def read_digested(request: Request) -> ReadBody:
    """The same, with what tells it from other bodies."""
    service = service_of(request)
    config = service.config
    body = await bodies.read_body(request, max_bytes=config.max_json_mb << 20, stall_s=config.stall_s)
    if len(body) <= SHORT_BYTES:
        return ReadBody(bodies.json_object(body, empty={}), hashlib.sha256(body).hexdigest(), False)
    fields = await service.long_bodies.fields(holder_of(request).name, body)
    return ReadBody(fields, (await asyncio.to_thread(hashlib.sha256, body)).hexdigest(), True)


def _checked(model: type[M], fields: dict[str, Any]) -> M:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        place, message = first_fault(error.errors(include_url=False))
        name = place.partition(".")[0]
        if error.errors()[0]["type"] == "extra_forbidden":
            raise UserError(f"there is no field {name!r}; there are {', '.join(sorted(model.model_fields))}") from None
        given = f" is {str(fields[name])[:_SHOWN]!r}" if name in fields else ""
        raise UserError(f"{name}{given}: {message}" if name else message) from None
