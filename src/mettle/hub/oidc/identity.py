"""What an ID token says of a person, once it has been checked.

Invariants: a token counts only when its signature is by a key of the provider and an algorithm of the allow-list, and
when it is for us, of now, and of the sign-in that asked for it; an e-mail that the provider has not verified is no
e-mail here. Source: OpenID Connect Core 1.0, section 3.1.3.7.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mettle.errors import UserError

if TYPE_CHECKING:
    from joserfc.jwk import Key

MAX_SUBJECT: Final = 255
MIN_RSA_BITS: Final = 2048
_KINDS: Final = {"RS": "RSA", "PS": "RSA", "ES": "EC"}


@dataclass(frozen=True, slots=True)
class ProviderIdentity:
    """Who a provider says that somebody is. `subject` is theirs for good; `email` is empty unless it is verified."""

    issuer: str
    subject: str
    email: str = ""
    name: str = ""
    username: str = ""

    @property
    def domain(self) -> str:
        """Of the e-mail, in small letters."""
        return self.email.rpartition("@")[2].lower()


def header_of(token: str) -> Mapping[str, Any]:
    """The header of a signed token, of which nothing is known yet. Raises: UserError when it is none."""
    from joserfc import jws
    from joserfc.errors import JoseError

    try:
        header: Mapping[str, Any] = jws.extract_compact(token.encode("ascii")).headers()
        return header
    except (JoseError, ValueError) as error:
        raise UserError("the provider's ID token cannot be read") from error


def key_for(header: Mapping[str, Any], keys: Sequence[Key], algorithms: Sequence[str]) -> Key | None:
    """The provider's key that a token says it is signed with; None when it is not among those known.

    Raises: UserError for an algorithm that is not allowed, `none` among them.
    """
    algorithm = header.get("alg")
    if algorithm not in algorithms:
        raise UserError(
            f"the provider's ID token is signed by {algorithm!r:.40}; this Hub takes {', '.join(algorithms)}"
        )
    kind = _KINDS[str(algorithm)[:2]]
    fitting = [
        key for key in keys
        if key.key_type == kind and key.get("use") in (None, "sig") and key.get("alg") in (None, algorithm)
    ]  # fmt: skip
    if "kid" in header:
        return next((key for key in fitting if key.kid == header["kid"]), None)
    return fitting[0] if len(fitting) == 1 else None


def is_strong(told: Mapping[str, Any]) -> bool:
    """False for an RSA key, as a key set tells of it, that is too short."""
    if told.get("kty") != "RSA":
        return True
    modulus = str(told.get("n", ""))
    try:
        data = base64.urlsafe_b64decode(modulus + "=" * (-len(modulus) % 4))
    except ValueError:
        return False
    return int.from_bytes(data, "big").bit_length() >= MIN_RSA_BITS


def checked_claims(
    token: str, key: Key, *, issuer: str, client_id: str, nonce: str, algorithms: Sequence[str], leeway_s: int,
    now: Callable[[], float] = time.time,
) -> dict[str, Any]:  # fmt: skip
    """What a token says. Raises: UserError for one that is not the provider's, not for us, or not of this sign-in."""
    from joserfc import jwt
    from joserfc.errors import ClaimError, JoseError

    rules = jwt.JWTClaimsRegistry(
        lambda: int(now()), leeway_s, iss={"essential": True, "value": issuer}, sub={"essential": True},
        aud={"essential": True, "value": client_id}, exp={"essential": True}, iat={"essential": True},
        nonce={"essential": True, "value": nonce},
    )  # fmt: skip
    try:
        claims = dict(jwt.decode(token, key, algorithms=list(algorithms)).claims)
        rules.validate(claims)
    except ClaimError as error:
        raise UserError(f"the provider's ID token is not for this sign-in: its {error.claim!r} is wrong") from error
    except (JoseError, ValueError, TypeError) as error:
        raise UserError("the provider's ID token is not signed by the provider") from error
    audience = claims["aud"]
    party = claims.get("azp")
    if (isinstance(audience, list) and len(audience) > 1 and party is None) or party not in (None, client_id):
        raise UserError("the provider's ID token is not for this sign-in: its 'azp' is wrong")
    if not 0 < len(claims["sub"]) <= MAX_SUBJECT:
        raise UserError("the provider's ID token is not for this sign-in: its 'sub' is wrong")
    return claims


def identity_of(claims: Mapping[str, Any], more: Mapping[str, Any]) -> ProviderIdentity:
    """Who the claims of a token name; `more` is what the provider's userinfo adds."""
    source = claims if claims.get("email") else more
    # Some providers write the boolean as a word.
    is_verified = source.get("email_verified") is True or source.get("email_verified") == "true"
    email = source.get("email")
    is_one = isinstance(email, str) and is_verified and email.count("@") == 1 and len(email) <= 200
    told = {**more, **claims}
    return ProviderIdentity(
        claims["iss"], claims["sub"], email=str(email) if is_one else "", name=_word(told.get("name")),
        username=_word(told.get("preferred_username")) or _word(told.get("nickname")),
    )  # fmt: skip


def _word(value: Any) -> str:
    return value.strip()[:100] if isinstance(value, str) else ""
