"""A hosted evaluation: from the field's body to the settings of `mettle eval run` on this machine.

The model is one at an endpoint, one that the operator offers, or a version of a hosted run of one's own. Invariants: no
path, command or variable of the operator's is named by who submits; a key for an endpoint comes from the secrets of the
one whose evaluation it is.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field
from sqlalchemy import Connection

from mettle.clients.endpoints import PROVIDERS
from mettle.hub.caller import Caller
from mettle.hub.lab import Lab
from mettle.hub.routes.json_bodies import HubRequest
from mettle.hub.secrets import store
from mettle.hub.serving.models import find_model
from mettle.hub.training.submission import local_name
from mettle.web.problems import HttpError

_UNHEARD: Final = frozenset({"verbose", "allow_sandbox_access", "allow_instances_access", "allow_tunnel_access"})


class EvaluationConfig(HubRequest):
    """`eval_config` of the field. What is not here, and would change the result, is refused by name."""

    model_config = ConfigDict(extra="allow")

    num_examples: int = Field(default=5, ge=-1, le=100_000)
    rollouts_per_example: int = Field(default=3, ge=1, le=2048)
    env_args: dict[str, Any] = Field(default_factory=dict)
    extra_env_kwargs: dict[str, Any] = Field(default_factory=dict)
    sampling_args: dict[str, Any] = Field(default_factory=dict)
    max_concurrent: int = Field(default=32, ge=1, le=1024)
    max_retries: int = Field(default=3, ge=0, le=20)
    independent_scoring: bool = False
    shuffle: bool = False
    shuffle_seed: int | None = Field(default=None, ge=0)
    timeout: float | None = Field(default=None, gt=0)
    state_columns: list[str] = Field(default_factory=list, max_length=50)
    api_client_type: str | None = Field(default=None, max_length=40)
    api_base_url: str | None = Field(default=None, max_length=500)
    api_key_var: str | None = Field(default=None, max_length=255)
    provider: str | None = Field(default=None, max_length=60)


class HostedEvaluation(HubRequest):
    """The body of `POST /hosted-evaluations`; `environment` names one where there is no id."""

    environment_ids: list[str] = Field(default_factory=list, max_length=1)
    environment: str = Field(default="", max_length=200)
    inference_model: str = Field(min_length=1, max_length=200)
    eval_config: EvaluationConfig = Field(default_factory=EvaluationConfig)
    name: str | None = Field(default=None, max_length=200)
    team_id: str | None = None
    is_public: bool = False
    override_card: bool = False


@dataclass(frozen=True, slots=True)
class EvaluationOrder:
    """What the worker runs: settings of one evaluation; without a model among them, a run's directory and version."""

    settings: dict[str, Any]
    version: tuple[str, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As the job keeps it."""
        return {"settings": self.settings, "version": list(self.version) if self.version else None}


def order_for(
    c: Connection, lab: Lab, caller: Caller, owner_id: str, asked: HostedEvaluation, environment: str
) -> EvaluationOrder:
    """Check it. Raises: HttpError 422 for what is not offered, cannot be reached, or lacks its key."""
    told = asked.eval_config
    unknown = sorted(set(told.model_extra or {}) - _UNHEARD)
    if unknown:
        raise HttpError(
            422, f"eval_config.{unknown[0][:60]} is not offered for hosted evaluations here", param=unknown[0]
        )
    if told.num_examples == 0:
        raise HttpError(422, "eval_config.num_examples must be at least 1, or -1 for all", param="num_examples")
    settings: dict[str, Any] = {
        "env_id": local_name(environment), "num_examples": told.num_examples,
        "rollouts_per_example": told.rollouts_per_example, "max_concurrent": told.max_concurrent,
        "max_retries": told.max_retries, "independent_scoring": told.independent_scoring,
    }  # fmt: skip
    for name in ("env_args", "extra_env_kwargs", "sampling_args", "state_columns", "timeout", "api_client_type"):
        if getattr(told, name):
            settings[name] = getattr(told, name)
    if told.shuffle:
        settings |= {"shuffle": True, "shuffle_seed": told.shuffle_seed or 0}
    if told.api_base_url or told.provider:
        _at_an_endpoint(c, lab, owner_id, asked, settings)
        return EvaluationOrder(settings)
    if told.api_key_var:
        raise HttpError(422, "api_key_var is for an endpoint; say which with api_base_url or provider")
    return _on_this_machine(c, lab, caller, asked.inference_model, settings)


def _at_an_endpoint(c: Connection, lab: Lab, owner_id: str, asked: HostedEvaluation, settings: dict[str, Any]) -> None:
    told = asked.eval_config
    settings["model"] = asked.inference_model
    key = told.api_key_var
    if told.provider:
        known = PROVIDERS.get(told.provider)
        if known is None:
            raise HttpError(422, f"there is no provider {told.provider!r}; there are {', '.join(PROVIDERS)}")
        settings["provider"], key = told.provider, key or known.key
    if told.api_base_url:
        settings["api_base_url"] = _checked_address(told.api_base_url)
    if key:
        if not any(each.name == key for each in _secrets(c, owner_id, settings["env_id"])):
            raise HttpError(
                422, f"the key {key[:60]} is no secret of yours here; `mettle secret set {key[:60]}` makes it one",
                param="api_key_var",
            )  # fmt: skip
        settings["api_key_var"] = key


def _secrets(c: Connection, owner_id: str, environment: str) -> list[store.StoredSecret]:
    return store.secrets_for(c, owner_id, [environment])


def _checked_address(url: str) -> str:
    """Raises: HttpError 422 for what is no address of an endpoint, or a host's own metadata service."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_good = False
    if not is_good or parts.username or parts.password:
        raise HttpError(422, f"{url[:100]!r} is no address of an endpoint; write it like https://host/v1")
    try:
        is_link_local = ipaddress.ip_address(parts.hostname or "").is_link_local
    except ValueError:
        is_link_local = False
    if is_link_local:
        raise HttpError(422, f"{parts.hostname} is no place for an endpoint: such addresses are the host's own")
    return url


def _on_this_machine(c: Connection, lab: Lab, caller: Caller, model: str, settings: dict[str, Any]) -> EvaluationOrder:
    try:
        found = find_model(c, lab, caller, model)
    except HttpError as error:  # here it is one field of several, and not what is asked
        raise HttpError(422, f"{error}; or name an endpoint with api_base_url", param="inference_model") from None
    if found.run is None:
        return EvaluationOrder({**settings, "model": str(found.path)})
    return EvaluationOrder(settings, (str(found.run), found.version))
