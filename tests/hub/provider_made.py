"""A small OpenID Connect provider on loopback: discovery, authorize, token, keys, userinfo.

It holds its clients to the protocol as a real one does (registered address, PKCE, a code once), and signs by itself,
without the library that the Hub reads with. A test makes it misbehave by `claims`, `sign` and `keys`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from tests.serving import app_on_a_thread

CLIENT, SECRET = "the-hub", "s3cret:/ with signs"


def b64(data: bytes | str) -> str:
    raw = data.encode() if isinstance(data, str) else data
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _int64(value: int, size: int) -> str:
    return b64(value.to_bytes(size, "big"))


class SigningKey:
    """A key of the provider, RSA or of a curve."""

    def __init__(self, algorithm: str, kid: str, *, bits: int = 2048) -> None:
        self.algorithm, self.kid = algorithm, kid
        self.private: Any = (
            rsa.generate_private_key(public_exponent=65537, key_size=bits)
            if algorithm == "RS256"
            else ec.generate_private_key(ec.SECP256R1())
        )

    def jwk(self) -> dict[str, Any]:
        numbers = self.private.public_key().public_numbers()
        about = {"kid": self.kid, "use": "sig", "alg": self.algorithm}
        if self.algorithm == "RS256":
            size = (numbers.n.bit_length() + 7) // 8
            return {**about, "kty": "RSA", "n": _int64(numbers.n, size), "e": _int64(numbers.e, 3)}
        return {**about, "kty": "EC", "crv": "P-256", "x": _int64(numbers.x, 32), "y": _int64(numbers.y, 32)}

    def sign(self, claims: dict[str, Any], **header: Any) -> str:
        told = {"alg": self.algorithm, "kid": self.kid, **header}
        signed = f"{b64(json.dumps(told))}.{b64(json.dumps(claims))}".encode()
        if self.algorithm == "RS256":
            signature = self.private.sign(signed, padding.PKCS1v15(), hashes.SHA256())
        else:
            r, s = decode_dss_signature(self.private.sign(signed, ec.ECDSA(hashes.SHA256())))
            signature = r.to_bytes(32, "big") + s.to_bytes(32, "big")
        return f"{signed.decode()}.{b64(signature)}"

    def public_pem(self) -> bytes:
        return self.private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def unsigned(claims: dict[str, Any], algorithm: str = "none") -> str:
    return f"{b64(json.dumps({'alg': algorithm}))}.{b64(json.dumps(claims))}."


def signed_with_secret(claims: dict[str, Any], secret: bytes, kid: str) -> str:
    """By HS256: with the client's secret, or with a public key taken for one."""
    signed = f"{b64(json.dumps({'alg': 'HS256', 'kid': kid}))}.{b64(json.dumps(claims))}"
    return f"{signed}.{b64(hmac.digest(secret, signed.encode(), 'sha256'))}"


@cache
def rsa_key(kid: str = "one", bits: int = 2048) -> SigningKey:
    """Made once: it takes a tenth of a second."""
    return SigningKey("RS256", kid, bits=bits)


class MadeProvider:
    """The provider, and who signs in there next (`user`)."""

    def __init__(self) -> None:
        self.url = ""
        self.user: dict[str, Any] = {
            "sub": "u-1",
            "email": "dora@example.org",
            "email_verified": True,
            "name": "Dora D",
        }
        self.keys = [SigningKey("ES256", "curve")]
        self.codes: dict[str, dict[str, str]] = {}
        self.metadata: dict[str, Any] = {}
        self.claims = lambda claims: claims
        self.sign = lambda claims: self.keys[-1].sign(claims)
        self.userinfo: dict[str, Any] = {}
        self.redirect_url = "http://hub.test/signin/oidc/back"
        self.num_asked: dict[str, int] = {}
        self.has_secret = True
        self.app = Starlette(
            routes=[
                Route("/.well-known/openid-configuration", self._discovery),
                Route("/authorize", self._authorize),
                Route("/token", self._token, methods=["POST"]),
                Route("/keys", self._jwks),
                Route("/userinfo", self._userinfo),
            ]
        )

    def _count(self, what: str) -> None:
        self.num_asked[what] = self.num_asked.get(what, 0) + 1

    async def _discovery(self, request: Request) -> Response:
        self._count("discovery")
        told = {
            "issuer": self.url, "authorization_endpoint": f"{self.url}/authorize", "token_endpoint": f"{self.url}/token",
            "jwks_uri": f"{self.url}/keys", "userinfo_endpoint": f"{self.url}/userinfo",
            "authorization_response_iss_parameter_supported": True,
        }  # fmt: skip
        return JSONResponse({**told, **self.metadata})

    async def _authorize(self, request: Request) -> Response:
        asked = dict(request.query_params)
        assert asked["client_id"] == CLIENT
        assert asked["redirect_uri"] == self.redirect_url, asked["redirect_uri"]
        assert asked["response_type"] == "code"
        assert "openid" in asked["scope"].split()
        assert asked["code_challenge_method"] == "S256"
        code = secrets.token_urlsafe(16)
        self.codes[code] = asked
        sent = urlencode({"code": code, "state": asked["state"], "iss": self.url})
        return RedirectResponse(f"{asked['redirect_uri']}?{sent}", status_code=302)

    async def _token(self, request: Request) -> Response:
        form = dict(parse_qsl((await request.body()).decode()))
        asked = self.codes.pop(form["code"], None)
        if not self._is_client(request, form):
            return JSONResponse({"error": "invalid_client"}, status_code=401)
        challenge = b64(hashlib.sha256(form["code_verifier"].encode()).digest())
        if asked is None or form["redirect_uri"] != asked["redirect_uri"] or challenge != asked["code_challenge"]:
            return JSONResponse({"error": "invalid_grant"}, status_code=400)
        now = int(time.time())
        told = {"iss": self.url, "aud": CLIENT, "iat": now, "exp": now + 300, "nonce": asked["nonce"], **self.user}
        token = self.sign(self.claims(told))
        return JSONResponse({"access_token": "opens-userinfo", "token_type": "Bearer", "id_token": token})

    def _is_client(self, request: Request, form: dict[str, str]) -> bool:
        if not self.has_secret:
            return form.get("client_id") == CLIENT and "authorization" not in request.headers
        if self.metadata.get("token_endpoint_auth_methods_supported") == ["client_secret_post"]:
            return (form.get("client_id"), form.get("client_secret")) == (CLIENT, SECRET)
        word = base64.b64decode(request.headers.get("authorization", "").removeprefix("Basic ")).decode()
        return word.count(":") == 1 and tuple(map(unquote, word.split(":"))) == (CLIENT, SECRET)

    async def _jwks(self, request: Request) -> Response:
        self._count("keys")
        others = [{"kty": "OKP", "crv": "Future", "kid": "x"}, {"kty": "oct", "k": b64("k"), "kid": "s"}, "nonsense"]
        return JSONResponse({"keys": [*others, *(key.jwk() for key in self.keys)]})

    async def _userinfo(self, request: Request) -> Response:
        assert request.headers["authorization"] == "Bearer opens-userinfo"
        return JSONResponse({"sub": self.user["sub"], **self.userinfo})


@contextmanager
def made_provider() -> Iterator[MadeProvider]:
    made = MadeProvider()
    with app_on_a_thread(made.app) as url:
        made.url = url
        yield made
