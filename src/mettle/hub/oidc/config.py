"""Settings of the sign-in through a provider of identities."""

from __future__ import annotations

import os
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from mettle.web.doors import is_loopback

Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512"]


class OidcConfig(BaseModel):
    """An OpenID Connect provider through which people sign in, as it is registered there."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    issuer: str = ""
    """Address of the provider, exactly as its tokens name it, as `https://accounts.google.com`; empty: none."""

    client_id: str = ""
    """What this Hub is called there."""

    client_secret: SecretStr | None = None
    """The secret that goes with it; METTLE_OIDC_CLIENT_SECRET goes before it. None for a public client (PKCE alone)."""

    name: str = Field(default="", max_length=60)
    """What the button on the sign-in page says; empty is the host of the issuer."""

    redirect_url: str = ""
    """Where the provider sends people back to, as it is registered there: the Hub's address and `/signin/oidc/back`.
    Empty is the address that the browser came by."""

    scopes: list[str] = ["openid", "email", "profile"]
    """What is asked of the provider; `openid` has to be among it."""

    new_people: Literal["nobody", "domains", "everybody"] = "nobody"
    """Who gets an account at the first sign-in: nobody, those with a verified e-mail at one of `domains`, or everybody
    whom the provider signs in."""

    domains: list[str] = []
    """Domains of e-mails for `new_people = "domains"`. A domain below one of them is another domain."""

    link_by_email: bool = False
    """Whether a first sign-in with a verified e-mail opens the account that has this e-mail, where exactly one has it.
    People enter the e-mails of their accounts by themselves: what opened the account before is closed then."""

    algorithms: list[Algorithm] = ["RS256", "ES256"]
    """Signatures that are taken. Unsigned tokens, and those signed with the client's secret, never are."""

    leeway_s: int = Field(default=60, ge=0, le=600)
    """Seconds that the provider's clock may differ from ours."""

    @field_validator("issuer", "redirect_url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        if not url:
            return url
        parts = urlsplit(url)
        if not parts.hostname or parts.username or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is no address; write it like https://id.example.org")
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname)):
            raise ValueError(f"{url!r} has to begin with https://; plain http is for loopback alone")
        return url

    @field_validator("domains")
    @classmethod
    def _are_domains(cls, domains: list[str]) -> list[str]:
        found = [domain.strip().lower() for domain in domains]
        wrong = [domain for domain in found if not domain or "@" in domain or "." not in domain]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no domain; write it like example.org")
        return found

    @model_validator(mode="after")
    def _is_whole(self) -> OidcConfig:
        if bool(self.issuer) != bool(self.client_id):
            raise ValueError("issuer and client_id go together: give both, or none for no such sign-in")
        if "openid" not in self.scopes:
            raise ValueError("scopes need 'openid', or the provider sends no identity")
        if (self.new_people == "domains") != bool(self.domains):
            raise ValueError('domains and new_people = "domains" go together: give both, or neither')
        if not self.algorithms:
            raise ValueError("algorithms cannot be empty: name the signatures to take, for example RS256")
        return self

    @property
    def secret(self) -> str:
        """The client's secret; the environment goes before the file."""
        return os.environ.get("METTLE_OIDC_CLIENT_SECRET") or (
            self.client_secret.get_secret_value() if self.client_secret else ""
        )

    @property
    def label(self) -> str:
        """What people call the provider."""
        return self.name or urlsplit(self.issuer).hostname or self.issuer
