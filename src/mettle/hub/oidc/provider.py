"""The provider of identities: what it says of itself, its keys, and a code exchanged for who somebody is.

Parts: `OidcProvider`. What the provider says is kept for an hour, and its keys are asked for again when a token names
one that is not known, at most once in `KEYS_AGAIN_S`. Invariants: nothing is asked of the provider before somebody
wants to sign in; no answer leads anywhere else (redirects are not followed), and none is read without an end.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode, urlsplit

from mettle.errors import ServiceError, UserError
from mettle.hub.oidc.identity import ProviderIdentity, checked_claims, header_of, identity_of, is_strong, key_for
from mettle.web.doors import is_loopback

if TYPE_CHECKING:
    import httpx
    from joserfc.jwk import Key

    from mettle.hub.oidc.config import OidcConfig

METADATA: Final = "/.well-known/openid-configuration"
FRESH_S: Final = 3600.0
KEYS_AGAIN_S: Final = 30.0
FAILED_S: Final = 5.0
"""One that does not answer is not asked again before; sign-ins that wait for it would take all threads."""
ANSWER_S: Final = 10.0
MAX_ANSWER_BYTES: Final = 1 << 20
_ENDPOINTS: Final = ("authorization_endpoint", "token_endpoint", "jwks_uri")


class OidcProvider:
    """One provider. Raises from each call: ServiceError when it does not answer as one, UserError for a refusal."""

    def __init__(
        self,
        config: OidcConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.config = config
        self._clock, self._now = clock, now
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._http: httpx.Client | None = None
        self._told: tuple[float, dict[str, Any]] | None = None
        self._keys: tuple[float, list[Key]] | None = None
        self._failed: tuple[float, ServiceError] | None = None

    def close(self) -> None:
        """Let go of its connections."""
        if self._http is not None:
            self._http.close()

    def sign_in_url(self, redirect_url: str, *, state: str, nonce: str, verifier: str) -> str:
        """Where a browser is sent to sign in."""
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        asked = {
            "response_type": "code", "client_id": self.config.client_id, "redirect_uri": redirect_url,
            "scope": " ".join(self.config.scopes), "state": state, "nonce": nonce, "code_challenge": challenge,
            "code_challenge_method": "S256",
        }  # fmt: skip
        endpoint = self._metadata()["authorization_endpoint"]
        return f"{endpoint}{'&' if urlsplit(endpoint).query else '?'}{urlencode(asked)}"

    def check_sender(self, issuer: str | None) -> None:
        """Refuse an answer of another provider, where they name themselves (RFC 9207). Raises: UserError."""
        is_named = bool(self._metadata().get("authorization_response_iss_parameter_supported"))
        if issuer != self.config.issuer and (issuer is not None or is_named):
            raise UserError(f"this answer is not of the provider {self.config.issuer}; begin again")

    def identity(self, code: str, *, redirect_url: str, nonce: str, verifier: str) -> ProviderIdentity:
        """Who signed in, for the code that their browser brought."""
        answer = self._exchange(code, redirect_url, verifier)
        token, config = answer.get("id_token"), self.config
        if not isinstance(token, str):
            raise ServiceError(f"the provider {config.issuer} sent no ID token")
        header = header_of(token)
        key = key_for(header, self._known_keys(), config.algorithms)
        if key is None:
            key = key_for(header, self._known_keys(is_stale=True), config.algorithms)
        if key is None:
            raise UserError("the provider's ID token is signed by a key that the provider does not list")
        claims = checked_claims(
            token, key, issuer=config.issuer, client_id=config.client_id, nonce=nonce, algorithms=config.algorithms,
            leeway_s=config.leeway_s, now=self._now,
        )  # fmt: skip
        return identity_of(claims, {} if claims.get("email") else self._userinfo(answer, claims["sub"]))

    def _exchange(self, code: str, redirect_url: str, verifier: str) -> dict[str, Any]:
        told, config = self._metadata(), self.config
        form = {
            "grant_type": "authorization_code", "code": code, "redirect_uri": redirect_url, "code_verifier": verifier,
        }  # fmt: skip
        headers = {}
        methods = told.get("token_endpoint_auth_methods_supported", ["client_secret_basic"])
        if config.secret and "client_secret_basic" in methods:
            words = f"{quote(config.client_id, safe='')}:{quote(config.secret, safe='')}"
            headers["Authorization"] = f"Basic {base64.b64encode(words.encode()).decode()}"
        else:
            form["client_id"] = config.client_id
            if config.secret:
                form["client_secret"] = config.secret
        return self._ask("POST", told["token_endpoint"], data=form, headers=headers)

    def _userinfo(self, answer: dict[str, Any], subject: str) -> dict[str, Any]:
        """What providers say that leave the e-mail out of the token."""
        url, token = self._metadata().get("userinfo_endpoint"), answer.get("access_token")
        if not self._is_good(url) or not isinstance(token, str):
            return {}
        found = self._ask("GET", str(url), headers={"Authorization": f"Bearer {token}"})
        return found if found.get("sub") == subject else {}

    def _metadata(self) -> dict[str, Any]:
        with self._lock:
            if self._told is not None and self._clock() - self._told[0] <= FRESH_S:
                return self._told[1]
            if self._failed is not None and self._clock() - self._failed[0] < FAILED_S:
                raise ServiceError(str(self._failed[1]))
            try:
                self._told = (self._clock(), self._discovered())
            except ServiceError as error:
                self._failed = (self._clock(), error)
                raise
            return self._told[1]

    def _discovered(self) -> dict[str, Any]:
        found = self._ask("GET", self.config.issuer.rstrip("/") + METADATA)
        if found.get("issuer") != self.config.issuer:
            raise ServiceError(
                f"the provider calls itself {found.get('issuer')!r:.200}, and the Hub {self.config.issuer!r};"
                " write `issuer` as the provider does"
            )
        for name in _ENDPOINTS:
            if not self._is_good(found.get(name)):
                raise ServiceError(f"the provider {self.config.issuer} names no {name} by https")
        return found

    def _known_keys(self, *, is_stale: bool = False) -> list[Key]:
        url = self._metadata()["jwks_uri"]
        with self._lock:
            limit = KEYS_AGAIN_S if is_stale else FRESH_S
            if self._keys is None or self._clock() - self._keys[0] >= limit:
                found = self._ask("GET", url).get("keys")
                self._keys = (self._clock(), _keys_in(found if isinstance(found, list) else []))
            return self._keys[1]

    def _is_good(self, url: Any) -> bool:
        """By TLS, or on loopback where the issuer is there, too."""
        if not isinstance(url, str):
            return False
        parts, own = urlsplit(url), urlsplit(self.config.issuer)
        is_local = own.scheme == "http" and parts.scheme == "http" and is_loopback(parts.hostname or "")
        return bool(parts.hostname) and (parts.scheme == "https" or is_local)

    def _client(self) -> httpx.Client:
        """Made once: reading the certificates of all authorities takes as long as a request."""
        import httpx

        with self._making:
            if self._http is None:
                self._http = httpx.Client(timeout=ANSWER_S, follow_redirects=False, headers={"User-Agent": "mettle"})
            return self._http

    def _ask(self, method: str, url: str, **request: Any) -> dict[str, Any]:
        import httpx

        try:
            with self._client().stream(method, url, **request) as answer:
                body = _bounded(answer)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            what = str(error) or type(error).__name__
            raise ServiceError(
                f"the provider {self.config.issuer} does not answer ({what}); try again later"
            ) from error
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if answer.status_code in (400, 401, 403) and isinstance(found, dict) and method == "POST":
            said = str(found.get("error_description") or found.get("error") or answer.status_code)
            raise UserError(f"the provider refused this sign-in ({said[:200]}); begin again")
        if answer.status_code != 200 or not isinstance(found, dict):
            raise ServiceError(f"the provider {self.config.issuer} answers {answer.status_code}, and no JSON object")
        return found


def _bounded(answer: httpx.Response) -> bytes:
    body = bytearray()
    for piece in answer.iter_bytes():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise ServiceError(f"the provider's answer is longer than {MAX_ANSWER_BYTES:,} bytes")
    return bytes(body)


def _keys_in(found: list[Any]) -> list[Key]:
    """Those of a key set that sign ID tokens. Others may be of kinds that nothing here knows."""
    from joserfc.errors import JoseError
    from joserfc.jwk import JWKRegistry

    keys = []
    for each in found[:100]:
        if not isinstance(each, dict) or each.get("kty") not in ("RSA", "EC") or not is_strong(each):
            continue
        try:
            keys.append(JWKRegistry.import_key(each))
        except (JoseError, ValueError, TypeError, KeyError):
            continue
    return keys
